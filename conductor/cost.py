"""What a placement of a request is expected to cost, and what is learnt from what it did cost (pure; no clock, no sockets).

    TTFT = wait (queue, and what of the fetch does not hide behind it) + prefill (makespan of the chunk plan) + the way there and back
    TBT  = one step of the decode batch with the request in it

Nodes report their queues and step models; the formulas work on columns, one entry per node, because a decision compares them all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Set
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.float64]
"""One number per node, or one for all."""

_MEMORY = 0.9
"""What one more outcome leaves of the weight of those before it."""
_TRUST_S = 0.05
"""So many seconds of agreement are assumed of a node before its first outcome, so that a few milliseconds teach little."""
_NO_WAIT = 0.1
"""A predicted wait below this share of the prefill is none."""
_GAIN, _FAR_OFF = 0.2, 0.25
"""How much of an error in a prefill is taken over, and the largest error that counts; both of the logarithm."""
_MOST = 4.0
"""A correction is no larger than this and no smaller than its inverse: beyond it something else is wrong."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one request on chosen nodes. Seconds; all 0 while no node has reported how long its steps take."""

    queue_s: float = 0.0
    """Arrival at the node to its first chunk, apart from the fetch."""
    fetch_s: float = 0.0
    """KV of the prefix hit on its way, as far as it does not hide behind the queue."""
    prefill_s: float = 0.0
    dispatch_s: float = 0.0
    """To the node and the first token's way back."""
    handoff_s: float = 0.0
    """Last chunk computed to decode's first step; part of the time between the first two tokens."""
    tbt_s: float = 0.0
    """Between two tokens of the answer, mean."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s + self.dispatch_s

    @property
    def is_known(self) -> bool:
        """Whether there was anything to predict from."""
        return self.prefill_s > 0


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a request is held to; None: no bound."""

    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened of it; None: it has not."""

    queue_s: float | None = None
    fetch_s: float | None = None
    prefill_s: float | None = None
    """The first three come together, from the node."""
    dispatch_s: float | None = None
    handoff_s: float | None = None
    tbt_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        if self.queue_s is None or self.fetch_s is None or self.prefill_s is None:
            return None
        return self.queue_s + self.fetch_s + self.prefill_s + (self.dispatch_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What a node's predictions are multiplied with."""

    wait: float = 1.0
    """Of the queue."""
    fetch: float = 1.0
    prefill: float = 1.0
    handoff: float = 1.0
    tbt: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What was predicted of a request, and the nodes that are to blame when it is wrong."""

    prefill_node_id: str
    """Who computes the prompt: a prefill group, or the decode instance itself."""
    decode_node_id: str
    busy_s: float
    """Expected time that the prompt keeps the slowest stage, or the decode instance, busy."""
    prediction: Prediction
    corrections: Corrections
    """That the prediction contains."""


class CostModel:
    """Learns from outcomes how far each node's predictions are off, and by what factor to correct them.

    prefill  what is usual for prompts that found an idle node. Others share its steps, and the nodes' timings do not tell their time
             from that of the prompt: a prompt that shares every step with another one computes twice as long and waits for nothing.
    wait     all that the others took longer than their corrected prefill, against the predicted queue
    wait, fetch, hand-off and TBT are ratios of two sums that fade alike, of what happened and of what was predicted before any correction:
    that a wait of 1 ms took 3 says nothing about one of a second.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str], _Ratio] = {}
        self._prefills: dict[str, _Usual] = {}
        self._dispatch = _Mean()
        self._busy = _Mean()

    @property
    def dispatch_s(self) -> float:
        """To a node and back, lately."""
        return self._dispatch.value

    @property
    def usual_prefill_s(self) -> float:
        """How long a prompt was expected to keep a group busy, lately; 0 before the first one."""
        return self._busy.value

    def corrections(self, node_id: str) -> Corrections:
        return Corrections(
            wait=self._factor(node_id, "wait"),
            fetch=self._factor(node_id, "fetch"),
            prefill=self._prefills[node_id].value if node_id in self._prefills else 1.0,
            handoff=self._factor(node_id, "handoff"),
            tbt=self._factor(node_id, "tbt"),
        )

    def observe(self, placed: Placed, outcome: Outcome) -> None:
        """Take over what happened; parts that have not are left out, and so is what nothing was predicted for."""
        predicted, used = placed.prediction, placed.corrections
        if outcome.queue_s is not None and outcome.fetch_s is not None and outcome.prefill_s is not None:
            self._busy.add(placed.busy_s)
            self._learn_ttft(placed, outcome.queue_s + outcome.prefill_s, outcome.fetch_s)
        if outcome.dispatch_s is not None:
            self._dispatch.add(outcome.dispatch_s)
        if outcome.handoff_s is not None:
            self._compare(placed.prefill_node_id, "handoff", predicted.handoff_s / used.handoff, outcome.handoff_s)
        if outcome.tbt_s is not None:
            self._compare(placed.decode_node_id, "tbt", predicted.tbt_s / used.tbt, outcome.tbt_s)

    def keep_only(self, node_ids: Set[str]) -> None:
        """Forget the nodes that are gone."""
        for node_id, part in [key for key in self._ratios if key[0] not in node_ids]:
            del self._ratios[node_id, part]
        for node_id in self._prefills.keys() - node_ids:
            del self._prefills[node_id]

    def _learn_ttft(self, placed: Placed, took_s: float, fetched_s: float) -> None:
        """`took_s`: all but the fetch."""
        predicted, used, node_id = placed.prediction, placed.corrections, placed.prefill_node_id
        if not predicted.is_known:
            return
        if predicted.queue_s <= _NO_WAIT * predicted.prefill_s:
            usual = self._prefills.setdefault(node_id, _Usual())
            usual.add((took_s - predicted.queue_s) / (predicted.prefill_s / used.prefill))
            self._compare(node_id, "fetch", predicted.fetch_s / used.fetch, fetched_s)
        else:
            waited_s = max(0.0, took_s - predicted.prefill_s)
            self._compare(node_id, "wait", predicted.queue_s / used.wait, waited_s)

    def _factor(self, node_id: str, part: str) -> float:
        ratio = self._ratios.get((node_id, part))
        return ratio.value if ratio is not None else 1.0

    def _compare(self, node_id: str, part: str, predicted_s: float, actual_s: float) -> None:
        if predicted_s > 0:
            self._ratios.setdefault((node_id, part), _Ratio()).add(predicted_s, actual_s)


class _Usual:
    """Follows the middle of some ratios: how far one is off counts up to a bound."""

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def value(self) -> float:
        return math.exp(self._log)

    def add(self, ratio: float) -> None:
        off = math.log(max(ratio, 1e-9)) - self._log
        limit = math.log(_MOST)
        self._log = min(max(self._log + _GAIN * min(max(off, -_FAR_OFF), _FAR_OFF), -limit), limit)


class _Ratio:
    def __init__(self) -> None:
        self._predicted_s = self._actual_s = _TRUST_S

    @property
    def value(self) -> float:
        return min(max(self._actual_s / self._predicted_s, 1 / _MOST), _MOST)

    def add(self, predicted_s: float, actual_s: float) -> None:
        self._predicted_s = self._predicted_s * _MEMORY + predicted_s
        self._actual_s = self._actual_s * _MEMORY + actual_s


class _Mean:
    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, value: float) -> None:
        self._sum = self._sum * _MEMORY + value
        self._weight = self._weight * _MEMORY + 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps:
    """Step models of many nodes, moontide.perf_model.StepModel by columns."""

    overhead_s: Column
    token_s: Column
    pair_s: Column
    knee_tokens: Column

    def time_s(self, tokens: Column | float, pairs: Column | float) -> Column:
        """Of one step."""
        time_s: Column = self.overhead_s + self.token_s * np.maximum(tokens, self.knee_tokens) + self.pair_s * pairs
        return time_s

    def take(self, rows: NDArray[np.intp]) -> Steps:
        """Of some of the nodes."""
        return Steps(
            overhead_s=self.overhead_s[rows],
            token_s=self.token_s[rows],
            pair_s=self.pair_s[rows],
            knee_tokens=self.knee_tokens[rows],
        )


class Pipelines:
    """What prefill groups need to know of themselves to say how long a prompt takes."""

    def __init__(
        self,
        steps: Steps,
        *,
        num_stages: Column,
        chunk_tokens: Column,
        least_tokens: Column,
        max_step_s: Column,
    ) -> None:
        """
        Args:
            steps: of each group's slowest stage.
            chunk_tokens: most tokens of a chunk.
            least_tokens: smaller chunks are not made: a block, or the knee.
        """
        self._steps = steps
        self._num_filling = num_stages - 1
        self._chunks_per_token = 1 / chunk_tokens
        self._most_chunks_per_token = 1 / least_tokens
        longest_step_s = np.maximum(max_step_s, steps.time_s(least_tokens, 0.0))
        self._steps_per_s = 1 / np.maximum(longest_step_s - steps.overhead_s, 1e-9)
        self._squared_chunks_per_s = self._num_filling / np.maximum(steps.overhead_s, 1e-9)

    def times_s(self, num_tokens: int, first_token: Column | float) -> tuple[Column, Column]:
        """(makespan, time that the slowest stage is busy) of tokens [first_token, num_tokens) of a prompt, alone in each group.

        The plan of prefill_node/chunking.py in closed form: m chunks of equal time, T(m) = (m + P - 1) t(n/m), with the best m that the
        limits of a chunk leave (moontide/perf_model.py: best_num_chunks).
        """
        tokens = num_tokens - first_token
        pairs = tokens * (first_token + tokens / 2)
        work_s = self._steps.token_s * tokens + self._steps.pair_s * pairs
        fewest = np.ceil(np.maximum(tokens * self._chunks_per_token, work_s * self._steps_per_s))
        best = np.minimum(np.sqrt(work_s * self._squared_chunks_per_s), tokens * self._most_chunks_per_token)
        num_chunks = np.maximum(np.rint(best), fewest)
        chunk_s = self._steps.time_s(tokens / num_chunks, pairs / num_chunks)
        busy_s = chunk_s * num_chunks
        return busy_s + chunk_s * self._num_filling, busy_s

    def take(self, rows: NDArray[np.intp]) -> Pipelines:
        """Of some of the groups."""
        taken = copy.copy(self)
        for name, value in vars(self).items():
            setattr(taken, name, value.take(rows))
        return taken
