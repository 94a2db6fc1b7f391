"""Every query of panels, recording rules and alerts, of a cluster under load; and the series of that cluster: all there from the start.

One cluster with everything switched on (two conductors, hosts and decode instances, an SSD tier, tenants) and one Prometheus with scaled
rules; MOONTIDE_LIVE_SECONDS of mixed load (120 unless it says otherwise).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.paced_models import write_paced_model
from deploy.grafana.queries import load_dashboards, panel_queries
from tests.cluster import RunningCluster, running_cluster
from tests.deploy.live.load import FrontDoor, MixedLoad, in_background, wait_requests
from tests.deploy.live.prometheus import Prometheus, Sample, running_prometheus, scaled_rules
from tests.deploy.live.promql import Verdict, verdict_on

SECONDS = float(os.environ.get("MOONTIDE_LIVE_SECONDS", "120"))
MORE = 3
"""So many times the requests after which series are counted first are sent until they are counted again."""
KEYS = {"acme": "key-acme", "batch": "key-batch", "small": "key-small"}
TENANTS = [
    {"name": "acme", "priority": 10, "weight": 2},
    {"name": "batch", "max_queued_s": 0.5},
    {"name": "small", "max_active_requests": 1},
]
SCRAPED = {"job", "__name__"}
"""Labels that say nothing about a series here."""
GOLDEN = sorted((Path(__file__).resolve().parents[1] / "chart" / "golden").glob("*.yaml"))
NAMESPACE = re.compile(r',?namespace="[^"]*"')
"""No cluster of one machine has it."""
OF_OTHERS = ("mooncake-master",)
"""Instances whose metrics are not ours."""


@dataclass(frozen=True, kw_only=True)
class Live:
    cluster: RunningCluster
    prometheus: Prometheus
    load: MixedLoad
    rules: Path
    at_start: frozenset[tuple[str, ...]]
    """Every series before the first request."""
    after_some: frozenset[tuple[str, ...]]
    at_end: frozenset[tuple[str, ...]]
    num_some: int
    """Requests that were sent before `after_some`."""
    num_all: int
    end_s: float
    """A moment under load."""

    def ask(self, expr: str) -> Sequence[Sample]:
        return self.prometheus.query(expr, time_s=self.end_s)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("queries")
    tenants = folder / "tenants.yaml"
    tenants.write_text(
        yaml.safe_dump({"tenants": [tenant | {"api_key_sha256": [digest(tenant)]} for tenant in TENANTS]})
    )
    model = write_paced_model(
        folder, max_context=16_384, head_dim=16, overhead_s=2e-3, token_s=2e-4, pair_s=1e-9, decode_step_s=0.01
    )
    settings = [
        *model.settings_for(2),
        "deploy.hosts=2",
        "kv.block_tokens=64",
        "prefill.num_pages=128",
        "prefill.chunk_tokens=512",
        "decode.num_pages=192",
        "decode.local_prefill_tokens=256",
        f"kvstore.pool_bytes={16 << 20}",
        f"kvstore.ssd_dir={folder / 'ssd'}",
        f"kvstore.ssd_bytes={256 << 20}",
        f"conductor.tenants_file={tenants}",
        "conductor.release_queue_s=0.5",
        "registry.heartbeat_s=0.2",
        "registry.lease_s=2",
    ]
    rules = scaled_rules(folder, "--ttft-slo-s", "0.5")
    with (
        running_cluster(model=model.directory, decode=2, conductors=2, prefill_groups=2, settings=settings) as cluster,
        running_prometheus(cluster, folder, rules=rules) as prometheus,
    ):
        prometheus.wait_scrapes(2)
        at_start = series(prometheus)
        door = FrontDoor(urls=conductors(cluster), model=served_model(cluster), keys=KEYS)
        load = MixedLoad(door)
        with in_background(load):
            started_s = time.monotonic()
            time.sleep(SECONDS / MORE)
            num_some = load.num_requests
            prometheus.wait_scrapes(2)
            after_some = series(prometheus)
            time.sleep(max(0.0, started_s + SECONDS - time.monotonic()))
            wait_requests(load, MORE * num_some, timeout_s=SECONDS + 60)
            prometheus.wait_scrapes(2)
            end_s = time.time()
            at_end = series(prometheus)
            num_all = load.num_requests
        yield Live(
            cluster=cluster,
            prometheus=prometheus,
            load=load,
            rules=rules,
            at_start=at_start,
            after_some=after_some,
            at_end=at_end,
            num_some=num_some,
            num_all=num_all,
            end_s=end_s,
        )


def test_the_load_was_mixed(live: Live) -> None:
    """Otherwise the others would say little."""
    by_kind = {}
    for (kind, status), number in sorted(live.load.answers.items()):
        by_kind.setdefault(kind, {})[status] = number
    print(f"{live.num_all} requests: {by_kind}")
    print("\n".join(f"  {kind} {status}: {text}" for (kind, status), text in sorted(live.load.errors.items())))
    statuses = Counter(status for _, status in live.load.answers)
    assert {200, 0, 400, 401, 404, 409, 429} <= set(statuses), by_kind


def test_every_query_of_every_panel(live: Live) -> None:
    queries = {
        f"{name} | {query.panel} | {query.expr}": query.expr
        for name, dashboard in load_dashboards().items()
        for query in panel_queries(name, dashboard)
    }
    check("panels", queries, live)


def test_every_choice_of_every_variable(live: Live) -> None:
    """An SLO's bound that is chosen on a board is the border of a bucket; processes can be chosen by name."""
    queries = {}
    for name, dashboard in load_dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"])[0]
                queries[f"{name} | {variable['query']}"] = (
                    metric if label == "namespace" else f'count({metric}{{{label}!=""}})'
                )
            elif variable["type"] == "custom":
                for value in variable["query"].split(","):
                    for query in panel_queries(name, dashboard, {variable["name"]: value}):
                        if f"${variable['name']}" in query.template:
                            queries[f"{name} | {query.panel} | {query.expr}"] = query.expr
    assert len(queries) > 10
    check("choices of variables", queries, live)


def test_every_recording_rule(live: Live) -> None:
    check(
        "recording rules",
        {f"{rule['record']} {rule.get('labels', '')}": rule["expr"] for rule in rules(live, "record")},
        live,
    )


def test_every_recorded_series(live: Live) -> None:
    check("recorded series", {rule["record"]: rule["record"] for rule in rules(live, "record")}, live)


def test_every_alert(live: Live) -> None:
    check("alerts", {rule["alert"]: rule["expr"] for rule in rules(live, "alert")}, live)


def test_every_query_of_the_charts_scaled_objects(live: Live) -> None:
    documents = [document for path in GOLDEN for document in yaml.safe_load_all(path.read_text()) if document]
    triggers = [
        trigger
        for document in documents
        if document["kind"] == "ScaledObject"
        for trigger in document["spec"]["triggers"]
    ]
    queries = {trigger["metadata"]["query"] for trigger in triggers if trigger["type"] == "prometheus"}
    assert len(queries) >= 2
    check("scaled objects", {query: NAMESPACE.sub("", query).replace("{}", "") for query in queries}, live)


def test_prometheus_evaluates_every_rule(live: Live) -> None:
    evaluated = live.prometheus.rules()
    assert len(evaluated) == len(rules(live, "record")) + len(rules(live, "alert"))
    wrong = [
        f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}" for rule in evaluated if rule["health"] != "ok"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_series_is_there_before_the_first_request(live: Live) -> None:
    new = sorted(ours(live.at_end) - ours(live.at_start))
    print(f"{len(ours(live.at_start))} series at the start, {len(new)} new ones after {live.num_all} requests")
    assert not new, "\n".join(map(" ".join, new))


def test_no_request_adds_a_series(live: Live) -> None:
    print(f"{len(live.after_some)} series after {live.num_some} requests, {len(live.at_end)} after {live.num_all}")
    assert live.num_all >= MORE * live.num_some > 0
    grown = sorted(live.at_end - live.after_some)
    assert not grown, "\n".join(map(" ".join, grown))


def test_promtool_accepts_what_every_service_shows(live: Live) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not installed: apt-get install prometheus"
    wrong = []
    for name in live.cluster.names():
        if address := live.cluster.service_address(name):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
                text = answer.read()
            checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
            wrong += [f"{name}: {line}" for line in (checked.stdout + checked.stderr).decode().splitlines()]
    assert not wrong, "\n".join(wrong)


def check(what: str, queries: Mapping[str, str], live: Live) -> None:
    """One verdict for each query; a list of what is wrong."""
    verdicts = {name: verdict_on(expr, live.ask, over_s=int(SECONDS)) for name, expr in queries.items()}
    kinds = Counter(verdict.kind for verdict in verdicts.values())
    print(
        f"{what}: {len(verdicts)} queries, {kinds['data']} with data, {kinds['zero']} provably zero, {kinds['wrong']} wrong"
    )
    print(listed(verdicts, "zero"))
    assert not kinds["wrong"], "\n" + listed(verdicts, "wrong")


def listed(verdicts: Mapping[str, Verdict], kind: str) -> str:
    return "\n".join(f"  {verdict.why}: {name}" for name, verdict in verdicts.items() if verdict.kind == kind)


def rules(live: Live, kind: str) -> list[dict[str, Any]]:
    """Recording rules (`record`) or alerts (`alert`) as this Prometheus has them."""
    tree = yaml.safe_load(live.rules.read_text())
    return [rule for group in tree["groups"] for rule in group["rules"] if kind in rule]


def series(prometheus: Prometheus) -> frozenset[tuple[str, ...]]:
    """Name and labels of every series that the last scrapes brought."""
    return frozenset(
        (sample.labels["__name__"], *(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in SCRAPED))
        for sample in prometheus.query('{job="moontide",__name__!~"ALERTS.*"}')
    )


def ours(found: frozenset[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    return frozenset(line for line in found if not {f"instance={name}" for name in OF_OTHERS} & set(line))


def conductors(cluster: RunningCluster) -> list[str]:
    """http://host:port of each conductor."""
    return [f"http://{cluster.service_address(name)}" for name in cluster.names() if name.startswith("conductor-")]


def served_model(cluster: RunningCluster) -> str:
    request = urllib.request.Request(
        f"http://{cluster.http_address}/v1/models", headers={"Authorization": f"Bearer {KEYS['acme']}"}
    )
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def digest(tenant: Mapping[str, Any]) -> str:
    return hashlib.sha256(KEYS[tenant["name"]].encode()).hexdigest()
