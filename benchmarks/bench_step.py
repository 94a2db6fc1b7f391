"""Floating-point rate of one stage's prefill step as a share of the machine's GEMM peak, for every way to compute it.

Two models: SmolLM2, and a Llama-shaped one of hidden size 2,048 with random weights and few layers. A step is one chunk
behind a prefix that is in the pages already, through StageRunner, without the output head. Counted are 2 operations per
weight of the linear layers and token, and 4 x head size per query head and pair of a token with one it sees; norms,
rotations and activations count as nothing.

The peak is the best of torch.mm and of our packed linear over large shapes, per dtype and number of threads. Peak and
steps alternate in rounds until the time is up, so that a slow moment hits all; a figure is the median of its rounds. One
thread is timed by its CPU time, two by the wall clock. The native kernels run the whole grid of prefixes and chunks, torch
one line of it in each direction.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import CpuWatch, machine, noise, print_result

from model_runner.kv_cache import TORCH_DTYPES
from model_runner.model_source import ModelSource, load_config, load_model_info, resolve_model
from model_runner.native.kernels import NativeKernels, load_kernels, why_not_native
from model_runner.runner import Segment, StageRunner
from model_runner.stage import split_layers

PREFIXES = (0, 2048, 4096, 8192)
CHUNKS = (256, 512, 1024, 2048)
LINE_PREFIX, LINE_CHUNK = 2048, 512
"""Where the lines of torch cross."""
PROMPT_TOKENS = 4096
PAGE_TOKENS = 64
GEMM_ROWS = 1024
GEMM_WEIGHTS = ((2048, 2048), (8192, 2048), (2048, 8192))
"""Outputs and inputs."""
MAX_RUN_S = 540.0
"""After this, no other figure is measured; one that a slow machine never reached is absent."""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def now_s() -> float:
    """CPU time of a lone compute thread, so that another process's slices do not count; wall time with several."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True, order=True)
class Way:
    """One way to compute."""

    kernels: str
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.kernels} {self.dtype} {self.threads} thread{'s' if self.threads > 1 else ''}"


@dataclass(frozen=True, order=True)
class Step:
    prefix: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.prefix}+{self.chunk}"


class Stage:
    """All layers of a model as one stage, with random K/V in its pages."""

    def __init__(self, source: ModelSource, *, kernels: str, dtype: str) -> None:
        config, info = load_config(source), load_model_info(source, dtype=dtype)
        layout = info.layout(block_tokens=PAGE_TOKENS, layer_group=1)
        num_pages = (max(PREFIXES) + max(CHUNKS)) // PAGE_TOKENS
        spec = split_layers(info.num_layers, 1, layer_group=1)[0]
        self.num_layers = info.num_layers
        self._runner = StageRunner.load(source, spec, dtype=dtype, layout=layout, num_pages=num_pages, kernels=kernels)
        for layer in range(info.num_layers):
            self._runner.kv.layer(layer).normal_(std=0.5)
        self._pages = range(num_pages)
        attended, kept = config.num_attention_heads * info.head_dim, info.num_kv_heads * info.head_dim
        weights = 2 * info.hidden_size * (attended + kept) + 3 * info.hidden_size * config.intermediate_size
        self._flop_per_token: int = 2 * weights * info.num_layers
        self._flop_per_pair: int = 4 * attended * info.num_layers
        self._vocab_size = info.vocab_size

    def run(self, step: Step) -> float:
        """Seconds."""
        ids = torch.randint(self._vocab_size, (step.chunk,))
        segment = Segment(start=step.prefix, num_tokens=step.chunk, pages=self._pages, wants_logits=False)
        started_s = now_s()
        self._runner.forward([segment], token_ids_T=ids)
        return now_s() - started_s

    def gflop(self, step: Step) -> float:
        num_pairs = step.chunk * step.prefix + step.chunk * (step.chunk + 1) / 2
        return (self._flop_per_token * step.chunk + self._flop_per_pair * num_pairs) / 1e9


def steps_of(way: Way) -> list[Step]:
    grid = [Step(prefix, chunk) for prefix in PREFIXES for chunk in CHUNKS]
    if way.kernels == "native":
        return grid
    return [step for step in grid if step.chunk == LINE_CHUNK or step.prefix == LINE_PREFIX]


def prompt_steps() -> list[Step]:
    return [Step(first, LINE_CHUNK) for first in range(0, PROMPT_TOKENS, LINE_CHUNK)]


class Products:
    """The matrix products whose best rate is the peak."""

    def __init__(self, dtype: str, kernels: NativeKernels | None) -> None:
        self._calls: dict[str, Callable[[], Any]] = {}
        self._gflop: dict[str, float] = {}
        for num_outputs, num_inputs in GEMM_WEIGHTS:
            rows = torch.randn(GEMM_ROWS, num_inputs).to(TORCH_DTYPES[dtype])
            weight = torch.randn(num_outputs, num_inputs).to(TORCH_DTYPES[dtype])
            shape = f"{GEMM_ROWS}x{num_inputs}x{num_outputs}"
            self._add(f"torch {shape}", partial(torch.mm, rows, weight.t()), weight)
            if kernels is not None:
                native = partial(kernels.linear, rows, kernels.pack(weight), num_outputs=num_outputs)
                self._add(f"native {shape}", native, weight)

    def _add(self, name: str, call: Callable[[], Any], weight: torch.Tensor) -> None:
        self._calls[name] = call
        self._gflop[name] = 2 * GEMM_ROWS * weight.numel() / 1e9
        call()

    def measure(self) -> Iterator[tuple[str, float]]:
        """GFLOP/s of each."""
        for name, call in self._calls.items():
            started_s = now_s()
            call()
            yield name, self._gflop[name] / (now_s() - started_s)


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds inside each function of the native kernels."""
    spent_s: dict[str, float] = defaultdict(float)
    functions = {name: getattr(NativeKernels, name) for name in ("linear", "attend", "norm", "write")}

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            started_s = now_s()
            result = functions[name](*args, **keywords)
            spent_s[name] += now_s() - started_s
            return result

        return call

    for name in functions:
        setattr(NativeKernels, name, timed(name))
    try:
        yield spent_s
    finally:
        for name, function in functions.items():
            setattr(NativeKernels, name, function)


def parts_of(stage: Stage, step: Step) -> dict[str, float]:
    """Shares of a step's time; "other": rotation, residual sums, embedding, and the modules' Python."""
    with stopwatch() as spent_s:
        whole_s = stage.run(step)
    shares = {name: round(part_s / whole_s, 4) for name, part_s in spent_s.items()}
    return {**shares, "other": round(1 - sum(spent_s.values()) / whole_s, 4)}


class Bench:
    """Samples of all figures, taken round by round."""

    def __init__(
        self, stages: dict[tuple[str, str, str], Stage], products: dict[str, Products], threads: Sequence[int]
    ):
        self._stages = stages
        self._products = products
        self._threads = threads
        self.gemm: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.step_s: dict[tuple[str, Way, Step], list[float]] = defaultdict(list)
        self.prompt_s: dict[tuple[str, Way], list[float]] = defaultdict(list)
        self.parts: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)

    def run_round(self, *, until_s: float) -> bool:
        """Take one sample of each figure; False if the time was over before."""
        for threads in self._threads:
            torch.set_num_threads(threads)
            for measure in self._measurements(threads):
                if time.monotonic() > until_s:
                    return False
                measure()
        return True

    def _measurements(self, threads: int) -> Iterator[Callable[[], None]]:
        yield partial(self._measure_products, threads)
        for (model, kernels, dtype), stage in self._stages.items():
            way = Way(kernels, dtype, threads)
            stage.run(Step(0, CHUNKS[0]))
            for step in steps_of(way):
                yield partial(self._measure_step, model, way, step)
            if model == "smollm2" and threads == 1 and dtype == "bfloat16":
                yield partial(self._measure_prompt, model, way)
            if kernels == "native" and threads == 1:
                yield partial(self._measure_parts, model, way)
        yield partial(self._measure_products, threads)

    def _measure_step(self, model: str, way: Way, step: Step) -> None:
        self.step_s[model, way, step].append(self._stages[model, way.kernels, way.dtype].run(step))

    def _measure_prompt(self, model: str, way: Way) -> None:
        stage = self._stages[model, way.kernels, way.dtype]
        self.prompt_s[model, way].append(sum(stage.run(step) for step in prompt_steps()))

    def _measure_parts(self, model: str, way: Way) -> None:
        for prefix in PREFIXES:
            step = Step(prefix, LINE_CHUNK)
            self.parts[model][str(step)] = parts_of(self._stages[model, way.kernels, way.dtype], step)

    def _measure_products(self, threads: int) -> None:
        for dtype, products in self._products.items():
            for name, rate in products.measure():
                self.gemm[dtype, threads][name].append(rate)

    def peak(self, dtype: str, threads: int) -> float:
        return max(median(rates) for rates in self.gemm[dtype, threads].values())

    def rate(self, model: str, way: Way, step: Step) -> float:
        """GFLOP/s."""
        stage = self._stages[model, way.kernels, way.dtype]
        return stage.gflop(step) / median(self.step_s[model, way, step])

    def shares(self) -> dict[str, dict[str, dict[str, float]]]:
        """Model -> way -> step -> share of the peak of that dtype and number of threads."""
        result: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for model, way, step in self.step_s:
            share = self.rate(model, way, step) / self.peak(way.dtype, way.threads)
            result[model][str(way)][str(step)] = round(share, 3)
        return result

    def result(self) -> dict[str, Any]:
        one_thread = Way("native", "bfloat16", 1)
        shares = self.shares()
        return {
            "gemm_share": {
                model: {way: round(median(by_step.values()), 3) for way, by_step in ways.items()}
                for model, ways in shares.items()
            },
            "gemm_peak_gflops": {
                f"{dtype} {threads}": {
                    "best": round(self.peak(dtype, threads)),
                    **{name: round(median(rates)) for name, rates in by_name.items()},
                }
                for (dtype, threads), by_name in self.gemm.items()
            },
            "llama_share_min_behind_prefix": min(
                (
                    share
                    for step, share in shares["llama"].get(str(one_thread), {}).items()
                    if not step.startswith("0+")
                ),
                default=None,
            ),
            "prompt_tokens": PROMPT_TOKENS,
            "prompt_tokens_per_s": {
                f"{model} {way}": round(PROMPT_TOKENS / median(times)) for (model, way), times in self.prompt_s.items()
            },
            "time_parts": self.parts,
            "gemm_share_by_step": shares,
            "tokens_per_s_by_step": self._tokens_per_s(),
        }

    def _tokens_per_s(self) -> dict[str, dict[str, dict[str, int]]]:
        result: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
        for (model, way, step), times in self.step_s.items():
            result[model][str(way)][str(step)] = round(step.chunk / median(times))
        return result


def load_stages(folder: Path, ways: Sequence[tuple[str, str]]) -> dict[tuple[str, str, str], Stage]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    sources = {"smollm2": resolve_model("smollm2"), "llama": resolve_model(str(folder), load_format="dummy")}
    return {
        (model, kernels, dtype): Stage(source, kernels=kernels, dtype=dtype)
        for model, source in sources.items()
        for kernels, dtype in ways
    }


def print_table(bench: Bench) -> None:
    for model, ways in bench.shares().items():
        for way, by_step in ways.items():
            print(f"{model:8s} {way:26s}", "  ".join(f"{step} {share:.3f}" for step, share in by_step.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=3, help="most rounds; after nine minutes the last one is cut short"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    started_s = time.monotonic()
    ways = [("torch", "bfloat16"), ("torch", "float32")]
    kernels = None
    if why_not_native(dtype="bfloat16", device="cpu") is None:
        kernels = load_kernels("native", dtype="bfloat16", device="cpu")
        ways.insert(0, ("native", "bfloat16"))
    torch.manual_seed(0)
    watch = CpuWatch()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            load_stages(Path(folder), ways),
            {"bfloat16": Products("bfloat16", kernels), "float32": Products("float32", None)},
            threads=args.threads,
        )
    num_rounds = 0
    while num_rounds < args.rounds and bench.run_round(until_s=started_s + MAX_RUN_S):
        num_rounds += 1
        print(f"round {num_rounds} done after {time.monotonic() - started_s:.0f} s", flush=True)
    others = watch.others_share()
    print_table(bench)
    print_result(
        {
            **bench.result(),
            "complete_rounds": num_rounds,
            **noise(others),
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
