"""Two conductors at work: one dies, freezes or comes anew, Valkey dies, both die. What the other one serves is not touched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moontide.errors import NodeLost
from tests.cluster import wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import BLOCK_TOKENS, Bench, Call, frozen, killed_for_long, random_prompt
from tests.fault.index_watch import evict_all, watching

PROMPT_TOKENS = 1000
MAX_TOKENS = 150
TOO_MANY_TOKENS = 4000
"""An answer that takes longer than a silent conductor is borne with."""
DEADLINE_S = 90.0
NOTICED_S = 20.0
"""A node knows by then that a silent conductor is gone: gRPC's keepalive, moontide/rpc.py, and some time to clean up."""


@pytest.mark.timeout(180)
def test_killed_conductor_touches_no_request_of_the_other_and_its_keyed_answer_goes_on_there(
    bench: Bench, oracle: GreedyOracle
) -> None:
    other = bench.start("other", random_prompt(PROMPT_TOKENS, seed=81), max_tokens=3 * MAX_TOKENS, conductor=1)
    prompt = random_prompt(300, seed=82)
    keyed = start_keyed(bench, "keyed", prompt, conductor=0)
    keyed.wait_tokens(10)
    joined = start_keyed(bench, "joined", prompt, conductor=1)
    joined.wait_tokens(10)
    retries = bench.retries(1)
    assert not other.is_over

    pid = bench.cluster.kill("conductor-0")
    keyed.wait(10.0)
    assert isinstance(keyed.error, NodeLost), keyed.error
    again = start_keyed(bench, "again", prompt, conductor=1)
    judge_greedy(oracle, other, num_tokens=3 * MAX_TOKENS)
    for call in (joined, again):
        call.wait(DEADLINE_S)
        assert call.error is None, call.error
        assert len(call.tokens) == MAX_TOKENS, "the whole answer: no gap, no repetition"
    assert ids(joined) == ids(again), "one key, one answer, although tokens are drawn at random"
    assert ids(keyed) == ids(again)[: len(keyed.tokens)], "the same answer that the dead conductor had begun"
    assert bench.retries(1) == retries, "work of the living conductor was disturbed"

    beside = bench.start("beside", random_prompt(PROMPT_TOKENS, seed=83), max_tokens=MAX_TOKENS, conductor=1)
    bench.cluster.wait_restarted("conductor-0", pid)
    wait_for(lambda: bench.status().ready, "the conductor that was added serves")
    later = start_keyed(bench, "later", prompt, conductor=0)
    later.wait(DEADLINE_S)
    assert ids(later) == ids(again), "a conductor that has just started knows whom to ask"
    judge_greedy(oracle, beside)
    bench.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_valkey_and_a_conductor_die_at_once(bench: Bench, oracle: GreedyOracle) -> None:
    calls = [
        bench.start(f"both-{idx}", random_prompt(400 * idx, seed=90 + idx), max_tokens=MAX_TOKENS, conductor=1)
        for idx in (1, 2, 3)
    ]
    calls[0].wait_tokens(5)
    old = {name: bench.cluster.kill(name) for name in ("valkey", "conductor-0")}
    calls.append(bench.start("during", random_prompt(500, seed=95), max_tokens=MAX_TOKENS, conductor=1))
    keyed = start_keyed(bench, "unclaimed", random_prompt(100, seed=96), conductor=1)
    for call in calls:
        judge_greedy(oracle, call)
    keyed.wait(DEADLINE_S)
    assert keyed.error is None, keyed.error
    for name, pid in old.items():
        wait_for(lambda name=name, pid=pid: bench.cluster.pid(name) not in (None, pid), f"{name} runs again")
    wait_for(lambda: knows_all(bench, 0) and knows_all(bench, 1), "every node has announced itself again")
    again = start_keyed(bench, "again", keyed.prompt, conductor=0)
    again.wait(DEADLINE_S)
    assert ids(again) == ids(keyed), "the claim was entered when Valkey was back"
    bench.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_index_equals_the_truth_after_an_outage_of_valkey_in_which_blocks_came_and_went(
    bench: Bench, oracle: GreedyOracle
) -> None:
    with bench.opened(watching(bench.cluster.registry_url)) as watch:
        first = bench.start("before-outage", random_prompt(PROMPT_TOKENS, seed=100))
        judge_greedy(oracle, first, num_tokens=16)
        wait_for(lambda: bench.run(watch.difference()) == "", "the index is complete")
        with killed_for_long(bench.cluster, "valkey"):
            assert bench.run(evict_all(bench.cluster.store_address)) > PROMPT_TOKENS // BLOCK_TOKENS // 2
            during = bench.start("in-outage", random_prompt(PROMPT_TOKENS, seed=101), conductor=1)
            judge_greedy(oracle, during, num_tokens=16)
            assert bench.run(watch.difference()) != "", "the index cannot know of what happened"
        wait_for(lambda: knows_all(bench, 0) and knows_all(bench, 1), "every node has announced itself again")
        wait_for(lambda: bench.run(watch.difference()) == "", "the index equals the truth")
        num_blocks = watch.index.num_blocks
        assert num_blocks >= PROMPT_TOKENS // BLOCK_TOKENS
        for conductor in ("conductor-0", "conductor-1"):
            wait_for(
                lambda conductor=conductor: bench.cluster.metrics(conductor)["conductor_indexed_blocks"] == num_blocks,
                f"{conductor} knows as many blocks",
            )
    bench.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_frozen_conductor_is_left_by_its_nodes_and_clients_and_its_answer_is_taken_over(
    bench: Bench, oracle: GreedyOracle
) -> None:
    prompt = random_prompt(PROMPT_TOKENS, seed=97)
    call = start_keyed(bench, "frozen", prompt, conductor=0, max_tokens=TOO_MANY_TOKENS)
    call.wait_tokens(3)
    with frozen(bench.cluster, "conductor-0"):
        beside = bench.start("beside-frozen", random_prompt(PROMPT_TOKENS, seed=98), conductor=1)
        judge_greedy(oracle, beside, num_tokens=16)
        wait_for(lambda: not bench.held_by_nodes(1), "nodes and store hold nothing for the frozen conductor", NOTICED_S)
        call.wait(NOTICED_S)
        assert isinstance(call.error, NodeLost), call.error
        again = start_keyed(bench, "again", prompt, conductor=1, max_tokens=TOO_MANY_TOKENS)
        again.wait_tokens(len(call.tokens) + 20)
    again.wait_tokens(len(call.tokens) + 100)
    again.cancel()
    assert ids(call) == ids(again)[: len(call.tokens)]
    bench.wait_idle()


def start_keyed(
    bench: Bench, request_id: str, prompt: Sequence[int], *, conductor: int, max_tokens: int = MAX_TOKENS
) -> Call:
    """Tokens are drawn at random: only the seed of the claim makes two answers equal."""
    return bench.start(
        request_id, prompt, max_tokens=max_tokens, temperature=1.0, conductor=conductor, key=f"key {sum(prompt)}"
    )


def judge_greedy(oracle: GreedyOracle, call: Call, *, num_tokens: int = MAX_TOKENS) -> None:
    call.wait(DEADLINE_S)
    assert call.error is None, call.error
    assert len(call.tokens) == num_tokens
    oracle.check(call.prompt, call.tokens)


def ids(call: Call) -> list[int]:
    return [token.token_id for token in call.tokens]


def knows_all(bench: Bench, conductor: int) -> bool:
    """Whether this conductor is connected and sees every node alive, itself and the other conductor too."""
    try:
        status = bench.status(conductor)
    except NodeLost:
        return False
    alive = sorted(node.role for node in status.nodes if node.alive)
    return (
        status.registry_connected
        and status.ready
        and alive == ["conductor", "conductor", "decode", "kvstore", "prefill"]
    )
