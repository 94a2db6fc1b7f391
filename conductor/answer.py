"""An answer as it grows: tokens in, text and deltas out, up to the token or the text that ends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from conductor.stop_strings import StopMatcher
from conductor.tokenizer import Tokenizer
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams
from moontide.timeline import TtftParts


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class OutputToken(NamedTuple):
    token: SampledToken
    output_idx: int
    text_offset: int
    """Characters of the answer before this token."""


@dataclass(kw_only=True, slots=True)
class OutputDelta:
    """What became known of an answer. The last one, and only it, has a finish_reason. Nobody changes it; it is not frozen, because
    it is made for every token, and that takes a frozen one three times as long."""

    text: str
    tokens: tuple[OutputToken, ...]
    usage: Usage
    """So far."""
    finish_reason: FinishReason | None = None
    ttft_parts: TtftParts | None = None
    """With the first token."""


class Answer:
    """Tokens of an answer turned into text, up to the token or the text that ends it."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, stop: tuple[str, ...]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopMatcher(stop)
        self._sampling = sampling
        self._num_chars = 0
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    def add(self, token: SampledToken) -> tuple[str, OutputToken]:
        """Take one more token; returns the text that became final."""
        output_idx = len(self.token_ids)
        out = OutputToken(token, output_idx, self._num_chars)
        self.token_ids.append(token.token_id)
        raw = self._detokenizer.step(token.token_id)
        self._num_chars += len(raw)
        text = self._stop.feed(raw)
        self.finish_reason = self._sampling.finish_reason(token.token_id, output_idx)
        if self.finish_reason is not None and self._stop.matched is None:
            text += self._stop.feed(self._detokenizer.flush())
        if self._stop.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is not None:
            text += self._stop.flush()
        return text, out

    def finish(self, reason: FinishReason) -> str:
        """End it from outside; returns the text that was held back."""
        text = self._stop.feed(self._detokenizer.flush())
        self.finish_reason = FinishReason.STOP if self._stop.matched is not None else reason
        return text + self._stop.flush()
