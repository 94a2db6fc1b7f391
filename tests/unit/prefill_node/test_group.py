"""Control connections whose peer has stopped reading."""

from __future__ import annotations

import asyncio
import socket

from prefill_node.group import ControlConnection

_LARGE_BYTES = 32 << 20
"""More than the buffers of both sockets take."""


async def test_close_ends_although_the_peer_reads_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        peer, _ = listening.accept()
        with peer:
            connection = ControlConnection(reader, writer)
            connection.send_bytes(bytes(_LARGE_BYTES))
            assert writer.transport.get_write_buffer_size() > 0
            async with asyncio.timeout(20):
                await asyncio.gather(connection.close(), connection.close())


async def test_close_still_sends_what_is_queued() -> None:
    arrived = asyncio.get_running_loop().create_future()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set_result(len(await reader.read(-1)))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    connection = ControlConnection(reader, writer)
    connection.send_bytes(bytes(_LARGE_BYTES))
    await connection.close()
    async with asyncio.timeout(20):
        assert await arrived == _LARGE_BYTES + 4
    server.close()
