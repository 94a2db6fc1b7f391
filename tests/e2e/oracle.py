"""One-process transformers as the judge of what a cluster answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from moontide.sampling_params import SampledToken
from tests.fakes.tiny_models import MIN_TOP2_GAP, reference_model

LOGPROB_TOLERANCE = 1e-3


class GreedyOracle:
    """Checks an answer with one forward of the stock model over prompt and answer.

    Greedy decoding is deterministic, so an answer whose every token is the argmax after what comes before it *is* the greedy answer.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = reference_model(model_dir)

    def check(self, prompt: Sequence[int], tokens: Sequence[SampledToken], *, tie: float = 0.0) -> None:
        """Raises: AssertionError naming the first token that is not the stock model's, or whose logprob is off.

        Args:
            tie: tokens whose logit is no further below the best one's pass too, for answers so many that some have ties.
        """
        ids = [*prompt, *(token.token_id for token in tokens)]
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.argmax(-1).tolist()
        answer = [token.token_id for token in tokens]
        if tie:
            gaps = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
            expected = [a if gap <= tie else e for a, e, gap in zip(answer, expected, gaps.tolist(), strict=True)]
        assert answer == expected, f"first difference at output {_first_difference(answer, expected)}"
        logprobs = logits.log_softmax(-1)
        for position, token in enumerate(tokens):
            if token.logprob is not None:
                reference = float(logprobs[position, token.token_id])
                assert abs(token.logprob - reference) <= LOGPROB_TOLERANCE, (position, token.logprob, reference)


class GreedyGenerator:
    """Greedy tokens of transformers' own `generate` in float32, end-of-sequence ignored.

    Its K/V cache is kept from call to call, so that what a prompt shares with the one before is not computed again.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._cache = DynamicCache(config=self._model.config)
        self._cached_ids: list[int] = []
        self._known: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Raises: ValueError if the best two logits come closer than MIN_TOP2_GAP: take another prompt then."""
        key = (max_tokens, *prompt)
        if key not in self._known:
            self._known[key] = self._generate(prompt, max_tokens)
        return self._known[key]

    def _generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        num_other = len(self._cached_ids) - _num_shared(self._cached_ids, prompt[:-1])
        if num_other:
            self._cache.crop(-num_other)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=self._cache,
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        self._cached_ids = output.sequences[0, :-1].tolist()
        best_two = torch.cat(output.logits).float().topk(2).values
        gap = float((best_two[:, 0] - best_two[:, 1]).min())
        if gap < MIN_TOP2_GAP:
            raise ValueError(
                f"the best two logits after a prompt of {len(prompt)} tokens come as close as {gap:.1e}; take another prompt"
            )
        tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
        return tokens


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common start."""
    pairs = zip(first, second, strict=False)
    return next((idx for idx, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _first_difference(answer: Sequence[int], expected: Sequence[int]) -> int:
    return next(idx for idx, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b)
