"""How much of the prompts a pool of a given size answers, by eviction policy: Mooncake's public traces through the real pool.

Every prompt of a trace is reserved, sealed and released in PoolState, one after the other; bytes are virtual, evicted objects are gone at
once. The same prompts go through an LRU cache that is written here and shares nothing with the pool. A prompt that is larger than
the cache is refused by both: it hits nothing and changes nothing.

--traces takes a directory with the files of FAST25-release/traces (and arxiv-trace) of https://github.com/kvcache-ai/Mooncake,
as they are or gzipped; those that are missing are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import CpuWatch, machine, noise, print_result

from kvstore.block import BLOCK_HASH_BYTES, BlockHash
from kvstore.eviction import EVICTION_POLICIES
from kvstore.layout import KVLayout
from kvstore.pool import PoolState, RequestKey, ReserveRequest, ReserveResult
from kvstore.transfer.base import RemoveStatus

BLOCK_TOKENS = 512
"""Of the traces."""
LAYOUT = KVLayout(
    model_fingerprint="virtual",
    num_layers=1,
    num_planes=2,
    num_kv_heads=1,
    head_dim=1,
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
    layer_group=1,
)
ROOT = BlockHash(b"\xff" * BLOCK_HASH_BYTES)
GAP_S = 60.0
"""Virtual time between two prompts, longer than the pool looks again for late puts, which do not exist here."""
MAX_OBJECTS = 1 << 30

FILES = {
    "conversation": "conversation_trace.jsonl",
    "toolagent": "toolagent_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "arxiv": "mooncake_trace.jsonl",
}
CAPACITIES = (10**4, 10**5, 10**6, 2 * 10**6, 4 * 10**6, 5 * 10**6, 8 * 10**6, 10**7, 5 * 10**7, 10**8)
"""Tokens, as in figure 9 of the FAST'25 paper."""
FIGURE_9 = {
    "conversation": (0.045, 0.073, 0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401),
    "toolagent": (0.174, 0.363, 0.386, 0.414, 0.484, 0.505, 0.544, 0.561, 0.595, 0.595),
    "synthetic": (0.001, 0.012, 0.146, 0.235, 0.381, 0.435, 0.545, 0.589, 0.658, 0.658),
}
"""LRU; read off the figure's vector graphics, good to 1-2 %."""
TABLE_1_CAPACITIES = tuple(
    BLOCK_TOKENS * num_blocks for num_blocks in (10**3, 10**4, 3 * 10**4, 5 * 10**4, 10**5, 10**7)
)
"""Tokens; the last one is more than the trace has, the table's "infinite"."""
TABLE_1 = {
    "lru": (0.30, 0.40, 0.48, 0.50, 0.51, 0.51),
    "lfu": (0.30, 0.35, 0.43, 0.49, 0.51, 0.51),
    "length-aware": (0.30, 0.35, 0.42, 0.48, 0.50, 0.51),
}
"""Of arXiv:2407.00079, for its own trace."""


@dataclass(frozen=True)
class Prompt:
    num_tokens: int
    hashes: tuple[BlockHash, ...]

    def hit_tokens(self, hit_blocks: int) -> int:
        return min(hit_blocks * BLOCK_TOKENS, self.num_tokens)


@dataclass(frozen=True)
class Trace:
    name: str
    prompts: Sequence[Prompt]

    def capacities(self) -> Sequence[int]:
        return TABLE_1_CAPACITIES if self.name == "arxiv" else CAPACITIES

    def hit_ratio(self, hit_blocks: Sequence[int]) -> float:
        hit_tokens = sum(prompt.hit_tokens(hit) for prompt, hit in zip(self.prompts, hit_blocks, strict=True))
        return hit_tokens / sum(prompt.num_tokens for prompt in self.prompts)


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


def load_trace(name: str, path: Path) -> Trace:
    """The last block of a prompt, which may be partial, counts as a block, as it does in the traces."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    prompts = []
    for line in text.splitlines():
        fields = json.loads(line)
        hashes = tuple(BlockHash(block_id.to_bytes(BLOCK_HASH_BYTES, "big")) for block_id in fields["hash_ids"])
        prompts.append(Prompt(fields["input_length"], hashes))
    return Trace(name, prompts)


def find_traces(directory: Path) -> list[Trace]:
    """Raises: SystemExit when there is none."""
    found = [
        (name, path)
        for name, file_name in FILES.items()
        for path in (directory / file_name, directory / f"{file_name}.gz")
        if path.exists()
    ]
    if not found:
        raise SystemExit(
            f"--traces {directory} holds none of {', '.join(FILES.values())} (.gz or not); "
            "they are in FAST25-release/ of https://github.com/kvcache-ai/Mooncake"
        )
    return [load_trace(name, path) for name, path in found]


def replay_pool(trace: Trace, *, policy: str, num_blocks: int) -> list[int]:
    """Leading blocks of each prompt that the pool had."""
    clock = VirtualClock()
    pool = PoolState(capacity_bytes=num_blocks * LAYOUT.block_bytes, clock=clock, policy=policy)
    hit_blocks = []
    for idx, prompt in enumerate(trace.prompts):
        clock.now_s += GAP_S
        request = ReserveRequest(
            owner=RequestKey(str(idx), 1),
            layout=LAYOUT,
            root=ROOT,
            hashes=prompt.hashes,
            has_partial=False,
            lease_s=1.0,
        )
        reply = pool.reserve(request)
        if reply.result is ReserveResult.TOO_LARGE:
            hit_blocks.append(0)
            continue
        if reply.result is ReserveResult.WAIT:
            pool.evict_for(request)
            for removal in pool.due_removals(max_objects=MAX_OBJECTS):
                pool.finish_removal(removal, [RemoveStatus.REMOVED] * len(removal.keys))
            reply = pool.reserve(request)
        assert reply.result is ReserveResult.RESERVED, "nothing else holds room"
        pool.seal(request.owner, first_block=0, num_blocks=len(prompt.hashes))
        pool.release(request.owner)
        hit_blocks.append(reply.hit_blocks)
    pool.check_invariants()
    return hit_blocks


def replay_oracle(trace: Trace, *, num_blocks: int) -> list[int]:
    """The same of a plain LRU cache of single blocks that knows no parents.

    A prompt touches all its blocks at once, from the last to the first, so that the last is the oldest of them. What it has in the
    cache is touched before room is made, for a prompt never pushes out its own blocks.
    """
    cache: OrderedDict[BlockHash, None] = OrderedDict()
    hit_blocks = []
    for prompt in trace.prompts:
        if len(prompt.hashes) > num_blocks:
            hit_blocks.append(0)
            continue
        num_hits = 0
        while num_hits < len(prompt.hashes) and prompt.hashes[num_hits] in cache:
            num_hits += 1
        hit_blocks.append(num_hits)
        for block_hash in prompt.hashes:
            cache.pop(block_hash, None)
        while len(cache) + len(prompt.hashes) > num_blocks:
            cache.popitem(last=False)
        cache.update(dict.fromkeys(reversed(prompt.hashes)))
    return hit_blocks


def distance(ours: Mapping[int, float], published: Sequence[float]) -> dict[str, float]:
    """Ours less the published value, by capacity."""
    return {str(capacity): round(ours[capacity] - value, 4) for capacity, value in zip(ours, published, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="directory of the traces")
    args = parser.parse_args()
    watch = CpuWatch()
    ratios: dict[str, dict[str, dict[int, float]]] = {}
    refused: dict[str, dict[str, int]] = {}
    oracle_diffs: list[float] = []
    num_different = 0
    us_per_block = []
    for trace in find_traces(args.traces):
        num_blocks_asked = sum(len(prompt.hashes) for prompt in trace.prompts)
        print(f"{trace.name}: {len(trace.prompts)} prompts, {num_blocks_asked} blocks", file=sys.stderr)
        ratios[trace.name] = {policy: {} for policy in EVICTION_POLICIES}
        refused[trace.name] = {}
        for capacity in trace.capacities():
            num_blocks = capacity // BLOCK_TOKENS
            num_refused = sum(len(prompt.hashes) > num_blocks for prompt in trace.prompts)
            if num_refused:
                refused[trace.name][str(capacity)] = num_refused
            for policy, by_capacity in ratios[trace.name].items():
                start_s = time.process_time()
                hit_blocks = replay_pool(trace, policy=policy, num_blocks=num_blocks)
                us_per_block.append((time.process_time() - start_s) / num_blocks_asked * 1e6)
                by_capacity[capacity] = trace.hit_ratio(hit_blocks)
                if policy == "lru":
                    expected = replay_oracle(trace, num_blocks=num_blocks)
                    oracle_diffs.append(abs(by_capacity[capacity] - trace.hit_ratio(expected)))
                    num_different += sum(ours != theirs for ours, theirs in zip(hit_blocks, expected, strict=True))
            row = "  ".join(
                f"{policy} {by_capacity[capacity]:.3f}" for policy, by_capacity in ratios[trace.name].items()
            )
            print(f"{capacity:>12,} tokens  {row}  refused {num_refused}", file=sys.stderr)
    print_result(
        report(ratios)
        | {
            "refused_prompts": refused,
            "max_abs_diff_oracle": max(oracle_diffs),
            "prompts_unlike_oracle": num_different,
            "cpu_us_per_block": round(median(us_per_block), 2),
            **noise(watch.others_share()),
            **machine(),
        }
    )


def report(ratios: Mapping[str, Mapping[str, Mapping[int, float]]]) -> dict[str, Any]:
    """Hit ratios, and how far they are from the papers'."""
    figure_9 = {name: distance(ratios[name]["lru"], FIGURE_9[name]) for name in ratios if name in FIGURE_9}
    table_1 = {policy: distance(ratios["arxiv"][policy], TABLE_1[policy]) for policy in TABLE_1 if "arxiv" in ratios}
    return {
        "hit_ratio": {
            name: {
                policy: {str(c): round(r, 4) for c, r in by_capacity.items()}
                for policy, by_capacity in by_policy.items()
            }
            for name, by_policy in ratios.items()
        },
        "diff_figure_9": figure_9,
        "max_abs_diff_figure_9": {name: max(map(abs, diffs.values())) for name, diffs in figure_9.items()},
        "diff_table_1": table_1,
    }


if __name__ == "__main__":
    main()
