"""Who is in a prefill group: control connections, epochs, heartbeats, and what happens when a member dies.

    stage i  -- Hello, then StageReport... -->  stage 0        framed protobuf: length u32 (little-endian), message
    stage i  <-- Welcome, then LogEntry... --   stage 0

Stage 0 welcomes everybody once every stage is there; until then it sends welcomes of epoch 0, which say only that it is
alive. An epoch ends with the first error or silence on any connection: then all connections are closed, every stage drops
what it holds and introduces itself anew. Knows nothing of requests, pages or tensors.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from moontide.errors import MoontideError, NodeLost
from moontide.log import get_logger
from moontide.perf_model import StepModel
from moontide_proto.v1 import stage_pb2

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 64 * 1024 * 1024
_MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A peer that lets so much pile up reads nothing any more."""
_CLOSE_TIMEOUT_S = 1.0
"""Longest wait at the end for bytes that the peer has not taken yet."""

M = TypeVar("M", bound=Message)

log = get_logger(__name__)


class ControlConnection:
    """One framed connection between a stage and stage 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        """Queue a message; never waits. Raises: NodeLost when the peer has stopped reading."""
        self.send_bytes(message.SerializeToString())

    def send_bytes(self, data: bytes) -> None:
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise NodeLost("the peer has stopped reading")
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self, kind: type[M], *, timeout_s: float) -> M:
        """The next message. Raises: NodeLost when the connection breaks or stays silent for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                (nbytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if nbytes > _MAX_FRAME_BYTES:
                    raise NodeLost(f"a message of {nbytes} bytes; the limit is {_MAX_FRAME_BYTES}")
                message: M = kind()
                message.ParseFromString(await self._reader.readexactly(nbytes))
                return message
        except TimeoutError as error:
            raise NodeLost(f"silent for {timeout_s} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NodeLost("the connection was closed") from error
        except DecodeError as error:
            raise NodeLost(f"unreadable message: {error}") from error

    async def close(self) -> None:
        """What is queued is still sent, unless the peer has stopped reading."""
        self._writer.close()
        closed = asyncio.ensure_future(self._writer.wait_closed())
        await asyncio.wait([closed], timeout=_CLOSE_TIMEOUT_S)
        if not closed.done():
            self._writer.transport.abort()
        with suppress(OSError):
            await closed


@dataclass(frozen=True, kw_only=True)
class FormedGroup:
    """A complete group, as stage 0 sees it."""

    epoch: int
    num_pages: int
    """The fewest of all stages."""
    step_models: tuple[StepModel | None, ...]
    """How long each stage takes, as it has measured itself."""
    next_link_address: str
    """Where stage 1 takes hidden states; empty for a group of one stage."""


class _Member:
    def __init__(self, hello: stage_pb2.Hello, connection: ControlConnection) -> None:
        self.hello = hello
        self.connection = connection


class GroupLeader:
    """Stage 0's end of all control connections."""

    def __init__(
        self,
        *,
        hello: stage_pb2.Hello,
        heartbeat_s: float,
        peer_timeout_s: float,
        on_report: Callable[[int, stage_pb2.StageReport], None],
    ) -> None:
        """
        Args:
            hello: what stage 0 would say of itself; members must agree with it.
            on_report: takes the reports of other stages in the current epoch; what it raises ends the epoch.
        """
        self._hello = hello
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._on_report = on_report
        # Epochs go on growing after a restart of stage 0, so that links of an older life are refused.
        self._epochs = itertools.count(time.time_ns() // 1_000_000)
        self._server: asyncio.Server | None = None
        self._beating: asyncio.Task[None] | None = None
        self._members: dict[int, _Member] = {}
        self._changed = asyncio.Condition()
        self._epoch = 0
        self._lost: asyncio.Future[str] | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen for the other stages. Raises: OSError when the port is taken."""
        if self._hello.num_stages > 1:
            self._server = await asyncio.start_server(self._serve_member, host, port)
        self._beating = asyncio.create_task(self._beat(), name="group-heartbeat")

    @property
    def missing_stages(self) -> list[int]:
        """Stages that have not introduced themselves."""
        return [idx for idx in range(1, self._hello.num_stages) if idx not in self._members]

    async def form(self) -> FormedGroup:
        """Wait until every stage is there, and start an epoch. Waits without bound: a group may be incomplete for long."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.missing_stages)
        self._epoch = next(self._epochs)
        self._lost = asyncio.get_running_loop().create_future()
        hellos = [self._hello, *(self._members[idx].hello for idx in range(1, self._hello.num_stages))]
        num_pages = min(hello.num_pages for hello in hellos)
        links = [*(hello.link_address for hello in hellos[1:]), ""]
        for stage_idx in self._members:
            welcome = stage_pb2.Welcome(epoch=self._epoch, next_link_address=links[stage_idx], num_pages=num_pages)
            self._send(stage_idx, welcome.SerializeToString())
        step_models = tuple(_step_model(hello) for hello in hellos)
        return FormedGroup(epoch=self._epoch, num_pages=num_pages, next_link_address=links[0], step_models=step_models)

    async def wait_lost(self) -> str:
        """Return why the epoch ended, when it does."""
        assert self._lost is not None, "no epoch has started"
        return await asyncio.shield(self._lost)

    def lose(self, reason: str) -> None:
        """End the epoch; the first reason counts."""
        self._epoch = 0
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    async def dissolve(self) -> None:
        """After the end of an epoch: close every connection; the stages come back on new ones."""
        members, self._members = self._members, {}
        await asyncio.gather(*(member.connection.close() for member in members.values()))

    def broadcast(self, entry: stage_pb2.LogEntry) -> None:
        """Give an entry of the log to every other stage, in order; prompts' tokens stay here. Nothing after the epoch's end."""
        if not self._epoch or not self._members:
            return
        if entry.HasField("compute"):
            stripped = stage_pb2.LogEntry()
            stripped.CopyFrom(entry)
            for chunk in stripped.compute.chunks:
                chunk.ClearField("token_ids")
            entry = stripped
        data = entry.SerializeToString()
        for stage_idx in self._members:
            self._send(stage_idx, data)

    @property
    def member_node_ids(self) -> list[str]:
        return [self._members[idx].hello.node_id for idx in sorted(self._members)]

    def dismiss(self) -> None:
        """Have the other stages become decode instances when this epoch ends. Raises nothing: one that is lost stays a stage."""
        self.broadcast(stage_pb2.LogEntry(epoch=self._epoch, leave_group=stage_pb2.LeaveGroup()))

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        self.lose("stage 0 is closing")
        await self.dissolve()

    def _send(self, stage_idx: int, data: bytes) -> None:
        try:
            self._members[stage_idx].connection.send_bytes(data)
        except NodeLost as error:
            self.lose(f"stage {stage_idx}: {error}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            alive: Message = stage_pb2.LogEntry(epoch=self._epoch, heartbeat=stage_pb2.Heartbeat())
            if not self._epoch:
                alive = stage_pb2.Welcome()
            for stage_idx in self._members:
                self._send(stage_idx, alive.SerializeToString())

    async def _serve_member(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from Hello to its end."""
        connection = ControlConnection(reader, writer)
        stage_idx: int | None = None
        member: _Member | None = None
        try:
            hello = await connection.receive(stage_pb2.Hello, timeout_s=self._peer_timeout_s)
            stage_idx = hello.stage_idx
            self._check(hello)
            member = _Member(hello, connection)
            await self._join(stage_idx, member)
            while True:
                report = await connection.receive(stage_pb2.StageReport, timeout_s=self._peer_timeout_s)
                self._take_report(stage_idx, report)
        except MoontideError as error:
            self._leave(stage_idx, member, str(error))
        except Exception as error:
            log.exception("report not taken", stage=stage_idx)
            self._leave(stage_idx, member, f"{type(error).__name__}: {error}")
        finally:
            await connection.close()

    def _check(self, hello: stage_pb2.Hello) -> None:
        mine = self._hello
        if not 0 < hello.stage_idx < mine.num_stages or hello.num_stages != mine.num_stages:
            raise NodeLost(
                f"it is stage {hello.stage_idx} of {hello.num_stages}, and this group has {mine.num_stages}; "
                "start all stages with one prefill.num_stages"
            )
        if (hello.layout_digest, hello.hidden_size) != (mine.layout_digest, mine.hidden_size):
            raise NodeLost("it serves another model, dtype or block geometry; start all stages with equal settings")
        if hello.store_node_id != mine.store_node_id:
            raise NodeLost(
                f"it stores for {hello.store_node_id} and stage 0 for {mine.store_node_id}; start all stages with one "
                "store.service_address"
            )
        if list(hello.layer_split) != list(mine.layer_split):
            raise NodeLost(
                f"its stages have {_listed(hello.layer_split)} layers and those of this group {_listed(mine.layer_split)}; "
                "start all stages with one prefill.layer_split"
            )

    async def _join(self, stage_idx: int, member: _Member) -> None:
        older = self._members.get(stage_idx)
        if older is not None:
            # It came back before its old connection was seen to end.
            self.lose(f"stage {stage_idx} was restarted")
            await older.connection.close()
        async with self._changed:
            self._members[stage_idx] = member
            self._changed.notify_all()
        log.info("stage is here", stage=stage_idx, link_address=member.hello.link_address)

    def _leave(self, stage_idx: int | None, member: _Member | None, reason: str) -> None:
        if member is None:
            log.warning("stage refused", stage="unknown" if stage_idx is None else stage_idx, reason=reason)
            return
        assert stage_idx is not None
        if self._members.get(stage_idx) is member:
            del self._members[stage_idx]
            self.lose(f"stage {stage_idx}: {reason}")

    def _take_report(self, stage_idx: int, report: stage_pb2.StageReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "heartbeat" or not self._epoch or report.epoch != self._epoch:
            return
        if kind == "failed":
            raise NodeLost(report.failed.message)
        self._on_report(stage_idx, report)


class GroupMember:
    """A later stage's end of its control connection, for one epoch."""

    def __init__(self, connection: ControlConnection, *, heartbeat_s: float, peer_timeout_s: float) -> None:
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, host: str, port: int, *, hello: stage_pb2.Hello, heartbeat_s: float, peer_timeout_s: float
    ) -> AsyncIterator[GroupMember]:
        """Introduce this stage to stage 0 and keep sending signs of life. Raises: NodeLost when nobody answers."""
        try:
            async with asyncio.timeout(peer_timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise NodeLost(f"stage 0 does not answer at {host}:{port}: {str(error) or 'no answer in time'}") from error
        member = cls(ControlConnection(reader, writer), heartbeat_s=heartbeat_s, peer_timeout_s=peer_timeout_s)
        beating: asyncio.Task[None] | None = None
        try:
            member._connection.send(hello)
            beating = asyncio.create_task(member._beat(hello.stage_idx), name="member-heartbeat")
            yield member
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            await member._connection.close()

    async def welcome(self) -> stage_pb2.Welcome:
        """Wait until the group is complete. Raises: NodeLost."""
        while True:
            welcome = await self._connection.receive(stage_pb2.Welcome, timeout_s=self._peer_timeout_s)
            if welcome.epoch:
                return welcome

    async def follow(self, apply: Callable[[stage_pb2.LogEntry], None]) -> None:
        """Apply the log until the epoch ends. Raises: NodeLost, and what `apply` raises."""
        while True:
            entry = await self._connection.receive(stage_pb2.LogEntry, timeout_s=self._peer_timeout_s)
            if not entry.HasField("heartbeat"):
                apply(entry)

    def report(self, report: stage_pb2.StageReport) -> None:
        """Raises: NodeLost when stage 0 has stopped reading."""
        self._connection.send(report)

    async def _beat(self, stage_idx: int) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.report(stage_pb2.StageReport(stage_idx=stage_idx, heartbeat=stage_pb2.Heartbeat()))


def _step_model(hello: stage_pb2.Hello) -> StepModel | None:
    if not hello.HasField("step_model"):
        return None
    told = hello.step_model
    return StepModel(overhead_s=told.overhead_s, token_s=told.token_s, pair_s=told.pair_s, knee_tokens=told.knee_tokens)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
