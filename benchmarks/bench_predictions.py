"""How far the conductor's predictions are off: TTFT and TBT of live requests against what was expected of them when they were placed.

    paced   2 prefill groups of 2 stages, 2 decode instances; conversations, each turn goes on after the last one, and single short prompts
    real    SmolLM2 on one group of 2 stages and one decode instance; single prompts, few at a time, for this machine computes them all

An error is |predicted / actual - 1|; the actual time is the client's: from sending the request to its first token, and the mean time
between the tokens after the second. The first fifth of the requests is left out: step times are learnt from them.

Paced: scheduler, links, pages, puts, pulls and the store are real, and each step sleeps for the time that the profile says.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import CpuWatch, Prompts, cluster, machine, noise, print_result
from load import percentile
from paced_models import write_paced_model

from moontide.client import GenerateOptions, MoontideClient
from moontide.perf_model import StepModel

NODE = StepModel(overhead_s=0.004, token_s=0.0008, pair_s=2e-8)
DECODE_STEP_S = 0.02
CONVERSATIONS_PER_S = 0.8
SHORTS_PER_S = 0.8
TURNS = 4
FIRST_TURN_TOKENS = (512, 4096)
TURN_TOKENS = (64, 1024)
SHORT_TOKENS = (32, 256)
OUTPUT_TOKENS = (16, 96)
THINKING_S = 4.0
REAL_PROMPTS_PER_S = 0.2
REAL_TOKENS = (256, 4096)
VOCABULARY = 256
"""Prompts of the paced model use so many token ids."""
EXPLAIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sample:
    prompt_tokens: int
    ttft_s: float
    predicted_ttft_s: float
    tbt_s: float | None
    """None: too few tokens."""
    predicted_tbt_s: float
    is_local: bool

    @property
    def ttft_error(self) -> float:
        return abs(self.predicted_ttft_s / self.ttft_s - 1)

    @property
    def tbt_error(self) -> float | None:
        return None if self.tbt_s is None else abs(self.predicted_tbt_s / self.tbt_s - 1)


async def ask(client: MoontideClient, prompt: Sequence[int], num_tokens: int) -> tuple[Sample, list[int]]:
    """One request and its prediction; the answer's tokens."""
    moments: list[float] = []
    answer: list[int] = []
    request_id = ""
    sent_s = time.monotonic()
    options = GenerateOptions(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    async for chunk in client.generate(prompt, params=options):
        request_id = chunk.request_id
        moments.extend([time.monotonic()] * len(chunk.tokens))
        answer.extend(token.token_id for token in chunk.tokens)
    async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
        while (explanation := await client.explain(request_id)) is None or not explanation.attempts[-1].ttft_s:
            await asyncio.sleep(0.02)
    chosen = explanation.attempts[-1].chosen
    sample = Sample(
        prompt_tokens=len(prompt),
        ttft_s=moments[0] - sent_s,
        predicted_ttft_s=chosen.queue_s + chosen.fetch_s + chosen.prefill_s + chosen.dispatch_s,
        tbt_s=(moments[-1] - moments[1]) / (len(moments) - 2) if len(moments) > 8 else None,
        predicted_tbt_s=chosen.tbt_s,
        is_local=not chosen.prefill_node_id,
    )
    return sample, answer


class Load:
    """Sends requests at random moments, the same for every run with one seed."""

    def __init__(self, address: str, duration_s: float, seed: int) -> None:
        self._address = address
        self._duration_s = duration_s
        self._draw = random.Random(seed)
        self.samples: list[Sample] = []

    def moments(self, rate: float) -> list[float]:
        """Of a Poisson stream that has exactly the expected number of them."""
        return sorted(self._draw.uniform(0, self._duration_s) for _ in range(round(rate * self._duration_s)))

    def length(self, limits: tuple[int, int]) -> int:
        """As many short ones as long ones, on a scale of ratios."""
        least, most = limits
        return round(least * math.pow(most / least, self._draw.random()))

    def tokens(self, num: int) -> list[int]:
        return self._draw.choices(range(VOCABULARY), k=num)

    async def run_paced(self) -> list[Sample]:
        conversations = [
            [self.tokens(self.length(FIRST_TURN_TOKENS if turn == 0 else TURN_TOKENS)) for turn in range(TURNS)]
            for _ in self.moments(CONVERSATIONS_PER_S)
        ]
        async with MoontideClient(self._address) as client, asyncio.TaskGroup() as tasks:
            await client.connect()
            for at_s, turns in zip(self.moments(CONVERSATIONS_PER_S), conversations, strict=True):
                tasks.create_task(self._converse(client, at_s, turns))
            for at_s in self.moments(SHORTS_PER_S):
                tasks.create_task(self._converse(client, at_s, [self.tokens(self.length(SHORT_TOKENS))]))
        return self.samples

    async def run_real(self, prompts: Prompts) -> list[Sample]:
        async with MoontideClient(self._address) as client, asyncio.TaskGroup() as tasks:
            await client.connect()
            for at_s in self.moments(REAL_PROMPTS_PER_S):
                tasks.create_task(self._converse(client, at_s, [prompts.take(self.length(REAL_TOKENS))]))
        return self.samples

    async def _converse(self, client: MoontideClient, at_s: float, turns: Sequence[list[int]]) -> None:
        await asyncio.sleep(at_s)
        history: list[int] = []
        for turn, tokens in enumerate(turns):
            if turn:
                await asyncio.sleep(THINKING_S)
            sample, answer = await ask(client, [*history, *tokens], self.length(OUTPUT_TOKENS))
            self.samples.append(sample)
            history += [*tokens, *answer]


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    counted = samples[len(samples) // 5 :]
    ttft_errors = [sample.ttft_error for sample in counted]
    tbt_errors = [error for sample in counted if (error := sample.tbt_error) is not None]
    local = [sample for sample in counted if sample.is_local]
    return {
        "ttft_error_median": round(median(ttft_errors), 3),
        "ttft_error_p90": round(percentile(ttft_errors, 0.9), 3),
        "ttft_bias_median": round(median(s.predicted_ttft_s / s.ttft_s - 1 for s in counted), 3),
        "tbt_error_median": round(median(tbt_errors), 3),
        "tbt_error_p90": round(percentile(tbt_errors, 0.9), 3),
        "ttft_median_s": round(median(sample.ttft_s for sample in counted), 3),
        "tbt_median_s": round(median(sample.tbt_s for sample in counted if sample.tbt_s is not None), 4),
        "requests": len(counted),
        "computed_by_decode": len(local),
        "ttft_error_median_of_those": round(median(s.ttft_error for s in local), 3) if local else None,
    }


def run(settings: Sequence[str], load: Callable[[str], Any]) -> dict[str, Any]:
    watch = CpuWatch()
    with cluster(settings) as running:
        result = summary(asyncio.run(load(running.grpc_address)))
    return {**result, **noise(watch.others_share())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("paced", "real"))
    parser.add_argument("--duration", type=float, default=120.0, metavar="SECONDS", help="of each load")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if args.only != "real":
        with tempfile.TemporaryDirectory() as folder:
            model = write_paced_model(Path(folder), **dataclasses.asdict(NODE), decode_step_s=DECODE_STEP_S)
            settings = [*model.settings_for(2), "kv.block_tokens=64", "deploy.prefill_groups=2", "deploy.decode=2"]
            results["paced"] = run(settings, lambda at: Load(at, args.duration, args.seed).run_paced())
            print("paced", results["paced"], flush=True)
    if args.only != "paced":
        prompts = Prompts("smollm2", seed=args.seed)
        settings = ["model.name=smollm2", "deploy.stages=2"]
        results["real"] = run(settings, lambda at: Load(at, args.duration, args.seed).run_real(prompts))
        print("real", results["real"], flush=True)
    first = next(iter(results.values()))
    print_result(
        {
            "ttft_error_median": first["ttft_error_median"],
            "tbt_error_median": first["tbt_error_median"],
            **results,
            **noise(max(found["others_cpu_share"] for found in results.values())),
            "duration_s": args.duration,
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
