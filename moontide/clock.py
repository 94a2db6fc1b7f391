"""Monotonic time. Tests hand in a fake; timestamps never leave the host, durations do."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...


class MonotonicClock:
    """The clock of real services."""

    def now(self) -> float:
        return time.monotonic()
