"""Between the end of prefill and the pull only the store holds the KV: dead stages do not matter, and what is missing is never guessed.

prompt -> decode is frozen, so nothing is pulled -> prefill completes -> [ the fault ] -> decode goes on
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvstore.transfer.base import RemoveStatus
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.errors import DeadlineExceeded, NoCapacity
from tests.cluster import RunningCluster
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import STAGES, Bench, frozen, killed_for_long, random_prompt

PROMPT_TOKENS = 700
"""Ten full blocks and a partial one."""
NUM_TOKENS = 16


def test_decode_finishes_from_the_store_when_every_stage_is_killed_before_the_pull(
    bench: Bench, oracle: GreedyOracle
) -> None:
    retries = bench.retries()
    with frozen(bench.cluster, "decode-0"):
        call = bench.start("only-store", random_prompt(PROMPT_TOKENS, seed=1), max_tokens=NUM_TOKENS)
        bench.wait_completed(call)
        with killed_for_long(bench.cluster, *STAGES):
            assert len(call.tokens) == 1, "only the first token, which prefill drew, is there"
            bench.cluster.cont("decode-0")
            call.wait(30.0)
            assert call.error is None, call.error
    assert len(call.tokens) == NUM_TOKENS
    oracle.check(call.prompt, call.tokens)
    assert bench.retries() == retries, "nothing was computed again"
    bench.cluster.wait_ready()
    bench.wait_idle()


def test_objects_removed_before_the_pull_are_computed_again(bench: Bench, oracle: GreedyOracle) -> None:
    retries = bench.retries()
    with frozen(bench.cluster, "decode-0"):
        call = bench.start("removed", random_prompt(PROMPT_TOKENS, seed=2), max_tokens=NUM_TOKENS)
        bench.wait_completed(call)
        remove_objects(bench.cluster, object_keys(bench))
    call.wait(30.0)
    assert call.error is None, call.error
    assert len(call.tokens) == NUM_TOKENS
    oracle.check(call.prompt, call.tokens)
    assert bench.retries() == retries + 1
    bench.wait_idle()


@pytest.mark.slow
def test_objects_removed_and_no_group_to_compute_them_again_is_a_named_error_in_time(
    bench: Bench, oracle: GreedyOracle
) -> None:
    timeout_s = 8.0
    with frozen(bench.cluster, "decode-0"):
        call = bench.start("lost", random_prompt(PROMPT_TOKENS, seed=3), max_tokens=NUM_TOKENS, timeout_s=timeout_s)
        bench.wait_completed(call)
        remove_objects(bench.cluster, object_keys(bench))
        with killed_for_long(bench.cluster, *STAGES):
            bench.cluster.cont("decode-0")
            call.wait(30.0)
    assert isinstance(call.error, DeadlineExceeded | NoCapacity), call.error
    assert call.ended_s is not None
    assert call.ended_s - call.began_s < timeout_s + 2.0
    oracle.check(call.prompt, call.tokens)
    assert len(call.tokens) == 1, "nothing follows the token that prefill drew"
    bench.cluster.wait_ready()
    again = bench.start("after", call.prompt, max_tokens=NUM_TOKENS)
    again.wait(60.0)
    assert again.error is None, again.error
    oracle.check(again.prompt, again.tokens)
    bench.wait_idle()


def object_keys(bench: Bench) -> list[str]:
    """Every K/V object, of whatever request: a longer prefix must not help either."""
    return bench.keys("b/") + bench.keys("p/")


def remove_objects(cluster: RunningCluster, keys: Sequence[str]) -> None:
    """Behind the back of everybody."""
    client_address = cluster.data_client_address
    transfer = MooncakeTransfer(
        client_address=client_address, master_http=cluster.master_http_address, arena_bytes=1 << 20
    )
    try:
        left, give_up_s = list(keys), time.monotonic() + 20.0
        while left:
            statuses = transfer.remove(left)
            left = [key for key, status in zip(left, statuses, strict=True) if status is RemoveStatus.LEASED]
            assert time.monotonic() < give_up_s, f"{len(left)} objects resist their removal"
        assert not any(transfer.exists(keys))
    finally:
        transfer.close()
