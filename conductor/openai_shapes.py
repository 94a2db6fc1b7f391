"""How answers look in the OpenAI API: one choice of /v1/completions or /v1/chat/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conductor.answer import OutputDelta, OutputToken
from conductor.tokenizer import Tokenizer


class CompletionShape:
    """How answers of /v1/completions look."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        return self._choice(delta.text, delta.tokens, _reason(delta))

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        return self._choice(_text(deltas), _tokens(deltas), _reason(deltas[-1]))

    def _choice(self, text: str, tokens: Sequence[OutputToken], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._with_logprobs else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        name = self._tokenizer.token_text
        top = []
        for out in tokens:
            alternatives = {name(token_id): logprob for token_id, logprob in out.token.top_logprobs}
            alternatives.setdefault(name(out.token.token_id), out.token.logprob or 0.0)
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
        self._with_logprobs = with_logprobs

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
        if not self._with_logprobs:
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


def _text(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _tokens(deltas: Sequence[OutputDelta]) -> list[OutputToken]:
    return [token for delta in deltas for token in delta.tokens]


def _reason(delta: OutputDelta) -> str | None:
    return None if delta.finish_reason is None else delta.finish_reason.value


def has_logprobs(delta: OutputDelta) -> bool:
    return any(out.token.logprob is not None for out in delta.tokens)
