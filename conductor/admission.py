"""Which requests are refused at the door because their SLO would not be met (pure).

off         nobody
per-stage   each stage looks at its own SLO when it begins: prefill at arrival, decode when the first token is there (Mooncake's baseline)
early       both at arrival, with decode as loaded as it is now
predictive  both at arrival, with decode as loaded as it will be when the prompt is computed: with the requests whose prefill is done
            by then, without those that will have decoded as long as their tenant's answers take

Source: Mooncake, arXiv:2407.00079, section 7. Why these and why predictive: docs/decisions/013-admission.md.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conductor.cost import Prediction, Slo
from conductor.view import ClusterView
from moontide.errors import Rejected, RejectReason
from moontide.perf_model import StepModel, StepShape

_LEAST_S = 0.1
"""A request that is not over when it should be is given so much more time at least."""


@dataclass(frozen=True, kw_only=True)
class DecodePool:
    """All decode instances together, as they report themselves."""

    num_instances: int
    requests: float
    """In their batches."""
    context_tokens: float
    """Of those requests."""
    max_batch: float
    """Requests that all batches hold; infinite where no instance says."""
    step: StepModel
    """A decode step of a typical instance."""

    def tbt_s(self, requests: float, prompt_tokens: int) -> float:
        """Between two tokens of a prompt that joins, when so many others of the present mean context are spread evenly.

        Requests that find no room in a batch take turns with those in it.
        """
        others = requests / self.num_instances
        context = prompt_tokens + others * (self.context_tokens / self.requests if self.requests else 0.0)
        crowding = max(1.0, (others + 1) * self.num_instances / self.max_batch)
        rows = (others + 1) / crowding
        return self.step.time_s(StepShape(tokens=max(1, round(rows)), pairs=context / crowding)) * crowding


@lru_cache(maxsize=1)
def pool_of(view: ClusterView) -> DecodePool | None:
    """The decode instances of a view; None while none of them has reported how long its steps take."""
    decode, steps = view.decode, view.decode.steps
    if not decode.is_timed:
        return None
    overhead_s, token_s, pair_s = (
        float(np.median(part_s * decode.tbt_factor)) for part_s in (steps.overhead_s, steps.token_s, steps.pair_s)
    )
    return DecodePool(
        num_instances=len(decode.records),
        requests=sum(record.load.get("running", 0.0) for record in decode.records),
        context_tokens=float(decode.context_tokens.sum()),
        max_batch=float(decode.max_batch.sum()),
        step=StepModel(
            overhead_s=overhead_s, token_s=token_s, pair_s=pair_s, knee_tokens=round(np.median(steps.knee_tokens))
        ),
    )


@dataclass(frozen=True)
class _Decoding:
    starts_s: float
    decode_s: float
    overrun_s: float
    has_started: bool = False

    @property
    def ends_s(self) -> float:
        return self.starts_s + self.decode_s


class DecodeForecast:
    """When this conductor's requests are expected to begin and to end decoding. Times are moments on its clock.

    A request that decodes longer than expected is given its overrun more, and so on. Were it taken for over, batches of long answers, which
    is what batches are made of, would seem empty.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Decoding] = {}
        self._starts_s: list[float] = []
        """Of those that have not started, ascending."""
        self._ends: list[tuple[float, str]] = []
        """Of all, ascending: (moment, request)."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, *, starts_s: float, decode_s: float, overrun_s: float) -> None:
        """A request is admitted that is expected to decode from `starts_s` for `decode_s`, and if it does not end, for `overrun_s` more."""
        self._put(request_id, _Decoding(starts_s, decode_s, overrun_s=max(overrun_s, _LEAST_S)))

    def started(self, request_id: str, now_s: float) -> None:
        """It has its first token."""
        known = self._requests.get(request_id)
        if known is not None and not known.has_started:
            self._put(request_id, dataclasses.replace(known, starts_s=now_s, has_started=True))

    def end(self, request_id: str) -> None:
        """It is over, however; one that is not known is no error."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return
        del self._ends[bisect_left(self._ends, (known.ends_s, request_id))]
        if not known.has_started:
            del self._starts_s[bisect_left(self._starts_s, known.starts_s)]

    def change_until(self, at_s: float, *, now_s: float) -> int:
        """Requests that begin to decode from now to that moment, less those that are through with it by then."""
        while self._ends and self._ends[0][0] <= now_s:
            request_id = self._ends[0][1]
            late = self._requests[request_id]
            self._put(request_id, dataclasses.replace(late, decode_s=late.decode_s + late.overrun_s))
        return bisect_right(self._starts_s, at_s) - bisect_right(self._ends, at_s, key=_moment)

    def when_within(self, slo_s: float, pool: DecodePool, prompt_tokens: int, now_s: float) -> float | None:
        """About how many seconds from now the pool is expected to keep that bound with such a prompt; None: nothing says so."""

        def is_within(end: tuple[float, str]) -> bool:
            requests = max(0.0, pool.requests + self.change_until(_moment(end), now_s=now_s))
            return pool.tbt_s(requests, prompt_tokens) <= slo_s

        self.change_until(now_s, now_s=now_s)
        first = bisect_left(self._ends, True, key=is_within)
        return _moment(self._ends[first]) - now_s if first < len(self._ends) else None

    def check_invariants(self) -> None:
        ends = sorted((each.ends_s, request_id) for request_id, each in self._requests.items())
        assert self._ends == ends, "ends are not those of the requests"
        waiting = [each for each in self._requests.values() if not each.has_started]
        assert self._starts_s == sorted(each.starts_s for each in waiting), (
            "starts are not those of the waiting requests"
        )

    def _put(self, request_id: str, decoding: _Decoding) -> None:
        self.end(request_id)
        self._requests[request_id] = decoding
        insort(self._ends, (decoding.ends_s, request_id))
        if not decoding.has_started:
            insort(self._starts_s, decoding.starts_s)


@dataclass(frozen=True, kw_only=True)
class Admitted:
    ttft_s: float
    """As expected."""
    tbt_s: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    reason: RejectReason
    message: str
    retry_after_s: float | None
    """When the same request would be taken, if nothing else comes; None: not known."""

    def error(self) -> Rejected:
        return Rejected(self.message, reason=self.reason, retry_after_s=self.retry_after_s)


def judge(
    mode: str,
    prediction: Prediction,
    slo: Slo,
    *,
    prompt_tokens: int,
    pool: DecodePool | None,
    forecast: DecodeForecast,
    now_s: float,
) -> Admitted | Refused:
    """Decide at the arrival of a request.

    Args:
        prediction: on the nodes that the router chose, with what the request waits for before it is dispatched in `queue_s`.
        pool: the decode instances, which count as a whole, because each is as good as another until one is chosen anew; None for a
            request that decodes nothing, and while nothing is known of them.
    """
    change = forecast.change_until(now_s + prediction.ttft_s, now_s=now_s) if mode == "predictive" else 0
    tbt_s = pool.tbt_s(max(0.0, pool.requests + change), prompt_tokens) if pool is not None else prediction.tbt_s
    if mode != "off" and slo.ttft_s is not None and prediction.ttft_s > slo.ttft_s:
        return _refuse_ttft(prediction, slo.ttft_s)
    if mode in ("early", "predictive") and pool is not None and slo.tbt_s is not None and tbt_s > slo.tbt_s:
        return _refuse_tbt(tbt_s, slo.tbt_s, forecast.when_within(slo.tbt_s, pool, prompt_tokens, now_s))
    return Admitted(ttft_s=prediction.ttft_s, tbt_s=tbt_s)


def judge_decode(mode: str, tbt_s: float, slo: Slo) -> Admitted | Refused:
    """Decide when the prompt is computed and decode would begin; only the per-stage mode refuses so late."""
    if mode == "per-stage" and slo.tbt_s is not None and tbt_s > slo.tbt_s:
        return _refuse_tbt(tbt_s, slo.tbt_s, None)
    return Admitted(ttft_s=0.0, tbt_s=tbt_s)


def _refuse_ttft(prediction: Prediction, slo_s: float) -> Refused:
    over_s = prediction.ttft_s - slo_s
    in_time = over_s <= prediction.queue_s
    way_out = f"try again in {over_s:.1f} s" if in_time else "an idle group would not do; shorten the prompt"
    return Refused(
        reason=RejectReason.TTFT_SLO,
        message=f"the first token is expected after {prediction.ttft_s:.2f} s, later than its SLO of {slo_s:.3g} s: "
        f"{way_out} or allow more time",
        retry_after_s=over_s if in_time else None,
    )


def _refuse_tbt(tbt_s: float, slo_s: float, retry_after_s: float | None) -> Refused:
    when = "later" if retry_after_s is None else f"in {retry_after_s:.1f} s"
    return Refused(
        reason=RejectReason.TBT_SLO,
        message=f"tokens are expected every {tbt_s:.4f} s, slower than their SLO of {slo_s:g} s: try again {when} or allow more time",
        retry_after_s=retry_after_s,
    )


def _moment(end: tuple[float, str]) -> float:
    return end[0]
