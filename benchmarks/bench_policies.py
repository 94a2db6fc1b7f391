"""Simulated: time to first token by routing policy, on a public trace.

Virtual time, with the live router: view.py, options.py and policies.py decide, the cluster around them is a model. Prefill groups
serve first come, first served; each host's store holds so many blocks and evicts the one unused for longest; a copy from another host
takes its time at the sender, and stays at the receiver. Decode is left out. Calibrated to nodes of 8 x A800 and a Llama of 70B
parameters, as published for Mooncake (FAST'25, figures 12 and 14); no request is run. Figure 5 there has a mean of 19.65 s (random),
5.27 (least loaded), 3.58 (cache-aware) and 3.07 (kvcache-centric) on 16 nodes with the same trace; its rate is not published, so what
can be compared is the order.

--traces takes the directory that bench_cache_policy.py takes.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import machine, print_result

from conductor.cost import CostModel, Outcome
from conductor.options import Need
from conductor.policies import POLICIES, policy_named
from conductor.registry import Node
from conductor.router import choose
from conductor.view import ClusterView, SentWork
from kvstore.layout import KVLayout
from moontide.perf_model import StepModel, StepShape
from moontide.registry import NodeRecord

BLOCK_TOKENS = 512
FILE_NAME = "conversation_trace.jsonl"
LAYOUT = KVLayout(
    model_fingerprint="70b",
    num_layers=80,
    num_planes=2,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
    layer_group=1,
)
PREFILL = StepModel(overhead_s=0.01, token_s=0.119e-3, pair_s=2 * 7.49e-10)
"""0.119 n + 7.49e-4 n^2 seconds for n thousand tokens: within 5 % of figure 14a."""
FETCH_BYTES_PER_S = 128e9
"""From the host's memory."""
STORE_BLOCKS = 3_000_000 // BLOCK_TOKENS
"""1 TB, the capacity per node that the paper recommends."""
CHUNK_TOKENS = 8192
HEARTBEAT_S = 1.0
BALANCING_THRESHOLD = 2.0
CLUSTERS = {"16 groups of 1": [1] * 16, "8 groups of 1, 2 of 4": [1] * 8 + [4] * 2}
"""Stages of each group."""
COPY_BYTES_PER_S = {"87 GB/s": 87e9, "5 GB/s": 5e9}
"""From another host: figure 12, and a network of 40 Gbit/s."""
SPEEDS = (3.0, 4.0)
"""Of the trace. At four times its rate the cluster cannot keep up with the peaks."""
LAYOUT_JSON = LAYOUT.to_json()


@dataclass(frozen=True)
class Request:
    arrival_s: float
    prompt_tokens: int
    block_ids: Sequence[int]


class Group:
    """A prefill group and the store on its host."""

    def __init__(self, idx: int, num_stages: int) -> None:
        self.node_id, self.store_id, self.host_id = f"prefill-{idx}", f"store-{idx}", f"host-{idx}"
        self.num_stages = num_stages
        self.free_from_s = 0.0
        self.sender_free_from_s = 0.0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit_blocks(self, block_ids: Sequence[int]) -> int:
        return next((idx for idx, block in enumerate(block_ids) if block not in self._blocks), len(block_ids))

    def keep(self, block_ids: Sequence[int]) -> None:
        """The last block of a prefix is the first to go."""
        for block in reversed(block_ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > STORE_BLOCKS:
            self._blocks.popitem(last=False)

    def times_s(self, num_tokens: int, hit_tokens: int) -> tuple[float, float]:
        """(time of the prefill, time that a stage is busy)."""
        tokens = num_tokens - hit_tokens
        num_chunks = -(-tokens // CHUNK_TOKENS)
        shape = StepShape(-(-tokens // num_chunks), StepShape.of_chunk(tokens, hit_tokens).pairs / num_chunks)
        chunk_s = PREFILL.overhead_s + PREFILL.work_s(shape) / self.num_stages
        return chunk_s * (num_chunks + self.num_stages - 1), chunk_s * num_chunks

    def node(self, now_s: float, copy_bytes_per_s: float) -> Node:
        load = {
            "queued_s": max(0.0, self.free_from_s - now_s),
            "num_stages": float(self.num_stages),
            "step_overhead_s": PREFILL.overhead_s,
            "step_token_s": PREFILL.token_s / self.num_stages,
            "step_pair_s": PREFILL.pair_s / self.num_stages,
            "chunk_tokens": float(CHUNK_TOKENS),
            "fetch_bytes_per_s": FETCH_BYTES_PER_S,
            "copy_bytes_per_s": copy_bytes_per_s,
        }
        return _node(self.node_id, "prefill", self.host_id, now_s, load)

    def store(self, now_s: float) -> Node:
        return _node(self.store_id, "kvstore", self.host_id, now_s, {})


class Simulation:
    def __init__(self, groups: Sequence[Group], policy: str, *, copy_bytes_per_s: float, seed: int) -> None:
        self._groups = {group.node_id: group for group in groups}
        self._policy = policy_named(policy, balancing_threshold=BALANCING_THRESHOLD)
        self._cost = CostModel()
        self._rng = random.Random(seed)
        self._copy_bytes_per_s = copy_bytes_per_s
        self._read_s = -HEARTBEAT_S
        self.num_copied = 0

    def ttft_s(self, idx: int, request: Request) -> float:
        """Serve the next request of the trace."""
        now_s = request.arrival_s
        if now_s - self._read_s >= HEARTBEAT_S:
            self._read_registry(now_s)
        hits = {group.store_id: group.hit_blocks(request.block_ids) for group in self._groups.values()}
        need = Need(request_id=str(idx), prompt_tokens=request.prompt_tokens, max_tokens_in_cache=request.prompt_tokens)
        choice = choose(self._view, need, hits, self._sent, policy=self._policy, rng=self._rng, now_s=now_s)
        self._sent.add(
            choice.sent(
                context_tokens=need.prompt_tokens, block_bytes=LAYOUT.block_bytes, needs_decode=False, now_s=now_s
            )
        )
        assert choice.prefill is not None
        group = self._groups[choice.prefill.node_id]
        ready_s = now_s + choice.hit_blocks * LAYOUT.block_bytes / FETCH_BYTES_PER_S
        if choice.copy_blocks and choice.hit_store is not None:
            self.num_copied += 1
            ready_s += self._sent_s(choice.hit_store.node_id, choice.copy_blocks, now_s) - now_s
        queue_s = max(0.0, group.free_from_s - now_s)
        starts_s = max(ready_s, now_s + queue_s)
        prefill_s, busy_s = group.times_s(request.prompt_tokens, choice.hit_blocks * BLOCK_TOKENS)
        group.free_from_s = starts_s + busy_s
        group.keep(request.block_ids[: request.prompt_tokens // BLOCK_TOKENS])
        fetch_s = starts_s - now_s - queue_s
        self._cost.observe(choice.placed, Outcome(queue_s=queue_s, fetch_s=fetch_s, prefill_s=prefill_s))
        return starts_s - now_s + prefill_s

    def _sent_s(self, store_id: str, num_blocks: int, now_s: float) -> float:
        """When a store has sent so many blocks, one copy after the other."""
        sender = next(group for group in self._groups.values() if group.store_id == store_id)
        took_s = num_blocks * LAYOUT.block_bytes / self._copy_bytes_per_s
        sender.sender_free_from_s = max(sender.sender_free_from_s, now_s) + took_s
        return sender.sender_free_from_s

    def _read_registry(self, now_s: float) -> None:
        groups = self._groups.values()
        decode = _node("decode-0", "decode", "host-0", now_s, {})
        view = ClusterView.build(
            [
                *(group.node(now_s, self._copy_bytes_per_s) for group in groups),
                *(group.store(now_s) for group in groups),
                decode,
            ],
            model_id="",
            cost=self._cost,
        )
        assert isinstance(view, ClusterView), view
        self._view, self._sent, self._read_s = view, SentWork(view), now_s


def _node(node_id: str, role: str, host_id: str, now_s: float, load: dict[str, float]) -> Node:
    record = NodeRecord(
        node_id=node_id,
        role=role,
        address="",
        http_address="",
        boot_id="1",
        model_id="" if role == "kvstore" else "70b",
        layout_json="" if role == "kvstore" else LAYOUT_JSON,
        host_id=host_id,
        load=load,
    )
    return Node(record=record, alive=True, read_s=now_s)


def load_trace(directory: Path, *, speed: float) -> list[Request]:
    path = directory / FILE_NAME
    packed = directory / f"{FILE_NAME}.gz"
    if not path.exists() and not packed.exists():
        raise SystemExit(
            f"--traces {directory} has no {FILE_NAME} (.gz or not); it is in FAST25-release/traces of "
            "https://github.com/kvcache-ai/Mooncake"
        )
    with path.open() if path.exists() else gzip.open(packed, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    # Arrivals are rounded to seconds in the trace; those of one second come one after the other within it.
    draw = random.Random(0)
    requests = [
        Request((row["timestamp"] / 1e3 + draw.random()) / speed, row["input_length"], row["hash_ids"]) for row in rows
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def run(
    requests: Sequence[Request], stages: Sequence[int], policy: str, *, copy_bytes_per_s: float, seed: int
) -> dict[str, float]:
    groups = [Group(idx, num_stages) for idx, num_stages in enumerate(stages)]
    simulation = Simulation(groups, policy, copy_bytes_per_s=copy_bytes_per_s, seed=seed)
    ttfts = [simulation.ttft_s(idx, request) for idx, request in enumerate(requests)]
    return {
        "mean_s": round(statistics.fmean(ttfts), 3),
        "p50_s": round(statistics.median(ttfts), 3),
        "p90_s": round(statistics.quantiles(ttfts, n=10)[-1], 3),
        "p99_s": round(statistics.quantiles(ttfts, n=100)[-1], 3),
        "copied_share": round(simulation.num_copied / len(requests), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="directory of the traces")
    parser.add_argument("--requests", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for speed, cluster, network in itertools.product(SPEEDS, CLUSTERS, COPY_BYTES_PER_S):
        requests = load_trace(args.traces, speed=speed)[: args.requests or None]
        name = f"{cluster}, {network}, {speed:g}x"
        results[name] = {}
        for policy in POLICIES:
            results[name][policy] = run(
                requests, CLUSTERS[cluster], policy, copy_bytes_per_s=COPY_BYTES_PER_S[network], seed=args.seed
            )
            print(f"{name}  {policy:<16} {results[name][policy]}", flush=True)
    ratios = {
        name: round(by_policy["moontide"]["mean_s"] / by_policy["kvcache-centric"]["mean_s"], 3)
        for name, by_policy in results.items()
    }
    print_result({"simulated": True, "mean_ttft_moontide_to_kvcache_centric": ratios, "results": results, **machine()})


if __name__ == "__main__":
    main()
