"""A stage that is stopped, not dead: no connection breaks, only its heart does not beat."""

from __future__ import annotations

import pytest

from moontide.errors import DeadlineExceeded, MoontideError
from tests.cluster import wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import STAGES, Bench, Call, frozen, random_prompt

PROMPT_TOKENS = 2000
DEADLINE_S = 6.0
KEEPALIVE_S = 15.0


def test_group_without_a_frozen_stage_is_lost_and_the_request_goes_on_when_it_is_back(
    bench: Bench, oracle: GreedyOracle
) -> None:
    retries, epoch = bench.retries(), bench.prefill().epoch
    call = started(bench, "stopped")
    with frozen(bench.cluster, STAGES[1]):
        wait_for(lambda: bench.retries() == retries + 1, "the loss of the group ends the attempt")
        assert not bench.cluster.is_ready(STAGES[0])
        assert not call.is_over
    judge(oracle, call)
    assert bench.prefill().epoch > epoch
    bench.wait_idle()


@pytest.mark.slow
def test_stage_that_stays_frozen_is_a_named_error_in_time(bench: Bench, oracle: GreedyOracle) -> None:
    with frozen(bench.cluster, STAGES[1]):
        call = started(bench, "stays", timeout_s=DEADLINE_S)
        call.wait(DEADLINE_S + 2.0)
    assert isinstance(call.error, DeadlineExceeded), call.error
    assert call.ended_s is not None
    assert call.ended_s - call.began_s < DEADLINE_S + 2.0
    bench.cluster.wait_ready()
    after = bench.start("after-stays", call.prompt)
    judge(oracle, after)
    bench.wait_idle()


@pytest.mark.slow
def test_frozen_stage_0_is_noticed_by_the_conductor(bench: Bench, oracle: GreedyOracle) -> None:
    """Its connection stays open; only keepalive, 15 s in all, tells that nobody is there.

    Meanwhile the store process has given its memory up, so that it has to be started anew.
    """
    retries, pid = bench.retries(), bench.cluster.pid(STAGES[0])
    call = started(bench, "head")
    with frozen(bench.cluster, STAGES[0]):
        wait_for(lambda: bench.retries() == retries + 1, "keepalive ends the attempt", KEEPALIVE_S + 5.0)
    judge(oracle, call)
    assert bench.cluster.pid(STAGES[0]) not in (None, pid)
    bench.wait_idle()


def started(bench: Bench, request_id: str, *, timeout_s: float = 90.0) -> Call:
    """A request that the group works on."""
    prompt = random_prompt(PROMPT_TOKENS, seed=sum(request_id.encode()))
    call = bench.start(request_id, prompt, timeout_s=timeout_s)
    wait_for(lambda: is_computing(bench), f"{request_id} is in the pipeline")
    return call


def is_computing(bench: Bench) -> bool:
    try:
        return bench.prefill().in_flight_steps > 0
    except (MoontideError, LookupError):
        return False


def judge(oracle: GreedyOracle, call: Call) -> None:
    call.wait(60.0)
    assert call.error is None, call.error
    assert len(call.tokens) == 16
    oracle.check(call.prompt, call.tokens)
