"""GroupSession: signs of progress, modes, pages that are taken away, pages that are found again, idle time, predictions."""

from __future__ import annotations

import pytest

from model_runner.pages import PrefixPages
from moontide.fair_share import Share
from moontide_proto.v1 import common_pb2, stage_pb2
from prefill_node.prompt import Prompt
from tests.unit.prefill_node.session_world import BLOCK_TOKENS, MODEL, World


async def test_other_reports_do_not_hide_a_forward_that_hangs() -> None:
    world = World()
    computed = world.prompt("computed", 12)
    world.session.compute(computed, cursor=0)
    started_s = world.session.last_report_s
    assert started_s == world.clock.now()
    fetched = world.prompt("fetched", 9)
    world.clock.advance(100)
    world.session.fetch(fetched, 2)
    world.report(fetch_done=stage_pb2.FetchDone(request_id="fetched", request_epoch=1, num_blocks=2))
    world.session.finish(fetched)
    world.report(end_done=stage_pb2.EndDone(request_id="fetched", request_epoch=1))
    assert world.session.last_report_s == started_s

    world.report(step_done=stage_pb2.StepDone(seq=world.entries[0].seq))
    assert world.session.last_report_s == started_s + 100


async def test_without_a_forward_every_report_is_progress() -> None:
    world = World()
    prompt = world.prompt("fetched", 9)
    world.session.fetch(prompt, 2)
    world.clock.advance(100)
    world.report(fetch_done=stage_pb2.FetchDone(request_id="fetched", request_epoch=1, num_blocks=2))
    assert world.session.last_report_s == world.clock.now()
    world.clock.advance(100)
    world.session.compute(prompt, cursor=8)
    assert world.session.last_report_s == world.clock.now(), "the pipeline was empty until now"


async def test_request_pp_sends_a_whole_prompt_as_one_step() -> None:
    world = World(mode="request-pp", num_stages=2)
    world.session.compute(world.prompt("r", 30), cursor=0)
    assert world.sent == [(0, 30)]
    assert world.entries[0].compute.chunks[0].is_last


async def test_chunked_serial_sends_the_next_chunk_when_the_one_before_has_left_the_last_stage() -> None:
    world = World(mode="chunked-serial", num_stages=2)
    world.session.compute(world.prompt("r", 20), cursor=0)
    chunks = [(0, 8), (8, 8), (16, 4)]
    for num_sent in (1, 2):
        assert world.sent == chunks[:num_sent]
        done = stage_pb2.StepDone(seq=world.entries[-1].seq)
        world.report(step_done=done, stage_idx=0)
        assert world.sent == chunks[:num_sent], "it is in the last stage"
        world.report(step_done=done, stage_idx=1)
    assert world.sent == chunks


async def test_cpp_sends_the_next_chunks_while_the_first_is_in_the_pipeline() -> None:
    world = World(mode="cpp", num_stages=2)
    world.session.compute(world.prompt("r", 20), cursor=0)
    assert world.sent == [(0, 8), (8, 8), (16, 4)]


async def test_pages_of_the_longer_prompt_go_to_the_shorter_one_and_it_goes_on_from_the_store() -> None:
    world = World(num_pages=20, model=MODEL)
    long = world.prompt("long", 64)
    world.session.compute(long, cursor=0)
    short = world.waiting("short", 32)
    assert world.session.choose([short]) is None
    first = world.entries[0].compute.chunks[0]
    assert not long.dropped.is_set(), "a step of it is in the pipeline"
    world.work()
    assert long.dropped.is_set()
    assert world.session.choose([short, long]) is short
    world.session.take_pages(short, hit_blocks=0)
    assert world.session.choose([long]) is None, "and it does not take them back"
    world.session.compute(short, cursor=0)
    world.work()
    world.session.finish(short)
    world.work()

    assert 0 < long.put_tokens < 64
    assert world.session.choose([long]) is long
    world.session.take_pages(long, hit_blocks=long.put_tokens // BLOCK_TOKENS)
    world.session.compute(long, cursor=long.put_tokens)
    assert world.entries[0].compute.chunks[0].first_token == long.put_tokens >= first.num_tokens
    world.work()
    assert long.first_token.result().token_id == 7
    world.session.finish(long)
    world.work()
    world.session.check_invariants()
    assert world.session.pages.num_free == 20


async def test_pages_go_to_a_prompt_that_became_the_first_in_line_while_it_waited() -> None:
    world = World(num_pages=20, policy="lars", model=MODEL)
    long = world.prompt("long", 80)
    world.session.compute(long, cursor=0)
    short = world.waiting("short", 20)
    chosen: list[Prompt | None] = []
    world.session.on_pages_changed = lambda: chosen.append(world.session.choose([short]))
    assert world.session.choose([short]) is None
    assert not long.is_dropping, "its slack, relative to its work, is less than that of the short one"
    while not long.dropped.is_set():
        world.step()
    assert chosen[-1] is short
    assert 0 < long.put_tokens < long.num_tokens


async def test_pages_of_a_prompt_that_just_has_its_prefix_are_asked_for_again() -> None:
    world = World(num_pages=20, model=MODEL)
    long = world.prompt("long", 64)
    short = world.waiting("short", 32)
    world.session.on_pages_changed = lambda: world.session.choose([short])
    assert world.session.choose([short]) is None
    assert not long.is_dropping, "nothing of it can be scheduled yet, so nothing is preempted"
    world.session.compute(long, cursor=0)
    assert long.is_dropping


async def test_pages_are_not_taken_for_a_prompt_that_does_not_go_first() -> None:
    world = World(num_pages=20, model=MODEL)
    short = world.prompt("short", 40)
    world.session.compute(short, cursor=0)
    longer = world.waiting("longer", 60)
    assert world.session.choose([longer]) is None
    world.work()
    assert not short.dropped.is_set()
    assert short.first_token.done()


async def test_pages_whose_puts_wait_for_the_end_of_the_prompt_are_not_taken() -> None:
    world = World(num_pages=20, model=MODEL, push="after-prefill")
    long = world.prompt("long", 64)
    world.session.compute(long, cursor=0)
    assert world.session.choose([world.waiting("short", 32)]) is None
    world.work()
    assert not long.dropped.is_set()
    assert long.first_token.done()


async def test_smaller_prompts_go_ahead_of_one_that_does_not_fit_until_it_starves() -> None:
    world = World(num_pages=20, policy="fcfs")
    running = world.prompt("running", 40)
    large, small = world.waiting("large", 60), world.waiting("small", 8)
    assert world.session.choose([large, small]) is small
    world.clock.advance(31)
    assert world.session.choose([large, small]) is None
    world.session.finish(running)
    assert world.session.choose([large, small]) is large


async def test_a_prompt_given_up_while_its_pages_are_taken_away_leaves_nothing() -> None:
    world = World(num_pages=20, model=MODEL)
    long = world.prompt("long", 64)
    world.session.compute(long, cursor=0)
    world.session.choose([world.waiting("short", 32)])
    world.session.finish(long)
    world.work()
    world.session.check_invariants()
    assert world.session.pages.num_free == 20
    assert not world.session.knows(long.key)


async def test_pages_are_taken_away_also_when_the_last_puts_are_reported_before_the_step() -> None:
    world = World(num_pages=20, model=MODEL)
    long = world.prompt("long", 64)
    world.session.compute(long, cursor=0)
    world.session.choose([world.waiting("short", 32)])
    steps = [entry.seq for entry in world.entries]
    for seq in steps:
        world.report(puts_done=stage_pb2.PutsDone(seq=seq))
    for seq in steps:
        world.report(step_done=stage_pb2.StepDone(seq=seq))
    assert world.entries[-1].HasField("end")


async def test_puts_of_a_step_that_are_reported_after_those_of_a_later_one_take_nothing_back() -> None:
    world = World(model=MODEL)
    prompt = world.prompt("r", 64)
    world.session.compute(prompt, cursor=0)
    first, second = world.entries[:2]
    world.report(puts_done=stage_pb2.PutsDone(seq=second.seq))
    (chunk,) = second.compute.chunks
    assert prompt.put_tokens == chunk.first_token + chunk.num_tokens
    world.report(puts_done=stage_pb2.PutsDone(seq=first.seq))
    assert prompt.put_tokens == chunk.first_token + chunk.num_tokens


async def test_blocks_that_were_being_fetched_when_a_resumed_prompt_was_given_up_are_not_found_in_its_pages() -> None:
    world = World(num_pages=20, model=MODEL)
    long = world.prompt("long", 64)
    world.session.compute(long, cursor=0)
    world.session.choose([world.waiting("short", 32)])
    world.work()
    assert long.dropped.is_set()
    num_blocks = long.put_tokens // BLOCK_TOKENS
    world.session.pages = PrefixPages(20)
    world.session.take_pages(long, hit_blocks=num_blocks)
    world.session.fetch(long, num_blocks)
    world.session.finish(long)
    world.report(fetch_done=stage_pb2.FetchDone(request_id="long", request_epoch=1, num_blocks=0))
    world.report(end_done=stage_pb2.EndDone(request_id="long", request_epoch=1))
    assert world.prompt("again", 64, hit_blocks=num_blocks).held_blocks == 0


async def test_pages_that_are_taken_away_are_for_the_first_in_line() -> None:
    world = World(num_pages=20, policy="edf", model=MODEL)
    long = world.prompt("long", 64)
    world.session.compute(long, cursor=0)
    first, other = world.waiting("first", 32), world.waiting("other", 16)
    other.deadline_s = long.deadline_s - 0.01
    assert world.session.choose([first, other]) is None, "although the other one would fit"
    world.work()
    assert world.session.choose([other, first, long]) is first


async def test_pages_that_are_free_at_once_go_to_the_first_in_line() -> None:
    world = World(num_pages=20, policy="edf", model=MODEL)
    for seed, name in enumerate(("one", "two", "three")):
        world.session.compute(world.prompt(name, 24, seed=seed), cursor=0)
    first, other = world.waiting("first", 20), world.waiting("other", 8)
    first.deadline_s -= 0.02
    other.deadline_s -= 0.01
    assert world.session.choose([first, other]) is first


async def test_computed_blocks_are_found_in_the_pages_again() -> None:
    world = World()
    first = world.prompt("first", 30, hit_blocks=0)
    world.session.compute(first, cursor=0)
    world.work()
    world.session.finish(first)
    world.work()
    again = world.prompt("again", 30, hit_blocks=7)
    assert again.pages[:7] == first_pages(again)
    assert again.held_blocks == 7
    world.session.fetch(again, 7)
    assert again.fetched.result() == 7
    assert not world.entries, "nothing is fetched"
    other = world.prompt("other", 30, hit_blocks=3, seed=1)
    assert other.held_blocks == 0
    world.session.fetch(other, 3)
    assert world.entries[0].fetch.first_block == 0
    world.session.check_invariants()


def first_pages(prompt: Prompt) -> list[int]:
    return prompt.pages[: prompt.held_blocks]


async def test_only_what_is_missing_is_fetched() -> None:
    world = World()
    first = world.prompt("first", 17)
    world.session.compute(first, cursor=0)
    world.work()
    world.session.finish(first)
    world.work()
    longer = world.prompt("longer", 60, hit_blocks=14)
    assert longer.held_blocks == 4
    world.session.fetch(longer, 14)
    fetch = world.entries[0].fetch
    assert fetch.first_block == 4
    assert list(fetch.pages) == longer.pages[:14]
    assert fetch.block_hashes == b"".join(longer.block_hashes[4:14])
    world.report(fetch_done=stage_pb2.FetchDone(request_id="longer", request_epoch=1, num_blocks=0))
    assert longer.fetched.result() == 4, "what is in the pages stays"


async def test_idle_time_while_steps_are_in_flight_is_a_bubble() -> None:
    world = World()
    prompt = world.prompt("r", 16)
    world.session.compute(prompt, cursor=0)
    world.clock.advance(3)
    world.work(step_s=1.0)
    assert world.value("prefill_bubble_seconds_total", stage="0") == 3.0
    world.clock.advance(50)
    assert world.value("prefill_bubble_seconds_total", stage="0") == 3.0, "nothing was in flight"


async def test_predictions_follow_what_the_steps_took() -> None:
    world = World(model=MODEL)
    before_s = world.session.predict_s(0, 64)
    for number in range(40):
        prompt = world.prompt(f"r{number}", 32 + number, seed=number)
        world.session.compute(prompt, cursor=0)
        world.work(step_s=0.002, token_s=0.02)
        world.session.finish(prompt)
        world.work()
    assert 1.8 * before_s < world.session.predict_s(0, 64) < 2.2 * before_s


async def test_queued_seconds_count_what_runs_what_is_planned_and_what_waits() -> None:
    world = World(model=MODEL)
    assert world.session.slowest_stage == MODEL
    assert world.session.queued_s == 0
    running = world.prompt("running", 64)
    world.session.compute(running, cursor=0)
    alone_s = world.session.predict_s(0, 64)
    assert world.session.queued_s == pytest.approx(alone_s, rel=0.1)
    waiting = world.waiting("waiting", 32, seed=1)
    before_s = world.session.queued_s
    assert before_s == pytest.approx(alone_s + world.session.predict_s(0, 32), rel=0.1)
    world.clock.advance(0.05)
    assert world.session.queued_s == pytest.approx(before_s - 0.05), "a part of the first step is over"
    world.session.take_pages(waiting, hit_blocks=7)
    assert world.session.queued_s == pytest.approx(before_s - 0.05 - world.session.predict_s(0, 28), abs=0.01)
    world.session.finish(waiting)
    world.work(step_s=0.001, token_s=0.01)
    assert world.session.queued_s == 0


async def test_without_measured_times_nothing_is_predicted() -> None:
    world = World()
    world.session.compute(world.prompt("running", 64), cursor=0)
    assert world.session.slowest_stage is None
    assert world.session.queued_s == 0


async def test_what_is_ahead_of_a_prompt_follows_from_its_class() -> None:
    world = World(model=MODEL)
    world.session.compute(world.prompt("running", 64), cursor=0)
    in_flight_s = world.session.queued_s
    low = world.waiting("low", 32, seed=1, share=Share(tenant="", priority=-1))
    high = world.waiting("high", 32, seed=2, share=Share(tenant="", priority=1))
    assert world.session.ahead_s(low) == pytest.approx(in_flight_s + world.session.predict_s(0, 32), rel=0.1)
    assert world.session.ahead_s(high) < in_flight_s, "only what is in the pipeline"


async def test_a_higher_class_gets_the_next_step_and_the_pages_of_a_lower_one() -> None:
    world = World(num_pages=20, model=MODEL)
    low = world.prompt("low", 64)
    world.session.compute(low, cursor=0)
    high = world.waiting("high", 60, seed=1, share=Share(tenant="", priority=1))
    assert world.session.choose([high]) is None
    while not low.dropped.is_set():
        world.work(step_s=0.001, token_s=0.01)
    assert world.session.choose([low, high]) is high
    world.session.take_pages(high, hit_blocks=0)
    assert world.session.choose([low]) is None
    world.session.compute(high, cursor=0)
    world.work(step_s=0.001, token_s=0.01)
    world.session.finish(high)
    world.work()
    assert world.session.choose([low]) is low
    world.session.check_invariants()


async def test_waits_of_a_step_stand_beside_its_forward_in_the_timeline() -> None:
    world = World(num_stages=2)
    prompt = world.prompt("r", 4)
    world.session.compute(prompt, cursor=0)
    seq = world.entries[0].seq
    world.clock.advance(10)
    world.report(step_done=stage_pb2.StepDone(seq=seq, compute_s=2, age_s=5, wait_send_s=3), stage_idx=0)
    token = common_pb2.Token(token_id=7)
    world.report(step_done=stage_pb2.StepDone(seq=seq, compute_s=1, wait_recv_s=4, tokens=[token]), stage_idx=1)
    assert [(span.track, span.name, span.start_s, span.duration_s, span.num_tokens) for span in prompt.spans] == [
        ("stage 0", "chunk 0", 3, 2, 4),
        ("stage 0 send", "chunk 0", 5, 3, 4),
        ("stage 1", "chunk 0", 9, 1, 4),
        ("stage 1 recv", "chunk 0", 5, 4, 4),
    ]
