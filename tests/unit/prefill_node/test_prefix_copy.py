"""Prefixes of another host: copied while the prompt queues, awaited no longer than they save, never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import prefill_node.session
from kvstore.block import BlockHash
from kvstore.client import Replica
from kvstore.replicate import Replicator
from kvstore.transfer.memory import MemoryTransfer
from moontide.clock import MonotonicClock
from moontide.errors import NodeLost
from moontide.perf_model import OnlineFit, StepModel
from prefill_node.coordinator import Coordinator
from tests.fakes.tiny_models import reference_generate
from tests.unit.prefill_node.rig import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Answer,
    Group,
    eventually,
    make_prompt,
    running_group,
)

SLOW = StepModel(overhead_s=0.001, token_s=0.1, pair_s=0.0)
"""A copy of some blocks saves many seconds."""
FAST = StepModel(overhead_s=0.001, token_s=1e-5, pair_s=0.0)
"""A copy is hardly worth a wait."""
PROMPT = make_prompt(2 * CHUNK_TOKENS + 3)
NUM_BLOCKS = len(PROMPT) // BLOCK_TOKENS


class HeldCopier:
    """Copies when the test lets it."""

    def __init__(self) -> None:
        self.replicator: Replicator | None = None
        self.may_go = asyncio.Event()
        self.error: Exception | None = None
        self.asked: list[int] = []

    async def replicate(
        self, *, layout_digest: bytes, root: BlockHash, hashes: Sequence[BlockHash], timeout_s: float
    ) -> Replica:
        self.asked.append(len(hashes))
        await self.may_go.wait()
        if self.error is not None:
            raise self.error
        assert self.replicator is not None
        return await self.replicator.replicate(
            layout_digest=layout_digest, root=root, hashes=hashes, timeout_s=timeout_s
        )


@asynccontextmanager
async def two_hosts(model_dir: Path) -> AsyncIterator[tuple[Group, HeldCopier]]:
    """A group whose copier finds the KV of PROMPT on another host."""
    async with running_group(model_dir, num_stages=1, store_node_id="far") as far:
        await far.prefill(PROMPT, "at-far")
        copier = HeldCopier()
        async with running_group(model_dir, num_stages=2, store=far.store, copier=copier) as near:
            copier.replicator = Replicator(
                near.node, MemoryTransfer(far.store), other_holders=other_holders, clock=MonotonicClock()
            )
            yield near, copier
            await copier.replicator.close()


async def other_holders() -> Sequence[str]:
    return ["far"]


def predict_with(monkeypatch: pytest.MonkeyPatch, model: StepModel) -> None:
    monkeypatch.setattr(prefill_node.session, "OnlineFit", lambda _start: OnlineFit(model, refit_every=1 << 30))


def copies(group: Group) -> dict[str, float]:
    """How many copies had which end."""
    metrics = group.stages[0]._group_metrics
    assert metrics is not None
    samples = next(iter(metrics.copies.collect())).samples
    return {
        sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total") and sample.value
    }


def coordinator_of(group: Group) -> Coordinator:
    coordinator = group.stages[0].coordinator
    assert coordinator is not None
    return coordinator


def assert_right(model_dir: Path, answer: Answer, *, hit_blocks: int) -> None:
    assert answer.accepted is not None
    assert answer.accepted.hit_tokens == hit_blocks * BLOCK_TOKENS
    assert answer.token_id == reference_generate(model_dir, PROMPT, 1)[0]
    assert answer.completed is not None
    assert answer.completed.num_blocks == NUM_BLOCKS


async def test_blocks_of_another_host_are_copied_and_are_a_hit(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict_with(monkeypatch, SLOW)
    async with two_hosts(model_dir) as (group, copier):
        copier.may_go.set()
        assert_right(model_dir, await group.prefill(PROMPT, copy_blocks=NUM_BLOCKS), hit_blocks=NUM_BLOCKS)
        assert copier.asked == [NUM_BLOCKS]
        assert copies(group) == {"whole": 1}
        await group.until_idle()
        load = coordinator_of(group).load(coordinator_of(group)._require_session())
        assert load["copy_bytes_per_s"] > 0
        assert load["fetch_bytes_per_s"] > 0
        assert_right(model_dir, await group.prefill(PROMPT, "again", copy_blocks=NUM_BLOCKS), hit_blocks=NUM_BLOCKS)


async def test_what_is_not_worth_copying_is_computed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict_with(monkeypatch, SLOW)
    async with two_hosts(model_dir) as (group, copier):
        copier.may_go.set()
        assert_right(model_dir, await group.prefill(PROMPT, copy_blocks=3), hit_blocks=3)
        assert copier.asked == [3]


async def test_a_copy_that_is_late_is_given_up(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict_with(monkeypatch, FAST)
    async with two_hosts(model_dir) as (group, _):
        assert_right(model_dir, await group.prefill(PROMPT, copy_blocks=NUM_BLOCKS), hit_blocks=0)
        assert copies(group) == {"given up": 1}
        await group.until_idle()


async def test_a_copy_that_fails_costs_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predict_with(monkeypatch, SLOW)
    async with two_hosts(model_dir) as (group, copier):
        copier.error = NodeLost("the store process does not answer")
        copier.may_go.set()
        assert_right(model_dir, await group.prefill(PROMPT, copy_blocks=NUM_BLOCKS), hit_blocks=0)
        assert copies(group) == {"failed": 1}


async def test_a_store_process_that_is_lost_during_the_wait_for_a_copy_ends_the_prompt_retriable(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict_with(monkeypatch, SLOW)
    async with two_hosts(model_dir) as (group, copier):
        call = asyncio.create_task(group.prefill(PROMPT, "waits", copy_blocks=NUM_BLOCKS))
        await eventually(lambda: coordinator_of(group).num_running == 1, "a prompt with pages")
        with monkeypatch.context() as lost:
            lost.setattr(group.node, "reserve", store_is_lost)
            copier.may_go.set()
            with pytest.raises(NodeLost, match="store process"):
                await call
        await group.until_idle()
        assert coordinator_of(group).num_reservations == 0


async def store_is_lost(**_: object) -> None:
    raise NodeLost("the store process does not answer")


async def test_without_measured_times_nothing_is_copied(model_dir: Path) -> None:
    async with two_hosts(model_dir) as (group, copier):
        assert_right(model_dir, await group.prefill(PROMPT, copy_blocks=NUM_BLOCKS), hit_blocks=0)
        assert copier.asked == []


async def test_others_are_computed_while_a_prompt_waits_for_its_copy(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict_with(monkeypatch, SLOW)
    async with two_hosts(model_dir) as (group, copier):
        waiting = asyncio.create_task(group.prefill(PROMPT, "waits", copy_blocks=NUM_BLOCKS))
        await eventually(lambda: coordinator_of(group).num_running == 1, "a prompt with pages")
        other = make_prompt(CHUNK_TOKENS, seed=9)
        answer = await group.prefill(other, "other")
        assert answer.token_id == reference_generate(model_dir, other, 1)[0]
        assert not waiting.done()
        copier.may_go.set()
        answer = await waiting
        assert_right(model_dir, answer, hit_blocks=NUM_BLOCKS)
        assert answer.first_token is not None
        assert answer.first_token.timings.fetch_s > 0


async def test_a_cancelled_prompt_leaves_its_copy_and_holds_nothing(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict_with(monkeypatch, SLOW)
    async with two_hosts(model_dir) as (group, copier):
        call = group.call(PROMPT, "cancelled", copy_blocks=NUM_BLOCKS)
        reading = asyncio.create_task(call.read())
        await eventually(lambda: coordinator_of(group).num_running == 1, "a prompt with pages")
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await group.until_idle()
        assert copies(group) == {"given up": 1}
        copier.may_go.set()
        assert_right(model_dir, await group.prefill(PROMPT, "next", copy_blocks=NUM_BLOCKS), hit_blocks=NUM_BLOCKS)
