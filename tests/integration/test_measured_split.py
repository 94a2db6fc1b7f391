"""prefill.layer_split=measured with real processes: the group starts again with the split that its speeds ask for, and keeps it."""

from pathlib import Path

import pytest

from benchmarks.paced_models import write_paced_model
from moontide.client import GenerateOptions, MoontideClient
from tests.cluster import RunningCluster, running_cluster
from tests.store_processes import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def answer(cluster: RunningCluster) -> int:
    async with MoontideClient(cluster.grpc_address) as client:
        options = GenerateOptions(max_tokens=2, temperature=0.0, ignore_eos=True)
        return sum([len(chunk.tokens) async for chunk in client.generate(list(range(3, 200)), params=options)])


async def test_group_takes_the_split_that_it_measured_and_keeps_it(tmp_path: Path) -> None:
    model = write_paced_model(
        tmp_path, max_context=2048, overhead_s=0.0, token_s=1e-5, pair_s=0.0, stage_speed=[1.0, 1 / 3]
    )
    settings = [*model.settings, "prefill.layer_split=measured", "prefill.num_pages=64", "decode.num_pages=64"]
    with running_cluster(stages=2, settings=settings) as cluster:
        for stage, layers in (("prefill-0-stage-0", "[0,6)"), ("prefill-0-stage-1", "[6,8)")):
            wait_until(lambda stage=stage, layers=layers: layers in cluster.log(stage), what=f"{layers} on {stage}")
        cluster.wait_ready()
        assert await answer(cluster) == 2

        cluster.kill("prefill-0-stage-1")
        wait_until(lambda: cluster.log("prefill-0-stage-1").count("layers=[6,8)") >= 2, what="the kept split")
        cluster.wait_ready()
        assert await answer(cluster) == 2
        assert cluster.log("prefill-0-stage-0").count("layers=[0,4)") <= 1
