"""gRPC calls over one HTTP/2 connection, in the event loop's own thread.

The client of the gRPC library polls in threads of its own and wakes the event loop over a socket for each message; on the conductor's
hottest path these switches of threads take a third of its core. Speaks what a gRPC server speaks: HTTP/2 (RFC 9113) with prior knowledge or
over TLS, flow control both ways, pings that find a dead peer, messages without compression. Knows nothing of protobuf.

    send -> pending -> [window of the stream and of the connection] -> DATA frames, written once per turn of the event loop
    DATA frames -> whole messages -> on_message at once; nothing is queued here
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import unquote

import grpc
import hpack

from moontide.log import get_logger
from moontide.rpc import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, MAX_MESSAGE_BYTES
from moontide.tls import HTTP2, Tls

CONNECT_TIMEOUT_S = 5.0
WINDOW_BYTES = 16 * 1024 * 1024
"""What a peer may send ahead, on each stream and on the whole connection."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 2, 4, 5
_CANCEL = 8
_DEFAULT_WINDOW = 65_535
_FRAME_HEADER = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_UINT32 = struct.Struct(">I")

log = get_logger(__name__)

OnMessage = Callable[[bytes], None]
OnEnd = Callable[[grpc.StatusCode, str, Mapping[str, str]], None]
"""Status, its message, and the trailers of the peer."""


class GrpcStream:
    """One call. `on_end` is called once, unless `cancel` was first."""

    def __init__(
        self, connection: GrpcConnection, stream_id: int, *, window: int, on_message: OnMessage, on_end: OnEnd
    ) -> None:
        self._connection = connection
        self.stream_id = stream_id
        self.window = window
        """Bytes that the peer takes now."""
        self.pending = bytearray()
        self.received = bytearray()
        """The beginning of a message that is not whole yet."""
        self.unacknowledged = 0
        self.headers: dict[str, str] = {}
        self.on_message = on_message
        self.on_end = on_end

    def send(self, message: bytes) -> None:
        """After the end of the call it goes nowhere."""
        self.pending += b"\0" + _UINT32.pack(len(message)) + message
        self._connection.pump(self)

    def cancel(self) -> None:
        """Nothing is sent or delivered any more."""
        self._connection.cancel(self)


class GrpcConnection(asyncio.Protocol):
    """A connection to one server. When it breaks, every call on it ends with UNAVAILABLE."""

    def __init__(self, address: str, scheme: str = "http") -> None:
        self._address = address
        self._scheme = scheme
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []
        self._decoder = hpack.Decoder()
        self._streams: dict[int, GrpcStream] = {}
        self._next_stream_id = 1
        self._window = _DEFAULT_WINDOW
        self._initial_window = _DEFAULT_WINDOW
        self._max_frame = 16_384
        self._unacknowledged = 0
        self._header_block: tuple[int, int, bytes] | None = None
        """Stream, flags and first part of headers that go on in the next frame."""
        self._heard_s = self._loop.time()
        self._ping: asyncio.TimerHandle | None = None
        self._lost: str | None = None

    @classmethod
    async def open(cls, address: str, tls: Tls | None = None) -> GrpcConnection:
        """With TLS if `tls` verifies peers.

        Raises: OSError; TimeoutError (an OSError) when nobody answers, SSLError (too) when the peer is not who it should be.
        """
        bracketed, _, port = address.rpartition(":")
        host = bracketed.strip("[]")
        context = tls.current().client_context if tls is not None else None
        name = tls.peer_name(host) if tls is not None and context is not None else None
        scheme = "http" if context is None else "https"
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, connection = await loop.create_connection(
                lambda: cls(address, scheme), host, int(port), ssl=context, server_hostname=name
            )
        if context is not None and transport.get_extra_info("ssl_object").selected_alpn_protocol() != HTTP2:
            transport.abort()
            raise ssl.SSLError(f"{address} speaks TLS but no HTTP/2")
        return connection

    def call(self, path: str, *, on_message: OnMessage, on_end: OnEnd) -> GrpcStream:
        """Begin a call of the method at `path` ("/package.Service/Method")."""
        stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
        stream = GrpcStream(self, stream_id, window=self._initial_window, on_message=on_message, on_end=on_end)
        if self._lost is not None:
            self._loop.call_soon(on_end, grpc.StatusCode.UNAVAILABLE, self._lost, {})
            return stream
        self._streams[stream_id] = stream
        fields = {
            ":method": "POST", ":scheme": self._scheme, ":path": path, ":authority": self._address,
            "te": "trailers", "content-type": "application/grpc",
        }  # fmt: skip
        self._write(_HEADERS, _END_HEADERS, stream_id, b"".join(map(_literal, fields, fields.values())))
        return stream

    def pump(self, stream: GrpcStream) -> None:
        """Send what the windows let pass."""
        while stream.pending and stream.stream_id in self._streams:
            num = min(len(stream.pending), stream.window, self._window, self._max_frame)
            if num <= 0:
                return
            self._write(_DATA, 0, stream.stream_id, bytes(stream.pending[:num]))
            del stream.pending[:num]
            stream.window -= num
            self._window -= num

    def cancel(self, stream: GrpcStream) -> None:
        if self._streams.pop(stream.stream_id, None) is not None:
            self._write(_RST_STREAM, 0, stream.stream_id, _UINT32.pack(_CANCEL))

    def close(self) -> None:
        """Calls that still run end with UNAVAILABLE."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
        self._lose("the connection was closed")

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_PREFACE)
        settings = ((_ENABLE_PUSH, 0), (_INITIAL_WINDOW_SIZE, WINDOW_BYTES))
        self._write(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings))
        self._write(_WINDOW_UPDATE, 0, 0, _UINT32.pack(WINDOW_BYTES - _DEFAULT_WINDOW))
        self._ping = self._loop.call_later(KEEPALIVE_S, self._keep_alive)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(str(error or "the peer closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= 9:
            high, low, kind, flags, stream_id = _FRAME_HEADER.unpack_from(self._buffer, start)
            end = start + 9 + (high << 8 | low)
            if len(self._buffer) < end:
                break
            payload = bytes(memoryview(self._buffer)[start + 9 : end])
            start = end
            try:
                self._on_frame(kind, flags, stream_id & 0x7FFF_FFFF, payload)
            except Exception as error:
                log.exception("connection given up", peer=self._address, frame=kind)
                self._break(f"a frame of its could not be handled: {error}")
                return
        del self._buffer[:start]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == _DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == _HEADERS:
            fragment = _unpadded(flags, payload)[5 if flags & _PRIORITY else 0 :]
            self._on_headers(flags, stream_id, fragment)
        elif kind == _CONTINUATION and self._header_block is not None:
            _, first_flags, fragment = self._header_block
            self._on_headers(first_flags | flags & _END_HEADERS, stream_id, fragment + payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._write(_PING, _ACK, 0, payload)
        elif kind == _WINDOW_UPDATE:
            self._on_window(stream_id, _UINT32.unpack(payload)[0])
        elif kind == _RST_STREAM:
            self._end(
                stream_id, grpc.StatusCode.UNAVAILABLE, f"the peer reset the stream, code {_UINT32.unpack(payload)[0]}"
            )
        elif kind == _GOAWAY:
            self._on_goaway(_UINT32.unpack_from(payload)[0], payload[8:].decode(errors="replace"))

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged > WINDOW_BYTES // 2:
            self._write(_WINDOW_UPDATE, 0, 0, _UINT32.pack(self._unacknowledged))
            self._unacknowledged = 0
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.unacknowledged += len(payload)
        if stream.unacknowledged > WINDOW_BYTES // 2:
            self._write(_WINDOW_UPDATE, 0, stream_id, _UINT32.pack(stream.unacknowledged))
            stream.unacknowledged = 0
        received = stream.received
        received += _unpadded(flags, payload)
        start = 0
        while len(received) - start >= 5 and stream_id in self._streams:
            num = _UINT32.unpack_from(received, start + 1)[0]
            if received[start] or num > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message is compressed or has {num} bytes, more than {MAX_MESSAGE_BYTES}")
            end = start + 5 + num
            if len(received) < end:
                break
            message = bytes(memoryview(received)[start + 5 : end])
            start = end
            stream.on_message(message)
        del received[:start]
        if flags & _END_STREAM:
            self._end(stream_id, grpc.StatusCode.UNKNOWN, "the call ended without a status")

    def _on_headers(self, flags: int, stream_id: int, fragment: bytes) -> None:
        if not flags & _END_HEADERS:
            self._header_block = (stream_id, flags, fragment)
            return
        self._header_block = None
        headers = {str(name): str(value) for name, value in self._decoder.decode(fragment)}
        if (stream := self._streams.get(stream_id)) is None:
            return
        stream.headers |= headers
        if flags & _END_STREAM:
            if "grpc-status" in stream.headers:
                status = _STATUSES.get(stream.headers["grpc-status"], grpc.StatusCode.UNKNOWN)
                message = unquote(stream.headers.get("grpc-message", ""))
            else:
                status = grpc.StatusCode.UNAVAILABLE
                message = f"HTTP status {stream.headers.get(':status')} without a gRPC status"
            self._end(stream_id, status, message)

    def _on_settings(self, payload: bytes) -> None:
        for key, value in _SETTING.iter_unpack(payload):
            if key == _INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
            elif key == _MAX_FRAME_SIZE:
                self._max_frame = value
        self._write(_SETTINGS, _ACK, 0, b"")
        self._on_window(0, 0)

    def _on_window(self, stream_id: int, more: int) -> None:
        if not stream_id:
            self._window += more
            for stream in tuple(self._streams.values()):
                self.pump(stream)
        elif (stream_ := self._streams.get(stream_id)) is not None:
            stream_.window += more
            self.pump(stream_)

    def _on_goaway(self, last_stream_id: int, reason: str) -> None:
        """Calls that the peer still knows may end by themselves; for new ones the connection is over."""
        self._lost = self._lost or f"the peer is going away: {reason}"
        for stream_id in [i for i in self._streams if i > last_stream_id]:
            self._end(stream_id, grpc.StatusCode.UNAVAILABLE, self._lost)

    def _end(self, stream_id: int, status: grpc.StatusCode, message: str) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            stream.on_end(status, message, stream.headers)

    def _keep_alive(self) -> None:
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= KEEPALIVE_S + KEEPALIVE_TIMEOUT_S:
            self._break(f"the peer was silent for {silent_s:.0f} s")
            return
        if silent_s >= KEEPALIVE_S:
            self._write(_PING, 0, 0, bytes(8))
            next_s = KEEPALIVE_TIMEOUT_S
        else:
            next_s = KEEPALIVE_S - silent_s
        self._ping = self._loop.call_later(next_s, self._keep_alive)

    def _break(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        if self._ping is not None:
            self._ping.cancel()
        for stream_id in tuple(self._streams):
            self._end(stream_id, grpc.StatusCode.UNAVAILABLE, self._lost)

    def _write(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        num = len(payload)
        self._outgoing.append(_FRAME_HEADER.pack(num >> 8, num & 0xFF, kind, flags, stream_id))
        self._outgoing.append(payload)

    def _flush(self) -> None:
        data, self._outgoing = b"".join(self._outgoing), []
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


_STATUSES = {str(status.value[0]): status for status in grpc.StatusCode}


def _literal(name: str, value: str) -> bytes:
    """A header field as HPACK writes it without tables: nothing to remember on either side."""
    assert max(len(name), len(value)) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _unpadded(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
