"""A root directory such as a container has, put together from this machine's own files by bind mounts.

/usr and its like are this machine's and read-only, /etc is a copy, everything else is empty unless it is mounted; a program in it runs as
an unprivileged user without capabilities. Needs root and `unshare`.

Mounts exist only in the namespace of `run_inside`'s child. The directory is made and removed by its parent, which never sees them: whoever
removed it where they are would remove what they show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from moontide.config import child_environment

UID = 10001
INSIDE = "--inside"
"""Option that tells the child where its directory is."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
_ETC = (
    "alternatives", "group", "gshadow", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "login.defs", "nsswitch.conf", "passwd",
    "pip.conf", "resolv.conf", "shadow", "ssl",
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def is_inside(argv: Sequence[str]) -> bool:
    """Raises: RuntimeError when somebody else than `run_inside` says so: mounts would go where all programs see them."""
    if INSIDE not in argv:
        return False
    ours, parents = (os.readlink(f"/proc/{pid}/ns/mnt") for pid in (os.getpid(), os.getppid()))
    if ours == parents:
        raise RuntimeError(f"{INSIDE} is for the program's own child, which has mounts of its own")
    return True


def run_inside(argv: Sequence[str], scratch: Path, *, network: bool) -> int:
    """Run this program again, in mount, IPC and (unless it needs the network) network namespaces of its own; returns its exit code."""
    flags = ["--mount", "--ipc", *([] if network else ["--net"])]
    command = ["unshare", *flags, "--propagation", "private", sys.executable, "-m", "deploy.docker.check_image"]
    return subprocess.run([*command, *argv, INSIDE, str(scratch)], check=False).returncode


def remove(scratch: Path) -> None:
    """Raises: RuntimeError, with nothing removed, when something is mounted there."""
    if any(f" {scratch}/" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        raise RuntimeError(f"something is mounted below {scratch}; it is left as it is")
    shutil.rmtree(scratch)


@dataclass(kw_only=True)
class Sandbox:
    root: Path
    env: Mapping[str, str]
    """All that a program in it finds in its environment."""
    _mounts: list[Path] = field(default_factory=list)

    def prepare(self) -> None:
        """Everything but what the image itself brings."""
        for name in _SYSTEM:
            source = Path("/") / name
            if source.is_symlink():
                (self.root / name).symlink_to(os.readlink(source))
            elif source.is_dir():
                self.mount(source, f"/{name}", read_only=True)
        for name in _ETC:
            self._copy_of_etc(Path("/etc") / name)
        for name in ("proc", "sys"):
            self.mount(Path("/") / name, f"/{name}", read_only=True)
        self._prepare_devices()
        self.make("/tmp", mode=0o1777)
        self.make("/var/cache")
        self.mount(Path(sys.base_prefix), sys.base_prefix, read_only=True)

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
        self.make(target)
        _run(["mount", "--bind", str(source), str(inside)])
        if read_only:
            _run(["mount", "-o", "remount,ro,bind", str(inside)])
        self._mounts.append(inside)

    def _copy_of_etc(self, source: Path) -> None:
        target = self.make("/etc") / source.name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        elif source.exists():
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
        argv = ["chroot", str(self.root), *_env_argv(env), "sh", "-ec", f"cd {cwd} && {command}"]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def run(self, argv: Sequence[str], *, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
        """A short program, as the unprivileged user. A timeout counts as code 124."""
        try:
            return subprocess.run(
                self._argv(argv, env), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(list(argv), 124, "", f"did not end within {timeout_s:g} s")

    def start(self, argv: Sequence[str], log: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A service; its process id is that of the program."""
        return subprocess.Popen(self._argv(argv, env), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _argv(self, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        own_tmp = f'mount -t tmpfs -o mode=1777 tmpfs "{self.root}/tmp" && exec "$@"'
        user = [
            "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
            "--no-new-privs",
        ]  # fmt: skip
        return [
            "unshare", "--mount", "--ipc", "sh", "-c", own_tmp, "sh", "chroot", str(self.root), *user,
            *_env_argv({**self.env, **env}), "sh", "-c", 'cd /tmp && exec "$@"', "sh", *argv,
        ]  # fmt: skip


def build_environment() -> dict[str, str]:
    """What a RUN instruction may see of ours: how packages are reached, nothing else."""
    wanted = ("PIP_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_")
    return {name: value for name, value in child_environment({}).items() if name.startswith(wanted)}


def _env_argv(env: Mapping[str, str]) -> list[str]:
    return ["env", "-i", *(f"{name}={value}" for name, value in env.items())]


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
