"""kill -9 of every process once while it has work: the client gets the whole right answer, and the cluster is as before afterwards."""

from __future__ import annotations

import pytest

from deploy.gantt import stage_chunks
from moontide.errors import NodeLost
from tests.cluster import wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import BLOCK_TOKENS, STAGES, Bench, Call, random_prompt

PROMPT_TOKENS = 2000
MAX_TOKENS = 120
DEADLINE_S = 90.0
SEALED_BLOCKS = 6
"""What a prompt has in the store before a stage dies under it."""
FOLLOWERS = {"mooncake-master": ("kvstore-0",)}
"""Who ends too, because what it knows is worth nothing after that death."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "victim",
    [
        "prefill-0-stage-0",
        pytest.param("prefill-0-stage-1", marks=pytest.mark.slow),
        "kvstore-0",
        pytest.param("mooncake-master", marks=pytest.mark.slow),
        "valkey",
    ],
)
def test_killed_during_prefill(bench: Bench, oracle: GreedyOracle, victim: str) -> None:
    sealed_before = bench.store().sealed_blocks
    call = bench.start(
        f"prefill-{victim}",
        random_prompt(PROMPT_TOKENS, seed=sum(victim.encode())),
        max_tokens=MAX_TOKENS,
        timeout_s=DEADLINE_S,
    )
    wait_for(
        lambda: 0 < bench.prefill().queued_tokens < 2 * PROMPT_TOKENS // 3 and bench.store().reservations == 1,
        "a third of the prompt is in the pipeline",
    )
    wait_for(lambda: bench.store().sealed_blocks >= sealed_before + SEALED_BLOCKS, "a part of the prompt is sealed")
    assert not call.is_over
    old = kill(bench, victim)
    judge(oracle, call)
    if victim.startswith("prefill"):
        judge_resumed(bench, call)
    judge_cluster(bench, oracle, call, old)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["decode-0", pytest.param("mooncake-master", marks=pytest.mark.slow)])
def test_killed_during_decode(bench: Bench, oracle: GreedyOracle, victim: str) -> None:
    retries = bench.retries()
    call = bench.start(
        f"decode-{victim}",
        random_prompt(PROMPT_TOKENS, seed=1 + sum(victim.encode())),
        max_tokens=MAX_TOKENS,
        timeout_s=DEADLINE_S,
    )
    call.wait_tokens(5)
    old = kill(bench, victim)
    judge(oracle, call)
    expected = 1 if victim == "decode-0" else 0
    assert bench.retries() == retries + expected, "a running decode needs no store; a dead one is replaced once"
    judge_cluster(bench, oracle, call, old)


@pytest.mark.timeout(180)
def test_killed_conductor_is_a_named_error_its_nodes_drop_the_work_and_the_next_one_serves(
    bench: Bench, oracle: GreedyOracle
) -> None:
    in_prefill = bench.start("orphan-1", random_prompt(PROMPT_TOKENS, seed=71), max_tokens=MAX_TOKENS)
    in_prefill.wait_tokens(1)
    in_decode = in_prefill
    in_prefill = bench.start("orphan-2", random_prompt(PROMPT_TOKENS, seed=72), max_tokens=MAX_TOKENS)
    wait_for(lambda: 0 < bench.prefill().queued_tokens < PROMPT_TOKENS, "the second prompt is in the pipeline")
    assert not in_decode.is_over

    pid = bench.cluster.kill("conductor-0")
    for call in (in_prefill, in_decode):
        call.wait(10.0)
        assert isinstance(call.error, NodeLost), call.error
        oracle.check(call.prompt, call.tokens)
    bench.cluster.wait_restarted("conductor-0", pid)
    wait_for(lambda: bench.status().ready, "the new conductor serves")
    bench.wait_idle()
    judge_next_prompts(bench, oracle, in_prefill)


def kill(bench: Bench, victim: str) -> dict[str, int | None]:
    """Returns the processes that must be replaced."""
    old = {name: bench.cluster.pid(name) for name in (victim, *FOLLOWERS.get(victim, ()))}
    bench.cluster.kill(victim)
    return old


def judge(oracle: GreedyOracle, call: Call) -> None:
    """The whole answer: no gap, no repetition, the right tokens."""
    call.wait(DEADLINE_S + 2.0)
    assert call.error is None, call.error
    assert len(call.tokens) == MAX_TOKENS
    assert call.finish_reason == "length"
    oracle.check(call.prompt, call.tokens)


def judge_resumed(bench: Bench, call: Call) -> None:
    """No stage computed the sealed blocks again, and each one all the rest: the spans are those of the attempt that completed."""
    timeline = bench.timeline(call.request_id)
    assert timeline is not None
    stages = stage_chunks(timeline)
    assert len(stages) == len(STAGES)
    for spans in stages:
        first_token = min(span.first_token for span in spans)
        assert first_token >= SEALED_BLOCKS * BLOCK_TOKENS
        assert sum(span.num_tokens for span in spans) == PROMPT_TOKENS - first_token


def judge_cluster(bench: Bench, oracle: GreedyOracle, call: Call, old: dict[str, int | None]) -> None:
    """Everything is back and ready, serves, and holds nothing."""
    for name, pid in old.items():
        wait_for(lambda name=name, pid=pid: bench.cluster.pid(name) not in (None, pid), f"{name} runs again")
    bench.cluster.wait_ready()
    judge_next_prompts(bench, oracle, call)


def judge_next_prompts(bench: Bench, oracle: GreedyOracle, call: Call) -> None:
    """The same prompt, of which some may be cached, and a new one are answered right; then nothing is held anywhere."""
    same = bench.start(f"same-after-{call.request_id}", call.prompt, max_tokens=8)
    new = bench.start(
        f"new-after-{call.request_id}", random_prompt(300, seed=1000 + sum(call.request_id.encode())), max_tokens=8
    )
    for after in (same, new):
        after.wait(60.0)
        assert after.error is None, after.error
        assert len(after.tokens) == 8
        oracle.check(after.prompt, after.tokens)
    bench.wait_idle()
