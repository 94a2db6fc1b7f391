"""ClusterConfig -> the list of processes that make a cluster on one machine (pure).

valkey          registry, KV events        mooncake-master   where objects are
kvstore         the host's KV segment      prefill-G-stage-P, decode-N, conductor-C: the nodes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.config import AUTO, ClusterConfig
from kvstore.data_client import ENGINE_SETTINGS
from moontide.config import to_tree

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Binaries:
    """Programs of other projects that a cluster needs."""

    valkey_server: Path
    mooncake_master: Path


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process: a program with arguments, or one of our services with a config."""

    name: str
    role: str
    """valkey | mooncake-master | kvstore | prefill | decode | conductor"""
    argv: tuple[str, ...] = ()
    """Command line; empty for a service."""
    module: str = ""
    """`python -m` name of a service."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The service's settings, as its config file holds them."""
    env: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    """Processes of one group are placed together and work only together."""
    listens_on: tuple[str, ...] = ()
    """host:port of everything that takes connections once it runs, for a program of another project."""
    http_address: str = ""
    """host:port of /metrics, /live and /ready; empty when it is no service of ours."""

    @property
    def component(self) -> str:
        """Its role as charts, rules and dashboards call it."""
        return "master" if self.role == "mooncake-master" else self.role

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics; empty when it has none."""
        return self.listens_on[1] if self.component == "master" else self.http_address

    @property
    def serves_https(self) -> bool:
        """Whether `http_address` speaks TLS: that of a conductor is its API."""
        return self.role == "conductor" and bool(self.config["tls"]["cert_file"])

    @property
    def is_node(self) -> bool:
        """Whether Ray may place and supervise it."""
        return self.role in ("prefill", "decode", "conductor")


@dataclass(frozen=True, kw_only=True)
class ConductorAddress:
    http: str
    grpc: str


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    processes: tuple[ProcessSpec, ...]
    """In the order of start; stopping goes the other way."""
    conductors: tuple[ConductorAddress, ...]
    registry_url: str
    store_addresses: tuple[str, ...]
    """host:port of the gRPC service of each host's store process."""

    @property
    def store_address(self) -> str:
        """Of the first host."""
        return self.store_addresses[0]

    def spec(self, name: str) -> ProcessSpec:
        return next(spec for spec in self.processes if spec.name == name)

    @property
    def nodes(self) -> list[ProcessSpec]:
        return [spec for spec in self.processes if spec.is_node]

    @property
    def infrastructure(self) -> list[ProcessSpec]:
        return [spec for spec in self.processes if not spec.is_node]


def plan_cluster(
    config: ClusterConfig,
    *,
    model_dir: Path,
    model_id: str,
    run_dir: Path,
    binaries: Binaries,
    free_port: Callable[[], int],
) -> ClusterPlan:
    """Decide names, ports and settings of every process.

    `free_port` is asked once for each port that the user did not fix; the answers must differ.
    """
    deploy = config.deploy
    shared = _SharedAddresses(
        valkey_port=free_port(),
        master_rpc_port=free_port(),
        master_http_port=free_port(),
    )
    hosts = [
        _Host(host_id=f"host-{idx}" if deploy.hosts > 1 else "", client_port=free_port(), store_grpc_port=free_port())
        for idx in range(deploy.hosts)
    ]
    env = service_env(config.model.threads)
    processes: list[ProcessSpec] = [
        _valkey(shared, binaries, run_dir),
        _mooncake_master(config, shared, binaries),
        *(_kvstore(config, idx, shared, host, env, free_port) for idx, host in enumerate(hosts)),
    ]
    for idx in range(deploy.prefill_groups):
        processes += _prefill_group(config, idx, shared, hosts[idx % len(hosts)], env, free_port)
    processes += [_decode(config, idx, shared, hosts[idx % len(hosts)], env, free_port) for idx in range(deploy.decode)]
    conductors = []
    for idx in range(deploy.conductors):
        address = ConductorAddress(
            http=f"{HOST}:{_numbered_port(deploy.http_port, idx) or free_port()}",
            grpc=f"{HOST}:{_numbered_port(deploy.grpc_port, idx) or free_port()}",
        )
        conductors.append(address)
        processes.append(_conductor(config, address, idx, shared, env, model_dir, model_id))
    return ClusterPlan(
        processes=tuple(processes),
        conductors=tuple(conductors),
        registry_url=shared.registry_url,
        store_addresses=tuple(host.store_address for host in hosts),
    )


def fixed_ports(config: ClusterConfig) -> Iterator[tuple[str, int]]:
    """(option, port) of every port that the user chose."""
    for idx in range(config.deploy.conductors):
        for option, first in (("--http-port", config.deploy.http_port), ("--grpc-port", config.deploy.grpc_port)):
            if port := _numbered_port(first, idx):
                yield option, port
    if config.conductor.indexer_port:
        yield "conductor.indexer_port", config.conductor.indexer_port


def service_env(threads: int) -> dict[str, str]:
    """Environment of our services.

    Two busy processes with two threads each on two cores are far slower than with one: the thread count is always stated.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOG_minloglevel": "1",
        "MC_FORCE_TCP": "1",
        **ENGINE_SETTINGS,
    }


@dataclass(frozen=True, kw_only=True)
class _SharedAddresses:
    valkey_port: int
    master_rpc_port: int
    master_http_port: int

    @property
    def registry_url(self) -> str:
        return f"redis://{HOST}:{self.valkey_port}/0"

    @property
    def master_rpc(self) -> str:
        return f"{HOST}:{self.master_rpc_port}"

    @property
    def master_http(self) -> str:
        return f"{HOST}:{self.master_http_port}"


@dataclass(frozen=True, kw_only=True)
class _Host:
    host_id: str
    """Empty: the host's own name, for there is no other."""
    client_port: int
    store_grpc_port: int

    @property
    def store_address(self) -> str:
        return f"{HOST}:{self.store_grpc_port}"

    def node(self, name: str, http_port: int, *, grpc_port: int = 0) -> dict[str, Any]:
        """Section `node` of a process on this host."""
        return _node(name, grpc_port, http_port) | ({"host_id": self.host_id} if self.host_id else {})


def _numbered_port(first: int, idx: int) -> int:
    """Conductors after the first listen two ports up each; 0 stays 0 (a free one)."""
    return first + 2 * idx if first else 0


def _valkey(shared: _SharedAddresses, binaries: Binaries, run_dir: Path) -> ProcessSpec:
    return ProcessSpec(
        name="valkey",
        role="valkey",
        argv=(
            str(binaries.valkey_server), "--bind", HOST, "--port", str(shared.valkey_port),
            "--save", "", "--appendonly", "no", "--dir", str(run_dir), "--daemonize", "no",
        ),
        listens_on=(f"{HOST}:{shared.valkey_port}",),
    )  # fmt: skip


def _mooncake_master(config: ClusterConfig, shared: _SharedAddresses, binaries: Binaries) -> ProcessSpec:
    return ProcessSpec(
        name="mooncake-master",
        role="mooncake-master",
        argv=(
            str(binaries.mooncake_master),
            f"--rpc_address={HOST}",
            f"--rpc_port={shared.master_rpc_port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={shared.master_http_port}",
            f"--default_kv_lease_ttl={int(config.deploy.object_lease_s * 1000)}",
            "--enable_http_metadata_server=false",
        ),
        env={"GLOG_minloglevel": "1", "GLOG_logtostderr": "1"},
        listens_on=(shared.master_rpc, shared.master_http),
    )


def _kvstore(
    config: ClusterConfig,
    idx: int,
    shared: _SharedAddresses,
    host: _Host,
    env: Mapping[str, str],
    free_port: Callable[[], int],
) -> ProcessSpec:
    http_port = free_port()
    name = f"kvstore-{idx}"
    settings = to_tree(config.kvstore) | {
        "master_rpc": shared.master_rpc,
        "master_http": shared.master_http,
        "client_port": host.client_port,
    }
    if config.kvstore.ssd_dir:
        # One directory belongs to one store process; nodes that Ray starts run elsewhere.
        settings["ssd_dir"] = str(Path(config.kvstore.ssd_dir).absolute() / name)
    return _service(
        name=name,
        role="kvstore",
        config={
            "node": host.node(name, http_port, grpc_port=host.store_grpc_port),
            "registry": _registry(config, shared),
            "tls": _tls(config),
            "kvstore": settings,
        },
        env=env,
        http_port=http_port,
    )


def _prefill_group(
    config: ClusterConfig,
    group_idx: int,
    shared: _SharedAddresses,
    host: _Host,
    env: Mapping[str, str],
    free_port: Callable[[], int],
) -> list[ProcessSpec]:
    group_id = f"prefill-{group_idx}"
    control_address = f"{HOST}:{free_port()}"
    stages = []
    for stage_idx in range(config.deploy.stages):
        name = f"{group_id}-stage-{stage_idx}"
        http_port = free_port()
        section = to_tree(config.prefill) | {
            "group_id": group_id,
            "stage_idx": stage_idx,
            "num_stages": config.deploy.stages,
            "control_address": control_address,
        }
        stages.append(
            _service(
                name=name,
                role="prefill",
                config=_compute_sections(config, shared, host, host.node(name, http_port))
                | {"prefill": section, "decode": to_tree(config.decode)},
                env=env,
                http_port=http_port,
                group=group_id,
            )
        )
    return stages


def _decode(
    config: ClusterConfig,
    idx: int,
    shared: _SharedAddresses,
    host: _Host,
    env: Mapping[str, str],
    free_port: Callable[[], int],
) -> ProcessSpec:
    name = f"decode-{idx}"
    http_port = free_port()
    own_place = {"group_id": name, "stage_idx": 0, "num_stages": 1, "control_address": f"{HOST}:{free_port()}"}
    return _service(
        name=name,
        role="decode",
        config=_compute_sections(config, shared, host, host.node(name, http_port))
        | {"decode": to_tree(config.decode), "prefill": to_tree(config.prefill) | own_place},
        env=env,
        http_port=http_port,
    )


def _conductor(
    config: ClusterConfig,
    address: ConductorAddress,
    idx: int,
    shared: _SharedAddresses,
    env: Mapping[str, str],
    model_dir: Path,
    model_id: str,
) -> ProcessSpec:
    name = f"conductor-{idx}"
    http_port, grpc_port = (int(a.rpartition(":")[2]) for a in (address.http, address.grpc))
    settings = to_tree(config.conductor) | {"model_dir": str(model_dir)}
    if config.conductor.served_model_name == AUTO:
        settings["served_model_name"] = model_id
    if idx:  # addresses that only one process can have, of which one tells as much as all
        settings |= {"kv_event_endpoint": "", "indexer_port": None}
    return _service(
        name=name,
        role="conductor",
        config={
            "node": _node(name, grpc_port, http_port),
            "registry": _registry(config, shared),
            "tls": _tls(config),
            "conductor": settings,
        },
        env=env,
        http_port=http_port,
    )


def _service(
    *,
    name: str,
    role: str,
    config: Mapping[str, Any],
    env: Mapping[str, str],
    http_port: int,
    group: str = "",
) -> ProcessSpec:
    module = {"prefill": "prefill_node", "decode": "decode_node"}.get(role, role)
    return ProcessSpec(
        name=name,
        role=role,
        argv=(sys.executable, "-m", module),
        module=module,
        config=config,
        env=env,
        group=group or name,
        http_address=f"{HOST}:{http_port}",
    )


def _node(name: str, grpc_port: int, http_port: int) -> dict[str, Any]:
    return {"node_id": name, "host": HOST, "grpc_port": grpc_port, "http_port": http_port}


def _registry(config: ClusterConfig, shared: _SharedAddresses) -> dict[str, Any]:
    return to_tree(config.registry) | {"url": shared.registry_url}


def _tls(config: ClusterConfig) -> dict[str, Any]:
    """With absolute paths: nodes that Ray starts run elsewhere."""
    return {
        name: str(Path(value).absolute()) if name.endswith("_file") and value else value
        for name, value in to_tree(config.tls).items()
    }


def _compute_sections(
    config: ClusterConfig, shared: _SharedAddresses, host: _Host, node: dict[str, Any]
) -> dict[str, Any]:
    return {
        "node": node,
        "registry": _registry(config, shared),
        "tls": _tls(config),
        "model": to_tree(config.model),
        "kv": to_tree(config.kv),
        "store": {
            "master_rpc": shared.master_rpc,
            "master_http": shared.master_http,
            "client_address": f"{HOST}:{host.client_port}",
            "service_address": host.store_address,
        },
    }
