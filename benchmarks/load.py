"""A stream of prompts sent to a running cluster at planned moments, and what became of them."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deploy.local import LocalCluster
from moontide.client import GenerateOptions, MoontideClient

VOCABULARY = 256
"""Random prompts use so many token ids, which every model has."""


@dataclass(frozen=True)
class Arrival:
    """One prompt of random tokens."""

    at_s: float
    """After the start of the load."""
    num_tokens: int
    kind: str


@dataclass(frozen=True)
class Served:
    """What its client saw."""

    arrival: Arrival
    ttft_s: float
    ended_s: float
    """After the start of the load."""


def poisson(rate: float, duration_s: float, *, num_tokens: int, kind: str, seed: int) -> list[Arrival]:
    """Arrivals at random moments: a Poisson stream that has exactly the expected number of them."""
    source = random.Random(seed)
    moments = sorted(source.uniform(0, duration_s) for _ in range(round(rate * duration_s)))
    return [Arrival(at_s, num_tokens, kind) for at_s in moments]


async def run_load(address: str, arrivals: Sequence[Arrival], *, seed: int) -> list[Served]:
    """Send every prompt at its moment, each with tokens of its own; returns when all have their first token."""
    source = random.Random(seed)
    prompts = [source.choices(range(VOCABULARY), k=arrival.num_tokens) for arrival in arrivals]
    async with MoontideClient(address) as client:
        await client.connect()
        started_s = time.monotonic()

        async def send(arrival: Arrival, prompt: list[int]) -> Served:
            await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.monotonic()))
            sent_s = time.monotonic()
            async for _ in client.generate(prompt, params=GenerateOptions(max_tokens=1, temperature=0.0)):
                break
            now_s = time.monotonic()
            return Served(arrival, now_s - sent_s, now_s - started_s)

        return list(await asyncio.gather(*map(send, arrivals, prompts)))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above."""
    line = sorted(values)
    return line[min(len(line) - 1, max(0, -(-int(share * 1000) * len(line) // 1000) - 1))]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of all stages of a cluster's prefill groups so far."""

    busy_s: float
    bubble_s: float

    def bubble_share_since(self, before: StageTimes) -> float:
        """Idle share of the time in which the group had work."""
        busy_s, bubble_s = self.busy_s - before.busy_s, self.bubble_s - before.bubble_s
        return bubble_s / (busy_s + bubble_s) if busy_s + bubble_s else 0.0


def stage_times(running: LocalCluster) -> StageTimes:
    addresses = [spec.http_address for spec in running.plan.processes if spec.role == "prefill"]
    return StageTimes(
        busy_s=sum(_sum(address, "prefill_stage_busy_seconds_total") for address in addresses),
        bubble_s=sum(_sum(address, "prefill_bubble_seconds_total") for address in addresses),
    )


def _sum(address: str, sample_name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == sample_name
    )
