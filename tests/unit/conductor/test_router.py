from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.cost import Corrections, CostModel, Outcome, Placed, Prediction, Slo
from conductor.options import Need, Options
from conductor.policies import POLICIES, policy_named
from conductor.registry import Node
from conductor.router import Choice, choose
from conductor.view import ClusterView, Sent, SentWork
from moontide.errors import ConfigError
from tests.fakes.cluster_nodes import LAYOUT, decode, node, prefill, store

BLOCK = LAYOUT.block_tokens
CLUSTER = [prefill("p0"), prefill("p1", "h1"), decode("d0"), decode("d1", "h2"), store("s0"), store("s1", "h1")]
PROMPT = 100 * BLOCK


def pick(
    nodes: list[Node],
    *,
    policy: str = "moontide",
    hits: Mapping[str, int] | None = None,
    sent: list[Sent] | None = None,
    cost: CostModel | None = None,
    threshold: float = 2.0,
    seed: int = 0,
    now_s: float = 0.0,
    **need: Any,
) -> Choice:
    view = ClusterView.build(nodes, model_id="", cost=cost or CostModel())
    assert isinstance(view, ClusterView), view
    values: dict[str, Any] = {"request_id": "r", "prompt_tokens": PROMPT, "max_tokens_in_cache": PROMPT + 10, **need}
    return choose(
        view,
        Need(**values),
        hits or {},
        SentWork(view, sent or []),
        policy=policy_named(policy, balancing_threshold=threshold),
        rng=random.Random(seed),
        now_s=now_s,
    )


def work(**fields: object) -> Sent:
    nothing = {
        "sent_s": 0.0,
        "busy_s": 0.0,
        "decode_node_id": None,
        "context_tokens": 0,
        "holder_id": None,
        "copy_bytes": 0,
    }
    return Sent(**{**nothing, **fields})  # type: ignore[arg-type]


def prefill_id(choice: Choice) -> str:
    assert choice.prefill is not None
    return choice.prefill.node_id


def loaded(p0: dict[str, float], p1: dict[str, float]) -> list[Node]:
    return [prefill("p0", **p0), prefill("p1", "h1", **p1), *CLUSTER[2:]]


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    for idx in range(draw(st.integers(1, 6))):
        load: dict[str, Any] = {
            "queued_s": draw(st.floats(0, 5)),
            "num_pages": draw(st.sampled_from([50.0, 100.0, 200.0])),
        }
        nodes.append(prefill(f"p{idx}", f"h{draw(st.integers(0, 3))}", **load))
    for idx in range(draw(st.integers(1, 6))):
        load = {"running": float(draw(st.integers(0, 20))), "num_pages": draw(st.sampled_from([50.0, 150.0, 500.0]))}
        load["free_pages"] = load["num_pages"] * draw(st.floats(0, 1))
        nodes.append(decode(f"d{idx}", f"h{draw(st.integers(0, 3))}", **load))
    return [*nodes, *(store(f"s{idx}", f"h{idx}") for idx in range(4))]


@settings(max_examples=60, deadline=None)
@given(
    nodes=clusters(),
    policy=st.sampled_from(POLICIES),
    hits=st.dictionaries(st.sampled_from(["s0", "s1", "s2", "s3", "gone"]), st.integers(0, 300), max_size=4),
    prompt_tokens=st.sampled_from([1, BLOCK, 60 * BLOCK, 100 * BLOCK + 3, 300 * BLOCK]),
    avoid=st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])),
    may_prefill_locally=st.booleans(),
    seed=st.integers(0, 3),
)
def test_no_policy_picks_a_node_that_fails_a_filter_while_another_passes(
    nodes: list[Node],
    policy: str,
    hits: dict[str, int],
    prompt_tokens: int,
    avoid: set[str],
    may_prefill_locally: bool,
    seed: int,
) -> None:
    choice = pick(
        nodes,
        policy=policy,
        hits=hits,
        prompt_tokens=prompt_tokens,
        max_tokens_in_cache=prompt_tokens + 10,
        avoid=avoid,
        may_prefill_locally=may_prefill_locally,
        seed=seed,
    )
    for role, chosen, tokens in (
        ("prefill", choice.prefill, prompt_tokens),
        ("decode", choice.decode, prompt_tokens + 10),
    ):
        records = [each.record for each in nodes if each.record.role == role]
        large = [record for record in records if record.load["num_pages"] * BLOCK >= tokens] or records
        preferred = [record for record in large if record.node_id not in avoid] or large
        assert chosen is None or chosen.node_id in {record.node_id for record in preferred}
    assert choice.prefill is not None or (may_prefill_locally and policy == "moontide")
    host = choice.prefill.host_id if choice.prefill is not None else None
    assert host is None or choice.store.host_id == host
    most = max((blocks for store_id, blocks in hits.items() if store_id != "gone"), default=0)
    assert 0 <= choice.copy_blocks <= choice.hit_blocks <= min(most, (prompt_tokens - 1) // BLOCK)
    assert (choice.hit_store is None) == (choice.hit_blocks == 0)


def test_random_reaches_every_node() -> None:
    choices = [pick(CLUSTER, policy="random", seed=seed) for seed in range(40)]
    assert {(prefill_id(c), c.decode.node_id) for c in choices} == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}


def test_round_robin_takes_turns() -> None:
    view = ClusterView.build(CLUSTER, model_id="", cost=CostModel())
    assert isinstance(view, ClusterView)
    policy, need = (
        policy_named("round-robin", balancing_threshold=2.0),
        Need(request_id="r", prompt_tokens=8, max_tokens_in_cache=9),
    )
    turns = [
        prefill_id(choose(view, need, {}, SentWork(view), policy=policy, rng=random.Random(0), now_s=0.0))
        for _ in range(4)
    ]
    assert turns == ["p0", "p1", "p0", "p1"]


def test_least_loaded_looks_at_queues_only() -> None:
    nodes = loaded({"queued_s": 0.2}, {"queued_s": 0.1})
    assert prefill_id(pick(nodes, policy="least-loaded", hits={"s0": 99})) == "p1"


def test_queues_drain_between_reports_and_own_work_adds_to_them() -> None:
    nodes = loaded({"queued_s": 0.5}, {"queued_s": 0.0})
    sent = [work(prefill_node_id="p1", busy_s=0.9, decode_node_id="d0", context_tokens=9)]
    choice = pick(nodes, policy="least-loaded", sent=sent, now_s=0.3)
    assert prefill_id(choice) == "p0"
    assert choice.prediction.queue_s == pytest.approx(0.2)
    assert choice.decode.node_id == "d1"


def test_cache_aware_weighs_own_hits_against_the_queue_and_never_copies() -> None:
    far = loaded({"queued_s": 30.0}, {"queued_s": 0.0})
    near = loaded({"queued_s": 0.1}, {"queued_s": 0.0})
    assert prefill_id(pick(near, policy="cache-aware", hits={"s0": 90})) == "p0"
    choice = pick(far, policy="cache-aware", hits={"s0": 90})
    assert (prefill_id(choice), choice.hit_blocks, choice.copy_blocks) == ("p1", 0, 0)


@pytest.mark.parametrize(
    ("hits", "queued_s", "expected"),
    [
        ({}, 0.0, ("p0", 0, 0)),  # no hit anywhere: nothing to divide, nothing to copy
        ({"s1": 90}, 0.0, ("p0", 90, 90)),  # no own hit: the quotient is infinite, so it is copied
        ({"s0": 50, "s1": 90}, 0.0, ("p0", 50, 0)),  # 90 / 50 is below the threshold of 2: the rest is recomputed
        ({"s0": 40, "s1": 90}, 0.0, ("p0", 90, 50)),  # 90 / 40 is not
        ({"s0": 90, "s1": 90}, 0.0, ("p0", 90, 0)),
    ],
)
def test_algorithm_1(hits: dict[str, int], queued_s: float, expected: tuple[str, int, int]) -> None:
    nodes = loaded({"queued_s": queued_s}, {"queued_s": 50.0})
    choice = pick(nodes, policy="kvcache-centric", hits=hits)
    assert (prefill_id(choice), choice.hit_blocks, choice.copy_blocks) == expected
    assert choice.replicate_blocks == (expected[1] if expected[2] else 0)


def test_moontide_copies_what_hides_behind_the_queue_when_copying_costs_more_than_computing() -> None:
    slow: dict[str, Any] = {"copy_bytes_per_s": LAYOUT.block_bytes / 0.05}
    nodes = loaded({"queued_s": 1.0, **slow}, {"queued_s": 60.0, **slow})
    choice = pick(nodes, hits={"s1": 90})
    assert prefill_id(choice) == "p0"
    assert 17 <= choice.copy_blocks <= 20
    assert choice.prediction.fetch_s == pytest.approx(0.0, abs=0.05)
    idle = loaded({"queued_s": 0.0, **slow}, {"queued_s": 60.0, **slow})
    assert pick(idle, hits={"s1": 90}).copy_blocks == 0
    fast = loaded({"queued_s": 0.0}, {"queued_s": 60.0})
    assert pick(fast, hits={"s1": 90}).copy_blocks == 90


def test_moontide_never_expects_a_longer_ttft_than_algorithm_1_while_nobody_would_wait_behind() -> None:
    draw = random.Random(2)
    for _ in range(100):
        nodes = loaded({"queued_s": draw.uniform(0, 2)}, {"queued_s": draw.uniform(0, 2)})
        hits = {"s0": draw.randrange(99), "s1": draw.randrange(99)}
        ours, theirs = pick(nodes, hits=hits), pick(nodes, policy="kvcache-centric", hits=hits)
        assert ours.prediction.ttft_s <= theirs.prediction.ttft_s * 1.011


def test_moontide_spares_those_who_will_wait_behind() -> None:
    """A group that must compute more is taken for a shorter TTFT only while its queue is short."""
    cost = CostModel()
    cost.observe(
        Placed(prefill_node_id="x", decode_node_id="x", busy_s=0.2, prediction=Prediction(), corrections=Corrections()),
        Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=0.2),
    )
    slow: dict[str, Any] = {"copy_bytes_per_s": 1.0}
    hits = {"s0": 90}
    busy = loaded({"queued_s": 4.0, **slow}, {"queued_s": 2.5, **slow})
    assert prefill_id(pick(busy, policy="cache-aware", hits=hits)) == "p1"
    assert prefill_id(pick(busy, hits=hits, cost=cost)) == "p0"


def test_long_prompts_go_to_the_deep_group_and_short_ones_to_the_shorter_queue() -> None:
    nodes = loaded(
        {"num_stages": 8.0, "queued_s": 0.1, "step_token_s": 0.000125, "step_pair_s": 1.25e-8}, {"num_stages": 1.0}
    )
    assert prefill_id(pick(nodes)) == "p0"
    assert prefill_id(pick(nodes, prompt_tokens=2 * BLOCK)) == "p1"


def test_short_prompts_are_computed_by_an_idle_decode_instance_itself() -> None:
    nodes = [*CLUSTER[:2], decode("d0", running=0.0), decode("d1", "h2"), *CLUSTER[4:]]
    short: dict[str, Any] = {"prompt_tokens": 4 * BLOCK, "max_tokens_in_cache": 5 * BLOCK}
    choice = pick(nodes, may_prefill_locally=True, **short)
    assert choice.prefill is None
    assert (choice.decode.node_id, choice.store.node_id) == ("d0", "s0")
    assert choice.placed.prefill_node_id == "d0"
    assert choice.prediction.handoff_s == 0.0
    assert pick(nodes, may_prefill_locally=False, **short).prefill is not None
    assert pick(nodes, may_prefill_locally=True).prefill is not None, "longer than decode takes on"


def test_a_prompt_stays_away_from_batches_whose_tbt_it_would_break() -> None:
    full: dict[str, Any] = {"running": 12.0, "step_token_s": 0.002}
    nodes = [prefill("p0", queued_s=9.0), decode("d0", **full), store("s0")]
    short: dict[str, Any] = {
        "prompt_tokens": 30 * BLOCK,
        "max_tokens_in_cache": 31 * BLOCK,
        "may_prefill_locally": True,
    }
    free, bound = pick(nodes, **short), pick(nodes, slo=Slo(tbt_s=0.1), **short)
    assert free.prefill is None
    assert bound.prefill is None, "in smaller chunks"
    assert bound.prediction.prefill_s > free.prediction.prefill_s
    assert pick(nodes, slo=Slo(tbt_s=0.05), **short).prefill is not None, "the smallest chunk takes too long"


def test_local_prefill_takes_the_hit_from_whoever_has_it() -> None:
    nodes = [*CLUSTER[:2], decode("d0", "nowhere", running=0.0), *CLUSTER[4:]]
    need: dict[str, Any] = {"prompt_tokens": 100 * BLOCK, "may_prefill_locally": True}
    choice = pick(nodes, hits={"s1": 98}, **need)
    assert choice.prefill is None
    assert choice.hit_store is not None
    assert (choice.hit_store.node_id, choice.store.node_id, choice.hit_blocks) == ("s1", "s1", 98)


def test_decode_needs_pages_and_a_place_in_the_batch() -> None:
    no_pages, full = decode("d0", free_pages=20.0), decode("d0", running=16.0, step_overhead_s=0.0)
    slow = decode("d1", "h2", step_overhead_s=0.5)
    for first in (no_pages, full):
        assert pick([*CLUSTER[:2], first, slow, *CLUSTER[4:]]).decode.node_id == "d1"


def test_ttft_bound_comes_before_the_delay_of_others() -> None:
    cost = CostModel()
    cost.observe(
        Placed(prefill_node_id="x", decode_node_id="x", busy_s=0.2, prediction=Prediction(), corrections=Corrections()),
        Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=0.2),
    )
    slow: dict[str, Any] = {"copy_bytes_per_s": 1.0}
    busy = loaded({"queued_s": 4.0, **slow}, {"queued_s": 2.5, **slow})
    late, early = pick(busy, hits={"s0": 88}, cost=cost), pick(busy, policy="cache-aware", hits={"s0": 88})
    bound_s = (late.prediction.ttft_s + early.prediction.ttft_s) / 2
    assert early.prediction.ttft_s < late.prediction.ttft_s
    kept = pick(busy, hits={"s0": 88}, cost=cost, slo=Slo(ttft_s=bound_s))
    assert kept.prediction.ttft_s <= bound_s


def test_without_step_models_tokens_count_and_nothing_is_predicted() -> None:
    def bare(node_id: str, host: str, queued_tokens: float) -> Node:
        return node(node_id, "prefill", host, load={"queued_tokens": queued_tokens})

    groups = [bare("p0", "h0", 500.0), bare("p1", "h1", 100.0)]
    nodes = [*groups, node("d0", "decode", load={"running": 3.0}), node("d1", "decode"), *CLUSTER[4:]]
    choice = pick(nodes)
    assert (prefill_id(choice), choice.decode.node_id) == ("p1", "d1")
    assert prefill_id(pick(nodes, hits={"s0": 90})) == "p0"
    assert not choice.prediction.is_known
    assert choice.prediction.ttft_s == 0.0


def test_equal_nodes_take_turns() -> None:
    choices = [pick(CLUSTER, seed=seed) for seed in range(50)]
    assert {(prefill_id(c), c.decode.node_id) for c in choices} == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}


def test_congested_holder_makes_copies_dear() -> None:
    view = ClusterView.build(CLUSTER, model_id="", cost=CostModel())
    assert isinstance(view, ClusterView)
    need = Need(request_id="r", prompt_tokens=PROMPT, max_tokens_in_cache=PROMPT)
    busy = work(prefill_node_id="p1", holder_id="s1", copy_bytes=5_000_000)
    free, congested = (Options(view, need, {"s1": 90}, SentWork(view, items), now_s=0.0) for items in ([], [busy]))
    added_s = congested.full_costs.fetch_s - free.full_costs.fetch_s
    assert np.allclose(added_s, [5.0, 0.0])


def test_explanation_names_the_next_best_and_whom_filters_dropped() -> None:
    small = prefill("p2", num_pages=3.0)
    choice = pick([*CLUSTER, small], avoid={"d1"})
    assert {other.prefill.node_id for other in choice.others if other.prefill} | {prefill_id(choice)} == {"p0", "p1"}
    assert {each.node_id: each.reason for each in choice.dropped} == {
        "p2": "the request needs more pages than it has",
        "d1": "it failed this request before",
    }
    assert "TTFT" in choice.reason


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*moontide"):
        policy_named("best", balancing_threshold=1.0)
