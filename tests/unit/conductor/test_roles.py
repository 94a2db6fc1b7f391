"""When a unit should change its role, which one, and with what place."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from conductor import roles
from conductor.config import ConductorConfig, ConductorSettings
from conductor.metrics import ConductorMetrics
from conductor.registry import Node, NodeRegistry
from conductor.roles import (
    COOL_DOWN_S,
    HOLD_S,
    PoolLoad,
    RoleController,
    RoleManager,
    choose_nodes,
    plan_orders,
    pool_loads,
)
from moontide.clock import MonotonicClock
from moontide.config import NodeConfig, RegistryConfig
from moontide.errors import RoleRefused
from moontide.registry import NodeRecord
from moontide.roles import SERVICE_NAME, NodeServicer, RoleSwitch, Successor
from moontide.rpc import Server
from moontide_proto.v1 import node_pb2_grpc

SLOS: dict[str, Any] = {"ttft_slo_s": 2.0, "tbt_slo_s": 0.1}


def node(
    node_id: str, role: str, *, place: Mapping[str, Any] | None = None, host_id: str = "h", **load: float
) -> NodeRecord:
    return NodeRecord(
        node_id=node_id,
        role=role,
        address="a:1",
        http_address="a:2",
        boot_id="b",
        host_id=host_id,
        place=dict(place or {}),
        load=load,
    )


def place(group_id: str, stage_idx: int = 0, num_stages: int = 1) -> dict[str, Any]:
    return {"group_id": group_id, "stage_idx": stage_idx, "num_stages": num_stages, "control_address": f"{group_id}:1"}


def pools(prefill: float, decode: float, *, num_prefill: int = 2, num_decode: int = 2) -> dict[str, PoolLoad]:
    return {
        "prefill": PoolLoad(num_units=num_prefill, load=prefill),
        "decode": PoolLoad(num_units=num_decode, load=decode),
    }


GROUP = node("prefill-0-stage-0", "prefill")
DECODES = [node(f"decode-{idx}", "decode", place=place(f"decode-{idx}")) for idx in range(3)]
HALVES = [node(f"prefill-1-stage-{idx}.decode", "decode", place=place("prefill-1", idx, 2)) for idx in range(2)]


def test_loads_are_predicted_times_over_the_slos_or_how_full_a_node_is() -> None:
    step = {"step_overhead_s": 0.01, "step_token_s": 0.001, "step_pair_s": 0.0001, "max_batch": 100.0}
    loads = pool_loads(
        [
            node("p0", "prefill", queued_s=3.0),
            node("p1", "prefill", queued_s=1.0),
            node("d0", "decode", running=10.0, context_tokens=1000.0, **step),
            node("k", "kvstore"),
        ],
        **SLOS,
    )
    assert loads["prefill"] == PoolLoad(num_units=2, load=1.0)
    assert loads["decode"].load == pytest.approx((0.01 + 0.01 + 0.1) / 0.1)
    full = node("d", "decode", running=1.0, max_batch=10.0, num_pages=100.0, free_pages=20.0)
    assert pool_loads([full], **SLOS)["decode"].load == pytest.approx(0.8)
    waiting = node("d", "decode", waiting=20.0, running=10.0, max_batch=10.0)
    assert pool_loads([waiting], **SLOS)["decode"].load == pytest.approx(3.0)


def test_what_waits_in_conductors_counts_for_all_groups_alike() -> None:
    """Groups get only `conductor.release_queue_s` of work ahead, which may be less than the SLO."""
    waiting = [node("c0", "conductor", queued_s=5.0), node("c1", "conductor", queued_s=1.0), node("c2", "conductor")]
    loads = pool_loads([node("p0", "prefill", queued_s=1.0), node("p1", "prefill"), *waiting], **SLOS)
    assert loads["prefill"] == PoolLoad(num_units=2, load=(0.5 + 0.0 + 3.0) / 2)
    assert pool_loads(waiting, **SLOS)["prefill"] == PoolLoad(num_units=0, load=0.0)


def test_proposal_needs_a_shortage_that_lasts() -> None:
    controller = RoleController()
    assert controller.propose(pools(1.5, 0.2), 0.0) is None
    assert controller.propose(pools(1.5, 0.2), HOLD_S - 1) is None
    assert controller.propose(pools(0.9, 0.2), HOLD_S - 0.5) is None, "it is over: counting begins anew"
    assert controller.propose(pools(1.5, 0.2), HOLD_S) is None
    assert controller.propose(pools(1.5, 0.2), 2 * HOLD_S) == "prefill"


def test_after_a_proposal_there_is_quiet_and_then_the_other_way_may_be_right() -> None:
    controller = RoleController()
    controller.propose(pools(1.5, 0.2), 0.0)
    assert controller.propose(pools(1.5, 0.2), HOLD_S) == "prefill"
    for second in range(1, int(COOL_DOWN_S)):
        assert controller.propose(pools(0.1, 2.0), HOLD_S + second) is None
    assert controller.propose(pools(0.1, 2.0), HOLD_S + COOL_DOWN_S) == "decode"


@pytest.mark.parametrize(
    "loads",
    [
        pools(1.5, 0.4),  # one decode instance alone would be at 0.8
        pools(1.5, 0.0, num_decode=1),
        pools(1.5, 1.5),
        pools(0.9, 0.0),
        pools(0.0, 0.9),
    ],
)
def test_no_pool_is_robbed_for_another(loads: dict[str, PoolLoad]) -> None:
    controller = RoleController()
    assert [controller.propose(loads, 5.0 * tick) for tick in range(10)] == [None] * 10


def test_least_loaded_unit_goes_and_who_only_goes_back_goes_first() -> None:
    busy = node("decode-0", "decode", place=place("decode-0"), running=6.0, max_batch=10.0)
    idle = node("decode-1", "decode", place=place("decode-1"), running=1.0, max_batch=10.0)
    placeless = node("decode-2", "decode", max_batch=10.0)
    assert choose_nodes([GROUP, busy, idle, placeless], "prefill", **SLOS) == ["decode-1"]
    assert choose_nodes([GROUP, placeless], "prefill", **SLOS) == []
    assert choose_nodes([GROUP, idle, *HALVES], "prefill", **SLOS) == [half.node_id for half in HALVES]
    assert choose_nodes([GROUP, busy, *HALVES], "prefill", **SLOS) == ["decode-0"], "both halves are too much"
    assert choose_nodes([GROUP, idle, HALVES[0]], "prefill", **SLOS) == ["decode-1"], "half a group is none"
    away = node("decode-3.prefill", "prefill", queued_s=9.0)
    assert choose_nodes([GROUP, away, idle], "decode", **SLOS) == ["decode-3.prefill"]


def test_nodes_get_their_places() -> None:
    nodes = [GROUP, *DECODES, *HALVES]
    assert plan_orders(nodes, ["decode-1"], "prefill") == [(DECODES[1], None)], "its own"
    first, second = plan_orders(nodes, ["decode-2", "decode-0"], "prefill")
    assert first == (DECODES[2], place("decode-2", 0, 2))
    assert second == (DECODES[0], place("decode-2", 1, 2))
    names = [half.node_id for half in reversed(HALVES)]
    assert plan_orders(nodes, names, "prefill") == [(HALVES[1], None), (HALVES[0], None)], "a group that was one knows"
    with_stranger = plan_orders(nodes, ["decode-0", names[0]], "prefill")
    assert [given for _, given in with_stranger] == [place("decode-0", 0, 2), place("decode-0", 1, 2)]
    other = node("prefill-9-stage-0", "prefill")
    assert plan_orders([*nodes, other], ["prefill-0-stage-0"], "decode") == [(GROUP, None)]


@pytest.mark.parametrize(
    ("node_ids", "role", "reason"),
    [
        (["prefill-0-stage-0"], "decode", "no prefill node would be left"),
        (
            ["decode-0", "decode-1", "decode-2", *(half.node_id for half in HALVES)],
            "prefill",
            "no decode node would be left",
        ),
        (["decode-9"], "prefill", "no decode node is called 'decode-9'; these are there: decode-0, "),
        ([], "prefill", "no decode node is called"),
        (["prefill-0-stage-0"], "prefill", "no decode node is called"),
        (["decode-0", "decode-0"], "prefill", "named twice"),
        (["decode-0"], "kvstore", "unknown"),
        ([HALVES[1].node_id, "decode-0"], "prefill", "no place as the first stage"),
    ],
)
def test_orders_that_make_no_sense_are_refused(node_ids: list[str], role: str, reason: str) -> None:
    with pytest.raises(RoleRefused, match=reason):
        plan_orders([GROUP, *DECODES, *HALVES], node_ids, role)


def test_stages_on_different_hosts_are_refused() -> None:
    far = node("decode-9", "decode", place=place("decode-9"), host_id="far")
    with pytest.raises(RoleRefused, match="different hosts"):
        plan_orders([GROUP, *DECODES, far], ["decode-0", "decode-9"], "prefill")


@dataclasses.dataclass
class Rig:
    """A manager, and the switch of the node `decode-1` that it finds among others."""

    manager: RoleManager
    switch: RoleSwitch
    metrics: CollectorRegistry

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(name, {"role": "prefill", **labels}) or 0.0


@asynccontextmanager
async def managed(mode: str, *, conductors: tuple[str, ...] = ("conductor-0",)) -> AsyncIterator[Rig]:
    """Of `conductor-0`, in a cluster that is short of prefill."""
    sections = ("registry", "tls", "model", "kv", "store", "decode")
    settings = {"node": {"node_id": "decode-1"}} | {name: {} for name in sections}
    switch = RoleSwitch("decode", {**settings, "prefill": place("decode-1")}, check=agree)
    server = Server()
    server.add(node_pb2_grpc.add_NodeServicer_to_server, NodeServicer(switch), SERVICE_NAME)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    records = [
        dataclasses.replace(GROUP, load={"queued_s": 20.0}),
        node("decode-0", "decode"),
        dataclasses.replace(DECODES[1], address=address),
        *(node(name, "conductor") for name in conductors),
    ]
    registry = SimpleNamespace(nodes=[Node(record=record, alive=True, read_s=0.0) for record in records])
    config = ConductorConfig(
        node=NodeConfig(node_id="conductor-0"),
        registry=RegistryConfig(url="redis://127.0.0.1:1/0"),
        conductor=ConductorSettings(model_dir=Path("/"), served_model_name="m", roles=mode),
    )
    metrics = ConductorMetrics(CollectorRegistry())
    manager = RoleManager(config, cast(NodeRegistry, registry), metrics, MonotonicClock())
    try:
        yield Rig(manager, switch, metrics.registry)
    finally:
        await manager.close()
        await server.close()


async def agree(_successor: Successor) -> None:
    """Whatever it is."""


async def test_orders_reach_the_node_and_are_counted() -> None:
    async with managed("off") as rig:
        assert await rig.manager.set_role(["decode-1"], "prefill") == ["decode-1.prefill"]
        await asyncio.wait_for(rig.switch.leaving.wait(), 5.0)
        with pytest.raises(RoleRefused, match="about to serve as prefill"):
            await rig.manager.set_role(["decode-1"], "prefill")
        assert rig.count("conductor_role_switches_total", outcome="agreed") == 1
        assert rig.count("conductor_role_switches_total", outcome="refused") == 1


@pytest.mark.parametrize(
    ("mode", "conductors", "acts"),
    [
        ("auto", ("conductor-0", "conductor-1"), True),
        ("auto", ("conductor-0", "a-conductor-before"), False),
        ("propose", ("conductor-0",), False),
    ],
)
async def test_one_conductor_acts_on_a_proposal_if_it_may(
    mode: str, conductors: tuple[str, ...], acts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "HOLD_S", 0.02)
    monkeypatch.setattr(roles, "PERIOD_S", 0.01)
    async with managed(mode, conductors=conductors) as rig:
        rig.manager.start()
        async with asyncio.timeout(5.0):
            while not rig.count("conductor_role_proposals_total"):
                await asyncio.sleep(0.01)
            if acts:
                await rig.switch.leaving.wait()
        await rig.manager.close()
        assert rig.switch.leaving.is_set() == acts
        assert rig.count("conductor_role_load") == 10.0


async def test_the_load_of_each_role_is_known_also_where_nobody_acts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """KEDA scales by it."""
    monkeypatch.setattr(roles, "HOLD_S", 0.0)
    monkeypatch.setattr(roles, "PERIOD_S", 0.01)
    async with managed("off") as rig:
        rig.manager.start()
        async with asyncio.timeout(5.0):
            while not rig.count("conductor_role_load"):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert rig.count("conductor_role_proposals_total") == 0
