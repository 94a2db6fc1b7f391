"""One request from arrival to last token: output, recovery, and that nothing is held afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from front import ANSWER_TEXT, Front, open_front, text_of, tokens_of, until

from conductor import recovery, service
from conductor.cost import Slo
from conductor.options import Options
from conductor.policies import Pick
from conductor.tokenizer import ChatMessage
from conductor.validation import ChatPrompt, TokenPrompt
from moontide.errors import (
    BlockMissing,
    DeadlineExceeded,
    Internal,
    MoontideError,
    NoCapacity,
    NodeLost,
    PromptTooLong,
    Rejected,
    RejectReason,
)
from moontide.sampling_params import FinishReason
from moontide_proto.v1 import decode_pb2_grpc, prefill_pb2_grpc


async def test_answer_streams_to_the_end_token(front: Front) -> None:
    deltas = await front.generate()
    assert text_of(deltas) == ANSWER_TEXT
    assert tokens_of(deltas) == [*front.answer_ids, *front.conductor.model.eos_token_ids]
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.STOP]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert len(deltas) == len(front.answer_ids) + 1, "every token came by itself"
    assert front.cluster.prompts() == [front.prompt_ids]
    await front.settle()
    assert len(front.cluster.store.released) == 1
    assert front.metric("conductor_requests_total", outcome="stop") == 1


async def test_max_tokens_ends_for_length_and_counts_usage(front: Front) -> None:
    front.cluster.prefill[0].hit_tokens = 8
    deltas = await front.generate(max_tokens=4)
    assert tokens_of(deltas) == front.answer_ids[:4]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].usage.completion_tokens == 4
    assert deltas[-1].usage.prompt_tokens == len(front.prompt_ids)
    assert deltas[-1].usage.cached_tokens == 8
    await front.settle()


@pytest.mark.parametrize("only_one_was_asked_for", [True, False])
async def test_first_token_can_end_the_request_and_its_prompt_is_still_cached(
    front: Front, only_one_was_asked_for: bool
) -> None:
    prefill, decode = front.cluster.prefill[0], front.cluster.decode[0]
    prefill.may_complete.clear()
    if only_one_was_asked_for:
        deltas = await front.generate(max_tokens=1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert not decode.opened, "there is nothing to decode"
    else:
        deltas = await front.generate(stop_token_ids=(front.answer_ids[0],))
        assert deltas[-1].finish_reason is FinishReason.STOP
        await until(lambda: len(decode.cancelled) == 1)
    assert tokens_of(deltas) == front.answer_ids[:1]
    assert prefill.open, "the answer is over, but prefill goes on sealing"
    prefill.may_complete.set()
    await front.settle()
    assert len(prefill.completed) == 1
    timeline = front.conductor.timeline("r1")
    assert timeline is not None
    assert "stage 0" in {span.track for span in timeline.spans}
    assert timeline.plan == "mode cpp"


@pytest.mark.parametrize("first_token_stop", [True, False])
async def test_stop_token_ends_the_request(front: Front, first_token_stop: bool) -> None:
    position = 0 if first_token_stop else 5
    deltas = await front.generate(stop_token_ids=(front.answer_ids[position],))
    first = front.answer_ids.index(front.answer_ids[position])
    assert tokens_of(deltas) == front.answer_ids[: first + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP
    await front.settle()


async def test_ignore_eos_goes_past_the_end_token(front: Front) -> None:
    num = len(front.answer_ids) + 3
    deltas = await front.generate(ignore_eos=True, max_tokens=num)
    assert len(tokens_of(deltas)) == num
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    await front.settle()


@pytest.mark.parametrize("stop", ["brown fox", "wn f", "The", "T", "🦊", "n fox jumps ov"])
async def test_stop_string_cuts_the_text_before_it(front: Front, stop: str) -> None:
    front.cluster.decode[0].faults.append(f"pause {len(front.answer_ids) - 2}")
    deltas = await front.generate(stop=(stop,))
    assert text_of(deltas) == ANSWER_TEXT[: ANSWER_TEXT.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    await front.settle()
    assert len(front.cluster.decode[0].cancelled) == 1, "the nodes do not match text, so decode must be told"


async def test_decode_is_told_where_the_prompt_is_accounted(front: Front) -> None:
    await front.generate()
    await front.settle()
    assert front.cluster.decode[0].store_addresses == [front.cluster.prefill[0].store_address]


async def test_text_held_back_for_a_stop_string_comes_when_the_answer_ends(front: Front) -> None:
    deltas = await front.generate(stop=("runs away with the spoon",))
    assert text_of(deltas) == ANSWER_TEXT
    await front.settle()


async def test_text_cut_off_inside_a_character_equals_the_decoded_ids(front: Front) -> None:
    texts = []
    for max_tokens in range(1, len(front.answer_ids) + 1):
        texts.append(text_of(await front.generate(max_tokens=max_tokens)))
        assert texts[-1] == front.decoded(front.answer_ids[:max_tokens])
    assert any(text.endswith("\ufffd") for text in texts), "some cut lies inside the emoji"
    await front.settle()


async def test_decode_may_end_for_length_by_itself(front: Front) -> None:
    front.cluster.decode[0].faults.append("length 1")
    deltas = await front.generate()
    assert tokens_of(deltas) == front.answer_ids[:2]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    await front.settle()


async def test_ttft_parts_add_up_and_spans_lie_inside_the_request(front: Front) -> None:
    deltas = await front.generate()
    parts = deltas[0].ttft_parts
    assert parts is not None
    assert all(delta.ttft_parts is None for delta in deltas[1:])
    values = dataclasses.asdict(parts)
    ttft_s = values.pop("ttft_s")
    assert sum(values.values()) == pytest.approx(ttft_s, abs=1e-9)
    assert all(value >= 0 for value in values.values())
    await front.settle()
    timeline = front.conductor.timeline("r1")
    assert timeline is not None
    assert timeline.ttft_parts == parts
    assert timeline.outcome == "stop"
    assert front.metric("conductor_handoff_seconds_count") == 1
    assert {"tokenize", "route", "prefill call", "handoff", "decode", "chunk", "pull"} <= {
        s.name for s in timeline.spans
    }
    for span in timeline.spans:
        assert 0 <= span.start_s <= span.end_s <= timeline.duration_s, span
    by_name = {span.name: span for span in timeline.spans}
    call = by_name["prefill call"]
    assert call.start_s <= by_name["chunk"].start_s <= call.end_s, "work of stage 0 begins when the call arrives there"


@pytest.mark.parametrize("fault", ["lost", "lost after first", "ends", "missing"])
async def test_prefill_fault_is_redone_without_repeat_or_gap(front: Front, fault: str) -> None:
    front.cluster.prefill[0].faults.append(fault)
    deltas = await front.generate()
    assert text_of(deltas) == ANSWER_TEXT
    assert tokens_of(deltas) == [*front.answer_ids, *front.conductor.model.eos_token_ids]
    sent = front.answer_ids[:1] if fault == "lost after first" else []
    assert front.cluster.prompts() == [front.prompt_ids, [*front.prompt_ids, *sent]]
    calls = front.cluster.prefill[0].calls
    assert [(call.epoch, call.output_idx) for call in calls] == [(1, 0), (2, len(sent))]
    assert calls[0].sampling == calls[1].sampling
    await front.settle()
    assert sorted(epoch for _, epoch in front.cluster.store.released) == [1, 2]
    assert front.metric("conductor_requests_total", outcome="stop") == 1


@pytest.mark.parametrize(("fault", "num_sent"), [("lost 3", 4), ("missing", 1), ("lost 0", 1)])
async def test_decode_fault_continues_after_what_the_client_has(front: Front, fault: str, num_sent: int) -> None:
    front.cluster.decode[0].faults.append(fault)
    deltas = await front.generate()
    assert text_of(deltas) == ANSWER_TEXT
    assert front.cluster.prompts() == [front.prompt_ids, [*front.prompt_ids, *front.answer_ids[:num_sent]]]
    assert deltas[-1].usage.prompt_tokens == len(front.prompt_ids)
    await front.settle()


async def test_prefill_group_lost_after_its_part_does_not_stop_decode(front: Front) -> None:
    prefill, decode = front.cluster.prefill[0], front.cluster.decode[0]
    prefill.faults.append("lost after completed")
    decode.may_step.clear()
    running = asyncio.create_task(front.generate())
    await until(lambda: bool(prefill.completed) and not prefill.open)
    await until(lambda: front.conductor._background.num_running == 0)
    decode.may_step.set()
    assert text_of(await running) == ANSWER_TEXT
    assert [epoch for _, epoch in decode.opened] == [1]
    await front.settle()


async def test_channel_to_a_group_that_is_gone_is_closed(model_dir: Path) -> None:
    async with open_front(model_dir, num_prefill=2, num_decode=1) as front:
        records = front.cluster.registry.records
        gone, other = records["prefill-0"], records["prefill-1"]
        await front.cluster.registry.remove(other.node_id)
        await front.generate(request_id="a")
        await front.cluster.registry.remove(gone.node_id)
        await front.cluster.registry.set(other)
        await front.generate(request_id="b")
        assert list(front.conductor._channels) == [other.node_id]
        await front.settle()


async def test_session_with_a_decode_instance_that_is_gone_is_forgotten(model_dir: Path) -> None:
    async with open_front(model_dir, num_decode=2) as front:
        sessions = front.conductor._sessions
        gone, other = (front.cluster.registry.records[f"decode-{idx}"] for idx in range(2))
        await front.cluster.registry.remove(other.node_id)
        await front.generate(request_id="a")
        session = sessions.get(gone)
        await front.cluster.registry.remove(gone.node_id)
        await front.cluster.stop(gone.node_id)
        await until(lambda: session.is_broken)
        await front.cluster.registry.set(other)
        await front.generate(request_id="b")
        assert list(sessions._sessions) == [other.node_id]
        await front.settle()


async def test_blocks_missing_twice_are_computed_under_names_of_their_own(front: Front) -> None:
    """A damaged block keeps its name in the store, so that computing it again under that name does not help."""
    front.cluster.decode[0].faults.extend(["missing", "missing"])
    assert text_of(await front.generate()) == ANSWER_TEXT
    salts = [call.cache_salt for call in front.cluster.prefill[0].calls]
    assert salts[:2] == ["", ""]
    assert salts[2:] == [front.cluster.prefill[0].calls[2].request_id]
    await front.settle()


async def test_lost_node_is_replaced_by_another(model_dir: Path) -> None:
    async with open_front(model_dir, num_prefill=2, num_decode=2) as front:
        for node in front.cluster.prefill:
            node.may_sample.clear()
        running = asyncio.create_task(front.generate())
        await until(lambda: any(node.open for node in front.cluster.prefill))
        lost, other = sorted(front.cluster.prefill, key=lambda node: not node.open)
        other.may_sample.set()
        await front.cluster.stop(lost.node_id)
        assert text_of(await running) == ANSWER_TEXT
        assert len(other.calls) == 1
        await until(lambda: front.conductor.num_active == 0)


async def test_call_on_the_channel_of_a_node_that_has_moved_is_redone(front: Front) -> None:
    prefill = front.cluster.prefill[0]
    old_server = front.cluster.servers["prefill-0"]
    prefill.may_sample.clear()
    on_old_address = asyncio.create_task(front.generate(request_id="a"))
    await until(lambda: bool(prefill.open))
    await front.cluster.serve(
        "prefill-0", "prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, prefill, "moontide.v1.Prefill"
    )
    on_new_address = asyncio.create_task(front.generate(request_id="b"))
    await until(lambda: front.metric("conductor_retries_total", reason="NodeLost") == 1)
    prefill.may_sample.set()
    assert text_of(await on_old_address) == ANSWER_TEXT
    assert text_of(await on_new_address) == ANSWER_TEXT
    await front.settle()
    await old_server.close()


async def test_session_forgets_a_request_that_failed_on_the_decode_instance(front: Front) -> None:
    front.cluster.decode[0].faults.append("missing")
    await front.generate()
    await front.settle()
    record = front.cluster.registry.records["decode-0"]
    assert front.conductor._sessions.get(record).num_requests == 0


async def test_prompt_whose_first_token_cannot_be_drawn_fails_with_the_reason(front: Front) -> None:
    front.cluster.prefill[0].faults.append("no token")
    with pytest.raises(Internal, match="prefill group prefill-0: NaN logits"):
        await front.generate()
    await front.settle()
    assert len(front.cluster.prefill[0].calls) == 1, "it would give NaN again"


async def test_request_waits_for_a_node_to_come_back_until_its_deadline(front: Front) -> None:
    decode = front.cluster.decode[0]
    decode.may_step.clear()
    running = asyncio.create_task(front.generate())
    await until(lambda: bool(decode.opened) and front.metric("conductor_output_tokens_total") >= 1)
    record = front.cluster.registry.records["decode-0"]
    await front.cluster.registry.remove("decode-0")
    await front.cluster.stop("decode-0")
    await until(lambda: front.metric("conductor_retries_total", reason="NodeLost") == 1)
    assert not running.done()
    decode.may_step.set()
    await front.cluster.serve(
        "decode-0", "decode", decode_pb2_grpc.add_DecodeServicer_to_server, decode, "moontide.v1.Decode"
    )
    assert front.cluster.registry.records["decode-0"].address != record.address
    assert text_of(await running) == ANSWER_TEXT


async def test_attempts_are_bounded_and_the_last_error_is_named(model_dir: Path) -> None:
    async with open_front(model_dir, max_attempts=3) as front:
        front.cluster.prefill[0].faults.extend(["lost"] * 5)
        with pytest.raises(NodeLost, match=r"gave up after 3 attempts.*stage 1 is gone"):
            await front.generate()
        assert len(front.cluster.prefill[0].calls) == 3
        await front.settle()
        assert front.metric("conductor_requests_total", outcome="NodeLost") == 1


async def test_attempts_that_go_on_after_ever_more_of_the_prompt_are_not_in_vain(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_front(model_dir, max_attempts=2) as front:
        prefill = front.cluster.prefill[0]
        prefill.hit_growth = 1
        prefill.faults.extend(["lost"] * 4)
        assert text_of(await front.generate()) == ANSWER_TEXT
        assert len(prefill.calls) == 5
        monkeypatch.setattr(service, "MOST_ATTEMPTS_FACTOR", 2)
        prefill.faults.extend(["lost"] * 10)
        with pytest.raises(NodeLost, match="gave up after 4 attempts"):
            await front.generate(request_id="hopeless")
        await front.settle()


async def test_attempts_that_bring_only_the_token_of_prefill_are_bounded(model_dir: Path) -> None:
    async with open_front(model_dir, max_attempts=3) as front:
        front.cluster.decode[0].faults.extend(["missing"] * 10)
        with pytest.raises(BlockMissing, match="gave up after 3 attempts"):
            await front.generate()
        assert len(front.cluster.prefill[0].calls) == 3
        await front.settle()


async def test_request_under_which_nodes_die_again_and_again_is_given_up(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_ATTEMPTS_FACTOR", 2)
    async with open_front(model_dir, max_attempts=2) as front:
        front.cluster.decode[0].faults.extend(["lost 1"] * 10)
        with pytest.raises(NodeLost, match="gave up after 4 attempts"):
            await front.generate()
        await front.settle()


async def test_refusal_goes_to_another_group_or_to_the_client(model_dir: Path) -> None:
    async with open_front(model_dir, num_prefill=2) as front:
        for node in front.cluster.prefill:
            node.faults.append("rejected")
        with pytest.raises(Rejected, match="queue is full"):
            await front.generate()
        assert [len(node.calls) for node in front.cluster.prefill] == [1, 1]
        front.cluster.prefill[0].faults.append("rejected")
        for request_id in ("a", "b", "c"):
            assert text_of(await front.generate(request_id=request_id)) == ANSWER_TEXT
        await front.settle()


@pytest.mark.parametrize(("num_decode", "admission"), [(1, "predictive"), (2, "predictive"), (1, "off")])
async def test_answer_that_has_begun_outwaits_decode_instances_that_decline_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, num_decode: int, admission: str
) -> None:
    monkeypatch.setattr(recovery, "LONGEST_PAUSE_S", 0.02)
    async with open_front(model_dir, num_decode=num_decode, max_attempts=2, admission=admission) as front:
        for decode in front.cluster.decode:
            decode.faults.extend(["lost 2", *["declined"] * 6])
        assert text_of(await front.generate()) == ANSWER_TEXT
        assert front.metric("conductor_retries_total", reason="Declined") >= 3
        await front.settle()


async def test_answer_that_has_begun_outwaits_a_full_queue(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LONGEST_PAUSE_S", 0.02)
    async with open_front(model_dir, max_attempts=2) as front:
        front.cluster.decode[0].faults.append("lost 2")
        front.cluster.prefill[0].faults.extend(["", "rejected", "rejected", "rejected"])
        assert text_of(await front.generate()) == ANSWER_TEXT
        assert len(front.cluster.prefill[0].calls) == 5
        await front.settle()


async def test_answer_that_no_group_can_hold_any_more_ends_with_the_refusal(front: Front) -> None:
    front.cluster.decode[0].faults.append("lost 2")
    front.cluster.prefill[0].faults.extend(["", "rejected"])
    record = front.cluster.registry.records["prefill-0"]
    await front.cluster.registry.set(dataclasses.replace(record, load={"num_pages": 1.0}))
    with pytest.raises(Rejected, match="queue is full"):
        await front.generate()
    assert len(front.cluster.prefill[0].calls) == 2
    await front.settle()


async def test_deadline_ends_a_request_that_hangs(front: Front) -> None:
    front.cluster.decode[0].may_step.clear()
    with pytest.raises(DeadlineExceeded):
        await front.generate(timeout_s=0.5)
    await front.settle()
    assert front.metric("conductor_requests_total", outcome="DeadlineExceeded") == 1


@pytest.mark.parametrize("moment", ["prefill", "sealing", "decode"])
async def test_closing_the_iterator_cancels_every_node(front: Front, moment: str) -> None:
    prefill, decode = front.cluster.prefill[0], front.cluster.decode[0]
    gate = {"prefill": prefill.may_sample, "sealing": prefill.may_complete, "decode": decode.may_step}[moment]
    gate.clear()
    if moment == "prefill":
        running = asyncio.create_task(front.generate())
        await until(lambda: bool(prefill.open) and bool(decode.open))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    else:
        async with aclosing(front.conductor.generate(front.submission())) as deltas:
            await anext(deltas)
            if moment == "decode":
                await until(lambda: bool(prefill.completed))
    await front.settle()
    assert len(decode.cancelled) == 1
    assert len(prefill.cancelled) == (0 if moment == "decode" else 1)
    timeline = front.conductor.timeline("r1")
    assert timeline is not None
    assert timeline.outcome == "cancelled"
    assert front.metric("conductor_requests_total", outcome="cancelled") == 1


async def test_cancel_at_any_moment_leaves_nothing(front: Front) -> None:
    """Each request is cancelled one turn of the event loop later than the one before."""
    for num_turns in range(60):
        running = asyncio.create_task(front.generate(request_id=f"r{num_turns}"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await front.settle()
    assert text_of(await front.generate()) == ANSWER_TEXT


async def test_reservation_is_renewed_while_decode_has_not_pulled(front: Front) -> None:
    prefill = front.cluster.prefill[0]
    prefill.may_complete.clear()
    running = asyncio.create_task(front.generate())
    await until(lambda: len(front.cluster.store.renewed) >= 3)
    prefill.may_complete.set()
    await running
    await front.settle()


async def test_many_requests_share_one_session_and_leave_nothing(front: Front) -> None:
    async def one(number: int) -> str:
        async with aclosing(front.conductor.generate(front.submission(request_id=f"r{number}"))) as deltas:
            text = ""
            async for delta in deltas:
                text += delta.text
                if number % 3 == 0 and len(text) > number:
                    break
            return text

    texts = await asyncio.gather(*(one(number) for number in range(30)))
    assert all(text == ANSWER_TEXT for number, text in enumerate(texts) if number % 3)
    await front.settle()
    assert front.cluster.decode[0].num_sessions == 1
    total = sum(front.metric("conductor_requests_total", outcome=o) for o in ("stop", "cancelled"))
    assert total == 30


async def test_equal_client_ids_stay_apart_on_the_nodes(front: Front) -> None:
    results = await asyncio.gather(front.generate(request_id="same"), front.generate(request_id="same"))
    assert [text_of(deltas) for deltas in results] == [ANSWER_TEXT] * 2
    await front.settle()


@pytest.mark.parametrize(("role", "node_id"), [("prefill", "prefill-0"), ("decode", "decode-0"), ("store", "store-0")])
async def test_new_request_waits_for_nodes_that_went_a_moment_ago(model_dir: Path, role: str, node_id: str) -> None:
    async with open_front(model_dir, nodes_wait_s=30.0) as front:
        record = front.cluster.registry.records[node_id]
        assert front.conductor.not_ready() is None
        await front.cluster.registry.remove(node_id)
        assert front.conductor.not_ready() is None, "a load balancer goes on sending requests"
        waiting = asyncio.create_task(front.generate())
        await until(lambda: front.conductor.num_active == 1)
        assert not waiting.done(), role
        await front.cluster.registry.set(record)
        assert text_of(await waiting) == ANSWER_TEXT
        await front.settle()


@pytest.mark.parametrize("nodes_wait_s", [0.0, 0.05])
@pytest.mark.parametrize(("role", "node_id"), [("prefill", "prefill-0"), ("decode", "decode-0"), ("store", "store-0")])
async def test_new_request_without_nodes_is_refused_when_they_stay_away(
    model_dir: Path, role: str, node_id: str, nodes_wait_s: float
) -> None:
    async with open_front(model_dir, nodes_wait_s=nodes_wait_s) as front:
        assert front.conductor.not_ready() is None
        await front.cluster.registry.remove(node_id)
        await until(lambda: role in (front.conductor.not_ready() or ""))
        with pytest.raises(NoCapacity, match=role):
            await front.generate()


async def test_new_request_does_not_wait_for_nodes_beyond_its_bound(model_dir: Path) -> None:
    async with open_front(model_dir, nodes_wait_s=30.0) as front:
        await front.cluster.registry.remove("prefill-0")
        submission = dataclasses.replace(front.submission(), slo=Slo(ttft_s=0.1))
        with pytest.raises(NoCapacity, match="prefill"):
            [delta async for delta in front.conductor.generate(submission)]
        await front.settle()


async def test_conductor_that_never_saw_its_nodes_is_not_ready(model_dir: Path) -> None:
    async with open_front(model_dir, nodes_wait_s=30.0) as front:
        await front.cluster.registry.remove("decode-0")
        assert "decode" in (front.conductor.not_ready() or "")


async def test_long_answer_outlives_more_nodes_than_it_has_attempts_in_a_row(model_dir: Path) -> None:
    async with open_front(model_dir, max_attempts=2) as front:
        front.cluster.decode[0].faults.extend(["lost 1"] * 4)
        assert text_of(await front.generate()) == ANSWER_TEXT
        assert front.metric("conductor_retries_total", reason="NodeLost") == 4
        await front.settle()


async def test_too_many_requests_are_refused(model_dir: Path) -> None:
    async with open_front(model_dir, max_active_requests=1) as front:
        front.cluster.decode[0].may_step.clear()
        running = asyncio.create_task(front.generate())
        await until(lambda: front.conductor.num_active == 1)
        with pytest.raises(Rejected, match=r"conductor\.max_active_requests"):
            await front.generate()
        front.cluster.decode[0].may_step.set()
        await running
        await front.settle()


async def test_drain_finishes_running_requests_and_those_that_come_meanwhile(front: Front) -> None:
    front.cluster.decode[0].may_step.clear()
    running = asyncio.create_task(front.generate())
    await until(lambda: bool(front.cluster.prefill[0].completed))
    drain = asyncio.create_task(front.conductor.drain(10.0))
    await until(lambda: front.conductor.not_ready() is not None)
    late = asyncio.create_task(front.generate(request_id="late"))
    await until(lambda: front.conductor.num_active == 2)
    front.cluster.decode[0].may_step.set()
    assert text_of(await running) == text_of(await late) == ANSWER_TEXT
    await drain
    with pytest.raises(NoCapacity, match="shutting down"):
        await front.generate(request_id="too late")


async def test_drain_waits_for_who_reads_a_kept_answer(front: Front) -> None:
    submission = dataclasses.replace(front.submission(), idempotency_key="k")
    async with aclosing(front.conductor.generate(submission)) as deltas:
        text = (await anext(deltas)).text
        await until(lambda: front.conductor.num_active == 0)
        drain = asyncio.create_task(front.conductor.drain(10.0))
        await until(lambda: front.conductor.not_ready() is not None)
        assert not drain.done()
        text += "".join([delta.text async for delta in deltas])
        assert text == ANSWER_TEXT
    await drain


async def test_prompt_and_answer_must_fit_the_context(front: Front) -> None:
    prompt = TokenPrompt(token_ids=np.zeros(500, np.uint32))
    with pytest.raises(PromptTooLong, match=r"500 tokens \+ max_tokens=13 exceeds the context of 512"):
        await front.generate(prompt=prompt, max_tokens=13)
    deltas = await front.generate(prompt=prompt, max_tokens=12)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    deltas = await front.generate(prompt=TokenPrompt(token_ids=np.zeros(510, np.uint32)), max_tokens=None)
    assert deltas[-1].usage.completion_tokens == 2, "the default is what the context leaves when that is less"


async def test_chat_is_rendered_with_the_template(front: Front) -> None:
    prompt = ChatPrompt(messages=[ChatMessage(role="user", content="hello")])
    await front.generate(prompt=prompt)
    tokenizer = front.conductor.tokenizer
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert front.cluster.prompts() == [tokenizer.encode_blocking(text, add_special_tokens=False).tolist()]


async def test_unexpected_error_ends_the_request_as_internal(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(front.conductor, "_need", broken)
    with pytest.raises(MoontideError, match="RuntimeError: surprise"):
        await front.generate()
    assert front.metric("conductor_requests_total", outcome="Internal") == 1
    await front.settle()


async def test_who_declines_to_prefill_still_decodes(model_dir: Path) -> None:
    async with open_front(model_dir) as front:
        decode = front.cluster.decode[0]
        decode.faults.append("declined")
        front.conductor._placement._policy = _LocalFirst()
        assert text_of(await front.generate()) == ANSWER_TEXT
        assert len(front.cluster.prefill[0].completed) == 1, "the second attempt has a prefill group"
        assert front.metric("conductor_retries_total", reason="Declined") == 1
        await front.settle()


async def test_short_prompt_is_prefilled_where_it_is_decoded(model_dir: Path) -> None:
    async with open_front(model_dir) as front:
        front.conductor._placement._policy = _LocalFirst()
        deltas = await front.generate()
        assert text_of(deltas) == ANSWER_TEXT
        assert not front.cluster.prefill[0].completed
        (parts,) = [delta.ttft_parts for delta in deltas if delta.ttft_parts is not None]
        assert parts.ttft_s == pytest.approx(
            sum(value for name, value in dataclasses.asdict(parts).items() if name != "ttft_s")
        )
        await front.settle()


@pytest.mark.parametrize("admission", ["predictive", "off"])
async def test_decline_by_every_decode_instance_is_a_refusal(model_dir: Path, admission: str) -> None:
    async with open_front(model_dir, num_decode=2, admission=admission) as front:
        for decode in front.cluster.decode:
            decode.faults.append("declined")
        front.cluster.prefill[0].may_sample.clear()  # an answer that has begun is not refused
        submission = dataclasses.replace(front.submission(), slo=Slo(tbt_s=1e-9))
        with pytest.raises(Rejected) as refused:
            async for _ in front.conductor.generate(submission):
                pass
        assert refused.value.reason is RejectReason.TBT_SLO
        bounds = [bound for decode in front.cluster.decode for bound in decode.tbt_slos_s]
        assert bounds == ([1e-9, 1e-9] if admission == "predictive" else [None, None])
        await front.settle()


class _LocalFirst:
    """Has decode compute the prompt whenever it may."""

    name = "local-first"

    def pick(self, options: Options, rng: Random) -> Pick:
        if options.need.may_prefill_locally:
            return Pick(way=options.local_way(0), others=(), reason="it may")
        return Pick(way=options.way(options.own_costs, 0, 0), others=(), reason="it must not")
