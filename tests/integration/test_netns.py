"""The shaped link that other tests and benchmarks build on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.netns import Side, shaped_link, why_unavailable
from tests.store_processes import wait_until

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SERVE = """
import socket
with socket.create_server(("{address}", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    data = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    print(len(data), set(data) == {{7}}, flush=True)
"""
SEND = """
import socket
with socket.create_connection(("{address}", 5000)) as connection:
    connection.sendall(bytes([7]) * {nbytes})
"""
HOLDER = """
import subprocess, sys
from tests.netns import shaped_link
with shaped_link(rate_bits_s=1e9, delay_s=0.0) as link:
    command = ["sh", "-c", "echo; exec sleep 600"]
    inside = subprocess.Popen(link.far.argv(command), stdout=subprocess.PIPE)
    inside.stdout.readline()  # from here on it dies with this process
    print(link.relay_pid, inside.pid, flush=True)
    inside.wait()
"""


def python_on(side: Side, code: str, **kwargs: object) -> subprocess.Popen[str]:
    return started(side.argv([sys.executable, "-c", code.format(**kwargs)]))


def started(argv: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_bytes_cross_the_link_whole() -> None:
    with shaped_link(rate_bits_s=1e9, delay_s=0.002) as link:
        server = python_on(link.far, SERVE, address=link.far.address)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        python_on(link.near, SEND, address=link.far.address, nbytes=4 << 20).communicate(timeout=30)
        assert server.communicate(timeout=30)[0] == f"{4 << 20} True\n"


def test_nothing_is_left_when_the_starter_is_killed() -> None:
    holder = started([sys.executable, "-c", HOLDER])
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=10)
    wait_until(lambda: not any(is_running(pid) for pid in pids), what="the end of the relay and of what runs inside")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
