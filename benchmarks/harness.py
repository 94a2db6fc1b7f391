"""What every benchmark shares: clusters of plain processes, prompts that hit no cache, facts about the machine, the JSON at the end."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

from tokenizers import Tokenizer

from deploy.config import load_cluster_config
from deploy.gantt import stage_chunks
from deploy.local import LocalCluster
from model_runner.model_source import resolve_model
from moontide.client import MoontideClient
from moontide.timeline import Timeline

HOLD_NOTHING_BACK = "conductor.release_queue_s=1000000"
"""With this setting the conductor's queue lets every prompt go at once."""

NOISY_SHARE = 0.05
"""Others' share of the machine's CPU above which a run calls itself noisy."""

TIMELINE_TIMEOUT_S = 60.0

T = TypeVar("T")

# What benchmarks share with the tests is no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))


@contextmanager
def cluster(settings: Sequence[str], *, launch: Callable[..., LocalCluster] = LocalCluster) -> Iterator[LocalCluster]:
    """A cluster of plain processes that is ready, with free ports; stopped on exit. `launch` makes it.

    Prompts go to prefill groups, however short, unless `settings` say otherwise.
    """
    own = ["deploy.launcher=process", "deploy.http_port=0", "deploy.grpc_port=0", "conductor.local_prefill=false"]
    config = load_cluster_config(overrides=[*own, *settings])
    source = resolve_model(config.model.name, load_format=config.model.load_format)
    running = launch(config, model_dir=source.path, model_id=source.model_id)
    try:
        running.start()
        running.wait_ready()
        yield running
    finally:
        running.stop()


class Prompts:
    """Prompts of real text (Python's language reference) that share no prefix with each other."""

    def __init__(self, model: str, *, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(resolve_model(model).path / "tokenizer.json"))
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self._ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self._random = random.Random(seed)

    def take(self, num_tokens: int) -> list[int]:
        start = self._random.randrange(len(self._ids) - num_tokens)
        return self._ids[start : start + num_tokens]


async def timeline_of(client: MoontideClient, request_id: str) -> Timeline:
    """The timeline once the stages' spans have arrived, which is after the last block is sealed."""
    async with asyncio.timeout(TIMELINE_TIMEOUT_S):
        while True:
            found = await client.timeline(request_id)
            if found is not None and found.outcome and stage_chunks(found):
                return found
            await asyncio.sleep(0.05)


class CpuWatch:
    """Share of the machine's CPU that processes outside this benchmark's own tree used."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._total, self._own = _busy_ticks(), _own_ticks()

    def others_share(self) -> float:
        elapsed_ticks = (time.monotonic() - self._start_s) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        foreign = (_busy_ticks() - self._total) - (_own_ticks() - self._own)
        return max(0.0, foreign / elapsed_ticks)


def noise(others_share: float) -> dict[str, Any]:
    """How far others disturbed a run, by the keys of every result with measured times."""
    share = round(others_share, 3)
    return {"others_cpu_share": share, "noisy": share > NOISY_SHARE}


def quietest(measure: Callable[[], tuple[T, float]], *, attempts: int) -> tuple[T, float]:
    """Measure until others used no more than NOISY_SHARE of the CPU, at most `attempts` times.

    Args:
        measure: returns a result, and others' share meanwhile.
    Returns: the least disturbed of them.
    """
    found: list[tuple[T, float]] = []
    while len(found) < attempts:
        found.append(measure())
        if found[-1][1] <= NOISY_SHARE:
            break
        print(f"others used {found[-1][1]:.0%} of the CPU, attempt {len(found)} of {attempts}", flush=True)
    return min(found, key=lambda each: each[1])


def machine() -> dict[str, Any]:
    """Commit and hardware of a run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    model_name = next(
        (
            line.split(":", 1)[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {"commit": commit.stdout.strip() or "unknown", "cpu": model_name, "cores": os.cpu_count()}


def print_result(result: dict[str, Any]) -> None:
    """The last line of every benchmark: one JSON object."""
    print(json.dumps(result), flush=True)


def _busy_ticks() -> int:
    fields = [int(value) for value in _read("/proc/stat").splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return sum(fields[:8]) - idle


def _own_ticks() -> int:
    """CPU ticks of this process, its descendants that live now, and those whose end their parents have seen."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = _read(entry / "stat").rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    own = {os.getpid()}
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in own} - own
        grown = bool(children)
        own |= children
    return sum(ticks.get(pid, 0) for pid in own)


def _read(path: str | Path) -> str:
    return Path(path).read_text()
