"""Request: what a decode node knows of a request that has not ended. What it holds is in the Batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_node.kv_pull import PullJob
from decode_node.local_prefill import LocalPrefill
from decode_node.session import ConductorSession, WorkSpan
from decode_node.step_times import Decoding
from kvstore.block import BlockHash
from kvstore.client import BlockRef
from kvstore.keys import LOCAL_NODE_ID
from kvstore.pool import RequestKey
from moontide.sampling_params import SampledToken, SamplingParams

_SAME_BAR_S = 0.01
"""Pulls of one request that follow each other so closely are one bar of its timeline."""


@dataclass
class Request:
    """Belongs to DecodeRequests."""

    key: RequestKey
    session: ConductorSession
    sampling: SamplingParams
    output_idx: int
    prompt_tokens: int
    refs: Sequence[BlockRef]
    """One per block of the prompt; the last may be the partial one. Their holder is not known before they are sealed."""
    root: BlockHash
    """Of the chain of `refs`."""
    tail_ids: list[int]
    """Tokens after the last full block of the prompt, and those of the answer so far. The K/V of the last one is never computed."""
    opened_at_s: float
    deadline: asyncio.TimerHandle
    tbt_slo_s: float | None
    local: LocalPrefill | None
    """Set: its prompt is computed here."""
    holder: str = LOCAL_NODE_ID
    """Node id of the store process that accounts the blocks."""
    pages_at_s: float = 0.0
    started_at_s: float = 0.0
    pulled_at_s: float = 0.0
    first_token: SampledToken | None = None
    job: PullJob | None = None
    is_arriving: bool = False
    """The first layer groups of the open pull are there, and the others will be soon."""
    is_pulled: bool = False
    """Everything is in the pages, and the conductor knows."""
    retry: asyncio.TimerHandle | None = None
    num_retries: int = 0
    missing_since_s: float | None = None
    spans: list[WorkSpan] = field(default_factory=list)
    is_admitted: bool = False
    """The TBT SLOs bear it, so that its pull may begin."""
    num_drawn: int = 0
    """Tokens that were drawn here."""
    store_address: str = ""

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.prompt_tokens + self.num_drawn, self.tbt_slo_s)

    @property
    def full_hashes(self) -> list[BlockHash]:
        return [ref.hash for ref in self.refs if ref.hash is not None]

    def add_span(self, span: WorkSpan) -> None:
        """Add a bar, or make the last one longer if this follows at once, so that a long prompt has few."""
        if self.spans:
            last = self.spans[-1]
            last_end_s = last.start_s + last.duration_s
            follows = last.first_token + last.num_tokens == span.first_token
            if follows and span.start_s - last_end_s < _SAME_BAR_S:
                self.spans[-1] = WorkSpan(
                    name=last.name,
                    start_s=last.start_s,
                    duration_s=span.start_s + span.duration_s - last.start_s,
                    first_token=last.first_token,
                    num_tokens=last.num_tokens + span.num_tokens,
                )
                return
        self.spans.append(span)
