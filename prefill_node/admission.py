"""Who of the waiting prompts may take pages next, and whose pages are worth taking away for it.

A prompt takes all its pages at once, after its room in the store: whoever holds pages can finish, so no two prompts wait
for each other. One prompt at a time tries; the policy says which. Smaller ones may go first while the first in line does
not fit, until that one has waited too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore.pool import RequestKey
from prefill_node.policy import Candidate


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A running prompt that could do without its pages: what it has computed is in the store."""

    candidate: Candidate
    num_pages: int


def choose_victims(wanting: Candidate, num_missing: int, holders: Sequence[Holder]) -> list[RequestKey]:
    """Prompts whose pages the first in line should get, fewest first; empty when that is not worth it.

    Args:
        num_missing: pages that are wanted beyond the free ones.
        holders: the running prompts behind `wanting` in the policy's order, the last in line last.
    Only prompts of a lower class, or with more work left than `wanting` has in all, lose their pages, so they cannot take them back
    at once.
    """
    victims: list[RequestKey] = []
    for holder in reversed(holders):
        if num_missing <= 0:
            break
        is_lower = holder.candidate.share.priority < wanting.share.priority
        if is_lower or holder.candidate.work_left_s > wanting.work_s:
            victims.append(holder.candidate.key)
            num_missing -= holder.num_pages
    return victims if num_missing <= 0 else []


class AdmissionQueue:
    """The prompts that wait for pages; lets one of them in at a time."""

    def __init__(self, choose: Callable[[Sequence[RequestKey]], RequestKey | None]) -> None:
        """
        Args:
            choose: which of the waiting prompts may try now; None while none can.
        """
        self._choose = choose
        self._waiting: dict[RequestKey, asyncio.Future[None]] = {}
        self._holder: RequestKey | None = None

    @asynccontextmanager
    async def turn(self, key: RequestKey) -> AsyncIterator[None]:
        """Wait until the prompt may take its pages; nobody else takes any inside of the block."""
        assert key not in self._waiting
        granted = self._waiting[key] = asyncio.get_running_loop().create_future()
        self.update()
        try:
            await granted
            yield
        finally:
            self._waiting.pop(key, None)
            if self._holder == key:
                self._holder = None
            self.update()

    def update(self) -> None:
        """Something changed: a prompt came or went, pages were freed."""
        if self._holder is not None or not self._waiting:
            return
        key = self._choose(list(self._waiting))
        if key is not None:
            self._holder = key
            granted = self._waiting.pop(key)
            if not granted.done():  # else its wait was cancelled, and it is about to leave
                granted.set_result(None)
