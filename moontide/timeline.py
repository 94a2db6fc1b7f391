"""The moments of a request's life: spans, and the parts of its time to first token.

Spans lie on one axis whose zero is the request's arrival at the conductor. A message of another host carries spans relative to a moment
there plus its own age; `Span.shifted` moves them over, so that no timestamp crosses the wire.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moontide_proto.v1 import common_pb2, moontide_pb2


@dataclass(frozen=True, kw_only=True)
class Span:
    """One bar of a timeline."""

    name: str
    track: str
    """Row of the picture: "conductor", "stage 0", "decode"."""
    start_s: float
    duration_s: float
    first_token: int = 0
    num_tokens: int = 0
    """Length of the token range that the work covered; 0 when it covered none."""
    predicted_s: float = 0.0
    """Duration that was expected; 0 without a prediction."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s

    def shifted(self, offset_s: float) -> Span:
        return dataclasses.replace(self, start_s=self.start_s + offset_s)

    def to_proto(self) -> common_pb2.Span:
        return common_pb2.Span(**dataclasses.asdict(self))

    @classmethod
    def from_proto(cls, msg: common_pb2.Span) -> Span:
        return cls(
            name=msg.name,
            track=msg.track,
            start_s=msg.start_s,
            duration_s=msg.duration_s,
            first_token=msg.first_token,
            num_tokens=msg.num_tokens,
            predicted_s=msg.predicted_s,
        )


@dataclass(frozen=True, kw_only=True)
class TtftParts:
    """Where the time to first token went; the parts add up to `ttft_s`."""

    tokenize_s: float
    route_s: float
    """Prefix match and choice of nodes, with the time of attempts that failed before this token."""
    dispatch_s: float
    """To stage 0 and the first token's way back."""
    queue_s: float
    fetch_s: float
    prefill_s: float
    detokenize_s: float
    ttft_s: float
    """Arrival at the conductor to the moment the first token leaves it."""

    def to_proto(self) -> moontide_pb2.TtftParts:
        return moontide_pb2.TtftParts(**dataclasses.asdict(self))

    @classmethod
    def from_proto(cls, msg: moontide_pb2.TtftParts) -> TtftParts:
        return cls(**{f.name: getattr(msg, f.name) for f in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a conductor remembers of one request."""

    request_id: str
    spans: tuple[Span, ...]
    duration_s: float
    outcome: str
    """One of "stop", "length", the name of an error, "cancelled", or "" while the request runs."""
    ttft_parts: TtftParts | None
    handoff_s: float
    """Prefill completed to decode's pages complete."""
    plan: str = ""
    """Mode, policy and chunking under which a group prefilled it, for people to read; empty before that is over, and without one."""

    def to_proto(self) -> moontide_pb2.Timeline:
        return moontide_pb2.Timeline(
            request_id=self.request_id,
            spans=[span.to_proto() for span in self.spans],
            duration_s=self.duration_s,
            outcome=self.outcome,
            ttft_parts=self.ttft_parts.to_proto() if self.ttft_parts else None,
            handoff_s=self.handoff_s,
            plan=self.plan,
        )

    @classmethod
    def from_proto(cls, msg: moontide_pb2.Timeline) -> Timeline:
        return cls(
            request_id=msg.request_id,
            spans=tuple(Span.from_proto(span) for span in msg.spans),
            duration_s=msg.duration_s,
            outcome=msg.outcome,
            ttft_parts=TtftParts.from_proto(msg.ttft_parts) if msg.HasField("ttft_parts") else None,
            handoff_s=msg.handoff_s,
            plan=msg.plan,
        )
