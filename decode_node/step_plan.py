"""What a step computes beside one token of every running request: chunks of the prompts that this node prefills itself (pure).

    rows of a step   one of each running request | chunk of the oldest prompt | chunk of the next one, if there is room

The running requests wait for the whole step, so chunks are as long as the strictest TBT SLO among them bears
(docs/decisions/017-local-prefill.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moontide.perf_model import StepModel, StepShape

LEAST_CHUNK_TOKENS = 16
"""A prompt gets so many tokens of a step in any case, so that it ends; less is not worth what the others wait for."""


class PromptPart(NamedTuple):
    """Positions [start, end) of a prompt, to be computed."""

    start: int
    end: int


def decode_shape(contexts: Iterable[int], *, max_batch: int) -> StepShape:
    """One token each of requests with so many tokens before it; of more than `max_batch`, the mean step."""
    shape = StepShape.of_chunks((1, context) for context in contexts)
    if shape.tokens <= max_batch:
        return shape
    return StepShape(max_batch, shape.pairs * max_batch / shape.tokens)


def plan_chunks(
    prompts: Sequence[PromptPart],
    decodes: StepShape,
    *,
    model: StepModel | None,
    chunk_tokens: int,
    tbt_slo_s: float | None,
) -> list[int]:
    """Tokens of each prompt in the next step; the first in line go first.

    Args:
        decodes: what the step computes in any case.
        chunk_tokens: most prompt tokens of a step.
        tbt_slo_s: how long the step may take; None, as without a model: as long as `chunk_tokens` take.
    Returns: one number per prompt, 0 for those that wait; the first one is never 0.
    """
    chunks: list[int] = []
    shape, room = decodes, chunk_tokens
    for part in prompts:
        tokens = min(part.end - part.start, room)
        if model is not None and tbt_slo_s is not None:
            least = 0 if chunks else LEAST_CHUNK_TOKENS
            tokens = min(tokens, max(least, _tokens_beside(model, shape, tbt_slo_s, part, tokens)))
        chunks.append(tokens)
        shape += StepShape.of_chunk(tokens, part.start)
        room -= tokens
    return chunks


def prefill_time_s(
    prompts: Sequence[PromptPart],
    decodes: StepShape,
    *,
    model: StepModel,
    chunk_tokens: int,
    tbt_slo_s: float | None,
) -> float:
    """How long it takes until all these prompts are computed, in steps with `decodes`."""
    total_s = 0.0
    parts = [part for part in prompts if part.end > part.start]
    while parts:
        chunks = plan_chunks(parts, decodes, model=model, chunk_tokens=chunk_tokens, tbt_slo_s=tbt_slo_s)
        taken = list(zip(chunks, parts, strict=True))
        total_s += model.time_s(decodes + StepShape.of_chunks((tokens, part.start) for tokens, part in taken))
        parts = [PromptPart(part.start + tokens, part.end) for tokens, part in taken if part.start + tokens < part.end]
    return total_s


def _tokens_beside(model: StepModel, shape: StepShape, step_s: float, part: PromptPart, most: int) -> int:
    """Tokens of the prompt, up to `most`, that a step of `shape` can take in and last no longer than `step_s`."""
    rest = StepModel(
        overhead_s=model.overhead_s + model.work_s(shape),
        token_s=model.token_s,
        pair_s=model.pair_s,
        knee_tokens=max(0, model.knee_tokens - shape.tokens),
    )
    return int(min(most, rest.tokens_within(step_s, part.start)))
