"""Request bodies of the OpenAI API: which fields there are, which are refused by name, and what they become."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from conductor.id_list import cut_ids
from conductor.tokenizer import ChatMessage
from conductor.validation import GenerateParams, Prompt, TextPrompt, TokenPrompt
from moontide.errors import BadRequest
from moontide.sampling_params import MAX_LOGPROBS
from moontide.token_ids import TokenArray

_Item = TypeVar("_Item")
_FirstErrorOnly = Annotated[list[_Item], Field(fail_fast=True)]
"""A list that is given up at its first wrong item: a report on each of a million would stop the event loop for seconds."""

MAX_SHOWN_CHARS = 60
"""Of a refused value in an error."""
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_COMMON_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": _EMPTY,
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "structured_outputs": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "truncate_prompt_tokens": (),
    "cache_salt": ("",),
    "priority": (0,),
    "kv_transfer_params": _EMPTY,
    "response_format": ({"type": "text"},),
}
_COMPLETION_NEUTRAL = {
    **_COMMON_NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": _EMPTY,
    "add_special_tokens": (True,),
}
_CHAT_NEUTRAL = {
    **_COMMON_NEUTRAL,
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": _EMPTY,
    "prediction": _EMPTY,
    "web_search_options": (),
    "reasoning_effort": (),
    "chat_template": (),
    "chat_template_kwargs": _EMPTY,
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": _EMPTY,
}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _COMMON_NEUTRAL

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | _FirstErrorOnly[str] | None = None
    stop_token_ids: _FirstErrorOnly[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def check_fields(self) -> None:
        """Raises: BadRequest for a field that is not supported, unless it has the value that means nothing."""
        for name, value in (self.model_extra or {}).items():
            if name in self.neutral and value is not None and value not in self.neutral[name]:
                shown = repr(value)
                shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
                raise BadRequest(f"{name} is not supported (found {shown}); leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream=true", param="stream_options")

    def params(self, *, max_tokens: int | None, logprobs: int | None) -> GenerateParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        stop_token_ids = tuple(self.stop_token_ids or ())
        if any(token_id < 0 for token_id in stop_token_ids):
            raise BadRequest(f"stop_token_ids holds {min(stop_token_ids)}; ids are 0 or more", param="stop_token_ids")
        return GenerateParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if self.seed is None else self.seed % 2**64,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(Body):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _COMPLETION_NEUTRAL

    prompt: Any = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class _ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | _FirstErrorOnly[_ContentPart] | None = None


class ChatBody(Body):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _CHAT_NEUTRAL

    messages: _FirstErrorOnly[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


AnyBody = TypeVar("AnyBody", bound="Body")


def parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Raises: BadRequest naming the field, or what is wrong with the JSON."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise BadRequest(_why_no_json(data, first["ctx"]["error"])) from error
        name = str(first["loc"][0]) if first["loc"] else None
        place = ".".join(map(str, first["loc"]))
        raise BadRequest(f"{place}: {first['msg']}" if place else first["msg"], param=name) from error
    body.check_fields()
    return body


async def parse_completion(data: bytes) -> CompletionBody:
    """As `parse`; `prompt` of a large body is an array when it is a list of ids. Raises: BadRequest."""
    cut = await cut_ids(data)
    if cut is not None:
        body = parse(CompletionBody, cut.rest)
        if body.prompt == cut.mark:
            body.prompt = cut.ids
            return body
    return parse(CompletionBody, data)


def _why_no_json(data: bytes, found: str) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"the body is no valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; send JSON in UTF-8"
    return f"the body is no valid JSON: {found}; send one JSON object"


def completion_prompt(prompt: Any) -> Prompt:
    """A text, token ids, or a list with one of them. Raises: BadRequest."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise BadRequest(f"prompt holds {len(prompt)} prompts; send one request for each", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if isinstance(prompt, list):
        return TokenPrompt(token_ids=_token_array(prompt))
    if isinstance(prompt, np.ndarray):
        return TokenPrompt(token_ids=prompt)
    if prompt is None:
        raise BadRequest("prompt is missing; send a text or a list of token ids", param="prompt")
    raise BadRequest(f"prompt must be a text or a list of token ids, not {type(prompt).__name__}", param="prompt")


def _token_array(values: list[Any]) -> TokenArray:
    wrong = set(map(type, values)) - {int}
    if wrong:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise BadRequest(f"a list of token ids must hold integers only; it also holds {names}", param="prompt")
    try:
        return np.asarray(array("I", values))  # a million ids in 4 ms, during which no other request is served
    except OverflowError as error:
        raise BadRequest(
            f"token ids must lie in 0..{2**32 - 1}; found {min(values)} and {max(values)}", param="prompt"
        ) from error


def chat_message(message: _Message) -> ChatMessage:
    """Raises: BadRequest for content that is not text."""
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if (message.model_extra or {}).get(name) not in _EMPTY:
            raise BadRequest(f"messages: {name} is not supported; leave it out", param="messages")
    content = message.content
    if content is None:
        raise BadRequest(f"a message of role {message.role!r} has no content; send text", param="messages")
    if isinstance(content, str):
        return ChatMessage(role=message.role, content=content)
    texts = []
    for part in content:
        if part.type != "text" or part.text is None:
            raise BadRequest(f"messages: content of type {part.type!r} is not supported; send text", param="messages")
        texts.append(part.text)
    return ChatMessage(role=message.role, content="\n".join(texts))
