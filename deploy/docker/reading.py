"""Checks of Dockerfile, compose files, pins and Debian packages that start nothing."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.docker import compose, dockerfile, lint, lock
from deploy.docker.dockerfile import Instruction, Stage
from deploy.docker.report import Report
from deploy.docker.requirements import requirements
from deploy.docker.services import unknown_keys
from kvstore.data_client import ENGINE_SETTINGS, binary_path

ROOT = lock.ROOT
HERE = ROOT / "deploy" / "docker"
SCHEMA = ROOT / "tests" / "deploy" / "docker" / "compose-spec.json"
BUILD_TOOLS = {"cpu": frozenset[str](), "cuda": frozenset({"g++"})}
"""Target -> build tools that its image may hold: Triton compiles with g++."""
_PACKAGES_OF_BASE = {"libc6", "libgcc-s1", "libstdc++6", "zlib1g"}
"""Of every Debian image with Python."""


def check_dockerfile(report: Report, head: list[Instruction], stages: Mapping[str, Stage]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for rule, problems in lint.rules(lint.global_args(head), stages, BUILD_TOOLS, version=version):
        report.check(f"Dockerfile: {rule}", "; ".join(problems))
    for target in BUILD_TOOLS:
        chain = dockerfile.lineage(stages, target)
        env = dockerfile.environment(chain, {})
        volumes = [v for stage in chain for text in stage.all("VOLUME") for v in json.loads(text)]
        outside = [
            name
            for name, value in env.items()
            if name.endswith(("CACHE", "CACHE_DIR", "HOME")) and not value.startswith((*volumes, "/tmp"))
        ]
        report.check(f"{target}: state goes to volumes and /tmp", ", ".join(outside))
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
    scripts = [f"deploy/docker/{name}.py" for name in ("native", "requirements")]
    needed = [*sources, *scripts, *(f"{package}/__init__.py" for package in packages), "LICENSE", "README.md"]
    report.check("context: holds what is copied and built", ", ".join(sorted(set(needed) - files)))
    stray = [f for f in files if "/__pycache__/" in f or f.startswith(("tests/", ".git/", ".venv/"))]
    report.check("context: holds nothing else", ", ".join(stray[:5]))


def check_pins(report: Report) -> None:
    pinned = lock.pins(ROOT / "constraints.txt")
    locked = lock.pins(HERE / "lock.txt")
    for target, extras in lock.EXTRAS.items():
        own = lock.pins(HERE / "constraints-cuda.txt") if target == "cuda" else {}
        wanted = {lock.package_name(text) for text in requirements(ROOT / "pyproject.toml", extras)}
        report.check(f"{target}: every requirement is pinned", ", ".join(sorted(wanted - (pinned | own).keys())))
    twice = sorted(locked.keys() & pinned.keys())
    report.check("lock.txt names nothing that constraints.txt pins", ", ".join(twice))


def check_compose(report: Report, tree: Mapping[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text())
    raw = compose.load(HERE / "compose.cuda.yaml")
    for name, document in (("compose.yaml", tree), ("compose.cuda.yaml", raw)):
        errors = importlib.import_module("jsonschema").Draft7Validator(schema).iter_errors(document)
        text = "; ".join(f"{'.'.join(map(str, error.path))}: {error.message[:100]}" for error in errors)
        report.check(f"{name}: is what the schema of the compose specification allows", text)
    services = tree["services"]
    report.check("compose: every key is exercised or listed", ", ".join(unknown_keys(services)))
    for name, service in services.items():
        report.check(f"compose: {name} is confined", ", ".join(compose.confinement_problems(service)))
    cuda = compose.load(HERE / "compose.yaml", HERE / "compose.cuda.yaml", env={"DEVICE": "cuda"})["services"]
    problems = compose.gpu_problems(services, raw["services"], compose.settings(cuda, HERE))
    report.check("compose.cuda.yaml: a GPU for each service that computes", "; ".join(problems))


def check_wiring(report: Report, tree: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> None:
    problems = compose.wiring_problems(tree["services"], tree["networks"], settings)
    report.check("compose: ports, addresses, health checks and order of start fit the settings", "; ".join(problems))


def check_system_packages(report: Report, stages: Mapping[str, Stage]) -> None:
    """Each library that Mooncake's programs take from the system belongs to a listed package or to one that it needs."""
    if shutil.which("apt-cache") is None:
        report.note("not", "Debian packages: this machine is no Debian")
        return
    listed = [package for text in stages["base"].all("RUN") for package in lint.apt_packages(text)]
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


def check_index(report: Report) -> None:
    """Ask the index for what only the CUDA image takes, and for torch; the index of torch's CUDA builds, another one, is not asked."""
    wanted = lock.pins(HERE / "constraints-cuda.txt") | {"torch": lock.pins(ROOT / "constraints.txt")["torch"]}
    for name, version in sorted(wanted.items()):
        command = [sys.executable, "-m", "pip", "index", "versions", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            problem = done.stderr.strip()[-300:]
        else:
            versions = re.findall(r"[^\s,]+", done.stdout.partition("Available versions:")[2].partition("\n")[0])
            problem = "" if version in versions else f"the newest are {', '.join(versions[:5])}"
        report.check(f"index: has {name} {version}", problem)
