"""What goes in and out of DecodeRequests, and the way back to a conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.pool import RequestKey
from moontide.errors import MoontideError
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams
from moontide.token_ids import TokenArray

_SESSION_EVENTS = 16_384
"""A conductor that is so many events behind does not read any more."""


@dataclass(frozen=True, kw_only=True)
class PromptStore:
    """The store process that accounts a prompt; empty: that of this host."""

    node_id: str = ""
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A prompt whose K/V prefill computes, and what is to be decoded after it."""

    token_ids: TokenArray
    sampling: SamplingParams
    output_idx: int
    """Output index of the token that follows the prompt."""
    cache_salt: str
    timeout_s: float
    tbt_slo_s: float | None = None
    """Time between two tokens that the request bears."""
    local_prefill: PromptStore | None = None
    """Set: this node computes the prompt itself, after its prefix hit at that store."""


@dataclass(frozen=True, kw_only=True)
class WorkSpan:
    """One bar of the request's timeline; the start counts from its Open."""

    name: str
    start_s: float
    duration_s: float
    first_token: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Every byte of the prompt's K/V is in pages."""

    key: RequestKey
    wait_pages_s: float
    handoff_s: float
    spans: Sequence[WorkSpan]
    age_s: float


@dataclass(frozen=True, kw_only=True)
class LocalPrefillDone:
    """The prompt was computed here; its first token follows. The durations add up to the time since Open."""

    key: RequestKey
    hit_tokens: int
    queue_s: float
    fetch_s: float
    compute_s: float
    predicted_s: float
    """What was expected of `compute_s`; 0 without a prediction."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    key: RequestKey
    token: SampledToken
    output_idx: int
    spans: Sequence[WorkSpan]
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    key: RequestKey
    reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    key: RequestKey
    error: MoontideError


DecodeEvent = Pulled | LocalPrefillDone | Tokens | Finished | Failed


class ConductorSession:
    """The way back to one conductor. When it is closed, its requests are dropped."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[DecodeEvent] = asyncio.Queue(_SESSION_EVENTS)
        self.overflow = asyncio.Event()
        """Set when the conductor does not read its events: the session must end."""

    def send(self, event: DecodeEvent) -> None:
        try:
            self.events.put_nowait(event)
        except asyncio.QueueFull:
            self.overflow.set()
