from __future__ import annotations

import asyncio
import threading

import pytest

from deploy.cli import INTERRUPTED, Answer
from deploy.demo import build_document, findings, unless_stopped
from moontide.client import Usage
from moontide.errors import NodeLost
from moontide.timeline import Span, Timeline, TtftParts


def words(text: str) -> int:
    return len(text.split())


def test_document_is_long_enough_not_much_longer_and_real_text() -> None:
    document = build_document(words, num_tokens=3000)
    assert 3000 <= words(document) <= 3300
    assert "# debugger" in document


def answer(ttft_s: float, cached: int) -> Answer:
    parts = TtftParts(
        tokenize_s=0, route_s=0, dispatch_s=0, queue_s=0, fetch_s=0, prefill_s=ttft_s, detokenize_s=0, ttft_s=ttft_s
    )  # fmt: skip
    return Answer(
        request_id="r",
        usage=Usage(prompt_tokens=6400, cached_tokens=cached, completion_tokens=80),
        parts=parts,
        client_ttft_s=ttft_s,
    )


def test_findings_state_the_numbers_of_the_run() -> None:
    spans = tuple(
        Span(name=f"chunk {c}", track=f"stage {s}", start_s=c + s, duration_s=1) for s in range(2) for c in range(3)
    )
    timeline = Timeline(request_id="r", spans=spans, duration_s=5, outcome="stop", ttft_parts=None, handoff_s=0)
    text = "\n".join(findings(answer(12.0, 0), timeline, answer(0.5, 6336)))
    assert "6400 tokens went through 2 stage processes in 3 chunks" in text
    assert "79 tokens" in text
    assert "6336 of its 6400 tokens" in text
    assert "0.50 s instead of 12.00 s" in text


async def test_questions_end_with_the_first_signal() -> None:
    stop, was_cancelled = threading.Event(), False

    async def ask() -> None:
        nonlocal was_cancelled
        stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    assert await asyncio.wait_for(unless_stopped(stop, ask()), timeout=10) == INTERRUPTED
    assert was_cancelled


async def test_questions_that_nobody_stops_end_as_they_do() -> None:
    async def fail() -> None:
        raise NodeLost("gone")

    assert await unless_stopped(threading.Event(), asyncio.sleep(0)) == 0
    with pytest.raises(NodeLost):
        await unless_stopped(threading.Event(), fail())
