"""How long a pipeline stage takes for a step, and a pipeline for a prompt (pure; no clock, no sockets).

    t(c, p) = overhead + A max(c, knee) + B c (p + c/2)      seconds of one stage for c tokens after p

Prefill is a sum of such steps: A counts what every token costs, B what every (query, key) pair costs, and below the knee a
step is bound by reading the weights. Why this model and this fit: docs/decisions/004-step-model.md. The makespan is that of
TeraPipe, arXiv:2102.07988, equation 5.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_OUTLIER = 3.0
"""Samples further from the fit than so many typical deviations are slow moments of the machine, and left out."""
_ORDINARY = 0.05
"""Samples no further from the fit than this are no outliers, however near the others are."""
_KNEE_GAIN = 0.9
"""A knee counts when it leaves at most this share of the mean error."""
_VARIED = 2.0
"""Steps tell overhead and tokens apart when the largest has so many times the tokens of the smallest."""
_STIFFNESS = 0.1
"""How much a re-fit holds on to the proportions of the first model: as much as so many samples."""
_ROUNDING = 1e-9
"""Relative: what is not further below the knee than this is at the knee."""
_LEAST_SHARE = 0.1
"""A smaller part of a step's time changes as easily as one of so much, so that one measured as nothing can grow."""


@dataclass(frozen=True)
class StepShape:
    """What the time of a step depends on."""

    tokens: int
    """Rows of the step, all prompts together."""
    pairs: float
    """(query, key) pairs: c (p + c/2) for each chunk."""

    @classmethod
    def of_chunk(cls, num_tokens: int, prefix_tokens: int) -> StepShape:
        return cls(num_tokens, num_tokens * (prefix_tokens + num_tokens / 2))

    @classmethod
    def of_chunks(cls, chunks: Iterable[tuple[int, int]]) -> StepShape:
        """Of several chunks that share a step: (tokens, tokens before them) each."""
        return sum(itertools.starmap(cls.of_chunk, chunks), cls(0, 0.0))

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(self.tokens + other.tokens, self.pairs + other.pairs)


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """t(c, p) of one stage."""

    overhead_s: float
    """Seconds of every step, however small."""
    token_s: float
    """Seconds per token."""
    pair_s: float
    """Seconds per (query, key) pair."""
    knee_tokens: int = 0
    """Fewer tokens take as long as this many."""

    def time_s(self, shape: StepShape) -> float:
        return self.overhead_s + self.token_s * max(shape.tokens, self.knee_tokens) + self.pair_s * shape.pairs

    def work_s(self, shape: StepShape) -> float:
        """The part that counts however the shape is cut into steps."""
        return self.token_s * shape.tokens + self.pair_s * shape.pairs

    def tokens_within(self, budget_s: float, prefix_tokens: int) -> float:
        """The most tokens after a prefix whose step takes no longer; infinite if tokens cost nothing, 0 if none fit."""
        left_s = budget_s - self.overhead_s
        tokens = _positive_root(self.pair_s / 2, self.token_s + self.pair_s * prefix_tokens, left_s)
        if tokens >= self.knee_tokens * (1 - _ROUNDING):
            return tokens
        return _positive_root(self.pair_s / 2, self.pair_s * prefix_tokens, left_s - self.token_s * self.knee_tokens)

    def num_steps(self, step_s: float, first_token: int, end_token: int) -> float:
        """Steps of that time which tokens [first_token, end_token) of a prompt take; not rounded, infinite if none fits.

        steps of a knee or more        | steps below the knee: each pays for all of it
        first_token ............ border .............................. end_token
        """
        pairs_s = step_s - self.overhead_s - self.token_s * self.knee_tokens
        knee_pairs_s = self.pair_s * self.knee_tokens
        is_at_knee = not self.pair_s and pairs_s > -_ROUNDING * step_s
        border: float = end_token if pairs_s > 0 or is_at_knee else first_token
        if pairs_s > 0 and knee_pairs_s > 0:
            border = min(max(pairs_s / knee_pairs_s - self.knee_tokens / 2, first_token), end_token)
        above = (border - first_token) * (self.token_s + self.pair_s * (border + first_token) / 2)
        below = (end_token - border) * self.pair_s * (end_token + border) / 2
        if border < end_token and pairs_s <= 0:
            return math.inf
        return (above / (step_s - self.overhead_s) if above else 0.0) + (below / pairs_s if below else 0.0)


@dataclass(frozen=True)
class StepSample:
    """A step that ran."""

    shape: StepShape
    time_s: float


def makespan_s(steps: Sequence[StepShape], stages: Sequence[StepModel]) -> float:
    """When the last of some steps leaves the last stage."""
    return makespan_of_times_s([[stage.time_s(shape) for shape in steps] for stage in stages])


def makespan_of_times_s(stages: Sequence[Sequence[float]]) -> float:
    """The same for known times of every step on every stage: each waits for the stage and for the step before it there."""
    ends = [0.0] * len(stages[0]) if stages else []
    for times_s in stages:
        free_s = 0.0
        for idx, time_s in enumerate(times_s):
            free_s = ends[idx] = max(free_s, ends[idx]) + time_s
    return ends[-1] if ends else 0.0


def best_num_chunks(*, num_stages: int, work_s: float, overhead_s: float) -> float:
    """Chunks of one prompt that make its makespan shortest; not rounded, below 1 when one chunk is best.

    More chunks fill the pipeline sooner, and each costs its overhead: T(m) = (W/P) (1 + (P-1) / m) + (m + P - 1) tau.

    Args:
        work_s: W, the time of the whole model for the prompt, all stages together.
    """
    if work_s <= 0 or num_stages == 1:
        return 0.0
    return math.sqrt((num_stages - 1) * work_s / (num_stages * overhead_s)) if overhead_s > 0 else math.inf


def fit(samples: Collection[StepSample]) -> StepModel:
    """The model with the least relative errors. Needs at least one sample; better with varied tokens and prefixes.

    Errors are relative, so that short steps count as much as long ones. No part is negative.
    """
    assert samples, "nothing to fit"
    best, best_error = _fit_with_knee(samples, 0)
    flat_error = best_error
    for knee_tokens in sorted({sample.shape.tokens for sample in samples})[:-1]:
        model, error = _fit_with_knee(samples, knee_tokens)
        if error < best_error and error <= _KNEE_GAIN * flat_error:
            best, best_error = model, error
    return best


class OnlineFit:
    """A stage's model that follows the steps that really ran."""

    def __init__(self, start: StepModel | None, *, window: int = 64, refit_every: int = 8) -> None:
        """
        Args:
            start: what was measured beforehand; None: the first steps are the measurement, half a window that is varied enough.
            window: the last steps that count.
        """
        self.model = start
        """None until there is something to go by."""
        self._first = start
        self._samples: deque[StepSample] = deque(maxlen=window)
        self._samples_needed = window // 2
        self._refit_every = refit_every
        self._num_new = 0

    def add(self, sample: StepSample) -> None:
        """A step ran; every so often the model changes."""
        if sample.time_s <= 0:
            return
        self._samples.append(sample)
        self._num_new += 1
        if self._num_new < self._refit_every:
            return
        self._num_new = 0
        if self._first is not None:
            self.model = _refit(self._first, self._samples)
        elif len(self._samples) >= self._samples_needed and _are_varied(self._samples):
            self.model = self._first = fit(self._samples)

    def error(self, sample: StepSample) -> float:
        """(predicted - actual) / actual of a step that is not added yet. Needs a model."""
        assert self.model is not None, "nothing predicts yet"
        return self.model.time_s(sample.shape) / sample.time_s - 1


def _are_varied(samples: Collection[StepSample]) -> bool:
    """Whether a fit can tell the parts apart: three kinds of steps, some small and some large."""
    tokens = sorted(sample.shape.tokens for sample in samples)
    some = len(tokens) // 16
    return len({sample.shape for sample in samples}) >= 3 and tokens[-1 - some] >= _VARIED * tokens[some]


def _positive_root(square: float, linear: float, value: float) -> float:
    """x >= 0 with square x^2 + linear x = value, written so that a small square loses no digits."""
    if value <= 0:
        return 0.0
    divisor = linear + math.sqrt(linear * linear + 4 * square * value)
    return 2 * value / divisor if divisor > 0 else math.inf


def _columns(samples: Collection[StepSample], knee_tokens: int) -> NDArray[np.float64]:
    """[samples, 3]: what overhead_s, token_s and pair_s are multiplied with."""
    return np.array([[1.0, max(each.shape.tokens, knee_tokens), each.shape.pairs] for each in samples])


def _fit_with_knee(samples: Collection[StepSample], knee_tokens: int) -> tuple[StepModel, float]:
    """The best model with that knee, and its mean relative error over all samples, those that its fit left out too."""
    times = np.array([each.time_s for each in samples])
    relative = _columns(samples, knee_tokens) / times[:, None]
    kept = np.ones(len(samples), dtype=bool)
    for _ in range(3):
        found = _non_negative(relative[kept])
        errors = relative @ found - 1
        kept = _are_ordinary(errors)
    overhead_s, token_s, pair_s = (float(value) for value in found)
    return StepModel(overhead_s=overhead_s, token_s=token_s, pair_s=pair_s, knee_tokens=knee_tokens), float(
        np.mean(np.abs(errors))
    )


def _are_ordinary(errors: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.abs(errors) <= max(_OUTLIER * float(np.median(np.abs(errors))), _ORDINARY)


def _non_negative(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least |relative x - 1|: the best of the solutions in which some parts are zero."""
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    best, best_error = np.zeros(3), math.inf
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
        columns = list(used)
        found, *_ = np.linalg.lstsq(relative[:, columns] / scale[columns], np.ones(len(relative)), rcond=1e-10)
        error = float(np.sum((relative[:, columns] / scale[columns] @ found - 1) ** 2))
        if (found >= 0).all() and error < best_error * (1 - 1e-9):
            best, best_error = np.zeros(3), error
            best[columns] = found / scale[columns]
    return best


def _refit(model: StepModel, samples: Collection[StepSample]) -> StepModel:
    """A model moved towards some samples. Its proportions change only as far as the samples tell them apart."""
    times = np.array([each.time_s for each in samples])
    columns = _columns(samples, model.knee_tokens)
    parts = np.array([model.overhead_s, model.token_s, model.pair_s])
    parts = parts * np.median(times / np.maximum(columns @ parts, 1e-12))
    units = np.maximum(parts, _LEAST_SHARE * np.median(times[:, None] / np.maximum(columns, 1e-12), axis=0))
    shares = columns * units / times[:, None]
    errors = 1 - columns @ parts / times
    kept = _are_ordinary(errors)
    shares, errors = shares[kept], errors[kept]
    change = np.linalg.solve(shares.T @ shares + _STIFFNESS * np.eye(3), shares.T @ errors)
    overhead_s, token_s, pair_s = (float(value) for value in np.maximum(parts + change * units, 0.0))
    return dataclasses.replace(model, overhead_s=overhead_s, token_s=token_s, pair_s=pair_s)
