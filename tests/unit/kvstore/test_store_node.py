from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvstore.block import BlockHash, root_hash
from kvstore.client import BlockRef, StoreClient
from kvstore.keys import parse_key
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState, ReserveReply, ReserveResult, StoredRun
from kvstore.transfer.base import RemoveStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.errors import BadRequest, ConfigError, NodeLost
from tests.fakes.clock import FakeClock
from tests.fakes.layouts import TINY_LAYOUT as LAYOUT

ROOT = root_hash(LAYOUT.digest(), "")
READ_LEASE_S = 5.0


class RecordingEvents:
    """Notes what was published, and how many objects were left at each `removed`."""

    def __init__(self, store: MemoryStore) -> None:
        self.stored_hashes: list[BlockHash] = []
        self.removed_hashes: list[BlockHash] = []
        self.objects_at_removed: list[int] = []
        self.number = 0
        self._store = store

    async def stored(self, runs: Sequence[StoredRun]) -> None:
        self.stored_hashes += [hash_ for run in runs for hash_ in run.hashes]

    async def removed(self, hashes: Sequence[BlockHash]) -> None:
        await asyncio.sleep(0)
        self.removed_hashes += hashes
        self.objects_at_removed.append(len(self._store.objects))

    async def heal(self) -> None:
        return None


class World:
    def __init__(self, num_blocks: int = 4) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(1 << 20, lease_s=READ_LEASE_S, clock=self.clock)
        self.transfer = MemoryTransfer(self.store)
        self.client = StoreClient(self.transfer, LAYOUT)
        self.arena = self.transfer.allocate(LAYOUT.object_bytes(0))
        self.events = RecordingEvents(self.store)
        self.pool = PoolState(capacity_bytes=num_blocks * LAYOUT.block_bytes, clock=self.clock)
        self.node = LocalStoreNode(self.pool, self.transfer, events=self.events)

    async def reserve(self, request_id: str, *names: str, partial: bool = False, lease_s: float = 10.0) -> ReserveReply:
        return await self.node.reserve(
            request_id=request_id,
            epoch=1,
            layout_digest=LAYOUT.digest(),
            parent_hash=ROOT,
            block_hashes=[block(name) for name in names],
            has_partial=partial,
            lease_s=lease_s,
        )

    def put(self, request_id: str, *names: str | None) -> None:
        for name in names:
            ref = BlockRef(block(name) if name else None, request_id, 1)
            for group_idx in range(LAYOUT.num_groups):
                self.client.put_group(group_idx, [(ref, self.arena.address)])

    async def cache(self, request_id: str, *names: str) -> None:
        assert (await self.reserve(request_id, *names)).result is ReserveResult.RESERVED
        self.put(request_id, *names)
        await self.node.seal(request_id=request_id, epoch=1, first_block=0, num_blocks=len(names))
        await self.node.release(request_id=request_id, epoch=1)


def block(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


@pytest.fixture
async def world() -> World:
    made = World()
    await made.node.register_layout(LAYOUT)
    return made


async def test_another_geometry_of_the_same_model_is_refused_with_both_layouts(world: World) -> None:
    other = replace(LAYOUT, block_tokens=8)
    with pytest.raises(ConfigError) as caught:
        await world.node.register_layout(other)
    assert LAYOUT.to_json() in str(caught.value)
    assert other.to_json() in str(caught.value)
    await world.node.register_layout(LAYOUT)
    await world.node.register_layout(replace(other, model_fingerprint="another model"))


async def test_an_unregistered_layout_is_refused(world: World) -> None:
    # Retriable: it means that the store process was started anew since the caller registered its layout.
    with pytest.raises(NodeLost, match="RegisterLayout"):
        await world.node.reserve(
            request_id="a",
            epoch=1,
            layout_digest=b"x" * 32,
            parent_hash=ROOT,
            block_hashes=[],
            has_partial=True,
            lease_s=1,
        )


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 1e9, float("nan")])
async def test_a_lease_out_of_bounds_is_refused(world: World, lease_s: float) -> None:
    with pytest.raises(BadRequest, match="lease_s="):
        await world.reserve("a", "1", lease_s=lease_s)


async def test_sealed_blocks_stay_after_release_and_are_hit(world: World) -> None:
    await world.cache("a", "1", "2")
    await world.node.tidy()
    reply = await world.reserve("b", "1", "2", "3")
    assert reply.hit_blocks == 2
    assert world.client.missing([BlockRef(block("1"), "b", 1), BlockRef(block("2"), "b", 1)]) == set()
    assert world.events.stored_hashes == [block("1"), block("2")]


async def test_eviction_publishes_before_bytes_go_and_makes_room_in_one_call(world: World) -> None:
    await world.cache("a", "1", "2", "3", "4")
    reply = await world.reserve("b", "x", "y")
    assert reply.result is ReserveResult.RESERVED
    assert world.events.removed_hashes == [block("4"), block("3")]
    assert world.events.objects_at_removed == [4 * LAYOUT.num_groups], "all objects were there when it was published"
    assert len(world.store.objects) == 2 * LAYOUT.num_groups
    assert (await world.reserve("c", "1", "2")).hit_blocks == 2


async def test_a_block_that_is_read_makes_the_request_wait_until_it_is_gone(world: World) -> None:
    await world.cache("a", "1", "2", "3", "4")
    assert world.client.get_group(0, [(BlockRef(block("4"), "r", 1), world.arena.address)]) == [True]
    assert (await world.reserve("b", "x")).result is ReserveResult.WAIT
    await world.node.tidy()
    assert (await world.reserve("b", "x")).result is ReserveResult.WAIT
    world.clock.advance(READ_LEASE_S)
    assert (await world.reserve("b", "x")).result is ReserveResult.RESERVED


async def test_partial_objects_are_gone_after_release_also_when_a_late_put_arrives(world: World) -> None:
    await world.reserve("a", "1", partial=True)
    world.put("a", None)
    await world.node.release(request_id="a", epoch=1)
    await world.node.tidy()
    assert not world.store.objects
    world.put("a", None)
    world.clock.advance(2)
    await world.node.tidy()
    assert not world.store.objects


async def test_an_expired_reservation_gives_everything_back(world: World) -> None:
    await world.reserve("a", "1", "2", partial=True, lease_s=10)
    world.put("a", "1", None)
    world.clock.advance(10)
    await world.node.tidy()
    assert not world.store.objects
    stats = await world.node.stats()
    assert (stats.used_bytes, stats.reservations, stats.pinned_blocks) == (0, 0, 0)
    world.pool.check_invariants()


async def test_removal_is_tried_again_after_the_store_was_away(world: World) -> None:
    await world.reserve("a", partial=True)
    world.put("a", None)
    await world.node.release(request_id="a", epoch=1)
    world.store.available = False
    await world.node.tidy()
    assert (await world.node.stats()).objects_to_remove == LAYOUT.num_groups
    world.store.available = True
    world.clock.advance(1)
    await world.node.tidy()
    assert not world.store.objects
    assert (await world.node.stats()).objects_to_remove == 0


async def test_a_cancelled_reserve_does_not_block_removals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.cache("a", "1", "2", "3", "4")
    gate, entered = threading.Event(), threading.Event()
    real_remove = world.transfer.remove

    def slow_remove(keys: Sequence[str]) -> list[RemoveStatus]:
        entered.set()
        assert gate.wait(10)
        return real_remove(keys)

    monkeypatch.setattr(world.transfer, "remove", slow_remove)
    call = asyncio.create_task(world.reserve("b", "x"))
    await asyncio.to_thread(entered.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    await world.node.close()
    assert (await world.reserve("c", "x")).result is ReserveResult.RESERVED
    world.pool.check_invariants()


async def test_a_seal_whose_caller_gives_up_is_published_all_the_same(world: World) -> None:
    gate, entered = asyncio.Event(), asyncio.Event()
    real_stored = world.events.stored

    async def slow_stored(runs: Sequence[StoredRun]) -> None:
        entered.set()
        await gate.wait()
        await real_stored(runs)

    world.events.stored = slow_stored  # type: ignore[method-assign]
    await world.reserve("a", "1")
    world.put("a", "1")
    call = asyncio.create_task(world.node.seal(request_id="a", epoch=1, first_block=0, num_blocks=1))
    await entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    await world.node.close()
    assert world.events.stored_hashes == [block("1")]
    assert (await world.reserve("b", "1")).hit_blocks == 1


async def test_one_round_removes_everything_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node._OBJECTS_PER_ROUND", 2)
    world = World(num_blocks=16)
    await world.node.register_layout(LAYOUT)
    names = [f"n{idx}" for idx in range(15)]
    await world.reserve("a", *names, partial=True)
    world.put("a", *names, None)
    await world.node.release(request_id="a", epoch=1)
    await world.node.tidy()
    assert not world.store.objects
    assert (await world.node.stats()).used_bytes == 0


async def test_a_round_ends_while_nothing_can_be_removed(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr("kvstore.node._OBJECTS_PER_ROUND", 2)
    await world.reserve("a", "1", "2", partial=True)
    await world.node.release(request_id="a", epoch=1)
    world.store.available = False
    async with asyncio.timeout(10):
        await world.node.tidy()
    assert (await world.node.stats()).objects_to_remove == 3 * LAYOUT.num_groups


async def test_a_partial_block_never_inherits_the_bytes_of_an_earlier_one_of_its_name(world: World) -> None:
    await world.reserve("a", partial=True)
    world.put("a", None)
    assert world.client.get_group(0, [(BlockRef(None, "a", 1), world.arena.address)]) == [True]
    await world.node.release(request_id="a", epoch=1)
    await world.node.tidy()
    assert world.store.objects, "a reader holds it"
    assert (await world.reserve("a", partial=True)).result is ReserveResult.WAIT
    world.clock.advance(READ_LEASE_S)
    assert (await world.reserve("a", partial=True)).result is ReserveResult.RESERVED
    assert not world.store.objects
    world.pool.check_invariants()


async def test_the_janitor_runs_until_cancelled(world: World) -> None:
    await world.reserve("a", partial=True)
    world.put("a", None)
    await world.node.release(request_id="a", epoch=1)
    janitor = asyncio.create_task(world.node.run())
    async with asyncio.timeout(10):
        while world.store.objects:
            await asyncio.sleep(0.01)
    janitor.cancel()
    await asyncio.gather(janitor, return_exceptions=True)


async def test_too_large_names_the_pool(world: World) -> None:
    reply = await world.reserve("a", *"12345")
    assert reply.result is ReserveResult.TOO_LARGE
    assert reply.capacity_bytes == 4 * LAYOUT.block_bytes
    assert reply.needed_bytes == 5 * LAYOUT.block_bytes


async def test_object_keys_parse(world: World) -> None:
    await world.reserve("a", "1", partial=True)
    world.put("a", "1", None)
    assert all(parse_key(key) is not None for key in world.store.objects)


async def test_objects_in_other_segments_are_counted_above_a_fill_level(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misplaced(keys: Sequence[str]) -> list[str]:
        return [key for key in keys if block("2").hex() in key]

    monkeypatch.setattr(world.transfer, "misplaced", misplaced)
    world.node = LocalStoreNode(world.pool, world.transfer, check_placement_above=0.5)
    await world.node.register_layout(LAYOUT)
    await world.cache("a", "3", "1")
    await world.node.close()
    assert world.node.metrics.misplaced._value.get() == 0, "half full is not above"
    await world.cache("b", "3", "1", "2")
    await world.node.close()
    assert world.node.metrics.misplaced._value.get() == LAYOUT.num_groups
    world.store.available = False
    await world.reserve("c", "4")
    await world.node.seal(request_id="c", epoch=1, first_block=0, num_blocks=1)
    await world.node.close()


async def test_drain_grants_nothing_new_and_lets_what_is_reserved_come_to_its_end(world: World) -> None:
    await world.reserve("open", "a")
    drain = asyncio.create_task(world.node.drain(10.0))
    await asyncio.sleep(0)
    with pytest.raises(NodeLost, match="shuts down"):
        await world.reserve("new", "b")
    assert (await world.reserve("open", "a")).result is ReserveResult.RESERVED, "asked once more, as after a lost reply"
    world.put("open", "a")
    await world.node.seal(request_id="open", epoch=1, first_block=0, num_blocks=1)
    assert await world.node.renew(["open"], lease_s=10.0) == []
    assert not drain.done()
    await world.node.release(request_id="open", epoch=1)
    await asyncio.wait_for(drain, 5.0)


async def test_drain_that_begins_while_room_is_made_grants_nothing_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.cache("a", "1", "2", "3", "4")
    gate, entered = threading.Event(), threading.Event()
    real_remove = world.transfer.remove

    def slow_remove(keys: Sequence[str]) -> list[RemoveStatus]:
        entered.set()
        assert gate.wait(10)
        return real_remove(keys)

    monkeypatch.setattr(world.transfer, "remove", slow_remove)
    call = asyncio.create_task(world.reserve("b", "x"))
    await asyncio.to_thread(entered.wait, 10)
    await world.node.drain(10.0)
    gate.set()
    with pytest.raises(NodeLost, match="shuts down"):
        await call
    assert world.pool.stats().reservations == 0
    world.pool.check_invariants()


async def test_drain_gives_up_after_its_time(world: World) -> None:
    await world.reserve("open", "a")
    await world.node.drain(0.01)
    assert world.pool.stats().reservations == 1
