"""A question to somebody who may stand still: one at a time is on its way, and nobody waits for it longer than wanted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NoAnswerYet(Exception):
    """The call goes on; the next `result` gets what comes of it."""


class SlowCall(Generic[T]):
    """Owner of the call on its way; close it."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._task: asyncio.Task[T] | None = None
        self._began_s = 0.0

    @property
    def age_s(self) -> float:
        """How long the call has been on its way; 0 if none is."""
        return time.monotonic() - self._began_s if self._task is not None else 0.0

    async def result(self, timeout_s: float) -> T:
        """Start the call, or wait on for the one that goes on. Raises: NoAnswerYet after `timeout_s`; what the call raises."""
        if self._task is None:
            self._task = asyncio.create_task(self._call(), name="slow call")
            self._began_s = time.monotonic()
        await asyncio.wait((self._task,), timeout=timeout_s)
        if not self._task.done():
            raise NoAnswerYet
        task, self._task = self._task, None
        return task.result()

    async def close(self) -> None:
        """Cancel what is on its way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
