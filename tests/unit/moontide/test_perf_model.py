"""perf_model: the step model, its fits, and the makespan."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.perf_model import OnlineFit, StepModel, StepSample, StepShape, best_num_chunks, fit, makespan_s

STAGE = StepModel(overhead_s=0.002, token_s=2e-4, pair_s=3e-8)
models = st.builds(
    StepModel,
    overhead_s=st.floats(0, 0.01),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0, 1e-6),
    knee_tokens=st.integers(0, 2000),
)


def samples_of(model: StepModel, *, noise: float = 0.0, seed: int = 0) -> list[StepSample]:
    source = random.Random(seed)
    shapes = [
        StepShape.of_chunk(tokens, prefix) for tokens in (64, 128, 256, 512, 1024) for prefix in (0, 1024, 4096, 16384)
    ]
    return [StepSample(shape, model.time_s(shape) * (1 + source.gauss(0, noise))) for shape in shapes]


@given(model=models, budget_s=st.floats(0, 10), prefix=st.integers(0, 1_000_000))
def test_tokens_within_is_the_inverse_of_the_step_time(model: StepModel, budget_s: float, prefix: int) -> None:
    tokens = model.tokens_within(budget_s, prefix)
    whole = math.floor(tokens) if math.isfinite(tokens) else 10**6
    if whole > 0:
        assert model.time_s(StepShape.of_chunk(whole, prefix)) <= budget_s * (1 + 1e-9)
    assert model.time_s(StepShape.of_chunk(whole + 2, prefix)) >= budget_s * (1 - 1e-9) or math.isinf(tokens)


@given(
    num_stages=st.integers(1, 8),
    times=st.lists(st.integers(1, 500), min_size=1, max_size=30),
)
def test_makespan_of_equal_stages_is_the_sum_and_one_longest_step_per_further_stage(
    num_stages: int, times: list[int]
) -> None:
    stage = StepModel(overhead_s=0.0, token_s=1.0, pair_s=0.0)
    steps = [StepShape(tokens, 0.0) for tokens in times]
    assert makespan_s(steps, [stage] * num_stages) == sum(times) + (num_stages - 1) * max(times)


def test_a_slow_stage_costs_least_at_the_end() -> None:
    steps = [StepShape.of_chunk(2048, idx * 2048) for idx in range(16)]
    spans = []
    for slow in range(4):
        stages = [STAGE.scaled(1.25 if idx == slow else 1.0) for idx in range(4)]
        spans.append(makespan_s(steps, stages))
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize(("num_stages", "work_s"), [(2, 5.0), (4, 42.0), (8, 42.0)])
def test_best_number_of_chunks_against_trying_all(num_stages: int, work_s: float) -> None:
    tau = 0.01

    def span(num_chunks: int) -> float:
        step = StepShape(1, 0.0)
        stage = StepModel(overhead_s=tau, token_s=work_s / num_stages / num_chunks, pair_s=0.0)
        return makespan_s([step] * num_chunks, [stage] * num_stages)

    best = min(range(1, 400), key=span)
    assert abs(best_num_chunks(num_stages=num_stages, work_s=work_s, overhead_s=tau) - best) <= 1


def test_one_stage_wants_no_chunks() -> None:
    assert best_num_chunks(num_stages=1, work_s=10.0, overhead_s=0.001) == 0


@pytest.mark.parametrize("knee", [0, 256])
def test_fit_finds_the_model_behind_noisy_steps_and_slow_moments(knee: int) -> None:
    true = StepModel(overhead_s=0.002, token_s=2e-4, pair_s=3e-8, knee_tokens=knee)
    samples = samples_of(true, noise=0.01)
    for idx in (3, 11):
        samples[idx] = StepSample(samples[idx].shape, samples[idx].time_s * 5)
    found = fit(samples)
    for sample in samples_of(true):
        assert found.time_s(sample.shape) == pytest.approx(sample.time_s, rel=0.05)
    assert found.knee_tokens == pytest.approx(knee, abs=64)


def test_no_part_of_a_fit_is_negative() -> None:
    shapes = [StepShape.of_chunk(tokens, 0) for tokens in (64, 128, 256)]
    found = fit([StepSample(shape, time_s) for shape, time_s in zip(shapes, (0.01, 0.03, 0.07), strict=True)])
    assert min(found.overhead_s, found.token_s, found.pair_s) >= 0
    alone = fit([StepSample(StepShape(64, 100.0), 0.5)])
    assert alone.time_s(StepShape(64, 100.0)) == pytest.approx(0.5)


def test_online_fit_follows_a_stage_that_becomes_slower() -> None:
    fitted = OnlineFit(STAGE)
    for sample in samples_of(STAGE.scaled(2.0), noise=0.02) * 6:
        fitted.add(sample)
    assert fitted.model is not None
    for sample in samples_of(STAGE.scaled(2.0)):
        assert fitted.model.time_s(sample.shape) == pytest.approx(sample.time_s, rel=0.05)


def test_online_fit_keeps_its_proportions_when_all_steps_are_alike() -> None:
    fitted = OnlineFit(STAGE)
    shape = StepShape.of_chunk(512, 1024)
    for _ in range(200):
        fitted.add(StepSample(shape, 1.5 * STAGE.time_s(shape)))
    assert fitted.model is not None
    assert fitted.model.time_s(shape) == pytest.approx(1.5 * STAGE.time_s(shape), rel=0.01)
    far = StepShape.of_chunk(512, 16384)
    assert fitted.model.time_s(far) == pytest.approx(1.5 * STAGE.time_s(far), rel=0.05)


def test_online_fit_learns_a_part_that_was_measured_as_nothing() -> None:
    true = StepModel(overhead_s=0.002, token_s=2e-4, pair_s=3e-8)
    fitted = OnlineFit(StepModel(overhead_s=0.002, token_s=2e-4, pair_s=0.0))
    for sample in samples_of(true) * 10:
        fitted.add(sample)
    assert fitted.model is not None
    far = StepShape.of_chunk(512, 16384)
    assert fitted.model.time_s(far) == pytest.approx(true.time_s(far), rel=0.1)


def test_online_fit_without_a_measurement_starts_from_the_first_steps() -> None:
    fitted = OnlineFit(None, refit_every=20)
    for sample in samples_of(STAGE):
        assert fitted.model is None
        fitted.add(sample)
    assert fitted.model is not None
    fitted.add(StepSample(StepShape(64, 1.0), 0.0))
    far = StepShape.of_chunk(512, 8192)
    assert fitted.model.time_s(far) == pytest.approx(STAGE.time_s(far), rel=0.05)
