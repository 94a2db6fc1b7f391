"""Hidden states from one stage to the next: framed TCP, zero-copy, fails alone.

    connection  preface: magic, sender's stage, group epoch | frame | frame | ...
    frame       header length u32, payload length u64 | TensorHeader | raw bytes of the tensor     (little-endian)

Every header is checked against the log before its payload is read, so a frame of an older epoch, a lost or a repeated
one is an error on this link and never a wrong answer. Knows nothing of models, pages or who decides.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from model_runner.kv_cache import TORCH_DTYPES
from moontide.errors import NodeLost
from moontide.log import get_logger
from moontide_proto.v1 import stage_pb2

_PREFACE = struct.Struct("<4sIQ")
_FRAME = struct.Struct("<IQ")
_MAGIC = b"MTL1"
_MAX_HEADER_BYTES = 1 << 20
_BACKLOG = 16
_ACCEPT_RETRY_S = 0.1

log = get_logger(__name__)


class LinkError(NodeLost):
    """A link broke, or carried what the log does not expect."""


@dataclass(frozen=True, kw_only=True)
class ExpectedTensor:
    """What the log says about the next tensor on a link."""

    epoch: int
    seq: int
    request_ids: Sequence[str]
    first_tokens: Sequence[int]
    num_tokens: int
    hidden_size: int
    dtype: str

    def header(self) -> stage_pb2.TensorHeader:
        return stage_pb2.TensorHeader(
            epoch=self.epoch,
            seq=self.seq,
            request_ids=self.request_ids,
            first_tokens=self.first_tokens,
            num_tokens=self.num_tokens,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
        )


class LinkListener:
    """Takes the connections of the stage before this one, one per group epoch."""

    def __init__(self, *, from_stage_idx: int, handshake_timeout_s: float) -> None:
        self._from_stage_idx = from_stage_idx
        self._handshake_timeout_s = handshake_timeout_s
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._arrived: dict[int, socket.socket] = {}
        self._changed = asyncio.Condition()

    def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises: OSError when it is taken."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket), name="link-accept")
        return int(self._socket.getsockname()[1])

    async def connection(self, epoch: int, *, timeout_s: float) -> LinkReceiver:
        """The connection of that epoch; those of older ones are closed. Raises: LinkError when it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: epoch in self._arrived)
        except TimeoutError as error:
            raise LinkError(f"stage {self._from_stage_idx} did not open its link within {timeout_s} s") from error
        for older in [e for e in self._arrived if e < epoch]:
            self._arrived.pop(older).close()
        return LinkReceiver(self._arrived.pop(epoch))

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for connection in self._arrived.values():
            connection.close()
        self._arrived.clear()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as handshakes:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:
                    # A peer that went away again, or no file descriptor left just now: the next epoch needs us all the same.
                    log.warning("link not accepted", reason=str(error))
                    await asyncio.sleep(_ACCEPT_RETRY_S)
                    continue
                handshakes.create_task(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """Read who connects for which epoch; a stranger is dropped."""
        try:
            _prepare(connection)
            async with asyncio.timeout(self._handshake_timeout_s):
                data = await _receive(connection, _PREFACE.size)
            magic, stage_idx, epoch = _PREFACE.unpack(data)
            if magic != _MAGIC or stage_idx != self._from_stage_idx:
                raise LinkError(f"expected stage {self._from_stage_idx}, got {magic!r} of stage {stage_idx}")
        except (LinkError, OSError, TimeoutError) as error:
            log.warning("link refused", reason=str(error) or "no preface in time")
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        async with self._changed:
            repeated = self._arrived.pop(epoch, None)
            self._arrived[epoch] = connection
            self._changed.notify_all()
        if repeated is not None:
            repeated.close()


class LinkReceiver:
    """The receiving end for one epoch."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def next_header(self) -> tuple[stage_pb2.TensorHeader, int]:
        """Wait for a frame; returns its header and payload length.

        Waits without bound: a silent link is idle, a dead peer ends the connection or the group's heartbeats.
        Raises: LinkError when the link breaks, also while idle.
        """
        header_bytes, payload_bytes = _FRAME.unpack(await _receive(self._connection, _FRAME.size))
        if header_bytes > _MAX_HEADER_BYTES:
            raise LinkError(f"tensor header of {header_bytes} bytes; the limit is {_MAX_HEADER_BYTES}")
        try:
            header = stage_pb2.TensorHeader.FromString(bytes(await _receive(self._connection, header_bytes)))
        except DecodeError as error:
            raise LinkError(f"tensor header cannot be read: {error}") from error
        return header, payload_bytes

    async def payload(
        self, header: stage_pb2.TensorHeader, payload_bytes: int, expected: ExpectedTensor, *, timeout_s: float
    ) -> Tensor:
        """Read the tensor [T, D] that follows `header`. Raises: LinkError when the header is not the expected one."""
        wanted = expected.header()
        if header != wanted:
            raise LinkError(f"link carries {_show(header)}; the log expects {_show(wanted)}")
        hidden_TD = torch.empty(expected.num_tokens, expected.hidden_size, dtype=TORCH_DTYPES[expected.dtype])
        view = tensor_bytes(hidden_TD)
        if payload_bytes != len(view):
            raise LinkError(f"tensor of {payload_bytes} bytes; {len(view)} expected for {_show(wanted)}")
        try:
            async with asyncio.timeout(timeout_s):
                await _receive_into(self._connection, view)
        except TimeoutError as error:
            raise LinkError(f"tensor of step {expected.seq} did not arrive within {timeout_s} s") from error
        return hidden_TD

    def close(self) -> None:
        self._connection.close()


class LinkSender:
    """The sending end for one epoch."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, host: str, port: int, *, stage_idx: int, epoch: int, timeout_s: float) -> LinkSender:
        """Open the link to the next stage. Raises: LinkError."""
        loop = asyncio.get_running_loop()
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                family, kind, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
                connection = socket.socket(family, kind)
                _prepare(connection)
                await loop.sock_connect(connection, address)
                await loop.sock_sendall(connection, _PREFACE.pack(_MAGIC, stage_idx, epoch))
        except (OSError, TimeoutError) as error:
            if connection is not None:
                connection.close()
            raise LinkError(f"cannot open the link to {host}:{port}: {str(error) or 'no answer in time'}") from error
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        return cls(connection)

    async def send(self, expected: ExpectedTensor, payload: memoryview, *, timeout_s: float) -> None:
        """Send one tensor's bytes. Raises: LinkError when the link breaks or the peer does not take them in time."""
        loop = asyncio.get_running_loop()
        header = expected.header().SerializeToString()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._connection, _FRAME.pack(len(header), len(payload)) + header)
                await loop.sock_sendall(self._connection, payload)
        except (OSError, TimeoutError) as error:
            raise LinkError(
                f"cannot send step {expected.seq}: {str(error) or 'the next stage takes nothing'}"
            ) from error

    def close(self) -> None:
        self._connection.close()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy; the view keeps the tensor alive."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _receive(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    await _receive_into(connection, memoryview(data))
    return data


async def _receive_into(connection: socket.socket, view: memoryview) -> None:
    loop = asyncio.get_running_loop()
    try:
        while view:
            count = await loop.sock_recv_into(connection, view)
            if count == 0:
                raise LinkError("the stage before closed the link")
            view = view[count:]
    except OSError as error:
        raise LinkError(f"the link broke: {error}") from error


def _show(header: stage_pb2.TensorHeader) -> str:
    return (
        f"epoch {header.epoch} step {header.seq} of {list(header.request_ids)} at {list(header.first_tokens)}: "
        f"{header.num_tokens} x {header.hidden_size} {header.dtype}"
    )
