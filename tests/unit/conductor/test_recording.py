from __future__ import annotations

import asyncio
import random

import pytest

from conductor.answer import OutputDelta, OutputToken, Usage
from conductor.recording import Position, Recording
from moontide.clock import MonotonicClock
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, NoCapacity
from moontide.sampling_params import FinishReason, SampledToken

TEXT = "every token of this answer counts, and so does every character"


def soon(timeout_s: float = 20.0) -> Deadline:
    return Deadline.after(timeout_s, MonotonicClock())


def cut(text: str, generator: random.Random, num_tokens: int = 20) -> list[OutputDelta]:
    """An answer of `num_tokens` tokens, cut into deltas at random; text may lag behind its tokens."""
    deltas, token, char = [], 0, 0
    while token < num_tokens or not deltas or deltas[-1].finish_reason is None:
        next_token = min(num_tokens, token + generator.randint(0, 4))
        is_last = next_token == num_tokens and generator.random() < 0.5
        next_char = len(text) if is_last else generator.randint(char, len(text))
        deltas.append(
            OutputDelta(
                text=text[char:next_char],
                tokens=tuple(
                    OutputToken(token=SampledToken(token_id=100 + idx), output_idx=idx, text_offset=0)
                    for idx in range(token, next_token)
                ),
                usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=next_token),
                finish_reason=FinishReason.STOP if is_last else None,
            )
        )
        token, char = next_token, next_char
    return deltas


async def read(recording: Recording, position: Position) -> tuple[list[int], str]:
    ids: list[int] = []
    text = ""
    async for delta in recording.read(position, soon()):
        ids += [out.token.token_id for out in delta.tokens]
        text += delta.text
    return ids, text


@pytest.mark.parametrize("seed", range(30))
async def test_a_reader_gets_what_follows_its_position_however_the_answer_is_cut(seed: int) -> None:
    generator = random.Random(seed)
    recording = Recording()
    for delta in cut(TEXT, generator):
        recording.add(delta)
    # A reader that had an answer cut in another way, up to some delta of it.
    position = Position()
    other = cut(TEXT, generator)
    for delta in other[: generator.randrange(len(other))]:
        position = position.after(delta)
    ids, text = await read(recording, position)
    assert ids == [100 + idx for idx in range(position.num_tokens, 20)]
    assert text == TEXT[position.num_chars :]


async def test_readers_follow_an_answer_that_grows_and_see_its_error() -> None:
    deltas = cut(TEXT, random.Random(1))
    recording = Recording(deltas[:2])
    readers = [asyncio.create_task(read(recording, Position())) for _ in range(3)]
    for delta in deltas[2:]:
        await asyncio.sleep(0)
        recording.add(delta)
    for reader in readers:
        assert await reader == ([100 + idx for idx in range(20)], TEXT)
    assert (recording.is_complete, recording.num_readers) == (True, 0)

    broken = Recording(deltas[:2])
    reader = asyncio.create_task(read(broken, Position()))
    await asyncio.sleep(0)
    assert broken.num_readers == 1
    broken.fail(NoCapacity("no node"))
    with pytest.raises(NoCapacity):
        await reader
    assert broken.num_readers == 0


async def test_a_reader_waits_no_longer_than_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="same key"):
        async for _ in Recording().read(Position(), soon(0.01)):
            pass
