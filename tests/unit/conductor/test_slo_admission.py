from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loads import view_of

from conductor.admission import Admitted, DecodeForecast, DecodePool, Refused, judge, judge_decode, pool_of
from conductor.config import ADMISSION_MODES
from conductor.cost import Prediction, Slo
from moontide.errors import RejectReason
from moontide.perf_model import StepModel

STEP = StepModel(overhead_s=0.01, token_s=0.002, pair_s=1e-7)
NOW_S = 100.0


def pool(requests: float = 8, *, num_instances: int = 2, max_batch: float = 64) -> DecodePool:
    return DecodePool(
        num_instances=num_instances, requests=requests, context_tokens=1000 * requests, max_batch=max_batch, step=STEP
    )


def forecast(*starts_and_lengths: tuple[float, float]) -> DecodeForecast:
    """Starts after NOW_S; negative ones have started."""
    made = DecodeForecast()
    for idx, (start_s, decode_s) in enumerate(starts_and_lengths):
        made.add(str(idx), starts_s=NOW_S + start_s, decode_s=decode_s, overrun_s=50.0)
        if start_s < 0:
            made.started(str(idx), NOW_S + start_s)
    made.check_invariants()
    return made


def decide(
    mode: str, prediction: Prediction, slo: Slo, known: DecodeForecast | None = None, **of_pool: float
) -> Admitted | Refused:
    return judge(
        mode, prediction, slo, prompt_tokens=1000, pool=pool(**of_pool), forecast=known or forecast(), now_s=NOW_S
    )


LATE = Prediction(queue_s=8.0, fetch_s=1.0, prefill_s=2.0, tbt_s=0.02)
SOON = Prediction(prefill_s=2.0, tbt_s=0.03)


def test_without_a_bound_nobody_is_refused() -> None:
    for mode in ADMISSION_MODES:
        assert isinstance(decide(mode, LATE, Slo()), Admitted)


@pytest.mark.parametrize(
    ("mode", "refused"), [("off", False), ("per-stage", True), ("early", True), ("predictive", True)]
)
def test_a_late_first_token_is_refused_with_the_time_by_which_it_is_late(mode: str, refused: bool) -> None:
    answer = decide(mode, LATE, Slo(ttft_s=5.0))
    assert isinstance(answer, Refused) == refused
    if isinstance(answer, Refused):
        assert answer.reason is RejectReason.TTFT_SLO
        assert answer.retry_after_s == pytest.approx(6.0)
        assert "11.00 s" in answer.message
        assert "5 s" in answer.message
        assert answer.error().retry_after_s == answer.retry_after_s


def test_a_prompt_that_an_idle_group_cannot_do_in_time_is_not_told_to_come_again() -> None:
    answer = decide("early", LATE, Slo(ttft_s=2.9))
    assert isinstance(answer, Refused)
    assert answer.retry_after_s is None
    assert "shorten" in answer.message


@pytest.mark.parametrize(
    ("mode", "refused"), [("off", False), ("per-stage", False), ("early", True), ("predictive", True)]
)
def test_slow_decode_is_refused_at_arrival_but_in_the_per_stage_mode(mode: str, refused: bool) -> None:
    answer = decide(mode, SOON, Slo(tbt_s=0.1), requests=100)
    assert isinstance(answer, Refused) == refused
    if isinstance(answer, Refused):
        assert answer.reason is RejectReason.TBT_SLO
    assert isinstance(decide(mode, SOON, Slo(tbt_s=0.1), requests=50), Admitted)


def test_the_per_stage_mode_alone_refuses_when_decode_would_begin() -> None:
    for mode in ADMISSION_MODES:
        assert isinstance(judge_decode(mode, 0.2, Slo(tbt_s=0.1)), Refused) == (mode == "per-stage")
        assert isinstance(judge_decode(mode, 0.05, Slo(tbt_s=0.1)), Admitted)


def test_a_request_that_decodes_nothing_has_no_tbt_to_keep() -> None:
    answer = judge(
        "predictive", SOON, Slo(tbt_s=0.001), prompt_tokens=1000, pool=None, forecast=forecast(), now_s=NOW_S
    )
    assert answer == Admitted(ttft_s=2.0, tbt_s=0.03)


def test_predictive_refuses_what_fits_now_and_will_not_when_the_prompts_ahead_are_done() -> None:
    prompts_ahead = forecast(*[(1.5, 60.0)] * 40)
    assert isinstance(decide("early", SOON, Slo(tbt_s=0.05), prompts_ahead), Admitted)
    assert isinstance(decide("predictive", SOON, Slo(tbt_s=0.05), prompts_ahead), Refused)


def test_predictive_takes_what_does_not_fit_now_and_will_when_the_answers_are_over() -> None:
    ending = forecast(*[(-9.0, 10.0)] * 30)
    overrun = forecast(*[(-19.0, 10.0)] * 30)
    assert isinstance(decide("early", SOON, Slo(tbt_s=0.05), ending, requests=40), Refused)
    assert isinstance(decide("predictive", SOON, Slo(tbt_s=0.05), ending, requests=40), Admitted)
    assert isinstance(decide("predictive", SOON, Slo(tbt_s=0.05), overrun, requests=40), Refused), (
        "they go on longer than expected"
    )


def test_predictive_leaves_out_what_happens_after_the_prompt_is_computed() -> None:
    later = forecast(*[(2.5, 60.0)] * 40, *[(-1.0, 3.5)] * 5)
    answer = decide("predictive", SOON, Slo(tbt_s=0.05), later)
    assert answer == Admitted(ttft_s=2.0, tbt_s=pool().tbt_s(8, 1000))


def test_a_request_refused_for_its_tbt_is_told_when_enough_answers_are_over() -> None:
    answers = forecast(*[(-1.0, 1.0 + seconds) for seconds in range(1, 41)])
    answer = decide("early", SOON, Slo(tbt_s=0.05), answers, requests=40)
    assert isinstance(answer, Refused)
    assert answer.retry_after_s is not None
    others = 40 - answer.retry_after_s
    assert pool(40).tbt_s(others, 1000) <= 0.05 < pool(40).tbt_s(others + 1, 1000)


def test_requests_that_find_no_room_in_a_batch_slow_all_answers_down() -> None:
    assert pool(max_batch=8).tbt_s(14, 1000) == pytest.approx(2 * pool(max_batch=8).tbt_s(6, 1000))
    assert pool(max_batch=math.inf).tbt_s(14, 1000) < pool(max_batch=8).tbt_s(14, 1000)


def test_a_long_prompt_makes_its_own_tokens_slower() -> None:
    assert pool().tbt_s(8, 1_000_000) > pool().tbt_s(8, 1000) + 0.09


def test_the_pool_is_the_sum_of_its_instances_with_the_steps_of_a_typical_one() -> None:
    def load(token_s: float, running: float) -> dict[str, float]:
        batch = {"running": running, "waiting": 5.0, "context_tokens": 100 * running, "max_batch": 16.0}
        return {"step_overhead_s": 0.01, "step_token_s": token_s, "step_pair_s": 0.0, "step_knee_tokens": 4.0, **batch}

    view = view_of([{}], [load(0.001, 2), load(0.002, 3), load(0.009, 4)])
    assert pool_of(view) == DecodePool(
        num_instances=3,
        requests=9,
        context_tokens=900,
        max_batch=48,
        step=StepModel(overhead_s=0.01, token_s=0.002, pair_s=0.0, knee_tokens=4),
    )
    assert pool_of(view_of([{}], [{"running": 3.0}])) is None, "nothing says how long a step takes"


seconds = st.floats(0.001, 1000.0)
bound = st.one_of(st.none(), seconds)


@given(
    mode=st.sampled_from(ADMISSION_MODES[1:]),
    prediction=st.builds(Prediction, queue_s=seconds, fetch_s=seconds, prefill_s=seconds, tbt_s=seconds),
    slo=st.builds(Slo, ttft_s=bound, tbt_s=bound),
    known=st.lists(st.tuples(st.floats(-50, 50), seconds), max_size=30),
    requests=st.integers(0, 100),
)
def test_what_is_admitted_keeps_its_slo_by_its_own_prediction(
    mode: str, prediction: Prediction, slo: Slo, known: list[tuple[float, float]], requests: int
) -> None:
    answer = decide(mode, prediction, slo, forecast(*known), requests=requests)
    if isinstance(answer, Admitted):
        assert slo.ttft_s is None or answer.ttft_s <= slo.ttft_s
        assert mode == "per-stage" or slo.tbt_s is None or answer.tbt_s <= slo.tbt_s
    else:
        assert answer.retry_after_s is None or answer.retry_after_s > 0


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["add", "started", "end"]), st.integers(0, 5), st.floats(0, 20)), max_size=60
    ),
    at_s=st.floats(0, 40),
    now_s=st.floats(0, 30),
)
def test_the_forecast_counts_like_a_list_of_requests(
    events: list[tuple[str, int, float]], at_s: float, now_s: float
) -> None:
    known, oracle = DecodeForecast(), dict[str, tuple[float, bool]]()
    for kind, idx, time_s in events:
        name = str(idx)
        if kind == "add":
            known.add(name, starts_s=time_s, decode_s=2.0, overrun_s=1.0)
            oracle[name] = (time_s, False)
        elif kind == "started":
            known.started(name, time_s)
            if name in oracle and not oracle[name][1]:
                oracle[name] = (time_s, True)
        else:
            known.end(name)
            oracle.pop(name, None)
        known.check_invariants()

    def expected_end_s(start_s: float) -> float:
        decode_s = 2.0
        while start_s + decode_s <= now_s:
            decode_s += 1.0
        return start_s + decode_s

    change = known.change_until(at_s, now_s=now_s)
    known.check_invariants()
    begun = sum(start_s <= at_s and not has_started for start_s, has_started in oracle.values())
    assert change == begun - sum(expected_end_s(start_s) <= at_s for start_s, _ in oracle.values())
    assert len(known) == len(oracle)
