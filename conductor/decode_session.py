"""The long-lived stream to each decode instance; it carries the requests of this conductor, told apart by (request id, epoch).

When the stream breaks, every request on it hears NodeLost at once; the next request opens a new stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import grpc

from conductor.grpc_connection import GrpcConnection, GrpcStream
from conductor.recovery import AttemptFailed
from moontide.errors import NodeLost
from moontide.log import get_logger
from moontide.registry import NodeRecord
from moontide.tls import Tls
from moontide_proto.v1 import decode_pb2

DecodeMessage = decode_pb2.DecodeEvent | AttemptFailed
Deliver = Callable[[DecodeMessage], None]

METHOD = "/moontide.v1.Decode/Session"

log = get_logger(__name__)


class DecodeSession:
    """One stream to one boot of one decode instance."""

    def __init__(self, record: NodeRecord, tls: Tls | None = None) -> None:
        self.record = record
        self._tls = tls
        self._stream: GrpcStream | None = None
        # Not bounded by itself: a request puts a handful of small commands here, and the number of requests is bounded.
        self._unsent: list[decode_pb2.DecodeCommand] = []
        """Commands from before the stream was there."""
        self._receivers: dict[tuple[str, int], Deliver] = {}
        self._broken: str | None = None
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"session {record.node_id}")

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    @property
    def num_requests(self) -> int:
        return len(self._receivers)

    def open(self, command: decode_pb2.DecodeCommand, deliver: Deliver) -> None:
        """Send the `open` of a request; its events, or the failure of the stream, go to `deliver`."""
        self._receivers[command.request_id, command.epoch] = deliver
        if self._broken is not None:
            self._lose(self._broken)
        else:
            self.send(command)

    def send(self, command: decode_pb2.DecodeCommand) -> None:
        """Send a command; on a broken stream it goes nowhere, and the requests have been told."""
        if self._stream is not None:
            self._stream.send(command.SerializeToString())
        elif self._broken is None:
            self._unsent.append(command)

    def forget(self, request_id: str, epoch: int) -> None:
        """Whatever still comes for this request is dropped."""
        self._receivers.pop((request_id, epoch), None)

    def abandon(self) -> None:
        """End the stream without waiting: another boot of the node has taken its place."""
        self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason = "the session was closed"
        connection = None
        try:
            connection = await GrpcConnection.open(self.record.address, self._tls)
            self._stream = connection.call(METHOD, on_message=self._on_message, on_end=self._on_end)
            self._send_unsent()
            await self._ended.wait()
        except OSError as error:
            reason = str(error) or "it does not answer"
        finally:
            self._lose(reason)
            if connection is not None:
                connection.close()

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        for command in unsent:
            self.send(command)

    def _on_message(self, data: bytes) -> None:
        for event in decode_pb2.DecodeEvents.FromString(data).events:
            if deliver := self._receivers.get((event.request_id, event.epoch)):
                deliver(event)

    def _on_end(self, status: grpc.StatusCode, message: str, _trailers: Mapping[str, str]) -> None:
        self._lose("it ended the session" if status is grpc.StatusCode.OK else message or status.name)
        self._ended.set()

    def _lose(self, reason: str) -> None:
        if self._broken is None:
            self._broken = f"decode instance {self.record.node_id} is lost: {reason}"
            log.info("decode session over", node=self.record.node_id, reason=reason, requests=len(self._receivers))
        self._stream = None
        self._unsent = []
        receivers, self._receivers = self._receivers, {}
        for deliver in receivers.values():
            deliver(AttemptFailed(NodeLost(self._broken), node_id=self.record.node_id))


class DecodeSessions:
    """The sessions of this conductor, opened on demand."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._sessions: dict[str, DecodeSession] = {}

    def get(self, record: NodeRecord) -> DecodeSession:
        """The working session of that node, a new one if need be. A broken one has closed itself."""
        session = self._sessions.get(record.node_id)
        if session is None or session.is_broken or session.record.boot_id != record.boot_id:
            session = DecodeSession(record, self._tls)
            replaced = self._sessions.pop(record.node_id, None)
            self._sessions = {node_id: each for node_id, each in self._sessions.items() if not each.is_broken}
            self._sessions[record.node_id] = session
            if replaced is not None:
                replaced.abandon()
        return session

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
