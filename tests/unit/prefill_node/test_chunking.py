"""ChunkPlanner: plans are whole, aligned, of equal time, and nearly the best there are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.perf_model import StepModel, StepShape, makespan_s
from prefill_node.chunking import ChunkPlanner

BLOCK = 64
FLAT = StepModel(overhead_s=0.002, token_s=2e-4, pair_s=0.0)
STEEP = StepModel(overhead_s=0.002, token_s=2e-4, pair_s=3e-8)


def planner(*stages: StepModel, chunking: str = "equal-time", chunk_tokens: int = 8192) -> ChunkPlanner:
    return ChunkPlanner(chunking=chunking, chunk_tokens=chunk_tokens, block_tokens=BLOCK, max_step_s=1e9, stages=stages)


def shapes(plan: list[int], first_token: int = 0) -> list[StepShape]:
    starts = itertools.accumulate(plan, initial=first_token)
    return [StepShape.of_chunk(tokens, start) for tokens, start in zip(plan, starts, strict=False)]


@given(
    model=st.builds(
        StepModel,
        overhead_s=st.floats(0, 0.01),
        token_s=st.floats(1e-6, 1e-3),
        pair_s=st.floats(0, 1e-7),
        knee_tokens=st.sampled_from([0, 256]),
    ),
    num_stages=st.integers(1, 8),
    first_block=st.integers(0, 50),
    num_tokens=st.integers(1, 20_000),
    chunk_blocks=st.integers(1, 64),
)
def test_a_plan_covers_the_prompt_and_cuts_only_between_blocks(
    model: StepModel, num_stages: int, first_block: int, num_tokens: int, chunk_blocks: int
) -> None:
    first_token = min(first_block * BLOCK, (num_tokens - 1) // BLOCK * BLOCK)
    plan = planner(*[model] * num_stages, chunk_tokens=chunk_blocks * BLOCK).plan(first_token, num_tokens)
    assert sum(plan) == num_tokens - first_token
    assert all(0 < tokens <= chunk_blocks * BLOCK for tokens in plan)
    assert all(tokens % BLOCK == 0 for tokens in plan[:-1])


@pytest.mark.parametrize("stage", [FLAT, STEEP])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [4096, 32768, 131072])
def test_a_plan_is_nearly_the_best_of_all_equal_time_plans(stage: StepModel, num_stages: int, num_tokens: int) -> None:
    stages = [stage] * num_stages
    found = planner(*stages)
    span_s = makespan_s(shapes(found.plan(0, num_tokens)), stages)
    work_s = stage.work_s(StepShape.of_chunk(num_tokens, 0))
    best_s = min(
        (work_s / m + stage.overhead_s) * (m + num_stages - 1) for m in range(1, num_tokens // BLOCK + 1)
    )  # without alignment
    assert span_s <= 1.05 * best_s
    assert found.remaining_s(0, num_tokens, found.step_s(0, num_tokens)) == pytest.approx(span_s, rel=0.05)


def test_chunks_take_equally_long_and_so_get_shorter() -> None:
    stage = StepModel(overhead_s=0.05, token_s=2e-4, pair_s=3e-8)
    plan = planner(*[stage] * 4).plan(0, 32768)
    times_s = [stage.time_s(shape) for shape in shapes(plan)][:-1]
    assert max(times_s) < 1.4 * min(times_s), "as far as whole blocks allow"
    assert plan[0] > 2 * plan[-2]


def test_a_small_last_piece_is_part_of_the_chunk_before() -> None:
    found = planner(FLAT, FLAT)
    step_s = FLAT.time_s(StepShape(640, 0.0))
    assert found.next_chunk(0, 640 + 300, step_s) == 640 + 300
    assert found.next_chunk(0, 640 + 330, step_s) == 640


def test_the_slowest_stage_decides() -> None:
    slow = FLAT.scaled(2.0)
    assert planner(FLAT, slow).plan(0, 8192) == planner(slow, slow).plan(0, 8192)


def test_a_step_is_never_longer_than_allowed_nor_shorter_than_the_knee() -> None:
    stages = [STEEP, STEEP]
    short = ChunkPlanner(chunking="equal-time", chunk_tokens=8192, block_tokens=BLOCK, max_step_s=0.2, stages=stages)
    assert max(STEEP.time_s(shape) for shape in shapes(short.plan(0, 32768))[:-1]) < 0.2 * 1.3
    kneed = StepModel(overhead_s=1e-5, token_s=2e-4, pair_s=0.0, knee_tokens=1024)
    assert min(planner(kneed, kneed).plan(0, 32768)) >= 1024


def test_a_plan_goes_on_from_any_cursor() -> None:
    found = planner(STEEP, STEEP)
    step_s = found.step_s(0, 32768)
    whole = found.plan(0, 32768)
    cursor = sum(whole[:5])
    rest: list[int] = []
    while cursor < 32768:
        rest.append(found.next_chunk(cursor, 32768, step_s))
        cursor += rest[-1]
    assert rest == whole[5:]


def test_fixed_or_unmeasured_chunks_have_one_size() -> None:
    for unplanned in (planner(chunk_tokens=512), planner(FLAT, FLAT, chunking="fixed", chunk_tokens=512)):
        assert math.isinf(unplanned.step_s(0, 2000))
        assert unplanned.plan(0, 2000) == [512, 512, 512, 464]
    assert planner().remaining_s(0, 2000, math.inf) == 0


def test_steps_are_packed_while_that_saves_time() -> None:
    found = planner(FLAT)
    small, large = StepShape(64, 0.0), StepShape(1024, 0.0)
    assert found.has_room(small, small)
    assert not found.has_room(large, small)
    below_knee = planner(StepModel(overhead_s=0.0, token_s=1e-3, pair_s=0.0, knee_tokens=256))
    assert below_knee.has_room(small, small)
    assert not planner(chunk_tokens=100).has_room(small, small)
