"""How long a pipeline stage takes for a step, and a pipeline for a prompt (pure; no clock, no sockets).

    t(c, p) = overhead + A max(c, knee) + B c (p + c/2)      seconds of one stage for c tokens after p

Prefill is a sum of such steps: A counts what every token costs, B what every (query, key) pair costs, and below the knee
a step is bound by reading the weights. Sources: docs/decisions/004-step-model.md; TeraPipe, arXiv:2102.07988, for the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass


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
