"""Which chunk enters the pipeline next. Pure: knows token counts, no pages, no sockets, no time.

    prompt  [0, cached) from the store | [cached, cursor) scheduled | [cursor, num_tokens) to do

The cursor moves when a chunk is scheduled, not when it is computed, so the next chunk of the same prompt enters stage 0
while this one is in stage 1. Source: Mooncake, arXiv:2407.00079, chunked pipeline parallelism.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.pool import RequestKey


@dataclass(frozen=True, kw_only=True)
class PlannedChunk:
    """Tokens [first_token, first_token + num_tokens) of one prompt."""

    key: RequestKey
    first_token: int
    num_tokens: int
    is_last: bool


@dataclass(kw_only=True)
class _Queued:
    order: int
    key: RequestKey
    cursor: int
    num_tokens: int


class Scheduler:
    """First come, first served by prompt: a prompt's chunks start after the last chunk of every earlier prompt."""

    def __init__(self, *, chunk_tokens: int, max_in_flight_steps: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._max_in_flight_steps = max_in_flight_steps
        self._queue: list[_Queued] = []

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that no micro-batch has taken yet."""
        return sum(queued.num_tokens - queued.cursor for queued in self._queue)

    def add(self, key: RequestKey, *, order: int, num_tokens: int, cursor: int) -> None:
        """Queue a prompt whose first `cursor` tokens are in the pages. `order` is its place in the line of arrivals."""
        assert 0 <= cursor < num_tokens, f"cursor {cursor} of {num_tokens} tokens: the last one is always computed"
        bisect.insort(
            self._queue, _Queued(order=order, key=key, cursor=cursor, num_tokens=num_tokens), key=lambda q: q.order
        )

    def remove(self, key: RequestKey) -> None:
        """Forget a prompt; one that is not queued (any more) is no error."""
        self._queue = [queued for queued in self._queue if queued.key != key]

    def next_micro_batch(self, *, in_flight_steps: int) -> Sequence[PlannedChunk]:
        """The next micro-batch, empty when the pipeline is full or nothing is queued. Moves the cursors.

        It is one chunk, or several that each finish their prompt and fit together: short prompts share a step, but no
        prompt's first token waits behind the body of a later one.
        """
        if in_flight_steps >= self._max_in_flight_steps or not self._queue:
            return []
        batch = [self._take(self._queue[0], self._chunk_tokens)]
        room = self._chunk_tokens - batch[0].num_tokens
        while batch[-1].is_last and self._queue and self._rest(self._queue[0]) <= room:
            batch.append(self._take(self._queue[0], room))
            room -= batch[-1].num_tokens
        return batch

    def _take(self, queued: _Queued, room: int) -> PlannedChunk:
        num_tokens = min(room, self._rest(queued))
        first_token = queued.cursor
        queued.cursor += num_tokens
        is_last = queued.cursor == queued.num_tokens
        if is_last:
            self._queue.remove(queued)
        return PlannedChunk(key=queued.key, first_token=first_token, num_tokens=num_tokens, is_last=is_last)

    @staticmethod
    def _rest(queued: _Queued) -> int:
        return queued.num_tokens - queued.cursor
