"""A request on a decode node, from Open to its one terminal event: right tokens, or a named error, and all pages back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_node.batch import Phase
from decode_node.session import Failed, Finished, Pulled, Tokens
from kvstore.transfer.memory import MemoryStore
from model_runner import kv_fetch
from model_runner.runner import Segment
from moontide.errors import MoontideError
from moontide.sampling_params import FinishReason, SamplingParams
from tests.fakes.tiny_models import VOCAB_SIZE, reference_generate, tiny_model_dir
from tests.unit.decode_node.decode_rig import (
    BLOCK_TOKENS,
    DecodeRig,
    Prefill,
    Prefilled,
    count_waits,
    decode_rig,
    wait_for,
)

MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
PARTIAL_LENGTH = 3 * BLOCK_TOKENS + 5
"""Tokens of a prompt with three full blocks and a partial one."""


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{length} {seed}").randrange(3, VOCAB_SIZE) for _ in range(length)]


def prompt_with_reference(model_dir: Path, length: int, max_tokens: int = MAX_TOKENS) -> tuple[list[int], list[int]]:
    """A prompt whose greedy tokens are beyond doubt, and these tokens."""
    for seed in range(20):
        ids = prompt_ids(length, seed)
        try:
            return ids, reference_generate(model_dir, ids, max_tokens)
        except ValueError:
            continue
    raise AssertionError("no prompt with clear tokens found")


def ended_with(event: Finished | Failed, code: str) -> MoontideError:
    assert isinstance(event, Failed), event
    assert event.error.code == code, event.error
    return event.error


async def wait_for_phase(rig: DecodeRig, prompt: Prefilled, phase: Phase) -> None:
    def reached() -> bool:
        entry = rig.requests.batch.find(prompt.key)
        return entry is not None and entry.phase is phase

    await wait_for(reached)


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, PARTIAL_LENGTH, 101])
async def test_greedy_tokens_equal_transformers(
    model_dir: Path, prefill: Prefill, store: MemoryStore, length: int
) -> None:
    ids, reference = prompt_with_reference(model_dir, length)
    prompt = prefill.run("r", ids, GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(prompt)
        answer = await rig.answer(prompt)
        assert [prompt.first_token.token_id, *answer.token_ids] == reference
        assert answer.output_indices == list(range(1, MAX_TOKENS))
        assert answer.end == Finished(key=prompt.key, reason=FinishReason.LENGTH, stop_token_id=None)
        assert isinstance(answer.events[0], Pulled), "the hand-off pins can go before the first token"
        await rig.until_idle()


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
async def test_order_of_blocks_counts(family: str, tmp_path: Path, store: MemoryStore) -> None:
    """Without a sliding window attention does not see the order of the blocks before it, so a mix-up would stay unseen."""
    model_dir = tiny_model_dir(family, tmp_path)
    prefill = Prefill(model_dir, store)
    ids, reference = prompt_with_reference(model_dir, 101)
    prompt = prefill.run("r", ids, GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(prompt)
        assert [prompt.first_token.token_id, *(await rig.answer(prompt)).token_ids] == reference


async def test_eight_at_once_equal_transformers(model_dir: Path, prefill: Prefill, store: MemoryStore) -> None:
    cases = [prompt_with_reference(model_dir, length) for length in (1, 5, 8, 9, 16, 23, 29, 101)]
    prompts = [prefill.run(f"r{idx}", ids, GREEDY) for idx, (ids, _) in enumerate(cases)]
    async with decode_rig(prefill, store) as rig:
        for prompt in prompts:
            rig.open_and_start(prompt)
        for prompt, (_, reference) in zip(prompts, cases, strict=True):
            answer = await rig.answer(prompt)
            assert [prompt.first_token.token_id, *answer.token_ids] == reference
        await rig.until_idle()


async def test_sampled_tokens_and_logprobs_do_not_depend_on_the_batch(prefill: Prefill, store: MemoryStore) -> None:
    settings = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True, logprobs=0),
        SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, top_k=5, seed=3, ignore_eos=True),
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=2.0, top_p=0.9, top_k=50, seed=2**64 - 1, ignore_eos=True, logprobs=2
        ),
    ]
    ids = prompt_ids(PARTIAL_LENGTH)
    alone, together = (
        [prefill.run(f"{name}{idx}", ids, each) for idx, each in enumerate(settings)] for name in ("alone", "together")
    )
    async with decode_rig(prefill, store) as rig:
        for prompt in alone:
            rig.open_and_start(prompt)
            await rig.answer(prompt)
        for prompt in together:
            rig.open_and_start(prompt)
        for one, other in zip(alone, together, strict=True):
            expected, answer = await rig.answer(one), await rig.answer(other)
            assert answer.token_ids == expected.token_ids
            for token, same in zip(answer.tokens, expected.tokens, strict=True):
                assert token.logprob == pytest.approx(same.logprob, abs=1e-4)
                assert [i for i, _ in token.top_logprobs] == [i for i, _ in same.top_logprobs]
                assert len(token.top_logprobs) == (one.sampling.logprobs or 0)
                assert (token.logprob is None) == (one.sampling.logprobs is None)
        seeds = {tuple((await rig.answer(prompt)).token_ids) for prompt in alone}
        assert len(seeds) == len(settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_later_attempt_goes_on_where_the_first_one_ended(
    prefill: Prefill, store: MemoryStore, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=7, ignore_eos=True)
    ids = prompt_ids(PARTIAL_LENGTH)
    first = prefill.run("r", ids, sampling)
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(first)
        tokens = [first.first_token.token_id, *(await rig.answer(first)).token_ids]
        second = prefill.run("r", ids + tokens[:5], sampling, epoch=2, output_idx=5)
        assert second.first_token.token_id == tokens[5]
        rig.open(second, output_idx=5)
        rig.start(second, output_idx=5)
        answer = await rig.answer(second)
        assert answer.token_ids == tokens[6:]
        assert answer.output_indices == list(range(6, MAX_TOKENS))


async def test_blocks_are_pulled_while_prefill_still_computes(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.open(prompt)
        rig.requests.sealed(rig.session, prompt.key, 2)
        entry = rig.requests.batch.find(prompt.key)
        assert entry is not None
        await wait_for(lambda: entry.num_pulled == 2)
        assert entry.phase is Phase.PULLING
        rig.requests.sealed(rig.session, prompt.key, 99)
        await wait_for(lambda: entry.num_pulled == 3)
        assert rig.session.events.empty(), "the partial block is there only after start"
        rig.start(prompt)
        answer = await rig.answer(prompt)
        assert isinstance(answer.end, Finished)
        pulled = answer.pulled
        assert sum(span.num_tokens for span in pulled.spans) == PARTIAL_LENGTH
        assert [span.name for span in pulled.spans] == ["pull"] * len(pulled.spans)
        assert 0 <= pulled.wait_pages_s <= pulled.age_s
        assert 0 <= pulled.handoff_s <= pulled.age_s
        assert all(0 <= span.start_s <= span.start_s + span.duration_s <= pulled.age_s for span in pulled.spans)
        first_tokens = next(event for event in answer.events if isinstance(event, Tokens))
        (step,) = first_tokens.spans
        assert (step.name, step.first_token) == ("first step", PARTIAL_LENGTH)
        assert step.start_s + step.duration_s <= first_tokens.age_s


def _remove(store: MemoryStore, object_key: str) -> None:
    del store.objects[object_key]


def _flip_a_byte(store: MemoryStore, object_key: str) -> None:
    value = bytearray(store.objects[object_key])
    value[100] ^= 1
    store.objects[object_key] = bytes(value)


def _replace_by_another(store: MemoryStore, object_key: str) -> None:
    store.objects[object_key] = next(
        value
        for other, value in store.objects.items()
        if other != object_key and len(value) == len(store.objects[object_key])
    )


def _cut(store: MemoryStore, object_key: str) -> None:
    store.objects[object_key] = store.objects[object_key][:-1]


@pytest.mark.parametrize("damage", [_remove, _flip_a_byte, _replace_by_another, _cut])
@pytest.mark.parametrize("position", [0, 4, -1], ids=["first object", "middle", "partial block"])
async def test_lost_or_damaged_object_is_an_error_and_never_a_token(
    prefill: Prefill, store: MemoryStore, damage: object, position: int
) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    assert callable(damage)
    damage(store, prompt.object_keys[position])
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(prompt)
        answer = await rig.answer(prompt)
        error = ended_with(answer.end, "BlockMissing")
        assert error.retriable
        assert "1 of 4 blocks" in str(error)
        assert answer.events == [answer.end]
        await rig.until_idle()


async def test_partial_block_of_another_attempt_is_not_used(prefill: Prefill, store: MemoryStore) -> None:
    other = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY, epoch=1)
    prompt = Prefilled(other.key._replace(epoch=2), other.token_ids, other.sampling, other.first_token, [])
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(prompt)
        ended_with((await rig.answer(prompt)).end, "BlockMissing")


async def test_block_under_another_salt_is_not_used(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(2 * BLOCK_TOKENS), GREEDY, salt="tenant a")
    async with decode_rig(prefill, store) as rig:
        rig.open(prompt, salt="tenant b")
        rig.start(prompt)
        ended_with((await rig.answer(prompt)).end, "BlockMissing")


async def test_object_that_is_late_is_waited_for(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    late = store.objects.pop(prompt.object_keys[3])
    async with decode_rig(prefill, store, pull_retry_s=20.0) as rig:
        rig.open_and_start(prompt)
        tries = rig.transfer.num_gets
        await wait_for(lambda: rig.transfer.num_gets > tries + 2)
        store.objects[prompt.object_keys[3]] = late
        assert isinstance((await rig.answer(prompt)).end, Finished)


async def test_cancel_while_waiting_for_pages(prefill: Prefill, store: MemoryStore) -> None:
    first, second = (prefill.run(name, prompt_ids(PARTIAL_LENGTH), GREEDY) for name in "ab")
    async with decode_rig(prefill, store, num_pages=6) as rig:
        rig.open(first)
        rig.open(second)
        await wait_for_phase(rig, second, Phase.WAITING_PAGES)
        rig.requests.cancel(rig.session, second.key)
        ended_with((await rig.answer(second)).end, "Cancelled")
        rig.start(first)
        assert isinstance((await rig.answer(first)).end, Finished)
        await rig.until_idle()


async def test_cancel_with_a_get_open_frees_the_pages_only_after_it(prefill: Prefill, store: MemoryStore) -> None:
    first, second = (prefill.run(name, prompt_ids(PARTIAL_LENGTH, seed), GREEDY) for seed, name in enumerate("ab"))
    async with decode_rig(prefill, store, num_pages=6) as rig:
        rig.transfer.gate.clear()
        rig.open_and_start(first)
        rig.open_and_start(second)
        await wait_for(rig.transfer.get_open.is_set)
        rig.requests.cancel(rig.session, first.key)
        ended_with((await rig.answer(first)).end, "Cancelled")
        assert rig.requests.batch.num_free_pages < 5, "the get may still write into them"
        await wait_for_phase(rig, second, Phase.WAITING_PAGES)
        rig.transfer.gate.set()
        assert isinstance((await rig.answer(second)).end, Finished), "it gets the pages once the get is over"
        await rig.until_idle()


@pytest.mark.usefixtures("group_per_get")
async def test_cancelled_pull_reads_no_further_group(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.transfer.gate.clear()
        rig.open_and_start(prompt)
        await wait_for(rig.transfer.get_open.is_set)
        rig.requests.cancel(rig.session, prompt.key)
        rig.transfer.gate.set()
        await rig.until_idle()
        assert rig.transfer.num_gets == 1


async def test_place_of_a_cancelled_running_request_goes_to_the_next(prefill: Prefill, store: MemoryStore) -> None:
    endless = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    first = prefill.run("first", prompt_ids(PARTIAL_LENGTH), endless)
    second = prefill.run("second", prompt_ids(PARTIAL_LENGTH, 1), GREEDY)
    async with decode_rig(prefill, store, max_batch=1) as rig:
        rig.open_and_start(first)
        await wait_for_phase(rig, first, Phase.RUNNING)
        rig.open_and_start(second)
        await wait_for_phase(rig, second, Phase.READY)
        rig.requests.cancel(rig.session, first.key)
        assert isinstance((await rig.answer(second)).end, Finished)


async def test_cancel_between_two_tries_of_a_missing_block(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    _remove(store, prompt.object_keys[0])
    async with decode_rig(prefill, store, pull_retry_s=20.0) as rig:
        rig.open_and_start(prompt)
        await wait_for(lambda: rig.transfer.num_gets > 3)
        rig.requests.cancel(rig.session, prompt.key)
        ended_with((await rig.answer(prompt)).end, "Cancelled")
        await rig.until_idle()


async def test_cancel_while_ready_and_while_running(prefill: Prefill, store: MemoryStore) -> None:
    endless = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    first, second = (prefill.run(name, prompt_ids(PARTIAL_LENGTH, seed), endless) for seed, name in enumerate("ab"))
    async with decode_rig(prefill, store, max_batch=1) as rig:
        rig.open_and_start(first)
        await wait_for_phase(rig, first, Phase.RUNNING)
        rig.open_and_start(second)
        await wait_for_phase(rig, second, Phase.READY)
        rig.requests.cancel(rig.session, second.key)
        ended_with((await rig.answer(second)).end, "Cancelled")
        rig.requests.cancel(rig.session, first.key)
        answer = await rig.answer(first)
        ended_with(answer.end, "Cancelled")
        await rig.until_idle()
        assert rig.session.events.empty(), "nothing follows the terminal event"


async def test_commands_for_unknown_requests_are_ignored(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(5), GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.requests.cancel(rig.session, prompt.key)
        rig.seal_all(prompt)
        rig.start(prompt)
        rig.open_and_start(prompt)
        await rig.answer(prompt)
        rig.requests.cancel(rig.session, prompt.key)
        assert rig.session.events.empty()


async def test_session_end_drops_its_requests_and_no_others(prefill: Prefill, store: MemoryStore) -> None:
    endless = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    running, waiting, other = (
        prefill.run(name, prompt_ids(PARTIAL_LENGTH, seed), endless) for seed, name in enumerate("abc")
    )
    async with decode_rig(prefill, store, num_pages=60) as rig:
        other_session = rig.requests.open_session()
        rig.open_and_start(running)
        await wait_for_phase(rig, running, Phase.RUNNING)
        rig.open(waiting)
        rig.open(other, session=other_session)
        assert rig.requests.batch.count(Phase.WAITING_PAGES) == 1
        rig.requests.close_session(rig.session)
        await wait_for_phase(rig, other, Phase.PULLING)
        await wait_for(lambda: rig.requests.batch.num_entries == 1)
        rig.requests.cancel(rig.session, other.key)
        assert rig.requests.batch.num_entries == 1, "a session has no say over another's requests"
        rig.requests.start_decoding(other_session, other.key, other.first_token, 0)
        while not isinstance(await rig.next_event(other_session), Finished):
            pass
        await rig.until_idle()


@pytest.mark.parametrize("phase", [Phase.WAITING_PAGES, Phase.PULLING, Phase.RUNNING])
async def test_deadline_ends_a_request_in_any_phase(prefill: Prefill, store: MemoryStore, phase: Phase) -> None:
    endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), endless)
    blocker = prefill.run("blocker", prompt_ids(PARTIAL_LENGTH, 1), endless)
    async with decode_rig(prefill, store, num_pages=56) as rig:
        if phase is Phase.WAITING_PAGES:
            rig.open(blocker)
        rig.open(prompt, timeout_s=0.1)
        if phase is Phase.RUNNING:
            rig.start(prompt)
        error = ended_with((await rig.answer(prompt)).end, "DeadlineExceeded")
        assert phase.value in str(error)
        rig.requests.cancel(rig.session, blocker.key)
        await rig.until_idle()


async def test_same_request_and_epoch_twice_is_an_error_and_the_first_goes_on(
    prefill: Prefill, store: MemoryStore
) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    async with decode_rig(prefill, store) as rig:
        other_session = rig.requests.open_session()
        rig.open(prompt)
        rig.open(prompt, session=other_session)
        refused = other_session.events.get_nowait()
        assert isinstance(refused, Failed)
        assert ended_with(refused, "BadRequest")
        rig.start(prompt)
        assert isinstance((await rig.answer(prompt)).end, Finished)


async def test_request_that_never_fits_is_rejected_with_numbers(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)  # 29 + 12 - 1 tokens: 5 pages
    async with decode_rig(prefill, store, num_pages=4) as rig:
        rig.open(prompt)
        error = ended_with((await rig.answer(prompt)).end, "Rejected")
        assert "5 pages" in str(error)
        assert "has 4" in str(error)
    async with decode_rig(prefill, store, num_pages=5) as rig:
        rig.open_and_start(prompt)
        assert isinstance((await rig.answer(prompt)).end, Finished), "exactly enough is enough"


@pytest.mark.parametrize(
    ("ids", "code", "match"),
    [
        ([], "BadRequest", "empty"),
        ([5, VOCAB_SIZE], "BadRequest", f"{VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ([5] * 8192, "PromptTooLong", "8192 tokens"),
    ],
)
async def test_prompt_that_cannot_be_served_is_named(
    prefill: Prefill, store: MemoryStore, ids: list[int], code: str, match: str
) -> None:
    like = prefill.run("like", prompt_ids(5), GREEDY)
    prompt = Prefilled(like.key, ids, GREEDY, like.first_token, [])
    async with decode_rig(prefill, store) as rig:
        rig.open(prompt)
        assert match in str(ended_with((await rig.answer(prompt)).end, code))


async def test_first_token_that_does_not_fit_is_refused(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", prompt_ids(5), GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.open(prompt, output_idx=3)
        rig.start(prompt, output_idx=2)
        assert "output index 2" in str(ended_with((await rig.answer(prompt)).end, "BadRequest"))


async def test_stop_token_and_end_of_sequence_end_the_request(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    ids, reference = prompt_with_reference(model_dir, PARTIAL_LENGTH)
    stop = next(token for token in reference[3:] if token not in reference[:3])
    expected = reference[: reference.index(stop) + 1]
    by_stop = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    by_eos = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, eos_token_ids=(stop,))
    async with decode_rig(prefill, store) as rig:
        for name, sampling in (("stop", by_stop), ("eos", by_eos)):
            prompt = prefill.run(name, ids, sampling)
            rig.open_and_start(prompt)
            answer = await rig.answer(prompt)
            assert [prompt.first_token.token_id, *answer.token_ids] == expected
            assert answer.end == Finished(key=prompt.key, reason=FinishReason.STOP, stop_token_id=stop)


async def test_first_token_that_ends_the_request_needs_no_step(prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run(
        "r", prompt_ids(PARTIAL_LENGTH), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    )
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(prompt)
        answer = await rig.answer(prompt)
        assert answer.events == [Finished(key=prompt.key, reason=FinishReason.LENGTH, stop_token_id=None)]
        await rig.until_idle()


async def test_full_context_ends_the_request(tmp_path: Path, store: MemoryStore) -> None:
    prefill = Prefill(tiny_model_dir("llama", tmp_path, max_position_embeddings=32), store)
    sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), sampling)
    async with decode_rig(prefill, store, num_pages=4) as rig:
        rig.open_and_start(prompt)
        answer = await rig.answer(prompt)
        assert answer.end == Finished(key=prompt.key, reason=FinishReason.LENGTH, stop_token_id=None)
        assert PARTIAL_LENGTH + 1 + len(answer.tokens) == 32
        await rig.until_idle()


async def test_step_that_raises_fails_its_requests_and_the_node_goes_on(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (prefill.run(name, prompt_ids(PARTIAL_LENGTH), GREEDY) for name in "ab")

    def broken(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    async with decode_rig(prefill, store) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(rig.runner, "forward", broken)
            num_waits = count_waits(rig, patch)
            rig.open_and_start(first)
            answer = await rig.answer(first)
        assert num_waits() == 1, "the device may still write to the pages that are free now"
        assert "out of memory" in str(ended_with(answer.end, "Internal"))
        assert not answer.tokens
        rig.open_and_start(second)
        assert isinstance((await rig.answer(second)).end, Finished)
        await rig.until_idle()


async def test_step_on_a_device_that_is_gone_fails_its_requests(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_kwargs: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), GREEDY)
    async with decode_rig(prefill, store) as rig:
        for name in ("forward", "wait_idle"):
            monkeypatch.setattr(rig.runner, name, broken)
        rig.open_and_start(prompt)
        assert "illegal memory access" in str(ended_with((await rig.answer(prompt)).end, "Internal"))
        await rig.until_idle()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_logits_fail_their_request_and_no_other(
    model_dir: Path, prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    cases = [prompt_with_reference(model_dir, length) for length in (9, 40)]
    others = [prefill.run(f"other{idx}", ids, GREEDY) for idx, (ids, _) in enumerate(cases)]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, ignore_eos=True)
    bad = prefill.run("bad", prompt_ids(PARTIAL_LENGTH), sampling)
    async with decode_rig(prefill, store) as rig:
        forward = rig.runner.forward

        def with_nan(segments: Sequence[Segment], **kwargs: Any) -> torch.Tensor:
            logits = forward(segments, **kwargs).clone()
            for row, segment in enumerate(segments):
                if segment.start == PARTIAL_LENGTH + 2:
                    logits[row, 7] = float("nan")
            return logits

        monkeypatch.setattr(rig.runner, "forward", with_nan)
        for prompt in (others[0], bad, others[1]):
            rig.open_and_start(prompt)
        answer = await rig.answer(bad)
        assert "NaN logits for token 3 of the answer" in str(ended_with(answer.end, "Internal"))
        assert answer.output_indices == [1, 2]
        for prompt, (_, reference) in zip(others, cases, strict=True):
            other_answer = await rig.answer(prompt)
            assert [prompt.first_token.token_id, *other_answer.token_ids] == reference
        await rig.until_idle()


async def test_store_that_is_away_is_waited_for_and_then_named(prefill: Prefill, store: MemoryStore) -> None:
    first, second = (prefill.run(name, prompt_ids(PARTIAL_LENGTH), GREEDY) for name in "ab")
    store.available = False
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(first)
        assert ended_with((await rig.answer(first)).end, "BlockMissing").retriable
        rig.open_and_start(second)
        store.available = True
        assert isinstance((await rig.answer(second)).end, Finished)


async def test_drain_lets_requests_end_refuses_new_ones_and_hands_back_the_rest(
    prefill: Prefill, store: MemoryStore
) -> None:
    endless = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
    never_started, late = (prefill.run(name, prompt_ids(PARTIAL_LENGTH), endless) for name in "ab")
    async with decode_rig(prefill, store) as rig:
        rig.open(never_started)
        await rig.requests.drain(0.05)
        assert ended_with((await rig.answer(never_started)).end, "NodeLost").retriable
        rig.open(late)
        assert ended_with((await rig.answer(late)).end, "NodeLost").retriable
        await rig.until_idle()


@pytest.mark.parametrize("joins_early", [False, True])
async def test_random_cancels_leak_nothing(
    prefill: Prefill, store: MemoryStore, joins_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if joins_early:
        monkeypatch.setattr(kv_fetch, "MIN_CALL_BYTES", 1)
    choose = random.Random(1)
    prompts = [
        prefill.run(
            f"r{idx}",
            prompt_ids(choose.randrange(1, 60), idx),
            SamplingParams(max_tokens=choose.randrange(1, 40), temperature=0.0, ignore_eos=True),
        )
        for idx in range(30)
    ]
    async with decode_rig(prefill, store, num_pages=40, max_batch=3) as rig:
        for prompt in prompts:
            rig.open_and_start(prompt)
        cancelled = choose.sample(prompts, 12)
        for prompt in cancelled:
            for _ in range(choose.randrange(12)):
                if not rig.session.events.empty() or rig.requests.batch.num_entries:
                    await rig.next_event()
            rig.requests.cancel(rig.session, prompt.key)
        for prompt in prompts:
            answer = await rig.answer(prompt)
            assert sum(isinstance(event, Finished | Failed) for event in answer.events) == 1
            if prompt not in cancelled:
                assert isinstance(answer.end, Finished)
                assert len(answer.tokens) == prompt.sampling.max_tokens - 1
        await rig.until_idle()
        assert rig.session.events.empty()
