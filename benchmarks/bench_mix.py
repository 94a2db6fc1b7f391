"""Short prompts beside a prompt 64 times as long, on four paced stages at 80 % load: does the long one stall them, do they starve it?

    short prompts   Poisson arrivals, the same moments for every policy       about 55 % of the group's capacity
    long prompt     one, early in the stream                                 about 25 %

short_p99_ratio  P99 of the short prompts' TTFT beside the long one / without it, same arrivals
long_slowdown    TTFT of the long prompt x (1 - short load) / its TTFT alone: 1 is what a fair share of the rest would give

Once for each policy of stage 0, with a conductor that holds nothing back, so that the policy alone decides. Once more for the whole system
as it comes ("whole-system"): `lars`, behind the fair queue of the conductor, which lets a group have 3 s of work ahead. All rows are
compared with the same runs of each kind of prompt without the other. A run during which other programs used more than 5 % of the CPU is
made once more, and the quieter one counts; without such, all takes 8 minutes.

Paced: scheduler, links, pages, puts and the store are real, and each step sleeps for the time that the profile says. Without an SLO a
prompt's deadline is max(0.5 s, 1.5 x what stage 0 predicts).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from harness import HOLD_NOTHING_BACK, CpuWatch, cluster, machine, noise, print_result, quietest
from load import Arrival, Served, percentile, poisson, run_load, stage_times
from paced_models import write_paced_model

from moontide.perf_model import StepModel

STAGES = 4
MOST_ATTEMPTS = 2
ROWS = {
    **{policy: (f"prefill.policy={policy}", HOLD_NOTHING_BACK) for policy in ("lars", "edf", "srpt", "fcfs")},
    "whole-system": ("prefill.policy=lars",),
}
"""Settings by what the result calls them."""
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


@dataclass(frozen=True)
class Alone:
    """TTFTs of each kind of prompt without the other."""

    long_s: float
    shorts_s: list[float]


def ttfts(served: Sequence[Served], kind: str) -> list[float]:
    return [each.ttft_s for each in served if each.arrival.kind == kind]


def summary(served: Sequence[Served], alone: Alone, *, short_load: float, bubble_share: float) -> dict[str, float]:
    """What became of both kinds beside each other."""
    shorts_s, (long_s,) = ttfts(served, "short"), ttfts(served, "long")
    return {
        "short_p99_ratio": round(percentile(shorts_s, 0.99) / percentile(alone.shorts_s, 0.99), 3),
        "long_slowdown": round(long_s * (1 - short_load) / alone.long_s, 3),
        "short_median_s": round(median(shorts_s), 3),
        "short_p99_s": round(percentile(shorts_s, 0.99), 3),
        "long_ttft_s": round(long_s, 3),
        "bubble_share": round(bubble_share, 3),
    }


def run_alone(settings: Sequence[str], shorts: Sequence[Arrival]) -> tuple[Alone, float]:
    """Both kinds after each other, and others' share of the CPU."""
    with cluster([*settings, HOLD_NOTHING_BACK]) as running:
        watch = CpuWatch()
        (long,) = asyncio.run(run_load(running.grpc_address, [Arrival(0.0, LONG_TOKENS, "long")], seed=1))
        served = asyncio.run(run_load(running.grpc_address, shorts, seed=2))
        return Alone(long.ttft_s, ttfts(served, "short")), watch.others_share()


def run_mixed(
    settings: Sequence[str], shorts: Sequence[Arrival], alone: Alone, *, short_load: float
) -> tuple[dict[str, float], float]:
    """Both kinds beside each other, and others' share of the CPU."""
    with cluster(settings) as running:
        watch = CpuWatch()
        before = stage_times(running)
        arrivals = [*shorts, Arrival(LONG_AT_S, LONG_TOKENS, "long")]
        served = asyncio.run(run_load(running.grpc_address, arrivals, seed=3))
        bubble_share = stage_times(running).bubble_share_since(before)
        return summary(served, alone, short_load=short_load, bubble_share=bubble_share), watch.others_share()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(ROWS), help="those to run, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = args.policies.split(",")
    if unknown := set(wanted) - set(ROWS):
        sys.exit(f"--policies names {', '.join(sorted(unknown))}; known are {', '.join(ROWS)}")
    shorts = poisson(
        SHORT_LOAD / service_s(SHORT_TOKENS), WINDOW_S, num_tokens=SHORT_TOKENS, kind="short", seed=args.seed
    )
    short_load = len(shorts) * service_s(SHORT_TOKENS) / WINDOW_S
    policies: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = write_paced_model(Path(folder), **dataclasses.asdict(NODE)).settings_for(STAGES)
        alone, others_share = quietest(partial(run_alone, settings, shorts), attempts=MOST_ATTEMPTS)
        short_p99_s = percentile(alone.shorts_s, 0.99)
        print(f"alone: long {alone.long_s:.2f} s, short P99 {short_p99_s:.3f} s", flush=True)
        for name in wanted:
            run = partial(run_mixed, [*settings, *ROWS[name]], shorts, alone, short_load=short_load)
            policies[name], share = quietest(run, attempts=MOST_ATTEMPTS)
            others_share = max(others_share, share)
            print(name, policies[name], flush=True)
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
            "long_alone_s": round(alone.long_s, 3),
            "short_median_alone_s": round(median(alone.shorts_s), 3),
            "short_p99_alone_s": round(short_p99_s, 3),
            **noise(others_share),
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
