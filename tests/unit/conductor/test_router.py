from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from conductor.in_flight import InFlight
from conductor.registry import Node
from conductor.router import Capable, Need, NoChoice, OwnWork, capable_nodes, choose
from moontide.registry import NodeRecord

LAYOUT, OTHER_LAYOUT = "layout", "other layout"


def node(node_id: str, role: str, host: str = "h0", *, alive: bool = True, **fields: Any) -> Node:
    fields = {"model_id": "" if role == "kvstore" else "m", "layout_json": LAYOUT, **fields}
    record = NodeRecord(node_id=node_id, role=role, address="a:1", http_address="", boot_id="1", host_id=host, **fields)
    return Node(record=record, alive=alive, read_s=0.0)


CLUSTER = [
    node("p0", "prefill"),
    node("p1", "prefill", "h1"),
    node("d0", "decode", load={"free_pages": 100.0}),
    node("d1", "decode", "h2", load={"free_pages": 100.0}),
    node("s0", "kvstore"),
    node("s1", "kvstore", "h1"),
]


def with_load(nodes: list[Node], **loads: dict[str, float]) -> list[Node]:
    return [
        dataclasses.replace(n, record=dataclasses.replace(n.record, load=loads.get(n.record.node_id, n.record.load)))
        for n in nodes
    ]


def pick(
    nodes: list[Node], *, hits: dict[str, int] | None = None, own: OwnWork | None = None, **need: Any
) -> tuple[str, str]:
    capable = capable_nodes(nodes, model_id="")
    assert isinstance(capable, Capable), capable
    needed = Need(**{"request_id": "r", "max_tokens_in_cache": 10, **need})
    choice = choose(capable, needed, hit_blocks=hits or {}, own=own or OwnWork(), block_tokens=8)
    return choice.prefill.node_id, choice.decode.node_id


def test_longest_prefix_hit_comes_before_load() -> None:
    nodes = with_load(CLUSTER, p0={"queued_tokens": 0.0}, p1={"queued_tokens": 9000.0})
    assert pick(nodes)[0] == "p0"
    assert pick(nodes, hits={"s1": 3})[0] == "p1"
    assert pick(nodes, hits={"s0": 4, "s1": 3})[0] == "p0"


def test_shorter_queue_wins_and_own_unreported_work_counts() -> None:
    nodes = with_load(CLUSTER, p0={"queued_tokens": 100.0}, p1={"queued_tokens": 50.0})
    assert pick(nodes)[0] == "p1"
    assert pick(nodes, own=OwnWork(prefill_tokens={"p1": 60}))[0] == "p0"


def test_decode_needs_pages_then_fewest_requests_then_most_pages() -> None:
    full = {"free_pages": 2.0, "running": 0.0}
    assert pick(with_load(CLUSTER, d0=full, d1={"free_pages": 50.0, "running": 9.0}), max_tokens_in_cache=17)[1] == "d1"
    busy = {"free_pages": 50.0, "running": 1.0, "pulling": 2.0, "waiting": 1.0}
    assert pick(with_load(CLUSTER, d0=busy, d1={"free_pages": 50.0, "running": 3.0}))[1] == "d1"
    assert pick(with_load(CLUSTER, d0={"free_pages": 60.0}, d1={"free_pages": 50.0}))[1] == "d0"
    assert pick(CLUSTER, own=OwnWork(decode_requests={"d0": 1}))[1] == "d1"


def test_recently_failed_nodes_are_taken_only_without_others() -> None:
    assert pick(CLUSTER, avoid={"p0", "d1"}) == ("p1", "d0")
    assert pick(CLUSTER, avoid={"p0", "p1", "d0"})[1] == "d1"


def test_equal_nodes_take_turns() -> None:
    picks = {pick(CLUSTER, request_id=f"r{i}") for i in range(50)}
    assert picks == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}


def test_prefill_and_decode_share_a_layout() -> None:
    nodes = [*CLUSTER, node("p2", "prefill", layout_json=OTHER_LAYOUT), node("d2", "decode", layout_json=OTHER_LAYOUT)]
    capable = capable_nodes(nodes, model_id="")
    assert isinstance(capable, Capable)
    assert {r.layout_json for r in (*capable.prefill, *capable.decode)} == {LAYOUT}


@pytest.mark.parametrize(
    ("nodes", "model_id", "reason"),
    [
        ([], "", "no complete prefill group is alive"),
        ([n for n in CLUSTER if n.record.role != "decode"], "", "no decode instance is alive"),
        ([n for n in CLUSTER if n.record.role != "kvstore"], "", "no store process is alive"),
        ([dataclasses.replace(n, alive=n.record.role != "prefill") for n in CLUSTER], "", "no complete prefill group"),
        (
            [*[n for n in CLUSTER if n.record.role != "kvstore"], node("s9", "kvstore", "h9")],
            "",
            r"prefill groups \(h0, h1\)",
        ),
        (CLUSTER, "other", "for model other"),
        ([*CLUSTER, node("d9", "decode", model_id="other")], "", r"several models \(m, other\)"),
        ([*CLUSTER[2:], node("p9", "prefill", layout_json=OTHER_LAYOUT)], "", "different KV layouts"),
    ],
)
def test_reason_why_nothing_can_be_served(nodes: list[Node], model_id: str, reason: str) -> None:
    result = capable_nodes(nodes, model_id=model_id)
    assert isinstance(result, NoChoice)
    assert re.search(reason, result.reason), result.reason


def test_model_id_selects_among_several_models() -> None:
    nodes = [*CLUSTER, node("d9", "decode", model_id="other")]
    assert isinstance(capable_nodes(nodes, model_id="m"), Capable)


def test_own_work_counts_until_a_newer_report_contains_it() -> None:
    in_flight = InFlight(heartbeat_s=1.0)
    in_flight.begin("a", prefill_node="p0", tokens=100, decode_node="d0", now_s=10.0)
    assert in_flight.unreported({"p0": 10.5, "d0": 10.5}) == OwnWork(
        prefill_tokens={"p0": 100}, decode_requests={"d0": 1}
    )
    assert in_flight.unreported({"p0": 11.5, "d0": 10.5}).prefill_tokens == {}
    in_flight.prefill_done("a")
    assert in_flight.unreported({}) == OwnWork(decode_requests={"d0": 1})
    in_flight.end("a")
    assert in_flight.is_empty
