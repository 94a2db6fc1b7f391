"""Real clusters for tests: the processes of deploy/local.py on free ports, with a handle to kill and stop each of them.

    with running_cluster(stages=2, settings=["prefill.chunk_tokens=256"]) as cluster:
        ...cluster.grpc_address..., cluster.kill("prefill-0-stage-1")

Processes are named prefill-G-stage-P, decode-N, conductor-C, kvstore-0, mooncake-master, valkey. They start again by themselves when they
die. Nothing is left after the `with`, and a failing test shows the end of every log.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.config import load_cluster_config
from deploy.local import LocalCluster, ask_ready, connect_http
from deploy.plan import ProcessSpec
from model_runner.model_source import resolve_model
from moontide.config import free_port

START_TIMEOUT_S = 120.0
WAIT_TIMEOUT_S = 60.0
POLL_S = 0.05


class RunningCluster:
    """Handle of a cluster whose services were all ready."""

    def __init__(self, cluster: LocalCluster, model_dir: Path) -> None:
        self._cluster = cluster
        self.model_dir = model_dir

    @property
    def grpc_address(self) -> str:
        """host:port of the first conductor's gRPC API."""
        return self._cluster.grpc_address

    @property
    def http_address(self) -> str:
        """host:port of the first conductor's OpenAI API."""
        return self._cluster.http_address

    @property
    def registry_url(self) -> str:
        return self._cluster.plan.registry_url

    @property
    def store_address(self) -> str:
        """host:port of the store's gRPC service."""
        return self._cluster.plan.store_address

    @property
    def scrape_targets(self) -> Path:
        """A file of targets for Prometheus: every process with metrics."""
        return self._cluster.targets_path

    @property
    def master_http_address(self) -> str:
        """host:port of the Mooncake master's HTTP server."""
        return self._cluster.plan.spec("mooncake-master").listens_on[1]

    @property
    def data_client_address(self) -> str:
        """host:port of the process that owns the segment; what attaches there shares its memory."""
        address: str = self._cluster.plan.spec("decode-0").config["store"]["client_address"]
        return address

    @property
    def conductor_addresses(self) -> list[str]:
        """host:port of every conductor's gRPC API."""
        return [conductor.grpc for conductor in self._cluster.plan.conductors]

    def names(self) -> list[str]:
        return self._cluster.names()

    def pid(self, name: str) -> int | None:
        return self._cluster.pid(name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal, SIGKILL unless told otherwise; returns the process id it went to."""
        pid = self.pid(name)
        assert pid is not None, f"{name} is not running"
        self._cluster.send_signal(name, number)
        return pid

    def exits(self, name: str) -> list[int]:
        """Exit codes of its lives that are over."""
        return self._cluster.exits(name)

    def spec(self, name: str) -> ProcessSpec:
        return self._cluster.plan.spec(name)

    def reconfigure(self, name: str, **sections: Mapping[str, Any]) -> None:
        """Settings that it starts with next time, beside those that it has."""
        self._cluster.reconfigure(_with_settings(self.spec(name), sections))

    def add(self, name: str, *, like: str, **sections: Mapping[str, Any]) -> None:
        """Start one more process, with a name and ports of its own and other settings as told; wait for it as for the others."""
        old = self.spec(like)
        http_port, node = free_port(), {"node_id": name}
        node |= {"http_port": http_port, "grpc_port": 0, **sections.pop("node", {})}
        spec = replace(old, name=name, group=name, http_address=f"127.0.0.1:{http_port}")
        self._cluster.add(_with_settings(spec, {**sections, "node": node}))

    def remove(self, *names: str, timeout_s: float) -> None:
        """Have them drain and end for good. Raises: TimeoutError when they have to be killed."""
        self._cluster.remove(names, timeout_s=timeout_s)

    def stop(self, name: str) -> None:
        """Freeze a process; `cont` lets it go on."""
        self.kill(name, signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self.kill(name, signal.SIGCONT)

    def service_address(self, name: str) -> str:
        """host:port of a service's /metrics, /live and /ready."""
        return self._cluster.plan.spec(name).http_address

    def metrics(self, name: str) -> dict[str, float]:
        """The samples of a service's /metrics: `name{labels}` -> value."""
        spec = self._cluster.plan.spec(name)
        connection = connect_http(spec.http_address, with_tls=spec.serves_https, timeout_s=5.0)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {key: float(value) for key, _, value in samples}

    def is_ready(self, name: str) -> bool:
        spec = self._cluster.plan.spec(name)
        return ask_ready(spec.http_address, with_tls=spec.serves_https)[0]

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Until another process of that name runs and is ready."""
        wait_for(
            lambda: self.pid(name) not in (None, old_pid) and self.is_ready(name),
            f"{name} runs again after {old_pid}",
            timeout_s,
        )

    def wait_ready(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Until every service says it is ready."""
        services = [spec.name for spec in self._cluster.plan.processes if spec.http_address]
        wait_for(lambda: all(self.is_ready(name) for name in services), "every service is ready", timeout_s)

    def log(self, name: str) -> str:
        path = self._cluster.log_path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def print_logs(self) -> None:
        for name in self.names():
            print(self._cluster.tail(name, 40), file=sys.stderr)


def _with_settings(spec: ProcessSpec, sections: Mapping[str, Mapping[str, Any]]) -> ProcessSpec:
    changed = {name: {**spec.config[name], **values} for name, values in sections.items()}
    return replace(spec, config={**spec.config, **changed})


@contextmanager
def running_cluster(
    *,
    model: str | Path = "smollm2",
    dtype: str = "float32",
    stages: int = 2,
    prefill_groups: int = 1,
    decode: int = 1,
    conductors: int = 1,
    settings: Sequence[str] = (),
    launcher: str = "process",
) -> Iterator[RunningCluster]:
    """A cluster that is ready. `settings`: more of the `a.b=c` that `moontide up --set` takes."""
    config = load_cluster_config(
        overrides=[
            f"model.name={model}",
            f"model.dtype={dtype}",
            f"deploy.launcher={launcher}",
            f"deploy.stages={stages}",
            f"deploy.prefill_groups={prefill_groups}",
            f"deploy.decode={decode}",
            f"deploy.conductors={conductors}",
            "deploy.http_port=0",
            "deploy.grpc_port=0",
            f"deploy.ready_timeout_s={START_TIMEOUT_S}",
            "conductor.drain_s=1",
            "decode.drain_timeout_s=1",
            "kvstore.drain_s=1",
            *settings,
        ]
    )
    source = resolve_model(str(model), load_format=config.model.load_format)
    cluster = LocalCluster(config, model_dir=source.path, model_id=source.model_id)
    running = RunningCluster(cluster, source.path)
    try:
        cluster.start()
        cluster.wait_ready()
        yield running
    except BaseException:
        running.print_logs()
        raise
    finally:
        cluster.stop()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Poll `condition`; AssertionError naming `what` when it does not come true in time."""
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not true after {timeout_s:.0f} s: {what}"
        time.sleep(POLL_S)
