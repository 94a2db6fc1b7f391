"""The long-lived stream to each decode instance; it carries the requests of this conductor, told apart by (request id, epoch).

When the stream breaks, every request on it hears NodeLost at once; the next request opens a new stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from conductor.recovery import AttemptFailed
from moontide.errors import NodeLost
from moontide.log import get_logger
from moontide.registry import NodeRecord
from moontide.rpc import open_channel
from moontide_proto.v1 import decode_pb2, decode_pb2_grpc

DecodeMessage = decode_pb2.DecodeEvent | AttemptFailed
Deliver = Callable[[DecodeMessage], None]

log = get_logger(__name__)


class DecodeSession:
    """One stream to one boot of one decode instance."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self._channel = open_channel(record.address)
        # Not bounded by itself: a request puts a handful of small commands here, and the number of requests is bounded.
        self._outgoing: asyncio.Queue[decode_pb2.DecodeCommand | None] = asyncio.Queue()
        self._receivers: dict[tuple[str, int], Deliver] = {}
        self._broken: str | None = None
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
        """Queue a command; on a broken stream it goes nowhere, and the requests have been told."""
        if self._broken is None:
            self._outgoing.put_nowait(command)

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
        try:
            stub = decode_pb2_grpc.DecodeStub(self._channel)  # type: ignore[no-untyped-call]
            async for message in stub.Session(self._commands()):
                for event in message.events:
                    if deliver := self._receivers.get((event.request_id, event.epoch)):
                        deliver(event)
            reason = "it ended the session"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        finally:
            self._lose(f"decode instance {self.record.node_id} is lost: {reason}")
            await self._channel.close()

    async def _commands(self) -> AsyncIterator[decode_pb2.DecodeCommand]:
        """Ends with the stream: gRPC's task that reads this would otherwise wait for ever."""
        while (command := await self._outgoing.get()) is not None:
            yield command

    def _lose(self, reason: str) -> None:
        if self._broken is None:
            log.info("decode session over", node=self.record.node_id, reason=reason, requests=len(self._receivers))
            self._outgoing.put_nowait(None)
        self._broken = reason
        receivers, self._receivers = self._receivers, {}
        for deliver in receivers.values():
            deliver(AttemptFailed(NodeLost(reason), node_id=self.record.node_id))


class DecodeSessions:
    """The sessions of this conductor, opened on demand."""

    def __init__(self) -> None:
        self._sessions: dict[str, DecodeSession] = {}

    def get(self, record: NodeRecord) -> DecodeSession:
        """The working session of that node, a new one if need be. A broken one has closed itself."""
        session = self._sessions.get(record.node_id)
        if session is None or session.is_broken or session.record.boot_id != record.boot_id:
            session = DecodeSession(record)
            replaced = self._sessions.get(record.node_id)
            self._sessions[record.node_id] = session
            if replaced is not None:
                replaced.abandon()
        return session

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
