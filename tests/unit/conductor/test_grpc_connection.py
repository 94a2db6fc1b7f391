"""Against servers of the gRPC library, and against peers that break the rules."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from front import until

from conductor.grpc_connection import GrpcConnection, GrpcStream
from moontide.errors import NodeLost
from moontide.rpc import MAX_MESSAGE_BYTES, Server, abort
from moontide.tls import Tls
from tests.fakes.certificates import CertificateFiles

PATH = "/test.Echo/Echo"
Echo = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


@dataclass
class Heard:
    """What one call brought."""

    messages: list[bytes] = field(default_factory=list)
    ends: list[tuple[grpc.StatusCode, str, Mapping[str, str]]] = field(default_factory=list)

    def call(self, connection: GrpcConnection) -> GrpcStream:
        return connection.call(PATH, on_message=self.messages.append, on_end=lambda *end: self.ends.append(end))


async def echo(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


@asynccontextmanager
async def serving(behave: Echo, tls: Tls | None = None) -> AsyncIterator[tuple[Server, str]]:
    server = Server(tls)
    handler = grpc.method_handlers_generic_handler("test.Echo", {"Echo": grpc.stream_stream_rpc_method_handler(behave)})
    server.add(lambda _, grpc_server: grpc_server.add_generic_rpc_handlers((handler,)), None, "test.Echo")
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        yield server, address
    finally:
        await server.close()


@asynccontextmanager
async def connected(behave: Echo = echo, tls: Tls | None = None) -> AsyncIterator[GrpcConnection]:
    async with serving(behave, tls) as (_, address):
        connection = await GrpcConnection.open(address, tls)
        try:
            yield connection
        finally:
            connection.close()


@asynccontextmanager
async def raw_peer(
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[GrpcConnection]:
    """A connection to something that is no gRPC server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behave(reader, writer)
            await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connection = await GrpcConnection.open(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            yield connection
        finally:
            connection.close()


async def test_messages_of_every_size_come_back_in_order() -> None:
    async with connected() as connection:
        heard = Heard()
        stream = heard.call(connection)
        sizes = [0, 1, 5, 16_379, 16_384, 70_000, 3_000_000, 2]
        sent = [bytes([number]) * size for number, size in enumerate(sizes)]
        for message in sent:
            stream.send(message)
        await until(lambda: len(heard.messages) == len(sent))
        assert heard.messages == sent
        assert not heard.ends


@pytest.mark.parametrize("with_tls", [False, True])
async def test_more_than_every_window_passes_both_ways(with_tls: bool, tmp_path: Path) -> None:
    """Four streams of 20 MiB; what the peer sends ahead is bounded, so windows must be given back."""
    tls = Tls(CertificateFiles(tmp_path).config()) if with_tls else None
    async with connected(tls=tls) as connection:
        heard = [Heard() for _ in range(4)]
        streams = [one.call(connection) for one in heard]
        message = bytes(1_000_000)
        for _ in range(20):
            for stream in streams:
                stream.send(message)
        await until(lambda: all(len(one.messages) == 20 for one in heard))
        assert all(set(one.messages) == {message} for one in heard)


async def test_status_message_and_trailers_of_the_peer() -> None:
    async def fail(_messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await abort(context, NodeLost("stage 1 is gone: 100 % sûr"))

    async with connected(fail) as connection:
        heard = Heard()
        heard.call(connection)
        await until(lambda: bool(heard.ends))
        status, message, trailers = heard.ends[0]
        assert heard.messages == [b"first"]
        assert (status, message) == (NodeLost.status, "stage 1 is gone: 100 % sûr")
        assert trailers["moontide-error"] == "NodeLost"


async def test_unknown_method_is_unimplemented() -> None:
    async with connected() as connection:
        heard = Heard()
        connection.call("/test.Echo/Nothing", on_message=heard.messages.append, on_end=lambda *e: heard.ends.append(e))
        await until(lambda: bool(heard.ends))
        assert heard.ends[0][0] is grpc.StatusCode.UNIMPLEMENTED


async def test_cancel_reaches_the_peer_and_leaves_other_calls_alone() -> None:
    ended = 0

    async def hold(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        nonlocal ended
        try:
            async for message in messages:
                yield message
        finally:
            ended += 1

    async with connected(hold) as connection:
        heard, other = Heard(), Heard()
        stream, other_stream = heard.call(connection), other.call(connection)
        stream.send(b"one")
        other_stream.send(b"one")
        await until(lambda: bool(heard.messages and other.messages))
        stream.cancel()
        stream.send(b"two")
        await until(lambda: ended == 1)
        other_stream.send(b"two")
        await until(lambda: len(other.messages) == 2)
        assert heard.messages == [b"one"]
        assert not heard.ends
        assert not other.ends


async def test_death_of_the_peer_ends_every_call_and_every_later_one() -> None:
    async with serving(echo) as (server, address):
        connection = await GrpcConnection.open(address)
        heard = [Heard(), Heard()]
        for one in heard:
            one.call(connection).send(b"x")
        await until(lambda: all(one.messages for one in heard))
        await server.close()
        await until(lambda: all(one.ends for one in heard))
        late = Heard()
        late.call(connection)
        await until(lambda: bool(late.ends))
        assert late.ends[0][0] is grpc.StatusCode.UNAVAILABLE
        connection.close()
        assert [len(one.ends) for one in (*heard, late)] == [1, 1, 1]


async def test_a_peer_is_verified_and_verifies(tmp_path: Path) -> None:
    files, others = CertificateFiles(tmp_path / "own"), CertificateFiles(tmp_path / "others")
    async with serving(echo, Tls(files.config())) as (_, address):
        with pytest.raises(ssl.SSLCertVerificationError):
            await GrpcConnection.open(address, Tls(others.config()))
        connection = await GrpcConnection.open(address, Tls(files.client_config()))
        heard = Heard()
        heard.call(connection).send(b"x")
        await until(lambda: bool(heard.ends))
        assert heard.ends[0][0] is grpc.StatusCode.UNAVAILABLE, "it shows no certificate"
        connection.close()


async def test_new_certificates_are_used_by_new_connections(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    tls = Tls(files.config())
    async with serving(echo, tls) as (_, address):
        for authority in (files.authority, trustme.CA()):
            files.issue(authority=authority)
            connection = await GrpcConnection.open(address, tls)
            heard = Heard()
            heard.call(connection).send(b"x")
            await until(lambda heard=heard: heard.messages == [b"x"])  # type: ignore[misc]
            connection.close()


async def test_tls_without_http2_is_refused(tmp_path: Path) -> None:
    tls = Tls(CertificateFiles(tmp_path).config(require_client_cert=False))
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls.http_server())
    with pytest.raises(OSError, match="speaks TLS but no HTTP/2"):
        await GrpcConnection.open(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", tls)
    server.close()


async def test_nobody_there() -> None:
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await GrpcConnection.open("127.0.0.1:1")


async def test_silent_peer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.grpc_connection.KEEPALIVE_S", 0.05)
    monkeypatch.setattr("conductor.grpc_connection.KEEPALIVE_TIMEOUT_S", 0.05)

    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None: ...

    async with raw_peer(say_nothing) as connection:
        heard = Heard()
        heard.call(connection)
        await until(lambda: bool(heard.ends))
        assert heard.ends[0][0] is grpc.StatusCode.UNAVAILABLE
        assert "silent" in heard.ends[0][1]


async def test_idle_connection_lives_on_by_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.grpc_connection.KEEPALIVE_S", 0.02)
    monkeypatch.setattr("conductor.grpc_connection.KEEPALIVE_TIMEOUT_S", 0.5)
    async with connected() as connection:
        heard = Heard()
        stream = heard.call(connection)
        pings = 0
        write = connection._write

        def count(kind: int, *rest: Any) -> None:
            nonlocal pings
            pings += kind == 6
            write(kind, *rest)

        monkeypatch.setattr(connection, "_write", count)
        await until(lambda: pings >= 2)
        stream.send(b"still here")
        await until(lambda: heard.messages == [b"still here"])


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(2_000_000),
        b"\0\0\3\1\4\0\0\0\1\xff\xff\xff",  # headers that are no HPACK
        b"\0\0\5\0\0\0\0\0\1" + b"\0\xff\xff\xff\xff",  # a message of 4 GiB
    ],
)
async def test_peer_that_speaks_otherwise_is_given_up(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.grpc_connection.KEEPALIVE_S", 0.2)
    monkeypatch.setattr("conductor.grpc_connection.KEEPALIVE_TIMEOUT_S", 0.2)
    assert MAX_MESSAGE_BYTES < 2**32

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(reply)

    async with raw_peer(answer) as connection:
        heard = Heard()
        heard.call(connection)
        await until(lambda: bool(heard.ends))
        assert heard.ends[0][0] is grpc.StatusCode.UNAVAILABLE
