"""Runs the instructions of the Dockerfile in sandboxes, and looks at what they leave."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.docker import dockerfile, lock
from deploy.docker.dockerfile import Stage
from deploy.docker.reading import HERE, ROOT
from deploy.docker.report import Coverage, Report
from deploy.docker.requirements import requirements
from deploy.docker.sandbox import Container, Sandbox, bootstrap, build_environment, wheel_folders

PREFIX = "/opt/moontide"
SITE = f"{PREFIX}/lib/python3.11/site-packages"
_LOAD_COMPILED = """
import ctypes
from kvstore import hash_chain
from model_runner.native import build
from moontide.native_build import build_library
ctypes.CDLL(str(build_library(hash_chain.SOURCE)))
ctypes.CDLL(str(build.build_library()))
"""
_NEEDED_BY_OLD_PYTHON = {"async-timeout"}
"""By redis before Python 3.11.3: Debian has 3.11.2, the base image a later one."""
_MIB = 1 << 20


def new_sandbox(root: Path, debian: Path | None) -> Sandbox:
    """An empty image: the base and what the engine brings."""
    root.mkdir()
    if debian is not None:
        bootstrap(debian)
    sandbox = Sandbox(root=root, env={}, debian=debian)
    sandbox.prepare()
    return sandbox


class Build:
    """`args`: those before the first FROM and those of --build-arg."""

    def __init__(self, report: Report, coverage: Coverage, args: Mapping[str, str]) -> None:
        self._report = report
        self._coverage = coverage
        self._args = args

    def image(self, sandbox: Sandbox, building: Sandbox, stages: Mapping[str, Stage], target: str) -> bool:
        """Run the build stage of `target` in `building`, its other stages in `sandbox`. Returns whether all went well."""
        (builder,) = dockerfile.copied_from(stages, target)
        for wheels in wheel_folders():
            building.mount(wheels, str(wheels), read_only=True)
        if not self._run(building, dockerfile.lineage(stages, builder), {}):
            return False
        if not self._run(sandbox, dockerfile.lineage(stages, target), {builder: building}):
            return False
        if sandbox.debian is None:
            sandbox.hide_compilers()
        return True

    def _run(self, sandbox: Sandbox, chain: Sequence[Stage], built: Mapping[str, Sandbox]) -> bool:
        """All instructions of the stages. `built`: sandboxes that COPY --from takes from. Returns whether all went well."""
        env: dict[str, str] = {"PATH": sandbox.python_path, **build_environment()}
        cwd = "/"
        for stage in chain:
            for position, instruction in enumerate(stage.instructions):
                match instruction.word:
                    case "ENV":
                        env = dockerfile.environment([Stage("", "", (instruction,))], env)
                    case "ARG":
                        name, _equals, default = instruction.text.partition("=")
                        env[name] = self._args.get(name, default)
                    case "WORKDIR":
                        cwd = instruction.text
                        sandbox.make(cwd, mode=0o1777 if cwd == "/tmp" else 0o755)
                    case "COPY":
                        _copy(sandbox, instruction.text, built)
                    case "RUN":
                        if "apt-get" in instruction.text and sandbox.debian is None:
                            continue
                        done = sandbox.run_as_root(instruction.text, cwd, env)
                        problem = "" if done.returncode == 0 else f"{done.stdout[-500:]}{done.stderr[-1500:]}"
                        if not self._report.check(f"{stage.name}: RUN {instruction.text[:90]}", problem):
                            return False
                    case _:
                        continue
                self._coverage.exercised(stage, position)
        return True


def _copy(sandbox: Sandbox, text: str, built: Mapping[str, Sandbox]) -> None:
    *sources, target = text.split()
    if sources[0].startswith("--from="):
        stage = sources.pop(0).removeprefix("--from=")
        for source in sources:
            inside = sandbox.root / target.lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            (built[stage].root / source.lstrip("/")).rename(inside)
        return
    files = sorted(dockerfile.context_files(ROOT, (ROOT / ".dockerignore").read_text()))
    for source in sources:
        for file in files if source == "." else [source]:
            to = sandbox.root / target.strip("/") / (file if source == "." else Path(file).name)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to)


def check_installed(report: Report, sandbox: Sandbox, target: str) -> None:
    """What `target` installed is what the files pin, is listed in the image, and holds no build tools."""
    site = sandbox.root / SITE.lstrip("/")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions(path=[str(site)])}
    installed = {lock.package_name(name): version.partition("+")[0] for name, version in found.items()}
    files = [ROOT / "constraints.txt", HERE / "lock.txt"]
    pinned = lock.pins(*files) | (lock.pins(HERE / "constraints-cuda.txt") if target == "cuda" else {})
    other = [f"{n} {v}" for n, v in sorted(installed.items()) if n != "moontide" and pinned.get(n, v) != v]
    report.check("image: installed versions are the pinned ones", ", ".join(other))
    free = sorted(installed.keys() - pinned.keys() - {"moontide"} - _NEEDED_BY_OLD_PYTHON)
    if target == "cpu":
        report.check("image: nothing is installed that no file pins", ", ".join(free))
    listing = (sandbox.root / PREFIX.lstrip("/") / "share/moontide/packages.txt").read_text()
    unlisted = sorted(installed.keys() - {lock.package_name(line.partition(" @ ")[0]) for line in listing.splitlines()})
    report.check("image: packages.txt lists what is installed", ", ".join(unlisted))
    report.check("image: pip is gone", "installed" if "pip" in installed else "")
    libraries = [*site.glob("kvstore/hash_chain-*.so"), *site.glob("model_runner/native/kernels-*.so")]
    report.check("image: has our compiled code", "" if len(libraries) == 2 else f"{libraries}")
    report.note("size", _sizes(sandbox))


def _sizes(sandbox: Sandbox) -> str:
    site = sandbox.root / SITE.lstrip("/")
    parts = sorted(((_size(path), path.name) for path in site.iterdir() if path.is_dir()), reverse=True)[:5]
    named = ", ".join(f"{name} {size / _MIB:.0f}" for size, name in parts)
    text = f"{PREFIX} is {_size(sandbox.root / PREFIX.lstrip('/')) / _MIB:.0f} MiB ({named})"
    if sandbox.debian is None:
        return f"{text}; Debian packages and the base image come on top"
    system = sum(_size(sandbox.root / name) for name in ("usr", "var", "etc")) / _MIB
    base = sum(_size(sandbox.debian / name) for name in ("usr", "var", "etc")) / _MIB
    return f"{text}; apt-get adds {system - base:.0f} MiB to the base image"


def _size(path: Path) -> int:
    """Bytes on disk."""
    printed = subprocess.run(["du", "-s", "-B1", "-x", str(path)], capture_output=True, text=True, check=True).stdout
    return int(printed.split()[0])


def borrow_environment(report: Report, sandbox: Sandbox) -> None:
    """Let the environment of this program stand for the installed one, at the same place."""
    installed = lock.closure(requirements(ROOT / "pyproject.toml", lock.EXTRAS["cpu"]))
    pinned = lock.pins(ROOT / "constraints.txt", HERE / "lock.txt")
    wanted = {lock.package_name(text) for text in requirements(ROOT / "pyproject.toml", lock.EXTRAS["cpu"])}
    other = [f"{name} {installed[name]}" for name in sorted(wanted) if installed[name] != pinned.get(name)]
    report.check("environment: versions of what we require are the pinned ones", ", ".join(other))
    report.check("lock.txt: names all that they need", ", ".join(sorted(installed.keys() - pinned.keys())))
    sandbox.mount(Path(sys.prefix), PREFIX, read_only=True)
    sandbox.mount(ROOT, str(ROOT), read_only=True)
    sandbox.mount(Path(sys.prefix), sys.prefix, read_only=True)
    sandbox.make("/var/cache/moontide")


def check_compiled(report: Report, sandbox: Sandbox) -> None:
    done = sandbox.run(["python", "-c", _LOAD_COMPILED], Container(tmpfs=("/tmp",)), timeout_s=60)
    report.check("image: our compiled code loads", done.stderr[-500:] if done.returncode else "")
