from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.processes import NOT_RUN_CODE, Command, Exit, ProcessLauncher
from deploy.sessions import kill_sessions, session_members
from tests.cluster import wait_for

TIMEOUT_S = 20.0
PARENT_OF_TWO = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True); time.sleep(600)"
)
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def launcher() -> Iterator[ProcessLauncher]:
    with ProcessLauncher() as made:
        yield made


def python(name: str, code: str, tmp_path: Path, **env: str) -> Command:
    return Command(name=name, argv=(sys.executable, "-c", code), env=env, log_path=tmp_path / f"{name}.log")


def running_pid(launcher: ProcessLauncher, name: str) -> int:
    pid = launcher.pid(name)
    assert pid is not None
    return pid


def test_killed_process_starts_again_and_its_children_go_with_it(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.start(python("a", PARENT_OF_TWO, tmp_path))
    first = running_pid(launcher, "a")
    wait_for(lambda: len(session_members([first])) == 2, "the child has a child", TIMEOUT_S)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: launcher.pid("a") not in (None, first), "it starts again", TIMEOUT_S)
    assert session_members([first]) == []
    assert launcher.exits() == [Exit("a", -signal.SIGKILL)]


def test_processes_with_any_name_are_seen(launcher: ProcessLauncher, tmp_path: Path) -> None:
    """The system cuts a name after 15 bytes, in the middle of a character if need be."""
    code = r"from pathlib import Path; Path('/proc/self/comm').write_bytes(7 * b'\xd0\xbe' + b'\xd0'); " + PARENT_OF_TWO
    launcher.start(python("a", code, tmp_path))
    wait_for(lambda: "up" in log_of(tmp_path, "a"), "it has its name", TIMEOUT_S)
    assert len(session_members([running_pid(launcher, "a")])) == 2


def log_of(tmp_path: Path, name: str) -> str:
    log = tmp_path / f"{name}.log"
    return log.read_text() if log.exists() else ""


def test_log_is_appended_over_restarts_and_environment_arrives(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.start(python("a", "import os; print(os.environ['WORD'], flush=True)", tmp_path, WORD="hello"))
    wait_for(lambda: (tmp_path / "a.log").read_text().count("hello") >= 2, "two starts are logged", TIMEOUT_S)


def test_stop_ends_all_and_names_those_that_had_to_be_killed(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.start(python("deaf", DEAF, tmp_path))
    launcher.start(python("polite", PARENT_OF_TWO, tmp_path))
    pids = [running_pid(launcher, name) for name in launcher.names()]
    wait_for(lambda: all((tmp_path / f"{n}.log").read_text() for n in launcher.names()), "both are up", TIMEOUT_S)
    assert launcher.stop(["deaf", "polite"], timeout_s=0.5) == ["deaf"]
    assert session_members(pids) == []
    assert launcher.names() == []
    assert launcher.exits() == []


def test_frozen_process_is_killed_too(launcher: ProcessLauncher, tmp_path: Path) -> None:
    launcher.start(python("a", DEAF, tmp_path))
    pid = running_pid(launcher, "a")
    wait_for(lambda: bool((tmp_path / "a.log").read_text()), "it is up", TIMEOUT_S)
    launcher.send_signal("a", signal.SIGSTOP)
    assert launcher.stop(["a"], timeout_s=0.2) == ["a"]
    assert session_members([pid]) == []


def test_program_that_cannot_be_run_for_a_while_is_tried_again(launcher: ProcessLauncher, tmp_path: Path) -> None:
    program, away = tmp_path / "program", tmp_path / "away"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    launcher.start(Command(name="a", argv=(str(program),), log_path=tmp_path / "a.log"))
    first = running_pid(launcher, "a")
    program.rename(away)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: Exit("a", NOT_RUN_CODE) in launcher.exits(), "it cannot be run", TIMEOUT_S)
    away.rename(program)
    wait_for(lambda: launcher.pid("a") not in (None, first), "it starts again", TIMEOUT_S)


def test_missing_program_is_an_error_of_start(launcher: ProcessLauncher, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        launcher.start(Command(name="a", argv=(str(tmp_path / "nothing"),), log_path=tmp_path / "a.log"))


OWNER = """
import sys, time
from pathlib import Path
from deploy.processes import Command, ProcessLauncher
launcher = ProcessLauncher()
launcher.start(Command(name="a", argv=(sys.executable, "-c", {code!r}), log_path=Path({log!r})))
print(launcher.pid("a"), launcher._guard.pid, flush=True)
time.sleep(600)
"""


def start_owner(tmp_path: Path) -> tuple[subprocess.Popen[str], int, int]:
    """A process that owns a launcher, the child it started, and its guard."""
    log = tmp_path / "a.log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(code=PARENT_OF_TWO, log=str(log))], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    child, guard = map(int, owner.stdout.readline().split())
    wait_for(lambda: len(session_members([child])) == 2, "the child has a child", TIMEOUT_S)
    return owner, child, guard


def end_owner(owner: subprocess.Popen[str], sessions: list[int]) -> None:
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()
    kill_sessions(sessions)


def test_kill_of_the_owner_leaves_nothing(tmp_path: Path) -> None:
    owner, child, guard = start_owner(tmp_path)
    try:
        owner.kill()
        wait_for(lambda: session_members([child, guard]) == [], "children, grandchildren and guard are gone", TIMEOUT_S)
    finally:
        end_owner(owner, [child, guard])


def test_dead_guard_is_replaced_and_knows_the_children(tmp_path: Path) -> None:
    owner, child, guard = start_owner(tmp_path)
    successor: list[int] = []

    def is_replaced() -> bool:
        threads = Path(f"/proc/{owner.pid}/task").iterdir()
        children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
        successor[:] = [int(pid) for pid in children if int(pid) not in (child, guard)]
        return bool(successor)

    try:
        os.kill(guard, signal.SIGKILL)
        wait_for(is_replaced, "another guard runs", TIMEOUT_S)
        owner.kill()
        wait_for(lambda: session_members([child, *successor]) == [], "nothing is left", TIMEOUT_S)
    finally:
        end_owner(owner, [child, guard, *successor])
