"""`python -m kvstore` over the real Mooncake and a real Valkey, through its gRPC client and an attached compute process' eyes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError

import numpy as np
import pytest
import redis

from kvstore.block import BlockHash, hash_blocks, root_hash
from kvstore.client import BlockRef, StoreClient, StoreNodeClient
from kvstore.layout import KVLayout
from kvstore.pool import ReserveReply, ReserveResult
from kvstore.transfer.base import PutStatus
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.config import free_port
from moontide.errors import BadRequest, BlockMissing, ConfigError, NodeLost
from moontide.registry import NODE_KEY_PREFIX, NodeRecord
from tests.store_processes import Master, master, running, valkey, wait_until

NODE_ID = "store-0"
POOL_BYTES = 16 << 20
CAPACITY_BYTES = int(POOL_BYTES * 0.85)
LAYOUT = KVLayout(
    model_fingerprint="tiny",
    num_layers=4,
    num_planes=2,
    num_kv_heads=4,
    head_dim=64,
    dtype="float32",
    block_tokens=64,
    layer_group=2,
)
NUM_BLOCKS = CAPACITY_BYTES // LAYOUT.block_bytes
ROOT = root_hash(LAYOUT.digest(), "")


@dataclass
class Backend:
    master: Master
    registry_url: str


@dataclass
class Service:
    record: NodeRecord
    client_address: str
    master_http: str
    process: subprocess.Popen[bytes]

    def ready(self) -> int:
        try:
            with urllib.request.urlopen(f"http://{self.record.http_address}/ready", timeout=5) as reply:
                return int(reply.status)
        except HTTPError as error:
            return error.code
        except OSError:
            return 0


@contextmanager
def backend() -> Iterator[Backend]:
    with master() as the_master, valkey() as url:
        yield Backend(the_master, url)


def arguments(to: Backend, *, client_port: int, node_id: str = NODE_ID) -> list[str]:
    settings = {
        "node.node_id": node_id,
        "registry.url": to.registry_url,
        "registry.heartbeat_s": 0.2,
        "registry.lease_s": 1.0,
        "kvstore.master_rpc": to.master.rpc,
        "kvstore.master_http": to.master.http,
        "kvstore.client_port": client_port,
        "kvstore.pool_bytes": POOL_BYTES,
    }
    return [
        sys.executable,
        "-m",
        "kvstore",
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
    ]


def find_record(to: Backend, node_id: str) -> NodeRecord | None:
    text = redis.Redis.from_url(to.registry_url, decode_responses=True).get(NODE_KEY_PREFIX + node_id)
    return NodeRecord.from_json(str(text)) if text else None


@contextmanager
def service(
    to: Backend,
    *,
    client_port: int | None = None,
    not_boot: str = "",
    settings: Sequence[str] = (),
    node_id: str = NODE_ID,
) -> Iterator[Service]:
    port = client_port or free_port()
    sets = [part for setting in settings for part in ("--set", setting)]
    with running([*arguments(to, client_port=port, node_id=node_id), *sets]) as process:

        def announced() -> bool:
            assert process.poll() is None, "the service ended while it started"
            record = find_record(to, node_id)
            return record is not None and record.boot_id != not_boot

        wait_until(announced, what="the registry record")
        record = find_record(to, node_id)
        assert record is not None
        yield Service(record, f"127.0.0.1:{port}", to.master.http, process)


@pytest.fixture(scope="module")
def the_backend() -> Iterator[Backend]:
    with backend() as made:
        yield made


@pytest.fixture(scope="module")
def shared(the_backend: Backend) -> Iterator[Service]:
    with service(the_backend) as made:
        yield made


class Writer:
    """What a stage does: reserve, put, seal, release."""

    def __init__(self, of: Service) -> None:
        self.node_id = of.record.node_id
        self.node = StoreNodeClient(of.record.address)
        self.transfer = MooncakeTransfer(
            client_address=of.client_address, master_http=of.master_http, arena_bytes=2 * LAYOUT.object_bytes(0)
        )
        self.arena = self.transfer.allocate(2 * LAYOUT.object_bytes(0))
        self.client = StoreClient(self.transfer, LAYOUT)

    async def reserve(
        self, request_id: str, hashes: list[BlockHash], *, partial: bool = False, lease_s: float = 30
    ) -> ReserveReply:
        return await self.node.reserve(
            request_id=request_id,
            epoch=1,
            layout_digest=LAYOUT.digest(),
            parent_hash=ROOT,
            block_hashes=hashes,
            has_partial=partial,
            lease_s=lease_s,
        )

    def put(self, *refs: BlockRef) -> None:
        for ref in refs:
            for group_idx in range(LAYOUT.num_groups):
                assert self.client.put_group(group_idx, [(ref, self.arena.address)]) == [PutStatus.STORED_OR_OPEN]
        assert self.client.missing(refs) == set()

    async def cache(self, request_id: str, hashes: list[BlockHash]) -> None:
        assert (await self.reserve(request_id, hashes)).result is ReserveResult.RESERVED
        self.put(*(BlockRef(hash_, request_id, 1, self.node_id) for hash_ in hashes))
        await self.node.seal(request_id=request_id, epoch=1, first_block=0, num_blocks=len(hashes))
        await self.node.release(request_id=request_id, epoch=1)

    def is_gone(self, *refs: BlockRef) -> bool:
        return len(self.client.missing(refs)) == len(refs) * LAYOUT.num_groups

    async def close(self) -> None:
        await self.node.close()
        self.transfer.close()


AnyWriter = TypeVar("AnyWriter", bound=Writer)


@asynccontextmanager
async def attached(of: Service, kind: type[AnyWriter] = Writer) -> AsyncIterator[AnyWriter]:  # type: ignore[assignment]
    made = kind(of)
    try:
        await made.node.register_layout(LAYOUT)
        yield made
    finally:
        await made.close()


@pytest.fixture
async def stage(shared: Service) -> AsyncIterator[Writer]:
    async with attached(shared) as made:
        yield made


def chain(seed: int, num_blocks: int) -> list[BlockHash]:
    ids = np.random.default_rng(seed).integers(0, 1000, num_blocks * LAYOUT.block_tokens).astype(np.uint32)
    return hash_blocks(ids, block_tokens=LAYOUT.block_tokens, root=ROOT)


async def until_gone(stage: Writer, *refs: BlockRef) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(stage.is_gone, *refs):
            await asyncio.sleep(0.05)


async def test_sealed_blocks_are_hit_by_the_next_request(stage: Writer) -> None:
    hashes = chain(1, 3)
    await stage.cache("first", hashes)
    reply = await stage.reserve("second", [*hashes, *chain(2, 1)])
    assert reply.hit_blocks == 3
    assert reply.capacity_bytes == CAPACITY_BYTES
    await stage.node.release(request_id="second", epoch=1)


async def test_partial_objects_are_gone_after_release_although_they_were_read(stage: Writer) -> None:
    partial = BlockRef(None, "reader", 1)
    await stage.reserve("reader", [], partial=True)
    stage.put(partial)
    assert stage.client.get_group(0, [(partial, stage.arena.address)]) == [True]
    await stage.node.release(request_id="reader", epoch=1)
    await until_gone(stage, partial)


async def test_everything_unsealed_is_gone_after_the_lease_ends(stage: Writer) -> None:
    hashes = chain(3, 2)
    refs = BlockRef(None, "dead", 1), *(BlockRef(hash_, "dead", 1, NODE_ID) for hash_ in hashes)
    await stage.reserve("dead", hashes, partial=True, lease_s=0.5)
    stage.put(*refs)
    await until_gone(stage, *refs)
    with pytest.raises(BlockMissing, match="dead"):
        await stage.node.seal(request_id="dead", epoch=1, first_block=0, num_blocks=1)
    assert await stage.node.renew(["dead"], lease_s=5) == ["dead"]


WRITER = """
import asyncio, sys
from kvstore.block import BlockHash
from kvstore.client import BlockRef
from tests.integration.test_kvstore_service import LAYOUT, NODE_ID, Service, Writer, chain

async def main(record, client_address, master_http):
    stage = Writer(Service(record, client_address, master_http, None))
    await stage.node.register_layout(LAYOUT)
    hashes = chain(8, 3)
    await stage.reserve("killed", hashes, partial=True, lease_s=1.0)
    sealed, open_block = (BlockRef(hash_, "killed", 1, NODE_ID) for hash_ in hashes[:2])
    partial = BlockRef(None, "killed", 1)
    stage.put(sealed)
    await stage.node.seal(request_id="killed", epoch=1, first_block=0, num_blocks=1)
    stage.put(partial, open_block)
    print("put", flush=True)
    while True:
        for group_idx in range(LAYOUT.num_groups):
            stage.client.put_group(group_idx, [(partial, stage.arena.address)])

from moontide.registry import NodeRecord
asyncio.run(main(NodeRecord.from_json(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


async def test_a_writer_killed_in_the_middle_of_puts_leaves_only_sealed_blocks(shared: Service, stage: Writer) -> None:
    argv = [sys.executable, "-c", WRITER, shared.record.to_json(), shared.client_address, shared.master_http]
    writer = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        assert writer.stdout is not None
        async with asyncio.timeout(30):
            while await writer.stdout.readline() != b"put\n":
                assert not writer.stdout.at_eof()
    finally:
        writer.kill()
        await writer.wait()
    sealed, unsealed, _ = chain(8, 3)
    await until_gone(stage, BlockRef(None, "killed", 1), BlockRef(unsealed, "killed", 1, NODE_ID))
    reply = await stage.reserve("after", chain(8, 3))
    assert reply.hit_blocks == 1
    for group_idx in range(LAYOUT.num_groups):
        assert stage.client.get_group(group_idx, [(BlockRef(sealed, "after", 1, NODE_ID), stage.arena.address)]) == [
            True
        ]
    await stage.node.release(request_id="after", epoch=1)
    assert await stage.node.renew(["killed"], lease_s=1) == ["killed"]


async def test_a_renewed_lease_keeps_the_blocks(stage: Writer) -> None:
    partial = BlockRef(None, "alive", 1)
    await stage.reserve("alive", [], partial=True, lease_s=1.0)
    stage.put(partial)
    for _ in range(8):
        assert await stage.node.renew(["alive"], lease_s=1.0) == []
        await asyncio.sleep(0.25)
    assert stage.client.missing([partial]) == set()
    await stage.node.release(request_id="alive", epoch=1)
    await until_gone(stage, partial)


async def test_eviction_makes_room_and_keeps_prefixes_contiguous(stage: Writer) -> None:
    long = chain(4, NUM_BLOCKS)
    await stage.cache("long", long)
    other = chain(5, 3)
    async with asyncio.timeout(20):
        while (await stage.reserve("other", other)).result is ReserveResult.WAIT:
            await asyncio.sleep(0.05)
    await stage.node.release(request_id="other", epoch=1)
    reply = await stage.reserve("again", long)
    kept = reply.hit_blocks
    await stage.node.release(request_id="again", epoch=1)
    assert 0 < kept <= NUM_BLOCKS - 3
    refs = [BlockRef(hash_, "again", 1, NODE_ID) for hash_ in long]
    assert {position for position, _ in stage.client.missing(refs[:kept])} == set()
    await until_gone(stage, *refs[kept:])


async def test_a_prompt_larger_than_the_pool_is_too_large(stage: Writer) -> None:
    reply = await stage.reserve("huge", chain(6, NUM_BLOCKS + 1))
    assert reply.result is ReserveResult.TOO_LARGE


async def test_wrong_requests_are_named(stage: Writer) -> None:
    with pytest.raises(BadRequest, match="request_id='a b'"):
        await stage.reserve("a b", [])
    with pytest.raises(ConfigError, match="block_tokens"):
        await stage.node.register_layout(replace(LAYOUT, block_tokens=32))
    with pytest.raises(BadRequest, match="parent_hash"):
        await stage.node.reserve(
            request_id="x",
            epoch=1,
            layout_digest=LAYOUT.digest(),
            parent_hash=BlockHash(b"short"),
            block_hashes=[],
            has_partial=False,
            lease_s=1,
        )


async def test_record_ready_and_metrics(the_backend: Backend, shared: Service, stage: Writer) -> None:
    assert shared.ready() == 200
    record = find_record(the_backend, "store-0")
    assert record is not None
    assert (record.role, record.load["capacity_bytes"]) == ("kvstore", CAPACITY_BYTES)
    stats = await stage.node.stats()
    assert stats.capacity_bytes == CAPACITY_BYTES
    assert await asyncio.to_thread(gauge, record, "kvstore_capacity_bytes") == CAPACITY_BYTES
    assert await asyncio.to_thread(gauge, record, "kvstore_reservations") == stats.reservations


def gauge(record: NodeRecord, name: str) -> float:
    with urllib.request.urlopen(f"http://{record.http_address}/metrics", timeout=5) as reply:
        lines = dict(line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#"))
    return float(lines[name])


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The pid of its data client."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (pid,) = (int(c) for c in children if Path(f"/proc/{c}/comm").read_text().strip() == "mooncake_client")
    return pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_killed_service_takes_its_data_client_along_and_comes_back_empty_under_a_new_boot_id() -> None:
    with backend() as to:
        hashes = chain(7, 2)
        with service(to) as first:
            async with attached(first) as stage:
                await stage.cache("a", hashes)
            data_client_pid = child_of(first.process)
            first.process.kill()
            first.process.wait()
            wait_until(lambda: not is_alive(data_client_pid), what="the data client's end")
        with service(to, not_boot=first.record.boot_id) as second:
            async with attached(second) as stage:
                assert (await stage.reserve("b", hashes)).hit_blocks == 0
                assert stage.is_gone(*(BlockRef(hash_, "b", 1, NODE_ID) for hash_ in hashes))
                stage.put(*(BlockRef(hash_, "b", 1, NODE_ID) for hash_ in hashes))


def test_a_killed_data_client_ends_the_service_with_an_error() -> None:
    with backend() as to, service(to) as made:
        subprocess.run(["kill", "-9", str(child_of(made.process))], check=True)
        assert made.process.wait(timeout=20) == 1


def test_a_master_that_lost_its_metadata_ends_the_service() -> None:
    with backend() as to, service(to) as made:
        to.master.process.kill()
        to.master.process.wait()
        wait_until(lambda: made.ready() == 503, what="unready without a master")
        wait_until(lambda: find_record(to, "store-0") is None, what="the record's withdrawal")
        argv = [str(part) for part in to.master.process.args]  # type: ignore[union-attr]
        with running(argv):
            assert made.process.wait(timeout=30) == 1


def test_sigterm_drains_and_leaves_no_process() -> None:
    with backend() as to, service(to) as made:
        data_client_pid = child_of(made.process)
        made.process.terminate()
        assert made.process.wait(timeout=20) == 0
        assert not is_alive(data_client_pid)
        assert find_record(to, "store-0") is None


def test_a_missing_master_is_named_at_start() -> None:
    nowhere = Backend(Master("127.0.0.1:1", "127.0.0.1:2", None), "redis://127.0.0.1:3/0")  # type: ignore[arg-type]
    done = subprocess.run(arguments(nowhere, client_port=0), capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"mooncake_master at 127.0.0.1:1" in done.stderr


def test_a_port_in_use_is_named(the_backend: Backend, shared: Service) -> None:
    taken = int(shared.client_address.rpartition(":")[2])
    done = subprocess.run(
        arguments(the_backend, client_port=taken, node_id="b"), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert f"client_port={taken}".encode() in done.stderr


def test_print_config_shows_settings() -> None:
    nowhere = Backend(Master("127.0.0.1:1", "127.0.0.1:2", None), "redis://127.0.0.1:3/0")  # type: ignore[arg-type]
    done = subprocess.run(
        [*arguments(nowhere, client_port=0), "--print-config"], capture_output=True, timeout=60, check=True
    )
    assert b"fill_fraction: 0.85" in done.stdout
    assert json.dumps(POOL_BYTES).encode() in done.stdout


async def test_calls_to_a_dead_service_raise_node_lost() -> None:
    client = StoreNodeClient(f"127.0.0.1:{free_port()}", timeout_s=2.0)
    with pytest.raises(NodeLost, match="kvstore"):
        await client.stats()
    await client.close()
