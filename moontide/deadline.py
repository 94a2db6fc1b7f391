"""Absolute deadlines: made once from a request's timeout, passed down, never reset."""

from __future__ import annotations

from dataclasses import dataclass

from moontide.clock import Clock
from moontide.errors import DeadlineExceeded


@dataclass(frozen=True)
class Deadline:
    """A moment on one clock after which nobody waits any more."""

    at_s: float
    clock: Clock

    @classmethod
    def after(cls, timeout_s: float, clock: Clock) -> Deadline:
        return cls(clock.now() + timeout_s, clock)

    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self.at_s - self.clock.now())

    @property
    def expired(self) -> bool:
        return self.clock.now() >= self.at_s

    def check(self, what: str) -> None:
        """Raises: DeadlineExceeded naming `what` when the moment has passed."""
        if self.expired:
            raise DeadlineExceeded(f"deadline passed while {what}; give the request a larger timeout")
