"""The partial block of a request is gone from the store in the promised time after every kind of end.

Decode is frozen at first, so that the partial block is surely there and nobody has let it go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moontide.errors import DeadlineExceeded, MoontideError, NodeLost, Rejected
from tests.cluster import wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import CHUNK_TOKENS, DECODE_PAGES, PARTIAL_GONE_S, Bench, Call, frozen, random_prompt

PROMPT_TOKENS = 700
DEADLINE_S = 5.0
IN_FLIGHT_TOKENS = 2 * CHUNK_TOKENS - 10
"""Two chunks: stage 0 computes both without an answer from stage 1."""


@contextmanager
def handed_off(bench: Bench, request_id: str, *, max_tokens: int = 16, timeout_s: float = 60.0) -> Iterator[Call]:
    """A request whose KV waits in the store for a decode instance that is frozen inside the `with`."""
    with frozen(bench.cluster, "decode-0"):
        prompt = random_prompt(PROMPT_TOKENS, seed=sum(request_id.encode()))
        call = bench.start(request_id, prompt, max_tokens=max_tokens, timeout_s=timeout_s)
        bench.wait_completed(call)
        assert bench.partial_keys(request_id)
        yield call


def assert_gone_in_time(bench: Bench, request_id: str, ended_s: float | None) -> None:
    """`ended_s`: when the request ended, on the monotonic clock."""
    assert ended_s is not None
    wait_for(
        lambda: not bench.partial_keys(request_id),
        f"the partial block of {request_id} is gone within {PARTIAL_GONE_S} s of its end",
        ended_s + PARTIAL_GONE_S - time.monotonic(),
    )


def test_normal_end(bench: Bench, oracle: GreedyOracle) -> None:
    with handed_off(bench, "normal") as call:
        pass
    call.wait(30.0)
    assert call.error is None, call.error
    oracle.check(call.prompt, call.tokens)
    assert_gone_in_time(bench, call.request_id, call.ended_s)


def test_cancel(bench: Bench) -> None:
    with handed_off(bench, "cancelled") as call:
        call.cancel()
        assert_gone_in_time(bench, call.request_id, call.ended_s)
    bench.wait_idle()


@pytest.mark.parametrize(
    ("name", "expected", "max_tokens"),
    [("deadline", DeadlineExceeded, 16), ("rejected", Rejected, 64 * DECODE_PAGES)],
)
def test_error(bench: Bench, name: str, expected: type[MoontideError], max_tokens: int) -> None:
    with handed_off(bench, name, max_tokens=max_tokens, timeout_s=DEADLINE_S) as call:
        if expected is DeadlineExceeded:
            call.wait(DEADLINE_S + 2.0)
    call.wait(DEADLINE_S + 2.0)
    assert isinstance(call.error, expected), call.error
    assert_gone_in_time(bench, name, call.ended_s)
    bench.wait_idle()


def test_killed_conductor(bench: Bench) -> None:
    """Nobody releases the reservation; its lease ends it."""
    with handed_off(bench, "orphan") as call:
        pid = bench.cluster.kill("conductor-0")
        ended_s = time.monotonic()
        call.wait(10.0)
        assert isinstance(call.error, NodeLost), call.error
        assert_gone_in_time(bench, "orphan", ended_s)
    bench.cluster.wait_restarted("conductor-0", pid)
    bench.wait_idle()


def test_killed_writer(bench: Bench, oracle: GreedyOracle) -> None:
    """Stage 0 has put its layers of the partial block; stage 1 is frozen, so that the prompt cannot be complete."""
    with frozen(bench.cluster, "prefill-0-stage-1"):
        call = bench.start("writer", random_prompt(IN_FLIGHT_TOKENS, seed=5))
        wait_for(lambda: bool(bench.partial_keys("writer")), "stage 0 has put the partial block")
        written = bench.partial_keys("writer")
        bench.cluster.kill("prefill-0-stage-0")
        ended_s = time.monotonic()
    wait_for(
        lambda: not set(written) & set(bench.partial_keys("writer")),
        f"what the killed stage wrote is gone within {PARTIAL_GONE_S} s",
        ended_s + PARTIAL_GONE_S - time.monotonic(),
    )
    call.wait(60.0)
    assert call.error is None, call.error
    oracle.check(call.prompt, call.tokens)
    assert_gone_in_time(bench, "writer", call.ended_s)
    bench.wait_idle()
