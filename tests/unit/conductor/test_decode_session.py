from __future__ import annotations

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
