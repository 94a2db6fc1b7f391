"""Sessions of the operating system: how everything that a child started is found, whoever its parent is by then.

Every process that a cluster starts leads a session of its own. A descendant stays in that session when its parent dies and when it
rewrites its title and environment (as Ray's agents do), so the session id names the whole family.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def session_members(session_ids: Iterable[int]) -> list[int]:
    """Process ids of the living members of these sessions; zombies do not count."""
    wanted = set(session_ids)
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")  # a name is any bytes
        except OSError:
            continue
        # The name in parentheses may hold spaces; what follows is: state, parent, process group, session.
        state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if int(session) in wanted and state != "Z":
            members.append(int(entry.name))
    return members


def kill_sessions(session_ids: Iterable[int], *, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL every member until none is left; returns those that were still there after `timeout_s`."""
    wanted = set(session_ids)
    give_up_s = time.monotonic() + timeout_s
    while members := session_members(wanted):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > give_up_s:
            return members
        time.sleep(0.02)
    return []
