"""Short prompts beside a prompt 64 times as long, on four paced stages at 80 % load: does the long one stall them, do they starve it?

    short prompts   Poisson arrivals, the same moments for every policy       about 55 % of the group's capacity
    long prompt     one, early in the stream                                 about 25 %

short_p99_ratio  P99 of the short prompts' TTFT beside the long one / without it, same arrivals
long_slowdown    TTFT of the long prompt x (1 - short load) / its TTFT alone: 1 is what a fair share of the rest would give

Paced: scheduler, links, pages, puts and the store are real, and each step sleeps for the time that the profile says. Without an SLO a
prompt's deadline is max(0.5 s, 1.5 x what stage 0 predicts).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from harness import CpuWatch, cluster, machine, print_result
from load import Arrival, Served, percentile, poisson, run_load, stage_times
from paced_models import write_paced_model

from moontide.perf_model import StepModel

STAGES = 4
POLICIES = ("lars", "edf", "srpt", "fcfs")
SHORT_TOKENS = 1024
LONG_TOKENS = 64 * SHORT_TOKENS
NODE = StepModel(overhead_s=0.002, token_s=0.0008, pair_s=4e-9)
"""The whole model on one node: 0.8 s for a short prompt, 61 s for the long one."""
SHORT_LOAD = 0.55
WINDOW_S = 60.0
LONG_AT_S = 2.0


def service_s(num_tokens: int) -> float:
    """Time of the slowest stage for a prompt, without overheads."""
    return (NODE.token_s * num_tokens + NODE.pair_s * num_tokens**2 / 2) / STAGES


def ttfts(served: Sequence[Served], kind: str) -> list[float]:
    return [each.ttft_s for each in served if each.arrival.kind == kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shorts = poisson(
        SHORT_LOAD / service_s(SHORT_TOKENS), WINDOW_S, num_tokens=SHORT_TOKENS, kind="short", seed=args.seed
    )
    long = Arrival(LONG_AT_S, LONG_TOKENS, "long")
    short_load = len(shorts) * service_s(SHORT_TOKENS) / WINDOW_S
    watch = CpuWatch()
    policies: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_paced_model(Path(folder), **dataclasses.asdict(NODE))
        settings = model.settings_for(STAGES)
        for policy in args.policies.split(","):
            with cluster([*settings, f"prefill.policy={policy}"]) as running:
                address = running.grpc_address
                if not policies:
                    alone = asyncio.run(run_load(address, [Arrival(0.0, LONG_TOKENS, "long")], seed=1))[0].ttft_s
                    without = ttfts(asyncio.run(run_load(address, shorts, seed=2)), "short")
                    print(f"alone: long {alone:.2f} s, short P99 {percentile(without, 0.99):.3f} s", flush=True)
                before = stage_times(running)
                served = asyncio.run(run_load(address, [*shorts, long], seed=3))
                mixed, long_s = ttfts(served, "short"), ttfts(served, "long")[0]
                policies[policy] = {
                    "short_p99_ratio": round(percentile(mixed, 0.99) / percentile(without, 0.99), 3),
                    "long_slowdown": round(long_s * (1 - short_load) / alone, 3),
                    "short_median_s": round(median(mixed), 3),
                    "short_p99_s": round(percentile(mixed, 0.99), 3),
                    "long_ttft_s": round(long_s, 3),
                    "bubble_share": round(stage_times(running).bubble_share_since(before), 3),
                }
                print(policy, policies[policy], flush=True)
    print_result(
        {
            "policies": policies,
            "paced": True,
            "stages": STAGES,
            "short_tokens": SHORT_TOKENS,
            "long_tokens": LONG_TOKENS,
            "short_load": round(short_load, 3),
            "long_load": round(service_s(LONG_TOKENS) / WINDOW_S, 3),
            "num_short": len(shorts),
            "long_alone_s": round(alone, 3),
            "short_median_alone_s": round(median(without), 3),
            "short_p99_alone_s": round(percentile(without, 0.99), 3),
            "cpu_share_of_others": round(watch.others_share(), 3),
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
