from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from front import until

from conductor.decode_session import DecodeMessage, DecodeSession
from conductor.recovery import AttemptFailed
from moontide.errors import NodeLost
from moontide.registry import NodeRecord
from moontide.rpc import Server
from moontide_proto.v1 import decode_pb2, decode_pb2_grpc


class DyingDecode(decode_pb2_grpc.DecodeServicer):
    """Answers the first command and is gone."""

    async def Session(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        async for command in commands:
            event = decode_pb2.DecodeEvent(request_id=command.request_id, epoch=command.epoch)
            yield decode_pb2.DecodeEvents(events=[event])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def test_broken_stream_tells_its_requests_and_leaves_no_task_behind() -> None:
    server = Server()
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, DyingDecode(), "moontide.v1.Decode")
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        record = NodeRecord(node_id="decode-0", role="decode", address=address, http_address=address, boot_id="boot")
        session = DecodeSession(record)
        heard: list[DecodeMessage] = []
        session.open(decode_pb2.DecodeCommand(request_id="r", epoch=1, open=decode_pb2.DecodeOpen()), heard.append)
        await until(lambda: session.is_broken)
        failure = heard[-1]
        assert isinstance(failure, AttemptFailed)
        assert isinstance(failure.error, NodeLost)
        assert session.num_requests == 0
        await session.close()
    finally:
        await server.close()


class SilentDecode(decode_pb2_grpc.DecodeServicer):
    """Reads commands and says nothing."""

    def __init__(self) -> None:
        self.num_commands = 0

    async def Session(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], _context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        async for _ in commands:
            self.num_commands += 1
        for events in ():
            yield events


async def test_commands_from_before_the_stream_are_not_kept_once_they_are_sent() -> None:
    server, decode = Server(), SilentDecode()
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, decode, "moontide.v1.Decode")
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    session = DecodeSession(
        NodeRecord(node_id="decode-0", role="decode", address=address, http_address=address, boot_id="boot")
    )
    try:
        command = decode_pb2.DecodeCommand(request_id="r", epoch=1, open=decode_pb2.DecodeOpen())
        references = sys.getrefcount(command)
        session.open(command, lambda _: None)
        assert sys.getrefcount(command) == references + 1
        await until(lambda: decode.num_commands == 1)
        assert sys.getrefcount(command) == references
    finally:
        await session.close()
        await server.close()
