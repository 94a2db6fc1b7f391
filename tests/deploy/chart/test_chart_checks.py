"""The checks of the chart find what they are there for: each breaks one thing in a golden file. Rendering needs tools that only
`make check-deploy` has; this does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from deploy.check_chart import (
    CHART,
    DATA,
    ChartError,
    Document,
    check_pod,
    check_references,
    check_settings,
    parse,
    pods_of,
    read_cases,
)
from moontide.config import read_yaml

CASE = "multi-node-4p4d-rdma"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    return dict(below) | {
        key: merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    case = next(case for case in read_cases(DATA / "matrix.yaml") if case.name == CASE)
    return merged(read_yaml(CHART / "values.yaml"), case.values)


@pytest.fixture(scope="module")
def golden() -> list[Document]:
    return [
        document
        for document in yaml.load_all((DATA / "golden" / f"{CASE}.yaml").read_text(), yaml.CSafeLoader)
        if document["kind"] != "PrometheusRule"
    ]


@pytest.fixture
def documents(golden: list[Document]) -> dict[tuple[str, str], Document]:
    return {(d["kind"], d["metadata"]["name"].removeprefix("moontide-")): d for d in copy.deepcopy(golden)}


def check(documents: Mapping[tuple[str, str], Document], values: Mapping[str, Any]) -> int:
    pods = [pod for document in documents.values() for pod in pods_of(document)]
    for pod in pods:
        check_pod(pod, values)
    check_references(list(documents.values()), pods, values)
    return check_settings(list(documents.values()), pods, values)


Documents = dict[tuple[str, str], Document]


def pod_spec(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents[kind, name]["spec"]["template"]["spec"]
    return spec


def worker(documents: Documents) -> dict[str, Any]:
    template = documents["LeaderWorkerSet", "prefill"]["spec"]["leaderWorkerTemplate"]
    container: dict[str, Any] = template["workerTemplate"]["spec"]["containers"][0]
    return container


def decode(documents: Documents) -> dict[str, Any]:
    container: dict[str, Any] = pod_spec(documents, "StatefulSet", "decode")["containers"][0]
    return container


def conductor(documents: Documents) -> dict[str, Any]:
    container: dict[str, Any] = pod_spec(documents, "Deployment", "conductor")["containers"][0]
    return container


def mount(container: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in container["volumeMounts"] if each["name"] == name)
    return found


def replace_argument(container: dict[str, Any], old: str, new: str) -> None:
    assert any(old in argument for argument in container["args"])
    container["args"] = [argument.replace(old, new) for argument in container["args"]]


BREAKAGES: dict[str, tuple[Callable[[Documents], object], str]] = {
    "root": (lambda d: pod_spec(d, "Deployment", "conductor")["securityContext"].update(runAsUser=0), "runs as root"),
    "root container": (lambda d: decode(d)["securityContext"].update(runAsUser=0), "runs as root"),
    "capability": (lambda d: decode(d)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "adds"),
    "writable": (lambda d: worker(d)["securityContext"].update(readOnlyRootFilesystem=False), "writable"),
    "no limits": (lambda d: worker(d)["resources"].pop("limits"), "no limits"),
    "no probe": (lambda d: decode(d).pop("livenessProbe"), "no probes"),
    "host network": (lambda d: pod_spec(d, "Deployment", "conductor").update(hostNetwork=True), "hostNetwork"),
    "latest": (lambda d: decode(d).update(image="moontide:latest"), "names no version"),
    "writable model": (lambda d: mount(conductor(d), "model").update(readOnly=False), "may write the model"),
    "token": (lambda d: pod_spec(d, "StatefulSet", "decode").pop("automountServiceAccountToken"), "mounts a token"),
    "selector": (lambda d: d["Service", "conductor"]["spec"]["selector"].update(a="b"), "selects no pod"),
    "port": (lambda d: d["Service", "conductor"]["spec"]["ports"][0].update(targetPort="web"), "no port 'web'"),
    "backend": (
        lambda d: d["HTTPRoute", "conductor"]["spec"]["rules"][0]["backendRefs"][0].update(name="x"),
        "does not exist",
    ),
    "method": (
        lambda d: d["GRPCRoute", "conductor"]["spec"]["rules"][0]["matches"][0]["method"].update(method="Make"),
        "no method",
    ),
    "scale target": (
        lambda d: d["ScaledObject", "decode"]["spec"]["scaleTargetRef"].update(kind="Deployment"),
        "does not exist",
    ),
    "host ports": (lambda d: decode(d)["ports"][1].update(containerPort=21601), "on one host"),
    "stages": (lambda d: replace_argument(worker(d), "$(LWS_WORKER_INDEX)", "1"), "has the stages"),
    "setting": (lambda d: replace_argument(decode(d), "node.grpc_port", "node.grpc_prt"), "did you mean"),
    "certificate as a file": (
        lambda d: mount(decode(d), "tls").update(subPath="tls.crt"),
        "mounted read-only as a whole",
    ),
    "no certificate": (lambda d: mount(worker(d), "tls").update(mountPath="/etc/tls"), "mounted read-only as a whole"),
    "plain probe": (lambda d: conductor(d)["readinessProbe"]["httpGet"].pop("scheme"), "does not speak HTTPS"),
    "place in a group": (
        lambda d: decode(d).update(args=[a for a in decode(d)["args"] if "control_address" not in a]),
        "decode-0 as prefill: .* no place in a prefill group",
    ),
    "port of the other role": (
        lambda d: replace_argument(decode(d), "link_port=21700", "link_port=21701"),
        "does not name the ports",
    ),
    "name": (
        lambda d: replace_argument(decode(d), "$(POD_NAME)-0", "store-$(HOST_ID)"),
        "another node is called store-host-1",
    ),
    "variable": (lambda d: replace_argument(decode(d), "$(POD_IP)", "$(POD_IPS)"), "does not have"),
    "environment": (
        lambda d: decode(d).update(env=[e for e in decode(d)["env"] if e["name"] != "MC_TCP_LANES_PER_PEER"]),
        "`moontide up` has 16",
    ),
    "grace": (
        lambda d: pod_spec(d, "StatefulSet", "decode").update(terminationGracePeriodSeconds=20),
        "killed while it drains",
    ),
}


def test_the_golden_file_passes(documents: Documents, values: dict[str, Any]) -> None:
    assert check(documents, values) == 7  # 4 stages, and one conductor, decode instance and store process as templates


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_chart_is_found(name: str, documents: Documents, values: dict[str, Any]) -> None:
    break_it, message = BREAKAGES[name]
    break_it(documents)
    with pytest.raises(ChartError, match=message):
        check(documents, values)


def test_a_key_that_stands_twice_is_found() -> None:
    with pytest.raises(ChartError, match="stands twice"):
        list(parse({"a.yaml": "kind: A\nspec: {x: 1, y: 2, x: 3}\n"}))
