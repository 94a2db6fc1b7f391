"""A slow way to another host's store, and closed data ports between two hosts: a program, since it enters a network namespace.

python -m tests.deploy.live.saturation_two_hosts FOLDER

near: conductor, stage 1, decode, kvstore-1 | link | far: stage 0, kvstore-0, which accounts for the group: stage 1 puts over the link
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.paced_models import write_paced_model
from benchmarks.two_hosts import TwoHostCluster, enter, far_host
from deploy.config import load_cluster_config
from model_runner.model_source import resolve_model
from tests.cluster import RunningCluster, wait_for
from tests.deploy.live.prometheus import running_prometheus, scaled_rules
from tests.deploy.live.saturation_stage import Flow, Stage, prompt_of
from tests.fault.harness import Bench
from tests.netns import shaped_link

FAST_BITS_S, SLOW_BITS_S = 1e9, 12e6
DELAY_S = 0.0005
PROMPT_TOKENS = 2000
HEAD_DIM = 64
"""2 KiB of K/V per token, half of it on each stage."""
SETTINGS = (
    "deploy.launcher=process",
    "deploy.http_port=0",
    "deploy.grpc_port=0",
    "deploy.hosts=2",
    "deploy.stages=2",
    "conductor.drain_s=1",
    "decode.drain_timeout_s=1",
    "conductor.local_prefill=false",
    "kv.block_tokens=64",
    "kv.layer_group=4",
    "kvstore.pool_bytes=134217728",
    "prefill.chunk_tokens=512",
    "prefill.chunking=fixed",
    "prefill.num_pages=512",
    "decode.num_pages=512",
)
SLO_OPTIONS = ("--ttft-slo-s", "160", "--tbt-slo-s", "160")
ENGINE_PORTS = "15000-17000"
"""Where the engines listen (docs/ports.md)."""


def push_slow(stage: Stage, set_rate: Callable[[float], None]) -> None:
    stage.begin()
    with Flow(stage.bench, per_s=0.4, prompt_tokens=PROMPT_TOKENS) as flow:
        wait_for(lambda: bool(flow.answered), "prompts are answered")
        set_rate(SLOW_BITS_S)
        stage.wait_firing("MoontidePushSlow")
        stage.walk("Look at", "MoontidePushSlow", REQUEST_ID=flow.answered[-1].request_id)
        set_rate(FAST_BITS_S)
        stage.wait_resolved("MoontidePushSlow")
        stage.walk("Verify", "MoontidePushSlow", REQUEST_ID=flow.answered[-1].request_id)


def closed_ports(stage: Stage, far: str) -> None:
    prompt = prompt_of(PROMPT_TOKENS)
    stage.bench.start("before", prompt).wait(30.0)
    stage.begin()
    rule = ["to", far, "ipproto", "tcp", "dport", ENGINE_PORTS, "prohibit"]
    subprocess.run(["ip", "rule", "add", *rule], check=True)
    stage.wait_firing("MoontideStorePeerUnreachable")
    stage.walk("Look at", "MoontideStorePeerUnreachable")
    stage.find_in_log("kvstore-1", "MoontideStorePeerUnreachable")
    subprocess.run(["ip", "rule", "del", *rule], check=True)
    stage.wait_resolved("MoontideStorePeerUnreachable")
    again = stage.bench.start("again", prompt)
    again.wait(30.0)
    assert again.error is None, again.error
    stage.walk("Verify", "MoontideStorePeerUnreachable", REQUEST_ID="again")
    stage.assert_critical()


def main(folder: Path) -> None:
    model = write_paced_model(
        folder, max_context=8192, head_dim=HEAD_DIM, overhead_s=0.002, token_s=5e-4, pair_s=0.0, decode_step_s=0.02
    )
    config = load_cluster_config(overrides=[*model.settings, *SETTINGS])
    source = resolve_model(config.model.name, load_format=config.model.load_format)
    with ExitStack() as stack:
        link = stack.enter_context(shaped_link(rate_bits_s=FAST_BITS_S, delay_s=DELAY_S))
        near, far = enter(link.near), far_host(link.far)
        cluster = TwoHostCluster(
            config,
            model_dir=source.path,
            model_id=source.model_id,
            near=near,
            far=far,
            on_far={"kvstore-0", "prefill-0-stage-1"},
        )
        running = RunningCluster(cluster, source.path)
        stack.callback(cluster.stop)
        cluster.start()
        cluster.wait_ready()
        bench = Bench(running)
        stack.callback(bench.close)
        rules = scaled_rules(folder, *SLO_OPTIONS)
        prometheus = stack.enter_context(running_prometheus(running, folder, rules=rules))
        stage = Stage(bench=bench, prometheus=prometheus)
        try:
            push_slow(stage, link.set_rate)
            closed_ports(stage, link.far.address)
        except BaseException:
            running.print_logs()
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
