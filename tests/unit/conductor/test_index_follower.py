from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from front import until
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from conductor import index_follower
from conductor.index_follower import MAX_WAITING_ENTRIES, EventLog, IndexFollower
from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex, Replacement
from conductor.registry import Node
from kvstore.block import BlockHash
from kvstore.client import Snapshot
from kvstore.index import KvEntry, Removed, Stored
from moontide.errors import NodeLost
from moontide.registry import NodeRecord
from tests.fakes.clock import FakeClock

ROOT, A, B, C = (BlockHash(bytes([i]) * 32) for i in range(4))


def entry(number: int, *hashes: bytes, boot_id: str = "b1", node_id: str = "n") -> KvEntry:
    return KvEntry(node_id, boot_id, number, Stored(ROOT, b"".join(hashes)))


def mark(number: int, *, boot_id: str = "b1") -> KvEntry:
    return KvEntry("n", boot_id, number, None)


class Following:
    """An event log and its index."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.log = EventLog(self.index)

    def take(self, *entries: KvEntry) -> None:
        for each in entries:
            self.log.take(each)

    def snapshot(self, number: int, *hashes: bytes, boot_id: str = "b1") -> None:
        replacement = self.log.begin_snapshot("n")
        replacement.add(b"".join(hashes))
        self.log.end_snapshot("n", boot_id, number, replacement)

    @property
    def hit(self) -> int:
        return self.index.hit_blocks([A, B, C]).get("n", 0)


@pytest.fixture
def following() -> Following:
    return Following()


def test_a_boot_that_is_heard_from_its_first_event_needs_no_snapshot(following: Following) -> None:
    following.take(mark(0), entry(1, A), entry(2, B), entry(2, B), entry(1, A))
    assert following.hit == 2
    assert following.log.behind == []
    following.take(entry(1, A, boot_id="b2"))
    assert following.hit == 1
    assert following.log.behind == []


def test_a_new_boot_clears_the_node_and_late_words_of_the_old_one_are_left_out(following: Following) -> None:
    following.take(entry(1, A, B), mark(0, boot_id="b2"), entry(2, C))
    assert following.hit == 0
    assert following.log.behind == []


def test_a_gap_waits_for_a_snapshot_and_what_came_meanwhile_follows_it(following: Following) -> None:
    following.take(entry(1, A), entry(4, C))
    assert following.hit == 1
    assert following.log.behind == ["n"]
    replacement = following.log.begin_snapshot("n")
    assert following.log.behind == []
    replacement.add(A + B)
    following.log.end_snapshot("n", "b1", 3, replacement)
    assert following.hit == 3
    assert following.log.behind == []


def test_a_late_event_closes_the_gap_too(following: Following) -> None:
    following.take(entry(1, A), entry(3, C), entry(2, B))
    assert following.hit == 3
    assert following.log.behind == []


def test_a_mark_behind_lost_writes_shows_the_gap(following: Following) -> None:
    following.take(mark(0), entry(1, A), mark(1))
    assert following.log.behind == []
    following.take(mark(3))
    assert following.log.behind == ["n"]
    following.snapshot(3, A, B, C)
    assert following.hit == 3
    assert following.log.behind == []


def test_a_snapshot_older_than_what_was_applied_ends_as_new(following: Following) -> None:
    following.take(mark(0), entry(1, A))
    replacement = following.log.begin_snapshot("n")
    following.take(entry(2, B), KvEntry("n", "b1", 3, Removed(B)), entry(4, B))
    replacement.add(A)
    following.log.end_snapshot("n", "b1", 1, replacement)
    assert following.hit == 2
    assert following.log.behind == []


def test_a_snapshot_of_an_earlier_boot_is_thrown_away(following: Following) -> None:
    following.take(entry(1, A))
    replacement = following.log.begin_snapshot("n")
    following.take(entry(5, A, boot_id="b2"))
    replacement.add(A + B)
    following.log.end_snapshot("n", "b1", 1, replacement)
    assert following.hit == 0
    assert following.log.behind == ["n"]
    following.snapshot(7, A, B, C, boot_id="b3")
    assert following.hit == 3, "the store process was started again meanwhile"
    following.take(entry(6, A, boot_id="b2"))
    assert following.log.behind == []


def test_a_node_that_is_gone_is_forgotten_also_while_it_is_read(following: Following) -> None:
    following.take(entry(1, A))
    replacement = following.log.begin_snapshot("n")
    following.log.drop_all_but(set())
    replacement.add(A)
    following.log.end_snapshot("n", "b1", 1, replacement)
    assert following.hit == 0
    assert following.index.num_blocks == 0


def test_entries_that_wait_are_bounded_and_what_was_dropped_is_asked_for_again(following: Following) -> None:
    replacement_needed_from = 3
    following.take(entry(1, A))
    following.take(*(entry(replacement_needed_from + i, B) for i in range(MAX_WAITING_ENTRIES + 10)))
    following.snapshot(2, A)
    assert following.log.behind == ["n"]
    following.snapshot(MAX_WAITING_ENTRIES + 12, A, B)
    assert following.hit == 2
    assert following.log.behind == []


class Store:
    """A store process as it is told of: the truth, and the entries that it wrote."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.held: set[int] = set()
        self.number = 0
        self.stream: list[KvEntry] = []

    def change(self, block: int, *, is_stored: bool) -> None:
        self.number += 1
        packed = hash_of(block)
        self.stream.append(
            KvEntry("n", self.boot_id, self.number, Stored(ROOT, packed) if is_stored else Removed(packed))
        )
        (self.held.add if is_stored else self.held.discard)(block)


def hash_of(block: int) -> bytes:
    return block.to_bytes(8, "little") * 4


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_index_equals_the_store_whatever_is_lost_repeated_or_late(data: st.DataObject) -> None:
    """Chains of one block each, so that any set of blocks is closed."""
    index = PrefixIndex()
    log = EventLog(index)
    stores = [Store("boot 0")]
    on_the_way: list[KvEntry] = []
    reading: tuple[Replacement, str, int] | None = None

    def end_reading() -> None:
        nonlocal reading
        if reading is not None:
            replacement, boot_id, number = reading
            log.end_snapshot("n", boot_id, number, replacement)
            reading = None

    for _ in range(data.draw(st.integers(1, 40))):
        store = stores[-1]
        act = data.draw(
            st.sampled_from(["store", "store", "remove", "deliver", "lose", "repeat", "ask", "got", "boot"])
        )
        if act in ("store", "remove"):
            store.change(data.draw(st.integers(1, 6)), is_stored=act == "store")
            on_the_way.append(store.stream[-1])
        elif act == "deliver" and on_the_way:
            log.take(on_the_way.pop(data.draw(st.integers(0, min(3, len(on_the_way) - 1)))))
        elif act == "lose" and on_the_way:
            on_the_way.pop()
        elif act == "repeat" and store.stream:
            on_the_way.append(data.draw(st.sampled_from(store.stream)))
        elif act == "ask" and reading is None:
            log.expect("n", store.boot_id)
            reading = (log.begin_snapshot("n"), store.boot_id, store.number)
            # Taken in slices: what changes meanwhile may be in it or not.
            early, late = set(store.held), None
            if data.draw(st.booleans()):
                store.change(data.draw(st.integers(1, 6)), is_stored=data.draw(st.booleans()))
                on_the_way.append(store.stream[-1])
                late = data.draw(st.sampled_from([early, store.held]))
            reading[0].add(b"".join(map(hash_of, late if late is not None else early)))
        elif act == "got":
            end_reading()
        elif act == "boot" and len(stores) < 3:
            stores.append(Store(f"boot {len(stores)}"))
    store = stores[-1]
    for each in on_the_way:
        log.take(each)
    end_reading()
    log.expect("n", store.boot_id)
    log.take(KvEntry("n", store.boot_id, store.number, None))
    if log.behind:
        replacement = log.begin_snapshot("n")
        replacement.add(b"".join(map(hash_of, store.held)))
        log.end_snapshot("n", store.boot_id, store.number, replacement)
    assert log.behind == []
    assert {block for block in range(1, 7) if index.hit_blocks([hash_of(block)])} == store.held
    assert index.num_blocks == len(store.held)


def store_record(node_id: str, boot_id: str = "b1") -> NodeRecord:
    return NodeRecord(node_id=node_id, role="kvstore", address=f"{node_id}:1", http_address="", boot_id=boot_id)


class Cluster:
    """Stream, registry and store processes that a follower sees."""

    def __init__(self) -> None:
        self.entries: asyncio.Queue[KvEntry] = asyncio.Queue()
        self.nodes: list[Node] = []
        self.snapshots: dict[str, Callable[[], list[Snapshot]]] = {}
        self.closed = False

    async def open(self) -> None:
        pass

    async def follow(self) -> AsyncIterator[KvEntry]:
        while True:
            yield await self.entries.get()

    async def close(self) -> None:
        self.closed = True

    async def read(self, store: NodeRecord) -> AsyncIterator[Snapshot]:
        for piece in self.snapshots[store.node_id]():
            yield piece

    def add(self, node_id: str, *pieces: bytes, number: int) -> None:
        self.nodes.append(Node(record=store_record(node_id), alive=True, read_s=0.0))
        self.snapshots[node_id] = lambda: [Snapshot("b1", number, piece) for piece in pieces]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_a_follower_that_starts_late_knows_all_and_goes_on_from_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_follower, "_CHECK_S", 0.01)
    registry, index, clock = CollectorRegistry(), PrefixIndex(), FakeClock()
    cluster.add("x", A, B, number=7)
    cluster.add("y", b"", number=0)
    metrics = ConductorMetrics(registry)
    follower = IndexFollower(index, cluster, metrics, nodes=lambda: cluster.nodes, read=cluster.read, clock=clock)
    follower.start()
    await until(lambda: index.num_blocks == 2 and follower.is_whole)
    cluster.entries.put_nowait(entry(8, C, node_id="x"))
    cluster.entries.put_nowait(entry(1, A, node_id="y"))
    await until(lambda: index.hit_blocks([A, B, C]) == {"x": 3, "y": 1})
    assert registry.get_sample_value("conductor_indexed_blocks") == 4
    assert registry.get_sample_value("conductor_index_nodes_behind") == 0
    assert registry.get_sample_value("conductor_index_snapshots_total", {"reason": "gap"}) == 2
    cluster.nodes.pop()
    await until(lambda: index.hit_blocks([A]) == {"x": 1})
    # Something went wrong that no number shows.
    cluster.snapshots["x"] = lambda: [Snapshot("b1", 8, A)]
    clock.advance(2 * index_follower.RECONCILE_S)
    await until(lambda: index.hit_blocks([A, B]) == {"x": 1} and index.num_blocks == 1)
    assert registry.get_sample_value("conductor_index_snapshots_total", {"reason": "reconcile"}) == 1
    await follower.close()
    assert cluster.closed


async def test_a_store_that_does_not_answer_is_asked_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_follower, "_CHECK_S", 0.01)
    registry, index, clock = CollectorRegistry(), PrefixIndex(), FakeClock()
    cluster.add("x", A, B, number=7)
    answers = cluster.snapshots["x"]

    def fail() -> list[Snapshot]:
        raise NodeLost("no answer")

    cluster.snapshots["x"] = fail
    metrics = ConductorMetrics(registry)
    follower = IndexFollower(index, cluster, metrics, nodes=lambda: cluster.nodes, read=cluster.read, clock=clock)
    follower.start()
    await until(lambda: registry.get_sample_value("conductor_index_snapshots_total", {"reason": "failed"}) == 1)
    assert not follower.is_whole
    cluster.snapshots["x"] = answers
    clock.advance(10)
    await until(lambda: index.hit_blocks([A, B]) == {"x": 2})
    await follower.close()
