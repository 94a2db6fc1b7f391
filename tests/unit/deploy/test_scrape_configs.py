"""The examples of scrape configs against what they are to scrape."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

PROMETHEUS = Path("deploy/prometheus")
GOLDEN = sorted(Path("tests/deploy/chart/golden").glob("*.yaml"))
COMPONENTS = {"conductor", "prefill", "decode", "kvstore", "master"}


def pod_templates(tree: Any) -> Iterator[dict[str, Any]]:
    """Every template of a pod, however deep."""
    if isinstance(tree, list):
        for item in tree:
            yield from pod_templates(item)
    elif isinstance(tree, dict):
        if "containers" in tree.get("spec", {}) and "metadata" in tree:
            yield tree
        for value in tree.values():
            yield from pod_templates(value)


def relabelled(config: dict[str, Any], source: dict[str, str]) -> dict[str, str] | None:
    """The labels of a target after the steps of a scrape config; None: it is not scraped."""
    labels = dict(source)
    for step in config["relabel_configs"]:
        value = ";".join(labels.get(name, "") for name in step["source_labels"])
        matches = re.fullmatch(step.get("regex", "(.*)"), value) is not None
        match step.get("action", "replace"):
            case "keep" if not matches:
                return None
            case "drop" if matches:
                return None
            case "replace" if matches:
                labels[step["target_label"]] = step.get("replacement", value)
    return labels


def scraped(documents: list[Any], config: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(component of the pod, name of the port) -> label `component`."""
    found = {}
    for template in pod_templates(documents):
        role = template["metadata"].get("labels", {}).get("app.kubernetes.io/component", "")
        containers = [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]
        for port in (port for container in containers for port in container.get("ports", [])):
            labels = relabelled(
                config,
                {
                    "__meta_kubernetes_pod_container_port_name": port["name"],
                    "__meta_kubernetes_pod_label_app_kubernetes_io_component": role,
                },
            )
            if labels is not None:
                found[role, port["name"]] = labels["component"]
    return found


def monitored(documents: list[Any]) -> dict[tuple[str, str], str]:
    """The same, as the chart's monitors have it."""
    found = {}
    for document in documents:
        if document and document["kind"] in ("PodMonitor", "ServiceMonitor"):
            spec = document["spec"]
            role = spec["selector"]["matchLabels"]["app.kubernetes.io/component"]
            for endpoint in spec.get("podMetricsEndpoints") or spec["endpoints"]:
                component = next(r["replacement"] for r in endpoint["relabelings"] if r["targetLabel"] == "component")
                found[role, endpoint["port"]] = component
    return found


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_example_for_kubernetes_scrapes_what_the_charts_monitors_do(path: Path) -> None:
    (config,) = yaml.safe_load((PROMETHEUS / "kubernetes.yaml").read_text())["scrape_configs"]
    documents = list(yaml.safe_load_all(path.read_text()))
    found = scraped(documents, config)
    assert set(found.values()) <= COMPONENTS
    assert {"conductor", "prefill", "decode", "kvstore", "master"} <= set(found.values())
    if monitors := monitored(documents):
        assert found == monitors


def test_prometheus_takes_the_example_for_hosts() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    checked = subprocess.run(
        ["promtool", "check", "config", PROMETHEUS / "prometheus.yaml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_example_of_targets_has_every_component() -> None:
    groups = yaml.safe_load((PROMETHEUS / "targets/example.yaml").read_text())
    assert {group["labels"]["component"] for group in groups} == COMPONENTS
