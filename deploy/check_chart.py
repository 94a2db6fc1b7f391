"""`python -m deploy.check_chart`: is the Helm chart right, for every example and a matrix of switches?

    values --lint, render--> documents --schemas of Kubernetes and of the CRDs--> --policy, references, settings, golden files-->
No cluster is asked. Cases, schemas of custom kinds and golden files lie in tests/deploy/chart; `--update` writes the golden files anew.
What it needs beyond Moontide (a Helm library, the schemas of Kubernetes) is named when it is missing.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conductor.config import ConductorConfig
from decode_node.config import DecodeNodeConfig
from deploy.plan import service_env
from kvstore.config import KvStoreConfig
from moontide.config import TlsConfig, build, load_config, read_yaml, to_tree
from moontide.errors import ConfigError, RoleRefused
from moontide.roles import change_role
from moontide_proto.v1 import moontide_pb2
from prefill_node.config import PrefillNodeConfig

REPOSITORY = Path(__file__).parent.parent
CHART = REPOSITORY / "deploy/helm/moontide"
EXAMPLES = REPOSITORY / "deploy/helm/examples"
DATA = REPOSITORY / "tests/deploy/chart"
CONSTRAINTS = REPOSITORY / "constraints.txt"
RELEASE, NAMESPACE = "moontide", "llm"
TOOLS = {"helm_python": "helm-python-sdk", "kubernetes_validate": "kubernetes-validate", "jsonschema": "jsonschema"}
"""Module -> package that holds it."""
SERVICES: dict[str, type[Any]] = {
    "conductor": ConductorConfig,
    "prefill_node": PrefillNodeConfig,
    "decode_node": DecodeNodeConfig,
    "kvstore": KvStoreConfig,
}
HOST_NETWORK_COMPONENTS = ("prefill", "decode", "kvstore")
NO_CLUSTER_ROLES = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
PREFILL_DRAIN_S = 10.0
"""Of a stage, which has no setting for it."""
LINT_WARNING = 2
MAX_SECRET_BYTES = 1 << 20

Document = dict[str, Any]


class ChartError(Exception):
    """Something about the chart is wrong; the message says where."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    values: Mapping[str, Any]
    kubernetes: tuple[str, ...]
    is_golden: bool
    refused: str
    """Part of the error that must come; empty: it renders."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod template, wherever a document holds it."""

    where: str
    component: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    group_pod: int = 0
    """Place in a LeaderWorkerSet's group; 1 stands for every worker."""

    def name(self, place: int) -> str:
        """As its controller makes it: DOCUMENT-0, and the members of a group after its leader."""
        _, document, *kind = self.where.split()
        if self.group_pod:
            return f"{document}-0-{place}"
        return "-".join([document, *kind]) if kind and kind != ["leader"] else f"{document}-0"

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def lasting_containers(self) -> list[dict[str, Any]]:
        """Those that run as long as the pod does."""
        sidecars = [c for c in self.spec.get("initContainers", []) if c.get("restartPolicy") == "Always"]
        return [*sidecars, *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for c in self.containers for port in c.get("ports", [])}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the Helm chart without a cluster.")
    parser.add_argument("--update", action="store_true", help="write the golden files anew instead of comparing")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be repeated")
    args = parser.parse_args(argv)
    try:
        tools = {module: _tool(module) for module in TOOLS}
    except ChartError as error:
        print(f"error: {error}")
        return 2
    checker = Checker(tools, update=args.update)
    checks: dict[str, Callable[[], str]] = {
        case.name: functools.partial(checker.check, case) for case in read_cases(DATA / "matrix.yaml")
    }
    checks["package"] = checker.check_package
    if args.case:
        checks = {name: check for name, check in checks.items() if name in args.case}
    num_failed = 0
    for name, check in checks.items():
        try:
            print(f"ok      {name}: {check()}", flush=True)
        except ChartError as error:
            num_failed += 1
            print(f"FAILED  {name}: {error}", flush=True)
    print(f"chart: {len(checks) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed or not checks else 0


def read_cases(path: Path) -> list[Case]:
    matrix = read_yaml(path)
    return [
        Case(
            name=case["name"],
            values=_merged(read_yaml(EXAMPLES / case["example"]) if "example" in case else {}, case.get("values", {})),
            kubernetes=tuple(case.get("kubernetes", matrix["kubernetes"])),
            is_golden=case.get("golden", False),
            refused=case.get("refused", ""),
        )
        for case in matrix["cases"]
    ]


class Checker:
    """All checks of one case after the other; keeps what is slow to load."""

    def __init__(self, tools: Mapping[str, Any], *, update: bool) -> None:
        self._helm = tools["helm_python"]
        self._schemas = Schemas(tools["kubernetes_validate"], tools["jsonschema"])
        with _without_notes():
            self._chart = self._helm.Chart.load(str(CHART))
        self._update = update

    def check(self, case: Case) -> str:
        """What was done, in a few words. Raises: ChartError."""
        try:
            templates = self._chart.render(dict(case.values), name=RELEASE, namespace=NAMESPACE)
        except self._helm.HelmError as error:
            if case.refused and case.refused in str(error):
                return f"refused, as it should be ({case.refused!r})"
            raise ChartError(f"does not render: {error}") from error
        if case.refused:
            raise ChartError(f"renders, but should be refused with {case.refused!r}")
        self._lint(case)
        documents = list(parse(templates))
        for document in documents:
            self._schemas.check(document, case.kubernetes)
        values = self._chart.merge_values(dict(case.values))
        pods = [pod for document in documents for pod in pods_of(document)]
        for pod in pods:
            check_pod(pod, values)
        check_references(documents, pods, values)
        num_services = check_settings(documents, pods, values)
        if case.is_golden:
            self._compare(case, documents)
        return (
            f"{len(documents)} documents of {len({d['kind'] for d in documents})} kinds, {len(pods)} pods, "
            f"{num_services} service configs: lint, schemas {'/'.join(case.kubernetes)}, policy, references, settings"
            f"{', golden' if case.is_golden else ''}"
        )

    def check_package(self) -> str:
        """The archive holds what the links of the directory lead to, and Helm can keep a release of it. Raises: ChartError."""
        values = {"monitoring": {"enabled": True, "rules": True, "dashboards": True}}
        with tempfile.TemporaryDirectory() as directory:
            with _without_notes():
                archive = Path(self._helm.package(str(CHART), destination=directory))
            num_bytes = archive.stat().st_size
            with self._helm.Chart.load(str(archive)) as packed:
                rendered = packed.render(values, name=RELEASE, namespace=NAMESPACE)
        if rendered != self._chart.render(values, name=RELEASE, namespace=NAMESPACE):
            raise ChartError("the packed chart renders to something else than the directory")
        # A release is its chart, values and documents, packed and written in base64 into one Secret.
        kept = 4 * (num_bytes + len(gzip.compress("".join(rendered.values()).encode()))) // 3
        if kept > MAX_SECRET_BYTES:
            raise ChartError(f"a release takes {kept} bytes; a Secret holds {MAX_SECRET_BYTES}")
        return (
            f"{num_bytes} bytes, renders as the directory does; a release takes some {kept} of {MAX_SECRET_BYTES} bytes"
        )

    def _lint(self, case: Case) -> None:
        with _without_notes():
            report = self._helm.lint(str(CHART), dict(case.values), namespace=NAMESPACE, quiet=True)
        bad = [m["error"] for m in report["messages"] or [] if m["severity"] >= LINT_WARNING]
        if bad or report["errors"]:
            raise ChartError(f"lint: {'; '.join(map(str, bad or report['errors']))}")

    def _compare(self, case: Case, documents: Sequence[Document]) -> None:
        path = DATA / "golden" / f"{case.name}.yaml"
        text = "---\n".join(yaml.safe_dump(_shortened(d), sort_keys=False, width=140) for d in documents)
        if self._update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            raise ChartError(f"differs from {path.relative_to(REPOSITORY)}; look at it with --update and git diff")


class Schemas:
    """Those of Kubernetes out of a package, those of custom kinds out of DATA/crds."""

    def __init__(self, kubernetes_validate: Any, jsonschema: Any) -> None:
        self._kubernetes = kubernetes_validate
        # It reads megabytes of definitions anew for every document.
        utils: Any = importlib.import_module("kubernetes_validate.utils")
        utils.schema_contents = functools.cache(utils.schema_contents)
        self._custom: dict[tuple[str, str], Any] = {}
        for path in sorted((DATA / "crds").glob("*.json")):
            schema = json.loads(path.read_text())
            names = schema["properties"]
            self._custom[names["apiVersion"]["const"], names["kind"]["const"]] = jsonschema.Draft202012Validator(schema)
        self._passed: set[tuple[str, str]] = set()

    def check(self, document: Document, versions: Sequence[str]) -> None:
        """Raises: ChartError for a field that is unknown, missing or of the wrong type, and for a kind without a schema."""
        validator = self._custom.get((document["apiVersion"], document["kind"]))
        if validator is None:
            self._check_core(document, versions)
            return
        for error in validator.iter_errors(document):
            raise ChartError(f"{_title(document)}: {'.'.join(map(str, error.absolute_path))}: {error.message}")
        for pod in pods_of(document):
            as_pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod.where, "labels": dict(pod.labels), "annotations": dict(pod.annotations)},
                "spec": dict(pod.spec),
            }
            self._check_core(as_pod, versions)

    def _check_core(self, document: Document, versions: Sequence[str]) -> None:
        text = json.dumps(document, sort_keys=True)
        for version in versions:
            if (version, text) in self._passed:
                continue
            try:
                self._kubernetes.validate(document, version, strict=True)
            except self._kubernetes.ValidationError as error:
                path = ".".join(map(str, error.path))
                raise ChartError(f"{_title(document)} against Kubernetes {version}: {path}: {error.message}") from error
            except self._kubernetes.SchemaNotFoundError as error:
                raise ChartError(f"{_title(document)}: no schema of this kind; add it to {DATA / 'crds'}") from error
            self._passed.add((version, text))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {str(key) for key in keys if keys.count(key) > 1}:
            raise ChartError(f"{', '.join(sorted(twice))} stands twice in one mapping, {node.start_mark}")
        return super().construct_mapping(node, deep=deep)


def parse(templates: Mapping[str, str]) -> Iterator[Document]:
    """The documents of a rendering, in a fixed order."""
    for name, text in sorted(templates.items()):
        if name.endswith(".txt"):
            continue
        try:
            yield from (document for document in yaml.load_all(text, _StrictLoader) if document)
        except yaml.YAMLError as error:
            raise ChartError(f"{name} is no YAML: {error}") from error


def pods_of(document: Document) -> Iterator[Pod]:
    """Pod templates of a document, of whatever kind it is."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind == "Pod":
        yield _pod(document, {"metadata": document["metadata"], "spec": spec})
    elif kind in ("Deployment", "StatefulSet", "DaemonSet"):
        yield _pod(document, spec["template"])
    elif kind == "LeaderWorkerSet":
        template = spec["leaderWorkerTemplate"]
        yield _pod(document, template["leaderTemplate"], place="leader")
        yield _pod(document, template["workerTemplate"], place="worker", group_pod=1)
    elif kind == "RayCluster":
        yield _pod(document, spec["headGroupSpec"]["template"], place="head")
        for group in spec.get("workerGroupSpecs", []):
            yield _pod(document, group["template"], place=group["groupName"])


def _pod(document: Document, template: Mapping[str, Any], *, place: str = "", group_pod: int = 0) -> Pod:
    metadata = template["metadata"]
    labels = metadata.get("labels", {})
    return Pod(
        where=f"{_title(document)}{' ' + place if place else ''}",
        component=labels["app.kubernetes.io/component"],
        labels=labels,
        annotations=metadata.get("annotations", {}),
        spec=template["spec"],
        group_pod=group_pod,
    )


def check_pod(pod: Pod, values: Mapping[str, Any]) -> None:
    """No root, no privilege unless RDMA asks, limits, probes, nothing of the host but what values say. Raises: ChartError."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ChartError(f"policy: {pod.where}: {what}")

    spec = pod.spec
    security = spec.get("securityContext", {})
    need(bool(security.get("runAsNonRoot")) and security.get("runAsUser", 0) > 0, "runs as root")
    need(security.get("seccompProfile", {}).get("type") == "RuntimeDefault", "no seccomp profile")
    need(spec.get("automountServiceAccountToken") is False, "mounts a token of the API server")
    need(not (spec.get("hostPID") or spec.get("hostIPC")), "uses host processes or host IPC")
    wants_host = values["hostNetwork"] or values["kvstore"]["mode"] == "daemonset"
    may_host = pod.component in HOST_NETWORK_COMPONENTS and wants_host
    need(bool(spec.get("hostNetwork", False)) == may_host, f"hostNetwork is {spec.get('hostNetwork', False)}")
    for volume in spec.get("volumes", []):
        need("sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), f"volume {volume['name']} has no size limit")
        need("hostPath" not in volume or volume["name"] in ("model", "ssd"), f"host path {volume['name']}")
    for container in pod.containers:
        _check_container(container, values, functools.partial(_need_in, need, container["name"]))
    if pod.component != "test":
        for container in pod.lasting_containers:
            need({"livenessProbe", "readinessProbe"} <= container.keys(), f"{container['name']} has no probes")
            stop_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            need(spec["terminationGracePeriodSeconds"] > stop_s, "is killed before it was told to stop")


def _need_in(need: Callable[[bool, str], None], container: str, holds: bool, what: str) -> None:
    need(holds, f"{container}: {what}")


def _check_container(
    container: Mapping[str, Any], values: Mapping[str, Any], need: Callable[[bool, str], None]
) -> None:
    security = container.get("securityContext", {})
    locks_memory = container["name"] == "kvstore" and values["rdma"]["enabled"]
    need(security.get("allowPrivilegeEscalation") is False, "may gain privileges")
    need(security.get("readOnlyRootFilesystem") is True, "root file system is writable")
    need(not security.get("privileged"), "privileged")
    capabilities = security.get("capabilities", {})
    need(capabilities.get("drop") == ["ALL"], "keeps capabilities")
    need(capabilities.get("add", []) == (["IPC_LOCK"] if locks_memory else []), f"adds {capabilities.get('add')}")
    is_root = security.get("runAsUser", 1) == 0 or security.get("runAsNonRoot") is False
    need(not is_root or (locks_memory and values["rdma"]["rootForMemlock"]), "runs as root")
    resources = container.get("resources", {})
    for kind in ("requests", "limits"):
        need({"cpu", "memory"} <= resources.get(kind, {}).keys(), f"no {kind} of CPU and memory")
    image = container["image"].rpartition("/")[2]
    need(":" in image and not image.endswith(":latest"), f"image {container['image']} names no version")
    for mount in container.get("volumeMounts", []):
        need(mount["name"] != "model" or mount.get("readOnly") is True, "may write the model")


def check_references(documents: Sequence[Document], pods: Sequence[Pod], values: Mapping[str, Any]) -> None:
    """What one document says of another holds. Raises: ChartError."""
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    if len(names) != len(documents):
        raise ChartError("two documents have the same kind and name")
    for document in documents:
        title, spec = _title(document), document.get("spec", {})
        if document["kind"] in NO_CLUSTER_ROLES:
            raise ChartError(f"{title}: no process asks the API server for anything")
        if len(document["metadata"]["name"]) > 63:
            raise ChartError(f"{title}: the name is too long")
        if document["kind"] == "Service":
            chosen = _selected(title, spec["selector"], pods)
            for port in spec["ports"]:
                _need_port(title, port["targetPort"], chosen)
        if document["kind"] in ("PodDisruptionBudget", "PodMonitor", "NetworkPolicy"):
            key = "podSelector" if document["kind"] == "NetworkPolicy" else "selector"
            chosen = _selected(title, spec[key]["matchLabels"], pods, spec[key].get("matchExpressions", ()))
            named = [e["port"] for e in spec.get("podMetricsEndpoints", [])]
            named += [
                p["port"] for rule in spec.get("ingress", []) for p in rule.get("ports", []) if "endPort" not in p
            ]
            for name in named:
                _need_port(title, name, chosen)
        for target in (spec.get("scaleTargetRef"), *(_backends(spec))):
            if target and (target.get("kind", "Service"), target["name"]) not in names:
                raise ChartError(f"{title}: {target['name']} does not exist")
        if document["kind"] == "RayCluster" and f"ray=={spec['rayVersion']}\n" not in CONSTRAINTS.read_text():
            raise ChartError(f"{title}: Ray {spec['rayVersion']} is not what {CONSTRAINTS.name} installs")
        for rule in spec.get("rules", []) if document["kind"] == "GRPCRoute" else []:
            for match in rule["matches"]:
                _check_method(title, match["method"])
    for pod in pods:
        account = pod.spec.get("serviceAccountName")
        if account and ("ServiceAccount", account) not in names:
            raise ChartError(f"{pod.where}: service account {account} does not exist")
        config_maps = {v["configMap"]["name"] for v in pod.spec.get("volumes", []) if "configMap" in v}
        if missing := {name for name in config_maps if ("ConfigMap", name) not in names}:
            raise ChartError(f"{pod.where}: config map {missing} does not exist")
        volumes = {v["name"] for v in pod.spec.get("volumes", [])}
        mounted = {m["name"] for c in pod.containers for m in c.get("volumeMounts", [])}
        if volumes != mounted:
            raise ChartError(f"{pod.where}: volumes {sorted(volumes ^ mounted)} are mounted or defined, not both")
    _check_ports_of_hosts(pods, values)


def _backends(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Services that a route leads to."""
    return [
        backend for rule in spec.get("rules", []) if isinstance(rule, dict) for backend in rule.get("backendRefs", [])
    ]


def _check_method(title: str, method: Mapping[str, str]) -> None:
    package, _, service = method["service"].rpartition(".")
    if package == moontide_pb2.DESCRIPTOR.package:
        descriptor = moontide_pb2.DESCRIPTOR.services_by_name.get(service)
        if descriptor is None or method["method"] not in descriptor.methods_by_name:
            raise ChartError(f"{title}: no method {method['service']}/{method['method']}")


def _selected(
    title: str, labels: Mapping[str, str], pods: Sequence[Pod], expressions: Sequence[Mapping[str, Any]] = ()
) -> list[Pod]:
    chosen = [
        pod
        for pod in pods
        if labels.items() <= pod.labels.items() and all(pod.labels.get(e["key"]) in e["values"] for e in expressions)
    ]
    if not chosen:
        raise ChartError(f"{title}: selects no pod")
    return chosen


def _need_port(title: str, port: str | int, pods: Sequence[Pod]) -> None:
    if not any(port in pod.ports or port in pod.ports.values() for pod in pods):
        raise ChartError(f"{title}: no port {port!r} in the pods that it selects")


def _check_ports_of_hosts(pods: Sequence[Pod], values: Mapping[str, Any]) -> None:
    """Pods of different roles on one host's network must not want the same port."""
    data = values["kvstore"]["dataPorts"]
    owners: dict[int, str] = {}
    for pod in pods:
        for container in pod.containers if pod.spec.get("hostNetwork") else ():
            owner = "kvstore" if container["name"] == "kvstore" else pod.component
            for port in (p["containerPort"] for p in container.get("ports", [])):
                if owners.setdefault(port, owner) != owner or data["first"] <= port <= data["last"]:
                    raise ChartError(f"{pod.where}: port {port} is also of {owners[port]} or the engine's, on one host")


def check_settings(documents: Sequence[Document], pods: Sequence[Pod], values: Mapping[str, Any]) -> int:
    """Every service accepts its config, and the stages of each group are complete. Returns their number. Raises: ChartError."""
    files = next(d["data"] for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"].endswith("-config"))
    stages: dict[str, list[int]] = {}
    node_ids: set[str] = set()
    num_services = 0
    for pod in pods:
        num_pods = values["prefill"]["stages"] // values["prefill"]["stagesPerPod"] if pod.group_pod else 1
        for place in range(pod.group_pod, max(num_pods, 1)):
            services: list[tuple[Mapping[str, Any], Any]] = []
            for container in pod.lasting_containers:
                if (config := _service_config(pod, container, files, place)) is None:
                    continue
                num_services += 1
                if config.node.node_id in node_ids:
                    raise ChartError(
                        f"{pod.where}: {container['name']}: another node is called {config.node.node_id} too"
                    )
                node_ids.add(config.node.node_id)
                _check_tls(pod, container, config.tls, values)
                if isinstance(config, PrefillNodeConfig):
                    stages.setdefault(config.prefill.group_id, []).append(config.prefill.stage_idx)
                    _check_other_role(pod, container, config, "decode", values)
                if isinstance(config, DecodeNodeConfig):
                    _check_other_role(pod, container, config, "prefill", values)
                services.append((container, config))
            _check_grace(pod, services)
    for group, found in stages.items():
        if sorted(found) != list(range(values["prefill"]["stages"])):
            raise ChartError(f"prefill group {group} has the stages {sorted(found)}")
    return num_services


def _check_other_role(
    pod: Pod, container: Mapping[str, Any], config: Any, role: str, values: Mapping[str, Any]
) -> None:
    """A node that may change its role becomes something that its new program accepts, on ports that its container names."""
    where = f"{pod.where}: {container['name']} as {role}"
    running = "prefill" if role == "decode" else "decode"
    try:
        successor = change_role(running, to_tree(config), role)
        other = build(SERVICES[successor.module], successor.settings)
    except RoleRefused as error:
        if values["roles"]["switchable"]:
            raise ChartError(f"{where}: {error}") from error
        return
    except ConfigError as error:
        raise ChartError(f"{where}: {error}") from error
    if not values["roles"]["switchable"]:
        raise ChartError(f"{where}: roles.switchable is off")
    if isinstance(other, PrefillNodeConfig):
        wanted = {other.prefill.link_port, int(other.prefill.control_address.rpartition(":")[2])}
        if missing := wanted - {port["containerPort"] for port in container["ports"]}:
            raise ChartError(f"{where}: the container does not name the ports {sorted(missing)}")


def _check_tls(pod: Pod, container: Mapping[str, Any], tls: TlsConfig, values: Mapping[str, Any]) -> None:
    """Certificates lie in a directory that the container mounts, and probes speak what the port speaks."""
    where = f"{pod.where}: {container['name']}"
    if bool(tls.cert_file) != values["tls"]["enabled"]:
        raise ChartError(f"{where}: tls.cert_file={tls.cert_file!r} with tls.enabled={values['tls']['enabled']}")
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    for path in filter(None, (tls.cert_file, tls.key_file, tls.ca_file)):
        mount = mounts.get(str(Path(path).parent), {})
        if not mount.get("readOnly") or "subPath" in mount:
            raise ChartError(f"{where}: {path} is not in a directory that is mounted read-only as a whole")
    scheme = "HTTPS" if tls.cert_file and pod.component == "conductor" else "HTTP"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if container[probe]["httpGet"].get("scheme", "HTTP") != scheme:
            raise ChartError(f"{where}: {probe} does not speak {scheme}")


def _check_grace(pod: Pod, services: Sequence[tuple[Mapping[str, Any], Any]]) -> None:
    """A pod has the time for the longest drain of its containers, and then for that of a sidecar."""
    longest = {True: 0.0, False: 0.0}
    for container, config in services:
        stop_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        is_sidecar = container.get("restartPolicy") == "Always"
        longest[is_sidecar] = max(longest[is_sidecar], stop_s + _drain_s(config))
    if services and pod.spec["terminationGracePeriodSeconds"] <= sum(longest.values()):
        raise ChartError(f"{pod.where}: is killed while it drains")


def _drain_s(config: Any) -> float:
    if isinstance(config, ConductorConfig):
        return config.conductor.drain_s
    if isinstance(config, DecodeNodeConfig):
        return config.decode.drain_timeout_s
    return config.kvstore.drain_s if isinstance(config, KvStoreConfig) else PREFILL_DRAIN_S


def _service_config(pod: Pod, container: Mapping[str, Any], files: Mapping[str, str], place: int) -> Any:
    """The config that a container's service would have; None for a program of another project."""
    command = list(container.get("command", []))
    env = container_environment(pod, container, place)
    arguments = [expanded(argument, env) for argument in container.get("args", [])]
    if command[:2] == ["sh", "-c"]:
        command, arguments = _shell(command, arguments, env)
    if command[:2] != ["python", "-m"]:
        return None
    module = command[2]
    path = next(a.removeprefix("--config=") for a in arguments if a.startswith("--config="))
    overrides = [a.removeprefix("--set=") for a in arguments if a.startswith("--set=")]
    if strange := [a for a in arguments if not a.startswith(("--config=", "--set="))]:
        raise ChartError(f"{pod.where}: {container['name']}: arguments {strange}")
    for name, value in _engine_environment(env).items():
        if env.get(name) != value:
            raise ChartError(f"{pod.where}: {container['name']}: {name}={env.get(name)}, `moontide up` has {value}")
    try:
        return load_config(SERVICES[module], base=yaml.safe_load(files[Path(path).name]), overrides=overrides)
    except (ConfigError, TypeError, KeyError) as error:
        raise ChartError(f"{pod.where}: {container['name']}: {error}") from error


def _engine_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What the launcher of a local cluster gives a service; with RDMA without what forces TCP."""
    wanted = service_env(int(env["OMP_NUM_THREADS"]))
    if "MC_FORCE_TCP" not in env:
        del wanted["MC_FORCE_TCP"]
    return wanted


def container_environment(pod: Pod, container: Mapping[str, Any], place: int) -> dict[str, str]:
    """Of a container, with examples for what only a cluster knows."""
    known = {"metadata.name": pod.name(place), "status.podIP": "10.1.2.3", "spec.nodeName": "host-1.example"}
    env = {"LWS_WORKER_INDEX": str(place), "LWS_LEADER_ADDRESS": "moontide-prefill-0.moontide-prefill.llm"}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            value = known.get(path, "0")
        elif "secretKeyRef" in source:
            value = "redis://:secret@redis:6379/0" if variable["name"] == "REGISTRY_URL" else "secret"
        else:
            value = expanded(variable["value"], env)
        env[variable["name"]] = value
    return env


def expanded(text: str, env: Mapping[str, str]) -> str:
    """As Kubernetes does it. Raises: ChartError for a variable that is not there, which Kubernetes would leave as it is."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in env:
            raise ChartError(f"{text!r} names a variable that the container does not have")
        return env[match[1]]

    return re.sub(r"\$\((\w+)\)", value, text)


def _shell(command: Sequence[str], arguments: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The one form of shell command that the chart has: exec PROGRAM "$@" and a sum."""
    script = re.sub(
        r"\$\(\((\w+) \* (\d+) \+ (\d+)\)\)", lambda m: str(int(env[m[1]]) * int(m[2]) + int(m[3])), command[2]
    )
    words = script.split()
    at = words.index('"$@"')
    if words[0] != "exec" or "$" in script.replace('"$@"', ""):
        raise ChartError(f"shell command of another form: {command[2]}")
    return words[1:at], [*arguments, *words[at + 1 :]]


def _shortened(document: Document) -> Document:
    """Without what other files of the repository say: dashboards and rules."""
    if "-dashboard-" in document["metadata"]["name"]:
        return document | {"data": dict.fromkeys(document["data"], "as deploy/grafana has it")}
    if document["kind"] == "PrometheusRule":
        return document | {"spec": {"groups": "as deploy/prometheus has them"}}
    return document


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _title(document: Document) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


@contextmanager
def _without_notes() -> Iterator[None]:
    """Helm notes every symbolic link on stderr, past Python; what is wrong it raises."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _tool(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        packages = " ".join(TOOLS.values())
        raise ChartError(f"{TOOLS[module]} is not installed; run pip install -c constraints.txt {packages}") from error


if __name__ == "__main__":
    sys.exit(main())
