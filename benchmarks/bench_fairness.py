"""Two tenants of equal weight on one paced group: does one that sends ten times its share make the other wait?

    steady   Poisson, the same moments in every phase, short prompts          60 % of its half of the group
    greedy   absent | at its share | at ten times its share (longer prompts)   the rest of its requests is refused by its max_queued_s

p99_ratio        P99 of the steady tenant's TTFT beside the greedy one at ten times its share / at its share
p99_ratio_alone  the same / without the greedy one
p99_ratio_one_tenant  what the same requests get, all under one API key, for a shorter time

Paced: front door, scheduler, links, pages, puts and the store are real, and each step sleeps for the time that the profile says.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import CpuWatch, cluster, machine, noise, print_result
from load import VOCABULARY, Arrival, percentile, poisson
from paced_models import write_paced_model

from moontide.client import GenerateOptions, MoontideClient
from moontide.errors import Rejected
from moontide.perf_model import StepModel

STAGES = 2
NODE = StepModel(overhead_s=0.002, token_s=0.0008, pair_s=4e-9)
"""The whole model on one node."""
STEADY_TOKENS, GREEDY_TOKENS = 512, 2048
STEADY_LOAD = 0.3
SHARE = 0.5
TIMES_ITS_SHARE = 10
MAX_QUEUED_S = 20.0
PHASE_S = 90.0
ONE_TENANT_S = 30.0
TIMEOUT_S = 240.0
TENANTS = ("steady", "greedy")


@dataclasses.dataclass(frozen=True)
class Outcome:
    kind: str
    ttft_s: float | None
    """None: refused."""


def service_s(num_tokens: int) -> float:
    """Time of the slowest stage for a prompt, without overheads."""
    return (NODE.token_s * num_tokens + NODE.pair_s * num_tokens**2 / 2) / STAGES


def greedy(times_its_share: float, duration_s: float, seed: int) -> list[Arrival]:
    rate = times_its_share * SHARE / service_s(GREEDY_TOKENS)
    return poisson(rate, duration_s, num_tokens=GREEDY_TOKENS, kind="greedy", seed=seed)


def write_tenants(folder: Path) -> Path:
    path = folder / "tenants.yaml"
    tenants = [
        {
            "name": name,
            "api_key_sha256": [hashlib.sha256(name.encode()).hexdigest()],
            "max_queued_s": MAX_QUEUED_S,
        }
        for name in TENANTS
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    return path


async def send_all(address: str, arrivals: Sequence[Arrival], keys: Mapping[str, str], *, seed: int) -> list[Outcome]:
    """Send every prompt at its moment under the key of its kind; returns when each has its first token or was refused."""
    prompts = _prompts(arrivals, seed)
    clients = {kind: MoontideClient(address, api_key=key) for kind, key in keys.items()}
    started_s = time.monotonic()

    async def send(arrival: Arrival, prompt: list[int]) -> Outcome:
        await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.monotonic()))
        sent_s = time.monotonic()
        options = GenerateOptions(max_tokens=1, temperature=0.0, timeout_s=TIMEOUT_S)
        try:
            async for _ in clients[arrival.kind].generate(prompt, params=options):
                break
        except Rejected:
            return Outcome(arrival.kind, None)
        return Outcome(arrival.kind, time.monotonic() - sent_s)

    try:
        return list(await asyncio.gather(*map(send, arrivals, prompts)))
    finally:
        for client in clients.values():
            await client.close()


def _prompts(arrivals: Sequence[Arrival], seed: int) -> list[list[int]]:
    """No two share a prefix; the same for the same seed, whatever else arrives."""
    sources = {kind: random.Random(f"{seed} {kind}") for kind in TENANTS}
    return [sources[a.kind].choices(range(VOCABULARY), k=a.num_tokens) for a in arrivals]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind in TENANTS:
        ttfts = [o.ttft_s for o in outcomes if o.kind == kind and o.ttft_s is not None]
        if ttfts:
            result[kind] = {
                "served": len(ttfts),
                "refused": sum(o.kind == kind for o in outcomes) - len(ttfts),
                "median_s": round(median(ttfts), 3),
                "p90_s": round(percentile(ttfts, 0.9), 3),
                "p99_s": round(percentile(ttfts, 0.99), 3),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    own_keys = {name: name for name in TENANTS}
    rate = STEADY_LOAD / service_s(STEADY_TOKENS)
    steady = poisson(rate, PHASE_S, num_tokens=STEADY_TOKENS, kind="steady", seed=args.seed)
    watch = CpuWatch()
    phases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_paced_model(Path(folder), **dataclasses.asdict(NODE))
        tenants_file = write_tenants(Path(folder))
        settings = [*model.settings_for(STAGES), f"conductor.tenants_file={json.dumps(str(tenants_file))}"]
        with cluster(settings) as running:
            address = running.grpc_address

            def phase(name: str, arrivals: Sequence[Arrival], keys: Mapping[str, str]) -> None:
                outcomes = asyncio.run(send_all(address, arrivals, keys, seed=args.seed + len(phases)))
                phases[name] = summary(outcomes)
                print(name, phases[name], flush=True)

            phase("warm-up", steady[:10], own_keys)
            phase("alone", steady, own_keys)
            phase("at its share", [*steady, *greedy(1, PHASE_S, args.seed + 1)], own_keys)
            phase("ten times", [*steady, *greedy(TIMES_ITS_SHARE, PHASE_S, args.seed + 2)], own_keys)
            early = [arrival for arrival in steady if arrival.at_s < ONE_TENANT_S]
            together = dict.fromkeys(TENANTS, "greedy")
            phase("one tenant", [*early, *greedy(TIMES_ITS_SHARE, ONE_TENANT_S, args.seed + 3)], together)
    del phases["warm-up"]

    def p99_s(name: str) -> float:
        value: float = phases[name]["steady"]["p99_s"]
        return value

    print_result(
        {
            "p99_ratio": round(p99_s("ten times") / p99_s("at its share"), 3),
            "p99_ratio_alone": round(p99_s("ten times") / p99_s("alone"), 3),
            "p99_ratio_one_tenant": round(p99_s("one tenant") / p99_s("at its share"), 3),
            "phases": phases,
            "paced": True,
            "stages": STAGES,
            **noise(watch.others_share()),
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
