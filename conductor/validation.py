"""What clients may ask for, whichever API they use: one set of checks for HTTP and gRPC. Knows neither JSON nor protobuf."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NewType

from conductor.cost import Slo
from conductor.tenants import MAX_PRIORITY, OPEN_TENANT, Tenant
from conductor.tokenizer import ChatMessage, read_json
from moontide.errors import BadRequest, ModelError, PromptTooLong
from moontide.sampling_params import SamplingParams
from moontide.token_ids import TokenArray

RequestId = NewType("RequestId", str)

DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NODE_ID_CHARS = 110


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    token_ids: TokenArray


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    messages: Sequence[ChatMessage]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, kw_only=True)
class GenerateParams:
    """Sampling as a client asks for it; None means the default."""

    max_tokens: int | None = None
    """None: 16, for a chat what the context leaves."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """None: drawn at random."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    timeout_s: float | None = None
    """None: the conductor's limit, which is also the most."""

    def __post_init__(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadRequest(f"stop has {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}", param="stop")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise BadRequest(
                    f"a stop string has {len(text)} characters; it must have 1 to {MAX_STOP_CHARS}", param="stop"
                )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise BadRequest(f"timeout_s={self.timeout_s} must be above 0", param="timeout_s")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How a request asks to be served, whatever it computes; None: as its tenant is."""

    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tbt_slo_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadRequest(f"{name}={value} must be a number of seconds above 0", param=name)
        if self.priority is not None and self.priority < -MAX_PRIORITY:
            raise BadRequest(f"priority={self.priority} must be at least -{MAX_PRIORITY}", param="priority")

    def slo(self, tenant: Tenant) -> Slo:
        return Slo(
            ttft_s=tenant.ttft_slo_s if self.ttft_slo_s is None else self.ttft_slo_s,
            tbt_s=tenant.tbt_slo_s if self.tbt_slo_s is None else self.tbt_slo_s,
        )

    def priority_of(self, tenant: Tenant) -> int:
        """Raises: BadRequest for a higher class than the tenant has."""
        if self.priority is None:
            return tenant.priority
        if self.priority > tenant.priority:
            raise BadRequest(
                f"priority={self.priority} is above that of tenant {tenant.name}; ask for at most {tenant.priority}",
                param="priority",
            )
        return self.priority


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request as an adapter hands it over."""

    request_id: RequestId
    prompt: Prompt
    params: GenerateParams
    arrival_s: float
    """On the conductor's clock."""
    tenant: Tenant = OPEN_TENANT
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    """Class; a higher one is served first."""
    idempotency_key: str = ""
    """"": a repetition of this request is another request."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the front door must know of the model; read from its directory without loading it."""

    name: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, model_dir: Path, name: str) -> ServedModel:
        """Raises: ModelError naming the file or field that is missing."""
        config = read_json(model_dir / "config.json")
        nested = config.get("text_config")
        text_config: dict[str, Any] = nested if isinstance(nested, dict) else {}

        def number(key: str) -> int:
            value = config.get(key, text_config.get(key))
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{model_dir / 'config.json'} has no {key}; the conductor needs it")
            return value

        generation = read_json(model_dir / "generation_config.json", required=False)
        eos = generation.get("eos_token_id")
        eos = config.get("eos_token_id", text_config.get("eos_token_id")) if eos is None else eos
        return cls(
            name=name,
            max_context=number("max_position_embeddings"),
            vocab_size=number("vocab_size"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )


def check_request_id(text: str) -> RequestId:
    """The client's id, or a new one for "". Raises: BadRequest."""
    if not text:
        return RequestId(secrets.token_hex(12))
    if not _REQUEST_ID.fullmatch(text):
        raise BadRequest(f"request id {text[:140]!r} must be 1 to 128 characters of [A-Za-z0-9_.-]", param="request_id")
    return RequestId(text)


def id_on_nodes(request_id: RequestId) -> str:
    """The id that nodes see. Clients repeat ids, nodes must never see one twice, so it ends in something random."""
    return f"{request_id[:_NODE_ID_CHARS]}.{secrets.token_hex(4)}"


def check_prompt(token_ids: TokenArray, model: ServedModel) -> None:
    """Raises: BadRequest for an empty prompt or an id that the model does not know."""
    if len(token_ids) == 0:
        raise BadRequest("the prompt is empty; send at least one token", param="prompt")
    largest = int(token_ids.max())
    if largest >= model.vocab_size:
        raise BadRequest(
            f"token id {largest} is not in the vocabulary of {model.name}; ids must be below {model.vocab_size}",
            param="prompt",
        )


def resolve_sampling(
    params: GenerateParams, *, prompt_tokens: int, is_chat: bool, model: ServedModel
) -> SamplingParams:
    """Fill in every default. Raises: BadRequest, PromptTooLong naming prompt, max_tokens and context."""
    room = model.max_context - prompt_tokens
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = max(room if is_chat else min(room, DEFAULT_MAX_TOKENS), 1)
    if max_tokens >= 1 and max_tokens > room:
        raise PromptTooLong(
            f"prompt of {prompt_tokens} tokens + max_tokens={max_tokens} exceeds the context of {model.max_context} tokens; "
            "shorten the prompt or lower max_tokens",
            param="max_tokens" if room >= 1 else "prompt",
        )
    for token_id in params.stop_token_ids:
        if token_id >= model.vocab_size:
            raise BadRequest(
                f"stop_token_ids holds {token_id}; ids must be below {model.vocab_size}", param="stop_token_ids"
            )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(params.top_k, model.vocab_size),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        eos_token_ids=() if params.ignore_eos else model.eos_token_ids,
        logprobs=params.logprobs,
    )
