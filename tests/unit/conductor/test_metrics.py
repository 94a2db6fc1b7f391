"""What clients send never becomes a label: a conductor shows as many series after any number of requests as before the first."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from front import MODEL, PROMPT_TEXT, open_front
from prometheus_client import CollectorRegistry

from conductor.metrics import ConductorMetrics
from moontide.errors import ERRORS_BY_CODE, RejectReason
from moontide.fair_share import PRIORITY_LABELS, Share

KEYS = {"acme": "key-a", "beta": "key-b"}
ROUNDS = 3


def label_sets(registry: CollectorRegistry) -> set[tuple[str, ...]]:
    """Name and labels of every series."""
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
        for family in registry.collect()
        for sample in family.samples
    }


async def test_no_request_adds_a_series(model_dir: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        json.dumps(
            {
                "tenants": [
                    {
                        "name": name,
                        "api_key_sha256": [hashlib.sha256(key.encode()).hexdigest()],
                        "max_active_requests": 4,
                    }
                    for name, key in KEYS.items()
                ]
            }
        )
    )
    async with open_front(model_dir, tenants_file=tenants) as front:
        before = label_sets(front.conductor.metrics.registry)
        async with httpx.AsyncClient(base_url=front.http_url, timeout=30.0) as http:
            for number in range(ROUNDS):
                for name in KEYS:
                    for request in requests_of(number, name):
                        await http.post("/v1/completions", **request)
        await front.settle()
        assert label_sets(front.conductor.metrics.registry) == before
        ended = {
            outcome: front.metric("conductor_requests_total", outcome=outcome)
            for outcome in ("stop", "length", *ERRORS_BY_CODE)
        }
        assert {outcome for outcome, count in ended.items() if count} >= {"stop", "length", "PromptTooLong"}


def requests_of(number: int, tenant: str) -> list[dict[str, Any]]:
    """As different as a client can make them."""
    key = {"Authorization": f"Bearer {KEYS[tenant]}"}
    body = {"model": MODEL, "prompt": PROMPT_TEXT, "max_tokens": 100, "temperature": 0}
    return [
        {"headers": key, "json": body},
        {"headers": key, "json": body | {"max_tokens": 1, "prompt": f"{number}"}},
        {"headers": key, "json": body | {"model": f"model-{number}"}},
        {"headers": key, "json": body | {"prompt": PROMPT_TEXT * 1000}},
        {"headers": key, "json": body | {"user": f"user-{number}"}},
        {"headers": key | {"X-Request-Id": f"id-{tenant}-{number}"}, "json": body},
        {"headers": key | {"Idempotency-Key": f"key-{number}"}, "json": body},
        {"headers": key | {"Idempotency-Key": f"key-{number}"}, "json": body | {"max_tokens": 2}},
        {"headers": key | {"X-Moontide-Priority": f"{-1 - number}"}, "json": body},
        {"headers": key | {"X-Moontide-Priority": f"{1 + number}"}, "json": body},
        {"headers": key | {"X-Moontide-TTFT-SLO": f"0.00{1 + number}"}, "json": body},
        {"headers": {"Authorization": f"Bearer wrong-{number}"}, "json": body},
        {"headers": {}, "json": body},
    ]


def test_every_reason_is_there_for_every_tenant() -> None:
    metrics = ConductorMetrics(CollectorRegistry())
    metrics.expect_tenants(["acme", "beta"])
    for tenant in ("acme", "beta"):
        for reason in RejectReason:
            labels = {"reason": reason.value, "tenant": tenant}
            assert metrics.registry.get_sample_value("conductor_rejected_total", labels) == 0
    before = label_sets(metrics.registry)
    metrics.expect_tenants(["acme"])
    assert label_sets(metrics.registry) == before


@pytest.mark.parametrize(("priority", "label"), [(100, "high"), (1, "high"), (0, "normal"), (-1, "low"), (-100, "low")])
def test_any_priority_has_one_of_three_labels(priority: int, label: str) -> None:
    assert Share(tenant="t", priority=priority).priority_label == label
    assert label in PRIORITY_LABELS
