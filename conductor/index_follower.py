"""Keeps the prefix index equal to what the store processes say: their events, and a snapshot where events are missing.

    event n + 1 of a boot -> applied          n or less -> known already          more -> kept until a snapshot closes the gap
    another boot          -> what the node held is forgotten
    node in the registry that was not heard of, gap, or last snapshot long ago -> snapshot; what comes meanwhile is applied behind it

While Redis is away the index stays as it is; the numbers tell afterwards what was missed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Counter, Gauge

from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex, Replacement
from conductor.registry import Node
from kvstore.block import BLOCK_HASH_BYTES
from kvstore.client import Snapshot, StoreNodeClient
from kvstore.index import KvEntry
from moontide.clock import Clock, MonotonicClock
from moontide.errors import MoontideError, NodeLost
from moontide.log import get_logger
from moontide.metrics import start_at_zero
from moontide.registry import NodeRecord
from moontide.tls import Tls

MAX_WAITING_ENTRIES = 1024
"""Entries kept per node while a snapshot is on its way; after more it is asked for another one."""
RECONCILE_S = 600.0
"""Age of a node's last snapshot after which its holdings are compared anew."""
_SNAPSHOTS_AT_ONCE = 4
_SNAPSHOT_TIMEOUT_S = 30.0
_RETRY_S = 2.0
_CHECK_S = 1.0
_SLICE_BLOCKS = 2048
"""Blocks taken into the index before other tasks get a turn: about 3 ms."""
_SLICE_BYTES = _SLICE_BLOCKS * BLOCK_HASH_BYTES

log = get_logger(__name__)

ReadSnapshot = Callable[[NodeRecord], AsyncIterator[Snapshot]]


class EventSource(Protocol):
    """Where events come from; kvstore.index.KvEvents in production."""

    async def open(self) -> None: ...

    def follow(self) -> AsyncIterator[KvEntry]: ...

    async def close(self) -> None: ...


@dataclass
class _Node:
    boot_id: str
    number: int | None = None
    """Changes of this boot up to this one are in the index; None: it is not known what the node holds."""
    told: int = 0
    """Highest number heard of."""
    waiting: dict[int, KvEntry] = field(default_factory=dict)
    is_read: bool = False
    """A snapshot is on its way."""
    retired: set[str] = field(default_factory=set)
    """Earlier boots."""

    @property
    def is_behind(self) -> bool:
        return self.number is None or self.number < self.told


class EventLog:
    """Brings every change into the index once and in order, and knows which nodes it has missed something of. No I/O."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._nodes: dict[str, _Node] = {}

    @property
    def behind(self) -> list[str]:
        """Nodes that need a snapshot and are not being read."""
        return [node_id for node_id, node in self._nodes.items() if node.is_behind and not node.is_read]

    @property
    def num_behind(self) -> int:
        return sum(node.is_behind for node in self._nodes.values())

    def is_behind(self, node_id: str) -> bool:
        """Whether something of a node that is known is missing."""
        node = self._nodes.get(node_id)
        return node is not None and node.is_behind

    def take(self, entry: KvEntry) -> None:
        node = self._node(entry.node_id, entry.boot_id)
        if node is None:
            return
        if node.number is None and entry.number == (0 if entry.change is None else 1):
            node.number = 0
        node.told = max(node.told, entry.number)
        if entry.change is None or (node.number is not None and entry.number <= node.number):
            return
        node.waiting[entry.number] = entry
        self._advance(entry.node_id, node)
        if len(node.waiting) > MAX_WAITING_ENTRIES:
            node.waiting.clear()

    def expect(self, node_id: str, boot_id: str) -> None:
        """The registry says that this boot of the node is alive; it has the last word when the stream has the boots in another order."""
        if node_id in self._nodes:
            self._nodes[node_id].retired.discard(boot_id)
        self._node(node_id, boot_id)

    def drop_all_but(self, node_ids: set[str]) -> None:
        """Forget the nodes that are gone."""
        for node_id in self._nodes.keys() - node_ids:
            del self._nodes[node_id]
            self._index.reset(node_id)

    def begin_snapshot(self, node_id: str) -> Replacement:
        """Call it before the node is asked; then `end_snapshot` or `give_up`."""
        if node_id in self._nodes:
            self._nodes[node_id].is_read = True
        return self._index.replacement(node_id)

    def end_snapshot(self, node_id: str, boot_id: str, number: int, replacement: Replacement) -> None:
        """`replacement` holds all of the node after its change `number`."""
        node = self._node(node_id, boot_id) if node_id in self._nodes else None
        if node is None:
            self.give_up(node_id, replacement)
            return
        replacement.commit()
        node.number, node.is_read = number, False
        node.told = max(node.told, number)
        node.waiting = {n: entry for n, entry in node.waiting.items() if n > number}
        self._advance(node_id, node)

    def give_up(self, node_id: str, replacement: Replacement) -> None:
        replacement.discard()
        if node_id in self._nodes:
            self._nodes[node_id].is_read = False

    def _node(self, node_id: str, boot_id: str) -> _Node | None:
        """The node, now in this boot; None if that boot is over."""
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node(boot_id)
        elif boot_id in node.retired:
            return None
        elif boot_id != node.boot_id:
            self._index.reset(node_id)
            retired = {*node.retired, node.boot_id}
            node = self._nodes[node_id] = _Node(boot_id, is_read=node.is_read, retired=retired)
        return node

    def _advance(self, node_id: str, node: _Node) -> None:
        while node.number is not None and (entry := node.waiting.get(node.number + 1)) is not None:
            assert entry.change is not None
            self._index.apply(node_id, entry.change)
            node.number += 1
            if not node.is_read:
                # What a snapshot replaces has to be applied to it again.
                del node.waiting[node.number]


async def read_snapshot(store: NodeRecord, tls: Tls | None = None) -> AsyncIterator[Snapshot]:
    """Raises: NodeLost."""
    client = StoreNodeClient(store.address, tls=tls)
    try:
        async for piece in client.snapshot(timeout_s=_SNAPSHOT_TIMEOUT_S):
            yield piece
    finally:
        await client.close()


class IndexFollower:
    """Follows the stream and the registry in the background."""

    def __init__(
        self,
        index: PrefixIndex,
        source: EventSource,
        metrics: ConductorMetrics,
        *,
        nodes: Callable[[], Sequence[Node]],
        read: ReadSnapshot = read_snapshot,
        tell: Callable[[KvEntry], Awaitable[None]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            nodes: returns what the registry knows.
            read: asks a store process for everything it holds.
            tell: gets every event of the stream as it comes.
        """
        self._source = source
        self._nodes = nodes
        self._read = read
        self._tell = tell
        self._clock = clock or MonotonicClock()
        self._events = EventLog(index)
        self._reconcile_s: dict[str, float] = {}
        """When the next snapshot of a node is due even if nothing was missed."""
        self._retry_s: dict[str, float] = {}
        """Until when a node that could not be read is left alone."""
        self._reading: set[str] = set()
        self._turns = asyncio.Semaphore(_SNAPSHOTS_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        metrics.indexed_blocks.set_function(lambda: float(index.num_blocks))
        size = Gauge("conductor_index_bytes", "Memory of the prefix index.", registry=metrics.registry)
        size.set_function(lambda: float(index.num_bytes))
        behind = Gauge(
            "conductor_index_nodes_behind", "Store nodes whose blocks are not all known.", registry=metrics.registry
        )
        behind.set_function(lambda: float(self._events.num_behind))
        self._snapshots = Counter(
            "conductor_index_snapshots_total",
            "Snapshots of store nodes: gap (something was not known), reconcile (it was time) or failed.",
            ["reason"],
            registry=metrics.registry,
        )
        start_at_zero(self._snapshots, "gap", "reconcile", "failed")

    @property
    def is_whole(self) -> bool:
        """Whether the blocks of every node that is known are in the index."""
        return not self._events.num_behind

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kv events")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._source.close()

    async def _run(self) -> None:
        try:
            # From here on the stream tells all changes, so that a snapshot that is taken later can be brought up to date.
            await self._source.open()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="kv events stream")
                while True:
                    for store in self._to_read():
                        self._reading.add(store.node_id)
                        tasks.create_task(self._read_anew(store), name="kv snapshot")
                    await asyncio.sleep(_CHECK_S)
        except Exception:
            log.exception("kv events are no longer followed")
            raise

    async def _follow(self) -> None:
        num_blocks = 0
        async for entry in self._source.follow():
            self._events.take(entry)
            if self._tell is not None:
                await self._tell(entry)
            num_blocks += len(entry.change.packed) // BLOCK_HASH_BYTES if entry.change is not None else 0
            if num_blocks >= _SLICE_BLOCKS:
                num_blocks = 0
                await asyncio.sleep(0)

    def _to_read(self) -> list[NodeRecord]:
        """Stores that something was missed of, or whose turn it is."""
        records = (node.record for node in self._nodes() if node.alive)
        stores = {record.node_id: record for record in records if record.role == "kvstore"}
        self._events.drop_all_but(set(stores))
        for store in stores.values():
            self._events.expect(store.node_id, store.boot_id)
        for times in (self._reconcile_s, self._retry_s):
            for node_id in times.keys() - stores.keys():
                del times[node_id]
        now = self._clock.now()
        due = {node_id for node_id in self._events.behind if self._retry_s.get(node_id, now) <= now}
        due.update(node_id for node_id, at_s in self._reconcile_s.items() if at_s <= now)
        return [stores[node_id] for node_id in due & stores.keys() - self._reading]

    async def _read_anew(self, store: NodeRecord) -> None:
        async with self._turns:
            replacement = self._events.begin_snapshot(store.node_id)
            try:
                boot_id, number = await self._fill(replacement, store)
            except MoontideError as error:
                log.warning("no kv snapshot", node=store.node_id, error=str(error))
                self._events.give_up(store.node_id, replacement)
                self._snapshots.labels("failed").inc()
                self._retry_s[store.node_id] = self._clock.now() + _RETRY_S
            else:
                is_gap = store.node_id not in self._reconcile_s or self._events.is_behind(store.node_id)
                self._snapshots.labels("gap" if is_gap else "reconcile").inc()
                self._events.end_snapshot(store.node_id, boot_id, number, replacement)
                # Spread, for all of them are read at the start.
                self._reconcile_s[store.node_id] = self._clock.now() + RECONCILE_S * random.uniform(0.5, 1.5)
            finally:
                self._reading.discard(store.node_id)

    async def _fill(self, replacement: Replacement, store: NodeRecord) -> tuple[str, int]:
        """Boot id and number of the snapshot. Raises: NodeLost."""
        piece = None
        async for piece in self._read(store):
            for at in range(0, len(piece.packed), _SLICE_BYTES):
                replacement.add(piece.packed[at : at + _SLICE_BYTES])
                await asyncio.sleep(0)
        if piece is None:
            raise NodeLost(f"the snapshot of {store.node_id} is empty")
        return piece.boot_id, piece.number
