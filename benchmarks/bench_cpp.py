"""How much faster a prefill group of two stages is than one: makespan and TTFT of one long prompt, through the public API.

1. The pipeline: the built-in model and a dummy Llama with a 32k prompt, each on a cluster with one stage and one with two, in turn, so
   that a slow moment hits both. A stage process has one compute thread: two stages are two "nodes". Plain processes, and the K/V goes
   into the store after the prompt. One cluster is up at a time: an idle one beside it would take its few per cent from the side that
   uses both cores.
2. The whole system beside it: the same under Ray with the K/V pushed behind the compute, all of it on the same two cores.
3. Four and eight stages, paced (steps sleep instead of computing): the measured efficiency against m / (m + P - 1).

Each cluster first gets a prompt of a quarter of the length, which is left out. A pair in which other programs used more than 5 % of
the CPU is run again, up to twice, and the quietest counts. Speedups are medians over the pairs, so a machine that is slower for a
while changes both sides of one.

Two predictions of the makespan are compared with the measured one:

    prediction_error   sum of one-step-ahead predictions: what was expected of each step when it ended, by models that are fitted again
                       after every step, also during the prompt
    forecast_error     what the conductor expected of the whole prefill before it sent the prompt

Their largest medians without a sign are prediction_error_max and forecast_error_max (the pipeline), forecast_error_max_whole_system.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import CpuWatch, Prompts, cluster, machine, noise, print_result, quietest, timeline_of
from paced_models import VOCAB_SIZE, byte_tokenizer, write_paced_model

from deploy.gantt import busy_s, predicted_makespan_s, stage_chunks
from moontide.client import GenerateOptions, MoontideClient
from moontide.perf_model import StepModel
from moontide.timeline import Timeline

MOST_ATTEMPTS = 3

MODELS = ("smollm2", "32k")
PIPELINE = ("prefill.push=after-prefill",)
WHOLE_SYSTEM = ("deploy.launcher=ray",)


@dataclass(frozen=True)
class Run:
    """One prompt."""

    ttft_s: float
    makespan_s: float
    """First chunk enters stage 0 - last chunk leaves the last stage."""
    predicted_s: float
    """Makespan if every step took what models fitted to the steps before it expected; 0 without."""
    forecast_s: float
    """Time of the whole prefill that the conductor expected before it sent the prompt there."""
    num_chunks: int
    overlap_of_ideal: float
    """Busy share of the stages over that of an ideal pipeline of equal chunks, m / (m + P - 1)."""
    tau_s: float
    """Median time from the end of a chunk on stage 0 to the start of the next one."""

    @property
    def prediction_error(self) -> float:
        """Of the models one step ahead, while the prompt runs."""
        return self.predicted_s / self.makespan_s - 1

    @property
    def forecast_error(self) -> float:
        """Of the whole prompt, before it starts."""
        return self.forecast_s / self.makespan_s - 1


@dataclass(frozen=True)
class Series:
    """Runs of one prompt length on two clusters."""

    runs: dict[int, list[Run]]
    """By number of stages, the smaller number first; the runs with one prompt have one place."""
    others_share: float
    """The most in any run."""

    def ratio(self, value: Callable[[Run], float]) -> float:
        return median(value(one) / value(more) for one, more in zip(*self.runs.values(), strict=True))

    def largest(self, value: Callable[[Run], float]) -> float:
        """Of the medians for each number of stages, without their signs."""
        return max(abs(median(map(value, runs))) for runs in self.runs.values())


async def ask(client: MoontideClient, prompt: Sequence[int]) -> Run:
    """Send one prompt and read its timeline. Raises: MoontideError; AssertionError if the cache answered a part of it."""
    ttft_s, request_id = 0.0, ""
    async for chunk in client.generate(prompt, params=GenerateOptions(max_tokens=1, temperature=0.0)):
        request_id = chunk.request_id
        if chunk.ttft_parts is not None:
            ttft_s = chunk.ttft_parts.ttft_s
        if chunk.usage is not None:
            assert chunk.usage.cached_tokens == 0, f"{chunk.usage.cached_tokens} tokens came from the cache"
    explanation = await client.explain(request_id)
    assert explanation is not None
    return measure(ttft_s, explanation.attempts[-1].chosen.prefill_s, await timeline_of(client, request_id))


def measure(ttft_s: float, forecast_s: float, timeline: Timeline) -> Run:
    stages = stage_chunks(timeline)
    num_chunks = len(stages[0])
    makespan_s = max(span.end_s for spans in stages for span in spans) - stages[0][0].start_s
    busy_share = sum(busy_s(spans) for spans in stages) / (len(stages) * makespan_s)
    ideal = num_chunks / (num_chunks + len(stages) - 1)
    gaps = [after.start_s - before.end_s for before, after in zip(stages[0], stages[0][1:], strict=False)]
    return Run(
        ttft_s=ttft_s,
        makespan_s=makespan_s,
        predicted_s=predicted_makespan_s(stages),
        forecast_s=forecast_s,
        num_chunks=num_chunks,
        overlap_of_ideal=busy_share / ideal,
        tau_s=median(gaps) if gaps else 0.0,
    )


def compare(
    name: str,
    settings: Sequence[str],
    take: Callable[[int], Sequence[int]],
    *,
    num_tokens: int,
    stages: Sequence[int],
    runs: int,
) -> Series:
    """Ask a cluster of each number of stages in turn, with the same prompt; a pair again while the machine is noisy."""
    results: dict[int, list[Run]] = {count: [] for count in stages}
    most_of_others = 0.0
    for number in range(runs):
        warm_up, prompt = take(num_tokens // 4), take(num_tokens)
        order = stages if number % 2 else stages[::-1]
        ask_all = partial(_ask_each, f"{name}  run {number}", settings, order, warm_up, prompt)
        pair, others_share = quietest(ask_all, attempts=MOST_ATTEMPTS)
        most_of_others = max(most_of_others, others_share)
        for count, run in pair.items():
            results[count].append(run)
    return Series(results, most_of_others)


def _ask_each(
    title: str, settings: Sequence[str], stages: Sequence[int], warm_up: Sequence[int], prompt: Sequence[int]
) -> tuple[dict[int, Run], float]:
    """The run of `prompt` on a cluster of each number of stages, and the most that others used of the CPU during one."""
    found: dict[int, Run] = {}
    shares: list[float] = []
    for count in stages:
        with cluster([*settings, f"deploy.stages={count}"]) as running:
            found[count], others_share = asyncio.run(_ask_twice(running.grpc_address, warm_up, prompt))
        shares.append(others_share)
        _print_run(f"{title}  P={count}", found[count], others_share)
    return found, max(shares)


def _print_run(title: str, run: Run, others_share: float) -> None:
    print(
        f"{title}  TTFT {run.ttft_s:7.3f} s  makespan {run.makespan_s:7.3f} s (predicted {run.predicted_s:7.3f}, "
        f"forecast {run.forecast_s:7.3f})  {run.num_chunks} chunks  overlap {run.overlap_of_ideal:.3f} of ideal  "
        f"tau {run.tau_s * 1000:.2f} ms  others {others_share:.1%}",
        flush=True,
    )


async def _ask_twice(address: str, warm_up: Sequence[int], prompt: Sequence[int]) -> tuple[Run, float]:
    """The run of `prompt`, and the share of the CPU that others had meanwhile."""
    async with MoontideClient(address) as client:
        await ask(client, warm_up)
        watch = CpuWatch()
        return await ask(client, prompt), watch.others_share()


def summary(series: Series, prompt_tokens: int) -> dict[str, Any]:
    """Medians of a series."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "speedup_makespan": round(series.ratio(lambda run: run.makespan_s), 3),
        "speedup_ttft": round(series.ratio(lambda run: run.ttft_s), 3),
        **noise(series.others_share),
    }
    for stages, runs in series.runs.items():
        found[f"p{stages}"] = {
            "ttft_s": round(median(run.ttft_s for run in runs), 3),
            "makespan_s": round(median(run.makespan_s for run in runs), 3),
            "prediction_error": round(median(run.prediction_error for run in runs), 4),
            "forecast_error": round(median(run.forecast_error for run in runs), 4),
            "num_chunks": median(run.num_chunks for run in runs),
            "overlap_of_ideal": round(median(run.overlap_of_ideal for run in runs), 3),
            "tau_ms": round(1000 * median(run.tau_s for run in runs), 3),
            "tokens_per_s": round(prompt_tokens / median(run.ttft_s for run in runs), 1),
            "samples_makespan_s": [round(run.makespan_s, 3) for run in runs],
        }
    return found


def result(series: Mapping[str, Series]) -> dict[str, Any]:
    """The figures over several series; `series` has both of each of MODELS, by their names in the result."""
    pipeline = [series[name] for name in MODELS]
    whole_system = [series[f"{name}_whole_system"] for name in MODELS]

    def forecast_error_max(of: Sequence[Series]) -> float:
        return round(max(each.largest(lambda run: run.forecast_error) for each in of), 4)

    return {
        **{
            f"speedup_p2_{name}": round(each.ratio(lambda run: run.makespan_s), 3)
            for name, each in zip(MODELS, pipeline, strict=True)
        },
        **{
            f"speedup_p2_{name}_whole_system": round(each.ratio(lambda run: run.ttft_s), 3)
            for name, each in zip(MODELS, whole_system, strict=True)
        },
        "prediction_error_max": round(max(each.largest(lambda run: run.prediction_error) for each in pipeline), 4),
        "forecast_error_max": forecast_error_max(pipeline),
        "forecast_error_max_whole_system": forecast_error_max(whole_system),
        "tau_ms": round(1000 * max(each.largest(lambda run: run.tau_s) for each in pipeline), 3),
        **noise(max(each.others_share for each in series.values())),
    }


def closed_form_share(runs: Sequence[Run], stages: int, node: StepModel, work_s: float) -> float:
    """Makespan of m equally long chunks on P stages, (W / P + m tau) (m + P - 1) / m, over the measured one."""
    return median(
        (work_s / stages + run.num_chunks * node.overhead_s)
        * (run.num_chunks + stages - 1)
        / run.num_chunks
        / run.makespan_s
        for run in runs
    )


def write_dummy_llama(directory: Path, *, max_context: int) -> list[str]:
    """A Llama with random weights, narrow and shallow, so that 32k tokens take seconds; returns the settings for it."""
    directory.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_context + 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return [
        f"model.name={json.dumps(str(directory))}",
        "model.load_format=dummy",
        "kv.layer_group=4",
        "decode.num_pages=600",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--whole-system-runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smollm2-tokens", type=int, default=7500)
    parser.add_argument("--dummy-tokens", type=int, default=32768)
    parser.add_argument("--paced-tokens", type=int, default=131072)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="setting for the measured clusters")
    args = parser.parse_args()
    source = random.Random(args.seed)
    prompts = Prompts("smollm2", seed=args.seed)

    def take_random(num_tokens: int) -> list[int]:
        return source.choices(range(256), k=num_tokens)

    with tempfile.TemporaryDirectory() as folder:
        models = {
            "smollm2": (list[str](), prompts.take, args.smollm2_tokens),
            "32k": (
                write_dummy_llama(Path(folder) / "dummy", max_context=args.dummy_tokens),
                take_random,
                args.dummy_tokens,
            ),
        }
        series = {
            f"{name}{suffix}": compare(
                f"{name}{suffix}",
                [*settings, *of_model, *args.set],
                take,
                num_tokens=num_tokens,
                stages=(1, 2),
                runs=runs,
            )
            for name, (of_model, take, num_tokens) in models.items()
            for suffix, settings, runs in (
                ("", PIPELINE, args.runs),
                ("_whole_system", WHOLE_SYSTEM, args.whole_system_runs),
            )
        }
        node = StepModel(overhead_s=0.002, token_s=0.0002, pair_s=1.5e-9)
        paced = compare(
            "paced",
            [
                *write_paced_model(Path(folder), **dataclasses.asdict(node)).settings,
                "kv.block_tokens=256",
                "prefill.num_pages=1024",
                "decode.num_pages=1024",
                *args.set,
            ],
            take_random,
            num_tokens=args.paced_tokens,
            stages=(4, 8),
            runs=2,
        )
    work_s = node.token_s * args.paced_tokens + node.pair_s * args.paced_tokens**2 / 2
    print_result(
        {
            **result({**series, "paced": paced}),
            "paced_share_of_closed_form": {
                f"p{stages}": round(closed_form_share(runs, stages, node, work_s), 3)
                for stages, runs in paced.runs.items()
            },
            **{
                f"{name}{suffix}": summary(series[f"{name}{suffix}"], num_tokens)
                for name, (_, _, num_tokens) in models.items()
                for suffix in ("", "_whole_system")
            },
            "paced": summary(paced, args.paced_tokens),
            "runs": args.runs,
            "seed": args.seed,
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
