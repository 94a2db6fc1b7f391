"""Settings of a whole cluster on one machine: those of every service, and how many of each there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conductor.config import ConductorSettings
from decode_node.config import DecodeConfig
from kvstore.access import KvConfig
from kvstore.config import KvStoreSettings
from model_runner.config import ModelConfig
from moontide.config import RegistryConfig, TlsConfig, check_port, load_config, read_yaml
from moontide.errors import ConfigError
from prefill_node.config import PrefillConfig

LAUNCHERS = ("ray", "process")
AUTO = "auto"
CLOSE_S = 15.0
"""What a process may need after its drain."""

DECIDED: dict[str, dict[str, Any]] = {
    "registry": {"url": "redis://127.0.0.1:1/0"},
    "prefill": {"group_id": AUTO, "stage_idx": 0, "num_stages": 1, "control_address": "127.0.0.1:1", "link_port": 0},
    "conductor": {"model_dir": AUTO},
    "kvstore": {"master_rpc": "127.0.0.1:1", "master_http": "127.0.0.1:1", "client_port": 0},
}
"""Settings that differ from process to process: the plan fills them in, so nobody sets them for a whole cluster."""
DEFAULTS: dict[str, dict[str, Any]] = {"conductor": {"served_model_name": AUTO}}
"""Settings that a single service must be given and a cluster can find out: the model's own name."""


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """Section `deploy`: how many processes of each kind, where they listen, who starts them."""

    launcher: str = "ray"
    """ray: nodes are actors that Ray places and restarts; process: plain child processes."""
    stages: int = 2
    """Pipeline stages of one prefill group; each is a process with a part of the model's layers."""
    prefill_groups: int = 1
    """Prefill groups; each takes prompts on its own."""
    decode: int = 1
    """Decode instances."""
    hosts: int = 1
    """Store processes, each with a segment of its own; groups and decode instances are dealt out to them in turn as if each were a host."""
    conductors: int = 1
    """Conductors; clients may talk to any of them."""
    http_port: int = 8000
    """OpenAI API of the first conductor; each further one listens two ports up. 0 takes free ones."""
    grpc_port: int = 8001
    """gRPC API of the first conductor; each further one listens two ports up. 0 takes free ones."""
    run_dir: str = ""
    """Directory for configs and logs, kept afterwards; empty: a fresh one under /tmp, removed after a clean stop."""
    object_lease_s: float = 5.0
    """How long an object that was read in the store resists removal (the Mooncake master's lease)."""
    ready_timeout_s: float = 180.0
    """A cluster that is not ready after so long is stopped with an error."""

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ConfigError(f"deploy.launcher={self.launcher!r} is unknown; choose one of {', '.join(LAUNCHERS)}")
        for name in ("stages", "prefill_groups", "decode", "hosts", "conductors"):
            if getattr(self, name) < 1:
                raise ConfigError(f"deploy.{name}={getattr(self, name)} must be at least 1")
        for name in ("http_port", "grpc_port"):
            port = getattr(self, name)
            check_port(f"deploy.{name}", port)
            if port:
                check_port(f"deploy.{name} of conductor {self.conductors - 1}", port + 2 * (self.conductors - 1))
        if (
            self.http_port
            and self.grpc_port
            and abs(self.http_port - self.grpc_port) in range(0, 2 * self.conductors, 2)
        ):
            raise ConfigError(
                f"deploy.http_port={self.http_port} and deploy.grpc_port={self.grpc_port} meet when {self.conductors} "
                f"conductor(s) take every second port; choose ports an odd number apart, for example {self.http_port} "
                f"and {self.http_port + 1}"
            )
        for name in ("object_lease_s", "ready_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"deploy.{name}={getattr(self, name)} must be above 0 seconds")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Every setting that `moontide up` takes."""

    deploy: DeployConfig = field(default_factory=DeployConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    registry: RegistryConfig
    tls: TlsConfig = field(default_factory=TlsConfig)
    kvstore: KvStoreSettings
    prefill: PrefillConfig
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    conductor: ConductorSettings

    def __post_init__(self) -> None:
        if self.tls.cert_file and not self.tls.ca_file:
            raise ConfigError(
                "tls.cert_file is set without tls.ca_file, so the services would not speak TLS to each other; set tls.ca_file to the "
                "authority of the certificate, or to the certificate itself if it is self-signed"
            )
        if self.tls.ca_file and not self.tls.cert_file:
            raise ConfigError(
                "tls.ca_file is set without tls.cert_file and tls.key_file; the services need a certificate"
            )
        if self.conductor.indexer_port is not None:
            check_port("conductor.indexer_port", self.conductor.indexer_port)

    @property
    def stop_timeout_s(self) -> float:
        """Time that processes of one kind get to end after a stop before they are killed: longer than any of them drains."""
        return max(self.conductor.drain_s, self.decode.drain_timeout_s, self.kvstore.drain_s) + CLOSE_S


def load_cluster_config(*, path: Path | None = None, overrides: Sequence[str] = ()) -> ClusterConfig:
    """From a YAML file and `a.b=c` overrides, later ones win.

    Raises: ConfigError, also for a setting that only the plan decides.
    """
    for override in overrides:
        _refuse_decided(override.partition("=")[0], f"--set {override}")
    if path is not None:
        for section, values in read_yaml(path).items():
            for name in values if isinstance(values, Mapping) else ():
                _refuse_decided(f"{section}.{name}", str(path))
    base = {
        section: DECIDED.get(section, {}) | DEFAULTS.get(section, {}) for section in sorted(DECIDED.keys() | DEFAULTS)
    }
    return load_config(ClusterConfig, path=path, overrides=overrides, base=base)


def settable_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The config tree without what the plan decides: what a `--config` file may hold."""
    return {
        section: {name: value for name, value in values.items() if name not in DECIDED.get(section, {})}
        for section, values in tree.items()
    }


def _refuse_decided(dotted: str, source: str) -> None:
    section, _, name = dotted.partition(".")
    if name in DECIDED.get(section, {}):
        raise ConfigError(
            f"{source}: {dotted} differs from process to process and is decided by the launcher; "
            "choose the shape with --stages, --prefill-groups, --decode, --conductors"
        )
