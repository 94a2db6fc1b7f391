"""Two store processes on one master: placement, replicas, and what each host can still read when the other one evicts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash
from kvstore.client import BlockRef
from kvstore.master import Segment, find_segment
from kvstore.metrics import StoreMetrics
from kvstore.pool import ReserveResult
from kvstore.preflight import PeerCheck, require_master, require_segment
from kvstore.transfer.base import PutItem, PutStatus
from moontide.config import free_port
from moontide.errors import ConfigError
from tests.integration.test_kvstore_service import (
    LAYOUT,
    NUM_BLOCKS,
    ROOT,
    Backend,
    Service,
    Writer,
    attached,
    backend,
    chain,
    service,
)
from tests.store_processes import data_client, master

NUM_GROUPS = LAYOUT.num_groups
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def the_backend() -> Iterator[Backend]:
    with backend() as made:
        yield made


@pytest.fixture(scope="module")
def services(the_backend: Backend) -> Iterator[tuple[Service, Service]]:
    settings = ["kvstore.check_placement_above=0"]
    with (
        service(the_backend, node_id="store-0", settings=settings) as first,
        service(the_backend, node_id="store-1") as second,
    ):
        yield first, second


class Host(Writer):
    """A writer whose blocks have bytes that tell which block it is."""

    def put(self, *refs: BlockRef) -> None:
        for ref in refs:
            for group_idx in range(NUM_GROUPS):
                self.arena.buffer[: LAYOUT.payload_bytes(group_idx)] = payload(ref.hash, group_idx)
                assert self.client.put_group(group_idx, [(ref, self.arena.address)]) == [PutStatus.STORED_OR_OPEN]
        assert self.client.missing(refs) == set()

    def reads(self, block_hash: BlockHash, *, holder: str) -> bool:
        """Whether every layer group arrives here with the right bytes."""
        ref = BlockRef(block_hash, "reader", 1, holder)
        for group_idx in range(NUM_GROUPS):
            self.arena.buffer[: self.arena.nbytes] = bytes(self.arena.nbytes)
            if self.client.get_group(group_idx, [(ref, self.arena.address)]) != [True]:
                return False
            assert self.arena.buffer[: LAYOUT.payload_bytes(group_idx)] == payload(block_hash, group_idx)
        return True

    async def replicate(self, hashes: list[BlockHash]) -> int:
        replica = await self.node.replicate(
            layout_digest=LAYOUT.digest(), root=ROOT, hashes=hashes, timeout_s=TIMEOUT_S
        )
        return replica.num_blocks

    async def hits(self, hashes: list[BlockHash]) -> int:
        reply = await self.reserve("probe", hashes)
        assert reply.result is ReserveResult.RESERVED
        await self.node.release(request_id="probe", epoch=1)
        return reply.hit_blocks

    async def evict_all(self) -> None:
        """Make room for a prompt that fills the pool."""
        others = chain(os.getpid(), NUM_BLOCKS)
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.reserve("crowd", others)).result is not ReserveResult.RESERVED:
                await asyncio.sleep(0.05)
        await self.node.release(request_id="crowd", epoch=1)


def payload(block_hash: BlockHash | None, group_idx: int) -> bytes:
    assert block_hash is not None
    word = bytes([group_idx]) + block_hash[1:]
    return word * (LAYOUT.payload_bytes(group_idx) // len(word))


@pytest.fixture
async def hosts(services: tuple[Service, Service]) -> AsyncIterator[tuple[Host, Host]]:
    async with attached(services[0], Host) as first, attached(services[1], Host) as second:
        yield first, second


async def test_puts_land_in_the_segment_that_the_reservation_names(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    segment = (await second.reserve("far", [])).segment
    assert segment == second.transfer.segment != first.transfer.segment
    nbytes = first.arena.nbytes // 4
    near = [PutItem(f"near/{idx}", first.arena.address, nbytes) for idx in range(8)]
    far = [PutItem(f"far/{idx}", first.arena.address, nbytes) for idx in range(8)]
    assert set(first.transfer.put(near)) == {PutStatus.STORED_OR_OPEN}
    assert set(first.transfer.put(far, segment=segment)) == {PutStatus.STORED_OR_OPEN}
    near_keys, far_keys = [item.key for item in near], [item.key for item in far]
    assert first.transfer.misplaced([*near_keys, *far_keys, "nowhere"]) == far_keys
    assert second.transfer.misplaced([*near_keys, *far_keys]) == near_keys
    # The look-up has granted no lease.
    first.transfer.remove([*near_keys, *far_keys])
    assert not any(first.transfer.exists([*near_keys, *far_keys]))


async def test_sealed_objects_in_the_wrong_segment_are_counted(
    services: tuple[Service, Service], hosts: tuple[Host, Host]
) -> None:
    first, second = hosts
    (block_hash,) = hashes = chain(99, 1)
    assert (await first.reserve("spilt", hashes)).result is ReserveResult.RESERVED
    ref = BlockRef(block_hash, "spilt", 1, first.node_id)
    for group_idx in range(NUM_GROUPS):
        first.client.put_group(group_idx, [(ref, first.arena.address)], segment=second.transfer.segment)
    await first.node.seal(request_id="spilt", epoch=1, first_block=0, num_blocks=1)
    await first.node.release(request_id="spilt", epoch=1)
    url = f"http://{services[0].record.http_address}/metrics"
    wanted = f"kvstore_misplaced_objects_total {float(NUM_GROUPS)}"
    async with asyncio.timeout(TIMEOUT_S):
        while wanted not in (await asyncio.to_thread(urlopen, url)).read().decode():
            await asyncio.sleep(0.05)


async def test_a_replica_is_read_and_evicted_on_its_own(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    hashes = chain(100, 5)
    await first.cache("origin", hashes)
    assert await second.hits(hashes) == 0
    assert await second.replicate(hashes) == 5
    assert await second.hits(hashes) == 5
    for reader in hosts:
        for holder in ("store-0", "store-1"):
            assert all(reader.reads(block_hash, holder=holder) for block_hash in hashes)
    keys = [BlockRef(hashes[0], "", 0, "store-1").key(LAYOUT.digest(), group) for group in range(NUM_GROUPS)]
    assert second.transfer.misplaced(keys) == []
    await first.evict_all()
    assert await first.hits(hashes) == 0
    assert not first.reads(hashes[0], holder="store-0")
    assert all(first.reads(block_hash, holder="store-1") for block_hash in hashes)
    assert await second.hits(hashes) == 5
    assert await first.replicate(hashes) == 5, "and back"
    await second.evict_all()
    assert all(second.reads(block_hash, holder="store-0") for block_hash in hashes)


async def test_a_replica_adds_what_is_missing_to_what_is_there(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    hashes = chain(101, 6)
    await second.cache("start", hashes[:2])
    await first.cache("origin", hashes[:5])
    assert await second.replicate(hashes) == 5, "nobody has the last one"
    assert await second.hits(hashes) == 5
    assert await second.replicate(hashes) == 5
    assert await second.replicate(chain(102, 3)) == 0


async def test_a_replica_that_does_not_fit_is_cut_and_one_without_any_room_is_none(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await second.evict_all()
    hashes = chain(103, 8)
    await first.cache("origin", hashes)
    pins = chain(104, NUM_BLOCKS - 4)
    assert (await second.reserve("pins", pins)).result is ReserveResult.RESERVED
    assert await second.replicate(hashes) == 4
    more = chain(105, 4)
    assert (await second.reserve("more", more)).result is ReserveResult.RESERVED, "replicas are cold at once"
    assert await second.replicate(hashes) == 0
    for request_id in ("pins", "more"):
        await second.node.release(request_id=request_id, epoch=1)


def test_preflight_names_what_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with master() as the_master:
        ports = free_port(), free_port()
        with data_client(the_master, port=ports[0]), data_client(the_master, port=ports[1]) as other:
            own, peer = (f"127.0.0.1:{port}" for port in ports)
            require_master(master_rpc=the_master.rpc, master_http=the_master.http, host="here")
            for segment in (own, peer):
                require_segment(the_master.http, segment, host="here")
            endpoint = find_segment(the_master.http, peer).endpoint
            peers = PeerCheck(the_master.http, own=own, host="here", metrics=StoreMetrics(CollectorRegistry()))
            other.send_signal(signal.SIGSTOP)
            asyncio.run(peers.check())
            assert peers.num_unreachable == 1
            assert f"here does not reach the engine of segment {peer} at {endpoint}" in caplog.text
            other.send_signal(signal.SIGCONT)
            asyncio.run(peers.check())
            assert peers.num_unreachable == 0
            closed = Segment(own, f"127.0.0.1:{free_port()}")
            monkeypatch.setattr("kvstore.preflight.find_segment", lambda *_: closed)
            with pytest.raises(
                ConfigError, match=rf"{closed.endpoint} .*open the port for this host \(docs/ports\.md\)"
            ):
                require_segment(the_master.http, own, host="here")
    with pytest.raises(ConfigError, match=f"here does not reach the RPC of mooncake_master at {the_master.rpc}"):
        require_master(master_rpc=the_master.rpc, master_http=the_master.http, host="here")
