"""A prefill that is one forward, and a decode node's requests over the memory twin of the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from decode_node.config import DecodeConfig
from decode_node.metrics import DecodeMetrics
from decode_node.requests import DecodeRequests
from decode_node.session import (
    ConductorSession,
    DecodeEvent,
    Failed,
    Finished,
    LocalPrefillDone,
    OpenRequest,
    PromptStore,
    Pulled,
    Tokens,
)
from decode_node.stores import StoreNodes
from kvstore.block import hash_blocks, root_hash
from kvstore.client import BlockRef, StoreClient
from kvstore.keys import LOCAL_NODE_ID
from kvstore.layout import KVLayout
from kvstore.node import LocalStoreNode, StoreNode
from kvstore.pool import PoolState, RequestKey
from kvstore.transfer.base import GetItem, GetStatus, PutItem, PutStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from model_runner.kv_cache import PagedKVCache
from model_runner.model_source import load_model_info, resolve_model
from model_runner.runner import Segment, StageRunner
from model_runner.sampling import sample
from model_runner.stage import StageSpec
from moontide.clock import MonotonicClock
from moontide.perf_model import StepModel
from moontide.sampling_params import SampledToken, SamplingParams

BLOCK_TOKENS = 8
LAYER_GROUP = 2
TIMEOUT_S = 20.0
"""Longest wait for anything; nothing here takes a second."""


class GatedTransfer(MemoryTransfer):
    """Gets (after the first `free_gets`) and puts wait while their gate is shut, so that a test can act while one is open."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.gate.set()
        self.free_gets = 0
        self.num_gets = 0
        self.get_open = threading.Event()
        self.put_gate = threading.Event()
        self.put_gate.set()
        self.put_open = threading.Event()
        self.put_keys: list[str] = []

    def put(self, items: Sequence[PutItem], *, segment: str = "") -> list[PutStatus]:
        self.put_keys += [item.key for item in items]
        self.put_open.set()
        assert self.put_gate.wait(TIMEOUT_S)
        return super().put(items, segment=segment)

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        self.num_gets += 1
        if self.num_gets > self.free_gets:
            self.get_open.set()
            assert self.gate.wait(TIMEOUT_S)
        return super().get(items)


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose K/V is in the store."""

    key: RequestKey
    token_ids: list[int]
    sampling: SamplingParams
    first_token: SampledToken
    object_keys: list[str]

    @property
    def num_full_blocks(self) -> int:
        return len(self.token_ids) // BLOCK_TOKENS


@dataclass
class Answer:
    """What a request's events said."""

    tokens: list[SampledToken] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    events: list[DecodeEvent] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def end(self) -> Finished | Failed:
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    @property
    def pulled(self) -> Pulled:
        (event,) = (event for event in self.events if isinstance(event, Pulled))
        return event

    @property
    def prefilled(self) -> LocalPrefillDone:
        (event,) = (event for event in self.events if isinstance(event, LocalPrefillDone))
        return event


class Prefill:
    """Computes prompts with a runner of its own and puts their K/V, as a prefill group does."""

    def __init__(self, model_dir: Path, store: MemoryStore) -> None:
        self.source = resolve_model(str(model_dir))
        self.info = load_model_info(self.source, dtype="float32")
        self.layout = KVLayout(
            model_fingerprint=self.info.fingerprint,
            num_layers=self.info.num_layers,
            num_planes=self.info.num_planes,
            num_kv_heads=self.info.num_kv_heads,
            head_dim=self.info.head_dim,
            dtype="float32",
            block_tokens=BLOCK_TOKENS,
            layer_group=LAYER_GROUP,
        )
        self.spec = StageSpec(
            stage_idx=0, num_stages=1, start_layer=0, end_layer=self.info.num_layers, num_layers=self.info.num_layers
        )
        transfer = MemoryTransfer(store)
        self.client = StoreClient(transfer, self.layout)
        self.num_pages = 40
        self.runner = load_runner(self, transfer, self.num_pages)

    def run(
        self,
        name: str,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        epoch: int = 1,
        output_idx: int = 0,
        salt: str = "",
    ) -> Prefilled:
        key = RequestKey(name, epoch)
        num_blocks = -(-len(token_ids) // BLOCK_TOKENS)
        pages = list(range(num_blocks))
        logits = self.runner.forward(
            [Segment(start=0, num_tokens=len(token_ids), pages=pages, wants_logits=True)],
            token_ids_T=torch.tensor(token_ids),
        )
        hashes = hash_blocks(
            np.array(token_ids, dtype=np.uint32), block_tokens=BLOCK_TOKENS, root=root_hash(self.layout.digest(), salt)
        )
        refs = [BlockRef(block_hash, name, epoch) for block_hash in hashes]
        if len(token_ids) % BLOCK_TOKENS:
            refs.append(BlockRef(None, name, epoch))
            self.runner.kv.zero_tail(pages[-1], len(token_ids) % BLOCK_TOKENS)
        for group_idx in self.runner.kv.groups:
            slots = [(ref, self.runner.kv.slot_address(group_idx, page)) for ref, page in zip(refs, pages, strict=True)]
            assert set(self.client.put_group(group_idx, slots)) == {PutStatus.STORED_OR_OPEN}
        return Prefilled(
            key=key,
            token_ids=token_ids,
            sampling=sampling,
            first_token=sample(logits, [sampling], [output_idx])[0],
            object_keys=[
                ref.key(self.layout.digest(), group_idx) for ref in refs for group_idx in self.runner.kv.groups
            ],
        )


def load_runner(prefill: Prefill, transfer: MemoryTransfer, num_pages: int) -> StageRunner:
    arena = transfer.allocate(PagedKVCache.arena_bytes(prefill.layout, prefill.spec, num_pages))
    return StageRunner.load(
        prefill.source, prefill.spec, dtype="float32", layout=prefill.layout, num_pages=num_pages, arena=arena.buffer
    )


class DecodeRig:
    """DecodeRequests with a session, and what a conductor would do."""

    def __init__(
        self, requests: DecodeRequests, transfer: GatedTransfer, runner: StageRunner, metrics: CollectorRegistry
    ) -> None:
        self.requests = requests
        self.transfer = transfer
        self.runner = runner
        self.metrics = metrics
        self.session = requests.open_session()
        self._answers: dict[RequestKey, Answer] = {}

    def open(
        self,
        prompt: Prefilled,
        *,
        session: ConductorSession | None = None,
        timeout_s: float = TIMEOUT_S,
        output_idx: int = 0,
        salt: str = "",
        tbt_slo_s: float | None = None,
        local_prefill: PromptStore | None = None,
    ) -> None:
        self.requests.open(
            session or self.session,
            prompt.key,
            OpenRequest(
                token_ids=np.array(prompt.token_ids, dtype=np.uint32),
                sampling=prompt.sampling,
                output_idx=output_idx,
                cache_salt=salt,
                timeout_s=timeout_s,
                tbt_slo_s=tbt_slo_s,
                local_prefill=local_prefill,
            ),
        )

    def seal_all(self, prompt: Prefilled) -> None:
        self.requests.sealed(self.session, prompt.key, prompt.num_full_blocks)

    def start(self, prompt: Prefilled, *, output_idx: int = 0, store_address: str = "") -> None:
        self.requests.start_decoding(
            self.session, prompt.key, prompt.first_token, output_idx, store_address=store_address
        )

    def open_and_start(self, prompt: Prefilled) -> None:
        self.open(prompt)
        self.seal_all(prompt)
        self.start(prompt)

    async def answer(self, prompt: Prefilled) -> Answer:
        """Read events until this request has ended."""
        answer = self._answers.setdefault(prompt.key, Answer())
        while not (answer.events and isinstance(answer.events[-1], Finished | Failed)):
            await self.next_event()
        return answer

    async def next_event(self, session: ConductorSession | None = None) -> DecodeEvent:
        event = await asyncio.wait_for((session or self.session).events.get(), TIMEOUT_S)
        answer = self._answers.setdefault(event.key, Answer())
        answer.events.append(event)
        if isinstance(event, Tokens):
            answer.tokens.append(event.token)
            answer.output_indices.append(event.output_idx)
        return event

    def written_back(self, outcome: str) -> float:
        """Write-backs that ended like that."""
        return self.metrics.get_sample_value("decode_write_backs_total", {"outcome": outcome}) or 0.0

    async def until_idle(self) -> None:
        """Wait until nothing holds a page; leaves no event of an ended request behind it unnoticed."""
        await wait_for(lambda: self.requests.batch.num_entries == 0)
        self.requests.batch.check_invariants()
        assert self.requests.batch.num_free_pages == self.requests.batch.num_pages


def count_waits(rig: DecodeRig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the step loop has waited for the device from now on."""
    waits: list[None] = []
    monkeypatch.setattr(rig.runner, "wait_idle", lambda: waits.append(None))
    return lambda: len(waits)


async def wait_for(condition: object) -> None:
    """Wait until `condition()` holds. Fails after TIMEOUT_S."""
    assert callable(condition)
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.002)


def local_store(store: MemoryStore, *, capacity_bytes: int = 1 << 30) -> LocalStoreNode:
    return LocalStoreNode(PoolState(capacity_bytes=capacity_bytes, clock=MonotonicClock()), MemoryTransfer(store))


@asynccontextmanager
async def decode_rig(
    prefill: Prefill,
    store: MemoryStore,
    *,
    num_pages: int = 64,
    store_node: StoreNode | None = None,
    step_model: StepModel | None = None,
    **settings: float,
) -> AsyncIterator[DecodeRig]:
    transfer = GatedTransfer(store)
    metrics = CollectorRegistry()
    stores = StoreNodes(store_node or local_store(store), "here:1", own_node_id=LOCAL_NODE_ID, clock=MonotonicClock())
    await stores.at("").register_layout(prefill.layout)
    runner = load_runner(prefill, transfer, num_pages)
    requests = DecodeRequests(
        runner,
        StoreClient(transfer, prefill.layout),
        prefill.layout,
        stores=stores,
        config=DecodeConfig(**{"pull_retry_s": 0.2, **settings}),
        clock=MonotonicClock(),
        metrics=DecodeMetrics(metrics),
        step_model=step_model,
    )
    requests.start()
    try:
        yield DecodeRig(requests, transfer, runner, metrics)
    finally:
        transfer.gate.set()
        transfer.put_gate.set()
        await requests.close()
        await stores.close()
    assert requests.batch.num_entries == 0
    requests.batch.check_invariants()
