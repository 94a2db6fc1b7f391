"""StepTimes: how long steps take, learnt from those that ran, and what a request would make of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_node.metrics import DecodeMetrics
from decode_node.step_plan import LEAST_CHUNK_TOKENS, PromptPart, decode_shape, prefill_time_s
from moontide.errors import Declined
from moontide.perf_model import OnlineFit, StepModel, StepSample, StepShape


@dataclass(frozen=True)
class Decoding:
    """A request that gets a token from every step."""

    context_tokens: int
    tbt_slo_s: float | None


class StepTimes:
    """Without a model there are no predictions, and nobody is declined for them."""

    def __init__(self, start: StepModel | None, *, max_batch: int, chunk_tokens: int, metrics: DecodeMetrics) -> None:
        """`start` is what is known beforehand."""
        self._fit = OnlineFit(start)
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._metrics = metrics

    @property
    def model(self) -> StepModel | None:
        """May be read in any thread."""
        return self._fit.model

    def add(self, shape: StepShape, time_s: float) -> None:
        """A step ran."""
        sample = StepSample(shape, time_s)
        if self.model is not None and time_s > 0:
            self._metrics.step_prediction_error.observe(self._fit.error(sample))
        self._fit.add(sample)

    def check(self, running: Sequence[Decoding], wanted: Decoding, *, prompt: PromptPart | None = None) -> None:
        """Raise Declined if steps would take longer than one of `running`, or the request itself, bears.

        Args:
            wanted: the request that would run too.
            prompt: what it would have computed here before.
        """
        model = self.model
        if model is None:
            return
        slo_s = _strictest(running)
        if prompt is not None and slo_s is not None:
            chunk = StepShape.of_chunk(min(LEAST_CHUNK_TOKENS, prompt.end - prompt.start), prompt.start)
            _decline_above(slo_s, model.time_s(self._shape(running) + chunk), "with the smallest chunk of its prompt")
        everybody = [*running, wanted]
        slo_s = _strictest(everybody)
        if slo_s is not None:
            _decline_above(slo_s, model.time_s(self._shape(everybody)), f"of {len(everybody)} requests")

    def prefill_s(self, prompts: Sequence[PromptPart], running: Sequence[Decoding]) -> float:
        """How long it takes to compute prompts beside these requests; 0 while nothing predicts."""
        model = self.model
        if model is None:
            return 0.0
        return prefill_time_s(
            prompts,
            self._shape(running),
            model=model,
            chunk_tokens=self._chunk_tokens,
            tbt_slo_s=_strictest(running),
        )

    def report(self) -> dict[str, float]:
        model = self.model
        if model is None:
            return {}
        return {
            "step_overhead_s": model.overhead_s,
            "step_token_s": model.token_s,
            "step_pair_s": model.pair_s,
            "step_knee_tokens": float(model.knee_tokens),
        }

    def _shape(self, running: Sequence[Decoding]) -> StepShape:
        return decode_shape((each.context_tokens for each in running), max_batch=self._max_batch)


def _strictest(running: Sequence[Decoding]) -> float | None:
    return min((each.tbt_slo_s for each in running if each.tbt_slo_s is not None), default=None)


def _decline_above(slo_s: float, step_s: float, what: str) -> None:
    if step_s > slo_s:
        raise Declined(
            f"a step {what} is expected to take {step_s * 1e3:.1f} ms, and the strictest TBT SLO in it is {slo_s * 1e3:.1f} ms; "
            "choose another decode instance, or wait until this one has less to do"
        )
