"""chunking: plans near the best there is, on block borders, from any cursor, for stages that differ."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moontide.perf_model import StepModel, StepShape, makespan_s
from prefill_node.chunking import ChunkPlanner

PROMPT = 8192
BLOCK = 128
MODEL = StepModel(overhead_s=5e-3, token_s=1e-4, pair_s=1e-8)


def planner(
    *stages: StepModel, chunk_tokens: int = PROMPT, block_tokens: int = BLOCK, max_step_s: float = 1e9, mode: str = ""
) -> ChunkPlanner:
    return ChunkPlanner(
        chunking=mode or "equal-time",
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        max_step_s=max_step_s,
        stages=stages,
    )


def shapes_of(chunks: list[int], first_token: int = 0) -> list[StepShape]:
    shapes = []
    for chunk in chunks:
        shapes.append(StepShape.of_chunk(chunk, first_token))
        first_token += chunk
    return shapes


def model_of(
    *, alpha: float, num_stages: int, overhead_s: float, knee_tokens: int = 0, work_s: float = 8.0
) -> StepModel:
    """A stage of a model that takes `work_s` for PROMPT on one node, a share `alpha` of it for attention."""
    share_s = work_s / num_stages
    return StepModel(
        overhead_s=overhead_s,
        token_s=(1 - alpha) * share_s / PROMPT,
        pair_s=alpha * share_s / (PROMPT**2 / 2),
        knee_tokens=knee_tokens,
    )


def best_makespan_s(stage: StepModel, num_stages: int) -> float:
    """The best of all plans that end on block borders, within 1 %: for each bound of the longest step the least sum of times."""
    ends = range(0, PROMPT + 1, BLOCK)
    times = [[stage.time_s(StepShape.of_chunk(end - start, start)) for end in ends if end > start] for start in ends]
    bounds: list[float] = []
    for time_s in sorted(time_s for row in times for time_s in row):
        if not bounds or time_s > 1.01 * bounds[-1]:
            bounds.append(time_s)
    best_s = math.inf
    for bound_s in bounds:
        if num_stages * bound_s >= best_s:
            break
        sums = [0.0] + [math.inf] * (len(ends) - 1)
        for start, row in enumerate(times[:-1]):
            for size, time_s in enumerate(row, 1):
                if time_s > bound_s:
                    break
                sums[start + size] = min(sums[start + size], sums[start] + time_s)
        best_s = min(best_s, sums[-1] + (num_stages - 1) * bound_s)
    return best_s


stage_models = st.builds(
    StepModel,
    overhead_s=st.sampled_from([0.0, 1e-3, 0.05]),
    token_s=st.sampled_from([0.0, 1e-5, 1e-3]),
    pair_s=st.sampled_from([0.0, 1e-9, 1e-6]),
    knee_tokens=st.sampled_from([0, 50, 700]),
)


@pytest.mark.parametrize("alpha", [0.05, 0.35, 0.7, 0.9])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize(("overhead_s", "knee_tokens"), [(0.01, 0), (0.04, 0), (0.01, 256), (0.01, 1024), (0.04, 1024)])
def test_plan_is_near_the_best_and_predicted_well(
    alpha: float, num_stages: int, overhead_s: float, knee_tokens: int
) -> None:
    stage = model_of(alpha=alpha, num_stages=num_stages, overhead_s=overhead_s, knee_tokens=knee_tokens)
    stages = [stage] * num_stages
    tested = planner(*stages)
    planned_s = makespan_s(shapes_of(tested.plan(0, PROMPT)), stages)
    assert planned_s <= 1.05 * best_makespan_s(stage, num_stages)
    predicted_s = tested.remaining_s(0, PROMPT, tested.step_s(0, PROMPT))
    assert predicted_s == pytest.approx(planned_s, rel=0.06)


def test_chunks_take_equally_long_and_shrink_as_the_prefix_grows() -> None:
    stage = model_of(alpha=0.7, num_stages=4, overhead_s=0.01)
    tested = planner(*[stage] * 4, block_tokens=16)
    plan = tested.plan(0, PROMPT)
    step_s = tested.step_s(0, PROMPT)
    assert plan[0] > 2 * plan[-2]
    for shape in shapes_of(plan)[:-1]:
        assert stage.time_s(shape) == pytest.approx(step_s, rel=0.06)


def test_number_of_chunks_is_the_closed_form() -> None:
    """sqrt((P - 1) W / (P tau)) = sqrt(3/4 8 / 0.01) = 24.5"""
    stages = [model_of(alpha=0.35, num_stages=4, overhead_s=0.01)] * 4
    assert len(planner(*stages, block_tokens=16).plan(0, PROMPT)) in (24, 25)


def test_one_stage_takes_as_few_chunks_as_memory_and_preemption_allow() -> None:
    assert planner(MODEL).plan(0, PROMPT) == [PROMPT]
    assert planner(MODEL, chunk_tokens=2048).plan(0, 5000) == [2048, 2048, 904]
    bounded = planner(MODEL, max_step_s=0.25).plan(0, PROMPT)
    assert all(MODEL.time_s(shape) <= 0.25 * 1.3 for shape in shapes_of(bounded))
    assert len(bounded) <= math.ceil(MODEL.work_s(StepShape.of_chunk(PROMPT, 0)) / (0.25 - MODEL.overhead_s)) + 1


def test_steps_are_no_longer_than_allowed_so_that_others_can_go_first() -> None:
    slow = dataclasses.replace(MODEL, overhead_s=1.0)
    tested = planner(slow, slow, max_step_s=1.2)
    assert tested.step_s(0, PROMPT) == 1.2
    assert len(tested.plan(0, PROMPT)) > len(planner(slow, slow).plan(0, PROMPT))


def test_a_short_bound_does_not_cut_steps_to_waste_below_the_knee() -> None:
    stage = StepModel(overhead_s=1e-3, token_s=1e-4, pair_s=1e-8, knee_tokens=1024)
    plan = planner(stage, stage, max_step_s=0.01).plan(0, PROMPT)
    assert min(plan[:-1]) >= 1024 / 2 - BLOCK


@pytest.mark.parametrize("num_stages", [1, 2, 8])
def test_prompt_below_a_block_is_one_chunk(num_stages: int) -> None:
    assert planner(*[MODEL] * num_stages).plan(0, 7) == [7]
    assert planner(*[MODEL] * num_stages).plan(4 * BLOCK, 4 * BLOCK + 1) == [1]


def test_last_piece_goes_with_the_chunk_before_it_when_that_is_cheaper() -> None:
    step_s = MODEL.time_s(StepShape.of_chunk(1024, 0))
    assert planner(MODEL, MODEL).next_chunk(0, 1024 + 40, step_s) == 1064, "40 tokens take 4 ms, a step more 5 ms"
    assert planner(MODEL, MODEL).next_chunk(0, 1024 + 60, step_s) == 1024
    assert planner(*[MODEL] * 8).next_chunk(0, 1024 + 40, step_s) == 1024, "seven other stages would wait for 4 ms"
    assert planner(MODEL).next_chunk(0, 1024 + 512, step_s) == 1536, "nobody waits"
    assert planner(MODEL).next_chunk(0, 1024 + 513, step_s) == 1024, "half a chunk is no small piece"
    assert planner(MODEL, chunk_tokens=1024).next_chunk(0, 1024 + 40, step_s) == 1024, "more than a step may hold"
    knee = dataclasses.replace(MODEL, knee_tokens=512)
    assert planner(knee, knee).next_chunk(0, 1024 + 200, step_s) == 1224, (
        "a step below the knee costs as much as 512 tokens"
    )


def test_fixed_chunks_have_one_size_and_take_the_rest_as_it_is() -> None:
    for tested in (planner(MODEL, MODEL, chunk_tokens=2048, mode="fixed"), planner(chunk_tokens=2048)):
        assert math.isinf(tested.step_s(0, 5000))
        assert tested.plan(0, 5000) == [2048, 2048, 904]
        assert tested.plan(2048, 5000) == [2048, 904]


@pytest.mark.parametrize("num_tokens", [1, 500, 2048, 5000, 8192])
def test_time_of_fixed_chunks_is_predicted(num_tokens: int) -> None:
    stages = [dataclasses.replace(MODEL, pair_s=5e-8)] * 4
    tested = planner(*stages, chunk_tokens=1024, mode="fixed")
    actual_s = makespan_s(shapes_of(tested.plan(0, num_tokens)), stages)
    assert tested.remaining_s(0, num_tokens, math.inf) == pytest.approx(actual_s, rel=0.07)


def test_nothing_is_predicted_while_nothing_is_measured() -> None:
    tested = planner()
    assert tested.remaining_s(0, 5000, math.inf) == 0.0
    tested.set_stages([MODEL, MODEL])
    assert math.isfinite(tested.step_s(0, 5000))
    assert tested.remaining_s(0, 5000, tested.step_s(0, 5000)) > 0


@pytest.mark.parametrize("slow_idx", [0, 1, 2])
@pytest.mark.parametrize("factor", [1.25, 3.0])
def test_the_slowest_stage_decides(slow_idx: int, factor: float) -> None:
    stages = [dataclasses.replace(MODEL, pair_s=4e-8)] * 3
    slow = dataclasses.replace(stages[0], token_s=factor * MODEL.token_s, pair_s=factor * 4e-8)
    stages[slow_idx] = slow
    tested = planner(*stages, block_tokens=16)
    step_s = tested.step_s(0, PROMPT)
    plan = shapes_of(tested.plan(0, PROMPT))
    for shape in plan[:-1]:
        assert slow.time_s(shape) == pytest.approx(step_s, rel=0.06)
    assert tested.remaining_s(0, PROMPT, step_s) == pytest.approx(makespan_s(plan, stages), rel=0.06)


def test_a_stage_with_much_overhead_and_little_work_does_not_make_chunks_tiny() -> None:
    stages = [MODEL, StepModel(overhead_s=0.2, token_s=5e-5, pair_s=0.0)]
    plan = planner(*stages).plan(0, PROMPT)
    assert len(plan) <= 3
    finer_s = makespan_s(shapes_of([PROMPT // 16] * 16), stages)
    assert makespan_s(shapes_of(plan), stages) < finer_s


def test_a_plan_goes_on_when_the_stages_turn_out_slower_than_its_steps() -> None:
    tested = planner(MODEL, MODEL)
    step_s = tested.step_s(0, PROMPT)
    slower = dataclasses.replace(MODEL, overhead_s=2 * step_s)
    tested.set_stages([slower, slower])
    assert tested.next_chunk(1024, PROMPT, step_s) == BLOCK
    rest_s = tested.remaining_s(1024, PROMPT, step_s)
    assert rest_s == pytest.approx(makespan_s(shapes_of([BLOCK] * 56, 1024), [slower, slower]), rel=0.05)


@given(
    stages=st.lists(stage_models, max_size=3),
    mode=st.sampled_from(["fixed", "equal-time"]),
    chunk_blocks=st.integers(1, 40),
    max_step_s=st.sampled_from([1e-3, 0.3, 1e9]),
    first_token=st.integers(0, 3000),
    tokens=st.integers(1, 6000),
)
def test_any_plan_covers_the_prompt_on_block_borders_and_resumes_anywhere(
    stages: list[StepModel], mode: str, chunk_blocks: int, max_step_s: float, first_token: int, tokens: int
) -> None:
    block = 64
    chunk_tokens = chunk_blocks * block
    num_tokens = first_token + tokens
    tested = planner(*stages, mode=mode, chunk_tokens=chunk_tokens, block_tokens=block, max_step_s=max_step_s)
    plan = tested.plan(first_token, num_tokens)
    assert sum(plan) == tokens
    assert all(0 < chunk <= chunk_tokens for chunk in plan)
    step_s = tested.step_s(first_token, num_tokens)
    cursor = first_token
    for chunk in plan:
        assert tested.next_chunk(cursor, num_tokens, step_s) == chunk
        cursor += chunk
        assert cursor % block == 0 or cursor == num_tokens


@example(stages=[StepModel(overhead_s=0.0, token_s=0.0, pair_s=0.0, knee_tokens=50)], num_tokens=2, share=0.0)
@given(
    stages=st.lists(stage_models, min_size=1, max_size=3),
    num_tokens=st.integers(2, 6000),
    share=st.floats(0, 1),
)
def test_prediction_falls_as_the_prompt_goes_on(stages: list[StepModel], num_tokens: int, share: float) -> None:
    tested = planner(*stages, chunk_tokens=1024, block_tokens=64)
    step_s = tested.step_s(0, num_tokens)
    cursor = round(share * (num_tokens - 1))
    whole_s = tested.remaining_s(0, num_tokens, step_s)
    assert 0 <= tested.remaining_s(cursor, num_tokens, step_s) <= 1.3 * whole_s < math.inf


def test_steps_are_packed_while_overhead_or_knee_make_it_worth_it() -> None:
    stage = StepModel(overhead_s=5e-3, token_s=1e-4, pair_s=0.0)
    tested = planner(stage, stage, chunk_tokens=2048)
    extra = StepShape.of_chunk(100, 0)
    assert tested.has_room(StepShape.of_chunk(900, 0), extra), "5 ms of 95 ms"
    assert not tested.has_room(StepShape.of_chunk(1000, 0), extra), "5 ms of 105 ms"
    tested.set_stages([dataclasses.replace(stage, knee_tokens=1500)] * 2)
    assert tested.has_room(StepShape.of_chunk(1400, 0), extra)
    assert not tested.has_room(StepShape.of_chunk(1600, 0), extra)
    assert not tested.has_room(StepShape.of_chunk(100, 0), StepShape.of_chunk(2000, 0)), "too many tokens"


def test_without_times_steps_are_packed_until_they_are_full() -> None:
    for tested in (planner(chunk_tokens=1024), planner(MODEL, chunk_tokens=1024, mode="fixed")):
        assert tested.has_room(StepShape.of_chunk(1000, 0), StepShape.of_chunk(24, 5000))
        assert not tested.has_room(StepShape.of_chunk(1000, 0), StepShape.of_chunk(25, 0))
