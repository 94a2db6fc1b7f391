"""What arrives for one consumer, in order of arrival. Takes less per item than a queue and a timeout around each wait."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from moontide.deadline import Deadline

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Not bounded by itself. One deadline holds for all waits; its timer runs from the first wait to `close`."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._wake()

    def take(self) -> Item | None:
        """The next item, if there is one."""
        return self._items.popleft() if self._items else None

    async def get(self) -> Item:
        """The next item; one task waits at a time. Raises: TimeoutError when the deadline passes."""
        while not self._items:
            if self._deadline.expired:
                raise TimeoutError
            loop = asyncio.get_running_loop()
            if self._timer is None:
                self._timer = loop.call_later(self._deadline.remaining_s(), self._ring)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        """Wakes the consumer, which looks at its own clock; if that is a little behind, the next wait sets another timer."""
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
