from __future__ import annotations

import dataclasses
import re

import pytest

from conductor.cost import CostModel
from conductor.registry import Node
from conductor.view import ClusterView, NoChoice, Sent, SentWork
from tests.fakes.cluster_nodes import LAYOUT, decode, node, prefill, store

OTHER_LAYOUT = dataclasses.replace(LAYOUT, head_dim=16).to_json()
CLUSTER = [
    prefill("p0"),
    prefill("p1", "h1", queued_s=2.0),
    decode("d0"),
    decode("d1", "h2", queued_prefill_s=0.5),
    store("s0"),
    store("s1", "h1"),
]


def view_of(nodes: list[Node], model_id: str = "") -> ClusterView:
    view = ClusterView.build(nodes, model_id=model_id, cost=CostModel())
    assert isinstance(view, ClusterView), view
    return view


def sent(**fields: object) -> Sent:
    values = {
        "sent_s": 1.0,
        "prefill_node_id": "p0",
        "busy_s": 0.5,
        "decode_node_id": "d0",
        "context_tokens": 100,
        "holder_id": None,
        "copy_bytes": 0,
    }
    return Sent(**{**values, **fields})  # type: ignore[arg-type]


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
    result = ClusterView.build(nodes, model_id=model_id, cost=CostModel())
    assert isinstance(result, NoChoice)
    assert re.search(reason, result.reason), result.reason


def test_dropped_nodes_come_with_their_reasons() -> None:
    nodes = [
        *CLUSTER,
        dataclasses.replace(prefill("p-dead"), alive=False),
        prefill("p-lost"),
        prefill("p-no-store", "h7"),
        node("p-other", "prefill", layout_json=OTHER_LAYOUT),
        node("d-model", "decode", model_id="other"),
        node("c0", "conductor"),
    ]
    view = ClusterView.build(nodes, model_id="m", cost=CostModel(), distrusted={"p-lost"})
    assert isinstance(view, ClusterView)
    assert [record.node_id for record in view.prefill.records] == ["p0", "p1"]
    reasons = {each.node_id: each.reason for each in view.dropped}
    assert set(reasons) == {"p-dead", "p-lost", "p-no-store", "p-other", "d-model"}
    assert "lease" in reasons["p-dead"]
    assert "no store process" in reasons["p-no-store"]
    assert "layout" in reasons["p-other"]


def test_layout_of_the_view_before_stays_while_no_other_has_more_groups() -> None:
    old, new = LAYOUT.to_json(), OTHER_LAYOUT
    of_old = [prefill("p0"), decode("d0"), store("s0")]
    of_new = [node("p1", "prefill", layout_json=new), node("d1", "decode", layout_json=new)]

    def groups(nodes: list[Node], layout_before: str) -> list[str]:
        view = ClusterView.build(nodes, model_id="m", cost=CostModel(), layout_before=layout_before)
        assert isinstance(view, ClusterView)
        assert {record.layout_json for record in view.decode.records} == {view.layout_json}
        return [record.node_id for record in view.prefill.records]

    assert groups([*of_old, *of_new], old) == ["p0"]
    assert groups([*of_old, *of_new], new) == ["p1"]
    assert groups([*of_old, *of_new, node("p2", "prefill", layout_json=new)], old) == ["p1", "p2"]
    assert groups([*of_old, of_new[0]], new) == ["p0"], "a layout without a decode instance cannot be served"


def test_nodes_without_a_measured_step_count_as_usual_ones() -> None:
    view = view_of([*CLUSTER, node("p2", "prefill", load={"queued_tokens": 100.0})])
    assert view.is_timed
    row = view.prefill.row_of["p2"]
    assert view.prefill.free_from_s[row] == pytest.approx(100 * 0.001)
    assert not view_of([node("p0", "prefill"), decode("d0"), store("s0")]).is_timed


def test_a_group_without_a_longest_step_cuts_prompts_into_chunks_of_fixed_size() -> None:
    fixed = {"max_step_s": 0.0, "chunk_tokens": 256.0, "num_stages": 4.0, "step_pair_s": 0.0}
    groups = view_of([prefill("p0", **fixed), *CLUSTER[1:]]).prefill
    makespan_s, busy_s = groups.pipelines.times_s(300, 0.0)
    chunk_s = 0.01 + 150 * 0.001
    assert (makespan_s[0], busy_s[0]) == (pytest.approx(5 * chunk_s), pytest.approx(2 * chunk_s))


def test_corrections_and_habits_are_taken_over_when_the_view_is_made() -> None:
    view = view_of(CLUSTER)
    assert view.fetch_bytes_per_s == 1e6
    assert view.prefill.wait_factor.tolist() == [1.0, 1.0]


def test_sent_prompts_queue_behind_what_the_node_reported_and_drain_with_time() -> None:
    work = SentWork(view_of(CLUSTER), [sent(), sent(prefill_node_id="p1")])
    assert work.prefill_free_from_s.tolist() == [1.5, 2.5]
    work.add(sent(sent_s=1.2))
    work.add(sent(prefill_node_id="d1", decode_node_id=None))
    work.add(sent(prefill_node_id="gone", decode_node_id="gone", holder_id="gone"))
    assert work.prefill_free_from_s.tolist() == [2.0, 2.5]
    assert work.local_free_from_s.tolist() == [0.0, 1.5]


def test_sent_answers_load_decode_until_they_are_over() -> None:
    work = SentWork(view_of(CLUSTER), [sent(), sent()])
    assert work.decode_requests.tolist() == [2.0, 0.0]
    assert work.decode_context_tokens.tolist() == [200.0, 0.0]
    for _ in range(3):
        work.decode_left(sent())
    assert work.decode_requests.tolist() == [-1.0, 0.0], "one that ended was in the report"


def test_what_a_node_has_reported_since_is_not_counted_again() -> None:
    nodes = [dataclasses.replace(each, read_s=5.0, age_s=0.5) for each in CLUSTER]
    work = SentWork(view_of(nodes), [sent(sent_s=4.4), sent(sent_s=4.6, busy_s=2.0)])
    assert work.prefill_free_from_s.tolist() == [6.6, 6.5]
    assert work.decode_requests.tolist() == [1.0, 0.0]


def test_copies_queue_at_the_store_that_sends_them() -> None:
    work = SentWork(
        view_of(CLUSTER), [sent(holder_id="s1", copy_bytes=500_000), sent(holder_id="s1", copy_bytes=500_000)]
    )
    assert work.holder_free_from_s.tolist() == [0.0, 2.0]
