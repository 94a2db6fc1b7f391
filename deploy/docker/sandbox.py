"""A root directory such as a container has: a Debian of its own, or put together from this machine's files by bind mounts.

Without a Debian, /usr and its like are this machine's and read-only, /etc is a copy, everything else is empty unless it is mounted. A
program in it runs as an unprivileged user without capabilities. Needs root and `unshare`.

Mounts exist only in the namespace of `run_inside`'s child. The directory is made and removed by its parent, which never sees them: whoever
removed it where they are would remove what they show.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from moontide.config import child_environment

UID = 10001
_CLONE_NEWNET = 0x40000000
INSIDE = "--inside"
"""Option that tells the child where its directory is."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
_ETC = (
    "alternatives", "group", "gshadow", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "login.defs", "nsswitch.conf", "passwd",
    "pip.conf", "resolv.conf", "shadow", "ssl",
)  # fmt: skip
_ETC_OF_NETWORK = ("hosts", "pip.conf", "resolv.conf", "ssl/certs/ca-certificates.crt")
_BUILD_PROGRAMS = ("c++", "cc", "clang", "cmake", "g++", "gcc", "make")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def is_inside(argv: Sequence[str]) -> bool:
    """Raises: RuntimeError when somebody else than `run_inside` says so: mounts would go where all programs see them."""
    if INSIDE not in argv:
        return False
    ours, parents = (os.readlink(f"/proc/{pid}/ns/mnt") for pid in (os.getpid(), os.getppid()))
    if ours == parents:
        raise RuntimeError(f"{INSIDE} is for the program's own child, which has mounts of its own")
    return True


def isolate_network() -> None:
    """Move this process, and all that it starts from now on, into a network namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def run_inside(argv: Sequence[str], scratch: Path, *, network: bool) -> int:
    """Run this program again, in mount, IPC and (unless it needs the network) network namespaces of its own; returns its exit code.

    Nothing that it started is left, also when this process is told to end.
    """
    flags = ["--mount", "--ipc", *([] if network else ["--net"])]
    command = ["unshare", *flags, "--propagation", "private", sys.executable, "-m", "deploy.docker.check_image"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    child = subprocess.Popen([*command, *argv, INSIDE, str(scratch)], start_new_session=True)
    try:
        return child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def remove(scratch: Path) -> None:
    """Raises: RuntimeError, with nothing removed, when something is mounted there."""
    if any(f" {scratch}/" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        raise RuntimeError(f"something is mounted below {scratch}; it is left as it is")
    shutil.rmtree(scratch)


def bootstrap(debian: Path) -> None:
    """Make a Debian with Python there, as the base image has one, unless there is one. Raises: CalledProcessError."""
    if not (debian / "usr" / "bin" / "python").exists():
        wanted = "--include=python3,python3-venv,python-is-python3"
        _run(["debootstrap", "--variant=minbase", wanted, "bookworm", str(debian)], stdout=subprocess.DEVNULL)


@dataclass(frozen=True, kw_only=True)
class Container:
    """What the engine gives to one container beside the root."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[tuple[Path, str, bool]] = ()
    """(source, directory of the root, whether it is read-only)."""
    tmpfs: Sequence[str] = ()
    """Mounted with the options that Docker takes when none are named: nothing in them can be executed."""
    user: str = f"{UID}:{UID}"


@dataclass(kw_only=True)
class Sandbox:
    root: Path
    env: Mapping[str, str]
    """All that a program in it finds in its environment, beside what its container adds."""
    debian: Path | None = None
    """A Debian that is copied; None: this machine's files are shown."""
    _mounts: dict[Path, Path] = field(default_factory=dict)
    """Place in the root -> what is shown there."""

    def prepare(self) -> None:
        """Everything but what the image itself brings."""
        if self.debian is not None:
            _run(["cp", "-a", f"{self.debian}/.", str(self.root)])
        else:
            for name in _SYSTEM:
                source = Path("/") / name
                if source.is_symlink():
                    (self.root / name).symlink_to(os.readlink(source))
                elif source.is_dir():
                    self.mount(source, f"/{name}", read_only=True)
            self.mount(Path(sys.base_prefix), sys.base_prefix, read_only=True)
        for name in _ETC if self.debian is None else _ETC_OF_NETWORK:
            self._copy_of_etc(name)
        for name in ("proc", "sys"):
            self.mount(Path("/") / name, f"/{name}", read_only=True)
        self._prepare_devices()
        self.make("/tmp", mode=0o1777)
        self.make("/var/cache")

    @property
    def python_path(self) -> str:
        """PATH of the base image."""
        system = "/usr/sbin:/usr/bin:/sbin:/bin"
        return system if self.debian is not None else f"{Path(sys.base_prefix) / 'bin'}:{system}"

    def make(self, path: str, *, mode: int = 0o755) -> Path:
        """A directory of the root, with its parents."""
        inside = self.root / path.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        inside.chmod(mode)
        return inside

    def mount(self, source: Path, target: str, *, read_only: bool = False) -> None:
        """Show `source` at `target`, unless it is there already as part of something else."""
        inside = self.root / target.lstrip("/")
        if any(mounted in inside.parents for mounted in self._mounts):
            return
        inside.mkdir(parents=True, exist_ok=True)
        _run(["mount", "--bind", str(source), str(inside)])
        if read_only:
            _run(["mount", "-o", "remount,ro,bind", str(inside)])
        self._mounts[inside] = source

    def hide_compilers(self) -> None:
        """Make programs that build things unusable, which this machine may have and an image has not."""
        for name in _BUILD_PROGRAMS:
            program = (self.root / "usr/bin" / name).resolve()
            inside = self.root / str(program).removeprefix(str(self.root)).lstrip("/")
            if inside.exists():
                _run(["mount", "--bind", "/dev/null", str(inside)])

    def _copy_of_etc(self, name: str) -> None:
        source = Path("/etc") / name
        target = self.make("/etc") / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def _prepare_devices(self) -> None:
        directory = self.make("/dev")
        _run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(directory)])
        for name in _DEVICES:
            (directory / name).touch()
            _run(["mount", "--bind", f"/dev/{name}", str(directory / name)])
        self.make("/dev/shm", mode=0o1777)
        (directory / "fd").symlink_to("/proc/self/fd")

    def freeze(self) -> None:
        """Make the root itself read-only; mounts keep what they are."""
        _run(["mount", "--rbind", str(self.root), str(self.root)])
        _run(["mount", "-o", "remount,ro,bind", str(self.root)])

    def run_as_root(self, command: str, cwd: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """A RUN instruction."""
        argv = ["chroot", str(self.root), *_env_argv(env), "sh", "-ec", f"cd {cwd}\n{command}"]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def run(self, argv: Sequence[str], container: Container, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """A short program, as the unprivileged user. A timeout counts as code 124."""
        try:
            return subprocess.run(
                self._argv(argv, container), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(list(argv), 124, "", f"did not end within {timeout_s:g} s")

    def start(self, argv: Sequence[str], container: Container, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """A service; its process id is that of the program."""
        return subprocess.Popen(self._argv(argv, container), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _argv(self, argv: Sequence[str], container: Container) -> list[str]:
        own = []
        for path in container.tmpfs:
            directory = Path(f"{self.root}{path}")
            own.append(f"mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs {shlex.quote(str(directory))}")
            # A checkout may lie there; it is no part of the image, so it is shown again.
            for inside, source in self._mounts.items():
                if directory in inside.parents:
                    target = shlex.quote(str(inside))
                    own.append(f"mkdir -p {target}; mount --bind {shlex.quote(str(source))} {target}")
                    own.append(f"mount -o remount,ro,bind {target}")
        for source, path, read_only in container.mounts:
            target = shlex.quote(str(self.root) + path)
            own.append(f"mount --bind {shlex.quote(str(source))} {target}")
            if read_only:
                own.append(f"mount -o remount,ro,bind {target}")
        user, _colon, group = container.user.partition(":")
        confined = [
            "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
            "--no-new-privs",
        ]  # fmt: skip
        return [
            "unshare", "--mount", "--ipc", "sh", "-ec", "\n".join([*own, 'exec "$@"']), "sh", "chroot", str(self.root), *confined,
            *_env_argv({**self.env, **container.env}), "sh", "-c", 'cd /tmp && exec "$@"', "sh", *argv,
        ]  # fmt: skip


def build_environment() -> dict[str, str]:
    """What a RUN instruction may see of ours: how packages are reached, nothing else."""
    wanted = ("PIP_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_")
    return {name: value for name, value in child_environment({}).items() if name.startswith(wanted)}


def wheel_folders() -> list[Path]:
    """Folders of this machine that $PIP_FIND_LINKS names."""
    words = build_environment().get("PIP_FIND_LINKS", "").split()
    return [Path(word) for word in words if Path(word).is_dir()]


def _env_argv(env: Mapping[str, str]) -> list[str]:
    return ["env", "-i", *(f"{name}={value}" for name, value in env.items())]


def _run(argv: Sequence[str], stdout: int | None = None) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=stdout)
