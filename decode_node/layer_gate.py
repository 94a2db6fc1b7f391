"""LayerGate: how far a pull has come, for a step that begins before its end.

pull thread      group 0 | group 1 | group 2        opens the gate group by group
compute thread             layers of 0 | layers of 1 | layers of 2        waits at the gate before each group
"""

from __future__ import annotations

import threading


class LayerGate:
    """Counts the leading layer groups that are in the pages for all blocks of a pull."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_groups = 0
        self._is_over = False

    def open(self, num_groups: int) -> None:
        with self._changed:
            self._num_groups = num_groups
            self._changed.notify_all()

    def end(self) -> None:
        """What is not there now does not come any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, num_groups: int, *, timeout_s: float) -> bool:
        """Whether so many groups are there; waits for them while they may still come."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._num_groups >= num_groups, timeout_s)
            return self._num_groups >= num_groups
