"""Starts processes, starts them again when they die, and stops them; the launcher that needs nothing but the operating system.

One thread watches. Every process leads its own session, so that what it started itself goes with it; `deploy/guard.py` does the same when
this whole process is killed. Knows nothing of models or services.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from deploy import guard
from deploy.sessions import kill_sessions
from moontide.config import child_environment

POLL_S = 0.05
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
STEADY_S = 10.0
"""A process that lived so long starts again without counting as a repeated failure."""
NOT_RUN_CODE = 127
"""Stands for the exit code of a program that could not be run, as in a shell."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to keep running."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the inherited environment."""
    log_path: Path
    """Standard output and error are appended here."""


@dataclass(frozen=True)
class Exit:
    """One unasked-for end of a process."""

    name: str
    code: int
    """Exit code; negative: the signal that killed it."""


@dataclass
class _Child:
    command: Command
    popen: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    start_again_s: float = 0.0
    quick_deaths: int = 0
    stopping: bool = False


class ProcessLauncher:
    """Owner of a set of named processes. Thread safe; close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self._exits: list[Exit] = []
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._guard_command = [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve())]
        self._guard: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._watch, name="process-launcher", daemon=True)
        self._ensure_guard()
        self._thread.start()

    def __enter__(self) -> ProcessLauncher:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def start(self, command: Command) -> None:
        """Raises: OSError when the program cannot be run."""
        with self._lock:
            child = _Child(command)
            self._children[command.name] = child
            self._spawn(child)

    def pid(self, name: str) -> int | None:
        """Process id, None while it is not running."""
        with self._lock:
            popen = self._children[name].popen
            return popen.pid if popen is not None and popen.returncode is None else None

    def names(self) -> list[str]:
        with self._lock:
            return list(self._children)

    def exits(self) -> list[Exit]:
        """Every end so far that nobody asked for, oldest first."""
        with self._lock:
            return list(self._exits)

    def send_signal(self, name: str, number: int) -> None:
        """Raises: ProcessLookupError when it is not running."""
        pid = self.pid(name)
        if pid is None:
            raise ProcessLookupError(f"{name} is not running")
        os.kill(pid, number)

    def stop(self, names: Sequence[str], *, timeout_s: float) -> list[str]:
        """SIGTERM these together, wait, SIGKILL what is left; they do not start again. Returns the names that had to be killed."""
        with self._lock:
            children = [self._children[name] for name in names if name in self._children]
            for child in children:
                child.stopping = True
            popens = {c.command.name: c.popen for c in children if c.popen is not None}
        for popen in popens.values():
            with suppress(ProcessLookupError):
                os.kill(popen.pid, signal.SIGTERM)
        give_up_s = time.monotonic() + timeout_s
        killed = []
        for name, popen in popens.items():
            try:
                popen.wait(max(0.0, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                killed.append(name)
        kill_sessions([popen.pid for popen in popens.values()])
        for popen in popens.values():
            popen.wait()
            self._tell_guard(f"-{popen.pid}")
        with self._lock:
            for name in names:
                self._children.pop(name, None)
        return killed

    def kill_now(self) -> None:
        """SIGKILL everything; whoever waits in `stop` gets on at once. For use in a signal handler."""
        self._closing.set()
        for child in list(self._children.values()):
            child.stopping = True
        kill_sessions([c.popen.pid for c in list(self._children.values()) if c.popen is not None])

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop everything that still runs, and the guard."""
        self._closing.set()
        self._thread.join()
        self.stop(self.names(), timeout_s=timeout_s)
        if self._guard is not None:
            _pipe(self._guard).close()
            self._guard.wait()
            self._guard = None

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            with self._lock:
                self._ensure_guard()
                for child in list(self._children.values()):
                    self._look_after(child)

    def _look_after(self, child: _Child) -> None:
        if child.stopping:
            return
        now_s = time.monotonic()
        if child.popen is None:
            if now_s >= child.start_again_s:
                child.started_s = now_s
                try:
                    self._spawn(child)
                except OSError:  # no memory, no process id left, program gone: an end like any other
                    self._start_again_later(child, NOT_RUN_CODE, now_s)
            return
        code = child.popen.poll()
        if code is None:
            return
        # What it started must not live on beside its successor.
        kill_sessions([child.popen.pid])
        self._tell_guard(f"-{child.popen.pid}")
        child.popen = None
        self._start_again_later(child, code, now_s)

    def _start_again_later(self, child: _Child, code: int, now_s: float) -> None:
        self._exits.append(Exit(child.command.name, code))
        child.quick_deaths = 0 if now_s - child.started_s > STEADY_S else child.quick_deaths + 1
        child.start_again_s = now_s + min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** max(0, child.quick_deaths - 1))

    def _spawn(self, child: _Child) -> None:
        command = child.command
        command.log_path.parent.mkdir(parents=True, exist_ok=True)
        with command.log_path.open("ab") as log:
            child.popen = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(command.env),
                start_new_session=True,
            )
        child.started_s = time.monotonic()
        self._tell_guard(f"+{child.popen.pid}")

    def _ensure_guard(self) -> None:
        if self._guard is not None and self._guard.poll() is None:
            return
        # Its own session: signals to ours (Ctrl-C, a closing terminal, kill of the group) do not reach it.
        self._guard = subprocess.Popen(
            self._guard_command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True
        )
        for child in self._children.values():
            if child.popen is not None:
                self._tell_guard(f"+{child.popen.pid}")

    def _tell_guard(self, line: str) -> None:
        with self._lock:
            if self._guard is None:
                return
            with suppress(BrokenPipeError):  # it died; the next look starts another one with the full list
                _pipe(self._guard).write(line + "\n")
                _pipe(self._guard).flush()


def _pipe(guard_process: subprocess.Popen[str]) -> IO[str]:
    assert guard_process.stdin is not None
    return guard_process.stdin
