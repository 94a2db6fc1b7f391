"""Decisions of the router without a cluster: many synthetic nodes with loads, a clock that is told the time, one request after the other.

bench_conductor.py puts the prefix index in front of it. Alone it shows what each policy costs:
    python benchmarks/conductor_decisions.py [--groups 1000] [--instances 1000] [--requests 5000]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from harness import CpuWatch, machine, noise, print_result

from conductor.cost import CostModel
from conductor.options import Need
from conductor.policies import POLICIES, policy_named
from conductor.registry import Node
from conductor.router import Choice, choose
from conductor.view import ClusterView, SentWork
from kvstore.layout import KVLayout
from moontide.registry import NodeRecord

LAYOUT = KVLayout(
    model_fingerprint="synthetic",
    num_layers=32,
    num_planes=2,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_tokens=64,
    layer_group=1,
)
HEARTBEAT_S = 1.0
OUTPUT_TOKENS = 256


def synthetic_nodes(num_groups: int, num_instances: int, *, seed: int, read_s: float = 0.0) -> list[Node]:
    """Prefill groups, each with a store process on its host, and decode instances, all somewhat different and busy."""
    draw = random.Random(seed)
    nodes: list[Node] = []
    for idx in range(num_groups):
        speed = draw.uniform(0.9, 1.1)
        load = {
            "queued_s": draw.expovariate(1.0),
            "queued_tokens": float(draw.randrange(50_000)),
            "num_pages": 40_000.0,
            "free_pages": float(draw.randrange(40_000)),
            "num_stages": float(draw.choice([1, 2, 4, 8])),
            "step_overhead_s": 0.004 * speed,
            "step_token_s": 3e-5 * speed,
            "step_pair_s": 2e-10 * speed,
            "step_knee_tokens": 256.0,
            "chunk_tokens": 8192.0,
            "max_step_s": 0.5,
            "fetch_bytes_per_s": 8e9 * draw.uniform(0.8, 1.2),
            "copy_bytes_per_s": 4e9 * draw.uniform(0.8, 1.2),
            "tail_s": 0.02,
        }
        nodes.append(_node(f"prefill-{idx}", "prefill", f"host-{idx}", load, read_s))
        nodes.append(_node(store_id(idx), "kvstore", f"host-{idx}", {}, read_s))
    for idx in range(num_instances):
        running = draw.randrange(48)
        load = {
            "running": float(running),
            "context_tokens": float(running * draw.randrange(1_000, 32_000)),
            "num_pages": 40_000.0,
            "free_pages": float(draw.randrange(1_000, 40_000)),
            "max_batch": 64.0,
            "chunk_tokens": 256.0,
            "prefill_room_tokens": 2048.0,
            "step_overhead_s": 0.012 * draw.uniform(0.9, 1.1),
            "step_token_s": 5e-5,
            "step_pair_s": 1e-8,
        }
        nodes.append(_node(f"decode-{idx}", "decode", f"decode-host-{idx}", load, read_s))
    return nodes


def store_id(idx: int) -> str:
    """Node id of the store on the host of prefill group `idx`."""
    return f"store-{idx}"


class Decider:
    """Takes one decision after the other, each with everything that the live conductor does for it."""

    def __init__(self, nodes: Sequence[Node], *, policy: str = "moontide", seed: int = 0) -> None:
        view = ClusterView.build(nodes, model_id="", cost=CostModel())
        assert isinstance(view, ClusterView), view
        self._view = view
        self._sent = SentWork(view)
        self._policy = policy_named(policy, balancing_threshold=2.0)
        self._rng = random.Random(seed)
        self._num_decisions = 0

    def decide(self, prompt_tokens: int, hits: Mapping[str, int], *, now_s: float) -> Choice:
        """Choose nodes and count what was sent to them. `hits`: leading blocks by store node id."""
        self._num_decisions += 1
        need = Need(
            request_id=str(self._num_decisions),
            prompt_tokens=prompt_tokens,
            expected_output_tokens=OUTPUT_TOKENS,
            max_tokens_in_cache=prompt_tokens + OUTPUT_TOKENS,
            may_prefill_locally=True,
        )
        choice = choose(self._view, need, hits, self._sent, policy=self._policy, rng=self._rng, now_s=now_s)
        self._sent.add(
            choice.sent(
                context_tokens=need.prompt_tokens, block_bytes=LAYOUT.block_bytes, needs_decode=True, now_s=now_s
            )
        )
        return choice


def _node(node_id: str, role: str, host_id: str, load: dict[str, float], read_s: float) -> Node:
    record = NodeRecord(
        node_id=node_id,
        role=role,
        address="127.0.0.1:1",
        http_address="",
        boot_id="1",
        model_id="" if role == "kvstore" else "synthetic",
        layout_json="" if role == "kvstore" else LAYOUT.to_json(),
        host_id=host_id,
        load=load,
    )
    return Node(record=record, alive=True, read_s=read_s)


def measure(policy: str, nodes: Sequence[Node], *, num_groups: int, num_requests: int, seed: int) -> dict[str, float]:
    """Microseconds of a decision for prompts of 32k tokens, of which up to eight stores hold a part."""
    draw = random.Random(seed)
    hits = [
        {
            store_id(draw.randrange(num_groups)): draw.randrange(1, 32_768 // LAYOUT.block_tokens)
            for _ in range(draw.choice([0, 1, 2, 8]))
        }
        for _ in range(num_requests)
    ]
    decider = Decider(nodes, policy=policy, seed=seed)
    times_us, cpu_us = np.zeros(num_requests), np.zeros(num_requests)
    for idx, hit in enumerate(hits):
        cpu_s, start_s = time.thread_time(), time.perf_counter()
        decider.decide(32_768, hit, now_s=idx * 2e-4 % HEARTBEAT_S)
        times_us[idx] = (time.perf_counter() - start_s) * 1e6
        cpu_us[idx] = (time.thread_time() - cpu_s) * 1e6
    warm = slice(num_requests // 10, None)
    return {
        "p50_us": round(float(np.median(times_us[warm])), 1),
        "p99_us": round(float(np.percentile(times_us[warm], 99)), 1),
        "cpu_mean_us": round(float(cpu_us[warm].mean()), 1),
        "cpu_p99_us": round(float(np.percentile(cpu_us[warm], 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    watch = CpuWatch()
    nodes = synthetic_nodes(args.groups, args.instances, seed=args.seed)
    start_s = time.perf_counter()
    ClusterView.build(nodes, model_id="", cost=CostModel())
    view_ms = (time.perf_counter() - start_s) * 1e3
    print(f"{args.groups} groups, {args.instances} decode instances: a view takes {view_ms:.1f} ms, once per heartbeat")
    result: dict[str, Any] = {}
    for policy in POLICIES:
        result[policy] = measure(policy, nodes, num_groups=args.groups, num_requests=args.requests, seed=args.seed)
        print(f"{policy:<16} {result[policy]}")
    print_result(
        {
            "policies": result,
            "groups": args.groups,
            "instances": args.instances,
            "view_ms": round(view_ms, 1),
            **noise(watch.others_share()),
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
