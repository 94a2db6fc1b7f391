"""TTFT of one long prompt with one stage and with two: what Chunked Pipeline Parallelism brings, through the public API.

Two whole clusters are up at the same time and asked in turn, so that a slow moment of the machine hits both. Every stage process has one
compute thread, so two stages are two "nodes". The first run of each is a warm-up and left out.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from statistics import median

from harness import NOISY_SHARE, CpuWatch, Prompts, cluster, machine, print_result

from deploy.gantt import busy_s, stage_chunks
from moontide.client import GenerateOptions, MoontideClient
from moontide.timeline import Timeline


@dataclass(frozen=True)
class Run:
    """One prompt."""

    ttft_s: float
    makespan_s: float
    """First chunk enters stage 0 - last chunk leaves the last stage."""
    num_chunks: int
    overlap_of_ideal: float
    """Busy share of the stages over that of an ideal pipeline of equal chunks, m / (m + P - 1)."""


async def ask(client: MoontideClient, prompt: list[int]) -> Run:
    """Send one prompt and read its timeline. Raises: MoontideError; AssertionError if the cache answered a part of it."""
    ttft_s, request_id = 0.0, ""
    async for chunk in client.generate(prompt, params=GenerateOptions(max_tokens=1, temperature=0.0)):
        request_id = chunk.request_id
        if chunk.ttft_parts is not None:
            ttft_s = chunk.ttft_parts.ttft_s
        if chunk.usage is not None:
            assert chunk.usage.cached_tokens == 0, f"{chunk.usage.cached_tokens} tokens came from the cache"
    return measure(ttft_s, await timeline_of(client, request_id))


async def timeline_of(client: MoontideClient, request_id: str) -> Timeline:
    """The timeline once the stages' spans have arrived, which is after the last block is sealed."""
    async with asyncio.timeout(60):
        while True:
            found = await client.timeline(request_id)
            if found is not None and found.outcome and stage_chunks(found):
                return found
            await asyncio.sleep(0.1)


def measure(ttft_s: float, timeline: Timeline) -> Run:
    stages = stage_chunks(timeline)
    num_chunks = len(stages[0])
    makespan_s = max(span.end_s for spans in stages for span in spans) - stages[0][0].start_s
    busy_share = sum(busy_s(spans) for spans in stages) / (len(stages) * makespan_s)
    ideal = num_chunks / (num_chunks + len(stages) - 1)
    return Run(ttft_s, makespan_s, num_chunks, busy_share / ideal)


async def compare(
    one_address: str, two_address: str, prompts: Prompts, *, tokens: int, runs: int
) -> dict[int, list[Run]]:
    """Ask both clusters in turn, each prompt once to each."""
    results: dict[int, list[Run]] = {1: [], 2: []}
    async with MoontideClient(one_address) as one, MoontideClient(two_address) as two:
        for number in range(runs + 1):
            prompt = prompts.take(tokens)
            for stages, client in ((1, one), (2, two)) if number % 2 else ((2, two), (1, one)):
                run = await ask(client, prompt)
                print(
                    f"run {number}{' (warm-up)' if number == 0 else ''}  P={stages}  TTFT {run.ttft_s:7.3f} s  "
                    f"makespan {run.makespan_s:7.3f} s  {run.num_chunks} chunks  overlap {run.overlap_of_ideal:.3f} of ideal",
                    flush=True,
                )
                if number:
                    results[stages].append(run)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", help="float32 | bfloat16 | auto")
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = [f"model.name={args.model}", f"model.dtype={args.dtype}", f"prefill.chunk_tokens={args.chunk_tokens}"]
    prompts = Prompts(args.model, seed=args.seed)
    with cluster([*settings, "deploy.stages=1"]) as one, cluster([*settings, "deploy.stages=2"]) as two:
        watch = CpuWatch()
        results = asyncio.run(
            compare(one.grpc_address, two.grpc_address, prompts, tokens=args.prompt_tokens, runs=args.runs)
        )
        others = watch.others_share()
    ttft_s = {stages: median(run.ttft_s for run in of_stages) for stages, of_stages in results.items()}
    makespan_s = {stages: median(run.makespan_s for run in of_stages) for stages, of_stages in results.items()}
    print_result(
        {
            "speedup_p2": round(ttft_s[1] / ttft_s[2], 3),
            "overlap_of_ideal": round(median(run.overlap_of_ideal for run in results[2]), 3),
            "prompt_tokens": args.prompt_tokens,
            "chunk_tokens": args.chunk_tokens,
            "speedup_p2_makespan": round(makespan_s[1] / makespan_s[2], 3),
            "ttft_p1_s": round(ttft_s[1], 3),
            "ttft_p2_s": round(ttft_s[2], 3),
            "tokens_per_s_p1": round(args.prompt_tokens / ttft_s[1], 1),
            "tokens_per_s_p2": round(args.prompt_tokens / ttft_s[2], 1),
            "runs": args.runs,
            "samples_ttft_s": {stages: [round(run.ttft_s, 3) for run in of] for stages, of in results.items()},
            "cpu_share_of_others": round(others, 3),
            "noisy": others > NOISY_SHARE,
            "model": args.model,
            "dtype": args.dtype,
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
