"""Chunks of prompts in decode steps: as long as the others bear, never so short that a prompt does not end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.step_plan import LEAST_CHUNK_TOKENS, PromptPart, decode_shape, plan_chunks, prefill_time_s
from moontide.perf_model import StepModel, StepShape

MODEL = StepModel(overhead_s=0.010, token_s=0.0001, pair_s=1e-7, knee_tokens=20)
DECODES = StepShape(4, 4000.0)


def chunks(
    *parts: tuple[int, int], slo_s: float | None = None, most: int = 256, decodes: StepShape = DECODES
) -> list[int]:
    prompts = [PromptPart(*part) for part in parts]
    return plan_chunks(prompts, decodes, model=MODEL, chunk_tokens=most, tbt_slo_s=slo_s)


def test_without_a_bound_the_oldest_prompts_fill_the_step() -> None:
    assert chunks((0, 100)) == [100]
    assert chunks((64, 1000), (0, 50)) == [256, 0]
    assert chunks((0, 200), (0, 100), (0, 100)) == [200, 56, 0]


def test_a_chunk_is_as_long_as_the_strictest_slo_bears() -> None:
    (tokens,) = chunks((0, 1000), slo_s=0.025)
    assert 0 < tokens < 256
    assert MODEL.time_s(DECODES + StepShape.of_chunk(tokens, 0)) <= 0.025
    assert MODEL.time_s(DECODES + StepShape.of_chunk(tokens + 1, 0)) > 0.025


def test_below_the_knee_rows_of_a_prompt_cost_nothing_but_their_pairs() -> None:
    slo_s = MODEL.time_s(DECODES)
    free = MODEL.knee_tokens - DECODES.tokens
    model = StepModel(overhead_s=0.01, token_s=0.0001, pair_s=0.0, knee_tokens=20)
    slo_s = model.time_s(DECODES)
    prompts = [PromptPart(0, 1000)]
    assert plan_chunks(prompts, DECODES, model=model, chunk_tokens=256, tbt_slo_s=slo_s) == [free]


def test_a_prompt_gets_on_whatever_the_others_bear() -> None:
    assert chunks((0, 1000), (0, 1000), slo_s=0.001) == [LEAST_CHUNK_TOKENS, 0]
    assert chunks((0, 5), (0, 1000), slo_s=0.001) == [5, 0]


def test_time_of_a_prompt_is_that_of_its_steps() -> None:
    parts = [PromptPart(128, 128 + 300)]
    expected = MODEL.time_s(DECODES + StepShape.of_chunk(256, 128)) + MODEL.time_s(
        DECODES + StepShape.of_chunk(44, 128 + 256)
    )
    given = prefill_time_s(parts, DECODES, model=MODEL, chunk_tokens=256, tbt_slo_s=None)
    assert given == pytest.approx(expected)
    assert prefill_time_s([PromptPart(9, 9)], DECODES, model=MODEL, chunk_tokens=256, tbt_slo_s=None) == 0.0


def test_more_requests_than_a_step_takes_count_as_a_full_step() -> None:
    assert decode_shape([100, 300], max_batch=8) == StepShape.of_chunks([(1, 100), (1, 300)])
    assert decode_shape([100] * 8, max_batch=4) == decode_shape([100] * 4, max_batch=4)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    prefix=st.integers(0, 50_000),
    rows=st.integers(0, 64),
    slo_s=st.none() | st.floats(0.001, 0.5),
    most=st.integers(1, 4096),
)
def test_plans_keep_their_bounds(lengths: list[int], prefix: int, rows: int, slo_s: float | None, most: int) -> None:
    parts = [(prefix, prefix + length) for length in lengths]
    decodes = decode_shape([prefix] * rows, max_batch=64)
    plan = chunks(*parts, slo_s=slo_s, most=most, decodes=decodes)
    assert len(plan) == len(parts)
    assert plan[0] > 0
    assert sum(plan) <= most
    assert all(0 <= tokens <= length for tokens, length in zip(plan, lengths, strict=True))
    shape = decodes + StepShape.of_chunks((tokens, prefix) for tokens in plan)
    if slo_s is not None and sum(plan) > LEAST_CHUNK_TOKENS:
        assert MODEL.time_s(shape) <= slo_s * (1 + 1e-9)
