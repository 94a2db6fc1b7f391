"""Prompts that the decode node computes itself: the tokens and bytes that prefill would make, and nothing held at any end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_node.batch import Phase
from decode_node.session import Failed, Finished, LocalPrefillDone, PromptStore, Pulled, Tokens
from kvstore.node import LocalStoreNode
from kvstore.pool import RequestKey, ReserveReply
from kvstore.transfer.memory import MemoryStore
from model_runner.runner import Segment
from moontide.perf_model import StepModel, StepShape
from moontide.sampling_params import FinishReason, SamplingParams
from tests.unit.decode_node.decode_rig import (
    BLOCK_TOKENS,
    Answer,
    DecodeRig,
    Prefill,
    Prefilled,
    decode_rig,
    local_store,
    wait_for,
)
from tests.unit.decode_node.test_decode_requests import (
    GREEDY,
    MAX_TOKENS,
    PARTIAL_LENGTH,
    ended_with,
    prompt_ids,
    prompt_with_reference,
    wait_for_phase,
)
from tests.unit.decode_node.test_write_back import (
    CHAIN_BLOCKS,
    ENDLESS,
    SAMPLED,
    chain,
    check_stored_bytes,
    hit_blocks,
    nothing_is_held,
    prefilled,
    reserve,
    served,
)

HERE = PromptStore()
LONG = 101
SLOW = StepModel(overhead_s=10.0, token_s=0.0, pair_s=0.0)
"""Says that every step takes 10 s."""


class GatedStore(LocalStoreNode):
    """Reservations wait while the gate is shut."""

    gate: asyncio.Event
    num_waiting = 0

    async def reserve(self, **reservation: Any) -> ReserveReply:
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1
        return await super().reserve(**reservation)


def gated_store(store: MemoryStore) -> GatedStore:
    node = local_store(store)
    node.__class__ = GatedStore
    assert isinstance(node, GatedStore)
    node.gate = asyncio.Event()
    return node


def asked(name: str, token_ids: list[int], sampling: SamplingParams = GREEDY) -> Prefilled:
    """A prompt that nobody has computed."""
    return Prefilled(RequestKey(name, 1), token_ids, sampling, None, [])  # type: ignore[arg-type]


async def reserve_sealed(node: LocalStoreNode, prefill: Prefill, prompt: Prefilled) -> None:
    """Make the blocks of a prompt hits."""
    await reserve(node, prefill, prompt.token_ids, name=prompt.key.request_id)
    await node.seal(request_id=prompt.key.request_id, epoch=1, first_block=0, num_blocks=prompt.num_full_blocks)
    await node.release(request_id=prompt.key.request_id, epoch=1)


async def local_answer(rig: DecodeRig, prompt: Prefilled, **open_args: Any) -> Answer:
    rig.open(prompt, local_prefill=HERE, **open_args)
    answer = await rig.answer(prompt)
    assert isinstance(answer.end, Finished), answer.end
    return answer


def learn_nothing(rig: DecodeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions stay those of the model that the test gave."""
    monkeypatch.setattr(rig.requests._times, "add", lambda *_args: None)


def watch_chunks(rig: DecodeRig, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows per request of every step from now on."""
    steps: list[list[int]] = []
    forward = rig.runner.forward

    def recording(segments: Sequence[Segment], **kwargs: Any) -> torch.Tensor:
        steps.append([segment.num_tokens for segment in segments])
        return forward(segments, **kwargs)

    monkeypatch.setattr(rig.runner, "forward", recording)
    return steps


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, PARTIAL_LENGTH, LONG])
async def test_greedy_tokens_equal_transformers(
    model_dir: Path, prefill: Prefill, store: MemoryStore, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, reference = prompt_with_reference(model_dir, length)
    node = local_store(store)
    async with decode_rig(prefill, store, store_node=node, chunk_tokens=12) as rig:
        steps = watch_chunks(rig, monkeypatch)
        prompt = asked("r", ids)
        answer = await local_answer(rig, prompt)
        assert answer.token_ids == reference
        assert answer.output_indices == list(range(MAX_TOKENS))
        assert answer.end == Finished(key=prompt.key, reason=FinishReason.LENGTH, stop_token_id=None)
        chunks = [*[12] * ((length - 1) // 12), length - (length - 1) // 12 * 12]
        assert steps[: len(chunks)] == [[chunk] for chunk in chunks]
        told, first = answer.events[:2]
        assert isinstance(told, LocalPrefillDone)
        assert isinstance(first, Tokens)
        assert told.hit_tokens == 0
        assert (told.fetch_s, told.predicted_s) == (0.0, 0.0)
        assert 0 < told.compute_s <= told.compute_s + told.queue_s <= first.age_s
        assert [(span.name, span.first_token, span.num_tokens) for span in first.spans] == [("prefill", 0, length)]
        await nothing_is_held(rig, node)


async def test_prefix_hit_is_pulled_and_the_rest_is_computed(
    model_dir: Path, prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, reference = prompt_with_reference(model_dir, LONG)
    node = local_store(store)
    await reserve_sealed(node, prefill, prefill.run("shared", ids[: 5 * BLOCK_TOKENS + 3], GREEDY))
    async with decode_rig(prefill, store, store_node=node) as rig:
        steps = watch_chunks(rig, monkeypatch)
        answer = await local_answer(rig, asked("r", ids))
        assert answer.token_ids == reference
        assert answer.prefilled.hit_tokens == 5 * BLOCK_TOKENS
        assert answer.prefilled.fetch_s > 0
        assert steps[0] == [LONG - 5 * BLOCK_TOKENS]
        first = answer.events[1]
        assert isinstance(first, Tokens)
        assert [span.name for span in first.spans] == ["pull", "prefill"]
        assert not any(isinstance(event, Pulled) for event in answer.events), "nobody else holds pins for it"
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, ids) == LONG // BLOCK_TOKENS


async def test_whole_blocks_that_are_all_hits_leave_the_last_one_to_compute(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill, name="first", length=2 * BLOCK_TOKENS)
    async with decode_rig(prefill, store, store_node=node) as rig:
        steps = watch_chunks(rig, monkeypatch)
        answer = await local_answer(rig, asked("r", prompt.token_ids, SAMPLED))
        assert answer.prefilled.hit_tokens == BLOCK_TOKENS
        assert steps[0] == [BLOCK_TOKENS]
        assert answer.tokens[0] == prompt.first_token
        await nothing_is_held(rig, node)
        assert rig.written_back("cached") == 1, "the last block of the prompt is there already"


async def test_stored_blocks_hold_the_bytes_that_prefill_would_make(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    ids = prompt_ids(PARTIAL_LENGTH)
    async with decode_rig(prefill, store, store_node=node, chunk_tokens=7) as rig:
        answer = await local_answer(rig, asked("r", ids, SAMPLED))
        await nothing_is_held(rig, node)
        tokens = [*ids, *answer.token_ids]
        assert await hit_blocks(node, prefill, tokens) == CHAIN_BLOCKS
    check_stored_bytes(prefill, tokens)


async def test_prompts_that_are_computed_beside_others_change_nobodys_tokens(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    cases = [prompt_with_reference(model_dir, length) for length in (1, 5, 8, 9, 16, 23, 29, LONG)]
    node = local_store(store)
    async with decode_rig(prefill, store, store_node=node, chunk_tokens=5, num_pages=128) as rig:
        remote = [prefill.run(f"remote{idx}", ids, GREEDY) for idx, (ids, _) in enumerate(cases)]
        local = [asked(f"local{idx}", ids) for idx, (ids, _) in enumerate(cases)]
        for one, other in zip(remote, local, strict=True):
            rig.open_and_start(one)
            rig.open(other, local_prefill=HERE)
        for one, other, (_, reference) in zip(remote, local, cases, strict=True):
            assert [one.first_token.token_id, *(await rig.answer(one)).token_ids] == reference
            assert (await rig.answer(other)).token_ids == reference
        await nothing_is_held(rig, node)


async def test_first_token_is_the_one_that_prefill_draws(prefill: Prefill, store: MemoryStore) -> None:
    """At a later output index too, as after a failure."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=11, ignore_eos=True, logprobs=2)
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), sampling, output_idx=5)
    async with decode_rig(prefill, store) as rig:
        answer = await local_answer(rig, asked("local", prompt.token_ids, sampling), output_idx=5)
        assert answer.output_indices == list(range(5, MAX_TOKENS))
        assert answer.tokens[0].token_id == prompt.first_token.token_id
        assert answer.tokens[0].logprob == pytest.approx(prompt.first_token.logprob, abs=1e-4)


async def test_answer_of_one_token_ends_with_it(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    async with decode_rig(prefill, store, store_node=node) as rig:
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        answer = await local_answer(rig, asked("r", prompt_ids(PARTIAL_LENGTH), one))
        assert answer.output_indices == [0]
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, prompt_ids(PARTIAL_LENGTH)) == PARTIAL_LENGTH // BLOCK_TOKENS


async def test_prompt_is_stored_while_its_answer_goes_on_and_stays_after_a_cancel(
    prefill: Prefill, store: MemoryStore
) -> None:
    node = local_store(store)
    prompt = asked("r", prompt_ids(PARTIAL_LENGTH), ENDLESS)
    async with decode_rig(prefill, store, store_node=node, write_back=False) as rig:
        rig.open(prompt, local_prefill=HERE)
        await wait_for(lambda: rig.written_back("written") == 1)
        assert rig.requests.batch.count(Phase.RUNNING) == 1, "its pins go before its answer ends"
        await wait_for(lambda: node.pool.stats().reservations == 0)
        rig.requests.cancel(rig.session, prompt.key)
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, prompt.token_ids) == PARTIAL_LENGTH // BLOCK_TOKENS


async def test_answer_that_ends_while_its_prompt_is_put_keeps_those_pages(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    async with decode_rig(prefill, store, store_node=node) as rig:
        rig.transfer.put_gate.clear()
        answer = await local_answer(rig, asked("r", prompt_ids(PARTIAL_LENGTH), SAMPLED))
        assert rig.transfer.put_open.is_set() or await asyncio.to_thread(rig.transfer.put_open.wait, 5.0)
        batch = rig.requests.batch
        batch.check_invariants()
        assert batch.num_pages - batch.num_free_pages == CHAIN_BLOCKS
        rig.transfer.put_gate.set()
        await nothing_is_held(rig, node)
        assert rig.written_back("written") == 2
        tokens = [*prompt_ids(PARTIAL_LENGTH), *answer.token_ids]
        assert await hit_blocks(node, prefill, tokens) == CHAIN_BLOCKS


async def test_hit_that_is_gone_is_computed(model_dir: Path, prefill: Prefill, store: MemoryStore) -> None:
    ids, reference = prompt_with_reference(model_dir, LONG)
    node = local_store(store)
    first = prefill.run("first", ids, GREEDY)
    await reserve_sealed(node, prefill, first)
    for key in first.object_keys:
        if chain(prefill, ids)[2].hex() in key:
            store.objects.pop(key)
    async with decode_rig(prefill, store, store_node=node) as rig:
        answer = await local_answer(rig, asked("r", ids))
        assert answer.token_ids == reference
        assert answer.prefilled.hit_tokens == 2 * BLOCK_TOKENS
        await nothing_is_held(rig, node)


async def test_hit_in_a_store_without_room_is_used_all_the_same(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    """Nothing is pinned: what is evicted meanwhile is missed, and computed."""
    ids, reference = prompt_with_reference(model_dir, LONG)
    node = local_store(store, capacity_bytes=5 * prefill.layout.block_bytes)
    await reserve_sealed(node, prefill, prefill.run("shared", ids[: 5 * BLOCK_TOKENS], GREEDY))
    async with decode_rig(prefill, store, store_node=node) as rig:
        answer = await local_answer(rig, asked("r", ids))
        assert answer.token_ids == reference
        assert answer.prefilled.hit_tokens == 5 * BLOCK_TOKENS
        await nothing_is_held(rig, node)


async def test_store_without_room_or_answer_means_computed_and_not_cached(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store, capacity_bytes=prefill.layout.block_bytes)
    async with decode_rig(prefill, store, store_node=node) as rig:
        full = asked("full", prompt_ids(PARTIAL_LENGTH), SAMPLED)
        await local_answer(rig, full)
        await wait_for(lambda: rig.written_back("too_large") == 2)
        away = asked("away", prompt_ids(PARTIAL_LENGTH), SAMPLED)
        rig.open(away, local_prefill=PromptStore(node_id="kvstore-9", address="127.0.0.1:1"))
        assert (await rig.answer(away)).token_ids == (await rig.answer(full)).token_ids
        await wait_for(lambda: rig.written_back("NodeLost") == 2)
        await nothing_is_held(rig, node)


async def test_prompt_goes_to_the_store_process_that_is_named(prefill: Prefill, store: MemoryStore) -> None:
    own, other = local_store(store), local_store(store)
    await other.register_layout(prefill.layout)
    async with served(other) as address, decode_rig(prefill, store, store_node=own) as rig:
        prompt = asked("r", prompt_ids(PARTIAL_LENGTH), SAMPLED)
        rig.open(prompt, local_prefill=PromptStore(node_id="local", address=address))
        await rig.answer(prompt)
        await nothing_is_held(rig, other)
        assert await hit_blocks(other, prefill, prompt.token_ids) == PARTIAL_LENGTH // BLOCK_TOKENS
        assert await hit_blocks(own, prefill, prompt.token_ids) == 0


async def test_sealed_and_start_mean_nothing_to_a_prompt_that_is_computed_here(
    prefill: Prefill, store: MemoryStore
) -> None:
    node = gated_store(store)
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), SAMPLED)
    async with decode_rig(prefill, store, store_node=node) as rig:
        rig.open(prompt, local_prefill=HERE)
        rig.seal_all(prompt)
        rig.start(prompt)
        node.gate.set()
        answer = await rig.answer(prompt)
        assert answer.output_indices == list(range(MAX_TOKENS))
        assert answer.tokens[0] == prompt.first_token


async def moment_reserve(rig: DecodeRig, node: GatedStore, prompt: Prefilled) -> None:
    rig.open(prompt, local_prefill=HERE)
    await wait_for(lambda: node.num_waiting == 1)


async def moment_pull(rig: DecodeRig, node: GatedStore, prompt: Prefilled) -> None:
    node.gate.set()
    rig.transfer.gate.clear()
    rig.open(prompt, local_prefill=HERE)
    await wait_for(rig.transfer.get_open.is_set)


async def moment_compute(rig: DecodeRig, node: GatedStore, prompt: Prefilled) -> None:
    node.gate.set()
    rig.open(prompt, local_prefill=HERE)
    await wait_for_phase(rig, prompt, Phase.RUNNING)


async def moment_put(rig: DecodeRig, node: GatedStore, prompt: Prefilled) -> None:
    node.gate.set()
    rig.transfer.put_gate.clear()
    rig.open(prompt, local_prefill=HERE)
    await wait_for(rig.transfer.put_open.is_set)


async def moment_answer(rig: DecodeRig, node: GatedStore, prompt: Prefilled) -> None:
    node.gate.set()
    rig.open(prompt, local_prefill=HERE)
    while not isinstance(await rig.next_event(), Tokens):
        pass


@pytest.mark.parametrize("moment", [moment_reserve, moment_pull, moment_compute, moment_put, moment_answer])
@pytest.mark.parametrize("end", ["cancel", "session"])
async def test_end_at_any_moment_leaves_nothing(
    prefill: Prefill, store: MemoryStore, moment: Callable[..., Any], end: str
) -> None:
    node = gated_store(store)
    first = prefill.run("first", prompt_ids(LONG), GREEDY)
    node.gate.set()
    await reserve_sealed(node, prefill, first)
    node.gate.clear()
    prompt = asked("r", [*first.token_ids, *prompt_ids(3 * BLOCK_TOKENS)], ENDLESS)
    async with decode_rig(prefill, store, store_node=node, chunk_tokens=1, num_pages=80) as rig:
        await moment(rig, node, prompt)
        if end == "cancel":
            rig.requests.cancel(rig.session, prompt.key)
            ended_with((await rig.answer(prompt)).end, "Cancelled")
        else:
            rig.requests.close_session(rig.session)
        rig.requests.batch.check_invariants()
        rig.transfer.gate.set()
        rig.transfer.put_gate.set()
        node.gate.set()
        await nothing_is_held(rig, node)


@pytest.mark.parametrize("moment", [moment_reserve, moment_pull, moment_compute, moment_put, moment_answer])
async def test_close_at_any_moment_leaves_nothing(
    prefill: Prefill, store: MemoryStore, moment: Callable[..., Any]
) -> None:
    node = gated_store(store)
    first = prefill.run("first", prompt_ids(LONG), GREEDY)
    node.gate.set()
    await reserve_sealed(node, prefill, first)
    node.gate.clear()
    prompt = asked("r", [*first.token_ids, *prompt_ids(3 * BLOCK_TOKENS)], ENDLESS)
    async with decode_rig(prefill, store, store_node=node, chunk_tokens=1, num_pages=80) as rig:
        await moment(rig, node, prompt)
    assert rig.requests.batch.num_free_pages == rig.requests.batch.num_pages
    assert node.pool.stats().reservations == 0
    node.pool.check_invariants()


async def test_failed_step_ends_prompts_too(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    node = local_store(store)
    async with decode_rig(prefill, store, store_node=node) as rig:
        monkeypatch.setattr(rig.runner, "forward", fail)
        prompt = asked("r", prompt_ids(LONG))
        rig.open(prompt, local_prefill=HERE)
        ended_with((await rig.answer(prompt)).end, "Internal")
        await nothing_is_held(rig, node)


async def declined(rig: DecodeRig, prompt: Prefilled, match: str, **open_args: Any) -> None:
    rig.open(prompt, **open_args)
    answer = await rig.answer(prompt)
    error = ended_with(answer.end, "Declined")
    assert error.retriable
    assert match in str(error)


async def test_prompt_that_would_wait_is_declined(prefill: Prefill, store: MemoryStore) -> None:
    node = gated_store(store)
    node.gate.set()
    running = asked("running", prompt_ids(PARTIAL_LENGTH), ENDLESS)
    async with decode_rig(prefill, store, store_node=node, num_pages=60) as rig:
        rig.open(running, local_prefill=HERE)
        await declined(rig, asked("pages", prompt_ids(LONG)), "pages are free", local_prefill=HERE)
    async with decode_rig(prefill, store, store_node=node, max_batch=1) as rig:
        rig.open(running, local_prefill=HERE)
        await wait_for_phase(rig, running, Phase.RUNNING)
        await declined(rig, asked("batch", prompt_ids(5)), "decode.max_batch=1", local_prefill=HERE)
    async with decode_rig(prefill, store, store_node=node, local_prefill_tokens=0) as rig:
        await declined(rig, asked("off", prompt_ids(5)), "decode.local_prefill_tokens=0", local_prefill=HERE)
    async with decode_rig(prefill, store, store_node=node, local_prefill_tokens=PARTIAL_LENGTH) as rig:
        await local_answer(rig, asked("fits", prompt_ids(PARTIAL_LENGTH)))
        long = asked("long", prompt_ids(LONG))
        await declined(rig, long, f"{LONG} tokens of the prompt are no prefix hit", local_prefill=HERE)
        await nothing_is_held(rig, node)


async def test_prompt_with_a_long_hit_is_taken_and_declined_when_the_hit_is_gone(
    prefill: Prefill, store: MemoryStore
) -> None:
    node = local_store(store)
    first = prefill.run("first", prompt_ids(LONG), GREEDY)
    await reserve_sealed(node, prefill, first)
    async with decode_rig(prefill, store, store_node=node, local_prefill_tokens=BLOCK_TOKENS) as rig:
        await local_answer(rig, asked("hit", first.token_ids))
        await nothing_is_held(rig, node)
        for key in first.object_keys:
            store.objects.pop(key)
        await declined(rig, asked("gone", first.token_ids), "no prefix hit", local_prefill=HERE)
        await nothing_is_held(rig, node)


@pytest.mark.parametrize("is_local", [False, True])
async def test_request_whose_steps_would_be_too_long_is_declined_at_open(
    prefill: Prefill, store: MemoryStore, is_local: bool
) -> None:
    place = {"local_prefill": HERE if is_local else None}
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    async with decode_rig(prefill, store, step_model=SLOW) as rig:
        await declined(rig, prompt, "expected to take 10000.0 ms", tbt_slo_s=9.0, **place)
        assert rig.requests.batch.num_entries == 0


async def test_running_requests_slo_declines_others_too(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them take longer than one bears; one alone is fine."""
    model = StepModel(overhead_s=0.0, token_s=0.010, pair_s=0.0)
    node = local_store(store)
    async with decode_rig(prefill, store, step_model=model, store_node=node) as rig:
        learn_nothing(rig, monkeypatch)
        running = asked("running", prompt_ids(5), ENDLESS)
        rig.open(running, local_prefill=HERE, tbt_slo_s=0.015)
        await wait_for_phase(rig, running, Phase.RUNNING)
        await declined(rig, asked("local", prompt_ids(5)), "with the smallest chunk", local_prefill=HERE)
        await declined(rig, prefill.run("remote", prompt_ids(5), GREEDY), "of 2 requests")
        rig.requests.cancel(rig.session, running.key)
        await rig.until_idle()


async def test_slo_is_looked_at_again_before_the_pull(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fit when they are opened; the second one to have blocks does not any more."""
    model = StepModel(overhead_s=0.0, token_s=0.010, pair_s=0.0)
    first, second = (prefill.run(name, prompt_ids(PARTIAL_LENGTH), ENDLESS) for name in ("first", "second"))
    async with decode_rig(prefill, store, step_model=model, num_pages=200) as rig:
        learn_nothing(rig, monkeypatch)
        rig.open(first, tbt_slo_s=0.015)
        rig.open(second, tbt_slo_s=0.015)
        rig.seal_all(first)
        rig.start(first)
        rig.start(second)
        error = ended_with((await rig.answer(second)).end, "Declined")
        assert "of 2 requests" in str(error)
        await wait_for_phase(rig, first, Phase.RUNNING)
        rig.requests.cancel(rig.session, first.key)
        await rig.until_idle()


async def test_local_prompt_is_looked_at_again_when_its_hit_is_known(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StepModel(overhead_s=0.0, token_s=0.010, pair_s=0.0)
    node = gated_store(store)
    async with decode_rig(prefill, store, step_model=model, store_node=node, num_pages=200) as rig:
        learn_nothing(rig, monkeypatch)
        local = asked("local", prompt_ids(PARTIAL_LENGTH))
        rig.open(local, local_prefill=HERE)
        await wait_for(lambda: node.num_waiting == 1)
        running = prefill.run("running", prompt_ids(5), ENDLESS)
        rig.open(running, tbt_slo_s=0.015)
        rig.start(running)
        await wait_for_phase(rig, running, Phase.RUNNING)
        node.gate.set()
        ended_with((await rig.answer(local)).end, "Declined")
        rig.requests.cancel(rig.session, running.key)
        await nothing_is_held(rig, node)


async def test_chunks_are_as_long_as_the_running_requests_bear(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a model whose steps of 20 rows take what is borne."""
    model = StepModel(overhead_s=0.0, token_s=1.0, pair_s=0.0)
    async with decode_rig(prefill, store, step_model=model, num_pages=200) as rig:
        learn_nothing(rig, monkeypatch)
        steps = watch_chunks(rig, monkeypatch)
        running = prefill.run("running", prompt_ids(5), ENDLESS)
        rig.open(running, tbt_slo_s=20.0)
        rig.start(running)
        await wait_for_phase(rig, running, Phase.RUNNING)
        await local_answer(rig, asked("r", prompt_ids(LONG)))
        rig.requests.cancel(rig.session, running.key)
        await rig.until_idle()
    at = next(idx for idx, rows in enumerate(steps) if len(rows) == 2)
    assert steps[at : at + 6] == [[1, 19]] * 5 + [[1, LONG - 5 * 19]]


async def test_prediction_and_load_follow_the_steps_that_ran(prefill: Prefill, store: MemoryStore) -> None:
    node = gated_store(store)
    async with decode_rig(prefill, store, store_node=node, step_model=SLOW, num_pages=200, chunk_tokens=16) as rig:
        running = prefill.run("running", prompt_ids(5), ENDLESS)
        rig.open_and_start(running)
        await wait_for_phase(rig, running, Phase.RUNNING)
        load = rig.requests.load.report()
        assert load["running"] == 1
        assert load["context_tokens"] >= 5
        assert (load["step_token_s"], load["queued_prefill_s"]) == (0.0, 0.0)
        assert load["prefill_room_tokens"] == 2048
        local = asked("local", prompt_ids(LONG))
        rig.open(local, local_prefill=HERE)
        await wait_for(lambda: node.num_waiting == 1)
        node.gate.set()
        await wait_for_phase(rig, local, Phase.RUNNING)
        answer = await rig.answer(local)
        assert answer.prefilled.predicted_s > 0
        await wait_for(lambda: rig.requests.load.report()["step_overhead_s"] != SLOW.overhead_s)
        assert rig.requests._times.model is not None
        assert rig.requests._times.model.time_s(StepShape(1, 5.0)) < SLOW.overhead_s, "the tiny model takes no 10 s"
        rig.requests.cancel(rig.session, running.key)
        await nothing_is_held(rig, node)


async def test_bad_slo_is_named(prefill: Prefill, store: MemoryStore) -> None:
    async with decode_rig(prefill, store) as rig:
        prompt = asked("r", prompt_ids(5))
        rig.open(prompt, tbt_slo_s=0.0)
        event = (await rig.answer(prompt)).end
        assert isinstance(event, Failed)
        assert "tbt_slo_s=0.0" in str(event.error)


async def test_session_whose_end_makes_room_for_one_that_is_declined_ends_both(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one gets the pages of the first, and steps of two requests are longer than it bears."""
    model = StepModel(overhead_s=0.0, token_s=0.010, pair_s=0.0)
    running, first, second = (
        prefill.run(name, prompt_ids(PARTIAL_LENGTH), ENDLESS) for name in ("running", "first", "second")
    )
    async with decode_rig(prefill, store, step_model=model, num_pages=110) as rig:
        learn_nothing(rig, monkeypatch)
        other = rig.requests.open_session()
        rig.open(running, session=other)
        rig.open(first)
        rig.open(second, tbt_slo_s=0.015)
        rig.seal_all(second)
        assert rig.requests.batch.count(Phase.WAITING_PAGES) == 1
        rig.requests.start_decoding(other, running.key, running.first_token, 0)
        await wait_for_phase(rig, running, Phase.RUNNING)
        rig.requests.close_session(rig.session)
        assert rig.requests.batch.num_entries == 1
        ended_with((await rig.answer(second)).end, "Declined")
        rig.requests.close_session(other)
        await rig.until_idle()
