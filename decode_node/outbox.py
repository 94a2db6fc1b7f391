"""Outbox: reports of a worker thread on their way to the event loop, in order and bounded.

A worker that is ahead of the loop waits in `send`: that is the back-pressure between the two.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_RECHECK_S = 0.2
"""How often a worker that waits for room looks whether the outbox was closed."""


class Outbox(Generic[T]):
    def __init__(self, deliver: Callable[[T], None], *, capacity: int) -> None:
        """`deliver` is called on the running event loop, once per report."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._reports: queue.Queue[T] = queue.Queue(capacity)
        self._closed = False

    def send(self, report: T) -> None:
        """Called in worker threads. After `close`, reports are dropped."""
        while not self._closed:
            try:
                self._reports.put(report, timeout=_RECHECK_S)
            except queue.Full:
                continue
            self._loop.call_soon_threadsafe(self._deliver_one)
            return

    def close(self) -> None:
        """No report is delivered any more and no sender waits. Workers are to be joined before the loop ends."""
        self._closed = True

    def _deliver_one(self) -> None:
        if not self._closed:
            self._deliver(self._reports.get_nowait())
