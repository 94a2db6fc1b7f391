"""Scheduler: chunks cover each prompt once, in order, within the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool import RequestKey
from prefill_node.scheduler import PlannedChunk, Scheduler

CHUNK_TOKENS = 64
A, B, C = (RequestKey(name, 1) for name in "abc")


def make_scheduler(max_in_flight_steps: int = 3) -> Scheduler:
    return Scheduler(chunk_tokens=CHUNK_TOKENS, max_in_flight_steps=max_in_flight_steps)


def chunk(key: RequestKey, first_token: int, num_tokens: int, *, is_last: bool = False) -> PlannedChunk:
    return PlannedChunk(key=key, first_token=first_token, num_tokens=num_tokens, is_last=is_last)


def test_cursor_moves_at_schedule_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(A, order=0, num_tokens=150, cursor=0)
    assert scheduler.next_micro_batch(in_flight_steps=0) == [chunk(A, 0, 64)]
    assert scheduler.next_micro_batch(in_flight_steps=1) == [chunk(A, 64, 64)]
    assert scheduler.queued_tokens == 22
    assert scheduler.next_micro_batch(in_flight_steps=2) == [chunk(A, 128, 22, is_last=True)]
    assert scheduler.next_micro_batch(in_flight_steps=0) == []


def test_full_pipeline_takes_nothing() -> None:
    scheduler = make_scheduler(max_in_flight_steps=2)
    scheduler.add(A, order=0, num_tokens=10, cursor=0)
    assert scheduler.next_micro_batch(in_flight_steps=2) == []
    assert scheduler.queued_tokens == 10


def test_next_prompt_follows_when_the_first_has_no_chunk_left() -> None:
    scheduler = make_scheduler()
    scheduler.add(B, order=1, num_tokens=100, cursor=0)
    scheduler.add(A, order=0, num_tokens=70, cursor=0)
    planned = [scheduler.next_micro_batch(in_flight_steps=0) for _ in range(4)]
    assert planned == [
        [chunk(A, 0, 64)],
        [chunk(A, 64, 6, is_last=True)],
        [chunk(B, 0, 64)],
        [chunk(B, 64, 36, is_last=True)],
    ]


def test_short_prompts_share_a_step_but_none_waits_behind_a_long_body() -> None:
    scheduler = make_scheduler()
    scheduler.add(A, order=0, num_tokens=20, cursor=0)
    scheduler.add(B, order=1, num_tokens=44, cursor=0)
    scheduler.add(C, order=2, num_tokens=65, cursor=0)
    assert scheduler.next_micro_batch(in_flight_steps=0) == [
        chunk(A, 0, 20, is_last=True),
        chunk(B, 0, 44, is_last=True),
    ]
    assert scheduler.next_micro_batch(in_flight_steps=0) == [chunk(C, 0, 64)]


def test_removed_prompt_gets_no_more_chunks() -> None:
    scheduler = make_scheduler()
    scheduler.add(A, order=0, num_tokens=200, cursor=0)
    scheduler.next_micro_batch(in_flight_steps=0)
    scheduler.remove(A)
    scheduler.remove(A)
    assert scheduler.next_micro_batch(in_flight_steps=0) == []
    assert scheduler.queued_tokens == 0


@given(
    prompts=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4)), min_size=1, max_size=6),
    in_flight=st.lists(st.integers(0, 4), max_size=40),
)
def test_chunks_tile_every_prompt_in_order(prompts: list[tuple[int, int]], in_flight: list[int]) -> None:
    scheduler = make_scheduler()
    cursors: dict[RequestKey, int] = {}
    totals: dict[RequestKey, int] = {}
    for order, (num_tokens, cached_blocks) in enumerate(prompts):
        key = RequestKey(f"r{order}", 1)
        totals[key] = num_tokens
        cursors[key] = min(cached_blocks * 16, (num_tokens - 1) // 16 * 16)
        scheduler.add(key, order=order, num_tokens=num_tokens, cursor=cursors[key])
    for in_flight_steps in [*in_flight, *[0] * 100]:
        batch = scheduler.next_micro_batch(in_flight_steps=in_flight_steps)
        assert not batch or in_flight_steps < 3
        assert sum(planned.num_tokens for planned in batch) <= CHUNK_TOKENS
        assert len(batch) <= 1 or all(planned.is_last for planned in batch)
        for planned in batch:
            assert planned.first_token == cursors[planned.key]
            assert planned.num_tokens > 0
            cursors[planned.key] += planned.num_tokens
            assert planned.is_last == (cursors[planned.key] == totals[planned.key])
        assert scheduler.queued_tokens == sum(totals[key] - cursors[key] for key in totals)
    assert cursors == totals
