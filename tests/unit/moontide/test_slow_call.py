"""Nobody waits for a peer that stands still, and nobody asks it twice."""

from __future__ import annotations

import asyncio

import pytest

from moontide.slow_call import NoAnswerYet, SlowCall


class Peer:
    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.num_asked = 0
        self.num_cancelled = 0

    async def ask(self) -> int:
        self.num_asked += 1
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.num_asked == 2:
            raise ValueError("the second answer is an error")
        return self.num_asked


async def test_a_call_goes_on_until_its_answer_and_then_there_is_a_new_one() -> None:
    peer = Peer()
    call = SlowCall(peer.ask)
    for _ in range(3):
        with pytest.raises(NoAnswerYet):
            await call.result(0.001)
    assert peer.num_asked == 1
    assert call.age_s >= 0.003
    peer.answers.set()
    assert await call.result(10.0) == 1
    assert call.age_s == 0
    with pytest.raises(ValueError, match="second answer"):
        await call.result(10.0)
    assert await call.result(10.0) == 3
    await call.close()


async def test_close_ends_what_is_on_its_way() -> None:
    peer = Peer()
    call = SlowCall(peer.ask)
    with pytest.raises(NoAnswerYet):
        await call.result(0.001)
    await call.close()
    await call.close()
    assert peer.num_cancelled == 1
