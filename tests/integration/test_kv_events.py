"""KV events over a real Valkey: order, restarts of either side, and an index that equals its store whatever was missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis
from prometheus_client import CollectorRegistry

from conductor.index_follower import IndexFollower
from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex
from conductor.registry import Node
from kvstore.block import BlockHash
from kvstore.index import STREAM_KEY, KvEntry, KvEvents, KvEventWriter, Removed, Stored
from kvstore.layout import KVLayout
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState, RequestKey, ReserveRequest, ReserveResult, StoredRun
from kvstore.service import KvStoreService
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.clock import MonotonicClock
from moontide.config import RegistryConfig, free_port
from moontide.registry import NodeRecord
from moontide.rpc import Server
from moontide_proto.v1 import kvstore_pb2_grpc
from tests.store_processes import valkey

ROOT = BlockHash(b"R" * 32)
A, B, C = (BlockHash(letter * 32) for letter in (b"a", b"b", b"c"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as address:
        yield address


@pytest.fixture
def config(url: str) -> RegistryConfig:
    redis.Redis.from_url(url).flushall()
    return RegistryConfig(url=url)


@asynccontextmanager
async def writer(config: RegistryConfig, *, boot_id: str = "boot-1") -> AsyncIterator[KvEventWriter]:
    made = KvEventWriter(config, node_id="n", boot_id=boot_id)
    await made.heal()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def following(config: RegistryConfig) -> AsyncIterator[AsyncIterator[KvEntry]]:
    reader = KvEvents(config)
    async with asyncio.timeout(30):
        await reader.open()
        yield reader.follow()
    await reader.close()


def entry(number: int, change: Stored | Removed | None, *, boot_id: str = "boot-1") -> KvEntry:
    return KvEntry("n", boot_id, number, change)


async def test_a_follower_reads_what_comes_after_it_opened_in_order(config: RegistryConfig) -> None:
    async with writer(config) as out:
        await out.stored([StoredRun(ROOT, (C,))])
        async with following(config) as entries:
            await out.stored([StoredRun(ROOT, (A, B)), StoredRun(A, (C,))])
            assert await anext(entries) == entry(2, Stored(ROOT, A + B))
            assert await anext(entries) == entry(3, Stored(A, C))
            pending = asyncio.ensure_future(anext(entries))
            await out.removed([B])
            assert await pending == entry(4, Removed(B))


async def test_an_unreadable_entry_is_left_out(config: RegistryConfig) -> None:
    async with following(config) as entries, writer(config) as out:
        client = redis.Redis.from_url(config.url)
        client.xadd(STREAM_KEY, {"t": "stored", "n": "n", "b": "boot-1", "e": 1, "p": ROOT, "h": "short"})
        client.xadd(STREAM_KEY, {"t": "stored", "n": "n", "b": "boot-1", "p": ROOT, "h": ROOT})
        await out.stored([StoredRun(ROOT, (A,))])
        assert [await anext(entries), await anext(entries)] == [entry(0, None), entry(1, Stored(ROOT, A))]


async def test_a_mark_tells_what_was_lost_while_valkey_was_away() -> None:
    port = free_port()
    config = RegistryConfig(url=f"redis://127.0.0.1:{port}/0")
    made = KvEventWriter(config, node_id="n", boot_id="boot-1")
    await made.stored([StoredRun(ROOT, (A,))])
    await made.heal()
    assert not made.in_sync, "nothing listens yet"
    with valkey(port=port):
        async with following(config) as entries:
            await made.heal()
            assert made.in_sync
            await made.heal()
            await made.stored([StoredRun(A, (B,))])
            assert [await anext(entries), await anext(entries)] == [entry(1, None), entry(2, Stored(A, B))]
    await made.stored([StoredRun(A, (B,))])
    assert not made.in_sync
    with valkey(port=port):
        async with following(config) as entries:
            await made.heal()
            assert await anext(entries) == entry(3, None)
            redis.Redis.from_url(config.url).flushall()
            await made.heal()
            assert await anext(entries) == entry(3, None)
    await made.close()


async def test_a_follower_survives_a_valkey_restart() -> None:
    port = free_port()
    config = RegistryConfig(url=f"redis://127.0.0.1:{port}/0")
    with valkey(port=port):
        opened = following(config)
        entries = await opened.__aenter__()
        async with writer(config):
            assert await anext(entries) == entry(0, None)
            pending = asyncio.ensure_future(anext(entries))
    with valkey(port=port):
        async with writer(config, boot_id="boot-2"):
            assert await pending == entry(0, None, boot_id="boot-2")
        await opened.__aexit__(None, None, None)


async def test_a_follower_ends_when_it_is_cancelled(config: RegistryConfig) -> None:
    async def follow() -> None:
        async with following(config) as entries:
            async for _ in entries:
                pass

    tasks = [asyncio.create_task(follow()) for _ in range(20)]
    async with writer(config) as out:
        for number, task in enumerate(tasks):
            await out.stored([StoredRun(ROOT, (A,))])
            await asyncio.sleep(0.0003 * number)
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending


LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=2,
    num_planes=2,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    block_tokens=4,
    layer_group=1,
)


class Store:
    """A store process that answers over gRPC; its blocks have no bytes."""

    def __init__(self, config: RegistryConfig) -> None:
        self.pool = PoolState(capacity_bytes=1000 * LAYOUT.block_bytes, clock=MonotonicClock(), node_id="n")
        self.events = KvEventWriter(config, node_id="n", boot_id="boot-1")
        memory = MemoryTransfer(MemoryStore(1 << 20))
        self.node = LocalStoreNode(self.pool, memory, boot_id="boot-1", events=self.events)
        self.server = Server()
        service = KvStoreService(self.node, node_id="n", boot_id="boot-1")
        self.server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, service, "moontide.v1.KvStore")
        self.num_requests = 0

    async def seal(self, *hashes: BlockHash) -> None:
        """The whole chain of a prompt."""
        self.num_requests += 1
        owner = RequestKey(f"r{self.num_requests}", 0)
        request = ReserveRequest(owner=owner, layout=LAYOUT, root=ROOT, hashes=hashes, has_partial=False, lease_s=60.0)
        assert self.pool.reserve(request).result is ReserveResult.RESERVED
        await self.node.seal(request_id=owner.request_id, epoch=0, first_block=0, num_blocks=len(hashes))
        self.pool.release(owner)

    async def close(self) -> None:
        await self.server.close()
        await self.node.close()
        await self.events.close()


async def test_an_index_equals_its_store_after_a_late_start_and_after_lost_events(config: RegistryConfig) -> None:
    store = Store(config)
    port = await store.server.start("127.0.0.1", 0)
    record = NodeRecord(node_id="n", role="kvstore", address=f"127.0.0.1:{port}", http_address="", boot_id="boot-1")
    await store.events.heal()
    long = tuple(BlockHash(i.to_bytes(4, "big") * 8) for i in range(10, 110))
    await store.seal(*long)
    await store.seal(A, B)
    index, events = PrefixIndex(), KvEvents(config)
    follower = IndexFollower(
        index,
        events,
        ConductorMetrics(CollectorRegistry()),
        nodes=lambda: [Node(record=record, alive=True, read_s=0.0)],
    )
    follower.start()
    async with asyncio.timeout(30):
        while index.num_blocks != 102:
            await asyncio.sleep(0.01)
        assert index.hit_blocks(long) == {"n": 100}
        await store.seal(A, B, C)
        await store.node.evict(long[50:])
        while index.hit_blocks(long) != {"n": 50} or index.hit_blocks([A, B, C]) != {"n": 3}:
            await asyncio.sleep(0.01)
        store.events.in_sync = False
        await store.node.evict([B])
        await store.events.heal()
        while index.hit_blocks([A, B, C]) != {"n": 1}:
            await asyncio.sleep(0.01)
    assert index.num_blocks == sum(block.is_sealed for block in store.pool.blocks())
    await follower.close()
    await store.close()
