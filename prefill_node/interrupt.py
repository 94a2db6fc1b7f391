"""Ends a coroutine from outside with an error, the way `asyncio.timeout` ends it with time."""

from __future__ import annotations

import asyncio
from types import TracebackType

from moontide.errors import MoontideError


class Interrupt:
    """`async with interrupt:` runs its body until it ends or `fire` is called; then the body is cancelled and the error raised."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._error: MoontideError | None = None

    def fire(self, error: MoontideError) -> None:
        """The first error wins; without a running body nothing happens."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    async def __aenter__(self) -> Interrupt:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        if task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error from value
