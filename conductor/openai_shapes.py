"""How answers look in the OpenAI API: one choice of /v1/completions or /v1/chat/completions, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from conductor.answer import OutputDelta, OutputToken, Usage
from conductor.tokenizer import Tokenizer

_to_json = json.JSONEncoder().encode
"""ASCII alone: some clients end a line at U+2028 or U+0085, which JSON would leave as they are."""


class CompletionShape:
    """How answers of /v1/completions look."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self.with_logprobs = with_logprobs

    def opening(self) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        return self._choice(delta.text, delta.tokens, _reason(delta))

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        return self._choice(_text(deltas), _tokens(deltas), _reason(deltas[-1]))

    def _choice(self, text: str, tokens: Sequence[OutputToken], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self.with_logprobs else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        name = self._tokenizer.token_text
        top = []
        for out in tokens:
            # Tokens of equal text (parts of a character) have one place: the sampled one's, then the likeliest one's.
            alternatives = {name(out.token.token_id): out.token.logprob or 0.0}
            for token_id, logprob in out.token.top_logprobs:
                alternatives.setdefault(name(token_id), logprob)
            top.append(alternatives)
        return {
            "tokens": [name(out.token.token_id) for out in tokens],
            "token_logprobs": [out.token.logprob for out in tokens],
            "top_logprobs": top,
            "text_offset": [out.text_offset for out in tokens],
        }


class ChatShape:
    """How answers of /v1/chat/completions look."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self.with_logprobs = with_logprobs

    def opening(self) -> dict[str, Any] | None:
        return {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return {"index": 0, "delta": content, "logprobs": self._logprobs(delta.tokens), "finish_reason": _reason(delta)}

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        message = {"role": "assistant", "content": _text(deltas), "refusal": None}
        logprobs = self._logprobs(_tokens(deltas))
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": _reason(deltas[-1])}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = []
        for out in tokens:
            top = [self._entry(token_id, logprob) for token_id, logprob in out.token.top_logprobs]
            content.append({**self._entry(out.token.token_id, out.token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        token_bytes = list(self._tokenizer.token_bytes(token_id))
        return {"token": self._tokenizer.token_text(token_id), "logprob": logprob, "bytes": token_bytes}


Shape = CompletionShape | ChatShape

_MARK = "\0"
"""Stands for the text where an event is cut; its JSON occurs nowhere else."""
_NO_USAGE = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)


def _text(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _tokens(deltas: Sequence[OutputDelta]) -> list[OutputToken]:
    return [token for delta in deltas for token in delta.tokens]


def _reason(delta: OutputDelta) -> str | None:
    return None if delta.finish_reason is None else delta.finish_reason.value


class ChunkWriter:
    """The events of one stream as bytes. Most differ in their text alone, so what stands around it is written once.

    With include_usage every event has the field; it is null except where usage is due.
    """

    def __init__(
        self, shape: Shape, head: Mapping[str, Any], *, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        self._shape = shape
        self._head = head
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._is_plain = not (shape.with_logprobs or continuous_usage)
        """Whether an event says nothing but text, until the last one."""
        marked_delta = OutputDelta(text=_MARK, tokens=(), usage=_NO_USAGE)
        marked = self._event(shape.chunk(marked_delta), _NO_USAGE).decode()
        self._before, self._after = marked.split(_to_json(_MARK))

    def opening(self, usage: Usage) -> bytes:
        """What comes before the first text."""
        choice = self._shape.opening()
        return b"" if choice is None else self._event(choice, usage)

    def chunk(self, delta: OutputDelta) -> bytes:
        """Empty when there is nothing to tell yet."""
        if delta.finish_reason is None:
            if self._is_plain:
                return f"{self._before}{_to_json(delta.text)}{self._after}".encode() if delta.text else b""
            if not (delta.text or _has_logprobs(delta)):
                return b""
        return self._event(self._shape.chunk(delta), delta.usage)

    def closing(self, usage: Usage) -> bytes:
        """What comes after an answer that is complete."""
        return sse_event({**self._head, "choices": [], "usage": usage_json(usage)}) if self._include_usage else b""

    def _event(self, choice: dict[str, Any], usage: Usage) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = usage_json(usage) if self._continuous_usage else None
        return sse_event(chunk)


def sse_event(value: Mapping[str, Any]) -> bytes:
    return f"data: {_to_json(value)}\n\n".encode()


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _has_logprobs(delta: OutputDelta) -> bool:
    return any(out.token.logprob is not None for out in delta.tokens)
