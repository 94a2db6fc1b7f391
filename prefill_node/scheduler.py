"""Which chunks enter the pipeline next. Pure: knows token counts and predictions, no pages, no sockets, no clock.

    prompt  [0, cached) from the store | [cached, cursor) scheduled | [cursor, num_tokens) to do

The cursor moves when a chunk is scheduled, not when it is computed, so the next chunk of the same prompt enters stage 0
while this one is in stage 1. Every step is given to the prompt that the policy ranks first, so a prompt is preempted at
any chunk border and goes on later where it was. Source: Mooncake, arXiv:2407.00079, chunked pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.pool import RequestKey
from moontide.fair_share import Share
from moontide.perf_model import StepShape
from prefill_node.chunking import ChunkPlanner
from prefill_node.policy import Candidate
from prefill_node.turns import Turns


@dataclass(frozen=True, kw_only=True)
class PlannedChunk:
    """Tokens [first_token, first_token + num_tokens) of one prompt."""

    key: RequestKey
    first_token: int
    num_tokens: int
    is_last: bool

    @property
    def shape(self) -> StepShape:
        return StepShape.of_chunk(self.num_tokens, self.first_token)


@dataclass(kw_only=True)
class _Queued:
    key: RequestKey
    order: int
    first_token: int
    cursor: int
    num_tokens: int
    num_chunks: int
    step_s: float
    """Planned time of each of its chunks."""
    work_s: float
    deadline_s: float
    served_s: float
    share: Share
    in_pipeline: int = 0
    """Chunks that have not left the last stage."""
    num_starved: int = 0


class Scheduler:
    """The admitted prompts that have chunks left, and whose turn it is."""

    def __init__(
        self,
        *,
        mode: str,
        turns: Turns,
        planner: ChunkPlanner,
        max_in_flight_steps: int,
        on_preempted: Callable[[], None],
        on_starved: Callable[[], None],
    ) -> None:
        """
        Args:
            mode: cpp | chunked-serial | request-pp, as in PrefillConfig.
            turns: all queued prompts have entered it.
            on_preempted: a prompt that got the last step and has chunks left lets another one go first.
            on_starved: a step goes to a prompt only because it has waited too long.
        """
        self._mode = mode
        self._turns = turns
        self._planner = planner
        self._max_in_flight_steps = max_in_flight_steps
        self._queue: dict[RequestKey, _Queued] = {}
        self._last_served: RequestKey | None = None
        self._started: list[RequestKey] = []
        """Queued prompts that have got steps, the last served last."""
        self._on_preempted = on_preempted
        self._on_starved = on_starved

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that no micro-batch has taken yet."""
        return sum(queued.num_tokens - queued.cursor for queued in self._queue.values())

    @property
    def queued_s(self) -> float:
        """Predicted time of the slowest stage for them; 0 while nothing is known."""
        return sum(
            self._planner.bottleneck_s(queued.cursor, queued.num_tokens, queued.step_s)
            for queued in self._queue.values()
        )

    def add(
        self,
        key: RequestKey,
        *,
        order: int,
        num_tokens: int,
        cursor: int,
        deadline_s: float,
        share: Share,
        now_s: float,
    ) -> None:
        """Queue a prompt whose first `cursor` tokens are in the pages. `order` is its place in the line of arrivals."""
        assert 0 <= cursor < num_tokens, f"cursor {cursor} of {num_tokens} tokens: the last one is always computed"
        num_chunks = self._planner.num_chunks(cursor, num_tokens)
        step_s = self._planner.step_s(cursor, num_tokens, num_chunks=num_chunks)
        self._queue[key] = _Queued(
            key=key,
            order=order,
            first_token=cursor,
            cursor=cursor,
            num_tokens=num_tokens,
            num_chunks=num_chunks,
            step_s=step_s,
            work_s=self._planner.remaining_s(cursor, num_tokens, step_s),
            deadline_s=deadline_s,
            served_s=now_s,
            share=share,
        )

    def remove(self, key: RequestKey) -> None:
        """Forget a prompt; one that is not queued (any more) is no error."""
        if self._queue.pop(key, None) and key in self._started:
            self._started.remove(key)

    def replan(self) -> None:
        """The stages were measured anew. Prompts keep their number of chunks, which hangs on the overhead of a step: chunks of equal
        time hardly tell it from the rest."""
        for queued in self._queue.values():
            queued.step_s = self._planner.step_s(queued.first_token, queued.num_tokens, num_chunks=queued.num_chunks)

    def next_micro_batch(self, *, in_flight_steps: int, now_s: float) -> Sequence[PlannedChunk]:
        """The next micro-batch, empty when the pipeline is full or nobody may go on. Moves the cursors.

        It is one chunk, or several that each finish their prompt, as long as a larger step is worth it: short prompts
        share a step, but no prompt's first token waits behind the body of a later one.
        """
        if in_flight_steps >= self._max_in_flight_steps:
            return []
        line = self._ranked_line(now_s)
        if not line:
            return []
        self._note_turn(line[0], now_s)
        shares = [line[0].share]
        batch = [self._take(self._queue[line[0].key], now_s)]
        shape = batch[0].shape
        if batch[0].is_last:
            for candidate in line[1:]:
                queued = self._queue[candidate.key]
                extra = StepShape.of_chunk(queued.num_tokens - queued.cursor, queued.cursor)
                if self._planner.has_room(shape, extra):
                    batch.append(self._take(queued, now_s, num_tokens=extra.tokens))
                    shares.append(queued.share)
                    shape += extra
        token_s = self._planner.charged_s(shape) / shape.tokens
        for planned, share in zip(batch, shares, strict=True):
            self._turns.charge(share, planned.num_tokens * token_s)
        return batch

    def chunk_left(self, key: RequestKey) -> None:
        """A chunk of the prompt has left the last stage."""
        if key in self._queue:
            self._queue[key].in_pipeline -= 1

    def candidates(self) -> list[Candidate]:
        """The queued prompts."""
        return [self._candidate(queued) for queued in self._queue.values()]

    def _ranked_line(self, now_s: float) -> list[Candidate]:
        ready = [
            self._candidate(queued)
            for queued in self._queue.values()
            if self._mode != "chunked-serial" or not queued.in_pipeline
        ]
        line = self._turns.ranked(ready, now_s)
        # Not only who got the very last step: a short prompt between two chunks of a long one leaves it its turn.
        started = self._started[-1] if self._started else None
        current = next((candidate for candidate in line if candidate.key == started), None)
        if current is not None and self._turns.keeps_turn(current, line[0], now_s):
            line.remove(current)
            line.insert(0, current)
        return line

    def _candidate(self, queued: _Queued) -> Candidate:
        return Candidate(
            key=queued.key,
            order=queued.order,
            deadline_s=queued.deadline_s,
            work_s=queued.work_s,
            work_left_s=self._planner.remaining_s(queued.cursor, queued.num_tokens, queued.step_s),
            served_s=queued.served_s,
            share=queued.share,
            num_starved=queued.num_starved,
        )

    def _take(self, queued: _Queued, now_s: float, *, num_tokens: int = 0) -> PlannedChunk:
        """Schedule the next `num_tokens` tokens; 0: as many as the plan says."""
        rest = queued.num_tokens - queued.cursor
        if not num_tokens:
            planned = self._planner.next_chunk(queued.cursor, queued.num_tokens, queued.step_s)
            num_tokens = rest if self._mode == "request-pp" else planned
        first_token = queued.cursor
        queued.cursor += num_tokens
        queued.served_s = now_s
        queued.in_pipeline += 1
        self._last_served = queued.key
        if queued.key in self._started:
            self._started.remove(queued.key)
        is_last = num_tokens == rest
        if is_last:
            del self._queue[queued.key]
        else:
            self._started.append(queued.key)
        return PlannedChunk(key=queued.key, first_token=first_token, num_tokens=num_tokens, is_last=is_last)

    def _note_turn(self, first: Candidate, now_s: float) -> None:
        if self._last_served in self._queue and self._last_served != first.key:
            self._on_preempted()
        if self._turns.is_starved(first, now_s):
            self._queue[first.key].num_starved += 1
            self._on_starved()
