"""Nodes change their roles while requests run: none of them fails, and every process stays what it is for whoever started it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from moontide.errors import RoleRefused
from tests.cluster import running_cluster, wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import SETTINGS, Bench, Call, random_prompt

MAX_TOKENS = 24
PROMPT_TOKENS = 300
SWITCH_S = 60.0
IN_FLIGHT = 2
ROLE_SETTINGS = ("conductor.roles=off", "conductor.local_prefill=false", "decode.drain_timeout_s=10")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_serve_in_the_other_role_and_come_back_under_load(model_dir: Path, oracle: GreedyOracle) -> None:
    with running_cluster(model=model_dir, stages=2, decode=2, settings=[*SETTINGS, *ROLE_SETTINGS]) as cluster:
        bench = Bench(cluster)
        try:
            pids = {name: cluster.pid(name) for name in cluster.names()}
            with pytest.raises(RoleRefused, match="no prefill node would be left"):
                bench.set_role(["prefill-0-stage-0"], "decode")
            with load(bench) as calls:
                change(bench, calls, ["decode-1"], "prefill", {"decode-1.prefill"})
                halves = {"prefill-0-stage-0.decode", "prefill-0-stage-1.decode"}
                change(bench, calls, ["prefill-0-stage-0"], "decode", halves)
                change(bench, calls, sorted(halves), "prefill", {"prefill-0-stage-0"})
                change(bench, calls, ["decode-1.prefill"], "decode", {"decode-1"})
            assert served_by(bench) == {"prefill-0-stage-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
            for call in calls:
                assert call.error is None, f"{call.request_id}: {call.error!r}"
                assert len(call.tokens) == MAX_TOKENS, call.request_id
            for call in (calls[0], calls[-1]):
                oracle.check(call.prompt, call.tokens)
            assert {name: cluster.pid(name) for name in cluster.names()} == pids, "nothing was started again"

            bench.set_role(["decode-1"], "prefill")
            wait_for(lambda: served_by(bench).get("decode-1.prefill") == "prefill", "it is away", SWITCH_S)
            cluster.kill("decode-1")
            wait_for(lambda: served_by(bench).get("decode-1") == "decode", "what died starts as deployed", SWITCH_S)
        finally:
            bench.close()


def change(bench: Bench, calls: Sequence[Call], node_ids: Sequence[str], role: str, expected: set[str]) -> None:
    """Until those that come serve, those that went are gone, and requests that began since are through."""
    assert set(bench.set_role(node_ids, role)) == expected

    def is_changed() -> bool:
        roles = served_by(bench)
        return all(roles.get(name) == role for name in expected) and not roles.keys() & set(node_ids)

    wait_for(is_changed, f"{', '.join(node_ids)} became {role}", SWITCH_S)
    num_before = len(calls)
    wait_for(lambda: len(calls) >= num_before + IN_FLIGHT + 1 and calls[num_before].is_over, "requests go on", SWITCH_S)


def served_by(bench: Bench) -> dict[str, str]:
    """Roles of the compute nodes that are alive."""
    return {
        node.node_id: node.role for node in bench.status().nodes if node.alive and node.role in ("prefill", "decode")
    }


@contextmanager
def load(bench: Bench) -> Iterator[list[Call]]:
    """Requests one after the other inside the `with`, a few at a time; all are over at its end."""
    calls: list[Call] = []
    stop = threading.Event()

    def feed() -> None:
        while not stop.is_set():
            if sum(not call.is_over for call in calls) < IN_FLIGHT:
                prompt = random_prompt(PROMPT_TOKENS, seed=1000 + len(calls))
                calls.append(bench.start(f"load-{len(calls)}", prompt, max_tokens=MAX_TOKENS))
            stop.wait(0.02)

    feeder = threading.Thread(target=feed, name="load")
    feeder.start()
    try:
        yield calls
    finally:
        stop.set()
        feeder.join()
    for call in calls:
        call.wait(SWITCH_S)
