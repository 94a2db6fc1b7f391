"""How long a stage takes for a step, found by trying before it serves, and kept on disk per model and host.

    chunks without a prefix              16, 32, 64 ... tokens             until one takes long, or has the most tokens of a step
    one such chunk after prefixes of     n, 2n, 4n ... tokens              until one takes long, or pages or context end

"Long" is a fixed part of the budget, so a fast device comes far and a slow one ends in time. Each shape runs once to warm
up; then all take turns, so that a slow moment of the machine falls on one run of each, and the medians count.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kvstore.layout import KVLayout
from model_runner.config import ModelConfig
from model_runner.kv_cache import TORCH_DTYPES
from model_runner.runner import Runner, Segment, StageRunner
from moontide.clock import Clock, MonotonicClock
from moontide.config import cache_dir
from moontide.log import get_logger
from moontide.perf_model import StepModel, StepSample, StepShape, fit

BUDGET_S = 2.0
"""About how long measuring takes on a slow device; on a fast one it ends sooner. Compiling at first use comes on top."""
_FEWEST_TOKENS = 16
_LONG_SHARE = 1 / 24
"""A step that takes more of the budget than this is the last and longest of its row. Steps double in size, so a row takes
at most 4 such shares; two rows, with the warm-up, take two thirds of the budget, and the rest is for more runs."""
_PREFIX_CHUNK_SHARE = 4
"""Chunks after a prefix have a so many times smaller part of the longest chunk: they get shorter as the prefix gets longer."""
_MOST_RUNS = 5
_BUSY_SHARE = 0.9
"""On a CPU that other processes use as well, the thread computes for less of the time than this: not a measurement to keep."""

log = get_logger(__name__)


class _Point(NamedTuple):
    tokens: int
    prefix: int


def measured_model(
    runner: StageRunner,
    model: ModelConfig,
    layout: KVLayout,
    *,
    chunk_tokens: int,
    budget_s: float = BUDGET_S,
    cpu_time: Callable[[], float] = time.thread_time,
) -> StepModel:
    """t(c, p) of this stage on this host, from the cache folder or measured now. Uses the runner like `measure`.

    Args:
        cpu_time: how long this thread has computed; tests hand in another.
    """
    about = _about(runner, model, layout, chunk_tokens)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    file = cache_dir() / "profiles" / f"{digest[:16]}.json"
    samples = _read(file)
    is_cached = samples is not None
    if samples is None:
        started_s, started_cpu_s = time.perf_counter(), cpu_time()
        samples = measure(runner, chunk_tokens=chunk_tokens, budget_s=budget_s)
        busy_share = (cpu_time() - started_cpu_s) / (time.perf_counter() - started_s)
        if runner.kv.layer(0).is_cpu and busy_share < _BUSY_SHARE:
            log.warning("step times measured on a busy CPU are used, but not kept", busy_share=round(busy_share, 2))
        else:
            _write(file, about, samples)
    found = fit(samples)
    log.info(
        "step times",
        overhead_ms=round(found.overhead_s * 1e3, 3),
        ms_per_1k_tokens=round(found.token_s * 1e6, 3),
        ns_per_pair=round(found.pair_s * 1e9, 3),
        knee_tokens=found.knee_tokens,
        cached=str(file) if is_cached else "",
    )
    return found


def measure(
    runner: Runner, *, chunk_tokens: int, budget_s: float = BUDGET_S, clock: Clock | None = None
) -> list[StepSample]:
    """Run steps of several shapes on pages that nobody uses yet. All pages that were written are zero afterwards.

    Args:
        chunk_tokens: most tokens of a step.
    Returns: the median time of each shape; at least one.
    """
    clock = clock or MonotonicClock()
    deadline_s = clock.now() + budget_s
    probe = _Probe(runner, clock)
    try:
        chunks = [_Point(tokens, 0) for tokens in _doubling(_FEWEST_TOKENS, min(chunk_tokens, probe.max_tokens))]
        times = _first_times(probe, chunks, budget_s * _LONG_SHARE)
        longest = max(times).tokens
        tokens = max(1, longest // _PREFIX_CHUNK_SHARE)
        after = [_Point(tokens, prefix) for prefix in _doubling(longest, probe.max_tokens - tokens)]
        times |= _first_times(probe, after, budget_s * _LONG_SHARE)
        for point in itertools.chain.from_iterable(itertools.repeat(list(times), _MOST_RUNS - 1)):
            if clock.now() >= deadline_s:
                break
            times[point].append(probe.run(point))
    finally:
        probe.clean()
    return [StepSample(StepShape.of_chunk(*point), statistics.median(each)) for point, each in times.items()]


class _Probe:
    """Runs steps of made-up rows and times them."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._random = torch.Generator().manual_seed(0)
        self._written: set[int] = set()
        self.max_tokens = min(runner.kv.num_pages * runner.kv.page_tokens, runner.info.max_context)
        """Of a chunk and its prefix."""

    def run(self, point: _Point) -> float:
        """Seconds of one step, with what a pipeline waits for: the rows for the next stage are in host memory."""
        runner = self._runner
        info, page_tokens = runner.info, runner.kv.page_tokens
        end_page = -(-sum(point) // page_tokens)
        self._written.update(range(point.prefix // page_tokens, end_page))
        segment = Segment(start=point.prefix, num_tokens=point.tokens, pages=list(range(end_page)), wants_logits=False)
        token_ids_T = hidden_TD = None
        if runner.spec.is_first_stage:
            token_ids_T = torch.randint(info.vocab_size, (point.tokens,), generator=self._random)
        else:
            shape = (point.tokens, info.hidden_size)
            hidden_TD = torch.randn(shape, generator=self._random).to(TORCH_DTYPES[info.dtype])
        started_s = self._clock.now()
        runner.forward([segment], token_ids_T=token_ids_T, hidden_TD=hidden_TD).cpu()
        self._wait_for_device()
        return self._clock.now() - started_s

    def clean(self) -> None:
        for page in self._written:
            self._runner.kv.zero_tail(page, 0)
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if not self._runner.kv.layer(0).is_cpu:
            torch.accelerator.synchronize()


def _first_times(probe: _Probe, points: Iterable[_Point], long_s: float) -> dict[_Point, list[float]]:
    """Run the points in order, each twice, up to the first that takes long; the first run is the warm-up."""
    times: dict[_Point, list[float]] = {}
    for point in points:
        probe.run(point)
        times[point] = [probe.run(point)]
        if times[point][0] > long_s:
            break
    return times


def _doubling(first: int, last: int) -> Iterator[int]:
    """first, 2 first, 4 first ... and `last`; nothing if there is no room."""
    number = first
    while number < last:
        yield number
        number *= 2
    if last > 0:
        yield last


def _about(runner: StageRunner, model: ModelConfig, layout: KVLayout, chunk_tokens: int) -> dict[str, str]:
    """Everything that the times depend on. The layout's digest covers the weights, dtype and block size."""
    spec = runner.spec
    return {
        "layout": layout.digest().hex(),
        "layers": f"[{spec.start_layer},{spec.end_layer}) of {spec.num_layers}",
        "device": model.device,
        "kernels": f"{model.kernels}: {runner.attention} attention",
        "threads": str(model.threads),
        "longest step": str(chunk_tokens),
        "host": socket.gethostname(),
        "processor": torch.cuda.get_device_name(model.device) if model.device.startswith("cuda") else _cpu_name(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _read(file: Path) -> list[StepSample] | None:
    """Samples from the cache; None if there are none that can be used."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["samples"]
        samples = [StepSample(StepShape(int(tokens), float(pairs)), float(time_s)) for tokens, pairs, time_s in rows]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("cached step times cannot be read", file=file, error=f"{type(error).__name__}: {error}")
        return None
    is_usable = samples and all(each.time_s > 0 and math.isfinite(each.time_s) for each in samples)
    return samples if is_usable else None


def _write(file: Path, about: dict[str, str], samples: Iterable[StepSample]) -> None:
    """Replace the file in one step, so that a reader or another writer never meets half of it."""
    rows = [[each.shape.tokens, each.shape.pairs, each.time_s] for each in samples]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".new", delete=False, encoding="utf-8") as new:
            json.dump({"about": about, "samples": rows}, new, indent=1)
        os.replace(new.name, file)
    except OSError as error:
        log.warning("step times are not kept", file=file, error=str(error))
