"""What a group tells conductors about its recent speed (pure)."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 32


class RecentSpeed:
    """Bytes per second over the last transfers, all of them together: large ones count for more."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def add(self, num_bytes: int, duration_s: float) -> None:
        """A transfer is over; one of nothing tells nothing."""
        if num_bytes > 0 and duration_s > 0:
            self._transfers.append((num_bytes, duration_s))

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first transfer."""
        if not self._transfers:
            return None
        return sum(num_bytes for num_bytes, _ in self._transfers) / sum(time_s for _, time_s in self._transfers)


class RecentMedian:
    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """Of the last values; None before the first one."""
        return statistics.median(self._values) if self._values else None
