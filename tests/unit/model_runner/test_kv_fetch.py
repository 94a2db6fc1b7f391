"""Blocks come from the store into their pages in all layer groups, or are known to be missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.block import BlockHash
from kvstore.client import BlockRef, StoreClient
from kvstore.layout import KVLayout
from kvstore.transfer.base import GetItem, GetStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from model_runner import kv_fetch
from model_runner.kv_cache import PagedKVCache
from model_runner.kv_fetch import fetch_blocks
from model_runner.stage import StageSpec

LAYOUT = KVLayout(
    model_fingerprint="m",
    num_layers=5,
    num_planes=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    block_tokens=4,
    layer_group=2,
)
SPEC = StageSpec(stage_idx=0, num_stages=1, start_layer=0, end_layer=5, num_layers=5)
REFS = [*(BlockRef(BlockHash(bytes([n]) * 32), "r", 1) for n in range(3)), BlockRef(None, "r", 1)]
PAGES = [5, 2, 7, 0]
BLOCKS = list(zip(REFS, PAGES, strict=True))


class CountingTransfer(MemoryTransfer):
    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.gets: list[int] = []
        """Objects of each get."""

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        self.gets.append(len(items))
        return super().get(items)


class World:
    """A store with all blocks in it, and empty pages."""

    def __init__(self) -> None:
        self.store = MemoryStore(1 << 20)
        self.transfer = CountingTransfer(self.store)
        self.client = StoreClient(self.transfer, LAYOUT)
        self.source, self.kv = self._pages(), self._pages()
        for local_idx in range(SPEC.num_local_layers):
            for idx, page in enumerate(PAGES):
                self.source.layer(local_idx)[page] = 10 * local_idx + idx + 1
        for group_idx in self.source.groups:
            self.client.put_group(group_idx, [(ref, self.source.slot_address(group_idx, page)) for ref, page in BLOCKS])

    def _pages(self) -> PagedKVCache:
        arena = self.transfer.allocate(PagedKVCache.arena_bytes(LAYOUT, SPEC, 8))
        return PagedKVCache(LAYOUT, SPEC, num_pages=8, arena=arena.buffer)

    def key(self, idx: int, group_idx: int) -> str:
        return REFS[idx].key(LAYOUT.digest(), group_idx)

    def holds(self, idx: int) -> bool:
        page = PAGES[idx]
        layers = range(SPEC.num_local_layers)
        return all(bool((self.kv.layer(n)[page] == self.source.layer(n)[page]).all()) for n in layers)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def group_per_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_fetch, "MIN_CALL_BYTES", 1)


def never() -> bool:
    return False


@pytest.mark.usefixtures("group_per_get")
def test_groups_come_one_after_the_other_and_are_told_of(world: World) -> None:
    told: list[int] = []
    arrived = fetch_blocks(world.client, world.kv, BLOCKS, is_cancelled=never, on_groups=told.append)
    assert arrived == [True] * 4
    assert all(world.holds(idx) for idx in range(4))
    assert told == [1, 2, 3]
    assert world.transfer.gets == [4, 4, 4]


def test_small_groups_share_a_get(world: World) -> None:
    told: list[int] = []
    assert fetch_blocks(world.client, world.kv, BLOCKS, is_cancelled=never, on_groups=told.append) == [True] * 4
    assert world.transfer.gets == [12]
    assert told == [3]


def test_a_get_is_bounded_in_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = LAYOUT.object_bytes(0)
    monkeypatch.setattr(kv_fetch, "MAX_CALL_BYTES", 3 * largest)
    told: list[int] = []
    assert fetch_blocks(world.client, world.kv, BLOCKS, is_cancelled=never, on_groups=told.append) == [True] * 4
    assert all(world.holds(idx) for idx in range(4))
    assert sum(world.transfer.gets) == 12
    assert max(world.transfer.gets[:-1]) == 3
    assert told[-1] == 3
    assert told == sorted(told)


@pytest.mark.usefixtures("group_per_get")
@pytest.mark.parametrize(("only_prefix", "arrived", "gets"), [
    (False, [True, False, True, True], [4, 3, 3]),
    (True, [True, False, False, False], [4, 1, 1]),
])  # fmt: skip
def test_a_block_that_is_not_there_is_not_asked_for_again(
    world: World, only_prefix: bool, arrived: list[bool], gets: list[int]
) -> None:
    del world.store.objects[world.key(1, 0)]
    told: list[int] = []
    assert arrived == fetch_blocks(
        world.client, world.kv, BLOCKS, is_cancelled=never, only_prefix=only_prefix, on_groups=told.append
    )
    assert world.transfer.gets == gets
    assert all(world.holds(idx) == is_there for idx, is_there in enumerate(arrived) if is_there)
    assert told == [], "a group is told of only when it is there for all blocks"


@pytest.mark.usefixtures("group_per_get")
def test_damage_in_a_later_group_is_a_missing_block(world: World) -> None:
    world.store.objects[world.key(3, 2)] = world.store.objects[world.key(2, 2)]
    told: list[int] = []
    assert fetch_blocks(world.client, world.kv, BLOCKS, is_cancelled=never, on_groups=told.append) == [
        True, True, True, False,
    ]  # fmt: skip
    assert told == [1, 2]


def test_nothing_more_is_read_when_every_block_is_missing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_fetch, "MIN_CALL_BYTES", 1)
    world.store.objects.clear()
    assert fetch_blocks(world.client, world.kv, BLOCKS, is_cancelled=never) == [False] * 4
    assert world.transfer.gets == [4]


@pytest.mark.usefixtures("group_per_get")
def test_cancelled_fetch_stops_before_the_next_get(world: World) -> None:
    answers = iter([False, True])
    assert fetch_blocks(world.client, world.kv, BLOCKS, is_cancelled=lambda: next(answers)) == [False] * 4
    assert world.transfer.gets == [4]


def test_nothing_to_fetch_is_no_get(world: World) -> None:
    assert fetch_blocks(world.client, world.kv, [], is_cancelled=never, on_groups=pytest.fail) == []
    assert world.transfer.gets == []
