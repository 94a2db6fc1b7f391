from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from front import until
from prometheus_client import CollectorRegistry

from conductor.metrics import ConductorMetrics
from conductor.store_leases import IDLE_CLIENT_S, StoreLeases
from moontide.rpc import Server
from moontide_proto.v1 import kvstore_pb2_grpc
from tests.fakes.clock import FakeClock
from tests.fakes.nodes import FakeStore

NOBODY = "127.0.0.1:1"


@pytest_asyncio.fixture
async def store() -> AsyncIterator[tuple[FakeStore, str]]:
    servicer, server = FakeStore(), Server()
    server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, servicer, "moontide.v1.KvStore")
    port = await server.start("127.0.0.1", 0)
    yield servicer, f"127.0.0.1:{port}"
    await server.close()


async def test_held_reservations_are_renewed_until_their_release(store: tuple[FakeStore, str]) -> None:
    servicer, address = store
    servicer.reserved = {("a", 1), ("a", 2), ("b", 1)}
    leases = StoreLeases(lease_s=0.06, clock=FakeClock(), metrics=ConductorMetrics(CollectorRegistry()))
    leases.start()
    for request_id, epoch in (("a", 1), ("a", 2), ("b", 1)):
        leases.hold(address, request_id, epoch)
    await until(lambda: servicer.renewed.count("b") >= 2)
    await leases.release(address, "b", 1)
    await leases.release(address, "a", 1)
    assert servicer.reserved == {("a", 2)}
    before = len(servicer.renewed)
    await until(lambda: len(servicer.renewed) >= before + 2)
    assert "b" not in servicer.renewed[before + 1 :]
    assert leases.num_held == 1
    await leases.close()


async def test_store_that_does_not_answer_is_counted_and_given_up() -> None:
    metrics = ConductorMetrics(CollectorRegistry())
    leases = StoreLeases(lease_s=0.03, clock=FakeClock(), metrics=metrics)
    leases.start()
    leases.hold(NOBODY, "a", 1)

    def errors(operation: str) -> float:
        return metrics.registry.get_sample_value("conductor_store_errors_total", {"operation": operation}) or 0.0

    await until(lambda: errors("renew") >= 1)
    await leases.release(NOBODY, "a", 1)
    assert errors("release") == 1
    assert leases.num_held == 0
    await leases.close()


async def test_connection_that_nobody_uses_is_closed(store: tuple[FakeStore, str]) -> None:
    _, address = store
    clock = FakeClock()
    leases = StoreLeases(lease_s=0.03, clock=clock, metrics=ConductorMetrics(CollectorRegistry()))
    leases.start()
    await leases.release(address, "a", 1)
    clock.advance(IDLE_CLIENT_S + 1)
    await until(lambda: not leases._stores)
    await leases.close()
