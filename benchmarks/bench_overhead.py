"""What the system adds to the model's own time: to the TTFT of a short prompt at an idle group of two stages, and per chunk of a long one.

TTFT overhead: the client's time from sending a text to its first token, less the forwards of the two stages, for prompts of one chunk. Over
HTTP (streamed /v1/completions) and over gRPC in turn, each text once. Its parts add up to it:

    client | tokenize | route | dispatch | queue | fetch | <stage 0> | hop | <stage 1> | back | detokenize | client
    hop: end of the forward on stage 0 to its start on stage 1       back: end of the last forward to stage 0 holding the token
    client: HTTP or gRPC, both ways, with parsing there and here

A report of stage 1 takes a moment to reach stage 0, which places it by its age; that moment lies in `hop` and is missing in `back`.

tau, per stage: from the end of a forward to the start of the next one, when the next one could start: its hidden states had left the stage
before, or (stage 0) a step in flight was free.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import aiohttp
from harness import CpuWatch, Prompts, cluster, machine, noise, print_result, timeline_of

from deploy.gantt import stage_chunks
from moontide.client import GenerateOptions, MoontideClient
from moontide.timeline import Span, Timeline

STAGES = 2
SETTINGS = ("model.threads=1", f"deploy.stages={STAGES}", "prefill.chunking=fixed", "prefill.chunk_tokens=512")
"""Planned chunks would cut the short prompts too; tau is that of chunks of this length."""
TEXT_CHARS = (350, 950)
"""Length of a short prompt: 64 to 256 tokens, more or less."""
PAUSE_S = 0.2
"""Between two prompts, so that the group is idle."""
WARM_UP = 3
TIMEOUT_S = 60.0

First = tuple[str, float]
"""Request id, and the client's time to the first token."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds of one short prompt that were no forward."""

    client_s: float
    tokenize_s: float
    route_s: float
    dispatch_s: float
    queue_s: float
    fetch_s: float
    hop_s: float
    back_s: float
    detokenize_s: float

    @property
    def total_s(self) -> float:
        return float(sum(dataclasses.astuple(self)))


@dataclass(frozen=True)
class Sample:
    """One short prompt."""

    transport: str
    num_tokens: int
    ttft_s: float
    compute_s: float
    overhead: Overhead


def short_sample(transport: str, ttft_s: float, timeline: Timeline) -> Sample:
    parts = timeline.ttft_parts
    assert parts is not None, f"{timeline.request_id} ended without a first token: {timeline.outcome}"
    chunks = [span for spans in stage_chunks(timeline) for span in spans]
    assert len(chunks) == STAGES, f"a prompt of one chunk makes {STAGES} forwards, not {len(chunks)}"
    first, last = chunks
    overhead = Overhead(
        client_s=ttft_s - parts.ttft_s,
        tokenize_s=parts.tokenize_s,
        route_s=parts.route_s,
        dispatch_s=parts.dispatch_s,
        queue_s=parts.queue_s,
        fetch_s=parts.fetch_s,
        hop_s=last.start_s - first.end_s,
        back_s=parts.prefill_s - (last.end_s - first.start_s),
        detokenize_s=parts.detokenize_s,
    )
    return Sample(
        transport=transport,
        num_tokens=last.num_tokens,
        ttft_s=ttft_s,
        compute_s=first.duration_s + last.duration_s,
        overhead=overhead,
    )


def gaps_s(stages: Sequence[Sequence[Span]], *, max_in_flight: int) -> list[list[float]]:
    """Per stage, the pauses between two forwards while the next one could have started."""
    found: list[list[float]] = []
    for idx, spans in enumerate(stages):
        pauses = []
        for number, (before, after) in enumerate(pairwise(spans), start=1):
            if idx:
                could_start_s = stages[idx - 1][number].end_s
            elif number < max_in_flight:
                could_start_s = 0.0
            else:
                could_start_s = stages[-1][number - max_in_flight].end_s
            if could_start_s <= before.end_s:
                pauses.append(after.start_s - before.end_s)
        found.append(pauses)
    return found


async def ask_grpc(client: MoontideClient, prompt: str | Sequence[int]) -> First:
    sent_s = time.perf_counter()
    chunks = client.generate(prompt, params=GenerateOptions(max_tokens=1, temperature=0.0))
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.tokens:
                return chunk.request_id, time.perf_counter() - sent_s
    raise AssertionError("the answer has no token")


async def ask_http(session: aiohttp.ClientSession, text: str) -> First:
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, "stream": True}
    sent_s = time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                ttft_s = time.perf_counter() - sent_s
                answer_id: str = json.loads(line.removeprefix(b"data: "))["id"]
                await response.read()
                return answer_id.removeprefix("cmpl-"), ttft_s
    raise AssertionError("the answer has no token")


async def short_prompts(
    client: MoontideClient, session: aiohttp.ClientSession, *, runs: int, seed: int
) -> AsyncIterator[Sample]:
    """`runs` samples of each transport; the first prompts are a warm-up and left out."""
    source = random.Random(seed)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    transports: dict[str, Callable[[str], Awaitable[First]]] = {
        "http": lambda prompt: ask_http(session, prompt),
        "grpc": lambda prompt: ask_grpc(client, prompt),
    }
    for number in range(WARM_UP + runs):
        for name, ask in transports.items():
            start = source.randrange(len(text) - TEXT_CHARS[1])
            request_id, ttft_s = await ask(text[start : start + source.randint(*TEXT_CHARS)])
            timeline = await timeline_of(client, request_id)
            if number >= WARM_UP:
                yield short_sample(name, ttft_s, timeline)
            await asyncio.sleep(PAUSE_S)


async def measure(
    grpc_address: str, http_address: str, args: argparse.Namespace, *, max_in_flight: int
) -> tuple[list[Sample], list[list[float]]]:
    """Samples of the short prompts, and the pauses per stage in long ones."""
    pauses: list[list[float]] = [[] for _ in range(STAGES)]
    prompts = Prompts("smollm2", seed=args.seed)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        MoontideClient(grpc_address) as client,
        aiohttp.ClientSession(f"http://{http_address}", timeout=timeout) as session,
    ):
        await client.connect()
        samples = [sample async for sample in short_prompts(client, session, runs=args.runs, seed=args.seed)]
        for number in range(args.long_runs + 1):
            request_id, _ = await ask_grpc(client, prompts.take(args.long_tokens))
            stages = stage_chunks(await timeline_of(client, request_id))
            for all_pauses, found in zip(pauses, gaps_s(stages, max_in_flight=max_in_flight), strict=True):
                all_pauses.extend(found if number else ())
    return samples, pauses


def result(samples: Sequence[Sample], pauses: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What the short prompts and the pauses of each stage in the long ones say."""
    by_transport = {
        name: summary([sample for sample in samples if sample.transport == name]) for name in ("http", "grpc")
    }
    return {
        "ttft_overhead_ms": max(found["overhead_ms"] for found in by_transport.values()),
        **by_transport,
        "tau_ms": [round(1000 * median(found), 3) if found else None for found in pauses],
        "tau_p90_ms": [round(1000 * sorted(found)[len(found) * 9 // 10], 3) if found else None for found in pauses],
        "tau_samples": [len(found) for found in pauses],
    }


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians in milliseconds."""

    def ms(value: Callable[[Sample], float]) -> float:
        return round(1000 * median(map(value, samples)), 2)

    names = [field.name for field in dataclasses.fields(Overhead)]
    return {
        "ttft_ms": ms(lambda sample: sample.ttft_s),
        "compute_ms": ms(lambda sample: sample.compute_s),
        "overhead_ms": ms(lambda sample: sample.overhead.total_s),
        "overhead_p90_ms": round(1000 * sorted(s.overhead.total_s for s in samples)[len(samples) * 9 // 10], 2),
        "parts_ms": {
            name.removesuffix("_s"): ms(lambda sample, name=name: float(getattr(sample.overhead, name)))
            for name in names
        },
        "prompt_tokens": sorted(sample.num_tokens for sample in samples),
        "samples_ms": [round(1000 * sample.overhead.total_s, 2) for sample in samples],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="short prompts per transport")
    parser.add_argument("--long-runs", type=int, default=4)
    parser.add_argument("--long-tokens", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="setting for the measured cluster")
    args = parser.parse_args()
    with cluster([*SETTINGS, *args.set]) as running:
        watch = CpuWatch()
        samples, pauses = asyncio.run(
            measure(
                running.grpc_address,
                running.http_address,
                args,
                max_in_flight=STAGES + running.config.prefill.slack,
            )
        )
        others_share = watch.others_share()
    print_result(
        {
            **result(samples, pauses),
            "long_prompt_tokens": args.long_tokens,
            **noise(others_share),
            "runs": args.runs,
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
