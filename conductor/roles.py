"""Which role the compute nodes serve in: orders of an operator, and a controller that sees when one pool is short and the other idle.

    load      of a pool: predicted seconds over the SLO (prefill: queue, there and in the conductors, over TTFT; decode: step over TBT), or
              how full it is; 1: just enough
    proposal  one pool above HIGH while the other would stay below LOW with one unit less, for HOLD_S without a break
    unit      a decode instance, or a prefill group: its P stages become P decode instances
Nodes do the switching (moontide/roles.py). Pure but for RoleManager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge

from conductor.config import ConductorConfig
from conductor.metrics import ConductorMetrics
from conductor.registry import NodeRegistry
from moontide import rpc
from moontide.clock import Clock
from moontide.errors import MoontideError, RoleRefused
from moontide.log import get_logger
from moontide.metrics import start_at_zero
from moontide.perf_model import StepModel, StepShape
from moontide.registry import NodeRecord
from moontide.roles import MODULES
from moontide.tls import Tls
from moontide_proto.v1 import node_pb2, node_pb2_grpc

HIGH = 1.0
LOW = 0.5
HOLD_S = 10.0
"""A burst that is over sooner is no reason to reload a model."""
COOL_DOWN_S = 120.0
"""After a proposal: so long a switch takes, and its effect to show."""
PERIOD_S = 1.0
DEFAULT_TTFT_SLO_S = 2.0
"""Queue that is just enough where no SLO says what is."""
SWITCH_TIMEOUT_S = 30.0
"""For a node's answer, which comes before it drains; it measures its memory and the model first."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    num_units: int
    load: float
    """Mean over the units."""

    def load_without(self, num_units: int) -> float:
        left = self.num_units - num_units
        return self.load * self.num_units / left if left > 0 else float("inf")


def pool_loads(
    records: Iterable[NodeRecord], *, ttft_slo_s: float | None, tbt_slo_s: float | None
) -> Mapping[str, PoolLoad]:
    """Of the two pools, by role. What waits in the conductors counts for all prefill groups alike, which get only so much ahead."""
    records = list(records)
    loads: dict[str, list[float]] = {role: [] for role in MODULES}
    groups = [record for record in records if record.role == "prefill"]
    waiting_s = sum(_queued_s(record) for record in records if record.role == "conductor")
    for record in groups:
        queued_s = _queued_s(record) + waiting_s / len(groups)
        loads["prefill"].append(queued_s / (ttft_slo_s or DEFAULT_TTFT_SLO_S))
    loads["decode"] = [_decode_load(record, tbt_slo_s) for record in records if record.role == "decode"]
    return {role: PoolLoad(num_units=len(each), load=sum(each) / max(len(each), 1)) for role, each in loads.items()}


def choose_nodes(
    records: Sequence[NodeRecord], role: str, *, ttft_slo_s: float | None, tbt_slo_s: float | None
) -> list[str]:
    """The nodes that would take that role next: the least loaded unit of the other pool, one that only goes back first; may be none."""
    other = [record for record in records if record.role in MODULES and record.role != role]
    if role == "prefill":
        candidates = [[record] for record in other if record.place and record.place["num_stages"] == 1]
        pool = pool_loads(other, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s)["decode"]
        candidates += [group for group in _whole_groups(other) if pool.load_without(len(group)) <= LOW]
    else:
        candidates = [[record] for record in other]

    def order(unit: Sequence[NodeRecord]) -> tuple[bool, float]:
        load = pool_loads(unit, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s)[unit[0].role].load
        return not all(_is_away(record) for record in unit), load

    return [record.node_id for record in min(candidates, key=order, default=[])]


class RoleController:
    """When to have a unit change its role (pure; times are moments on the caller's clock)."""

    def __init__(self) -> None:
        self._wanted: str | None = None
        self._since_s = 0.0
        self._quiet_until_s = 0.0

    def propose(self, pools: Mapping[str, PoolLoad], now_s: float) -> str | None:
        """The role that a unit of the other pool should take now, or None. Called again and again."""
        wanted = _short_role(pools)
        if wanted != self._wanted:
            self._wanted, self._since_s = wanted, now_s
        if wanted is None or now_s - self._since_s < HOLD_S or now_s < self._quiet_until_s:
            return None
        self._quiet_until_s = now_s + COOL_DOWN_S
        return wanted


def plan_orders(
    records: Sequence[NodeRecord], node_ids: Sequence[str], role: str
) -> list[tuple[NodeRecord, dict[str, Any] | None]]:
    """Which node gets which place, in order; None: the one that it was deployed with.

    Args:
        records: of all nodes that are alive.
        node_ids: decode instances, in the order of the stages that they become; or prefill groups.
    Raises: RoleRefused.
    """
    if role not in MODULES:
        raise RoleRefused(f"role {role!r} is unknown; choose one of {', '.join(MODULES)}")
    (other,) = MODULES.keys() - {role}
    pool = {record.node_id: record for record in records if record.role == other}
    unknown = [node_id for node_id in node_ids if node_id not in pool]
    if unknown or not node_ids:
        there = ", ".join(sorted(pool)) or "none"
        raise RoleRefused(f"no {other} node is called {unknown[0] if unknown else ''!r}; these are there: {there}")
    if len(set(node_ids)) < len(node_ids):
        raise RoleRefused(f"a node is named twice in {', '.join(node_ids)}; name each once")
    if len(pool) == len(node_ids):
        raise RoleRefused(f"no {other} node would be left, and no request could be served; leave one")
    nodes = [pool[node_id] for node_id in node_ids]
    if role == "decode" or _is_whole_group(nodes):
        return [(node, None) for node in nodes]
    place = nodes[0].place
    if not place or place["stage_idx"] != 0:
        raise RoleRefused(
            f"{nodes[0].node_id} has no place as the first stage of a group; name a node first whose config has one in section "
            "`prefill`, or all nodes of the group that it comes from"
        )
    if len({node.host_id for node in nodes}) > 1:
        raise RoleRefused(f"{', '.join(node_ids)} are on different hosts; the stages of a group share the store of one")
    return [(node, place | {"stage_idx": idx, "num_stages": len(nodes)}) for idx, node in enumerate(nodes)]


class RoleManager:
    """Gives the orders, and watches the pools in the background."""

    def __init__(
        self,
        config: ConductorConfig,
        registry: NodeRegistry,
        metrics: ConductorMetrics,
        clock: Clock,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._mode = config.conductor.roles
        self._slos = {"ttft_slo_s": config.conductor.ttft_slo_s, "tbt_slo_s": config.conductor.tbt_slo_s}
        self._node_id = config.node.node_id
        self._registry = registry
        self._clock = clock
        self._controller = RoleController()
        self._task: asyncio.Task[None] | None = None
        self._load = Gauge(
            "conductor_role_load", "Load of the pool of a role: predicted time over the SLO, or how full it is.", ["role"],
            registry=metrics.registry,
        )  # fmt: skip
        self._proposals = Counter(
            "conductor_role_proposals_total", "Times that a node should have taken this role.", ["role"],
            registry=metrics.registry,
        )  # fmt: skip
        self._switches = Counter(
            "conductor_role_switches_total", "Orders to nodes to take this role: agreed or refused.", ["role", "outcome"],
            registry=metrics.registry,
        )  # fmt: skip
        for role in ("prefill", "decode"):
            start_at_zero(self._load, role)
            start_at_zero(self._proposals, role)
            for outcome in ("agreed", "refused"):
                self._switches.labels(role, outcome)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="roles")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def set_role(self, node_ids: Sequence[str], role: str) -> list[str]:
        """Have these nodes serve in `role`; returns the node ids afterwards, before the nodes have drained.

        Raises: RoleRefused; NodeLost. Nodes before the one that refused keep their order; alone in a group they return after a while.
        """
        new_ids: list[str] = []
        for record, place in plan_orders(self._alive(), node_ids, role):
            try:
                new_ids += await _switch(record, role, place, self._tls)
            except MoontideError as error:
                self._switches.labels(role, "refused").inc()
                log.warning("role not changed", node=record.node_id, role=role, reason=str(error))
                raise
            self._switches.labels(role, "agreed").inc()
            log.info("role changes", node=record.node_id, role=role)
        return new_ids

    def _alive(self) -> list[NodeRecord]:
        return [node.record for node in self._registry.nodes if node.alive]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self._look()
            except MoontideError as error:
                log.warning("role proposal not carried out", reason=str(error))

    async def _look(self) -> None:
        records = self._alive()
        pools = pool_loads(records, **self._slos)
        for name, pool in pools.items():
            self._load.labels(name).set(pool.load)
        if self._mode == "off":
            return
        if (role := self._controller.propose(pools, self._clock.now())) is None:
            return
        node_ids = choose_nodes(records, role, **self._slos)
        self._proposals.labels(role).inc()
        log.info(
            "role proposal",
            role=role,
            nodes=" ".join(node_ids) or "none can",
            prefill_load=round(pools["prefill"].load, 3),
            decode_load=round(pools["decode"].load, 3),
        )
        if node_ids and self._mode == "auto" and self._is_first(records):
            await self.set_role(node_ids, role)

    def _is_first(self, records: Collection[NodeRecord]) -> bool:
        """Whether this conductor is the one that acts: two that act at once would move twice as much."""
        return self._node_id == min(
            (each.node_id for each in records if each.role == "conductor"), default=self._node_id
        )


async def _switch(record: NodeRecord, role: str, place: Mapping[str, Any] | None, tls: Tls | None) -> list[str]:
    request = node_pb2.SwitchRoleRequest(role=role, place=node_pb2.PlaceInGroup(**place) if place else None)
    async with rpc.open_channel(record.address, tls) as channel:
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        reply: node_pb2.SwitchRoleReply = await rpc.call(
            stub.SwitchRole, request, timeout_s=SWITCH_TIMEOUT_S, peer=f"node {record.node_id}"
        )
    return list(reply.node_ids)


def _short_role(pools: Mapping[str, PoolLoad]) -> str | None:
    """The role of the pool that has too little, if the other one can spare a unit."""
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if pools[role].load >= HIGH and pools[other].load_without(1) <= LOW:
            return role
    return None


def _queued_s(record: NodeRecord) -> float:
    return record.load.get("queued_s", 0.0)


def _decode_load(record: NodeRecord, tbt_slo_s: float | None) -> float:
    load = record.load
    requests = load.get("waiting", 0.0) + load.get("pulling", 0.0) + load.get("running", 0.0)
    how_full = [requests / max(load.get("max_batch", 0.0), 1.0)]
    if load.get("num_pages"):
        how_full.append(1.0 - load.get("free_pages", 0.0) / load["num_pages"])
    if tbt_slo_s is not None and "step_overhead_s" in load and requests:
        model = StepModel(
            overhead_s=load["step_overhead_s"],
            token_s=load.get("step_token_s", 0.0),
            pair_s=load.get("step_pair_s", 0.0),
            knee_tokens=int(load.get("step_knee_tokens", 0.0)),
        )
        shape = StepShape(int(requests), int(load.get("context_tokens", 0.0)))
        how_full.append(model.time_s(shape) / tbt_slo_s)
    return max(how_full)


def _is_away(record: NodeRecord) -> bool:
    """Whether the node serves as something else than it was deployed as (moontide/roles.py names it so)."""
    return record.node_id.endswith(f".{record.role}")


def _whole_groups(records: Sequence[NodeRecord]) -> list[list[NodeRecord]]:
    """Decode instances that were a group and can be it again."""
    groups: dict[str, list[NodeRecord]] = {}
    for record in records:
        if record.place and record.place["num_stages"] > 1:
            groups.setdefault(record.place["group_id"], []).append(record)
    return [members for members in groups.values() if _is_whole_group(members)]


def _is_whole_group(records: Sequence[NodeRecord]) -> bool:
    places = [record.place for record in records]
    if not all(places) or len({place["group_id"] for place in places}) > 1:
        return False
    return sorted(place["stage_idx"] for place in places) == list(range(places[0]["num_stages"]))
