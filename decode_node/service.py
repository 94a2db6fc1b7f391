"""A decode node as a process: model, store access and threads put together, behind the gRPC service moontide.v1.Decode.

Messages become dataclasses here and nowhere else. Any number of conductors hold a Session each; one that ends takes its
requests with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import grpc.aio
import torch
from prometheus_client import CollectorRegistry

from decode_node.batch import Phase
from decode_node.config import DecodeNodeConfig
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
    WorkSpan,
)
from decode_node.stores import StoreNodes
from kvstore.client import StoreClient, StoreNodeClient
from kvstore.hash_chain import load_hash_chain
from kvstore.layout import KVLayout
from kvstore.node import StoreNode
from kvstore.pool import RequestKey
from kvstore.preflight import require_store
from kvstore.transfer.base import AttachmentLost, Transfer
from kvstore.transfer.mooncake import attach
from model_runner.footprint import check_room, footprint_in_role, free_bytes
from model_runner.kv_cache import PagedKVCache
from model_runner.load import load_runner
from model_runner.model_source import DescribedModel, describe_model
from model_runner.profile import measure
from model_runner.runner import StageRunner
from model_runner.stage import StageSpec
from moontide.clock import MonotonicClock
from moontide.config import to_tree
from moontide.errors import BadRequest, Internal, MoontideError, Rejected
from moontide.log import get_logger
from moontide.metrics import HealthServer
from moontide.perf_model import fit
from moontide.registry import Announcer, NodeRecord
from moontide.roles import SERVICE_NAME as NODE_SERVICE_NAME
from moontide.roles import NodeServicer, Place, RoleSwitch, Successor, deployed
from moontide.rpc import Server, grpc_errors
from moontide.sampling_params import SampledToken, SamplingParams
from moontide.slow_call import NoAnswerYet, SlowCall
from moontide.tls import Tls
from moontide.token_ids import unpack_token_ids
from moontide_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2_grpc

_PROBE_PERIOD_S = 1.0
_PROBES_TO_RED = 2
"""One slow answer on a busy host says nothing about the store."""
_STORE_ANSWER_S = 5.0
"""A store that has been asked for so long is a problem; the question goes on."""
_TIMELINE_TRACK = "decode"
_EVENTS_PER_MESSAGE = 256
_MEASURE_S = 0.5
"""For a first idea of the step times; the steps that run say more."""

log = get_logger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


async def serve(config: DecodeNodeConfig, stop: asyncio.Event) -> None:
    """Run until `stop` is set, or it is to change its role; then drain and close.

    Raises: ConfigError, StoreUnavailable at start; AttachmentLost, Internal; RoleChange at the end.
    """
    node = await start_decode(config)
    try:
        await _first_of(stop.wait(), node.switch.leaving.wait(), node.wait_failed())
        await node.drain()
    finally:
        await node.close()
    node.switch.raise_if_leaving()


async def start_decode(
    config: DecodeNodeConfig, *, transfer: Transfer | None = None, store_node: StoreNode | None = None
) -> DecodeNode:
    """Start a decode node and return it once it is announced; the caller closes it.

    Args:
        transfer: how K/V comes in; None attaches to this host's store process.
        store_node: where the layout is registered; None calls this host's store service. The caller closes both if given.
    Raises: ConfigError (a setting, a certificate, a taken port, another layout in the store), StoreUnavailable, NodeLost.
    """
    node = DecodeNode(config)
    try:
        await node.start(transfer, store_node)
    except BaseException:
        await node.close()
        raise
    return node


class DecodeNode:
    """One running decode node. Made by `start_decode`."""

    requests: DecodeRequests
    layout: KVLayout
    _described: DescribedModel
    address: str
    """host:port of the gRPC service."""
    http_address: str
    """host:port of /metrics, /live and /ready."""
    _watching: asyncio.Task[None]

    def __init__(self, config: DecodeNodeConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._metrics = CollectorRegistry()
        self._tls = Tls.load(config.tls)
        self._server = Server(self._tls)
        self.switch = RoleSwitch("decode", to_tree(config), check=self._check_successor)
        self._problem: str | None = "the model is loading"
        self._announcer: Announcer | None = None
        self._is_leaving = False

    def not_ready(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        if self._problem is None and not self.requests.is_alive:
            return "a worker thread has ended; see the log"
        return self._problem

    async def start(self, transfer: Transfer | None, store_node: StoreNode | None) -> None:
        """Sets the compute threads of the whole process."""
        config = self._config
        torch.set_num_threads(config.model.threads)
        health = HealthServer(self._metrics, self.not_ready)
        self._stack.push_async_callback(health.close)
        http_port = await health.start(config.node.host, config.node.http_port)
        self.http_address = f"{config.node.host}:{http_port}"

        described = await asyncio.to_thread(describe_model, config.model, config.kv)
        await asyncio.to_thread(load_hash_chain)
        source, info, self.layout = described.source, described.info, described.layout
        self._described = described
        spec = StageSpec(
            stage_idx=0, num_stages=1, start_layer=0, end_layer=info.num_layers, num_layers=info.num_layers
        )
        num_pages = config.decode.resolve_num_pages(max_context=info.max_context, block_tokens=config.kv.block_tokens)
        arena_bytes = PagedKVCache.arena_bytes(self.layout, spec, num_pages)
        if transfer is None:
            transfer = await attach(config.store, arena_bytes=arena_bytes)
            self._stack.callback(transfer.close)
        if store_node is None:
            store_node = StoreNodeClient(config.store.service_address, tls=self._tls)
            self._stack.push_async_callback(store_node.close)
        identity = await store_node.register_layout(self.layout)
        await require_store(config.store.master_http, identity.segment, host=config.node.host)
        runner = await asyncio.to_thread(
            load_runner,
            config.model,
            described,
            spec,
            num_pages=num_pages,
            arena=transfer.allocate(arena_bytes).buffer,
            is_decode=True,
        )
        step_model = runner.step_model
        if isinstance(runner, StageRunner):
            samples = await asyncio.to_thread(
                measure, runner, chunk_tokens=config.decode.chunk_tokens, budget_s=_MEASURE_S
            )
            step_model = fit(samples)
        clock = MonotonicClock()
        stores = StoreNodes(
            store_node, config.store.service_address, own_node_id=identity.node_id, clock=clock, tls=self._tls
        )
        self._stack.push_async_callback(stores.close)
        self.requests = DecodeRequests(
            runner,
            StoreClient(transfer, self.layout, registry=self._metrics),
            self.layout,
            stores=stores,
            config=config.decode,
            clock=clock,
            metrics=DecodeMetrics(self._metrics),
            step_model=step_model,
        )
        self.requests.start()
        self._stack.push_async_callback(self.requests.close)
        await self._open_to_the_world(source.model_id, transfer, store_node)
        log.info(
            "decode ready",
            address=self.address,
            http=self.http_address,
            model=source.model_id,
            dtype=info.dtype,
            num_pages=num_pages,
            arena_bytes=arena_bytes,
        )

    async def drain(self) -> None:
        """Leave the registry, refuse new requests, let the others end or hand them back."""
        self._is_leaving = True
        self._problem = "the node shuts down"
        await self._server.set_serving(False)
        if self._announcer is not None:
            await self._announcer.beat_now()
        log.info("draining", requests=self.requests.num_open)
        await self.requests.drain(self._config.decode.drain_timeout_s)
        log.info("drained")

    async def wait_failed(self) -> None:
        """Never returns. Raises: AttachmentLost, Internal when only a new process can serve again."""
        await asyncio.shield(self._watching)

    async def close(self) -> None:
        """End everything that is open; requests that are left are dropped. Idempotent."""
        await self._stack.aclose()

    async def _open_to_the_world(self, model_id: str, transfer: Transfer, store_node: StoreNode) -> None:
        config = self._config
        servicer = DecodeServicer(config, self.requests)
        self._server.add(decode_pb2_grpc.add_DecodeServicer_to_server, servicer, "moontide.v1.Decode")
        self._server.add(node_pb2_grpc.add_NodeServicer_to_server, NodeServicer(self.switch), NODE_SERVICE_NAME)
        self._stack.push_async_callback(self._server.close)
        grpc_port = await self._server.start(config.node.host, config.node.grpc_port)
        self.address = f"{config.node.host}:{grpc_port}"
        self._problem = await self._probe(transfer, store_node)
        record = NodeRecord(
            node_id=config.node.node_id,
            role="decode",
            address=self.address,
            http_address=self.http_address,
            boot_id=uuid.uuid4().hex,
            model_id=model_id,
            layout_json=self.layout.to_json(),
            host_id=config.node.resolve_host_id(),
            pid=os.getpid(),
            place=self._place(),
        )
        self._announcer = Announcer(config.registry, lambda: self._announce(record))
        self._stack.push_async_callback(self._announcer.close)
        await self._announcer.start()
        await self._server.set_serving(self._problem is None)
        self._watching = asyncio.create_task(self._watch_store(transfer, store_node), name="store watch")
        self._stack.push_async_callback(_cancel, self._watching)

    def _place(self) -> dict[str, Any]:
        """Where it would be as a prefill stage, if it may become one."""
        home = deployed("decode", to_tree(self._config))
        place = Place.of_settings(home.settings)
        return dataclasses.asdict(place) if place is not None else {}

    async def _check_successor(self, successor: Successor) -> None:
        """Raises: RoleRefused when it does not fit into memory; ConfigError."""

        def check() -> None:
            now = footprint_in_role(self._described, "decode", to_tree(self._config))
            needed = footprint_in_role(self._described, successor.role, successor.settings)
            check_room(needed, now=now, free_bytes=free_bytes(self._config.model), num_nodes=1)

        await asyncio.to_thread(check)

    def _announce(self, record: NodeRecord) -> NodeRecord | None:
        if self.not_ready() is not None:
            return None
        return dataclasses.replace(record, load=self.requests.load.report())

    async def _watch_store(self, transfer: Transfer, store_node: StoreNode) -> None:
        """Turn red when the store stays away, green when it is back.

        Raises: AttachmentLost; Internal when a worker thread has ended, for without it no open request would.
        """
        failures = 0
        probe = SlowCall(lambda: self._probe(transfer, store_node))
        try:
            while True:
                await asyncio.sleep(_PROBE_PERIOD_S)
                if not self.requests.is_alive:
                    raise Internal("a worker thread has ended; see the log")
                try:
                    problem = await probe.result(_STORE_ANSWER_S)
                    failures = failures + 1 if problem else 0
                except NoAnswerYet:
                    problem, failures = f"the store has not answered for {_STORE_ANSWER_S:g} s", _PROBES_TO_RED
                if not self._is_leaving and (problem is None or failures >= _PROBES_TO_RED):
                    await self._set_problem(problem)
        finally:
            await probe.close()

    async def _probe(self, transfer: Transfer, store_node: StoreNode) -> str | None:
        """Ask master and store process. The layout is registered again: a store process that came back has forgotten it."""
        try:
            if not await asyncio.to_thread(transfer.healthy):
                return "the store's master does not answer, or the store process does not reach our memory"
            await store_node.register_layout(self.layout)
        except AttachmentLost:
            raise
        except MoontideError as error:
            return f"the store process of this host does not serve: {error}"
        except Exception as error:
            log.exception("store probe failed")
            return f"the store cannot be asked: {type(error).__name__}: {error}"
        return None

    async def _set_problem(self, problem: str | None) -> None:
        if problem == self._problem:
            return
        (log.info if problem is None else log.warning)("readiness", problem=problem or "none")
        self._problem = problem
        await self._server.set_serving(problem is None)
        if self._announcer is not None:
            await self._announcer.beat_now()


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """moontide.v1.Decode over DecodeRequests."""

    def __init__(self, config: DecodeNodeConfig, requests: DecodeRequests) -> None:
        self._node_id = config.node.node_id
        self._max_batch = config.decode.max_batch
        self._requests = requests

    async def Session(self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context) -> None:
        """Runs until the conductor closes its side, goes away or stops reading."""
        async with grpc_errors(context):
            session = self._requests.open_session()
            try:
                await _first_of(
                    self._read(session, commands),
                    _write(session, context),
                    _refuse_slow_reader(session),
                )
            finally:
                self._requests.close_session(session)

    async def GetStatus(self, request: decode_pb2.DecodeStatusRequest, context: Context) -> decode_pb2.DecodeStatus:
        del request, context
        batch = self._requests.batch
        return decode_pb2.DecodeStatus(
            node_id=self._node_id,
            waiting=batch.count(Phase.WAITING_PAGES),
            pulling=batch.count(Phase.PULLING, Phase.READY),
            running=batch.count(Phase.RUNNING),
            num_pages=batch.num_pages,
            free_pages=batch.num_free_pages,
            max_batch=self._max_batch,
        )

    async def _read(self, session: ConductorSession, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> None:
        async for command in commands:
            self._apply(session, command)

    def _apply(self, session: ConductorSession, command: decode_pb2.DecodeCommand) -> None:
        key = RequestKey(command.request_id, command.epoch)
        match command.WhichOneof("command"):
            case "open":
                try:
                    wanted = _open_request(command.open)
                except BadRequest as error:
                    session.send(Failed(key=key, error=error))
                    return
                self._requests.open(session, key, wanted)
            case "sealed":
                sealed = command.sealed
                self._requests.sealed(session, key, sealed.num_blocks, holder=sealed.store_node_id)
            case "start":
                token = command.start.first_token
                self._requests.start_decoding(
                    session,
                    key,
                    SampledToken.from_proto(token),
                    token.output_idx,
                    store_address=command.start.store_address,
                )
            case "cancel":
                self._requests.cancel(session, key)
            case _:
                log.warning("command of a newer conductor ignored", request_id=key.request_id, epoch=key.epoch)


async def _write(session: ConductorSession, context: Context) -> None:
    while True:
        events = [_event_to_proto(await session.events.get())]
        # What else happened until now, such as the other tokens of the step, shares the message.
        while len(events) < _EVENTS_PER_MESSAGE and not session.events.empty():
            events.append(_event_to_proto(session.events.get_nowait()))
        await context.write(decode_pb2.DecodeEvents(events=events))


async def _refuse_slow_reader(session: ConductorSession) -> None:
    await session.overflow.wait()
    raise Rejected("the session's events are not read; open a new session and read it all the time")


async def _first_of(*works: Any) -> None:
    """Run coroutines side by side until one ends, cancel the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _open_request(msg: decode_pb2.DecodeOpen) -> OpenRequest:
    """Raises: BadRequest."""
    try:
        token_ids = unpack_token_ids(msg.token_ids)
    except ValueError as error:
        raise BadRequest(str(error), param="token_ids") from error
    return OpenRequest(
        token_ids=token_ids,
        sampling=SamplingParams.from_proto(msg.sampling),
        output_idx=msg.output_idx,
        cache_salt=msg.cache_salt,
        timeout_s=msg.timeout_s,
        tbt_slo_s=msg.tbt_slo_s if msg.HasField("tbt_slo_s") else None,
        local_prefill=(
            PromptStore(node_id=msg.local_prefill.store_node_id, address=msg.local_prefill.store_address)
            if msg.HasField("local_prefill")
            else None
        ),
    )


def _event_to_proto(event: DecodeEvent) -> decode_pb2.DecodeEvent:
    msg = decode_pb2.DecodeEvent(request_id=event.key.request_id, epoch=event.key.epoch)
    match event:
        case Tokens():
            msg.tokens.tokens.append(event.token.to_proto(event.output_idx))
            msg.tokens.spans.extend(_spans_to_proto(event.spans))
            msg.tokens.age_s = event.age_s
        case Pulled():
            msg.pulled.wait_pages_s = event.wait_pages_s
            msg.pulled.handoff_s = event.handoff_s
            msg.pulled.spans.extend(_spans_to_proto(event.spans))
            msg.pulled.age_s = event.age_s
        case LocalPrefillDone():
            msg.local_prefill_done.hit_tokens = event.hit_tokens
            msg.local_prefill_done.queue_s = event.queue_s
            msg.local_prefill_done.fetch_s = event.fetch_s
            msg.local_prefill_done.compute_s = event.compute_s
            msg.local_prefill_done.predicted_s = event.predicted_s
        case Finished():
            msg.finished.reason = event.reason.to_proto()
            if event.stop_token_id is not None:
                msg.finished.stop_token_id = event.stop_token_id
        case Failed():
            msg.failed.code = event.error.code
            msg.failed.message = str(event.error)
            msg.failed.retriable = event.error.retriable
    return msg


def _spans_to_proto(spans: Sequence[WorkSpan]) -> list[common_pb2.Span]:
    return [
        common_pb2.Span(
            name=span.name,
            track=_TIMELINE_TRACK,
            start_s=span.start_s,
            duration_s=span.duration_s,
            first_token=span.first_token,
            num_tokens=span.num_tokens,
        )
        for span in spans
    ]
