"""Nothing of ours reads the Kubernetes API: discovery is Redis. Hence no token, no role, no client, and nothing to emulate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.check_chart import CHART, DATA, NO_CLUSTER_ROLES, REPOSITORY, Document, pods_of

PACKAGES = ("moontide", "kvstore", "model_runner", "prefill_node", "decode_node", "conductor")
MARKS = ("kubernetes.client", "import kubernetes", "secrets/kubernetes.io", "KUBERNETES_SERVICE", "kubernetes.default")
GOLDEN = sorted((DATA / "golden").glob("*.yaml"))


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (REPOSITORY / package).rglob("*.py")
    yield from (CHART / "files/scripts").glob("*.py")


def documents(path: Path) -> list[Document]:
    return [document for document in yaml.load_all(path.read_text(), yaml.CSafeLoader) if document]


def test_no_service_knows_of_the_api() -> None:
    found = [(path.name, mark) for path in sources() for mark in MARKS if mark in path.read_text()]
    assert found == []


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_pod_gets_a_token_and_no_account_a_role(path: Path) -> None:
    for document in documents(path):
        assert document["kind"] not in NO_CLUSTER_ROLES
        if document["kind"] == "ServiceAccount":
            assert document["automountServiceAccountToken"] is False
        if document["kind"] == "RayCluster":
            assert not document["spec"].get("enableInTreeAutoscaling"), "Ray's autoscaler asks the API"
        for pod in pods_of(document):
            assert pod.spec["automountServiceAccountToken"] is False
            projected = [
                source
                for volume in pod.spec.get("volumes", [])
                for source in volume.get("projected", {}).get("sources", [])
            ]
            assert not any("serviceAccountToken" in source for source in projected)
