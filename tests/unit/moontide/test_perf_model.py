"""perf_model: step times, makespan, the best number of chunks, and fits that survive noise, slow moments and dull samples."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.perf_model import OnlineFit, StepModel, StepSample, StepShape, best_num_chunks, fit, makespan_s

MODEL = StepModel(overhead_s=2e-3, token_s=1e-4, pair_s=2e-8)
WITH_KNEE = StepModel(overhead_s=2e-3, token_s=1e-4, pair_s=2e-8, knee_tokens=256)
SIZES = (16, 64, 128, 256, 512, 1024, 2048)
PREFIXES = (0, 512, 4096, 16384)
CHECKS = [StepShape.of_chunk(tokens, prefix) for tokens in SIZES for prefix in PREFIXES]

models = st.builds(
    StepModel,
    overhead_s=st.floats(1e-5, 0.1),
    token_s=st.floats(1e-7, 1e-3),
    pair_s=st.floats(1e-12, 1e-6),
    knee_tokens=st.sampled_from([0, 64, 1000]),
)


def samples_of(
    model: StepModel, count: int, *, seed: int = 0, noise: float = 0.03, slow_share: float = 0.05
) -> list[StepSample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        shape = rng.choice(CHECKS)
        slow = rng.uniform(1.5, 5) if rng.random() < slow_share else 1.0
        samples.append(StepSample(shape, model.time_s(shape) * math.exp(rng.gauss(0, noise)) * slow))
    return samples


def worst_error(found: StepModel, truth: StepModel, shapes: Sequence[StepShape] = CHECKS) -> float:
    return max(abs(found.time_s(shape) / truth.time_s(shape) - 1) for shape in shapes)


def slower(model: StepModel, factor: float) -> StepModel:
    return StepModel(
        overhead_s=model.overhead_s * factor,
        token_s=model.token_s * factor,
        pair_s=model.pair_s * factor,
        knee_tokens=model.knee_tokens,
    )


def test_pairs_of_a_chunk_do_not_depend_on_how_it_is_cut() -> None:
    whole = StepShape.of_chunk(100, 50)
    assert StepShape.of_chunk(30, 50) + StepShape.of_chunk(70, 80) == whole
    assert MODEL.work_s(whole) == pytest.approx(MODEL.time_s(whole) - MODEL.overhead_s)


@given(model=models, budget_s=st.floats(0, 10), prefix=st.integers(0, 10**6))
def test_tokens_within_is_the_most_that_the_budget_allows(model: StepModel, budget_s: float, prefix: int) -> None:
    tokens = model.tokens_within(budget_s, prefix)
    assert tokens >= 0

    def time_s(count: float) -> float:
        pairs = count * (prefix + count / 2)
        return model.overhead_s + model.token_s * max(count, model.knee_tokens) + model.pair_s * pairs

    if tokens:
        assert time_s(tokens) <= budget_s * (1 + 1e-9)
    assert time_s(tokens * (1 + 1e-6) + 1e-6) > budget_s * (1 - 1e-9)


def test_tokens_that_cost_nothing_are_not_bounded() -> None:
    assert math.isinf(StepModel(overhead_s=1.0, token_s=0.0, pair_s=0.0).tokens_within(2.0, 0))


@given(model=models, share=st.floats(0.01, 3), first=st.integers(0, 5000), tokens=st.integers(1, 20_000))
def test_number_of_steps_is_that_of_steps_cut_one_by_one(
    model: StepModel, share: float, first: int, tokens: int
) -> None:
    end = first + tokens
    step_s = model.time_s(StepShape.of_chunk(1, end)) + share * model.work_s(StepShape.of_chunk(tokens, first)) / 10
    cursor, count = float(first), 0.0
    while cursor < end:
        fits = model.tokens_within(step_s, round(cursor))
        count += min(1.0, (end - cursor) / fits)
        cursor += fits
    assert model.num_steps(step_s, first, end) == pytest.approx(count, rel=0.3, abs=1.2)


def test_no_number_of_steps_is_enough_when_none_fits() -> None:
    assert math.isinf(MODEL.num_steps(MODEL.overhead_s / 2, 0, 100))
    assert math.isinf(WITH_KNEE.num_steps(WITH_KNEE.time_s(StepShape(256, 0)), 1000, 2000))
    assert MODEL.num_steps(1.0, 100, 100) == 0


@given(stage=models, shapes=st.lists(st.sampled_from(CHECKS), min_size=1, max_size=9), num_stages=st.integers(1, 6))
def test_makespan_of_equal_stages_is_the_closed_form(
    stage: StepModel, shapes: list[StepShape], num_stages: int
) -> None:
    times_s = [stage.time_s(shape) for shape in shapes]
    expected_s = sum(times_s) + (num_stages - 1) * max(times_s)
    assert makespan_s(shapes, [stage] * num_stages) == pytest.approx(expected_s)


def test_a_slow_stage_costs_least_at_the_end() -> None:
    shapes = [StepShape.of_chunk(1000, 1000 * idx) for idx in range(16)]
    at_start, at_end = (
        makespan_s(shapes, stages)
        for stages in ([slower(MODEL, 1.25), MODEL, MODEL], [MODEL, MODEL, slower(MODEL, 1.25)])
    )
    assert at_end < at_start
    assert makespan_s([], [MODEL]) == 0.0
    assert makespan_s(shapes, []) == 0.0


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("overhead_s", [1e-3, 1e-2, 0.1])
def test_best_number_of_chunks_is_the_best_of_all(num_stages: int, overhead_s: float) -> None:
    work_s = 42.0

    def total_s(num_chunks: int) -> float:
        share_s = work_s / num_stages
        fill_s = (num_stages - 1) * (share_s / num_chunks + overhead_s)
        return share_s + num_chunks * overhead_s + fill_s

    best = min(range(1, 1000), key=total_s)
    found = best_num_chunks(num_stages=num_stages, work_s=work_s, overhead_s=overhead_s)
    assert abs(found - best) <= 1


def test_best_number_of_chunks_matches_the_published_figure() -> None:
    assert best_num_chunks(num_stages=4, work_s=42.0, overhead_s=0.010) == pytest.approx(56.1, abs=0.1)


def test_best_number_of_chunks_at_the_ends() -> None:
    assert best_num_chunks(num_stages=1, work_s=1.0, overhead_s=0.01) == 0.0
    assert best_num_chunks(num_stages=4, work_s=0.0, overhead_s=0.01) == 0.0
    assert math.isinf(best_num_chunks(num_stages=4, work_s=1.0, overhead_s=0.0))


@pytest.mark.parametrize(
    "truth",
    [
        MODEL,
        WITH_KNEE,
        StepModel(overhead_s=0.0, token_s=1e-4, pair_s=2e-8),
        StepModel(overhead_s=5e-2, token_s=1e-5, pair_s=0.0),
        StepModel(overhead_s=1e-4, token_s=0.0, pair_s=1e-7),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_fit_recovers_a_model_through_noise_and_slow_moments(truth: StepModel, seed: int) -> None:
    found = fit(samples_of(truth, 150, seed=seed))
    assert worst_error(found, truth) < 0.08
    assert min(found.overhead_s, found.token_s, found.pair_s) >= 0


def test_fit_is_exact_without_noise() -> None:
    for truth in (MODEL, WITH_KNEE):
        found = fit([StepSample(shape, truth.time_s(shape)) for shape in CHECKS])
        assert worst_error(found, truth) < 1e-6
        assert found.knee_tokens == truth.knee_tokens


@pytest.mark.parametrize("seed", range(5))
def test_fit_finds_no_knee_where_there_is_none(seed: int) -> None:
    assert fit(samples_of(MODEL, 100, seed=seed)).knee_tokens == 0


def test_fit_of_one_sample_predicts_it() -> None:
    shape = StepShape.of_chunk(512, 0)
    assert fit([StepSample(shape, 0.25)]).time_s(shape) == pytest.approx(0.25)


def test_short_steps_count_as_much_as_long_ones() -> None:
    """The long step is off by 10 ms of 1 s, which is 1 %; the overhead of 2 ms must not drown in it."""
    truth = StepModel(overhead_s=2e-3, token_s=1e-4, pair_s=0.0)
    samples = [StepSample(StepShape(size, 0), truth.time_s(StepShape(size, 0))) for size in (8, 16, 32, 64)]
    samples += [StepSample(StepShape(10_000, 0), 1.002 + error_s) for error_s in (-0.01, 0.012, 0.01)]
    assert fit(samples).overhead_s == pytest.approx(2e-3, rel=0.1)


def test_online_fit_improves_a_wrong_start() -> None:
    online = OnlineFit(StepModel(overhead_s=8e-3, token_s=5e-5, pair_s=5e-8))
    for sample in samples_of(MODEL, 300):
        online.add(sample)
    assert online.model is not None
    assert worst_error(online.model, MODEL) < 0.1


def test_online_fit_finds_a_part_that_was_measured_as_nothing() -> None:
    online = OnlineFit(StepModel(overhead_s=2e-3, token_s=1e-4, pair_s=0.0))
    for sample in samples_of(MODEL, 300):
        online.add(sample)
    assert online.model is not None
    assert worst_error(online.model, MODEL) < 0.25


@pytest.mark.parametrize("shapes", [CHECKS, [StepShape.of_chunk(512, 4096)]], ids=["varied", "alike"])
def test_online_fit_follows_a_stage_that_becomes_twice_as_slow(shapes: list[StepShape]) -> None:
    online = OnlineFit(MODEL)
    rng = random.Random(1)
    slow = slower(MODEL, 2)
    for stage in (MODEL, slow):
        for _ in range(64):
            shape = rng.choice(shapes)
            online.add(StepSample(shape, stage.time_s(shape) * math.exp(rng.gauss(0, 0.02))))
    assert online.model is not None
    assert worst_error(online.model, slow) < 0.1, "shapes that did not run are predicted too: the proportions are kept"


def test_samples_that_are_all_alike_only_scale_the_model_however_many_there_are() -> None:
    online = OnlineFit(WITH_KNEE)
    rng = random.Random(2)
    shape = StepShape.of_chunk(512, 4096)
    for _ in range(3000):
        online.add(StepSample(shape, 1.5 * WITH_KNEE.time_s(shape) * math.exp(rng.gauss(0, 0.05))))
    assert online.model is not None
    assert worst_error(online.model, slower(WITH_KNEE, 1.5)) < 0.05


def test_samples_that_are_nearly_alike_do_not_let_the_proportions_wander() -> None:
    """Steps of equal time, as the planner cuts them, hardly tell the overhead from the rest."""
    online = OnlineFit(MODEL)
    rng = random.Random(3)
    for _ in range(5000):
        prefix = rng.randrange(0, 30_000)
        shape = StepShape.of_chunk(round(MODEL.tokens_within(0.1, prefix) / 64) * 64, prefix)
        online.add(StepSample(shape, MODEL.time_s(shape) * math.exp(rng.gauss(0, 0.05))))
    assert online.model is not None
    assert MODEL.overhead_s / 2 < online.model.overhead_s < 2 * MODEL.overhead_s
    assert worst_error(online.model, MODEL) < 0.15


def test_slow_moments_do_not_move_the_online_fit() -> None:
    online = OnlineFit(MODEL)
    for sample in samples_of(MODEL, 200, slow_share=0.2):
        online.add(sample)
    assert online.model is not None
    assert worst_error(online.model, MODEL) < 0.08


def test_without_a_start_the_first_varied_steps_are_the_measurement() -> None:
    online = OnlineFit(None)
    rng = random.Random(4)
    same = StepShape.of_chunk(512, 0)
    for _ in range(40):
        online.add(StepSample(same, MODEL.time_s(same) * math.exp(rng.gauss(0, 0.03))))
    assert online.model is None, "one kind of step says nothing about others"
    for sample in samples_of(MODEL, 64):
        online.add(sample)
    assert online.model is not None
    assert worst_error(online.model, MODEL) < 0.15


def test_a_step_without_a_time_is_ignored() -> None:
    online = OnlineFit(MODEL, refit_every=1)
    online.add(StepSample(StepShape(10, 50.0), 0.0))
    assert online.model == MODEL


def test_prediction_error_is_relative_and_signed() -> None:
    shape = StepShape.of_chunk(512, 0)
    actual_s = MODEL.time_s(shape) / 1.25
    assert OnlineFit(MODEL).error(StepSample(shape, actual_s)) == pytest.approx(0.25)
    assert OnlineFit(slower(MODEL, 0.4)).error(StepSample(shape, actual_s)) == pytest.approx(-0.5)


def test_a_step_that_takes_as_long_as_the_knee_holds_the_knee_also_after_rounding() -> None:
    model = StepModel(overhead_s=2**-7, token_s=0.2 * 2**-17, pair_s=0.0, knee_tokens=1024)
    step_s = model.time_s(StepShape.of_chunk(900, 0))
    assert model.tokens_within(step_s, 0) == pytest.approx(1024)
    assert model.num_steps(step_s, 0, 4096) == pytest.approx(4)
