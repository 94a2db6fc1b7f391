"""Is chunked prefill with pipeline parallelism the same as Chunked Pipeline Parallelism, and how effective is CPP?

Three ways to put prompts through the same pipeline, which differ in one decision of stage 0:

    request-pp      a prompt is one step; stages overlap only on different prompts
    chunked-serial  chunks, and the next one of a prompt only after the one before has left the last stage
    cpp             chunks, and the next one enters as soon as the one before has left stage 0

and three loads: one long prompt; eight long prompts at once; 95 % short and 5 % long ones. Four paced stages (steps sleep for the time that
a profile says; scheduler, links, pages, puts and store are real), and two real stages of the built-in model for the first two loads.

A mode during which other programs used more than 5 % of the CPU is run once more; the quieter run counts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import HOLD_NOTHING_BACK, CpuWatch, cluster, machine, noise, print_result, quietest
from load import Arrival, Served, percentile, poisson, run_load, stage_times
from paced_models import write_paced_model

from moontide.perf_model import StepModel

MOST_ATTEMPTS = 2
MODES = ("request-pp", "chunked-serial", "cpp")
NODE = StepModel(overhead_s=0.002, token_s=0.0002, pair_s=3e-9)
"""The whole model on one node: 8.2 s for a long prompt of 32k tokens, of which attention is a fifth."""
LONG_TOKENS = 32768
SHORT_TOKENS = 1024
PACED_STAGES = 4
MIX_S = 30.0
MIX_SHORT_RATE = 4.0
MIX_LONGS = 6
"""5 % of about 120 prompts."""


def loads(long_tokens: int, *, seed: int) -> dict[str, list[Arrival]]:
    mix = poisson(MIX_SHORT_RATE, MIX_S, num_tokens=SHORT_TOKENS, kind="short", seed=seed)
    mix += [Arrival((idx + 0.5) * MIX_S / MIX_LONGS, long_tokens, "long") for idx in range(MIX_LONGS)]
    return {
        "one_long": [Arrival(0.0, long_tokens, "long")],
        "eight_long": [Arrival(0.0, long_tokens, "long")] * 8,
        "mix": mix,
    }


def summary(served: Sequence[Served], bubble_share: float) -> dict[str, float]:
    """What one mode made of one load."""
    ttfts = [each.ttft_s for each in served]
    return {
        "ttft_median_s": round(median(ttfts), 3),
        "ttft_p99_s": round(percentile(ttfts, 0.99), 3),
        "tokens_per_s": round(
            sum(each.arrival.num_tokens for each in served) / max(each.ended_s for each in served), 1
        ),
        "bubble_share": round(bubble_share, 3),
    }


def run_mode(
    settings: Sequence[str], mode: str, named_loads: dict[str, list[Arrival]], *, seed: int
) -> tuple[dict[str, Any], float]:
    """Every load on a fresh cluster of this mode, after one small prompt as a warm-up; and others' share of the CPU."""
    results: dict[str, Any] = {}
    # The conductor holds nothing back: what a mode does with many prompts is compared, and it counts with cpp's times.
    with cluster([*settings, f"prefill.mode={mode}", HOLD_NOTHING_BACK]) as running:
        asyncio.run(run_load(running.grpc_address, [Arrival(0.0, 128, "warm-up")], seed=seed))
        watch = CpuWatch()
        for number, (name, arrivals) in enumerate(named_loads.items()):
            before = stage_times(running)
            served = asyncio.run(run_load(running.grpc_address, arrivals, seed=seed + 1 + number))
            results[name] = summary(served, stage_times(running).bubble_share_since(before))
            print(f"{mode:15} {name:11} {results[name]}", flush=True)
        return results, watch.others_share()


def run_modes(
    settings: Sequence[str], named_loads: dict[str, list[Arrival]], *, seed: int
) -> tuple[dict[str, Any], float]:
    """By mode; and the most that others used during any that counts."""
    found = {
        mode: quietest(partial(run_mode, settings, mode, named_loads, seed=seed), attempts=MOST_ATTEMPTS)
        for mode in MODES
    }
    return {mode: results for mode, (results, _) in found.items()}, max(share for _, share in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--smollm2-tokens", type=int, default=4096, help="length of a long prompt of the built-in model"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_paced_model(Path(folder), **dataclasses.asdict(NODE))
        paced, paced_share = run_modes(
            model.settings_for(PACED_STAGES), loads(LONG_TOKENS, seed=args.seed), seed=args.seed
        )
    real_loads = loads(args.smollm2_tokens, seed=args.seed)
    del real_loads["mix"]
    real, real_share = run_modes(["deploy.stages=2", "prefill.num_pages=1024"], real_loads, seed=args.seed)
    print_result(
        {
            "paced_p4": paced,
            "smollm2_p2": real,
            "cpp_speedup_one_long": {
                "paced_p4": _ratio(paced, "one_long"),
                "smollm2_p2": _ratio(real, "one_long"),
            },
            "cpp_speedup_eight_long": {
                "paced_p4": _ratio(paced, "eight_long"),
                "smollm2_p2": _ratio(real, "eight_long"),
            },
            "smollm2_tokens": args.smollm2_tokens,
            **noise(max(paced_share, real_share)),
            "seed": args.seed,
            **machine(),
        }
    )


def _ratio(results: dict[str, Any], load: str) -> float:
    """Median TTFT of chunked-serial over that of cpp."""
    return round(results["chunked-serial"][load]["ttft_median_s"] / results["cpp"][load]["ttft_median_s"], 3)


if __name__ == "__main__":
    main()
