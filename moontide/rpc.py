"""gRPC as Moontide uses it: one place for limits, keepalive, error mapping, start and drain of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moontide.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Internal,
    MoontideError,
    NodeLost,
    Rejected,
    error_from_code,
)
from moontide.log import get_logger
from moontide.tls import Certificates, Tls

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A 1M-token prompt is 4 MiB of ids, which gRPC's own default of 4 MiB refuses."""

KEEPALIVE_S = 10.0
"""A peer that is silent for so long is pinged."""
KEEPALIVE_TIMEOUT_S = 5.0
"""One that does not answer that either is lost."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", int(1000 * KEEPALIVE_TIMEOUT_S)),
    # Without it any ping that is on its way, such as the one that measures bandwidth, keeps a dead connection alive for a minute.
    ("grpc.http2.ping_timeout_ms", int(1000 * KEEPALIVE_TIMEOUT_S)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
_RECONNECT: list[tuple[str, Any]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
RENEWED_GRACE_S = 600.0
"""Time that calls get to end on a connection that began with other certificates."""

_CODE_KEY = "moontide-error"
_PARAM_KEY = "moontide-param"
_RETRY_AFTER_KEY = "moontide-retry-after-s"

log = get_logger(__name__)


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `address`, with TLS if `tls` verifies peers; the caller closes it.

    Reconnects quickly: a restarted peer is seen within a second.
    """
    if tls is not None and tls.verifies_peers:
        return _RenewedChannel(address, tls)
    return grpc.aio.insecure_channel(address, options=[*_OPTIONS, *_RECONNECT])


class _RenewedChannel(grpc.aio.Channel):  # type: ignore[misc]
    """A TLS channel that opens a new connection when the certificates have changed: gRPC's own keep those that they began with."""

    def __init__(self, address: str, tls: Tls) -> None:
        self._address = address
        self._tls = tls
        self._certificates = tls.current()
        self._channel = self._open(self._certificates)
        self._ending: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def renewed(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""
        if (certificates := self._tls.current()) is not self._certificates:
            ending = asyncio.create_task(_close_later(self._channel), name=f"old channel {self._address}")
            self._ending[ending] = self._channel
            ending.add_done_callback(self._ending.pop)
            self._certificates, self._channel = certificates, self._open(certificates)
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        for ending, channel in tuple(self._ending.items()):
            ending.cancel()
            await channel.close(grace)
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return lambda *given, **call: self.renewed().unary_unary(method, *args, **options)(*given, **call)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return lambda *given, **call: self.renewed().unary_stream(method, *args, **options)(*given, **call)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return lambda *given, **call: self.renewed().stream_unary(method, *args, **options)(*given, **call)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return lambda *given, **call: self.renewed().stream_stream(method, *args, **options)(*given, **call)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def _open(self, certificates: Certificates) -> grpc.aio.Channel:
        credentials, options = self._tls.grpc_channel(certificates)
        return grpc.aio.secure_channel(self._address, credentials, options=[*_OPTIONS, *_RECONNECT, *options])


async def _close_later(channel: grpc.aio.Channel) -> None:
    # Not `close(RENEWED_GRACE_S)`: gRPC ignores every later `close` of a channel that is closing, so its calls could not be ended earlier.
    await asyncio.sleep(RENEWED_GRACE_S)
    await channel.close()


class Server:
    """A gRPC server with health and reflection.

    `serving` starts False: health answers NOT_SERVING until `set_serving(True)`.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        """With TLS if `tls` has a certificate."""
        self._tls = tls if tls is not None and tls.has_certificate else None
        self._server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._service_names: list[str] = [""]

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service_name: str) -> None:
        register(servicer, self._server)
        self._service_names.append(service_name)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve; returns the port. Raises: ConfigError when the port is taken."""
        reflection.enable_server_reflection(
            [*self._service_names[1:], reflection.SERVICE_NAME, health.SERVICE_NAME], self._server
        )
        try:
            bound = (
                self._server.add_insecure_port(f"{host}:{port}")
                if self._tls is None
                else self._server.add_secure_port(f"{host}:{port}", self._tls.grpc_server())
            )
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: the port is in use, or {host} is no address of this host; choose another"
            ) from error
        await self.set_serving(False)
        await self._server.start()
        return int(bound)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._service_names:
            await self._health.set(name, status)

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop taking calls, let running ones finish for `grace_s`, then cancel them."""
        await self._server.stop(grace_s)


@asynccontextmanager
async def grpc_errors(context: grpc.aio.ServicerContext[Any, Any], request_id: str = "") -> AsyncIterator[None]:
    """Turn our errors into gRPC statuses at a servicer's outermost edge; anything else is logged and becomes INTERNAL."""
    try:
        yield
    except MoontideError as error:
        await abort(context, error)
    except (grpc.aio.AbortError, grpc.aio.BaseError):
        raise
    except Exception as error:
        log.exception("call failed", request_id=request_id)
        await abort(context, Internal(f"{type(error).__name__}: {error}"))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: MoontideError) -> None:
    """End the call with the status of `error`; its class, field and when to try again travel as trailers."""
    trailers: list[tuple[str, str]] = [(_CODE_KEY, error.code)]
    param = getattr(error, "param", None)
    if param:
        trailers.append((_PARAM_KEY, param))
    if isinstance(error, Rejected) and error.retry_after_s is not None:
        trailers.append((_RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    await context.abort(error.status, str(error), tuple(trailers))


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> MoontideError:
    """Our error for a failed call: the class that the peer named, else by status. `peer` names who was called."""
    details = error.details() or error.code().name
    trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
    if _CODE_KEY in trailers:
        named = error_from_code(trailers[_CODE_KEY], details)
        if isinstance(named, Rejected) and _RETRY_AFTER_KEY in trailers:
            named.retry_after_s = float(trailers[_RETRY_AFTER_KEY])
        return named
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer in time")
    if error.code() is grpc.StatusCode.CANCELLED:
        return Cancelled(f"call to {peer} was cancelled")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return NodeLost(f"{peer} is not reachable: {details}")
    return Internal(f"{peer}: {error.code().name}: {details}")


def names_error(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer said which of our errors it was; a broken connection never does."""
    return any(key == _CODE_KEY for key, _ in error.trailing_metadata() or ())


async def call(
    method: Callable[..., Awaitable[Any]],
    request: Any,
    *,
    timeout_s: float,
    peer: str,
    metadata: Sequence[tuple[str, str]] = (),
) -> Any:
    """One unary call with a deadline; gRPC errors become ours."""
    try:
        return await method(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer) from error
