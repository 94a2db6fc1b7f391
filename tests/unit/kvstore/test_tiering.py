"""A store node with an SSD below its pool, over the in-memory transfer and real files."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import kvstore.node
import kvstore.tiering
from kvstore.block import BlockHash, root_hash
from kvstore.client import BlockRef, StoreClient
from kvstore.keys import LOCAL_NODE_ID
from kvstore.layout import TRAILER_BYTES, KVLayout
from kvstore.metrics import SsdMetrics
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState, ReserveReply, ReserveResult, StoredRun
from kvstore.ssd import SsdTier
from kvstore.tiering import SsdMover
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.errors import ConfigError
from tests.fakes.clock import FakeClock

LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=3,
    num_planes=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    block_tokens=4,
    layer_group=2,
)
DIGEST = LAYOUT.digest()
ROOT = root_hash(DIGEST, "")
GROUPS = range(LAYOUT.num_groups)
READ_LEASE_S = 5.0
SSD_BYTES = 1 << 20


class RecordingEvents:
    def __init__(self) -> None:
        self.log: list[tuple[str, BlockHash]] = []

    async def stored(self, runs: Sequence[StoredRun]) -> None:
        self.log += [("stored", block_hash) for run in runs for block_hash in run.hashes]

    async def removed(self, hashes: Sequence[BlockHash]) -> None:
        self.log += [("removed", block_hash) for block_hash in hashes]

    async def heal(self) -> None:
        return None


class World:
    """One boot of a store node; another one on the same directory is its restart."""

    def __init__(
        self, directory: Path, *, num_blocks: int = 4, ssd_bytes: int = SSD_BYTES, node_id: str = LOCAL_NODE_ID
    ) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(1 << 20, lease_s=READ_LEASE_S, clock=self.clock)
        self.transfer = MemoryTransfer(self.store)
        self.client = StoreClient(self.transfer, LAYOUT)
        self.arena = self.transfer.allocate(LAYOUT.object_bytes(0))
        self.events = RecordingEvents()
        self.registry = CollectorRegistry()
        self.node_id = node_id
        self.pool = PoolState(capacity_bytes=num_blocks * LAYOUT.block_bytes, clock=self.clock, node_id=node_id)
        self.ssd = SsdTier.open(directory, capacity_bytes=ssd_bytes)
        self.mover = SsdMover(self.pool, self.transfer, self.ssd, clock=self.clock, metrics=SsdMetrics(self.registry))
        self.node = LocalStoreNode(self.pool, self.transfer, events=self.events, ssd=self.mover)

    async def close(self) -> None:
        await self.node.close()
        self.pool.check_invariants()
        self.ssd.close()

    async def reserve(self, request_id: str, names: Sequence[str], *, partial: bool = False) -> ReserveReply:
        return await self.node.reserve(
            request_id=request_id,
            epoch=1,
            layout_digest=DIGEST,
            parent_hash=ROOT,
            block_hashes=[block(name) for name in names],
            has_partial=partial,
            lease_s=10.0,
        )

    async def release(self, request_id: str) -> None:
        await self.node.release(request_id=request_id, epoch=1)

    def ref(self, name: str) -> BlockRef:
        return BlockRef(block(name), "x", 1, holder=self.node_id)

    def put(self, names: Sequence[str]) -> None:
        for name in names:
            for group_idx in GROUPS:
                payload = payload_of(name, group_idx)
                self.arena.buffer[: len(payload)] = payload
                self.client.put_group(group_idx, [(self.ref(name), self.arena.address)])

    async def seal(self, request_id: str, first_block: int, num_blocks: int) -> None:
        await self.node.seal(request_id=request_id, epoch=1, first_block=first_block, num_blocks=num_blocks)

    async def cache(self, request_id: str, names: Sequence[str]) -> None:
        """Compute, seal and release a chain, and let the SSD have it."""
        reply = await self.reserve(request_id, names)
        assert reply.result is ReserveResult.RESERVED
        self.put(names[reply.hit_blocks :])
        await self.seal(request_id, 0, len(names))
        await self.release(request_id)
        await self.node.keep()
        self.end_reads()

    def end_reads(self) -> None:
        """Nothing that was read resists its removal any more."""
        self.clock.advance(READ_LEASE_S)

    async def evict_all(self) -> None:
        """By a request that takes the whole pool."""
        names = [f"filler{idx}" for idx in range(self.pool.capacity_bytes // LAYOUT.block_bytes)]
        assert (await self.reserve("filler", names)).result is ReserveResult.RESERVED
        await self.release("filler")
        await self.node.tidy()

    def check_bytes(self, names: Sequence[str]) -> None:
        for name in names:
            for group_idx in GROUPS:
                assert self.client.get_group(group_idx, [(self.ref(name), self.arena.address)]) == [True], name
                payload = payload_of(name, group_idx)
                assert bytes(self.arena.buffer[: len(payload)]) == payload, name

    async def metric(self, name: str) -> float:
        await self.node.tidy()
        return self.registry.get_sample_value(f"kvstore_ssd_{name}") or 0.0


def block(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


def payload_of(name: str, group_idx: int) -> bytes:
    return random.Random(f"{name} {group_idx}").randbytes(LAYOUT.object_bytes(group_idx) - TRAILER_BYTES)


def damage(directory: Path, choose_offset: Callable[[int], int]) -> None:
    """Flip a bit of the newest segment."""
    for path in sorted(directory.glob("segment-*.kv"))[-1:]:
        data = bytearray(path.read_bytes())
        data[choose_offset(len(data))] ^= 1
        path.write_bytes(data)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.node.register_layout(LAYOUT)
    yield made
    await made.close()


class Gate:
    """Stops a method of the tier in its thread until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tier: SsdTier, method: str) -> None:
        self._entered, self._may_go_on = threading.Event(), threading.Event()
        real = getattr(tier, method)

        def gated(*arguments: Any) -> Any:
            self._entered.set()
            assert self._may_go_on.wait(20)
            return real(*arguments)

        monkeypatch.setattr(tier, method, gated)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, 10)

    def open(self) -> None:
        self._may_go_on.set()


async def test_evicted_blocks_come_back_with_the_same_bytes(world: World) -> None:
    await world.cache("a", "123")
    await world.evict_all()
    assert not world.store.objects
    reply = await world.reserve("b", "1234", partial=False)
    assert (reply.result, reply.hit_blocks, reply.promoted_blocks) == (ReserveResult.RESERVED, 3, 3)
    world.check_bytes("123")
    chain = [block(name) for name in "123"]
    assert world.events.log == [
        *(("stored", block_hash) for block_hash in chain),
        *(("removed", block_hash) for block_hash in reversed(chain)),
        *(("stored", block_hash) for block_hash in chain),
    ]
    assert await world.metric("hit_blocks_total") == await world.metric("kept_blocks_total") == 3
    assert await world.metric("not_kept_blocks_total") == 0
    assert await world.metric("promote_seconds_count") == 1
    again = await world.reserve("c", "123")
    assert (again.hit_blocks, again.promoted_blocks) == (3, 0)


async def test_blocks_that_are_still_in_the_pool_are_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.cache("a", "1234")
    await world.reserve("b", "xy")
    await world.release("b")
    read: list[BlockHash] = []
    real_read = world.ssd.read_block

    def noting(digest: bytes, block_hash: BlockHash, into: Sequence[memoryview]) -> bool:
        read.append(block_hash)
        return real_read(digest, block_hash, into)

    monkeypatch.setattr(world.ssd, "read_block", noting)
    reply = await world.reserve("c", "1234")
    assert (reply.hit_blocks, reply.promoted_blocks) == (4, 2)
    assert read == [block("3"), block("4")]
    world.check_bytes("1234")


async def test_stats_and_gauges_tell_what_the_ssd_holds(world: World) -> None:
    await world.cache("a", "123")
    stats = await world.node.stats()
    assert (stats.ssd_capacity_bytes, stats.ssd_blocks) == (SSD_BYTES, 3)
    assert stats.ssd_used_bytes > 3 * LAYOUT.block_bytes
    assert await world.metric("blocks") == 3
    assert await world.metric("used_bytes") == stats.ssd_used_bytes
    assert await world.metric("capacity_bytes") == SSD_BYTES


async def test_the_list_names_blocks_that_only_the_ssd_has(world: World) -> None:
    await world.cache("a", "1234")
    await world.reserve("b", "xy")
    assert {kept.hash for kept in await world.node.list_ssd_blocks()} == {block("3"), block("4")}
    assert await LocalStoreNode(world.pool, world.transfer).list_ssd_blocks() == []


async def test_a_restart_finds_the_blocks_also_under_another_name(world: World, tmp_path: Path) -> None:
    await world.cache("a", "123")
    await world.close()
    restarted = World(tmp_path, node_id="renamed")
    await restarted.node.register_layout(LAYOUT)
    assert (await restarted.reserve("b", "123")).promoted_blocks == 3
    restarted.check_bytes("123")
    await restarted.close()
    world.ssd = SsdTier.open(tmp_path, capacity_bytes=SSD_BYTES)


async def test_another_layout_has_nothing_there(world: World) -> None:
    assert world.ssd.chain_hit(DIGEST, [block("1")]) == 0
    await world.cache("a", "1")
    assert world.ssd.chain_hit(DIGEST, [block("1")]) == 1
    assert world.ssd.chain_hit(b"?" * 32, [block("1")]) == 0


async def test_many_blocks_come_back_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.tiering, "_BATCH_BYTES", 3 * LAYOUT.block_bytes)
    world = World(tmp_path, num_blocks=16)
    await world.node.register_layout(LAYOUT)
    names = [f"n{idx}" for idx in range(16)]
    await world.cache("a", names)
    await world.evict_all()
    reply = await world.reserve("b", names)
    assert reply.hit_blocks == reply.promoted_blocks == 16
    world.check_bytes(names)
    await world.close()


async def test_reserves_of_one_chain_at_once_bring_it_back_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.cache("a", "123")
    await world.evict_all()
    read: list[BlockHash] = []
    real_read = world.ssd.read_block

    def noting(digest: bytes, block_hash: BlockHash, into: Sequence[memoryview]) -> bool:
        read.append(block_hash)
        return real_read(digest, block_hash, into)

    monkeypatch.setattr(world.ssd, "read_block", noting)
    replies = await asyncio.gather(*(world.reserve(f"r{idx}", "123") for idx in range(5)))
    assert [reply.hit_blocks for reply in replies] == [3] * 5
    assert read == [block(name) for name in "123"]
    world.check_bytes("123")
    world.pool.check_invariants()
    for idx in range(5):
        await world.release(f"r{idx}")
    stats = await world.node.stats()
    assert (stats.used_bytes, stats.sealed_blocks, stats.pinned_blocks) == (3 * LAYOUT.block_bytes, 3, 0)


async def test_a_block_that_was_never_copied_is_counted_as_not_kept(world: World) -> None:
    await world.reserve("a", "12")
    world.put("12")
    await world.seal("a", 0, 2)
    await world.release("a")
    await world.evict_all()
    assert not world.mover.has_waiting, "nothing piles up behind a slow disk"
    assert (await world.reserve("b", "12")).hit_blocks == 0
    assert await world.metric("not_kept_blocks_total") == 2
    assert await world.metric("kept_blocks_total") == 0


async def test_a_disk_without_room_keeps_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, ssd_bytes=LAYOUT.block_bytes // 2)
    await world.node.register_layout(LAYOUT)
    for idx in range(5):
        await world.cache(f"r{idx}", [f"{idx}.{position}" for position in range(3)])
    assert world.ssd.stats().num_blocks == 0
    assert await world.metric("not_kept_blocks_total") == 11
    await world.close()


async def test_a_full_tier_keeps_the_newest(tmp_path: Path) -> None:
    world = World(tmp_path, ssd_bytes=5 * (LAYOUT.block_bytes + 200))
    await world.node.register_layout(LAYOUT)
    for idx in range(4):
        await world.cache(f"r{idx}", [f"{idx}.{position}" for position in range(2)])
    await world.evict_all()
    hits = []
    for idx in range(4):
        hits.append((await world.reserve(f"s{idx}", [f"{idx}.{position}" for position in range(2)])).hit_blocks)
        await world.release(f"s{idx}")
    assert hits == [0, 0, 2, 2]
    await world.close()


async def test_after_a_disk_error_it_pauses_and_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "disk")

    with monkeypatch.context() as broken:
        broken.setattr(world.ssd, "put_block", failing)
        await world.cache("a", "12")
    await world.cache("b", "xy")
    assert world.ssd.stats().num_blocks == 0, "it pauses"
    world.clock.advance(10)
    await world.cache("c", "xy")
    assert world.ssd.chain_hit(DIGEST, [block("x"), block("y")]) == 2, "a hit copies what was missed"


async def test_blocks_that_waited_too_long_are_not_copied(world: World) -> None:
    await world.reserve("a", "1")
    world.put("1")
    await world.seal("a", 0, 1)
    world.clock.advance(9)
    assert await world.node.renew(["a"], lease_s=10.0) == []
    await world.seal("a", 0, 1)
    world.clock.advance(2)
    await world.node.keep()
    assert world.ssd.stats().num_blocks == 0
    await world.cache("b", "1")
    assert world.ssd.stats().num_blocks == 1


async def test_a_block_without_its_prefix_is_not_copied(world: World) -> None:
    await world.reserve("a", "12")
    world.put("12")
    await world.seal("a", 0, 2)
    del world.store.objects[next(iter(world.store.objects))]
    await world.node.keep()
    assert world.ssd.stats().num_blocks == 0


async def test_damaged_objects_are_not_copied(world: World) -> None:
    await world.reserve("a", "1")
    world.put("1")
    await world.seal("a", 0, 1)
    key, value = next(iter(world.store.objects.items()))
    world.store.objects[key] = b"?" + value[1:]
    await world.node.keep()
    assert world.ssd.stats().num_blocks == 0


async def test_a_damaged_block_ends_the_hit(world: World, tmp_path: Path) -> None:
    await world.cache("a", "123")
    await world.evict_all()
    damage(tmp_path, lambda num_bytes: num_bytes - 1 - (LAYOUT.block_bytes + 124))
    assert (await world.reserve("b", "123")).hit_blocks == 1
    world.check_bytes("1")
    assert await world.metric("damaged_blocks_total") == 1


async def test_a_slow_disk_does_not_hold_a_reservation_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.cache("a", "12")
    await world.evict_all()
    monkeypatch.setattr(kvstore.node, "PROMOTE_TIMEOUT_S", 0.05)
    gate = Gate(monkeypatch, world.ssd, "read_block")
    reply = await world.reserve("b", "12")
    assert (reply.result, reply.hit_blocks) == (ReserveResult.RESERVED, 0)
    monkeypatch.setattr(kvstore.node, "PROMOTE_TIMEOUT_S", 1000.0)
    reply = await world.reserve("c", "12")
    assert (reply.result, reply.hit_blocks) == (ReserveResult.RESERVED, 0), "nobody else waits for it either"
    gate.open()
    await world.node.close()
    assert (await world.reserve("d", "12")).hit_blocks == 2
    world.check_bytes("12")


async def test_a_slow_write_holds_nothing_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, world.ssd, "put_block")
    await world.reserve("a", "12")
    world.put("12")
    await world.seal("a", 0, 2)
    await world.release("a")
    keeping = asyncio.create_task(world.node.keep())
    await gate.entered()
    world.end_reads()
    await world.evict_all()
    gate.open()
    await keeping
    assert (await world.reserve("b", "12")).hit_blocks == 1, "the first was read before it was evicted, the second not"
    world.check_bytes("1")


async def test_a_caller_that_gives_up_in_a_promotion_breaks_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.cache("a", "12")
    await world.evict_all()
    gate = Gate(monkeypatch, world.ssd, "read_block")
    call = asyncio.create_task(world.reserve("b", "12"))
    await gate.entered()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.open()
    assert (await world.reserve("b", "12")).hit_blocks == 2
    await world.release("b")
    assert (await world.node.stats()).pinned_blocks == 0


async def test_a_reservation_released_in_a_promotion_gives_all_its_room_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.cache("a", "12")
    await world.evict_all()
    gate = Gate(monkeypatch, world.ssd, "read_block")
    call = asyncio.create_task(world.reserve("b", "12", partial=True))
    await gate.entered()
    await world.release("b")
    await world.node.tidy()
    gate.open()
    assert (await call).hit_blocks == 0
    world.clock.advance(20)
    await world.node.tidy()
    assert not world.store.objects
    assert (await world.node.stats()).used_bytes == 0


async def test_a_store_that_is_away_makes_a_miss(world: World) -> None:
    await world.cache("a", "12")
    await world.evict_all()
    world.store.available = False
    reply = await world.reserve("b", "12")
    assert (reply.result, reply.hit_blocks) == (ReserveResult.RESERVED, 0)
    world.store.available = True
    assert (await world.reserve("c", "12")).hit_blocks == 2


async def test_without_transfer_memory_nothing_moves_and_requests_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(_: int) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr(world.transfer, "allocate", refusing)
    await world.cache("a", "12")
    assert world.ssd.stats().num_blocks == 0
    await world.evict_all()
    assert (await world.reserve("b", "12")).hit_blocks == 0


async def test_a_prefix_that_stays_hot_in_the_pool_stays_on_the_ssd(tmp_path: Path) -> None:
    world = World(tmp_path, ssd_bytes=4 * (LAYOUT.block_bytes + 200))
    await world.node.register_layout(LAYOUT)
    await world.cache("hot", "h")
    for idx in range(6):
        await world.cache(f"cold{idx}", [f"c{idx}"])
        await world.cache(f"hot{idx}", "h")
    assert world.ssd.touch([block("h")]) == []
    await world.close()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_a_hit_has_the_right_bytes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    chains = [[f"{root}{position}" for position in range(4)] for root in "abcdef"]
    chains += [[*chains[0][:2], "a2x", "a3x"]]
    world = World(tmp_path, num_blocks=8, ssd_bytes=14 * LAYOUT.block_bytes)
    await world.node.register_layout(LAYOUT)
    num_promoted = 0
    for step in range(60):
        names = rng.choice(chains)[: rng.randint(1, 4)]
        reply = await world.reserve(f"r{step}", names)
        if reply.result is ReserveResult.RESERVED:
            num_promoted += reply.promoted_blocks
            world.check_bytes(names[: reply.hit_blocks])
            world.put(names[reply.hit_blocks :])
            await world.seal(f"r{step}", 0, rng.randint(reply.hit_blocks, len(names)))
            await world.release(f"r{step}")
        if rng.random() < 0.6:
            await world.node.keep()
        if rng.random() < 0.1:
            damage(tmp_path, lambda num_bytes: rng.randrange(8, num_bytes))
        if rng.random() < 0.1:
            await world.close()
            world = World(tmp_path, num_blocks=8, ssd_bytes=14 * LAYOUT.block_bytes)
            await world.node.register_layout(LAYOUT)
        world.end_reads()
        await world.node.tidy()
        world.pool.check_invariants()
    assert num_promoted > 0
    await world.close()
