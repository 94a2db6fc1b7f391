"""Pages and pool that are too small for the load, damaged K/V, a slow way to the store and closed ports: alerts fire, runbooks hold, and
all resolve.

Windows are those of production times 0.02. A prompt token takes 1 ms, a decode step 20 ms.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.paced_models import write_paced_model
from tests.cluster import running_cluster, wait_for
from tests.deploy.live.prometheus import running_prometheus, scaled_rules
from tests.deploy.live.saturation_damage import damage_files, damage_memory
from tests.deploy.live.saturation_stage import Flow, Stage, prompt_of
from tests.fault.harness import Bench, Call, data_client_pid
from tests.netns import why_unavailable

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[3]
HEAD_DIM = 64
"""2 KiB of K/V per token: the pool has room for 108 blocks."""
BLOCK = 64
PREFILL_PAGES, DECODE_PAGES = 16, 32
SETTINGS = (
    "deploy.stages=1",
    "deploy.object_lease_s=1",
    f"kv.block_tokens={BLOCK}",
    "kv.layer_group=8",
    "kvstore.pool_bytes=16777216",
    "kvstore.ssd_bytes=67108864",
    "prefill.chunk_tokens=256",
    f"prefill.num_pages={PREFILL_PAGES}",
    f"decode.num_pages={DECODE_PAGES}",
    "conductor.local_prefill=false",
)
SLO_OPTIONS = ("--ttft-slo-s", "160", "--tbt-slo-s", "160")
"""Out of the way: SLO alerts are staged elsewhere."""
DAMAGE = ("MoontideObjectsCorrupt", "MoontideSsdDamaged")


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, ssd: Path) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("saturation")
    model = write_paced_model(
        folder, max_context=8192, head_dim=HEAD_DIM, overhead_s=0.002, token_s=1e-3, pair_s=0.0, decode_step_s=0.02
    )
    with ExitStack() as stack:
        cluster = stack.enter_context(
            running_cluster(
                model=model.directory,
                dtype="bfloat16",
                stages=1,
                settings=[*model.settings, *SETTINGS, f"kvstore.ssd_dir={ssd}"],
            )
        )
        bench = Bench(cluster)
        stack.callback(bench.close)
        rules = scaled_rules(folder, *SLO_OPTIONS)
        prometheus = stack.enter_context(running_prometheus(cluster, folder, rules=rules))
        yield Stage(bench=bench, prometheus=prometheus)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_slow_way_and_closed_ports_between_two_hosts(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.deploy.live.saturation_two_hosts", str(tmp_path)]
    assert subprocess.run(argv, cwd=ROOT, timeout=280.0, check=False).returncode == 0


def test_damage_in_memory_and_on_the_ssd_is_found_and_cleared(stage: Stage, ssd: Path) -> None:
    prompts = [prompt_of(8 * BLOCK + 1) for _ in range(6)]
    calls = [stage.bench.start(f"fill-{idx}", prompt) for idx, prompt in enumerate(prompts)]
    for call in calls:
        call.wait(30.0)
    wait_for(lambda: store(stage)["kvstore_ssd_kept_blocks_total"] >= 6 * 8, "all blocks are on the SSD")
    stage.assert_quiet()
    stage.begin()

    assert damage_memory(data_client_pid(stage.cluster), head_dim=HEAD_DIM) >= len(prompts)
    assert answered(stage, prompts[0]).error is None
    stage.wait_firing("MoontideObjectsCorrupt")
    stage.walk("Look at", "MoontideObjectsCorrupt")
    stage.walk("Do", "MoontideObjectsCorrupt")
    stage.walk("Verify", "MoontideObjectsCorrupt")

    wait_for(lambda: store(stage)["kvstore_objects_to_remove"] == 0, "what was damaged is gone")
    assert damage_files(ssd, head_dim=HEAD_DIM) >= len(prompts)
    stage.kvstore("evict", "--bytes", "1000000000")
    assert answered(stage, prompts[1]).error is None
    stage.wait_firing("MoontideSsdDamaged")
    stage.walk("Look at", "MoontideSsdDamaged")
    stage.find_in_log("kvstore-0", "MoontideSsdDamaged")


def test_too_few_pages_and_too_small_a_pool(stage: Stage) -> None:
    stage.begin()
    with Flow(stage.bench, per_s=3, prompt_tokens=PREFILL_PAGES * BLOCK - 10) as flow:
        stage.wait_firing("MoontidePrefillPagesExhausted")
        stage.walk("Look at", "MoontidePrefillPagesExhausted", REQUEST_ID=flow.answered[-1].request_id)
    stage.wait_resolved("MoontidePrefillPagesExhausted")
    stage.prometheus.wait_scrapes(1)
    stage.walk("Verify", "MoontidePrefillPagesExhausted")

    stage.begin()
    with Flow(stage.bench, per_s=2, prompt_tokens=10 * BLOCK - 10, max_tokens=350) as flow:
        stage.wait_firing("MoontideDecodePagesExhausted", "MoontidePoolFull")
        late = flow.calls[0].request_id
        stage.walk("Look at", "MoontideDecodePagesExhausted", "MoontidePoolFull", REQUEST_ID=late)
    stage.wait_resolved("MoontideDecodePagesExhausted", "MoontidePoolFull")
    stage.walk("Verify", "MoontideDecodePagesExhausted", "MoontidePoolFull")

    stage.wait_resolved(*DAMAGE)
    stage.walk("Verify", *DAMAGE)
    stage.assert_critical()


def answered(stage: Stage, prompt: list[int]) -> Call:
    call = stage.bench.start(f"again-{len(prompt)}-{prompt[0]}-{prompt[1]}", prompt)
    call.wait(30.0)
    return call


def store(stage: Stage) -> dict[str, float]:
    return stage.cluster.metrics("kvstore-0")
