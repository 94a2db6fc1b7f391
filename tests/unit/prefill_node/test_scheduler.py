"""Scheduler: chunks cover each prompt once, in order, within the bounds; whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool import RequestKey
from moontide.fair_share import Share
from moontide.perf_model import StepModel
from prefill_node.chunking import ChunkPlanner
from prefill_node.scheduler import PlannedChunk, Scheduler
from prefill_node.turns import Turns

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
QUANTUM_S = 0.1
A, B, C = (RequestKey(name, 1) for name in "abc")
STAGE = StepModel(overhead_s=0.002, token_s=0.001, pair_s=1e-7)
"""A stage on which one block takes 16 ms, so that plans for two of them have many chunks."""


class Line(Scheduler):
    """A scheduler that is told little: what is not said is as good as absent."""

    turns: Turns
    planner: ChunkPlanner
    num_preemptions = 0
    num_starved = 0

    def count_preempted(self) -> None:
        self.num_preemptions += 1

    def count_starved(self) -> None:
        self.num_starved += 1

    def add(self, key: RequestKey, *, order: int, num_tokens: int, cursor: int, **given: Any) -> None:
        share = Share(
            tenant=given.get("tenant", ""), priority=given.get("priority", 0), weight=given.get("weight", 1.0)
        )
        self.turns.enter(key, share)
        super().add(
            key,
            order=order,
            num_tokens=num_tokens,
            cursor=cursor,
            deadline_s=given.get("deadline_s", 1e6),
            share=share,
            now_s=given.get("now_s", 0.0),
        )

    def next_micro_batch(self, *, in_flight_steps: int, now_s: float = 0.0) -> Sequence[PlannedChunk]:
        batch = super().next_micro_batch(in_flight_steps=in_flight_steps, now_s=now_s)
        for planned in batch:
            if planned.is_last:
                self.turns.leave(planned.key)
        return batch


def make_scheduler(
    max_in_flight_steps: int = 3,
    *,
    mode: str = "cpp",
    policy: str = "fcfs",
    stages: Sequence[StepModel] = (),
    starvation_s: float = 1e9,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Line:
    planner = ChunkPlanner(
        chunking="equal-time" if stages else "fixed",
        chunk_tokens=chunk_tokens,
        block_tokens=BLOCK_TOKENS,
        max_step_s=1.0,
        stages=stages,
    )
    turns = Turns(policy=policy, starvation_s=starvation_s, quantum_s=QUANTUM_S)
    line = Line(
        mode=mode,
        turns=turns,
        planner=planner,
        max_in_flight_steps=max_in_flight_steps,
        on_preempted=lambda: line.count_preempted(),
        on_starved=lambda: line.count_starved(),
    )
    line.turns, line.planner = turns, planner
    return line


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


def served(scheduler: Line, steps: int, *, now_s: float = 0.0) -> list[str]:
    """Whose chunks the next steps are."""
    return [
        "+".join(planned.key.request_id for planned in scheduler.next_micro_batch(in_flight_steps=0, now_s=now_s))
        for _ in range(steps)
    ]


def test_a_shorter_prompt_preempts_a_longer_one_at_the_next_chunk_border() -> None:
    scheduler = make_scheduler(policy="srpt", stages=[STAGE, STAGE])
    scheduler.add(A, order=0, num_tokens=640, cursor=0)
    first = scheduler.next_micro_batch(in_flight_steps=0)
    scheduler.add(B, order=1, num_tokens=64, cursor=0)
    while (batch := scheduler.next_micro_batch(in_flight_steps=0))[0].key == B:
        assert not batch[0].first_token or batch[0].key == B
    assert scheduler.num_preemptions == 1
    assert batch[0].key == A
    assert batch[0].first_token == first[0].num_tokens, "it goes on where it was"


def test_prompts_of_one_length_do_not_take_turns_under_lars() -> None:
    scheduler = make_scheduler(policy="lars", stages=[STAGE, STAGE])
    for order, key in enumerate((A, B)):
        scheduler.add(key, order=order, num_tokens=640, cursor=0, deadline_s=10.0)
    order_of_service = served(scheduler, 100, now_s=1.0)
    num_chunks = order_of_service.count("a")
    assert num_chunks > 3
    assert order_of_service[: 2 * num_chunks] == ["a"] * num_chunks + ["b"] * num_chunks
    assert scheduler.num_preemptions == 0


def test_a_short_prompt_in_between_does_not_change_whose_turn_it_is_among_long_ones() -> None:
    scheduler = make_scheduler(policy="lars", stages=[STAGE, STAGE])
    for order, key in enumerate((A, B)):
        scheduler.add(key, order=order, num_tokens=640, cursor=0, deadline_s=10.0)
    assert served(scheduler, 2, now_s=1.0) == ["a", "a"]
    scheduler.add(C, order=2, num_tokens=16, cursor=0, deadline_s=1.0)
    assert served(scheduler, 4, now_s=1.5) == ["c", "a", "a", "a"]
    assert scheduler.num_preemptions == 1


def test_chunks_of_a_queued_prompt_follow_the_measured_times() -> None:
    """900 tokens below the knee are one step; planned for stages 2 % faster they would be seven that pay for it each."""
    knee = StepModel(overhead_s=0.005, token_s=1e-5, pair_s=5e-10, knee_tokens=1024)
    slower = StepModel(overhead_s=0.0051, token_s=1.02e-5, pair_s=5.1e-10, knee_tokens=1024)
    scheduler = make_scheduler(stages=[knee, knee], chunk_tokens=2048)
    scheduler.add(A, order=0, num_tokens=900, cursor=0)
    scheduler.planner.set_stages([slower, slower])
    scheduler.replan()
    assert scheduler.next_micro_batch(in_flight_steps=0) == [chunk(A, 0, 900, is_last=True)]


def test_a_queued_prompt_keeps_its_number_of_chunks() -> None:
    scheduler = make_scheduler(stages=[STAGE, STAGE])
    scheduler.add(A, order=0, num_tokens=640, cursor=0)
    num_chunks = served(scheduler, 100).count("a")
    costly = replace(STAGE, overhead_s=9 * STAGE.overhead_s)
    scheduler.add(B, order=1, num_tokens=640, cursor=0)
    scheduler.planner.set_stages([costly, costly])
    scheduler.replan()
    assert abs(served(scheduler, 100).count("b") - num_chunks) <= 1
    scheduler.add(C, order=2, num_tokens=640, cursor=0)
    assert served(scheduler, 100).count("c") < num_chunks - 1, "a new one is planned anew"


def test_deadlines_decide_under_edf() -> None:
    scheduler = make_scheduler(policy="edf", stages=[STAGE, STAGE])
    scheduler.add(A, order=0, num_tokens=640, cursor=0, deadline_s=20.0)
    scheduler.add(B, order=1, num_tokens=640, cursor=0, deadline_s=10.0)
    assert served(scheduler, 3) == ["b", "b", "b"]


def test_starving_prompt_gets_one_chunk_and_then_waits_half_as_long() -> None:
    scheduler = make_scheduler(policy="srpt", stages=[STAGE, STAGE], starvation_s=30.0)
    scheduler.add(A, order=0, num_tokens=6400, cursor=0, now_s=0.0)
    scheduler.add(B, order=1, num_tokens=640, cursor=0, now_s=10.0)
    assert served(scheduler, 1, now_s=10.0) == ["b"]
    assert served(scheduler, 3, now_s=30.0) == ["a", "b", "b"]
    assert served(scheduler, 2, now_s=44.0) == ["b", "b"]
    assert served(scheduler, 2, now_s=45.0) == ["a", "b"]
    assert served(scheduler, 1, now_s=53.0) == ["a"]
    assert scheduler.num_starved == 3


@pytest.mark.parametrize("policy", ["lars", "srpt"])
def test_more_short_prompts_than_the_group_can_do_leave_a_long_one_a_part(policy: str) -> None:
    scheduler = make_scheduler(policy=policy, stages=[STAGE, STAGE], starvation_s=30.0, chunk_tokens=512)
    scheduler.add(A, order=0, num_tokens=8192, cursor=0, now_s=0.0, deadline_s=20.0)
    now_s, num_steps, num_short = 0.0, 0, 0
    left = {A}
    while left:
        while num_short <= now_s / 0.2:  # each takes 0.26 s
            scheduler.add(
                RequestKey(f"short {num_short}", 1), order=1 + num_short, num_tokens=256, cursor=0,
                now_s=now_s, deadline_s=now_s + 0.5,
            )  # fmt: skip
            num_short += 1
        for planned in scheduler.next_micro_batch(in_flight_steps=0, now_s=now_s):
            now_s += STAGE.time_s(planned.shape)
            num_steps += planned.key == A
            left -= {planned.key} if planned.is_last else set()
        assert now_s < 300.0, f"{num_steps} chunks of the long prompt done"
    assert num_short > now_s / 0.26, "the short ones were too many all the time"


def test_chunked_serial_waits_for_a_chunk_to_leave_the_last_stage() -> None:
    scheduler = make_scheduler(mode="chunked-serial")
    scheduler.add(A, order=0, num_tokens=150, cursor=0)
    scheduler.add(B, order=1, num_tokens=150, cursor=0)
    assert served(scheduler, 3) == ["a", "b", ""]
    scheduler.chunk_left(B)
    assert served(scheduler, 2) == ["b", ""]
    scheduler.chunk_left(A)
    assert served(scheduler, 2) == ["a", ""]


def test_request_pp_makes_one_step_of_a_prompt() -> None:
    scheduler = make_scheduler(mode="request-pp")
    scheduler.add(A, order=0, num_tokens=1000, cursor=16)
    assert scheduler.next_micro_batch(in_flight_steps=0) == [chunk(A, 16, 984, is_last=True)]


def test_steps_are_not_packed_beyond_what_saves_time() -> None:
    scheduler = make_scheduler(stages=[STAGE, STAGE])
    for order, name in enumerate("abcd"):
        scheduler.add(RequestKey(name, 1), order=order, num_tokens=16, cursor=0)
    assert served(scheduler, 2) == ["a+b+c", "d"], (
        "2 ms of overhead are much beside 32 tokens of 1 ms, and little beside 48"
    )
