"""A request whose last layer groups are still being copied runs already: right tokens or the named error, and nobody else notices."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from decode_node import engine, requests
from decode_node.batch import Phase
from decode_node.session import Finished, Pulled, Tokens
from kvstore.pool import RequestKey
from kvstore.transfer.memory import MemoryStore
from moontide.sampling_params import SamplingParams
from tests.unit.decode_node.decode_rig import (
    BLOCK_TOKENS,
    LAYER_GROUP,
    TIMEOUT_S,
    DecodeRig,
    Prefill,
    Prefilled,
    count_waits,
    decode_rig,
    wait_for,
)
from tests.unit.decode_node.test_decode_requests import (
    GREEDY,
    MAX_TOKENS,
    PARTIAL_LENGTH,
    ended_with,
    prompt_with_reference,
    wait_for_phase,
)

NUM_OTHER_TOKENS = 100


pytestmark = pytest.mark.usefixtures("group_per_get")


@pytest.fixture(autouse=True)
def _joins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the rest of a pull takes."""
    monkeypatch.setattr(requests, "_EARLY_S", math.inf)


@pytest.fixture
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GATE_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def impatient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GATE_TIMEOUT_S", 0.0)


def open_with_first_group_only(rig: DecodeRig, prompt: Prefilled) -> None:
    """Let a request pull all its blocks in one job that is held after its first group."""
    rig.transfer.free_gets = rig.transfer.num_gets + 1
    rig.transfer.gate.clear()
    rig.transfer.get_open.clear()
    rig.open(prompt)
    rig.start(prompt)


def count_put_back(rig: DecodeRig, monkeypatch: pytest.MonkeyPatch) -> list[RequestKey]:
    put_back, told = rig.requests.batch.put_back, []

    def counted(key: RequestKey) -> None:
        told.append(key)
        put_back(key)

    monkeypatch.setattr(rig.requests.batch, "put_back", counted)
    return told


@pytest.mark.usefixtures("patient_steps")
async def test_request_runs_while_its_later_groups_are_copied(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    ids, reference = prompt_with_reference(model_dir, PARTIAL_LENGTH)
    prompt = prefill.run("r", ids, GREEDY)
    async with decode_rig(prefill, store) as rig:
        open_with_first_group_only(rig, prompt)
        await wait_for_phase(rig, prompt, Phase.RUNNING)
        entry = rig.requests.batch.find(prompt.key)
        assert entry is not None
        assert entry.pull_open
        rig.requests.batch.check_invariants()
        assert rig.session.events.empty(), "the hand-off pins are still needed"
        rig.transfer.gate.set()
        answer = await rig.answer(prompt)
        assert [prompt.first_token.token_id, *answer.token_ids] == reference
        assert isinstance(answer.events[0], Pulled)
        await rig.until_idle()


async def test_request_whose_rest_takes_long_waits_for_it(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_EARLY_S", 0.0)
    prompt = prefill.run("r", list(range(3, 3 + PARTIAL_LENGTH)), GREEDY)
    async with decode_rig(prefill, store) as rig:
        open_with_first_group_only(rig, prompt)
        await wait_for(rig.transfer.get_open.is_set)  # of the second group: what the first one changed is known here
        entry = rig.requests.batch.find(prompt.key)
        assert entry is not None
        assert entry.phase is Phase.PULLING
        rig.transfer.gate.set()
        assert isinstance((await rig.answer(prompt)).end, Finished)


@pytest.mark.usefixtures("impatient_steps")
async def test_late_groups_cost_a_step_and_no_token_of_anybody(
    model_dir: Path, prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_ids, other_reference = prompt_with_reference(model_dir, 9, NUM_OTHER_TOKENS)
    ids, reference = prompt_with_reference(model_dir, PARTIAL_LENGTH)
    other = prefill.run(
        "other", other_ids, SamplingParams(max_tokens=NUM_OTHER_TOKENS, temperature=0.0, ignore_eos=True)
    )
    prompt = prefill.run("r", ids, GREEDY)
    async with decode_rig(prefill, store) as rig:
        rig.open_and_start(other)
        while not isinstance(await rig.next_event(), Tokens):
            pass
        put_back = count_put_back(rig, monkeypatch)
        put_back_before = rig.metrics.get_sample_value("decode_late_joins_total") or 0.0
        open_with_first_group_only(rig, prompt)
        other_answer = await rig.answer(other)
        assert [other.first_token.token_id, *other_answer.token_ids] == other_reference
        await wait_for(lambda: put_back)
        assert put_back == [prompt.key], "it does not try again before the pull is over"
        assert rig.metrics.get_sample_value("decode_late_joins_total") == put_back_before + 1
        await wait_for_phase(rig, prompt, Phase.PULLING)
        rig.transfer.gate.set()
        answer = await rig.answer(prompt)
        assert [prompt.first_token.token_id, *answer.token_ids] == reference
        assert answer.output_indices == list(range(1, MAX_TOKENS))
        await rig.until_idle()


@pytest.mark.usefixtures("impatient_steps")
async def test_late_request_has_written_nothing_where_its_pull_writes_and_its_step_is_over(
    prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object is checked in its page: a row written there meanwhile would make it look broken."""
    prompt = prefill.run("r", list(range(3, 3 + PARTIAL_LENGTH)), GREEDY)
    async with decode_rig(prefill, store) as rig:
        put_back = count_put_back(rig, monkeypatch)
        num_waits = count_waits(rig, monkeypatch)
        open_with_first_group_only(rig, prompt)
        await wait_for(lambda: put_back)
        assert num_waits() == 1, "nobody has read a result, so nobody knows that the device is done"
        entry = rig.requests.batch.find(prompt.key)
        assert entry is not None
        page, offset = entry.pages[PARTIAL_LENGTH // BLOCK_TOKENS], PARTIAL_LENGTH % BLOCK_TOKENS
        written = [
            bool(rig.runner.kv.layer(idx)[page, :, :, offset].any()) for idx in range(rig.runner.info.num_layers)
        ]
        assert written == [idx < LAYER_GROUP for idx in range(rig.runner.info.num_layers)]
        rig.transfer.gate.set()
        assert isinstance((await rig.answer(prompt)).end, Finished)
        await rig.until_idle()


@pytest.mark.usefixtures("patient_steps")
@pytest.mark.parametrize("comes_back", [False, True])
async def test_later_group_that_is_missing_is_asked_for_again_and_then_named(
    model_dir: Path, prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    ids, reference = prompt_with_reference(model_dir, PARTIAL_LENGTH)
    other, prompt = (prefill.run(name, ids, GREEDY) for name in ("other", "r"))
    (partial_key,) = (key for key in prompt.object_keys if key.startswith("p/") and key.endswith("/1"))
    lost = store.objects.pop(partial_key)
    async with decode_rig(prefill, store, pull_retry_s=TIMEOUT_S if comes_back else 0.1) as rig:
        put_back = count_put_back(rig, monkeypatch)
        rig.open_and_start(other)
        rig.open(prompt)
        rig.start(prompt)
        await wait_for(lambda: put_back)
        if comes_back:
            store.objects[partial_key] = lost
            answer = await rig.answer(prompt)
            assert [prompt.first_token.token_id, *answer.token_ids] == reference
        else:
            answer = await rig.answer(prompt)
            assert ended_with(answer.end, "BlockMissing").retriable
            assert answer.events == [answer.end]
        assert [other.first_token.token_id, *(await rig.answer(other)).token_ids] == reference
        await rig.until_idle()


@pytest.mark.usefixtures("patient_steps")
async def test_cancel_while_the_step_waits_frees_the_pages_after_pull_and_step(
    prefill: Prefill, store: MemoryStore
) -> None:
    prompt = prefill.run("r", list(range(3, 3 + PARTIAL_LENGTH)), GREEDY)
    async with decode_rig(prefill, store) as rig:
        open_with_first_group_only(rig, prompt)
        await wait_for_phase(rig, prompt, Phase.RUNNING)
        rig.requests.cancel(rig.session, prompt.key)
        ended_with((await rig.answer(prompt)).end, "Cancelled")
        rig.requests.batch.check_invariants()
        assert rig.requests.batch.num_free_pages < rig.requests.batch.num_pages
        rig.transfer.gate.set()
        await rig.until_idle()
        assert rig.session.events.empty(), "nothing follows the terminal event"
