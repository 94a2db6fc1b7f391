"""Work that outlives the request that caused it, such as giving back a reservation; owned, bounded and awaited at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from moontide.log import get_logger

log = get_logger(__name__)


class Background:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, grace_s: float) -> None:
        """Wait up to `grace_s` for what runs, then cancel it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", work=task.get_name(), error=repr(error))
