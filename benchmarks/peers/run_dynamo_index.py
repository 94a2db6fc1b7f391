"""Dynamo's prefix index and its worker selection, on the corpus of bench_conductor.py: run_dynamo_index.py CORPUS.npz

It says what it holds once it holds it; then every line of stdin is a round: each call once per prompt, its times in microseconds.
find_matches        leading blocks per worker, hashes given (RadixTree, which took the same events)
hash                compute_block_hash_for_seq of a prompt
select_and_reserve  one of as many workers as the corpus has nodes, hashes given (SelectionService). It takes events over ZMQ alone, one
                    socket per worker; its index stays empty here, which only spares it work.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np
import zmq
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

RUN_BLOCKS = 32


def apply_all(tree: RadixTree, keys: np.ndarray, holders: np.ndarray) -> tuple[int, float]:
    """Blocks, and seconds in calls of the tree."""
    num_blocks, apply_s = 0, 0.0
    for event_id, (document, node, length) in enumerate(holders.tolist()):
        chain = keys[document, :length].tolist()
        for first in range(0, length, RUN_BLOCKS):
            run = chain[first : first + RUN_BLOCKS]
            blocks = [{"block_hash": key, "tokens_hash": key} for key in run]
            stored = {"parent_hash": chain[first - 1] if first else None, "blocks": blocks}
            event = json.dumps({"event_id": event_id, "data": {"stored": stored}, "dp_rank": 0}).encode()
            start_s = time.perf_counter()
            tree.apply_event(node, event)
            apply_s += time.perf_counter() - start_s
            num_blocks += len(run)
    return num_blocks, apply_s


async def add_workers(service: SelectionService, num_workers: int, block_tokens: int, events: str) -> None:
    for worker in range(num_workers):
        await service.upsert_worker(
            {
                "worker_id": worker,
                "model_name": "default",
                "block_size": block_tokens,
                "endpoint": f"http://127.0.0.1:{10_000 + worker}",
                "kv_events_endpoints": {0: events},
                "total_kv_blocks": 40_000,
            }
        )


async def measure(service: SelectionService, tree: RadixTree, corpus: Any) -> dict[str, list[float]]:
    prompts = [keys.tolist() for keys in corpus["prompts"]]
    signed = [keys.view(np.int64).tolist() for keys in corpus["prompts"]]
    tokens = [ids.tolist() for ids in corpus["tokens"]]
    block_tokens = int(corpus["block_tokens"])
    times: dict[str, list[float]] = {"find_matches": [], "hash": [], "select_and_reserve": []}
    for keys in prompts:
        start_s = time.perf_counter()
        tree.find_matches(keys)
        times["find_matches"].append((time.perf_counter() - start_s) * 1e6)
    for ids in tokens:
        start_s = time.perf_counter()
        compute_block_hash_for_seq(ids, block_tokens)
        times["hash"].append((time.perf_counter() - start_s) * 1e6)
    for number, keys in enumerate(signed):
        request = {
            "model_name": "default",
            "block_hashes": keys,
            "sequence_hashes": keys,
            "isl_tokens": len(keys) * block_tokens,
            "selection_id": str(number),
        }
        start_s = time.perf_counter()
        await service.select_and_reserve(request)
        times["select_and_reserve"].append((time.perf_counter() - start_s) * 1e6)
        await service.free_reservation(str(number))
    return times


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    corpus = dict(np.load(sys.argv[1]))
    tree = RadixTree()
    before = resident_bytes()
    num_blocks, apply_s = apply_all(tree, corpus["keys"], corpus["holders"])
    tree.find_matches([1])
    about = {
        "held_blocks": num_blocks,
        "apply_blocks_per_s": round(num_blocks / apply_s),
        "bytes_per_held_block": round((resident_bytes() - before) / num_blocks, 1),
    }
    socket = zmq.Context().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    service = SelectionService(indexer_threads=1)
    await add_workers(service, int(corpus["num_nodes"]), int(corpus["block_tokens"]), f"tcp://127.0.0.1:{port}")
    print(json.dumps(about), file=answers)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await measure(service, tree, corpus)), file=answers)
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
