"""Errors keep their class, field and status across a real gRPC connection; health follows `set_serving`."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moontide import rpc
from moontide.errors import BadRequest, ConfigError, DeadlineExceeded, Internal, ModelNotFound, MoontideError, NodeLost
from moontide_proto.v1 import kvstore_pb2, kvstore_pb2_grpc


class FailingStore(kvstore_pb2_grpc.KvStoreServicer):
    """Raises what it is told to."""

    error: Exception = Internal("unset")

    async def GetStats(self, request: kvstore_pb2.KvStoreStatsRequest, context: Any) -> kvstore_pb2.KvStoreStats:
        async with rpc.grpc_errors(context):
            raise self.error


@pytest.fixture
async def served() -> AsyncIterator[tuple[FailingStore, rpc.Server, str]]:
    servicer, server = FailingStore(), rpc.Server()
    server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, servicer, "moontide.v1.KvStore")
    port = await server.start("127.0.0.1", 0)
    yield servicer, server, f"127.0.0.1:{port}"
    await server.close()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ModelNotFound("no model 'x'"), ModelNotFound),
        (BadRequest("bad", param="top_p"), BadRequest),
        (NodeLost("stage 1 is gone"), NodeLost),
        (ZeroDivisionError("division by zero"), Internal),
    ],
)
async def test_error_keeps_its_class_over_the_wire(
    served: tuple[FailingStore, rpc.Server, str], raised: Exception, expected: type[MoontideError]
) -> None:
    servicer, _, address = served
    servicer.error = raised
    async with rpc.open_channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        with pytest.raises(expected, match=str(raised)) as caught:
            await rpc.call(stub.GetStats, kvstore_pb2.KvStoreStatsRequest(), timeout_s=5, peer="store")
        assert type(caught.value) is expected


async def test_unreachable_peer_is_a_lost_node() -> None:
    async with rpc.open_channel("127.0.0.1:1") as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        with pytest.raises((NodeLost, DeadlineExceeded), match="store"):
            await rpc.call(stub.GetStats, kvstore_pb2.KvStoreStatsRequest(), timeout_s=5, peer="store")


async def test_taken_port_is_a_config_error(served: tuple[FailingStore, rpc.Server, str]) -> None:
    port = int(served[2].rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"{port}: the port is in use"):
        await rpc.Server().start("127.0.0.1", port)


async def test_health_follows_set_serving(served: tuple[FailingStore, rpc.Server, str]) -> None:
    _, server, address = served
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="moontide.v1.KvStore")
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
