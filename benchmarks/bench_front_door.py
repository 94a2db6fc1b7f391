"""How much one conductor process carries, what it adds to a first token, and how long it holds others up while a huge prompt comes in.

One conductor, pinned to the last core; stub nodes that compute nothing (front_door_stubs.py), a real Valkey and the load share the others.

requests   answers of one token, not streamed, prompts of 1 KB, 16 clients; beside it production-stack's
           router in its prefix-aware mode, in front of a stub engine that answers at once
streaming  64 tokens each over the one stream to the decode stub, one event per token; as many clients as keep the core busy; beside it
           Dynamo's frontend with its mockers, as fast as they go
added      time to the first event of a stream at 16 clients that pause between two requests, where the stubs answer at once
stall      longest answer of /live, asked all the time, while a prompt of a million tokens comes in: as text, the same text with another
           turn, and as token ids; `idle` is the same without the prompt

Peers (benchmarks/peers/install.sh dynamo production-stack) are pinned alike; a missing one is null in the result. Rounds take the sides in
turn. Tokens per second are wall time on the pinned core; `..._per_cpu_s` divides by the CPU time that the front door used, which other
programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from harness import CpuWatch, machine, noise, print_result

from deploy.local import find_binaries
from model_runner.model_source import resolve_model
from moontide.config import child_environment, free_port

HERE = Path(__file__).parent
HOST = "127.0.0.1"
MODEL = "stub"
STEP_S = 0.01
"""Of the decode stub."""
MILLION = 1_000_000
CONTEXT = 2 * MILLION
THINK_S = 0.5
"""Mean pause of the clients of `added`: without one, all whose answers end in the same step of the stub come back at once."""
STREAM_TOKENS = 64
START_TIMEOUT_S = 60.0
PEERS = ("production-stack", "dynamo")


@dataclass(frozen=True)
class Side:
    """A front door that runs."""

    url: str
    pid: int


@dataclass(frozen=True)
class Run:
    """What one load gave."""

    answers_per_s: float
    tokens_per_s: float
    events_per_s: float
    cpu_share: float
    """Of one core, by the front door."""
    first_ms: Mapping[str, float]


class Processes:
    """Started here, and gone at the end."""

    def __init__(self, opened: ExitStack, log_dir: Path) -> None:
        self._opened = opened
        self._log_dir = log_dir
        self._others = ",".join(map(str, range((os.cpu_count() or 2) - 1)))
        self._last = str((os.cpu_count() or 1) - 1)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        pinned: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path = HERE,
    ) -> int:
        log = self._opened.enter_context((self._log_dir / f"{name}.log").open("w"))
        argv = ["taskset", "-c", self._last if pinned else self._others, *argv]
        process = subprocess.Popen(
            argv,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=child_environment(env or {}),
            start_new_session=True,
        )
        self._opened.callback(_stop, process)
        return process.pid

    def load(self, side: Side, *arguments: str, max_tokens: int, seed: int) -> Run:
        argv = [sys.executable, str(HERE / "front_door_load.py"), "--url", side.url, "--seed", str(seed)]
        argv += ["--max-tokens", str(max_tokens), *arguments]
        with subprocess.Popen(["taskset", "-c", self._others, *argv], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            marks = []
            for line in process.stdout:
                if line.startswith("{"):
                    result = json.loads(line)
                else:
                    marks.append((time.monotonic(), _cpu_s(side.pid)))
        assert not result["errors"], f"{side.url}: {result['errors']} requests failed, the first with {result['error']}"
        (start_s, start_cpu_s), (end_s, end_cpu_s) = marks
        cpu_share = (end_cpu_s - start_cpu_s) / (end_s - start_s)
        answers_per_s = result["answers_per_s"]
        return Run(answers_per_s, answers_per_s * max_tokens, result["events_per_s"], cpu_share, result["first_ms"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def moontide(processes: Processes, directory: Path, model_dir: Path) -> Side:
    valkey_port, http_port = free_port(), free_port()
    registry = f"redis://{HOST}:{valkey_port}/0"
    options = ["--bind", HOST, "--port", str(valkey_port), "--save", "", "--appendonly", "no", "--dir", str(directory)]
    processes.start("valkey", [str(find_binaries().valkey_server), *options])
    stubs = [sys.executable, str(HERE / "front_door_stubs.py"), "--registry", registry, "--model-dir", str(model_dir)]
    processes.start("stubs", [*stubs, "--step-s", str(STEP_S)])
    config = {
        "node": {"node_id": "conductor-0", "host": HOST, "http_port": http_port},
        "registry": {"url": registry},
        "conductor": {"model_dir": str(model_dir), "served_model_name": MODEL, "max_active_requests": 4096},
    }
    path = directory / "conductor.yaml"
    path.write_text(yaml.safe_dump(config))
    pid = processes.start("conductor", [sys.executable, "-m", "conductor", "--config", str(path)], pinned=True)
    return _ready(Side(f"http://{HOST}:{http_port}", pid), "/ready")


def production_stack(processes: Processes, environment: Path) -> Side:
    engine_port, port = free_port(), free_port()
    engine = [sys.executable, str(HERE / "peers" / "stub_engine.py"), "--port", str(engine_port), "--model", MODEL]
    processes.start("stub-engine", engine)
    argv = [
        str(environment / "bin" / "python"), "-m", "vllm_router.app", "--host", HOST, "--port", str(port),
        "--service-discovery", "static", "--static-backends", f"http://{HOST}:{engine_port}", "--static-models", MODEL,
        "--routing-logic", "prefixaware", "--log-level", "warning",
    ]  # fmt: skip
    source = environment / "source" / "src"
    pid = processes.start("production-stack", argv, pinned=True, env={"PYTHONPATH": str(source)}, cwd=source)
    return _ready(Side(f"http://{HOST}:{port}", pid), "/v1/models")


def dynamo(processes: Processes, environment: Path, directory: Path, model_dir: Path) -> Side:
    port = free_port()
    python = str(environment / "bin" / "python")
    env = {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(directory / "dynamo"), "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    for mode in ("prefill", "decode"):
        mocker = [python, "-m", "dynamo.mocker", "--model-path", str(model_dir), "--model-name", MODEL]
        options = ["--disaggregation-mode", mode, "--num-workers", "1", "--speedup-ratio", "1000"]
        processes.start(f"dynamo-{mode}", [*mocker, *options], env=env)
    frontend = [python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port), "--router-mode", "kv"]
    pid = processes.start("dynamo-frontend", frontend, pinned=True, env=env)
    return _ready(Side(f"http://{HOST}:{port}", pid), "/v1/models", contains=MODEL)


def _ready(side: Side, path: str, *, contains: str = "") -> Side:
    """Returns the side once it answers. Raises: TimeoutError."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError), urllib.request.urlopen(side.url + path, timeout=5.0) as answer:
            if contains in answer.read().decode():
                return side
        time.sleep(0.1)
    raise TimeoutError(
        f"{side.url}{path} did not answer within {START_TIMEOUT_S:.0f} s; the log is in the work directory"
    )


class Probe:
    """Asks /live again and again over one connection and keeps the longest answer."""

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self.longest_s = 0.0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            while True:
                sent_s = time.monotonic()
                writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readuntil(b"ok\n")
                self.longest_s = max(self.longest_s, time.monotonic() - sent_s)
                await asyncio.sleep(0.002)
        finally:
            writer.close()


async def longest_live_s(url: str, seconds: float, body: Mapping[str, Any] | None = None) -> tuple[float, float]:
    """Longest answer of /live while `body` is posted (for `seconds` without one); with the time that took."""
    data = None if body is None else json.dumps(body).encode()
    probe = Probe(url)
    probing = asyncio.create_task(probe.run())
    try:
        await asyncio.sleep(0.5)
        probe.longest_s = 0.0
        started_s = time.monotonic()
        if data is None:
            await asyncio.sleep(seconds)
        else:
            await asyncio.to_thread(_post, url, data)
        return probe.longest_s, time.monotonic() - started_s
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)


def _post(url: str, data: bytes) -> None:
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120.0) as answer:
        answer.read()


async def stalls(url: str, seed: int) -> dict[str, dict[str, float]]:
    source = random.Random(seed)
    words = ["".join(source.choices(string.ascii_lowercase, k=source.randint(2, 6))) for _ in range(20_000)]
    text = " ".join(source.choices(words, k=MILLION * 2 // 5))
    common = {"model": MODEL, "max_tokens": 1}
    bodies: dict[str, dict[str, Any] | None] = {
        "idle": None,
        "text": {**common, "prompt": text},
        "another turn": {**common, "prompt": text + " and one more question"},
        "token ids": {**common, "prompt": [source.randrange(40_000) for _ in range(MILLION)]},
    }
    found = {}
    for name, body in bodies.items():
        longest_s, taken_s = await longest_live_s(url, 2.0, body)
        found[name] = {"stall_ms": round(1e3 * longest_s, 1), "answered_s": round(taken_s, 3)}
    return found


@contextmanager
def long_context_model() -> Iterator[Path]:
    """The built-in model's directory without weights, for prompts beyond its context."""
    source = resolve_model("smollm2").path
    with tempfile.TemporaryDirectory() as name:
        for path in source.iterdir():
            if path.suffix in (".json", ".jinja", ".txt"):
                shutil.copy(path, name)
        config = json.loads((source / "config.json").read_text())
        (Path(name) / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
        yield Path(name)


def measure(args: argparse.Namespace, processes: Processes, directory: Path, model_dir: Path) -> dict[str, Any]:
    ours = moontide(processes, directory, model_dir)
    installed = {name: args.peers / name for name in PEERS if (args.peers / name / ".complete").is_file()}
    proxy = production_stack(processes, installed["production-stack"]) if "production-stack" in installed else None
    theirs = dynamo(processes, installed["dynamo"], directory, model_dir) if "dynamo" in installed else None
    seconds = ["--seconds", str(args.seconds)]
    whole = ["--clients", "16", *seconds]
    stream = ["--clients", str(args.streams), "--stream", "--warm-up", "3", *seconds]
    light = ["--clients", "16", "--stream", "--think-s", str(THINK_S), *seconds]
    runs: dict[str, list[Run]] = {}
    for seed in range(args.seed, args.seed + args.rounds):
        for name, side, load, max_tokens in (
            ("requests", ours, whole, 1),
            ("requests of production-stack", proxy, whole, 1),
            ("streaming", ours, stream, STREAM_TOKENS),
            ("streaming of dynamo", theirs, stream, STREAM_TOKENS),
            ("added", ours, light, STREAM_TOKENS),
        ):
            if side is not None:
                runs.setdefault(name, []).append(processes.load(side, *load, max_tokens=max_tokens, seed=seed))
    stalled = [asyncio.run(stalls(ours.url, args.seed + number)) for number in range(args.rounds)]

    def of(name: str, value: str) -> float | None:
        return round(median(getattr(run, value) for run in runs[name]), 1) if name in runs else None

    def per_cpu_s(name: str, value: str) -> float | None:
        return round(median(getattr(run, value) / run.cpu_share for run in runs[name]), 1) if name in runs else None

    def ratio(name: str, peer: str, value: str) -> float | None:
        pairs = zip(runs[name], runs.get(peer, ()), strict=False)
        ratios = [getattr(run, value) / getattr(other, value) for run, other in pairs]
        return round(median(ratios), 2) if ratios else None

    return {
        "requests_per_s": of("requests", "answers_per_s"),
        "requests_per_cpu_s": per_cpu_s("requests", "answers_per_s"),
        "stream_tokens_per_s": of("streaming", "tokens_per_s"),
        "stream_tokens_per_cpu_s": per_cpu_s("streaming", "tokens_per_s"),
        "added_p50_ms": round(median(run.first_ms["p50"] for run in runs["added"]), 2),
        "added_p99_ms": round(median(run.first_ms["p99"] for run in runs["added"]), 2),
        "max_loop_stall_ms": max(case["stall_ms"] for round_ in stalled for name, case in round_.items() if name != "idle"),
        "ratio_production_stack": ratio("requests", "requests of production-stack", "answers_per_s"),
        "ratio_dynamo": ratio("streaming", "streaming of dynamo", "tokens_per_s"),
        "production_stack_requests_per_s": of("requests of production-stack", "answers_per_s"),
        "dynamo_stream_tokens_per_s": of("streaming of dynamo", "tokens_per_s"),
        "dynamo_stream_tokens_per_cpu_s": per_cpu_s("streaming of dynamo", "tokens_per_s"),
        "stalls": stalled,
        "runs": {name: [vars(run) for run in found] for name, found in runs.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured time of each load")
    parser.add_argument("--streams", type=int, default=320, help="clients that stream at once")
    parser.add_argument("--seed", type=int, default=0)
    default = os.environ.get("MOONTIDE_PEERS", str(Path.home() / ".cache" / "moontide" / "peers"))
    parser.add_argument("--peers", type=Path, default=Path(default), help="where install.sh put them")
    args = parser.parse_args()
    watch = CpuWatch()
    with ExitStack() as opened:
        model_dir = opened.enter_context(long_context_model())
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        result = measure(args, Processes(opened, directory), directory, model_dir)
        others_share = watch.others_share()
    print_result(
        {
            **result,
            "streams": args.streams,
            "step_s": STEP_S,
            "rounds": args.rounds,
            "seconds": args.seconds,
            "seed": args.seed,
            **noise(others_share),
            **machine(),
        }
    )


if __name__ == "__main__":
    main()
