"""AdmissionQueue and choose_victims: one at a time, in the chosen order, and nobody loses pages for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore.pool import RequestKey
from moontide.fair_share import Share
from prefill_node.admission import AdmissionQueue, Holder, choose_victims
from prefill_node.policy import Candidate

A, B, C = (RequestKey(name, 1) for name in "abc")


class Chooser:
    """Lets in whoever comes first in `line`."""

    def __init__(self, line: Sequence[RequestKey]) -> None:
        self.line = list(line)

    def __call__(self, waiting: Sequence[RequestKey]) -> RequestKey | None:
        return next((key for key in self.line if key in waiting), None)


class Waiter:
    def __init__(self, queue: AdmissionQueue, key: RequestKey, log: list[RequestKey]) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(queue, key, log))

    async def _run(self, queue: AdmissionQueue, key: RequestKey, log: list[RequestKey]) -> None:
        async with queue.turn(key):
            log.append(key)
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_at_a_time_in_the_chosen_order() -> None:
    log: list[RequestKey] = []
    queue = AdmissionQueue(Chooser([A, C, B]))
    waiters = {key: Waiter(queue, key, log) for key in (A, B, C)}
    await settle()
    assert log == [A]
    waiters[A].leave.set()
    await settle()
    assert log == [A, C]
    for waiter in waiters.values():
        waiter.leave.set()
    await asyncio.gather(*(waiter.task for waiter in waiters.values()))
    assert log == [A, C, B]


async def test_nobody_enters_until_the_chooser_says_so() -> None:
    log: list[RequestKey] = []
    chooser = Chooser([])
    queue = AdmissionQueue(chooser)
    waiter = Waiter(queue, A, log)
    await settle()
    assert log == []
    chooser.line = [A]
    queue.update()
    await settle()
    assert log == [A]
    waiter.leave.set()
    await waiter.task


@pytest.mark.parametrize("ticks", [0, 1, 2])
async def test_a_cancelled_waiter_passes_its_turn_on(ticks: int) -> None:
    log: list[RequestKey] = []
    queue = AdmissionQueue(Chooser([A, B, C]))
    waiters = {key: Waiter(queue, key, log) for key in (A, B, C)}
    await settle()
    waiters[A].leave.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    waiters[B].task.cancel()
    await settle()
    assert log[-1] == C
    waiters[C].leave.set()
    await asyncio.gather(*(waiter.task for waiter in waiters.values()), return_exceptions=True)
    queue.update()


def candidate(key: RequestKey, *, work_s: float, work_left_s: float, priority: int = 0) -> Candidate:
    share = Share(tenant="", priority=priority)
    return Candidate(
        key=key, order=0, deadline_s=0.0, work_s=work_s, work_left_s=work_left_s, served_s=0.0, share=share
    )


def holder(key: RequestKey, *, work_left_s: float, num_pages: int, priority: int = 0) -> Holder:
    return Holder(
        candidate=candidate(key, work_s=100.0, work_left_s=work_left_s, priority=priority), num_pages=num_pages
    )


def test_the_last_in_line_lose_their_pages_first() -> None:
    wanting = candidate(A, work_s=1.0, work_left_s=1.0)
    holders = [holder(B, work_left_s=50.0, num_pages=10), holder(C, work_left_s=40.0, num_pages=10)]
    assert choose_victims(wanting, 5, holders) == [C]
    assert choose_victims(wanting, 15, holders) == [C, B]


def test_nobody_loses_pages_for_nothing() -> None:
    wanting = candidate(A, work_s=10.0, work_left_s=10.0)
    holders = [holder(B, work_left_s=50.0, num_pages=10), holder(C, work_left_s=9.0, num_pages=10)]
    assert choose_victims(wanting, 0, holders) == []
    assert choose_victims(wanting, 5, holders) == [B], "C is nearly done"
    assert choose_victims(wanting, 11, holders) == [], "it would not fit all the same"


def test_a_lower_class_loses_its_pages_however_little_work_it_has_left() -> None:
    wanting = candidate(A, work_s=10.0, work_left_s=10.0, priority=1)
    nearly_done = [holder(B, work_left_s=0.1, num_pages=10), holder(C, work_left_s=0.1, num_pages=10, priority=1)]
    assert choose_victims(wanting, 5, nearly_done) == [B]
