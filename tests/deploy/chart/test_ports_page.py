"""The table of docs/ports.md is what the chart renders: ports, their names, and whom NetworkPolicies let in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from deploy.check_chart import CHART, DATA, REPOSITORY, Document, pods_of
from moontide.config import read_yaml

COMPONENT = "app.kubernetes.io/component"
CASES = ("defaults", "ray", "tls-certificate")
"""Golden files that together have every port: the defaults, Ray's, the indexer's."""


@dataclass(frozen=True)
class Row:
    pod: str
    name: str
    port: str
    value: str
    opened_for: frozenset[str]
    policy: str


def rows() -> list[Row]:
    section = (REPOSITORY / "docs/ports.md").read_text().partition("## On Kubernetes\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"
    ]
    return [
        Row(pod, name.removesuffix("-i"), port, value, frozenset(peers.split(", ")), policy)
        for pod, name, port, value, peers, policy, _ in cells[2:]
    ]


def documents(case: str) -> list[Document]:
    text = (DATA / "golden" / f"{case}.yaml").read_text()
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def rendered_ports() -> set[tuple[str, str, int]]:
    """(component, name without its number, port of the first container)."""
    found: dict[tuple[str, str], int] = {}
    for document in (each for case in CASES for each in documents(case)):
        for pod in pods_of(document):
            for name, port in pod.ports.items():
                key = ("kvstore" if name.startswith("store-") else pod.component, re.sub(r"-\d+$", "", name))
                found[key] = min(found.get(key, port), port)
    return {(*key, port) for key, port in found.items()}


def opened(documents: list[Document]) -> Iterator[tuple[str, str | int, str]]:
    """(policy, port, peer) of all ingress rules that name ports."""
    for document in documents:
        policy = document["metadata"]["name"].removeprefix("moontide-")
        for rule in document["spec"].get("ingress", []) if document["kind"] == "NetworkPolicy" else []:
            for port in rule.get("ports", []):
                for peer in rule["from"]:
                    yield policy, port["port"], peer_name(peer)


def peer_name(peer: dict[str, Any]) -> str:
    if "ipBlock" in peer:
        return "hosts"
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if COMPONENT in labels:
        return str(labels[COMPONENT])
    return "indexer clients" if labels else "monitoring" if "namespaceSelector" in peer else "clients"


def test_every_port_of_a_container_stands_in_the_table() -> None:
    assert {(row.pod, row.name, int(row.port)) for row in rows() if row.name != "-"} == rendered_ports()


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.pod}-{row.name}")
def test_the_value_of_the_chart_says_the_port(row: Row) -> None:
    value: Any = read_yaml(CHART / "values.yaml")
    for key in row.value.split("."):
        value = value[key]
    assert row.port == (f"{value['first']}-{value['last']}" if isinstance(value, dict) else str(value))


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.pod}-{row.name}")
def test_the_table_says_whom_the_policies_let_in(row: Row) -> None:
    if row.value.startswith("ray."):
        policy = next(
            d for d in documents("ray") if d["kind"] == "NetworkPolicy" and d["metadata"]["name"].endswith(row.policy)
        )
        rule = next(rule for rule in policy["spec"]["ingress"] if "ports" not in rule)
        assert {peer_name(peer) for peer in rule["from"]} == row.opened_for
        return
    case = "tls-certificate" if row.name == "indexer" else "defaults"
    first = int(row.port.partition("-")[0])
    names = {row.name, f"{row.name}-0", first} if row.policy != "valkey" else {row.name}
    found = [
        (policy, peer)
        for policy, port, peer in opened(documents(case))
        if port in names and policy.startswith(owners(row))
    ]
    assert {peer for _, peer in found} == (row.opened_for - {"nobody"})
    assert {policy for policy, _ in found} == ({row.policy} - {"none"})


def owners(row: Row) -> str:
    """Policy that selects the pods of a row."""
    return "stores" if row.pod == "kvstore" else row.pod
