"""How output tokens are drawn and when they end: one meaning for conductor, prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moontide.errors import BadRequest
from moontide_proto.v1 import common_pb2

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64


class FinishReason(Enum):
    """Why a request ended; the value is what OpenAI clients see."""

    STOP = "stop"
    LENGTH = "length"

    def to_proto(self) -> common_pb2.FinishReason:
        if self is FinishReason.STOP:
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH

    @classmethod
    def from_proto(cls, reason: common_pb2.FinishReason) -> FinishReason:
        return cls.STOP if reason == common_pb2.FINISH_REASON_STOP else cls.LENGTH


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Resolved sampling settings of one request.

    Draws depend on (seed, output index) alone, so that whoever computes a token draws the same one.
    """

    max_tokens: int
    """Output tokens of the whole request, counted from output index 0; at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probabilities reach it; 1 is off."""
    top_k: int = 0
    """Only the k most likely tokens; 0 is off."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Alternatives per token, 0 to 20; None: no logprobs at all."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens={self.max_tokens} must be at least 1", param="max_tokens")
        if not 0.0 <= self.temperature <= 100.0:
            raise BadRequest(f"temperature={self.temperature} must lie in [0, 100]; 0 is greedy", param="temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise BadRequest(f"top_p={self.top_p} must lie in (0, 1]; 1 switches it off", param="top_p")
        if self.top_k < 0:
            raise BadRequest(f"top_k={self.top_k} must be 0 (off) or more", param="top_k")
        if not 0 <= self.seed < 2**64:
            raise BadRequest(f"seed={self.seed} must fit in 64 bits without sign", param="seed")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise BadRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; the limit is {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise BadRequest(f"logprobs={self.logprobs} must lie in 0..{MAX_LOGPROBS}", param="logprobs")

    def finish_reason(self, token_id: int, output_idx: int) -> FinishReason | None:
        """Whether the token at `output_idx` ends the request, by token id and count.

        Stop strings are text and are matched by the conductor.
        """
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if not self.ignore_eos and token_id in self.eos_token_ids:
            return FinishReason.STOP
        if output_idx + 1 >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def to_proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            eos_token_ids=self.eos_token_ids,
            logprobs=self.logprobs,
        )

    @classmethod
    def from_proto(cls, msg: common_pb2.SamplingParams) -> SamplingParams:
        """Raises: BadRequest when a value is out of range."""
        return cls(
            max_tokens=msg.max_tokens,
            temperature=msg.temperature,
            top_p=msg.top_p,
            top_k=msg.top_k,
            seed=msg.seed,
            stop_token_ids=tuple(msg.stop_token_ids),
            ignore_eos=msg.ignore_eos,
            eos_token_ids=tuple(msg.eos_token_ids),
            logprobs=msg.logprobs if msg.HasField("logprobs") else None,
        )


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """One drawn token. Logprobs are those of the model's own distribution, before temperature and cuts."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)

    def to_proto(self, output_idx: int) -> common_pb2.Token:
        return common_pb2.Token(
            token_id=self.token_id,
            output_idx=output_idx,
            logprob=self.logprob,
            top_logprobs=[common_pb2.TopLogprob(token_id=i, logprob=p) for i, p in self.top_logprobs],
        )

    @classmethod
    def from_proto(cls, msg: common_pb2.Token) -> SampledToken:
        return cls(
            token_id=msg.token_id,
            logprob=msg.logprob if msg.HasField("logprob") else None,
            top_logprobs=[(t.token_id, t.logprob) for t in msg.top_logprobs],
        )
