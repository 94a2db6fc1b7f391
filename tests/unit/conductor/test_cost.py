from __future__ import annotations

import random

import numpy as np
import pytest

from conductor.cost import Column, Corrections, CostModel, Outcome, Pipelines, Placed, Prediction, Steps
from moontide.perf_model import StepModel, StepShape, makespan_s
from prefill_node.chunking import ChunkPlanner


def column(*values: float) -> Column:
    return np.array(values, np.float64)


def pipelines(
    stages: StepModel, *, num_stages: int, block_tokens: int, chunk_tokens: int, max_step_s: float
) -> Pipelines:
    steps = Steps(
        overhead_s=column(stages.overhead_s),
        token_s=column(stages.token_s),
        pair_s=column(stages.pair_s),
        knee_tokens=column(stages.knee_tokens),
    )
    return Pipelines(
        steps,
        num_stages=column(num_stages),
        chunk_tokens=column(chunk_tokens),
        least_tokens=column(max(stages.knee_tokens, block_tokens)),
        max_step_s=column(max_step_s),
    )


def test_closed_form_is_near_the_makespan_of_the_plan_that_stage_0_makes() -> None:
    draw = random.Random(5)
    errors = []
    for _ in range(150):
        stage = StepModel(
            overhead_s=draw.choice([0.001, 0.005, 0.02]),
            token_s=10 ** draw.uniform(-5, -3),
            pair_s=10 ** draw.uniform(-10, -7.5),
            knee_tokens=draw.choice([0, 64, 256]),
        )
        num_stages, chunk_tokens, max_step_s = (
            draw.choice([1, 2, 4, 8]),
            draw.choice([512, 2048]),
            draw.choice([0.5, 2.0]),
        )
        num_tokens = int(10 ** draw.uniform(2, 4.5))
        hit_tokens = draw.choice([0, num_tokens // 2, num_tokens * 9 // 10]) // 64 * 64
        planner = ChunkPlanner(
            chunking="equal-time", chunk_tokens=chunk_tokens, block_tokens=64, max_step_s=max_step_s, stages=[stage] * num_stages
        )  # fmt: skip
        steps, cursor = [], hit_tokens
        for tokens in planner.plan(hit_tokens, num_tokens):
            steps.append(StepShape.of_chunk(tokens, cursor))
            cursor += tokens
        groups = pipelines(
            stage, num_stages=num_stages, block_tokens=64, chunk_tokens=chunk_tokens, max_step_s=max_step_s
        )
        predicted_s, busy_s = groups.times_s(num_tokens, column(hit_tokens))
        errors.append(abs(float(predicted_s[0]) / makespan_s(steps, [stage] * num_stages) - 1))
        assert busy_s[0] <= predicted_s[0] * (1 + 1e-9)
    assert np.median(errors) < 0.02
    assert np.percentile(errors, 90) < 0.1


def placed(prediction: Prediction, corrections: Corrections | None = None) -> Placed:
    return Placed(
        prefill_node_id="p0",
        decode_node_id="d0",
        busy_s=0.7,
        prediction=prediction,
        corrections=corrections or Corrections(),
    )


def learn(cost: CostModel, raw: Prediction, outcome: Outcome) -> None:
    """Predict with what is known by now, then see what happened."""
    group, decode = cost.corrections("p0"), cost.corrections("d0")
    used = Corrections(wait=group.wait, fetch=group.fetch, prefill=group.prefill, handoff=group.handoff, tbt=decode.tbt)
    prediction = Prediction(
        queue_s=raw.queue_s * used.wait,
        fetch_s=raw.fetch_s * used.fetch,
        prefill_s=raw.prefill_s * used.prefill,
        handoff_s=raw.handoff_s * used.handoff,
        tbt_s=raw.tbt_s * used.tbt,
    )
    cost.observe(placed(prediction, used), outcome)


def test_corrections_approach_how_far_predictions_are_off() -> None:
    cost = CostModel()
    for _ in range(60):
        alone = Prediction(fetch_s=0.5, prefill_s=2.0)
        learn(cost, alone, Outcome(queue_s=0.0, fetch_s=0.1, prefill_s=1.0, dispatch_s=0.01))
        waiting = Prediction(queue_s=1.0, prefill_s=2.0, handoff_s=0.1, tbt_s=0.02)
        learn(cost, waiting, Outcome(queue_s=1.5, fetch_s=0.5, prefill_s=1.0, handoff_s=0.2, tbt_s=0.03))
    learnt = cost.corrections("p0")
    assert learnt.prefill == pytest.approx(0.5, rel=0.03)
    assert learnt.wait == pytest.approx(1.5, rel=0.03)
    assert learnt.fetch == pytest.approx(0.25, rel=0.03), "no smaller than the bound"
    assert learnt.handoff == pytest.approx(2.0, rel=0.05)
    assert cost.corrections("d0").tbt == pytest.approx(1.5, rel=0.05)
    assert cost.dispatch_s == pytest.approx(0.01)
    assert cost.usual_prefill_s == pytest.approx(0.7)
    assert cost.corrections("p1") == Corrections()


def test_prompts_that_shared_their_steps_with_others_teach_nothing_of_a_prompt_alone() -> None:
    cost = CostModel()
    for _ in range(60):
        for took_s in (1.0, 1.0, 2.5):
            learn(cost, Prediction(prefill_s=1.0), Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=took_s))
    assert cost.corrections("p0").prefill < 1.15
    for _ in range(60):
        shared = Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=2.0)
        learn(cost, Prediction(queue_s=1.0, prefill_s=1.0), shared)
    assert cost.corrections("p0").wait == pytest.approx(1.0, rel=0.15), "the wait is where the node says compute"


def test_one_wild_outcome_moves_a_correction_only_so_far() -> None:
    cost = CostModel()
    learn(cost, Prediction(prefill_s=1.0), Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=500.0))
    assert 1.0 < cost.corrections("p0").prefill < 1.1
    learn(cost, Prediction(queue_s=0.5, prefill_s=1.0), Outcome(queue_s=60.0, fetch_s=0.0, prefill_s=1.0))
    assert cost.corrections("p0").wait == 4.0


def test_nothing_is_learnt_from_what_did_not_happen_or_was_not_predicted() -> None:
    cost = CostModel()
    cost.observe(placed(Prediction(prefill_s=1.0, tbt_s=0.1)), Outcome())
    cost.observe(placed(Prediction()), Outcome(queue_s=1.0, fetch_s=0.0, prefill_s=1.0, tbt_s=0.1))
    assert cost.corrections("p0") == cost.corrections("d0") == Corrections()


def test_nodes_that_are_gone_are_forgotten() -> None:
    cost = CostModel()
    raw = Prediction(prefill_s=1.0, tbt_s=0.1, handoff_s=0.1)
    learn(cost, raw, Outcome(queue_s=0.0, fetch_s=0.0, prefill_s=2.0, handoff_s=1.0, tbt_s=0.3))
    prefill, decode = placed(raw).prefill_node_id, placed(raw).decode_node_id
    known = cost.corrections(decode)
    cost.keep_only({decode})
    assert cost.corrections(prefill) == Corrections()
    assert cost.corrections(decode) == known != Corrections()


def test_ttft_adds_up() -> None:
    assert Prediction(queue_s=1, fetch_s=2, prefill_s=3, dispatch_s=4, handoff_s=5).ttft_s == 10
    assert Outcome(queue_s=1, fetch_s=2, prefill_s=3, dispatch_s=4, handoff_s=5).ttft_s == 10
    assert Outcome(queue_s=1).ttft_s is None
