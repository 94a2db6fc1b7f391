from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block import BlockHash
from kvstore.config import KvStoreSettings
from kvstore.eviction import EVICTION_POLICIES
from kvstore.layout import KVLayout
from kvstore.pool import PoolState, RequestKey, ReserveRequest, ReserveResult
from kvstore.transfer.base import RemoveStatus
from moontide.errors import ConfigError
from tests.fakes.clock import FakeClock

LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=1,
    num_planes=1,
    num_kv_heads=1,
    head_dim=1,
    dtype="float32",
    block_tokens=1,
    layer_group=1,
)
ROOT = BlockHash(b"R" * 32)
Chain = tuple[BlockHash, ...]


@dataclass
class Block:
    last_use: int = 0
    num_uses: int = 1
    position: int = 0


class Pool(PoolState):
    def __init__(self, num_blocks: int, policy: str) -> None:
        self.clock = FakeClock()
        super().__init__(capacity_bytes=num_blocks * LAYOUT.block_bytes, clock=self.clock, policy=policy)
        self.num_asked = 0

    def ask(self, chain: Chain) -> int | None:
        """One prompt from reservation to release; its hit blocks, None if it is too large."""
        self.num_asked += 1
        self.clock.advance(60)
        owner = RequestKey(str(self.num_asked), 1)
        request = ReserveRequest(owner=owner, layout=LAYOUT, root=ROOT, hashes=chain, has_partial=False, lease_s=1.0)
        reply = self.reserve(request)
        if reply.result is ReserveResult.TOO_LARGE:
            return None
        if reply.result is ReserveResult.WAIT:
            self.evict_for(request)
            for removal in self.due_removals(max_objects=1000):
                self.finish_removal(removal, [RemoveStatus.REMOVED] * len(removal.keys))
            reply = self.reserve(request)
        assert reply.result is ReserveResult.RESERVED
        self.seal(owner, first_block=0, num_blocks=len(chain))
        self.release(owner)
        return reply.hit_blocks

    def held(self) -> set[str]:
        return {block.hash.rstrip(b".").decode() for block in self.blocks()}


def chain(*names: str) -> Chain:
    return tuple(BlockHash(name.encode().ljust(32, b".")) for name in names)


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        ("lru", Block(last_use=1, num_uses=9, position=0)),
        ("lfu", Block(last_use=5, num_uses=2, position=0)),
        ("length-aware", Block(last_use=7, num_uses=2, position=8)),
    ],
)
def test_each_policy_lets_another_block_go_first(policy: str, first: Block) -> None:
    blocks = [
        Block(last_use=1, num_uses=9, position=0),
        Block(last_use=5, num_uses=2, position=0),
        Block(last_use=7, num_uses=2, position=8),
        Block(last_use=8, num_uses=3, position=9),
    ]
    assert min(blocks, key=EVICTION_POLICIES[policy]) == first


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        # "hot" was asked for twice but long ago, "long" and "new" once; each policy gives up one leaf of the three.
        ("lru", {"long1", "long2", "long3", "new"}),
        ("lfu", {"hot", "long1", "long2", "new"}),
        ("length-aware", {"hot", "long1", "long2", "new"}),
    ],
)
def test_what_a_full_pool_keeps(policy: str, kept: set[str]) -> None:
    pool = Pool(5, policy)
    pool.ask(chain("hot"))
    pool.ask(chain("hot"))
    pool.ask(chain("long1", "long2", "long3"))
    pool.ask(chain("new"))
    pool.ask(chain("other"))
    assert pool.held() == kept | {"other"}
    pool.check_invariants()


def test_length_aware_gives_up_depth_before_age() -> None:
    pool = Pool(5, "length-aware")
    pool.ask(chain("old1", "old2"))
    pool.ask(chain("young1", "young2", "young3"))
    pool.ask(chain("x"))
    assert pool.held() == {"old1", "old2", "young1", "young2", "x"}


def test_uses_are_forgotten_when_a_block_leaves() -> None:
    pool = Pool(2, "lfu")
    for _ in range(3):
        pool.ask(chain("a"))
    pool.ask(chain("x", "y"))
    pool.ask(chain("a"))
    assert {block.num_uses for block in pool.blocks() if block.hash == chain("a")[0]} == {1}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_policy_never_cuts_a_chain(policy: str) -> None:
    pool = Pool(6, policy)
    for _ in range(3):
        pool.ask(chain("a", "b", "c"))
    pool.ask(chain("a", "b", "d"))
    for idx in range(12):
        pool.ask(chain(f"x{idx}", f"y{idx}"))
        pool.check_invariants()
    assert pool.stats().sealed_blocks == 6


@st.composite
def prompts(draw: st.DrawFn) -> list[Chain]:
    """Prompts that branch off from earlier ones."""
    made: list[Chain] = []
    for idx in range(draw(st.integers(1, 40))):
        base = draw(st.sampled_from(made)) if made and draw(st.booleans()) else ()
        shared = base[: draw(st.integers(0, len(base)))]
        own = draw(st.integers(0 if shared else 1, 5))
        made.append(shared + chain(*(f"{idx}-{at}" for at in range(own))))
    return made


def lru_hits(asked: list[Chain], num_blocks: int) -> list[int | None]:
    """Of a plain LRU cache of single blocks; a prompt touches its last block first."""
    cache: OrderedDict[BlockHash, None] = OrderedDict()
    hits: list[int | None] = []
    for one in asked:
        if len(one) > num_blocks:
            hits.append(None)
            continue
        present = [block_hash for block_hash in one if cache.pop(block_hash, ...) is None]
        assert present == list(one[: len(present)])
        hits.append(len(present))
        while len(cache) + len(one) > num_blocks:
            cache.popitem(last=False)
        cache.update(dict.fromkeys(reversed(one)))
    return hits


@settings(max_examples=150, deadline=None)
@given(asked=prompts(), num_blocks=st.integers(1, 20))
def test_lru_is_a_plain_lru_cache_of_blocks(asked: list[Chain], num_blocks: int) -> None:
    pool = Pool(num_blocks, "lru")
    assert [pool.ask(one) for one in asked] == lru_hits(asked, num_blocks)
    pool.check_invariants()


@settings(max_examples=60, deadline=None)
@given(asked=prompts(), num_blocks=st.integers(1, 20), policy=st.sampled_from(sorted(EVICTION_POLICIES)))
def test_no_policy_keeps_room_empty(asked: list[Chain], num_blocks: int, policy: str) -> None:
    pool = Pool(num_blocks, policy)
    different: set[BlockHash] = set()
    for one in asked:
        if pool.ask(one) is not None:
            different.update(one)
            assert pool.stats().sealed_blocks == min(num_blocks, len(different)) or pool.free_bytes == 0
            pool.check_invariants()


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kvstore\.eviction='fifo' is unknown; use one of lru, lfu, length-aware"):
        KvStoreSettings(master_rpc="127.0.0.1:1", master_http="127.0.0.1:2", eviction="fifo")
