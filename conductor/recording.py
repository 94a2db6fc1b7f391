"""An answer that is kept while it is made and for some time afterwards, so that it can be read again from any position."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from conductor.answer import OutputDelta
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, MoontideError
from moontide.sampling_params import SampledToken

# What CPython needs for the objects of a delta, roughly.
_DELTA_BYTES = 400
_TOKEN_BYTES = 300
_TOP_LOGPROB_BYTES = 120


@dataclass(frozen=True, kw_only=True)
class Position:
    """How much of an answer a reader has."""

    num_tokens: int = 0
    num_chars: int = 0

    def after(self, delta: OutputDelta) -> Position:
        return Position(num_tokens=self.num_tokens + len(delta.tokens), num_chars=self.num_chars + len(delta.text))


class Recording:
    """Grows by one writer, is read by any number of readers at their own pace. Cutting it into deltas is no part of the answer."""

    def __init__(self, deltas: Iterable[OutputDelta] = ()) -> None:
        """`deltas`: the start of the answer, when another process had made it."""
        self._deltas = list(deltas)
        self._error: MoontideError | None = None
        self._news = asyncio.Event()
        self.num_readers = 0
        self.num_bytes = sum(_num_bytes(delta) for delta in self._deltas)

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        return tuple(out.token for delta in self._deltas for out in delta.tokens)

    @property
    def is_empty(self) -> bool:
        return not self._deltas

    @property
    def is_complete(self) -> bool:
        return bool(self._deltas) and self._deltas[-1].finish_reason is not None

    def add(self, delta: OutputDelta) -> None:
        self._deltas.append(delta)
        self.num_bytes += _num_bytes(delta)
        self._wake()

    def fail(self, error: MoontideError) -> None:
        """Nothing more comes: readers get what there is, then `error`."""
        self._error = error
        self._wake()

    async def read(self, position: Position, deadline: Deadline) -> AsyncGenerator[OutputDelta, None]:
        """What comes after `position`, to the end of the answer. Raises: the error of `fail`; DeadlineExceeded."""
        self.num_readers += 1
        try:
            at = Position()
            idx = 0
            while True:
                while idx == len(self._deltas):
                    if self._error is not None:
                        raise self._error
                    await self._wait(deadline)
                delta = self._deltas[idx]
                idx += 1
                if (rest := _rest(delta, at, position)) is not None:
                    yield rest
                if delta.finish_reason is not None:
                    return
                at = at.after(delta)
        finally:
            self.num_readers -= 1

    async def _wait(self, deadline: Deadline) -> None:
        deadline.check("waiting for the answer of the first request with this idempotency key")
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._news.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the answer was not complete in time; ask again with the same key") from error

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _rest(delta: OutputDelta, at: Position, wanted: Position) -> OutputDelta | None:
    """The part of a delta that begins `at` which a reader at `wanted` has not; None when it has all."""
    tokens = delta.tokens[max(0, wanted.num_tokens - at.num_tokens) :]
    text = delta.text[max(0, wanted.num_chars - at.num_chars) :]
    if not tokens and not text and delta.finish_reason is None:
        return None
    if len(tokens) == len(delta.tokens) and len(text) == len(delta.text):
        return delta
    return dataclasses.replace(delta, tokens=tokens, text=text)


def _num_bytes(delta: OutputDelta) -> int:
    num_top = sum(len(out.token.top_logprobs) for out in delta.tokens)
    return _DELTA_BYTES + 4 * len(delta.text) + _TOKEN_BYTES * len(delta.tokens) + _TOP_LOGPROB_BYTES * num_top
