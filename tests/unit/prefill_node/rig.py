"""A whole prefill group in this process: real stages, real loopback sockets, real gRPC, over the memory twin of the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.access import KvConfig, StoreAccessConfig
from kvstore.keys import LOCAL_NODE_ID
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState
from kvstore.transfer.base import GetItem, GetStatus, PutItem, PutStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from model_runner.config import ModelConfig
from model_runner.pages import PrefixPages
from model_runner.runner import Segment, StageRunner
from moontide import rpc
from moontide.clock import MonotonicClock
from moontide.config import NodeConfig, RegistryConfig, free_port
from moontide.sampling_params import SamplingParams
from moontide.token_ids import pack_token_ids
from moontide_proto.v1 import prefill_pb2, prefill_pb2_grpc
from prefill_node.config import PrefillConfig, PrefillNodeConfig
from prefill_node.stage import Stage
from prefill_node.start import start_stage

BLOCK_TOKENS = 8
CHUNK_TOKENS = 32
WAIT_S = 20.0


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {WAIT_S} s") from None


def make_prompt(num_tokens: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, num_tokens)]


class Gate:
    """Holds threads of a stage at a named place until it is opened; counts who arrived."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.arrived = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.arrived += 1
        assert self._open.wait(WAIT_S), "nobody opened the gate"


class GatedTransfer(MemoryTransfer):
    """Puts, gets and look-ups can be held; puts can be made to fail."""

    def __init__(self, store: MemoryStore, gates: Gates) -> None:
        super().__init__(store)
        self._gates = gates

    def put(self, items: Sequence[PutItem], *, segment: str = "") -> list[PutStatus]:
        self._gates.put.pass_through()
        if self._gates.puts_fail:
            return [PutStatus.NO_SPACE for _ in items]
        return super().put(items, segment=segment)

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        self._gates.get.pass_through()
        return super().get(items)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self._gates.exists.pass_through()
        return super().exists(keys)


@dataclass
class Gates:
    put: Gate = field(default_factory=Gate)
    get: Gate = field(default_factory=Gate)
    exists: Gate = field(default_factory=Gate)
    puts_fail: bool = False

    def open_all(self) -> None:
        for gate in (self.put, self.get, self.exists):
            gate.open()


class HeldForwards:
    """Holds the forwards of one stage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stage_idx: int) -> None:
        self._release = threading.Event()
        self.arrived = threading.Event()
        forward: Callable[..., Any] = StageRunner.forward

        def held(runner: StageRunner, segments: Sequence[Segment], **given: Any) -> Any:
            if runner.spec.stage_idx == stage_idx:
                self.arrived.set()
                assert self._release.wait(WAIT_S), "nobody released the forward"
            return forward(runner, segments, **given)

        monkeypatch.setattr(StageRunner, "forward", held)

    def release(self) -> None:
        self._release.set()


class TcpProxy:
    """A cable that can be cut."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@dataclass
class Answer:
    """The events of one Prefill call."""

    accepted: prefill_pb2.PrefillAccepted | None = None
    sealed: list[int] = field(default_factory=list)
    first_token: prefill_pb2.FirstToken | None = None
    completed: prefill_pb2.PrefillCompleted | None = None
    order: list[str] = field(default_factory=list)

    def take(self, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        assert kind is not None
        self.order.append(kind)
        if kind == "sealed":
            self.sealed.append(event.sealed.num_blocks)
        else:
            setattr(self, kind, getattr(event, kind))

    @property
    def token_id(self) -> int:
        assert self.first_token is not None
        return self.first_token.token.token_id


class Group:
    """The stages of a group and a client of it."""

    def __init__(self, model_dir: Path, *, num_stages: int, **settings: Any) -> None:
        self.store = settings.pop("store", None) or MemoryStore(1 << 30)
        self.gates = Gates()
        self.node = LocalStoreNode(
            PoolState(
                capacity_bytes=settings.pop("pool_bytes", 1 << 28),
                clock=MonotonicClock(),
                node_id=settings.pop("store_node_id", LOCAL_NODE_ID),
            ),
            MemoryTransfer(self.store),
        )
        self.copier = settings.pop("copier", None)
        self.store_node: Any = self.node
        self.stages: list[Stage] = []
        self.control_address = f"127.0.0.1:{free_port()}"
        self.join_address = self.control_address
        """Where later stages connect to; a test may put a proxy there."""
        profile = settings.pop("profile", None)
        """Of a model whose steps are paced."""
        self._model = ModelConfig(
            name=str(model_dir),
            dtype="float32",
            load_format="paced" if profile else "safetensors",
            profile=str(profile or ""),
        )
        self._num_stages = num_stages
        self._settings = settings
        self._channel: Any = None
        self.stub: Any = None

    def config(self, stage_idx: int) -> PrefillNodeConfig:
        settings: dict[str, Any] = {
            "chunking": "fixed", "chunk_tokens": CHUNK_TOKENS, "num_pages": 64,
            "heartbeat_s": 0.2, "peer_timeout_s": 5.0, "seal_timeout_s": 5.0,
            **self._settings,
        }  # fmt: skip
        return PrefillNodeConfig(
            node=NodeConfig(node_id=f"prefill-0-stage-{stage_idx}"),
            registry=RegistryConfig(url="redis://127.0.0.1:1/0"),
            model=self._model,
            kv=KvConfig(block_tokens=BLOCK_TOKENS, layer_group=1),
            store=StoreAccessConfig(master_rpc="-", master_http="-", client_address="-", service_address="store:1"),
            prefill=PrefillConfig(
                group_id="prefill-0",
                stage_idx=stage_idx,
                num_stages=self._num_stages,
                control_address=self.join_address if stage_idx else self.control_address,
                **settings,
            ),
        )

    async def start_stage(self, stage_idx: int) -> Stage:
        return await start_stage(
            self.config(stage_idx),
            transfer=GatedTransfer(self.store, self.gates),
            store_node=self.store_node,
            copier=self.copier,
        )

    async def start(self) -> None:
        for stage_idx in range(self._num_stages):
            self.stages.append(await self.start_stage(stage_idx))
        await self.until_ready()
        self._channel = rpc.open_channel(self.stages[0].grpc_address)
        self.stub = prefill_pb2_grpc.PrefillStub(self._channel)

    async def until_ready(self) -> None:
        await eventually(lambda: all(stage.not_ready() is None for stage in self.stages), "a ready group")

    async def close(self) -> None:
        self.gates.open_all()
        if self._channel is not None:
            await self._channel.close()
        for stage in reversed(self.stages):
            await stage.close()

    def call(self, prompt: Sequence[int], request_id: str = "r", *, epoch: int = 1, **fields: Any) -> Any:
        sampling = fields.pop("sampling", SamplingParams(max_tokens=8, temperature=0.0))
        return self.stub.Prefill(
            prefill_pb2.PrefillRequest(
                request_id=request_id,
                epoch=epoch,
                token_ids=pack_token_ids(prompt),
                sampling=sampling.to_proto(),
                timeout_s=fields.pop("timeout_s", WAIT_S),
                **fields,
            )
        )

    async def prefill(self, prompt: Sequence[int], request_id: str = "r", **fields: Any) -> Answer:
        """One request to its end; the reservation goes back as the conductor would do it. Raises: the mapped error."""
        answer = Answer()
        try:
            async for event in self.call(prompt, request_id, **fields):
                answer.take(event)
        except rpc.grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, "prefill") from error
        finally:
            await self.node.release(request_id=request_id, epoch=fields.get("epoch", 1))
        return answer

    async def until_idle(self) -> None:
        """All pages, queues, reservations and log entries are back to the start."""
        coordinator = self.stages[0].coordinator
        assert coordinator is not None

        def is_idle() -> bool:
            session = coordinator.session
            return (
                session is not None
                and session.pages.num_free == session.pages.num_pages
                and not session.log.has_open_work
                and coordinator.num_waiting == coordinator.num_running == coordinator.num_reservations == 0
                and coordinator.queued_tokens == 0
            )

        await eventually(is_idle, "an idle group")
        assert coordinator.session is not None
        coordinator.session.check_invariants()

    def forget_pages(self) -> None:
        """Make an idle group fetch from the store what its stages still hold."""
        coordinator = self.stages[0].coordinator
        assert coordinator is not None
        assert coordinator.session is not None
        coordinator.session.pages = PrefixPages(coordinator.session.pages.num_pages)

    def blocks(self) -> dict[str, bytes]:
        """Shared blocks in the store."""
        return {key: value for key, value in self.store.objects.items() if key.startswith("b/")}


@asynccontextmanager
async def running_group(model_dir: Path, *, num_stages: int, **settings: Any) -> AsyncIterator[Group]:
    group = Group(model_dir, num_stages=num_stages, **settings)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(group.close)
        await group.start()
        yield group


@asynccontextmanager
async def group_behind_proxy(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[Group, TcpProxy]]:
    """Two stages whose control connection can be cut."""
    group = Group(model_dir, num_stages=2, **settings)
    proxy = TcpProxy(group.control_address)
    await proxy.start()
    group.join_address = proxy.address
    try:
        await group.start()
        yield group, proxy
    finally:
        await group.close()
        await proxy.close()
