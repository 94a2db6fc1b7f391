"""The nodes of the cluster as this conductor sees them, read from Redis or Valkey with every heartbeat.

While the registry is away the last known state goes on to be used, and `connected` says so. After it has come back, nodes that are not in
it yet get one lease of time to announce themselves again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from redis.exceptions import RedisError

from conductor.metrics import ConductorMetrics
from moontide.clock import Clock
from moontide.config import RegistryConfig
from moontide.deadline import Deadline
from moontide.log import get_logger
from moontide.registry import NodeRecord, connect, raise_if_cancelled, read_records_with_ages

ROLES = ("prefill", "decode", "kvstore", "conductor")
LOST_SHOWN_S = 60.0
"""A node that is gone stays visible in the status for so long."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node's last record and whether its lease holds."""

    record: NodeRecord
    alive: bool
    read_s: float
    """When this record was last seen in the registry, on the conductor's clock."""
    age_s: float = 0.0
    """How old it was then."""

    @property
    def reported_s(self) -> float:
        """When the node wrote it, on the conductor's clock."""
        return self.read_s - self.age_s


class NodeTable:
    """What reads of the registry add up to; pure bookkeeping."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._nodes: dict[str, Node] = {}
        self._connected_since_s: float | None = None

    @property
    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    @property
    def connected(self) -> bool:
        return self._connected_since_s is not None

    def disconnected(self) -> None:
        self._connected_since_s = None

    def update(self, records: Iterable[tuple[NodeRecord, float]], now_s: float) -> None:
        """Take over one complete read: records and their ages in seconds."""
        if self._connected_since_s is None:
            self._connected_since_s = now_s
        is_settled = not self._nodes or now_s - self._connected_since_s >= self._lease_s
        present = {r.node_id: Node(record=r, alive=True, read_s=now_s, age_s=age_s) for r, age_s in records}
        for node_id, node in list(self._nodes.items()):
            if node_id in present:
                continue
            if node.alive and is_settled:
                log.info("node gone", node=node_id, role=node.record.role)
                self._nodes[node_id] = Node(record=node.record, alive=False, read_s=now_s)
            elif not node.alive and now_s - node.read_s > LOST_SHOWN_S:
                del self._nodes[node_id]
        for node_id, node in present.items():
            if node_id not in self._nodes or not self._nodes[node_id].alive:
                log.info("node alive", node=node_id, role=node.record.role, address=node.record.address)
            self._nodes[node_id] = node


class NodeRegistry:
    """Keeps a NodeTable up to date in the background."""

    def __init__(self, config: RegistryConfig, clock: Clock, metrics: ConductorMetrics) -> None:
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._table = NodeTable(config.lease_s)
        self._redis = connect(config)
        self.num_reads = 0
        """Goes up whenever `nodes` may have changed."""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    @property
    def nodes(self) -> list[Node]:
        return self._table.nodes

    @property
    def connected(self) -> bool:
        """Whether the last read reached the registry."""
        return self._table.connected

    async def start(self) -> None:
        """Read once (a registry that is down is only logged), then keep on in the background."""
        await self._read()
        self._task = asyncio.create_task(self._run(), name="node registry")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._redis.aclose()

    async def wait_for_read(self, deadline: Deadline) -> None:
        """Return after the next read, or when `deadline` passes."""
        async with self._changed:
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            await self._read()
            raise_if_cancelled()

    async def _read(self) -> None:
        try:
            records = await read_records_with_ages(self._redis, lease_s=self._config.lease_s)
        except (RedisError, OSError) as error:
            if self._table.connected:
                log.warning("registry lost, routing on the last known state", reason=str(error))
            self._table.disconnected()
        else:
            if not self._table.connected:
                log.info("registry connected", nodes=len(records))
            self._table.update(records, self._clock.now())
        self.num_reads += 1
        self._metrics.registry_connected.set(self._table.connected)
        alive = Counter(node.record.role for node in self._table.nodes if node.alive)
        for role in ROLES:
            self._metrics.nodes.labels(role).set(alive[role])
        async with self._changed:
            self._changed.notify_all()
