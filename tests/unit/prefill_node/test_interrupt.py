"""Interrupt: ends a body with an error, and mixes with cancels and timeouts as asyncio's own tools do."""

from __future__ import annotations

import asyncio

import pytest

from moontide.errors import NodeLost
from prefill_node.interrupt import Interrupt


async def wait_in(interrupt: Interrupt, entered: asyncio.Event) -> None:
    async with interrupt:
        entered.set()
        await asyncio.Event().wait()


async def test_fire_raises_the_error_in_the_body_and_leaves_the_task_usable() -> None:
    interrupt, entered = Interrupt(), asyncio.Event()

    async def body() -> str:
        with pytest.raises(NodeLost, match="first"):
            await wait_in(interrupt, entered)
        await asyncio.sleep(0)
        return "goes on"

    task = asyncio.create_task(body())
    await entered.wait()
    interrupt.fire(NodeLost("first"))
    interrupt.fire(NodeLost("second"))
    assert await task == "goes on"
    assert not task.cancelled()


async def test_cancel_from_outside_stays_a_cancel() -> None:
    interrupt, entered = Interrupt(), asyncio.Event()
    task = asyncio.create_task(wait_in(interrupt, entered))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancel_wins_over_fire() -> None:
    interrupt, entered = Interrupt(), asyncio.Event()
    task = asyncio.create_task(wait_in(interrupt, entered))
    await entered.wait()
    interrupt.fire(NodeLost("lost"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_fire_without_a_body_does_nothing() -> None:
    interrupt = Interrupt()
    interrupt.fire(NodeLost("early"))
    async with interrupt:
        await asyncio.sleep(0)
    interrupt.fire(NodeLost("late"))
    await asyncio.sleep(0)


async def test_error_of_the_body_passes() -> None:
    with pytest.raises(ValueError, match="own"):
        async with Interrupt():
            raise ValueError("own")
