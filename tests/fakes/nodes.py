"""Prefill group, decode instance and store process as scripted gRPC servers on loopback, for tests of the conductor.

Every node knows the whole answer: token i of it is `answer[i]`, whoever is asked. Faults are taken one per request, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conductor.registry import Node
from kvstore.layout import KVLayout
from moontide.deadline import Deadline
from moontide.errors import BlockMissing, Declined, MoontideError, NodeLost, Rejected
from moontide.registry import NodeRecord
from moontide.rpc import Server, abort
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams
from moontide.token_ids import unpack_token_ids
from moontide_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

BLOCK_TOKENS = 8
HOLDER = "store-of-stage-0"
HOST_ID = "host-0"
LAYOUT = KVLayout(
    model_fingerprint="fake",
    num_layers=4,
    num_planes=2,
    num_kv_heads=1,
    head_dim=8,
    dtype="float32",
    block_tokens=BLOCK_TOKENS,
    layer_group=1,
)
Key = tuple[str, int]


def fake_token(token_id: int, sampling: SamplingParams) -> SampledToken:
    if sampling.logprobs is None:
        return SampledToken(token_id=token_id)
    top = [(token_id + i, -0.5 - i) for i in range(sampling.logprobs)]
    return SampledToken(token_id=token_id, logprob=-0.5, top_logprobs=top)


class FakeStore(kvstore_pb2_grpc.KvStoreServicer):
    """Counts reservations; the fake prefill group makes them."""

    def __init__(self) -> None:
        self.reserved: set[Key] = set()
        self.released: list[Key] = []
        self.renewed: list[str] = []

    async def Renew(self, request: kvstore_pb2.RenewRequest, _context: Any) -> kvstore_pb2.RenewReply:
        self.renewed.extend(request.request_ids)
        known = {request_id for request_id, _ in self.reserved}
        return kvstore_pb2.RenewReply(unknown_request_ids=[i for i in request.request_ids if i not in known])

    async def Release(self, request: kvstore_pb2.ReleaseRequest, _context: Any) -> kvstore_pb2.ReleaseReply:
        self.reserved.discard((request.request_id, request.epoch))
        self.released.append((request.request_id, request.epoch))
        return kvstore_pb2.ReleaseReply()


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """Faults: "lost" (before the first token), "lost after first", "ends" (stream ends early), "rejected", "missing",
    "lost after completed", "no token" (the model's logits are no numbers)."""

    def __init__(self, node_id: str, answer: Sequence[int], store: FakeStore) -> None:
        self.node_id = node_id
        self.answer = answer
        self.store = store
        self.store_address = ""
        self.hit_tokens = 0
        self.hit_growth = 0
        """Tokens by which a call leaves a longer prefix hit behind."""
        self.faults: deque[str] = deque()
        self.calls: list[prefill_pb2.PrefillRequest] = []
        self.open: set[Key] = set()
        self.cancelled: list[Key] = []
        self.completed: list[Key] = []
        self.may_sample = _set_event()
        self.may_complete = _set_event()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        key = (request.request_id, request.epoch)
        assert key not in {(c.request_id, c.epoch) for c in self.calls}, f"{key} is used twice"
        self.calls.append(request)
        fault = self.faults.popleft() if self.faults else ""
        arrival_s = time.monotonic()
        if fault == "rejected":
            await abort(context, Rejected("queue is full"))
        self.open.add(key)
        self.store.reserved.add(key)
        try:
            accepted = prefill_pb2.PrefillAccepted(
                store_node_id=HOLDER, store_address=self.store_address, hit_tokens=self.hit_tokens
            )
            self.hit_tokens += self.hit_growth
            yield prefill_pb2.PrefillEvent(accepted=accepted)
            await self.may_sample.wait()
            await self._fail(
                fault, context, {"lost": NodeLost("stage 1 is gone"), "missing": BlockMissing("hit is gone")}
            )
            if fault == "ends":
                return
            num_blocks = len(request.token_ids) // 4 // BLOCK_TOKENS
            yield prefill_pb2.PrefillEvent(sealed=prefill_pb2.BlocksSealed(num_blocks=num_blocks))
            first = self._first_token(request, arrival_s)
            if fault == "no token":
                first.token.CopyFrom(common_pb2.Token(error="NaN logits"))
            yield prefill_pb2.PrefillEvent(first_token=first)
            await self.may_complete.wait()
            await self._fail(fault, context, {"lost after first": NodeLost("stage 1 is gone")})
            self.completed.append(key)
            span = common_pb2.Span(name="chunk", track="stage 0", start_s=0.0, duration_s=0.001, num_tokens=5)
            yield prefill_pb2.PrefillEvent(
                completed=prefill_pb2.PrefillCompleted(
                    num_blocks=num_blocks,
                    has_partial=True,
                    spans=[span],
                    age_s=time.monotonic() - arrival_s,
                    plan="mode cpp",
                )
            )
            await self._fail(fault, context, {"lost after completed": NodeLost("stage 0 is gone")})
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        finally:
            self.open.discard(key)

    def _first_token(self, request: prefill_pb2.PrefillRequest, arrival_s: float) -> prefill_pb2.FirstToken:
        sampling = SamplingParams.from_proto(request.sampling)
        token = fake_token(self.answer[request.output_idx], sampling)
        total_s = time.monotonic() - arrival_s
        timings = prefill_pb2.PrefillTimings(
            queue_s=0.25 * total_s, fetch_s=0.25 * total_s, compute_s=0.5 * total_s, total_s=total_s
        )
        return prefill_pb2.FirstToken(token=token.to_proto(request.output_idx), timings=timings)

    async def _fail(self, fault: str, context: Any, errors: dict[str, MoontideError]) -> None:
        if fault in errors:
            await abort(context, errors[fault])


@dataclass
class _Opened:
    sampling: SamplingParams
    num_tokens: int
    sealed_blocks: int = 0


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """Faults: "declined" (at open), "missing" (BlockMissing at start), "lost 3" (the session breaks after three tokens), "length 1"
    (ends for length after one), "pause 3" (sends nothing more). A prompt that it prefills itself has the latter three."""

    def __init__(self, node_id: str, answer: Sequence[int]) -> None:
        self.node_id = node_id
        self.answer = answer
        self.faults: deque[str] = deque()
        self.opened: list[Key] = []
        self.local: list[Key] = []
        """Those whose prompt it was told to compute."""
        self.tbt_slos_s: list[float | None] = []
        """Of `opened`."""
        self.store_addresses: list[str] = []
        """Of requests that were started, or prefilled here: where their answers are written back."""
        self.hit_tokens = 0
        """Of prompts that it computes."""
        self.open: set[Key] = set()
        self.cancelled: list[Key] = []
        self.num_sessions = 0
        self.may_step = _set_event()

    async def Session(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        self.num_sessions += 1
        events: asyncio.Queue[decode_pb2.DecodeEvent | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(commands, events))
        try:
            while (event := await events.get()) is not None:
                yield decode_pb2.DecodeEvents(events=[event])
            await context.abort(NodeLost.status, "session broken on purpose")
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self.open.clear()

    async def _read(self, commands: AsyncIterator[decode_pb2.DecodeCommand], events: asyncio.Queue[Any]) -> None:
        requests: dict[Key, _Opened] = {}
        async with asyncio.TaskGroup() as group:
            running: dict[Key, asyncio.Task[None]] = {}
            async for command in commands:
                key = (command.request_id, command.epoch)
                match command.WhichOneof("command"):
                    case "open":
                        opening = command.open
                        num_tokens = len(unpack_token_ids(opening.token_ids))
                        requests[key] = _Opened(SamplingParams.from_proto(opening.sampling), num_tokens)
                        self.opened.append(key)
                        self.tbt_slos_s.append(opening.tbt_slo_s if opening.HasField("tbt_slo_s") else None)
                        if self.faults and self.faults[0] == "declined":
                            self.faults.popleft()
                            _emit(events, key, failed=_failed(Declined("steps would take too long")))
                            continue
                        self.open.add(key)
                        if opening.HasField("local_prefill"):
                            self.local.append(key)
                            self.store_addresses.append(opening.local_prefill.store_address)
                            work = self._prefill(key, requests[key], opening.output_idx, events)
                            running[key] = group.create_task(work)
                    case "sealed":
                        assert command.sealed.store_node_id == HOLDER
                        requests[key].sealed_blocks = command.sealed.num_blocks
                    case "start":
                        assert requests[key].sealed_blocks == requests[key].num_tokens // BLOCK_TOKENS
                        self.store_addresses.append(command.start.store_address)
                        first = command.start.first_token
                        running[key] = group.create_task(self._decode(key, requests[key], first, events))
                    case "cancel":
                        if key in self.open:
                            self.cancelled.append(key)
                            self.open.discard(key)
                        if key in running:
                            running.pop(key).cancel()

    async def _prefill(self, key: Key, opened: _Opened, output_idx: int, events: asyncio.Queue[Any]) -> None:
        fault = self.faults.popleft() if self.faults else ""
        done = decode_pb2.LocalPrefillDone(hit_tokens=self.hit_tokens, queue_s=1e-4, fetch_s=1e-4, compute_s=1e-3)
        _emit(events, key, local_prefill_done=done)
        await self._answer(key, opened, output_idx, fault, events)

    async def _decode(self, key: Key, opened: _Opened, first: common_pb2.Token, events: asyncio.Queue[Any]) -> None:
        fault = self.faults.popleft() if self.faults else ""
        if fault == "missing":
            self.open.discard(key)
            _emit(events, key, failed=_failed(BlockMissing("block 0 is gone")))
            return
        assert first.token_id == self.answer[first.output_idx]
        span = common_pb2.Span(name="pull", track="decode", duration_s=0.001)
        _emit(events, key, pulled=decode_pb2.DecodePulled(spans=[span], age_s=0.002))
        await self._answer(key, opened, first.output_idx + 1, fault, events)

    async def _answer(self, key: Key, opened: _Opened, first_idx: int, fault: str, events: asyncio.Queue[Any]) -> None:
        """Send the tokens from `first_idx` on."""
        for num_sent, output_idx in enumerate(range(first_idx, len(self.answer))):
            await self.may_step.wait()
            if fault == f"lost {num_sent}":
                events.put_nowait(None)
                return
            if fault == f"pause {num_sent}":
                await asyncio.Event().wait()
            if fault == f"length {num_sent}":
                self.open.discard(key)
                _emit(events, key, finished=decode_pb2.DecodeFinished(reason=FinishReason.LENGTH.to_proto()))
                return
            token_id = self.answer[output_idx]
            token = fake_token(token_id, opened.sampling).to_proto(output_idx)
            _emit(events, key, tokens=decode_pb2.DecodeTokens(tokens=[token]))
            reason = opened.sampling.finish_reason(token_id, output_idx)
            if reason is not None:
                self.open.discard(key)
                _emit(events, key, finished=decode_pb2.DecodeFinished(reason=reason.to_proto()))
                return


def _emit(events: asyncio.Queue[Any], key: Key, **event: Any) -> None:
    events.put_nowait(decode_pb2.DecodeEvent(request_id=key[0], epoch=key[1], **event))


def _failed(error: MoontideError) -> decode_pb2.DecodeFailed:
    return decode_pb2.DecodeFailed(code=error.code, message=str(error), retriable=error.retriable)


class FakeRegistry:
    """What NodeRegistry offers, with the nodes that a test puts in."""

    def __init__(self) -> None:
        self.records: dict[str, NodeRecord] = {}
        self.connected = True
        self._changed = asyncio.Condition()
        self._reads = itertools.count()

    @property
    def num_reads(self) -> int:
        """Every look is a new read."""
        return next(self._reads)

    @property
    def nodes(self) -> list[Node]:
        return [Node(record=record, alive=True, read_s=time.monotonic()) for record in self.records.values()]

    async def set(self, record: NodeRecord) -> None:
        self.records[record.node_id] = record
        await self._notify()

    async def remove(self, node_id: str) -> None:
        del self.records[node_id]
        await self._notify()

    async def wait_for_read(self, deadline: Deadline) -> None:
        """A read happens all the time: this one after 10 ms, or with the next change."""
        async with self._changed:
            try:
                async with asyncio.timeout(min(0.01, deadline.remaining_s())):
                    await self._changed.wait()
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass
class FakeCluster:
    """One host with prefill groups, decode instances and a store process."""

    answer: list[int]
    num_prefill: int = 1
    num_decode: int = 1
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    store: FakeStore = field(default_factory=FakeStore)
    prefill: list[FakePrefill] = field(default_factory=list)
    decode: list[FakeDecode] = field(default_factory=list)
    servers: dict[str, Server] = field(default_factory=dict)

    async def start(self) -> None:
        store_address = await self.serve(
            "store-0", "kvstore", kvstore_pb2_grpc.add_KvStoreServicer_to_server, self.store, "moontide.v1.KvStore"
        )
        for idx in range(self.num_prefill):
            prefill = FakePrefill(f"prefill-{idx}", self.answer, self.store)
            prefill.store_address = store_address
            self.prefill.append(prefill)
            register = prefill_pb2_grpc.add_PrefillServicer_to_server
            await self.serve(prefill.node_id, "prefill", register, prefill, "moontide.v1.Prefill")
        for idx in range(self.num_decode):
            decode = FakeDecode(f"decode-{idx}", self.answer)
            self.decode.append(decode)
            register = decode_pb2_grpc.add_DecodeServicer_to_server
            await self.serve(decode.node_id, "decode", register, decode, "moontide.v1.Decode")

    async def stop(self, node_id: str) -> None:
        """As kill: the server is gone at once, its record stays."""
        await self.servers.pop(node_id).close()

    async def close(self) -> None:
        for server in self.servers.values():
            await server.close()

    @property
    def holds_nothing(self) -> bool:
        """Whether no node holds anything for any request."""
        nodes: list[FakePrefill | FakeDecode] = [*self.prefill, *self.decode]
        return not self.store.reserved and not any(node.open for node in nodes)

    def prompts(self) -> list[list[int]]:
        """Token ids that prefill groups were given, over all groups in order of group."""
        return [unpack_token_ids(call.token_ids).astype(np.int64).tolist() for p in self.prefill for call in p.calls]

    async def serve(self, node_id: str, role: str, register: Any, servicer: object, service_name: str) -> str:
        """Start a server on a new port and announce it; returns its address."""
        server = Server()
        server.add(register, servicer, service_name)
        port = await server.start("127.0.0.1", 0)
        self.servers[node_id] = server
        record = NodeRecord(
            node_id=node_id,
            role=role,
            address=f"127.0.0.1:{port}",
            http_address="",
            boot_id="1",
            model_id="fake",
            layout_json=LAYOUT.to_json(),
            host_id=HOST_ID,
            load={"free_pages": 1000.0},
        )
        await self.registry.set(record)
        return record.address


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
