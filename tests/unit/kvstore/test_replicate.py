"""Two hosts' pools over one in-memory store: whose objects are whose, and what a replication does when things are short or damaged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kvstore.block import BlockHash
from kvstore.client import BlockRef, StoreClient
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState, ReserveResult
from kvstore.replicate import Replicator
from kvstore.transfer.base import GetItem, GetStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.errors import NodeLost
from tests.fakes.clock import FakeClock
from tests.unit.kvstore.test_store_node import LAYOUT, ROOT, RecordingEvents, block

TIMEOUT_S = 10.0


class Host:
    def __init__(self, store: MemoryStore, node_id: str, *, num_blocks: int, clock: FakeClock) -> None:
        self.node_id = node_id
        self.transfer = MemoryTransfer(store)
        self.client = StoreClient(self.transfer, LAYOUT)
        self.arena = self.transfer.allocate(LAYOUT.object_bytes(0))
        self.events = RecordingEvents(store)
        self.pool = PoolState(capacity_bytes=num_blocks * LAYOUT.block_bytes, clock=clock, node_id=node_id)
        self.node = LocalStoreNode(self.pool, self.transfer, events=self.events)

    async def reserve(self, request_id: str, names: str) -> ReserveResult:
        reply = await self.node.reserve(
            request_id=request_id,
            epoch=1,
            layout_digest=LAYOUT.digest(),
            parent_hash=ROOT,
            block_hashes=[block(name) for name in names],
            has_partial=False,
            lease_s=TIMEOUT_S,
        )
        return reply.result

    async def cache(self, names: str) -> None:
        """Compute a prompt here; every block has its name as its bytes."""
        assert await self.reserve("cache", names) is ReserveResult.RESERVED
        for name in names:
            for group_idx in range(LAYOUT.num_groups):
                self.arena.buffer[: LAYOUT.payload_bytes(group_idx)] = name.encode() * LAYOUT.payload_bytes(group_idx)
                self.client.put_group(group_idx, [(self.ref(name), self.arena.address)])
        await self.node.seal(request_id="cache", epoch=1, first_block=0, num_blocks=len(names))
        await self.node.release(request_id="cache", epoch=1)

    def ref(self, name: str) -> BlockRef:
        return BlockRef(block(name), "r", 1, self.node_id)

    def key(self, name: str, group_idx: int) -> str:
        return self.ref(name).key(LAYOUT.digest(), group_idx)

    def holds(self, names: str) -> bool:
        """Whether its own objects of these blocks can be read and are right."""
        for name in names:
            for group_idx in range(LAYOUT.num_groups):
                if self.client.get_group(group_idx, [(self.ref(name), self.arena.address)]) != [True]:
                    return False
                nbytes = LAYOUT.payload_bytes(group_idx)
                assert self.arena.buffer[:nbytes] == name.encode() * nbytes
        return True


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(1 << 20, clock=self.clock)
        self.near = Host(self.store, "near", num_blocks=4, clock=self.clock)
        self.far = Host(self.store, "far", num_blocks=8, clock=self.clock)
        self.others = ["nobody", "far"]
        self.num_copied = 0
        self.replicator = Replicator(
            self.near.node, self.near.transfer, other_holders=self._other_holders, clock=self.clock
        )

    async def _other_holders(self) -> Sequence[str]:
        return self.others

    async def replicate(self, names: str) -> int:
        hashes: list[BlockHash] = [block(name) for name in names]
        replica = await self.replicator.replicate(
            layout_digest=LAYOUT.digest(), root=ROOT, hashes=hashes, timeout_s=TIMEOUT_S
        )
        self.num_copied += replica.copied_blocks
        return replica.num_blocks


@pytest.fixture
async def world() -> World:
    made = World()
    for host in (made.near, made.far):
        await host.node.register_layout(LAYOUT)
    return made


async def test_blocks_are_copied_published_and_cold(world: World) -> None:
    await world.far.cache("abc")
    assert await world.replicate("abc") == 3
    assert world.near.holds("abc")
    assert world.near.events.stored_hashes == [block(name) for name in "abc"]
    stats = await world.near.node.stats()
    assert (stats.sealed_blocks, stats.pinned_blocks, stats.reservations) == (3, 0, 0)
    assert world.replicator.num_blocks == 3
    world.clock.advance(TIMEOUT_S)
    assert await world.near.reserve("prompt", "wxyz") is ReserveResult.RESERVED, "nothing holds the replica"
    assert world.replicator.num_blocks == 0
    world.near.pool.check_invariants()


async def test_each_host_evicts_its_own_objects(world: World) -> None:
    await world.far.cache("abc")
    await world.replicate("abc")
    assert await world.far.reserve("prompt", "qrstuvwx") is not ReserveResult.TOO_LARGE
    world.clock.advance(TIMEOUT_S)
    await world.far.node.tidy()
    assert not world.far.holds("a")
    assert world.near.holds("abc")


async def test_two_hosts_that_compute_one_block_hold_one_object_each(world: World) -> None:
    await world.far.cache("a")
    await world.near.cache("a")
    assert len(world.store.objects) == 2 * LAYOUT.num_groups
    assert world.near.holds("a")
    assert world.far.holds("a")


async def test_only_what_is_missing_is_copied(world: World) -> None:
    await world.near.cache("ab")
    await world.far.cache("abcd")
    assert await world.replicate("abcde") == 4
    assert world.near.node.metrics.replicated_blocks._value.get() == world.num_copied == 2
    assert await world.replicate("abcd") == 4
    assert await world.replicate("xyz") == 0


async def test_what_does_not_fit_is_left_out(world: World) -> None:
    await world.far.cache("abcdefgh")
    assert await world.near.reserve("pins", "xy") is ReserveResult.RESERVED
    assert await world.replicate("abcdefgh") == 2
    assert await world.near.reserve("more", "zw") is ReserveResult.RESERVED
    assert await world.replicate("abcdefgh") == 0
    world.near.pool.check_invariants()


async def test_a_damaged_object_ends_the_replica_before_its_block(world: World) -> None:
    await world.far.cache("abc")
    key = world.far.key("b", LAYOUT.num_groups - 1)
    world.store.objects[key] = b"x" + world.store.objects[key][1:]
    assert await world.replicate("abc") == 1
    await world.near.node.tidy()
    assert not world.near.holds("b")
    assert sum(key.endswith("/near") for key in world.store.objects) == LAYOUT.num_groups
    world.near.pool.check_invariants()


async def test_no_other_store_is_no_replica(world: World) -> None:
    await world.far.cache("abc")
    world.others = []
    assert await world.replicate("abc") == 0


async def test_an_unregistered_layout_is_refused(world: World) -> None:
    with pytest.raises(NodeLost, match="RegisterLayout"):
        await world.replicator.replicate(layout_digest=b"x" * 32, root=ROOT, hashes=[block("a")], timeout_s=1.0)


async def test_a_caller_that_gives_up_leaves_a_whole_replica(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.far.cache("ab")
    gate, entered = threading.Event(), threading.Event()
    real_get = world.near.transfer.get

    def slow_get(items: Sequence[GetItem]) -> list[GetStatus]:
        entered.set()
        assert gate.wait(10)
        return real_get(items)

    monkeypatch.setattr(world.near.transfer, "get", slow_get)
    call = asyncio.create_task(world.replicate("ab"))
    await asyncio.to_thread(entered.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    await world.replicator.close()
    assert world.near.holds("ab")
    assert (await world.near.node.stats()).reservations == 0
