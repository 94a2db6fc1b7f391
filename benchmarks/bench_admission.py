"""Simulated: how many requests of a public trace are refused, by admission mode, and what becomes of the others.

Virtual time, with the live functions: conductor/admission.py decides, conductor/output_length.py learns how long answers are. The
cluster around them is a model: prefill nodes that serve first come, first served with an unlimited shared prefix cache, decode
instances whose batches share their steps. Calibrated to 8 x A800 and a Llama of 70B parameters, as published for Mooncake (FAST'25,
figures 12 and 14); no request is run.

    conversation    the trace, so many times as fast; prompts of all lengths
    equal           its arrivals and answers, every prompt of 4,096 tokens and no prefix in common

Table 3 of arXiv:2407.00079 has 4,183 refused by the baseline (per-stage), 3,771 by early rejection and 3,589 with prediction, of 23,000
of another trace on hardware of which no step times are published. What can be compared is the order.

--traces takes the directory that bench_cache_policy.py takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import heapq
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import machine, print_result

from conductor.admission import DecodeForecast, DecodePool, Refused, judge, judge_decode
from conductor.config import ADMISSION_MODES
from conductor.cost import Prediction, Slo
from conductor.output_length import OutputLengths
from moontide.errors import RejectReason
from moontide.perf_model import StepModel, StepShape

BLOCK_TOKENS = 512
FILE_NAME = "conversation_trace.jsonl"
TENANT = "all"
MAX_TOKENS = 2000

PREFILL = StepModel(overhead_s=0.0, token_s=0.119e-3, pair_s=2 * 7.49e-10)
"""0.119 n + 7.49e-4 n^2 seconds for n thousand tokens: within 5 % of figure 14a."""
FETCH_TOKEN_S = 320e3 / 87e9
"""320 kB of K/V per token at the 87 GB/s of figure 12."""
DECODE = StepModel(overhead_s=0.026, token_s=2e-4, pair_s=320e3 / (8 * 2.0e12 * 0.6))
"""26 ms for a request alone (figure 14: 3.4 s for 128 tokens); contexts are read at 0.6 of the memory's bandwidth."""
MAX_BATCH = 128
"""Mean contexts that the memory beside the weights holds."""
SLO_TTFT_S, SLO_TBT_S = 30.0, 0.1
"""Of the evaluation in both papers."""
SLO = Slo(ttft_s=SLO_TTFT_S, tbt_s=SLO_TBT_S)
EQUAL_PROMPT_TOKENS = 4096
SAMPLE_S = 15.0
"""As in figure 9."""


@dataclass(frozen=True)
class Case:
    """So few instances that both stages matter: the trace's answers are short, eight of them, as in the paper, are never full."""

    workload: str
    num_prefill: int
    num_decode: int
    speed: float

    @property
    def name(self) -> str:
        return f"{self.workload} {self.speed:g}x on {self.num_prefill}P+{self.num_decode}D"


CASES = (
    Case("conversation", 8, 2, 2.0),
    Case("conversation", 7, 2, 2.5),
    Case("conversation", 8, 2, 3.0),
    Case("equal", 3, 1, 2.0),
    Case("equal", 4, 1, 2.0),
    Case("equal", 4, 1, 2.5),
)


@dataclass(frozen=True)
class Request:
    idx: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class Active:
    """A request that was let in."""

    request: Request
    work_s: float
    """Of its prefill."""
    ttft_s: float
    decode_from_s: float = 0.0


@dataclass(eq=False)
class Decode:
    """One instance: every request of the batch gets a token per step. Those that find no room in it take turns with the others."""

    tokens: float = 0.0
    """That a request would have got since the beginning."""
    at_s: float = 0.0
    context: float = 0.0
    """Tokens of all contexts, less `tokens` for each request."""
    ends: list[tuple[float, int, Active]] = field(default_factory=list)
    """Heap of (`tokens` at the end, index, request)."""
    version: int = 0
    """Of `ends`."""

    @property
    def context_tokens(self) -> float:
        return self.context + len(self.ends) * self.tokens

    def token_s(self, *joining: Request) -> float:
        """Between two tokens of each request, with some more of them."""
        requests = len(self.ends) + len(joining)
        rows = min(requests, MAX_BATCH)
        context = (self.context_tokens + sum(request.prompt_tokens for request in joining)) / max(1, requests)
        return DECODE.time_s(StepShape(rows, rows * context)) * max(1.0, requests / MAX_BATCH)

    def advance(self, now_s: float) -> None:
        self.tokens += (now_s - self.at_s) / self.token_s()
        self.at_s = now_s

    def add(self, active: Active) -> None:
        self.context += active.request.prompt_tokens - self.tokens
        heapq.heappush(self.ends, (self.tokens + active.request.output_tokens, active.request.idx, active))
        self.version += 1

    def pop(self) -> Active:
        """The request whose end has come."""
        end, _, active = heapq.heappop(self.ends)
        self.context -= active.request.prompt_tokens - (end - active.request.output_tokens)
        self.version += 1
        return active

    def next_end_s(self) -> float:
        return self.at_s + max(0.0, self.ends[0][0] - self.tokens) * self.token_s()


@dataclass(kw_only=True)
class Counts:
    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens_in_time: int = 0
    prefill_s: float = 0.0
    in_vain_s: float = 0.0
    """Part of it for requests that decode refused."""
    loads: list[tuple[float, float]] = field(default_factory=list)
    """Of prefill and decode, as shares of their SLO."""

    @property
    def refused(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome.startswith("refused"))

    def row(self) -> dict[str, Any]:
        prefill, decode = zip(*self.loads, strict=True)
        return {
            "refused": self.refused,
            "prompt_tokens_in_time": self.prompt_tokens_in_time,
            **dict(sorted(self.outcomes.items())),
            "prefill_in_vain": round(self.in_vain_s / self.prefill_s, 4),
            "prefill_load_mean": round(statistics.mean(prefill), 3),
            "prefill_load_std": round(statistics.pstdev(prefill), 3),
            "decode_load_mean": round(statistics.mean(decode), 3),
            "decode_load_std": round(statistics.pstdev(decode), 3),
            "load_correlation": round(statistics.correlation(prefill, decode), 3),
        }


class Simulation:
    def __init__(self, case: Case, requests: Sequence[Request], mode: str) -> None:
        self._mode = mode
        self._free_s = [0.0] * case.num_prefill
        self._decodes = [Decode() for _ in range(case.num_decode)]
        self._cached: set[int] = set()
        self._forecast = DecodeForecast()
        self._lengths = OutputLengths()
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._counts = Counts()
        for request in requests:
            self._at(request.arrival_s, partial(self._arrive, request))
        for idx in range(1, int(requests[-1].arrival_s / SAMPLE_S)):
            self._at(idx * SAMPLE_S, self._sample)

    def run(self) -> Counts:
        while self._events:
            now_s, _, happen = heapq.heappop(self._events)
            for decode in self._decodes:
                decode.advance(now_s)
            happen(now_s)
        assert len(self._forecast) == 0, "a request never ended"
        return self._counts

    def _at(self, at_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happen))

    def _arrive(self, request: Request, now_s: float) -> None:
        node = min(range(len(self._free_s)), key=self._free_s.__getitem__)
        hit_blocks = next((i for i, b in enumerate(request.block_ids) if b not in self._cached), len(request.block_ids))
        hit_tokens = min(hit_blocks * BLOCK_TOKENS, request.prompt_tokens - 1)
        prediction = Prediction(
            queue_s=max(0.0, self._free_s[node] - now_s),
            fetch_s=hit_tokens * FETCH_TOKEN_S,
            prefill_s=PREFILL.time_s(StepShape.of_chunk(request.prompt_tokens - hit_tokens, hit_tokens)),
        )
        verdict = judge(
            self._mode,
            prediction,
            SLO,
            prompt_tokens=request.prompt_tokens,
            pool=self._pool(),
            forecast=self._forecast,
            now_s=now_s,
        )
        if isinstance(verdict, Refused):
            stage = "prefill" if verdict.reason is RejectReason.TTFT_SLO else "decode"
            self._counts.outcomes[f"refused at arrival for {stage}"] += 1
            return
        self._free_s[node] = now_s + prediction.ttft_s
        expected = self._lengths.expected(TENANT, MAX_TOKENS)
        self._forecast.add(
            str(request.idx),
            starts_s=self._free_s[node],
            decode_s=expected.mean * verdict.tbt_s,
            overrun_s=expected.overrun * verdict.tbt_s,
        )
        active = Active(request, prediction.prefill_s, prediction.ttft_s)
        self._counts.prefill_s += active.work_s
        self._at(self._free_s[node], partial(self._prefilled, active))

    def _pool(self) -> DecodePool:
        return DecodePool(
            num_instances=len(self._decodes),
            requests=sum(len(decode.ends) for decode in self._decodes),
            context_tokens=sum(decode.context_tokens for decode in self._decodes),
            max_batch=MAX_BATCH * len(self._decodes),
            step=DECODE,
        )

    def _prefilled(self, active: Active, now_s: float) -> None:
        """In every mode but off the decode instance looks at its bound: in per-stage that is the judgement, else it declines."""
        self._cached.update(active.request.block_ids)
        decode = min(self._decodes, key=lambda each: each.token_s(active.request))
        mode = "off" if self._mode == "off" else "per-stage"
        if isinstance(judge_decode(mode, decode.token_s(active.request), SLO), Refused):
            self._counts.outcomes["refused after prefill"] += 1
            self._counts.in_vain_s += active.work_s
            self._forecast.end(str(active.request.idx))
            return
        self._forecast.started(str(active.request.idx), now_s)
        decode.add(dataclasses.replace(active, decode_from_s=now_s))
        self._await_end(decode)

    def _await_end(self, decode: Decode) -> None:
        if decode.ends:
            self._at(decode.next_end_s(), partial(self._decoded, decode, decode.version))

    def _decoded(self, decode: Decode, version: int, now_s: float) -> None:
        if version != decode.version:
            return  # others joined or left since, so the end is at another time
        active = decode.pop()
        tbt_s = (now_s - active.decode_from_s) / active.request.output_tokens
        self._forecast.end(str(active.request.idx))
        self._lengths.observe(TENANT, active.request.output_tokens, is_cut=False)
        kept = active.ttft_s <= SLO_TTFT_S and tbt_s <= SLO_TBT_S
        self._counts.outcomes["completed in time" if kept else "completed late"] += 1
        self._counts.prompt_tokens_in_time += active.request.prompt_tokens if kept else 0
        self._await_end(decode)

    def _sample(self, now_s: float) -> None:
        queue_s = max(0.0, max(self._free_s) - now_s)
        step_s = statistics.mean(decode.token_s() for decode in self._decodes)
        self._counts.loads.append((queue_s / SLO_TTFT_S, step_s / SLO_TBT_S))


def load_trace(directory: Path) -> list[Request]:
    """Raises: SystemExit when the file is not there."""
    path = next((p for p in (directory / FILE_NAME, directory / f"{FILE_NAME}.gz") if p.exists()), None)
    if path is None:
        raise SystemExit(
            f"--traces {directory} has no {FILE_NAME} (.gz or not); it is in FAST25-release/traces of "
            "https://github.com/kvcache-ai/Mooncake"
        )
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = [json.loads(line) for line in text.splitlines()]
    return [
        Request(idx, line["timestamp"] / 1e3, line["input_length"], line["output_length"], line["hash_ids"])
        for idx, line in enumerate(lines)
    ]


def requests_of(case: Case, trace: Sequence[Request]) -> list[Request]:
    faster = [dataclasses.replace(request, arrival_s=request.arrival_s / case.speed) for request in trace]
    if case.workload == "conversation":
        return faster
    return [
        dataclasses.replace(request, prompt_tokens=EQUAL_PROMPT_TOKENS, block_ids=[-1 - request.idx])
        for request in faster
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="directory of the traces")
    args = parser.parse_args()
    trace = load_trace(args.traces)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for case in CASES:
        requests = requests_of(case, trace)
        rows[case.name] = {mode: Simulation(case, requests, mode).run().row() for mode in ADMISSION_MODES}
        print(f"{case.name}, {len(requests)} requests", file=sys.stderr)
        for mode, row in rows[case.name].items():
            print(f"  {mode:10} {row}", file=sys.stderr)
    print_result({"simulated": True, "requests": len(trace), "cases": rows, **machine()})


if __name__ == "__main__":
    main()
