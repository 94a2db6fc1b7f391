"""Decisions per second of one conductor: prefix look-up, score and pick, at 1,000 prefill groups and as many decode instances.

The index holds 10^7 blocks of 1,000 store nodes; prompts have 32k tokens. In this order:
1. the index follows from nothing: a snapshot of every store node over gRPC (another process), and how long the event loop stood still;
2. decisions with hashes given, and with the prompt hashed first, at blocks of 64 and of 256 tokens (the latter on an index of a quarter
   of the blocks, which are the same tokens), each timed alone;
3. cost against size: look-ups in indexes of a tenth and a hundredth of the blocks;
4. peers on the same events and prompts, in their own processes and turn by turn with ours (`benchmarks/peers/install.sh dynamo`).

    python benchmarks/bench_conductor.py [--blocks 10000000] [--nodes 1000] [--peers DIR] [--no-peers]
Ratios: a peer's median time of one call by ours for the same thing. Figures per second of CPU leave out what other processes on the machine
take; those by the clock do not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from conductor_decisions import Decider, synthetic_nodes
from conductor_index import Corpus, Prompt, make_corpus, node_name, read_snapshot, snapshot_server
from harness import CpuWatch, machine, noise, print_result
from prometheus_client import CollectorRegistry

from conductor.index_follower import IndexFollower
from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex
from conductor.registry import Node
from kvstore.block import hash_blocks, root_hash
from kvstore.index import KvEntry, Stored

PEERS_DIR = Path(__file__).parent / "peers"
ROUNDS = 5
NUM_PROMPTS = 300
DECISIONS_PER_ROUND = 1500
REQUESTS_PER_HEARTBEAT = 3000
"""Decisions on one view of the cluster; a new one comes with every heartbeat."""
FOLLOW_TIMEOUT_S = 300.0
PEER_TIMEOUT_S = 300.0


class QuietStream:
    """An event stream in which nothing happens."""

    async def open(self) -> None:
        pass

    async def follow(self) -> Any:
        await asyncio.Event().wait()
        yield KvEntry("", "", 0, None)

    async def close(self) -> None:
        pass


async def follow_from_nothing(corpus: Corpus) -> tuple[PrefixIndex, dict[str, float]]:
    """Read the snapshot of every node as a conductor that starts does."""
    index = PrefixIndex()
    longest_stall_s = 0.0
    with snapshot_server(corpus) as records:
        nodes = [Node(record=record, alive=True, read_s=0.0) for record in records]
        metrics = ConductorMetrics(CollectorRegistry())
        follower = IndexFollower(index, QuietStream(), metrics, nodes=lambda: nodes, read=read_snapshot)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        follower.start()
        async with asyncio.timeout(FOLLOW_TIMEOUT_S):
            await asyncio.sleep(0)
            while not (follower.is_whole and index.num_blocks):
                # Of CPU: what others' processes take is no stall of ours.
                turn_s = time.thread_time()
                await asyncio.sleep(0)
                longest_stall_s = max(longest_stall_s, time.thread_time() - turn_s)
        result = {
            "snapshot_s": round(time.perf_counter() - start_s, 1),
            "snapshot_cpu_s": round(time.process_time() - cpu_s, 1),
            "snapshot_stall_ms": round(longest_stall_s * 1e3, 1),
        }
        await follower.close()
    return index, result


def fill(index: PrefixIndex, corpus: Corpus) -> float:
    """Apply everything as events; returns the blocks per second of CPU."""
    num_blocks, start_s = 0, time.process_time()
    for node, document, first, end in corpus.runs():
        index.apply(node_name(node), Stored(root_hash(b"bench", ""), corpus.packed(document, first, end)))
        num_blocks += end - first
    return num_blocks / (time.process_time() - start_s)


class Decisions:
    """One conductor's work for one request after the other."""

    def __init__(self, index: PrefixIndex, corpus: Corpus, nodes: Sequence[Node]) -> None:
        self._index = index
        self._corpus = corpus
        self._nodes = nodes
        self._root = root_hash(b"bench", "")
        self._num_decisions = 0
        self._decider = Decider(nodes)

    def times_ms(self, *, with_hash: bool) -> tuple[list[float], list[float]]:
        """Milliseconds of each of a round's decisions, by the clock and of this thread's CPU."""
        times, cpu_times = [], []
        for number in range(DECISIONS_PER_ROUND):
            self._num_decisions += 1
            if self._num_decisions % REQUESTS_PER_HEARTBEAT == 0:
                self._decider = Decider(self._nodes)
            prompt = self._corpus.prompts[number % len(self._corpus.prompts)]
            cpu_s, start_s = time.thread_time(), time.perf_counter()
            self._decide(prompt, with_hash=with_hash)
            times.append((time.perf_counter() - start_s) * 1e3)
            cpu_times.append((time.thread_time() - cpu_s) * 1e3)
        return times, cpu_times

    def _decide(self, prompt: Prompt, *, with_hash: bool) -> None:
        hashes = prompt.hashes
        if with_hash:
            hashes = hash_blocks(prompt.token_ids, block_tokens=self._corpus.block_tokens, root=self._root)
        hits = self._index.hit_blocks(hashes)
        self._decider.decide(len(prompt.token_ids), hits, now_s=self._num_decisions % REQUESTS_PER_HEARTBEAT * 2e-4)


def time_us(call: Callable[[Prompt], object], prompts: Sequence[Prompt]) -> list[float]:
    times = []
    for prompt in prompts:
        start_s = time.perf_counter()
        call(prompt)
        times.append((time.perf_counter() - start_s) * 1e6)
    return times


class Peer:
    """A process that holds the same blocks and is asked for a round of timed calls (peers/run_dynamo_index.py)."""

    def __init__(self, python: Path, corpus_file: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), "run_dynamo_index.py", str(corpus_file)],
            cwd=PEERS_DIR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"DYN_LOG": "error"},
        )
        self.about = self._line()

    def round(self) -> dict[str, list[float]]:
        """Microseconds by call."""
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with code {self._process.wait(PEER_TIMEOUT_S)}; its errors stand above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def peer_of(corpus: Corpus, python: Path) -> Iterator[Peer | None]:
    """None where it is not installed."""
    if not python.exists():
        print(f"no peer: {python} is missing; run benchmarks/peers/install.sh dynamo", flush=True)
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "corpus.npz"
        holders = [(d, node, blocks) for d, held in enumerate(corpus.holders) for node, blocks in held]
        np.savez(
            file,
            keys=corpus.keys,
            holders=np.array(holders, np.int64),
            prompts=np.array([np.frombuffer(b"".join(p.hashes), np.uint64)[::4] for p in corpus.prompts]),
            tokens=np.array([p.token_ids for p in corpus.prompts]),
            num_nodes=corpus.num_nodes,
            block_tokens=corpus.block_tokens,
        )
        peer = Peer(python, file)
        try:
            yield peer
        finally:
            peer.close()


def hash_prompt(prompt: Prompt) -> object:
    return hash_blocks(prompt.token_ids, block_tokens=64, root=root_hash(b"bench", ""))


def growth(num_blocks: int, num_nodes: int, seed: int) -> dict[str, float]:
    """Microseconds of a look-up by the number of blocks in the index."""
    found = {}
    for size in (num_blocks // 100, num_blocks // 10):
        corpus = make_corpus(num_blocks=size, num_nodes=num_nodes, block_tokens=64, num_prompts=NUM_PROMPTS, seed=seed)
        index = PrefixIndex()
        fill(index, corpus)
        time_us(lambda p, index=index: index.hit_blocks(p.hashes), corpus.prompts)
        found[str(size)] = round(median(time_us(lambda p, index=index: index.hit_blocks(p.hashes), corpus.prompts)), 1)
    return found


def _keep_out_of_collections() -> None:
    """As the conductor does at its start."""
    gc.collect()
    gc.freeze()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--peers", type=Path, default=Path(os.environ.get("MOONTIDE_PEERS") or "~/.cache/moontide/peers").expanduser()
    )
    parser.add_argument("--no-peers", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    watch = CpuWatch()
    nodes = synthetic_nodes(args.nodes, args.nodes, seed=args.seed)
    corpus = make_corpus(
        num_blocks=args.blocks, num_nodes=args.nodes, block_tokens=64, num_prompts=NUM_PROMPTS, seed=args.seed
    )
    print(f"{corpus.num_blocks} blocks of {args.nodes} nodes", flush=True)
    _keep_out_of_collections()
    index, followed = asyncio.run(follow_from_nothing(corpus))
    print(f"snapshots: {followed}", flush=True)
    coarse = make_corpus(
        num_blocks=args.blocks // 4, num_nodes=args.nodes, block_tokens=256, num_prompts=NUM_PROMPTS, seed=args.seed
    )
    coarse_index = PrefixIndex()
    event_blocks_per_s = fill(coarse_index, coarse)
    _keep_out_of_collections()
    fine, wide = Decisions(index, corpus, nodes), Decisions(coarse_index, coarse, nodes)
    times: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    peer_about: dict[str, Any] = {}
    python = args.peers / "dynamo/bin/python"
    with peer_of(corpus, Path("/nonexistent") if args.no_peers else python) as peer:
        if peer is not None:
            peer_about = peer.about
            print(f"peer: {peer_about}", flush=True)
        fine.times_ms(with_hash=True)
        wide.times_ms(with_hash=True)
        for _ in range(ROUNDS):
            given, given_cpu = fine.times_ms(with_hash=False)
            hash_64, hash_64_cpu = fine.times_ms(with_hash=True)
            hash_256, hash_256_cpu = wide.times_ms(with_hash=True)
            own = {
                "given": given,
                "given_cpu": given_cpu,
                "hash_64": hash_64,
                "hash_64_cpu": hash_64_cpu,
                "hash_256": hash_256,
                "hash_256_cpu": hash_256_cpu,
                "own_hash": [us / 1e3 for us in time_us(hash_prompt, corpus.prompts)],
                "lookup": [us / 1e3 for us in time_us(lambda p: index.hit_blocks(p.hashes), corpus.prompts)],
            }
            for name, found in own.items():
                times.setdefault(name, []).extend(found)
            if peer is not None:
                for name, found in peer.round().items():
                    times.setdefault(name, []).extend(us / 1e3 for us in found)
                    against = {"find_matches": "lookup", "hash": "own_hash"}.get(name, "given")
                    ratios.setdefault(name, []).append(median(found) / 1e3 / median(own[against]))
    for name, found in times.items():
        print(f"{name:<20} p50 {np.median(found):.4f} ms   p99 {np.percentile(found, 99):.4f} ms", flush=True)
    print_result(
        {
            "decisions_per_s": round(1e3 / float(np.mean(times["given"]))),
            "decisions_with_hash_per_s": round(1e3 / float(np.mean(times["hash_64"]))),
            "decisions_with_hash_256_per_s": round(1e3 / float(np.mean(times["hash_256"]))),
            "p50_ms": round(float(np.median(times["given"])), 4),
            "p99_ms": round(float(np.percentile(times["given"], 99)), 4),
            "decisions_per_cpu_s": round(1e3 / float(np.mean(times["given_cpu"]))),
            "decisions_with_hash_per_cpu_s": round(1e3 / float(np.mean(times["hash_64_cpu"]))),
            "decisions_with_hash_256_per_cpu_s": round(1e3 / float(np.mean(times["hash_256_cpu"]))),
            "cpu_p99_ms": round(float(np.percentile(times["given_cpu"], 99)), 4),
            "lookup_p50_us": round(median(times["lookup"]) * 1e3, 1),
            "lookup_p99_us": round(float(np.percentile(times["lookup"], 99)) * 1e3, 1),
            "hash_p50_us": round(median(times["own_hash"]) * 1e3, 1),
            "lookup_us_by_blocks": growth(args.blocks, args.nodes, args.seed)
            | {str(args.blocks): round(median(times["lookup"]) * 1e3, 1)},
            "bytes_per_block": round(index.num_bytes / corpus.num_blocks, 1),
            "blocks": corpus.num_blocks,
            "held_blocks": index.num_blocks,
            "nodes": args.nodes,
            "event_blocks_per_cpu_s": round(event_blocks_per_s),
            **followed,
            **{f"ratio_{name}": round(median(found), 2) for name, found in ratios.items()},
            **{f"peer_{name}": value for name, value in peer_about.items()},
            **noise(watch.others_share()),
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
