"""Which series a process shows before its first event: all of them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from conductor.metrics import ConductorMetrics
from decode_node.metrics import DecodeMetrics
from kvstore.metrics import ClientMetrics, SsdMetrics, StoreMetrics
from moontide.metrics import HealthServer
from prefill_node.metrics import GroupMetrics, StageMetrics

SET_WITH_THE_FIRST_READ = {"conductor_nodes"}
"""Gauges that a conductor sets for every role before it is ready."""


@pytest.fixture
def registry() -> CollectorRegistry:
    """The metrics of every service."""
    registry = CollectorRegistry()
    ConductorMetrics(registry).expect_tenants(["default"])
    GroupMetrics(registry, num_stages=2).plan.info({"mode": "cpp"})
    for service in (StageMetrics, DecodeMetrics, ClientMetrics, StoreMetrics, SsdMetrics):
        service(registry)
    return registry


def test_every_metric_with_labels_is_there_before_the_first_event(registry: CollectorRegistry) -> None:
    missing = {family.name for family in registry.collect() if not family.samples}
    assert missing == SET_WITH_THE_FIRST_READ


def test_a_process_shows_no_times_of_birth() -> None:
    registry = CollectorRegistry()
    Counter("events", "Some.", registry=registry).inc()
    HealthServer(registry, lambda: None)
    assert b"events_total 1.0" in generate_latest(registry)
    assert b"_created" not in generate_latest(registry)
