"""Why requests went where they went, and what came of the predictions: kept for the latest ones, logged, counted and learnt from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from conductor.cost import CostModel, Outcome
from conductor.metrics import ConductorMetrics
from conductor.router import Candidate, Choice
from conductor.view import layout_of
from moontide.log import get_logger
from moontide_proto.v1 import moontide_pb2

MAX_REMEMBERED = 512
MAX_DROPPED = 64
"""Dropped nodes that one explanation names."""

log = get_logger(__name__)


@dataclass(kw_only=True)
class _Attempt:
    epoch: int
    choice: Choice
    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(kw_only=True)
class _Explained:
    tenant: str
    prompt_tokens: int
    attempts: list[_Attempt] = field(default_factory=list)
    refused: str = ""


class Explanations:
    """The latest requests by id; the oldest goes first."""

    def __init__(self, cost: CostModel, metrics: ConductorMetrics, max_remembered: int = MAX_REMEMBERED) -> None:
        self._cost = cost
        self._metrics = metrics
        self._max = max_remembered
        self._requests: OrderedDict[str, _Explained] = OrderedDict()

    def begin(self, request_id: str, *, tenant: str, prompt_tokens: int) -> None:
        """Whatever follows of the request needs this first."""
        self._requests.pop(request_id, None)
        self._requests[request_id] = _Explained(tenant=tenant, prompt_tokens=prompt_tokens)
        while len(self._requests) > self._max:
            self._requests.popitem(last=False)

    def refused(self, request_id: str, reason: str) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.refused = reason

    def chosen(self, request_id: str, epoch: int, choice: Choice) -> None:
        """An attempt begins on the chosen nodes."""
        if (request := self._requests.get(request_id)) is not None:
            request.attempts.append(_Attempt(epoch=epoch, choice=choice))

    def happened(self, request_id: str, epoch: int, choice: Choice, outcome: Outcome) -> None:
        """Parts of an attempt's outcome; each part is told once, when it is known."""
        self._cost.observe(choice.placed, outcome)
        predicted = choice.prediction
        ttft_s, tbt_s = outcome.ttft_s, outcome.tbt_s
        if ttft_s and predicted.is_known:
            self._metrics.ttft_error.observe(predicted.ttft_s / ttft_s - 1)
        if tbt_s and predicted.tbt_s:
            self._metrics.tbt_error.observe(predicted.tbt_s / tbt_s - 1)
        log.info(
            "prediction and outcome",
            request_id=request_id,
            epoch=epoch,
            **_pairs("ttft_s", predicted.ttft_s, ttft_s),
            **_pairs("queue_s", predicted.queue_s, outcome.queue_s),
            **_pairs("fetch_s", predicted.fetch_s, outcome.fetch_s),
            **_pairs("prefill_s", predicted.prefill_s, outcome.prefill_s),
            **_pairs("handoff_s", predicted.handoff_s, outcome.handoff_s),
            **_pairs("tbt_s", predicted.tbt_s, tbt_s),
        )
        request = self._requests.get(request_id)
        for attempt in request.attempts if request is not None else ():
            if attempt.epoch == epoch:
                attempt.ttft_s = ttft_s if ttft_s is not None else attempt.ttft_s
                attempt.tbt_s = tbt_s if tbt_s is not None else attempt.tbt_s

    def get(self, request_id: str) -> moontide_pb2.Explanation | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        return moontide_pb2.Explanation(
            request_id=request_id,
            tenant=request.tenant,
            prompt_tokens=request.prompt_tokens,
            attempts=[_attempt(attempt) for attempt in request.attempts],
            refused=request.refused,
        )


def _pairs(name: str, predicted: float, actual: float | None) -> dict[str, float]:
    """Log fields, of what has happened only."""
    return {} if actual is None else {f"predicted_{name}": round(predicted, 4), name: round(actual, 4)}


def _attempt(attempt: _Attempt) -> moontide_pb2.ExplainedAttempt:
    choice = attempt.choice
    return moontide_pb2.ExplainedAttempt(
        epoch=attempt.epoch,
        policy=choice.policy,
        reason=choice.reason,
        chosen=_candidate(choice),
        others=[_candidate(other) for other in choice.others],
        dropped=[
            moontide_pb2.Dropped(node_id=each.node_id, reason=each.reason) for each in choice.dropped[:MAX_DROPPED]
        ],
        ttft_s=attempt.ttft_s or 0.0,
        tbt_s=attempt.tbt_s or 0.0,
    )


def _candidate(candidate: Candidate) -> moontide_pb2.Candidate:
    block_tokens = layout_of(candidate.decode.layout_json).block_tokens
    predicted = candidate.prediction
    return moontide_pb2.Candidate(
        prefill_node_id=candidate.prefill.node_id if candidate.prefill is not None else "",
        decode_node_id=candidate.decode.node_id,
        hit_store_node_id=candidate.hit_store.node_id if candidate.hit_store is not None else "",
        hit_tokens=candidate.hit_blocks * block_tokens,
        copy_tokens=candidate.copy_blocks * block_tokens,
        queue_s=predicted.queue_s,
        fetch_s=predicted.fetch_s,
        prefill_s=predicted.prefill_s,
        dispatch_s=predicted.dispatch_s,
        handoff_s=predicted.handoff_s,
        tbt_s=predicted.tbt_s,
    )
