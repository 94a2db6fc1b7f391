"""A breach of each SLO and load above capacity, staged on a paced cluster: alerts fire, their runbooks hold, and they resolve.

Windows are those of production times 0.02. A prompt token takes 0.2 ms, a decode step 20 ms; the SLO bounds are 2.5 s and 0.15 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.paced_models import write_paced_model
from tests.cluster import running_cluster, wait_for
from tests.deploy.live.prometheus import running_prometheus, scaled_rules
from tests.deploy.live.saturation_stage import Flow, Stage, prompt_of, standing_still
from tests.fault.harness import Bench

pytestmark = pytest.mark.timeout(300)

SETTINGS = (
    "deploy.stages=1",
    "kv.block_tokens=256",
    "kv.layer_group=8",
    "prefill.num_pages=2048",
    "decode.num_pages=2048",
    "conductor.local_prefill=false",
)
LONG, SHORT = 5000, 50
"""Tokens of prompts that take a second and some ten milliseconds."""
PREFILL = ("prefill-0-stage-0", "decode-1")
"""Processes that compute prompts after the first test."""
OVERLOAD = ("MoontideQueueGrowing", "MoontideRoleOverloaded", "MoontideRejectionsHigh")
TTFT, TBT = (("MoontideTtftBurnFast", "MoontideTtftBurnSlow"), ("MoontideTbtBurnFast", "MoontideTbtBurnSlow"))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("slo")
    model = write_paced_model(
        folder, max_context=20_000, overhead_s=0.005, token_s=2e-4, pair_s=0.0, decode_step_s=0.02
    )
    with ExitStack() as stack:
        cluster = stack.enter_context(
            running_cluster(
                model=model.directory, dtype="bfloat16", stages=1, decode=2, settings=[*model.settings, *SETTINGS]
            )
        )
        bench = Bench(cluster)
        stack.callback(bench.close)
        rules = scaled_rules(folder, "--ttft-slo-s", "2.5")
        prometheus = stack.enter_context(running_prometheus(cluster, folder, rules=rules))
        yield Stage(bench=bench, prometheus=prometheus)


def test_load_above_what_prefill_can_do_and_a_node_that_changes_its_role(stage: Stage) -> None:
    bench = stage.bench
    with Flow(bench, per_s=2, prompt_tokens=SHORT, max_tokens=4) as usual:
        wait_for(lambda: len(usual.answered) > 4, "short prompts are answered")
        stage.assert_quiet()
    stage.begin()
    with (
        Flow(bench, per_s=1.5, prompt_tokens=LONG) as too_much,
        Flow(bench, per_s=1, prompt_tokens=LONG, ttft_slo_s=2.0) as bounded,
    ):
        stage.wait_firing(*TTFT, *OVERLOAD)
        late, refused = too_much.answered[-1].request_id, bounded.refused[-1].request_id
        stage.walk("Look at", *TTFT, "MoontideQueueGrowing", "MoontideRoleOverloaded", REQUEST_ID=late)
        for alert in ("MoontideTtftBurnFast", "MoontideRejectionsHigh", "MoontideRoleOverloaded"):
            stage.find_in_log("conductor-0", alert)
        stage.walk("Look at", "MoontideRejectionsHigh", REQUEST_ID=refused)
        assert bench.set_role(["decode-1"], "prefill") == ["decode-1.prefill"]
        stage.wait_resolved("MoontideQueueGrowing")
    stage.say(f"the load is over; {sorted(stage.prometheus.firing())} fire")
    with Flow(bench, per_s=30, prompt_tokens=SHORT) as usual:
        stage.wait_resolved(*TTFT, *OVERLOAD)
        stage.walk("Verify", *TTFT, *OVERLOAD, REQUEST_ID=usual.answered[-1].request_id)
    stage.assert_critical(*TTFT)


def test_decode_that_stands_still_by_turns_and_predictions_that_do_not_hold(stage: Stage) -> None:
    bench = stage.bench
    with Flow(bench, per_s=1, prompt_tokens=SHORT, max_tokens=100) as usual:
        wait_for(lambda: len(usual.answered) > 4, "answers are complete")
        stage.assert_quiet()
        stage.begin()
        with standing_still(*pids(stage, "decode-0"), stopped_s=0.35, running_s=0.1):
            stage.wait_firing(*TBT)
            stage.walk("Look at", *TBT, REQUEST_ID=usual.answered[-1].request_id)
    stage.say("decode runs again")
    for number in range(8):
        bench.start(f"long-{number}", prompt_of(SHORT), max_tokens=3000)
    with Flow(bench, per_s=2, prompt_tokens=300) as usual:
        with standing_still(*pids(stage, *PREFILL), stopped_s=1.2, running_s=0.6):
            stage.wait_firing("MoontidePredictionErrorHigh", timeout_s=90.0)
            stage.walk("Look at", "MoontidePredictionErrorHigh", REQUEST_ID=usual.answered[-1].request_id)
        stage.say("prefill runs again")
        stage.wait_resolved(*TBT, "MoontidePredictionErrorHigh")
        stage.walk("Verify", *TBT, "MoontidePredictionErrorHigh", REQUEST_ID=usual.answered[-1].request_id)
    stage.assert_critical(*TBT)


def pids(stage: Stage, *names: str) -> list[int]:
    found = [stage.cluster.pid(name) for name in names]
    assert None not in found, f"one of {names} does not run"
    return [pid for pid in found if pid is not None]
