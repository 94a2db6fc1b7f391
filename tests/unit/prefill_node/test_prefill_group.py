"""A prefill group end to end, in one process: tokens, stored bytes, hits, rewinds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefill_node.session
from kvstore.block import BlockHash
from kvstore.keys import parse_key
from kvstore.pool import ReserveReply
from model_runner.runner import Segment, StageRunner
from moontide.clock import MonotonicClock
from moontide.errors import BadRequest, DeadlineExceeded, PromptTooLong, Rejected, TransferFailed
from moontide.perf_model import OnlineFit, StepModel
from moontide.sampling_params import SamplingParams
from tests.fakes.tiny_models import reference_generate
from tests.unit.prefill_node.rig import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    WAIT_S,
    Answer,
    Group,
    HeldForwards,
    eventually,
    make_prompt,
    running_group,
)

Forward = Callable[..., Any]
STEP = StepModel(overhead_s=0.001, token_s=0.01, pair_s=0.0)
POOL_OF_30_BLOCKS = 30 * BLOCK_TOKENS * 6 * 256 * 11 // 10
"""Six layers of 256 bytes a token, and a little for trailers."""


def reference_token(model_dir: Path, prompt: Sequence[int]) -> int:
    return reference_generate(model_dir, list(prompt), 1)[0]


async def test_any_number_of_stages_gives_the_same_token_and_the_same_bytes(model_dir: Path) -> None:
    prompt = make_prompt(3 * CHUNK_TOKENS + 5)
    stored = []
    for num_stages in (1, 2, 3):
        async with running_group(model_dir, num_stages=num_stages) as group:
            answer = await group.prefill(prompt)
            assert answer.token_id == reference_token(model_dir, prompt)
            assert answer.completed is not None
            assert (answer.completed.num_blocks, answer.completed.has_partial) == (len(prompt) // BLOCK_TOKENS, True)
            assert answer.sealed[-1] == len(prompt) // BLOCK_TOKENS
            assert answer.sealed == sorted(set(answer.sealed))
            await group.until_idle()
            stored.append(group.blocks())
    assert len(stored[0]) > 0
    assert stored[0] == stored[1] == stored[2]


@pytest.mark.parametrize(
    "num_tokens",
    [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1],
)
async def test_prompt_lengths_around_the_borders(model_dir: Path, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens)
    async with running_group(model_dir, num_stages=2) as group:
        for request_id in ("cold", "warm"):
            answer = await group.prefill(prompt, request_id)
            assert answer.token_id == reference_token(model_dir, prompt)
            assert answer.order[0] == "accepted"
            assert answer.order[-1] == "completed"
            assert answer.order.count("first_token") == 1
        await group.until_idle()


async def test_partial_block_is_stored_under_the_request_with_a_zero_tail(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        # Leaves other K/V in the pages that the second prompt gets.
        await group.prefill(make_prompt(4 * CHUNK_TOKENS, seed=7), "first")
        await group.until_idle()
        answer = Answer()
        async for event in group.call(make_prompt(3), "second"):
            answer.take(event)
        partial = {key: value for key, value in group.store.objects.items() if key.startswith("p/second/1/")}
        assert len(partial) == group.stages[0]._layout.num_groups
        token_bytes = 16 * 4  # head_dim x float32
        for value in partial.values():
            payload = value[:-64]
            assert any(payload)
            for start in range(0, len(payload), BLOCK_TOKENS * token_bytes):
                assert not any(payload[start + 3 * token_bytes : start + BLOCK_TOKENS * token_bytes])


async def test_full_hit_computes_only_the_last_block(model_dir: Path) -> None:
    prompt = make_prompt(2 * CHUNK_TOKENS)
    async with running_group(model_dir, num_stages=2) as group:
        cold = await group.prefill(prompt, "cold")
        before = group.blocks()
        warm = await group.prefill(prompt, "warm")
        assert cold.accepted is not None
        assert warm.accepted is not None
        assert warm.completed is not None
        assert cold.accepted.hit_tokens == 0
        assert warm.accepted.hit_tokens == len(prompt) - BLOCK_TOKENS
        assert warm.sealed[0] == len(prompt) // BLOCK_TOKENS - 1
        assert warm.completed.num_blocks == len(prompt) // BLOCK_TOKENS
        assert warm.token_id == cold.token_id == reference_token(model_dir, prompt)
        assert group.blocks() == before
        await group.until_idle()


async def test_partial_hit_continues_where_the_cache_ends(model_dir: Path) -> None:
    shared = make_prompt(CHUNK_TOKENS + 3 * BLOCK_TOKENS)
    prompt = shared + make_prompt(CHUNK_TOKENS + 3, seed=2)
    async with running_group(model_dir, num_stages=3) as group:
        await group.prefill(shared, "first")
        answer = await group.prefill(prompt, "second")
        assert answer.accepted is not None
        assert answer.accepted.hit_tokens == len(shared)
        assert answer.token_id == reference_token(model_dir, prompt)
        assert answer.first_token is not None
        assert answer.first_token.timings.fetch_s > 0
        await group.until_idle()


async def test_a_hit_never_crosses_salts(model_dir: Path) -> None:
    prompt = make_prompt(CHUNK_TOKENS + 1)
    async with running_group(model_dir, num_stages=1) as group:
        await group.prefill(prompt, "first", cache_salt="a")
        other = await group.prefill(prompt, "second", cache_salt="b")
        same = await group.prefill(prompt, "third", cache_salt="a")
        assert other.accepted is not None
        assert same.accepted is not None
        assert other.accepted.hit_tokens == 0
        assert same.accepted.hit_tokens == CHUNK_TOKENS


class _LosingNode:
    """A store node whose objects of one layer group vanish from block `lost_from` on, right after the reservation."""

    def __init__(self, group: Any, *, group_idx: int, lost_from: int) -> None:
        self._group = group
        self._group_idx = group_idx
        self._lost_from = lost_from
        self.is_armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.node, name)

    async def reserve(self, *, block_hashes: Sequence[BlockHash], **fields: Any) -> ReserveReply:
        reply: ReserveReply = await self._group.node.reserve(block_hashes=block_hashes, **fields)
        lost = set(block_hashes[self._lost_from :]) if self.is_armed else set()
        for key in list(self._group.store.objects):
            parsed = parse_key(key)
            if getattr(parsed, "block_hash", None) in lost and parsed.group_idx == self._group_idx:
                del self._group.store.objects[key]
        return reply


@pytest.mark.parametrize("lost_from", [0, 3])
async def test_objects_that_vanish_before_the_fetch_rewind_every_stage(model_dir: Path, lost_from: int) -> None:
    prompt = make_prompt(2 * CHUNK_TOKENS + 1)
    group = Group(model_dir, num_stages=2)
    losing = group.store_node = _LosingNode(group, group_idx=0, lost_from=lost_from)
    try:
        await group.start()
        await group.prefill(prompt, "first")
        before = group.blocks()
        await group.until_idle()
        group.forget_pages()
        losing.is_armed = True
        answer = await group.prefill(prompt, "second")
        assert answer.accepted is not None
        assert answer.completed is not None
        assert answer.accepted.hit_tokens == lost_from * BLOCK_TOKENS
        assert answer.token_id == reference_token(model_dir, prompt)
        assert answer.completed.num_blocks == len(prompt) // BLOCK_TOKENS
        assert group.blocks().keys() == before.keys()
        await group.until_idle()
    finally:
        await group.close()


async def test_chunk_enters_stage_0_while_the_one_before_is_in_the_last_stage(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage holds chunk 0 until stage 0 has begun chunk 1 of the same prompt: without the overlap nobody moves."""
    stage_0_is_at_chunk_1 = threading.Event()
    forward: Forward = StageRunner.forward

    def watched(runner: StageRunner, segments: Sequence[Segment], **given: Any) -> Any:
        if runner.spec.is_first_stage and segments[0].start == CHUNK_TOKENS:
            stage_0_is_at_chunk_1.set()
        if runner.spec.is_last_stage and segments[0].start == 0 and segments[0].num_tokens == CHUNK_TOKENS:
            assert stage_0_is_at_chunk_1.wait(WAIT_S), "stage 0 waits for the last stage"
        return forward(runner, segments, **given)

    prompt = make_prompt(2 * CHUNK_TOKENS)
    async with running_group(model_dir, num_stages=2) as group:
        monkeypatch.setattr(StageRunner, "forward", watched)
        answer = await group.prefill(prompt)
        assert answer.token_id == reference_token(model_dir, prompt)
        tracks = {(span.track, span.name) for span in answer.completed.spans} if answer.completed else set()
        waits = {each for each in tracks if each[0].endswith((" recv", " send"))}
        assert ("stage 1 recv", "chunk 0") in waits
        assert tracks - waits == {
            (f"stage {stage_idx}{suffix}", f"chunk {chunk}")
            for stage_idx in (0, 1)
            for suffix in ("", " put")
            for chunk in (0, 1)
        }


async def test_fetch_of_a_prefix_overlaps_the_compute_of_prompts_before_and_after_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch begins on both stages while a forward of the earlier prompt runs, and ends after all forwards of the other two."""
    stored, earlier, later = (make_prompt(n * CHUNK_TOKENS + 3, seed=n) for n in (2, 4, 3))
    async with running_group(model_dir, num_stages=2) as group:
        await group.prefill(stored, "stores")
        await group.until_idle()
        group.forget_pages()
        held = HeldForwards(monkeypatch, stage_idx=1)
        group.gates.get.shut()
        before = asyncio.create_task(group.prefill(earlier, "before"))
        await eventually(held.arrived.is_set, "a forward on stage 1")
        fetching = asyncio.create_task(group.prefill(stored, "fetches"))
        await eventually(lambda: group.gates.get.arrived == 2, "a fetch on both stages")
        after = asyncio.create_task(group.prefill(later, "after"))
        held.release()
        for prompt, answer in zip((earlier, later), await asyncio.gather(before, after), strict=True):
            assert answer.token_id == reference_token(model_dir, prompt)
        assert not fetching.done()
        group.gates.get.open()
        answer = await fetching
        assert answer.token_id == reference_token(model_dir, stored)
        assert answer.accepted is not None
        assert answer.accepted.hit_tokens == 2 * CHUNK_TOKENS
        await group.until_idle()


async def test_at_most_num_stages_and_slack_steps_are_in_flight(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    forward: Forward = StageRunner.forward

    def held(runner: StageRunner, segments: Sequence[Segment], **given: Any) -> Any:
        if runner.spec.is_last_stage:
            assert release.wait(WAIT_S)
        return forward(runner, segments, **given)

    async with running_group(model_dir, num_stages=2, slack=1, num_pages=64) as group:
        monkeypatch.setattr(StageRunner, "forward", held)
        answering = asyncio.create_task(group.prefill(make_prompt(8 * CHUNK_TOKENS)))
        session = group.stages[0].coordinator.session
        await eventually(lambda: session.log.in_flight_steps == 3, "a full pipeline")
        await eventually(lambda: group.stages[0]._metrics.chunk_tokens._value.get() == 3 * CHUNK_TOKENS, "stage 0 done")
        assert session.log.in_flight_steps == 3
        release.set()
        await answering
        await group.until_idle()


async def test_first_token_does_not_wait_for_the_seal(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        group.gates.exists.shut()
        answer = Answer()
        async for event in group.call(make_prompt(2 * CHUNK_TOKENS)):
            answer.take(event)
            if answer.first_token is not None:
                group.gates.exists.open()
        assert answer.order[:2] == ["accepted", "first_token"]
        assert answer.order[-1] == "completed"
        await group.node.release(request_id="r", epoch=1)
        await group.until_idle()


async def test_several_prompts_at_once_share_the_pipeline(model_dir: Path) -> None:
    prompts = [make_prompt(n, seed=n) for n in (5, 70, 33, 8, 64, 1)]
    async with running_group(model_dir, num_stages=2) as group:
        answers = await asyncio.gather(*(group.prefill(p, f"r{i}") for i, p in enumerate(prompts)))
        assert [a.token_id for a in answers] == [reference_token(model_dir, p) for p in prompts]
        await group.until_idle()


async def test_timings_add_up_and_logprobs_travel(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2)
        answer = await group.prefill(make_prompt(CHUNK_TOKENS + 1), sampling=sampling, output_idx=2)
        assert answer.first_token is not None
        timings, token = answer.first_token.timings, answer.first_token.token
        assert timings.queue_s + timings.fetch_s + timings.compute_s == timings.total_s
        assert min(timings.queue_s, timings.compute_s) > 0
        assert timings.fetch_s == 0
        assert token.output_idx == 2
        assert token.logprob < 0
        assert len(token.top_logprobs) == 2
        assert answer.completed is not None
        assert answer.completed.age_s >= timings.total_s
        assert all(span.start_s >= 0 for span in answer.completed.spans)
        assert answer.completed.plan == "mode cpp, policy lars, chunking fixed"


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"prompt": []}, BadRequest, "empty"),
        ({"prompt": [5], "timeout_s": 0.0}, BadRequest, "timeout_s"),
        ({"prompt": [100_000]}, BadRequest, "100000"),
        ({"prompt": [5], "request_id": "no/slash"}, BadRequest, "no/slash"),
        ({"prompt": [5] * 8193}, PromptTooLong, "8193"),
        ({"prompt": [5] * (64 * BLOCK_TOKENS + 1)}, Rejected, "needs 65 pages.*has 64"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused_by_name(
    model_dir: Path, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    async with running_group(model_dir, num_stages=1) as group:
        with pytest.raises(error, match=named):
            await group.prefill(**fields)
        assert (await group.prefill(make_prompt(3), "after")).first_token is not None
        await group.until_idle()


async def test_prompt_larger_than_the_pool_is_refused_and_the_next_one_served(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=1, pool_bytes=200_000) as group:
        with pytest.raises(Rejected, match="200000"):
            await group.prefill(make_prompt(40 * BLOCK_TOKENS))
        assert (await group.prefill(make_prompt(3), "after")).first_token is not None
        await group.until_idle()


async def test_full_queue_is_refused(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=1, num_pages=2, max_queue=1) as group:
        group.gates.exists.shut()
        holding = asyncio.create_task(group.prefill(make_prompt(2 * BLOCK_TOKENS), "holds"))
        coordinator = group.stages[0].coordinator
        await eventually(lambda: group.gates.exists.arrived > 0, "the first request at its seal")
        waiting = asyncio.create_task(group.prefill(make_prompt(BLOCK_TOKENS), "waits"))
        await eventually(lambda: coordinator.num_waiting == 1, "a waiting request")
        with pytest.raises(Rejected, match="limit is 1"):
            await group.prefill(make_prompt(BLOCK_TOKENS), "refused")
        group.gates.exists.open()
        await asyncio.gather(holding, waiting)
        await group.until_idle()


async def test_full_queue_still_takes_a_tenant_with_less_than_its_part(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=1, num_pages=2, max_queue=2) as group:
        group.gates.exists.shut()
        coordinator = group.stages[0].coordinator
        calls = [asyncio.create_task(group.prefill(make_prompt(2 * BLOCK_TOKENS), "holds", tenant="a"))]
        await eventually(lambda: group.gates.exists.arrived > 0, "the first request at its seal")
        for number, tenant in enumerate("aab", start=1):
            name = f"waits-{number}"
            calls.append(asyncio.create_task(group.prefill(make_prompt(BLOCK_TOKENS), name, tenant=tenant)))
            await eventually(lambda number=number: coordinator.num_waiting == number, "a waiting request")
        for tenant in "ab":
            with pytest.raises(Rejected, match="shared by 2 tenants"):
                await group.prefill(make_prompt(BLOCK_TOKENS), f"refused-{tenant}", tenant=tenant)
        group.gates.exists.open()
        await asyncio.gather(*calls)
        await group.until_idle()


async def test_requests_of_a_higher_class_are_served_first(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=1, num_pages=2) as group:
        group.gates.exists.shut()
        coordinator = group.stages[0].coordinator
        served: list[str] = []

        async def serve(name: str, priority: int) -> None:
            await group.prefill(make_prompt(2 * BLOCK_TOKENS, seed=priority + 7), name, priority=priority)
            served.append(name)

        calls = [asyncio.create_task(serve("running", 0))]
        await eventually(lambda: group.gates.exists.arrived > 0, "the first request at its seal")
        for number, priority in enumerate((-1, 0, 3), start=1):
            calls.append(asyncio.create_task(serve(f"class:{priority}", priority)))
            await eventually(lambda number=number: coordinator.num_waiting == number, "a waiting request")
        group.gates.exists.open()
        await asyncio.gather(*calls)
        assert served == ["running", "class:3", "class:0", "class:-1"]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
async def test_a_weight_that_is_no_share_is_refused(model_dir: Path, weight: float) -> None:
    async with running_group(model_dir, num_stages=1) as group:
        with pytest.raises(BadRequest, match="tenant_weight"):
            await group.prefill(make_prompt(3), tenant_weight=weight)


async def test_the_load_report_says_what_conductors_predict_with(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        record = group.stages[0]._record()
        assert record is not None
        assert record.load == {
            "waiting": 0, "running": 0, "queued_tokens": 0, "free_pages": 64, "num_pages": 64, "num_stages": 2,
            "chunk_tokens": CHUNK_TOKENS,
        }, "nothing was measured"  # fmt: skip
    monkeypatch.setattr(prefill_node.session, "OnlineFit", lambda _start: OnlineFit(STEP, refit_every=1 << 30))
    async with running_group(model_dir, num_stages=2, chunking="equal-time") as group:
        await group.prefill(make_prompt(CHUNK_TOKENS))
        await group.until_idle()
        record = group.stages[0]._record()
        assert record is not None
        assert record.load["queued_s"] == 0
        assert record.load["max_step_s"] == 0.5
        assert record.load["tail_s"] > 0
        parts = ("step_overhead_s", "step_token_s", "step_pair_s", "step_knee_tokens")
        assert [record.load[part] for part in parts] == [0.001, 0.01, 0.0, 0]


async def test_puts_that_fail_end_the_request_retriable(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        group.gates.puts_fail = True
        with pytest.raises(TransferFailed, match="puts failed"):
            await group.prefill(make_prompt(CHUNK_TOKENS))
        await group.until_idle()
        group.gates.puts_fail = False
        assert (await group.prefill(make_prompt(CHUNK_TOKENS), "after")).completed is not None


async def test_deadline_ends_a_request_and_frees_everything(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        group.gates.put.shut()
        with pytest.raises(DeadlineExceeded, match="deadline"):
            await group.prefill(make_prompt(CHUNK_TOKENS), timeout_s=0.3)
        group.gates.put.open()
        await group.until_idle()


async def test_prompt_that_starves_for_room_in_the_store_lets_one_without_pages_go_on(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is held by the prompt that lost its pages: whoever waits for it must not keep that one from its pages."""
    release = threading.Event()
    forward: Forward = StageRunner.forward

    def held(runner: StageRunner, segments: Sequence[Segment], **given: Any) -> Any:
        assert release.wait(WAIT_S)
        return forward(runner, segments, **given)

    monkeypatch.setattr(prefill_node.session, "OnlineFit", lambda _start: OnlineFit(STEP, refit_every=1 << 30))
    starvation_s = 1.0
    prompts = {"running": make_prompt(200, 1), "large": make_prompt(208, 2), "short": make_prompt(40, 3)}
    async with running_group(
        model_dir, num_stages=1, slack=0, num_pages=28, pool_bytes=POOL_OF_30_BLOCKS,
        policy="srpt", chunking="fixed", starvation_s=starvation_s,
    ) as group:  # fmt: skip
        monkeypatch.setattr(StageRunner, "forward", held)
        coordinator = group.stages[0].coordinator
        assert coordinator is not None
        clock = MonotonicClock()
        calls = []
        for number, (name, prompt) in enumerate(prompts.items()):
            calls.append(asyncio.create_task(group.prefill(prompt, name)))
            await eventually(lambda number=number: coordinator.num_waiting >= number, f"{name} is there")
            if not number:
                await eventually(lambda: coordinator.num_running == 1, "the first one runs")
        await eventually(lambda: coordinator.num_waiting == 2, "the others wait")
        starved_s = clock.now() + starvation_s
        await eventually(lambda: clock.now() > starved_s, "they starve")
        release.set()
        for prompt, answer in zip(prompts.values(), await asyncio.gather(*calls), strict=True):
            assert answer.token_id == reference_token(model_dir, prompt)
        await group.until_idle()
        metrics = coordinator._metrics
        resumed = [sample.value for family in metrics.drops.collect() for sample in family.samples]
        hits = [sample.value for family in metrics.page_hit_tokens.collect() for sample in family.samples]
        assert max(resumed) > 0
        assert max(hits) == 0, "pages that a prompt finds again when it goes on are no prefix hit"


async def test_the_queue_is_shown_by_priority(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=1, num_pages=2) as group:
        group.gates.exists.shut()
        coordinator = group.stages[0].coordinator
        calls = [asyncio.create_task(group.prefill(make_prompt(2 * BLOCK_TOKENS), "holds"))]
        await eventually(lambda: group.gates.exists.arrived > 0, "the first request at its seal")
        for number, priority in enumerate((-7, -1, 5)):
            prompt = make_prompt(BLOCK_TOKENS)
            calls.append(asyncio.create_task(group.prefill(prompt, f"waits-{number}", priority=priority)))
        await eventually(lambda: coordinator.num_waiting == 3, "waiting requests")
        coordinator.update_gauges()
        gauge = coordinator._metrics.waiting
        shown = {sample.labels["priority"]: sample.value for family in gauge.collect() for sample in family.samples}
        assert shown == {"high": 1, "normal": 0, "low": 2}
        group.gates.exists.open()
        await asyncio.gather(*calls)
        await group.until_idle()
