from __future__ import annotations

import asyncio

import pytest

from conductor.inbox import Inbox
from moontide.clock import MonotonicClock
from moontide.deadline import Deadline

WAIT_S = 10.0


def inbox(timeout_s: float) -> Inbox[int]:
    return Inbox(Deadline.after(timeout_s, MonotonicClock()))


async def test_items_come_in_the_order_they_were_put() -> None:
    subject = inbox(WAIT_S)
    waiting = asyncio.create_task(subject.get())
    await asyncio.sleep(0)
    for number in range(3):
        subject.put(number)
    assert [await waiting, await subject.get(), subject.take(), subject.take()] == [0, 1, 2, None]
    subject.close()


async def test_wait_ends_with_the_deadline_and_not_before() -> None:
    subject = inbox(0.05)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            await subject.get()
    assert subject._deadline.expired
    subject.put(1)
    assert await subject.get() == 1, "what has arrived is still there"
    subject.close()


async def test_cancelled_wait_loses_nothing() -> None:
    subject = inbox(WAIT_S)
    waiting = asyncio.create_task(subject.get())
    await asyncio.sleep(0)
    subject.put(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await subject.get() == 1
    subject.close()
