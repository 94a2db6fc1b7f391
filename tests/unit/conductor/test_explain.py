from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry

from conductor.cost import Corrections, CostModel, Outcome
from conductor.explain import Explanations
from conductor.metrics import ConductorMetrics
from conductor.options import Need
from conductor.policies import policy_named
from conductor.router import Choice, choose
from conductor.view import ClusterView, SentWork
from tests.fakes.cluster_nodes import LAYOUT, decode, prefill, store


def choice_of(cost: CostModel) -> Choice:
    groups = [prefill("p0"), prefill("p1", "h1", queued_s=9.0), prefill("p2", num_pages=1.0)]
    nodes = [*groups, decode("d0"), store("s0"), store("s1", "h1")]
    view = ClusterView.build(nodes, model_id="", cost=cost)
    assert isinstance(view, ClusterView)
    need = Need(request_id="r", prompt_tokens=100 * LAYOUT.block_tokens, max_tokens_in_cache=900)
    policy = policy_named("moontide", balancing_threshold=2.0)
    return choose(view, need, {"s1": 40}, SentWork(view), policy=policy, rng=random.Random(0), now_s=0.0)


def test_explanation_tells_the_choice_its_rivals_and_what_came_of_it() -> None:
    cost, registry = CostModel(), CollectorRegistry()
    explanations = Explanations(cost, ConductorMetrics(registry))
    choice = choice_of(cost)
    explanations.begin("r", tenant="t", prompt_tokens=800)
    explanations.chosen("r", 1, choice)
    explanations.happened("r", 1, choice, Outcome(queue_s=0.1, fetch_s=0.2, prefill_s=1.0, dispatch_s=0.01))
    explanations.happened("r", 1, choice, Outcome(handoff_s=0.1, tbt_s=0.02))
    told = explanations.get("r")
    assert told is not None
    assert (told.tenant, told.prompt_tokens, told.refused) == ("t", 800, "")
    (attempt,) = told.attempts
    assert (attempt.epoch, attempt.policy) == (1, "moontide")
    assert (attempt.ttft_s, attempt.tbt_s) == (pytest.approx(1.31), 0.02)
    assert (attempt.chosen.prefill_node_id, attempt.chosen.decode_node_id) == ("p0", "d0")
    assert (attempt.chosen.hit_store_node_id, attempt.chosen.hit_tokens, attempt.chosen.copy_tokens) == ("s1", 320, 320)
    assert attempt.chosen.prefill_s == pytest.approx(choice.prediction.prefill_s)
    assert [other.prefill_node_id for other in attempt.others] == ["p1"]
    assert [dropped.node_id for dropped in attempt.dropped] == ["p2"]
    assert cost.usual_prefill_s == pytest.approx(choice.busy_s)
    assert registry.get_sample_value("conductor_ttft_prediction_error_ratio_count") == 1
    assert registry.get_sample_value("conductor_tbt_prediction_error_ratio_count") == 1


def test_refusals_are_told_and_the_oldest_request_is_forgotten() -> None:
    explanations = Explanations(CostModel(), ConductorMetrics(CollectorRegistry()), max_remembered=2)
    for request_id in ("a", "b", "c"):
        explanations.begin(request_id, tenant="t", prompt_tokens=1)
    explanations.refused("c", "too late")
    explanations.refused("a", "nobody hears this")
    assert explanations.get("a") is None
    told = explanations.get("c")
    assert told is not None
    assert told.refused == "too late"


def test_outcomes_of_forgotten_requests_still_teach() -> None:
    cost = CostModel()
    explanations = Explanations(cost, ConductorMetrics(CollectorRegistry()))
    choice = choice_of(cost)
    slow = Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=choice.prediction.ttft_s * 2)
    explanations.happened("gone", 1, choice, slow)
    assert cost.corrections("p0") != Corrections()
