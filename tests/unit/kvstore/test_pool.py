from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.block import BlockHash
from kvstore.eviction import EVICTION_POLICIES
from kvstore.keys import parse_key
from kvstore.layout import KVLayout
from kvstore.pool import PoolState, Removal, RequestKey, ReserveRequest, ReserveResult, StoredRun
from kvstore.transfer.base import RemoveStatus
from moontide.errors import BadRequest, BlockMissing
from tests.fakes.clock import FakeClock

LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=4,
    num_planes=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    block_tokens=4,
    layer_group=2,
)
UNIT = LAYOUT.block_bytes
ROOT = BlockHash(b"R" * 32)
RESERVED, WAIT, TOO_LARGE = ReserveResult.RESERVED, ReserveResult.WAIT, ReserveResult.TOO_LARGE


def h(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


def ask(name: str, *blocks: str, partial: bool = False, epoch: int = 1, lease_s: float = 10.0) -> ReserveRequest:
    return ReserveRequest(
        owner=RequestKey(name, epoch),
        layout=LAYOUT,
        root=ROOT,
        hashes=tuple(h(block) for block in blocks),
        has_partial=partial,
        lease_s=lease_s,
    )


class Pool(PoolState):
    """With a fake clock, and steps that tests repeat."""

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        self.clock = FakeClock()
        super().__init__(capacity_bytes=num_blocks * UNIT, clock=self.clock, policy=policy)

    def cache(self, name: str, *blocks: str) -> None:
        """A request that came, sealed everything and went."""
        request = ask(name, *blocks)
        assert self.reserve(request).result is RESERVED
        self.seal(request.owner, first_block=0, num_blocks=len(blocks))
        self.release(request.owner)

    def remove_due(self, status: RemoveStatus = RemoveStatus.REMOVED) -> set[str]:
        removals = self.due_removals(max_objects=1000)
        for removal in removals:
            self.finish_removal(removal, [status] * len(removal.keys))
        return {key for removal in removals for key in removal.keys}

    def hits(self, *blocks: str) -> int:
        probe = ask("probe", *blocks)
        hits = self.reserve(probe).hit_blocks
        self.release(probe.owner)
        return hits


@pytest.fixture
def pool() -> Pool:
    return Pool(10)


def test_reserve_counts_new_blocks_and_the_partial_one(pool: Pool) -> None:
    reply = pool.reserve(ask("a", "1", "2", partial=True))
    assert (reply.result, reply.hit_blocks, reply.needed_bytes) == (RESERVED, 0, 3 * UNIT)
    assert pool.stats().used_bytes == 3 * UNIT
    assert pool.stats().pinned_blocks == 2
    pool.check_invariants()


def test_blocks_of_another_request_are_shared(pool: Pool) -> None:
    pool.reserve(ask("a", "1", "2"))
    assert pool.reserve(ask("b", "1", "2", "3")).needed_bytes == UNIT
    pool.release(RequestKey("a", 1))
    assert pool.stats().used_bytes == 3 * UNIT
    pool.check_invariants()


def test_hits_are_the_leading_sealed_blocks(pool: Pool) -> None:
    pool.cache("a", "1", "2")
    assert pool.hits("1", "2", "3") == 2
    assert pool.hits("1", "x") == 1
    assert pool.hits("x") == 0


def test_reserve_is_idempotent_and_renews(pool: Pool) -> None:
    pool.reserve(ask("a", "1", lease_s=10))
    pool.clock.advance(9)
    assert pool.reserve(ask("a", "1", lease_s=10)).result is RESERVED
    pool.clock.advance(9)
    assert pool.expire() == []
    assert pool.stats().used_bytes == UNIT


def test_the_same_owner_with_another_chain_is_refused(pool: Pool) -> None:
    pool.reserve(ask("a", "1"))
    with pytest.raises(BadRequest, match="another chain"):
        pool.reserve(ask("a", "2"))


def test_a_block_under_another_parent_is_refused(pool: Pool) -> None:
    pool.reserve(ask("a", "1", "2"))
    with pytest.raises(BadRequest, match="another parent"):
        pool.reserve(ask("b", "2"))


def test_more_than_the_whole_pool_is_too_large(pool: Pool) -> None:
    reply = pool.reserve(ask("a", *map(str, range(10)), partial=True))
    assert (reply.result, reply.needed_bytes, reply.capacity_bytes) == (TOO_LARGE, 11 * UNIT, 10 * UNIT)
    assert pool.stats().used_bytes == 0


def test_all_or_nothing_when_pins_hold_the_room(pool: Pool) -> None:
    pool.reserve(ask("a", *map(str, range(8))))
    request = ask("b", "x", "y", "z")
    assert pool.reserve(request).result is WAIT
    assert pool.evict_for(request) == []
    assert pool.stats().used_bytes == 8 * UNIT
    pool.check_invariants()


def test_sealing_reports_one_run_with_its_parent(pool: Pool) -> None:
    request = ask("a", "1", "2", "3")
    pool.reserve(request)
    assert pool.seal(request.owner, first_block=0, num_blocks=1) == [StoredRun(ROOT, (h("1"),))]
    assert pool.seal(request.owner, first_block=0, num_blocks=3) == [StoredRun(h("1"), (h("2"), h("3")))]
    assert pool.seal(request.owner, first_block=0, num_blocks=3) == []


def test_a_block_waits_for_its_parent_to_be_sealed(pool: Pool) -> None:
    request = ask("a", "1", "2", "3")
    pool.reserve(request)
    assert pool.seal(request.owner, first_block=1, num_blocks=2) == []
    assert pool.stats().sealed_blocks == 0
    assert pool.seal(request.owner, first_block=0, num_blocks=1) == [StoredRun(ROOT, (h("1"), h("2"), h("3")))]
    pool.check_invariants()


def test_seal_after_the_reservations_end_says_so(pool: Pool) -> None:
    with pytest.raises(BlockMissing, match="reserve again"):
        pool.seal(RequestKey("a", 1), first_block=0, num_blocks=1)


@pytest.mark.parametrize(("first", "num"), [(0, 3), (2, 1), (3, 0)])
def test_seal_outside_of_the_reservation_is_refused(pool: Pool, first: int, num: int) -> None:
    pool.reserve(ask("a", "1", "2"))
    with pytest.raises(BadRequest, match="2 reserved"):
        pool.seal(RequestKey("a", 1), first_block=first, num_blocks=num)


def test_release_keeps_sealed_blocks_and_removes_the_rest(pool: Pool) -> None:
    request = ask("a", "1", "2", partial=True)
    pool.reserve(request)
    pool.seal(request.owner, first_block=0, num_blocks=1)
    pool.release(request.owner)
    assert pool.stats().used_bytes == 3 * UNIT, "what leaves counts until it is gone"
    removed = pool.remove_due()
    assert {type(parse_key(key)).__name__ for key in removed} == {"BlockKey", "PartialKey"}
    assert len(removed) == 2 * LAYOUT.num_groups
    assert pool.stats().used_bytes == UNIT
    assert pool.hits("1", "2") == 1
    pool.check_invariants()


def test_release_is_idempotent(pool: Pool) -> None:
    pool.reserve(ask("a", "1"))
    pool.release(RequestKey("a", 1))
    pool.release(RequestKey("a", 1))
    pool.release(RequestKey("never", 1))
    pool.check_invariants()


def test_an_open_block_that_another_request_waits_for_stays(pool: Pool) -> None:
    pool.reserve(ask("a", "1"))
    pool.reserve(ask("b", "1"))
    pool.release(RequestKey("a", 1))
    assert pool.remove_due() == set()
    pool.release(RequestKey("b", 1))
    assert len(pool.remove_due()) == LAYOUT.num_groups


def test_leases_expire_unless_renewed(pool: Pool) -> None:
    pool.reserve(ask("a", "1", lease_s=10))
    pool.reserve(ask("a", "1", epoch=2, lease_s=10))
    pool.reserve(ask("b", "2", lease_s=10))
    pool.clock.advance(6)
    assert pool.renew(["a", "nobody"], lease_s=10) == ["nobody"]
    pool.clock.advance(6)
    assert pool.expire() == [RequestKey("b", 1)]
    pool.clock.advance(6)
    assert set(pool.expire()) == {RequestKey("a", 1), RequestKey("a", 2)}
    pool.check_invariants()


def test_a_leased_object_counts_until_it_is_gone(pool: Pool) -> None:
    pool.reserve(ask("a", partial=True))
    pool.release(RequestKey("a", 1))
    assert pool.remove_due(RemoveStatus.LEASED)
    assert pool.stats().used_bytes == UNIT
    assert pool.stats().objects_to_remove == LAYOUT.num_groups
    assert not pool.remove_due(), "not before the retry time"
    pool.clock.advance(1)
    assert pool.remove_due()
    assert pool.stats().used_bytes == 0
    assert pool.stats().objects_to_remove == 0


def test_removed_objects_are_looked_for_again_because_a_late_put_may_arrive(pool: Pool) -> None:
    pool.reserve(ask("a", "1", partial=True))
    pool.release(RequestKey("a", 1))
    first = pool.remove_due()
    rounds = 0
    for _ in range(60):
        pool.clock.advance(1)
        again = pool.remove_due()
        assert again in (set(), first)
        rounds += bool(again)
    assert rounds >= 3
    assert pool.stats().used_bytes == 0


def test_victims_are_removed_before_what_is_only_looked_for_again(pool: Pool) -> None:
    pool.reserve(ask("gone", *"abcdef"))
    pool.release(RequestKey("gone", 1))
    pool.remove_due()
    pool.clock.advance(1)
    pool.cache("cold", *"12345")
    request = ask("new", *"uvwxyz")
    assert pool.reserve(request).result is WAIT
    assert pool.evict_for(request) == [h("5")]
    removals = pool.due_removals(max_objects=LAYOUT.num_groups)
    assert [removal.owner for removal in removals] == [h("5")]
    for removal in removals:
        pool.finish_removal(removal, [RemoveStatus.REMOVED] * len(removal.keys))
    assert pool.reserve(request).result is RESERVED
    pool.check_invariants()
    again = pool.due_removals(max_objects=1000)
    assert [removal.owner for removal in again] == [h(name) for name in "fedcba"], "and those in their order"


def test_a_block_being_removed_cannot_be_reserved(pool: Pool) -> None:
    pool.reserve(ask("a", "1"))
    pool.release(RequestKey("a", 1))
    (removal,) = pool.due_removals(max_objects=1000)
    assert pool.reserve(ask("b", "1")).result is WAIT
    pool.finish_removal(removal, [RemoveStatus.REMOVED] * 2)
    assert pool.reserve(ask("b", "1")).result is RESERVED
    pool.clock.advance(60)
    assert pool.due_removals(max_objects=1000) == [], "what is reserved again is not removed"
    pool.check_invariants()


def test_a_partial_block_being_removed_cannot_be_reserved(pool: Pool) -> None:
    pool.reserve(ask("a", partial=True))
    pool.release(RequestKey("a", 1))
    (removal,) = pool.due_removals(max_objects=1000)
    assert pool.reserve(ask("a", partial=True)).result is WAIT
    pool.finish_removal(removal, [RemoveStatus.MISSING] * 2)
    assert pool.reserve(ask("a", partial=True)).result is RESERVED
    pool.clock.advance(60)
    assert pool.due_removals(max_objects=1000) == []


def test_a_block_that_waits_for_its_removal_is_taken_back(pool: Pool) -> None:
    pool.reserve(ask("a", "1"))
    pool.release(RequestKey("a", 1))
    assert pool.reserve(ask("b", "1")).needed_bytes == 0
    assert pool.remove_due() == set()
    assert pool.stats().used_bytes == UNIT
    pool.check_invariants()


def test_eviction_takes_the_coldest_leaves_first(pool: Pool) -> None:
    pool.cache("old", "1", "2", "3")
    pool.cache("young", "1", "x", "y")
    pool.cache("other", "p", "q", "r", "s", "t")
    request = ask("new", "n1", "n2", "n3")
    assert pool.reserve(request).result is WAIT
    assert pool.evict_for(request) == [h("3"), h("2"), h("y")]
    assert pool.reserve(request).result is WAIT, "bytes come back when the objects are gone"
    pool.remove_due()
    assert pool.reserve(request).result is RESERVED
    pool.check_invariants()


def test_a_parent_never_leaves_before_its_children(pool: Pool) -> None:
    pool.cache("a", "1", "2", "3", "4", "5")
    pool.cache("b", "1", "2", "x")
    request = ask("new", *(f"n{i}" for i in range(9)))
    victims = pool.evict_for(request)
    assert len(victims) == 5
    assert h("1") not in victims
    assert victims.index(h("5")) < victims.index(h("4")) < victims.index(h("3"))
    pool.remove_due()
    pool.check_invariants()


def test_eviction_spares_what_the_request_hits() -> None:
    pool = Pool(5)
    pool.cache("a", "1", "2", "3")
    pool.cache("b", "x", "y")
    request = ask("new", "1", "2", "3", "4")
    assert pool.evict_for(request) == [h("y")]
    pool.remove_due()
    assert pool.reserve(request).hit_blocks == 3
    pool.release(request.owner)
    pool.check_invariants()


def test_eviction_takes_nothing_when_all_of_it_would_not_do() -> None:
    pool = Pool(5)
    pool.reserve(ask("pin", "p", "q", "r"))
    pool.cache("a", "1")
    request = ask("new", "n1", "n2", "n3")
    assert pool.evict_for(request) == []
    assert pool.hits("1") == 1


def test_eviction_does_not_wait_for_a_partial_block_that_its_reader_keeps() -> None:
    """It was read a moment ago: with its room counted on, every request at a full pool would wait for that lease."""
    pool = Pool(3)
    pool.cache("cold", "1", "2")
    pool.reserve(ask("a", partial=True))
    pool.release(RequestKey("a", 1))
    pool.remove_due(RemoveStatus.LEASED)
    request = ask("b", "3")
    assert pool.evict_for(request) == [h("2")]
    pool.remove_due()
    assert pool.reserve(request).result is RESERVED
    pool.check_invariants()


def test_eviction_waits_for_what_is_leaving_already() -> None:
    pool = Pool(4)
    pool.cache("a", "1", "2")
    pool.reserve(ask("b", "x", "y"))
    pool.release(RequestKey("b", 1))
    assert pool.evict_for(ask("new", "n1", "n2")) == []


def test_named_blocks_leave_with_all_that_follows_them(pool: Pool) -> None:
    pool.cache("a", "1", "2", "3")
    pool.cache("b", "1", "2", "x")
    pool.cache("c", "p", "q")
    eviction = pool.evict_chains([h("3"), h("2"), h("unknown")])
    assert set(eviction.hashes) == {h("2"), h("3"), h("x")}
    assert eviction.hashes[-1] == h("2"), "children first"
    assert (eviction.num_bytes, eviction.num_pinned) == (3 * UNIT, 0)
    assert pool.hits("1", "2") == 1
    pool.check_invariants()


def test_named_blocks_that_are_held_stay(pool: Pool) -> None:
    pool.cache("a", "1", "2", "3")
    pool.reserve(ask("b", "1", "2"))
    eviction = pool.evict_chains([h("1")])
    assert (eviction.hashes, eviction.num_pinned) == ([h("3")], 2)
    pool.check_invariants()


def test_the_coldest_leave_until_enough_is_gone(pool: Pool) -> None:
    pool.cache("a", "1", "2", "3")
    pool.cache("b", "p")
    pool.reserve(ask("c", "x"))
    assert pool.evict_coldest(UNIT + 1).hashes == [h("3"), h("2")]
    everything = pool.evict_coldest(1 << 40)
    assert (everything.hashes, everything.num_bytes) == ([h("1"), h("p")], 2 * UNIT)
    assert pool.stats().pinned_blocks == 1
    pool.check_invariants()


def test_blocks_are_told_with_their_use(pool: Pool) -> None:
    pool.cache("a", "1", "2")
    pool.clock.advance(5)
    pool.reserve(ask("b", "1", "x"))
    told = {block.hash: (block.is_sealed, block.num_refs, block.num_uses, block.idle_s) for block in pool.blocks()}
    assert told == {h("1"): (True, 1, 2, 0.0), h("2"): (True, 0, 1, 5.0), h("x"): (False, 1, 1, 0.0)}
    assert [block.hash for block in pool.blocks(max_blocks=1)] == [h("1")]


def test_blocks_that_leave_while_they_are_told_are_left_out(pool: Pool) -> None:
    pool.cache("a", "1", "2")
    telling = pool.blocks()
    assert next(telling).hash == h("1")
    pool.evict_chains([h("2")])
    assert list(telling) == []


def test_layouts_of_two_models_share_the_pool(pool: Pool) -> None:
    other = replace(LAYOUT, model_fingerprint="g", num_layers=8)
    request = replace(ask("b", "x"), layout=other)
    pool.reserve(ask("a", "1"))
    assert pool.reserve(request).needed_bytes == 2 * UNIT
    pool.check_invariants()


def test_many_releases_leave_a_bounded_heap(pool: Pool) -> None:
    for i in range(5000):
        pool.cache(f"r{i}", "1", "2")
    assert len(pool._cold) < 2000


CHAINS = [
    ("1",), ("1", "2"), ("1", "2", "3"), ("1", "2", "4", "5"), ("1", "6"), ("7", "8", "9"), ("7", "8", "10", "11", "12"), (),
]  # fmt: skip


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls keeps the invariants, and at the end everything comes back."""

    @initialize(num_blocks=st.integers(2, 9), policy=st.sampled_from(sorted(EVICTION_POLICIES)))
    def start(self, num_blocks: int, policy: str) -> None:
        self.pool = Pool(num_blocks, policy)
        self.in_flight: list[Removal] = []
        self.published: set[BlockHash] = set()

    @rule(
        chain=st.sampled_from(CHAINS),
        name=st.sampled_from("abcd"),
        epoch=st.integers(1, 2),
        partial=st.booleans(),
        evict=st.booleans(),
    )
    def reserve(self, chain: tuple[str, ...], name: str, epoch: int, partial: bool, evict: bool) -> None:
        request = ask(name, *chain, partial=partial, epoch=epoch)
        try:
            reply = self.pool.reserve(request)
        except BadRequest:
            assert self.pool.holds(request.owner)
            return
        assert all(hash_ in self.published for hash_ in request.hashes[: reply.hit_blocks])
        if reply.result is WAIT and evict:
            self.published -= set(self.pool.evict_for(request))

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 2), first=st.integers(0, 3), num=st.integers(1, 5))
    def seal(self, name: str, epoch: int, first: int, num: int) -> None:
        try:
            runs = self.pool.seal(RequestKey(name, epoch), first_block=first, num_blocks=num)
        except (BlockMissing, BadRequest):
            return
        for run in runs:
            assert run.parent == ROOT or run.parent in self.published
            self.published |= set(run.hashes)

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 2))
    def release(self, name: str, epoch: int) -> None:
        self.pool.release(RequestKey(name, epoch))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.pool.clock.advance(seconds)
        self.pool.expire()

    @rule(names=st.sets(st.sampled_from("abcd")))
    def renew(self, names: set[str]) -> None:
        self.pool.renew(names, lease_s=10)

    @rule(num_blocks=st.integers(1, 9))
    def evict_coldest(self, num_blocks: int) -> None:
        idle = sum(block.num_refs == 0 for block in self.pool.blocks())
        eviction = self.pool.evict_coldest(num_blocks * UNIT)
        assert eviction.num_bytes == len(eviction.hashes) * UNIT == min(num_blocks, idle) * UNIT
        self.published -= set(eviction.hashes)

    @rule(names=st.sets(st.sampled_from("12345678"), min_size=1))
    def evict_chains(self, names: set[str]) -> None:
        pinned = {block.hash for block in self.pool.blocks() if block.num_refs}
        eviction = self.pool.evict_chains([h(name) for name in names])
        assert not pinned & set(eviction.hashes)
        assert {h(name) for name in names} & {block.hash for block in self.pool.blocks()} <= pinned
        self.published -= set(eviction.hashes)

    @rule(max_objects=st.integers(1, 8))
    def begin_removals(self, max_objects: int) -> None:
        self.in_flight += self.pool.due_removals(max_objects=max_objects)

    @rule(status=st.sampled_from(list(RemoveStatus)))
    def finish_removals(self, status: RemoveStatus) -> None:
        for removal in self.in_flight:
            self.pool.finish_removal(removal, [RemoveStatus.REMOVED, status])
        self.in_flight = []

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()

    @invariant()
    def events_tell_the_truth(self) -> None:
        if hasattr(self, "pool"):
            assert {block.hash for block in self.pool.blocks() if block.is_sealed} == self.published

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.finish_removals(RemoveStatus.REMOVED)
        self.time_passes(11.0)
        for _ in range(20):
            self.time_passes(1.0)
            self.begin_removals(1000)
            self.finish_removals(RemoveStatus.MISSING)
        stats = self.pool.stats()
        assert (stats.reservations, stats.pinned_blocks, stats.objects_to_remove) == (0, 0, 0)
        assert stats.used_bytes == stats.sealed_blocks * UNIT


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
