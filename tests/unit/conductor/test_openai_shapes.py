from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conductor.answer import OutputDelta, OutputToken, Usage
from conductor.openai_shapes import ChatShape, ChunkWriter, CompletionShape, usage_json
from conductor.tokenizer import Tokenizer
from moontide.sampling_params import FinishReason, SampledToken

HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": 'a "quoted" \\ model'}
USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=2)
TOKEN = OutputToken(SampledToken(token_id=5, logprob=-0.5, top_logprobs=[(5, -0.5)]), 0, 0)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def said(event: bytes) -> dict[str, Any]:
    assert event.isascii(), "some clients end a line at U+2028"
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    found: dict[str, Any] = json.loads(event[6:])
    return found


@pytest.mark.parametrize("text", ["", "plain", '"\\\n\t\0', "é 你好 🙂 \u2028", "\ud83d"])
@pytest.mark.parametrize("reason", [None, FinishReason.STOP])
@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
@pytest.mark.parametrize(("include", "continuous"), [(False, False), (True, False), (True, True)])
def test_event_is_the_json_of_its_choice(
    tokenizer: Tokenizer,
    text: str,
    reason: FinishReason | None,
    with_logprobs: bool,
    kind: type[CompletionShape | ChatShape],
    include: bool,
    continuous: bool,
) -> None:
    shape = kind(tokenizer, with_logprobs=with_logprobs)
    chunks = ChunkWriter(shape, HEAD, include_usage=include, continuous_usage=continuous)
    delta = OutputDelta(text=text, tokens=(TOKEN,) if with_logprobs else (), usage=USAGE, finish_reason=reason)
    event = chunks.chunk(delta)
    if not (text or reason or with_logprobs):
        assert event == b""
        return
    usage = {"usage": usage_json(USAGE) if continuous else None} if include else {}
    assert said(event) == {**HEAD, "choices": [shape.chunk(delta)], **usage}


def test_usage_closes_a_stream_that_asked_for_it(tokenizer: Tokenizer) -> None:
    shape = ChatShape(tokenizer, with_logprobs=False)
    asked = ChunkWriter(shape, HEAD, include_usage=True)
    assert said(asked.closing(USAGE)) == {**HEAD, "choices": [], "usage": usage_json(USAGE)}
    assert ChunkWriter(shape, HEAD, include_usage=False).closing(USAGE) == b""
    assert said(asked.opening(USAGE))["choices"][0]["delta"]["role"] == "assistant"


def test_tokens_of_equal_text_do_not_take_each_others_log_probability(tokenizer: Tokenizer) -> None:
    parts = [token_id for token_id in range(300) if tokenizer.token_text(token_id) == "\ufffd"][:3]
    likeliest, sampled, least = parts
    top = [(likeliest, -0.1), (sampled, -0.5), (least, -3.0)]
    token = OutputToken(SampledToken(token_id=sampled, logprob=-0.5, top_logprobs=top), 0, 0)
    delta = OutputDelta(text="", tokens=(token,), usage=USAGE)
    choice = CompletionShape(tokenizer, with_logprobs=True).chunk(delta)
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]
