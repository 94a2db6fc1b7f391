"""The directory of one cluster's configs, logs and sockets, and the removal of those that killed clusters left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from moontide.errors import ConfigError

PREFIX = "moontide-"
LONGEST_PATH = 44
"""Ray puts sockets up to 62 characters deeper, and the system limits a socket's path to 107."""


class RunDir:
    """Owned by this process while it is open: a lock says so, which goes when the process does, however it ends."""

    def __init__(self, wanted: str = "") -> None:
        """`wanted`: a directory to use and keep; empty: a fresh one under the system's temporary directory.

        Raises: ConfigError when the directory cannot be used or another cluster uses it.
        """
        self.is_temporary = not wanted
        if self.is_temporary:
            remove_stale()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        else:
            self.path = Path(wanted).resolve()
        if len(str(self.path)) > LONGEST_PATH:
            if self.is_temporary:
                self.path.rmdir()
            raise ConfigError(
                f"run directory {self.path} is longer than the {LONGEST_PATH} characters that leave room for sockets; "
                "choose a shorter one with --set deploy.run_dir=..."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use run directory {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"run directory {self.path} is in use by another cluster; choose another one with --set deploy.run_dir=..."
            ) from error
        for name in ("config", "pids"):
            shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / name).mkdir()
        (self.path / "logs").mkdir(exist_ok=True)
        self._old_bytes = {path: path.stat().st_size for path in (self.path / "logs").iterdir()}
        """Of each log, what an earlier run left in it."""

    def config_path(self, name: str) -> Path:
        return self.path / "config" / f"{name}.yaml"

    @property
    def targets_path(self) -> Path:
        """What Prometheus scrapes, in the form of its file_sd_configs."""
        return self.path / "config" / "prometheus-targets.json"

    def log_path(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def new_log(self, name: str) -> str:
        """What that process has logged since this directory was opened; empty when it has not begun."""
        path = self.log_path(name)
        if not path.exists():
            return ""
        with path.open("rb") as log:
            log.seek(self._old_bytes.get(path, 0))
            return log.read().decode(errors="replace")

    def pid_path(self, name: str) -> Path:
        """One line per start of that process, the last is the current one; written for processes that Ray starts."""
        return self.path / "pids" / name

    def close(self, *, keep: bool) -> None:
        """Give it up; a temporary one is removed unless `keep`."""
        if self.is_temporary and not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale() -> None:
    """Remove temporary run directories of this user whose owner is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/owner.lock"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)
