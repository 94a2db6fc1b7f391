"""What a placement of a request is expected to cost (pure; no clock, no sockets)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one request on chosen nodes. Seconds."""

    queue_s: float = 0.0
    """Arrival at the node to its first chunk, apart from the fetch."""
    fetch_s: float = 0.0
    """KV of the prefix hit on its way, as far as it does not hide behind the queue."""
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    """Last chunk computed to decode's first step; part of the time between the first two tokens."""
    tbt_s: float = 0.0
    """Between two tokens of the answer, mean."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a request is held to; None: no bound."""

    ttft_s: float | None = None
    tbt_s: float | None = None
