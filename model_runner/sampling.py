"""Logits -> token ids. A draw depends on the row's logits, its parameters and (seed, output index), and on nothing else.

So prefill, decode and a node that takes a request over draw the same token, in any batch, and nothing about the state of
a sampler has to travel.

Tensor shapes: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moontide.errors import Internal
from moontide.sampling_params import SampledToken, SamplingParams


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], output_idx: Sequence[int]
) -> list[SampledToken | Internal]:
    """Draw one token per row. A row whose logits are NaN or infinite gives an error in its place, and no other row notices.

    Args:
        logits_BV: [B, V] raw logits of the model; -inf rules a token out.
        output_idx: position of the token in its request's output, from 0.
    Returns: tokens with the log-probabilities that were asked for; these are the model's own, before temperature,
        top_k and top_p. Greedy rows (temperature 0) take the most likely token, the lowest id of several.
    """
    assert logits_BV.shape[0] == len(params) == len(output_idx)
    rows = zip(logits_BV.float().cpu(), params, output_idx, strict=True)
    return [_sample_row(logits_V, row_params, idx) for logits_V, row_params, idx in rows]


def _sample_row(logits_V: Tensor, params: SamplingParams, output_idx: int) -> SampledToken | Internal:
    peak = float(logits_V.max())
    if not math.isfinite(peak):
        what = "NaN" if math.isnan(peak) else "infinite"
        return Internal(
            f"the model gave {what} logits for token {output_idx} of the answer, so none can be drawn; check its weights and dtype"
        )
    token_id = _greedy(logits_V, peak) if params.temperature == 0 else _draw(logits_V, params, output_idx)
    if params.logprobs is None:
        return SampledToken(token_id=token_id)
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    return SampledToken(
        token_id=token_id, logprob=float(logprobs_V[token_id]), top_logprobs=_most_likely(logprobs_V, params.logprobs)
    )


def _greedy(logits_V: Tensor, peak: float) -> int:
    """The lowest id among the largest logits; torch.argmax does not promise which of equal ones it returns."""
    return int(torch.nonzero(logits_V == peak)[0, 0])


def _draw(logits_V: Tensor, params: SamplingParams, output_idx: int) -> int:
    """Invert the distribution that temperature, top_k and top_p leave, at this draw's uniform number."""
    logits = logits_V.numpy().astype(np.float64)
    order = _candidates(logits, params)
    weights = np.exp((logits[order] - logits.max()) / params.temperature)
    cumulative = np.cumsum(weights)
    if params.top_p < 1:
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:kept]
    drawn = np.searchsorted(cumulative, _uniform(params.seed, output_idx) * cumulative[-1], side="right")
    return int(order[min(int(drawn), len(cumulative) - 1)])


def _candidates(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.intp]:
    """Ids that may be drawn, in an order that depends on the logits alone; by likelihood where a cut needs that.

    Sorting a whole vocabulary takes milliseconds, so it is done for top_p only.
    """
    if not params.top_k:
        return np.arange(len(logits)) if params.top_p == 1 else np.argsort(-logits, kind="stable")
    count = min(params.top_k, len(logits))
    weakest = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= weakest)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def _uniform(seed: int, output_idx: int) -> float:
    """Number in [0, 1) that belongs to (seed, output_idx): a counter-based generator, keyed by seed, at that counter."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, output_idx])).random())


def _most_likely(logprobs_V: Tensor, count: int) -> list[tuple[int, float]]:
    order = np.argsort(-logprobs_V.numpy(), kind="stable")[:count]
    return [(int(token_id), float(logprobs_V[token_id])) for token_id in order]
