"""The store dies or stands still while K/V is on its way: what was in flight is right afterwards, or computed again, and never wrong.

"In the middle" is made sure of: the process that owns the segment is stopped first, so that puts and gets are open when the fault comes.

    the middle of a prompt     decode has blocks, other blocks lie in the store, others are being put: stage | STORE | decode
    the middle of the hand-off prefill is over; decode's get is open                                           STORE | decode
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.access import KvConfig
from kvstore.layout import KVLayout
from model_runner.config import ModelConfig
from model_runner.model_source import describe_model
from moontide.errors import MoontideError
from tests.cluster import wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import BLOCK_TOKENS, Bench, Call, frozen, frozen_data_client, random_prompt
from tests.fault.test_kill_each_process import judge_cluster, judge_next_prompts

PROMPT_TOKENS = 1600
HANDOFF_TOKENS = 700
NUM_TOKENS = 16
DEADLINE_S = 90.0
DATA_CLIENT = "data client"
RESTARTED = {
    DATA_CLIENT: ("kvstore-0",),
    "kvstore-0": ("kvstore-0",),
    "mooncake-master": ("mooncake-master", "kvstore-0"),
}
"""Victim -> the processes that are new afterwards."""
IN_FLIGHT_S = 20.0


@pytest.fixture(scope="module")
def layout(model_dir: Path) -> KVLayout:
    kv = KvConfig(block_tokens=BLOCK_TOKENS, layer_group=1)
    return describe_model(ModelConfig(name=str(model_dir), dtype="float32"), kv).layout


@dataclass(frozen=True)
class Stuck:
    """A request whose way through the store is blocked."""

    call: Call
    data_client_pid: int


@contextmanager
def in_the_middle_of_a_prompt(bench: Bench, request_id: str) -> Iterator[Stuck]:
    """Decode has pulled blocks of the prompt; of others the puts are open. The owner of the segment stands still inside the `with`."""
    before = pulled_bytes(bench)
    prompt = random_prompt(PROMPT_TOKENS, seed=sum(request_id.encode()))
    call = bench.start(request_id, prompt, max_tokens=NUM_TOKENS, timeout_s=DEADLINE_S)
    wait_for(lambda: pulled_bytes(bench) > before, "decode has the first blocks", IN_FLIGHT_S)
    with frozen_data_client(bench.cluster) as pid:
        wait_for(lambda: has_open_puts(bench) and is_pulling(bench), "puts are open", IN_FLIGHT_S)
        assert not call.is_over
        assert not call.tokens
        yield Stuck(call, pid)


@contextmanager
def in_the_middle_of_a_handoff(bench: Bench, request_id: str) -> Iterator[Stuck]:
    """Prefill is over and decode has asked for the blocks. The owner of the segment stands still inside the `with`."""
    before = pulled_bytes(bench)
    with ExitStack() as stack:
        with frozen(bench.cluster, "decode-0"):
            prompt = random_prompt(HANDOFF_TOKENS, seed=sum(request_id.encode()))
            call = bench.start(request_id, prompt, max_tokens=NUM_TOKENS, timeout_s=DEADLINE_S)
            bench.wait_completed(call)
            pid = stack.enter_context(frozen_data_client(bench.cluster))
        wait_for(lambda: is_pulling(bench), "decode has asked for the blocks", IN_FLIGHT_S)
        assert pulled_bytes(bench) == before
        assert len(call.tokens) == 1, "only the first token, which prefill drew, is there"
        yield Stuck(call, pid)


MOMENTS = {"prompt": in_the_middle_of_a_prompt, "hand-off": in_the_middle_of_a_handoff}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("prompt", DATA_CLIENT),
        ("prompt", "mooncake-master"),
        pytest.param("prompt", "kvstore-0", marks=pytest.mark.slow),
        ("hand-off", "mooncake-master"),
        pytest.param("hand-off", DATA_CLIENT, marks=pytest.mark.slow),
        pytest.param("hand-off", "kvstore-0", marks=pytest.mark.slow),
    ],
)
def test_killed_while_bytes_are_in_flight(
    bench: Bench, oracle: GreedyOracle, layout: KVLayout, moment: str, victim: str
) -> None:
    retries = bench.retries()
    old = {name: bench.cluster.pid(name) for name in RESTARTED[victim]}
    with MOMENTS[moment](bench, f"{moment}-{victim.replace(' ', '-')}") as stuck:
        if victim == DATA_CLIENT:
            os.kill(stuck.data_client_pid, signal.SIGKILL)
        else:
            bench.cluster.kill(victim)
    judge(oracle, stuck.call)
    assert bench.retries() > retries, "what was lost is computed again"
    judge_cluster(bench, oracle, stuck.call, old)
    bench.wait_books_agree(layout)


@pytest.mark.parametrize("moment", MOMENTS)
def test_store_that_stands_still_for_a_while_costs_no_attempt(
    bench: Bench, oracle: GreedyOracle, layout: KVLayout, moment: str
) -> None:
    retries = bench.retries()
    with MOMENTS[moment](bench, f"{moment}-still") as stuck:
        pass
    judge(oracle, stuck.call)
    assert bench.retries() == retries
    judge_next_prompts(bench, oracle, stuck.call)
    bench.wait_books_agree(layout)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", MOMENTS)
def test_store_that_stays_frozen_is_replaced(bench: Bench, oracle: GreedyOracle, layout: KVLayout, moment: str) -> None:
    """Its master forgets the segment after ten seconds; then the store process starts anew. The frozen one never writes again."""
    old = {"kvstore-0": bench.cluster.pid("kvstore-0")}
    with MOMENTS[moment](bench, f"{moment}-stays") as stuck:
        wait_for(lambda: bench.cluster.pid("kvstore-0") not in (None, *old.values()), "the store process is replaced")
    judge(oracle, stuck.call)
    judge_cluster(bench, oracle, stuck.call, old)
    bench.wait_books_agree(layout)


def judge(oracle: GreedyOracle, call: Call) -> None:
    call.wait(DEADLINE_S + 2.0)
    assert call.error is None, call.error
    assert len(call.tokens) == NUM_TOKENS
    oracle.check(call.prompt, call.tokens)


def pulled_bytes(bench: Bench) -> float:
    return bench.cluster.metrics("decode-0")["decode_pulled_bytes_total"]


def has_open_puts(bench: Bench) -> bool:
    try:
        return bench.prefill().open_puts > 0
    except (MoontideError, LookupError):
        return False


def is_pulling(bench: Bench) -> bool:
    try:
        return bench.decode().pulling == 1
    except (MoontideError, LookupError):
        return False
