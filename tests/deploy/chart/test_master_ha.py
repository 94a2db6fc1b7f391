"""`mooncakeMaster.ha`: two real masters elect a leader in a real etcd, and a store process that knows one address follows it.

kvstore --> service (takes connections for who listens on the RPC port, as readiness makes a Service do) --> leader | standby
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.data_client import binary_path
from moontide.config import free_port
from tests.store_processes import Master, listens, running, valkey, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"),
    pytest.mark.timeout(240),
]
LONGEST_FAILOVER_S = 60.0


@contextmanager
def etcd(data_dir: Path) -> Iterator[str]:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    argv = [
        "etcd", "--data-dir", str(data_dir), "--log-level", "error",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    with running(argv):
        wait_until(lambda: listens(client.removeprefix("http://")), what="etcd's start")
        yield client


@contextmanager
def master(endpoints: str) -> Iterator[Master]:
    rpc, http_port = free_port(), free_port()
    argv = [
        str(binary_path("mooncake_master")), "--rpc_address=127.0.0.1", f"--rpc_port={rpc}",
        "--metrics_host=127.0.0.1", f"--metrics_port={http_port}", "--enable_http_metadata_server=false",
        "--enable_ha=true", "--ha_backend_type=etcd", f"--etcd_endpoints={endpoints}", "--cluster_id=moontide",
    ]  # fmt: skip
    with running(argv) as process:
        wait_until(lambda: listens(f"127.0.0.1:{http_port}"), what="the master's start")
        yield Master(f"127.0.0.1:{rpc}", f"127.0.0.1:{http_port}", process)


@contextmanager
def service(pick: Callable[[], str | None]) -> Iterator[str]:
    """An address whose new connections go to what `pick` names; those that are open stay where they are."""

    def relay(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            address = pick()
            try:
                host, _, port = (address or "").rpartition(":")
                backend = socket.create_connection((host, int(port)), timeout=2.0)
            except (OSError, ValueError):
                client.close()
                continue
            backend.settimeout(None)
            for pair in ((client, backend), (backend, client)):
                threading.Thread(target=relay, args=pair, daemon=True).start()

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def leader(masters: Sequence[Master]) -> Master | None:
    return next((each for each in masters if role(each) == "leader" and listens(each.rpc)), None)


def role(master: Master) -> str:
    try:
        return get(master.http, "/role")[1]
    except OSError:
        return ""


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=1.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode().strip()
    finally:
        connection.close()


def is_ready(address: str) -> bool:
    with suppress(OSError):
        return get(address, "/ready")[0] == 200
    return False


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_store_process_follows_the_new_leader(fault: signal.Signals, tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis_url = stack.enter_context(valkey())
        endpoints = stack.enter_context(etcd(tmp_path))
        masters = [stack.enter_context(master(endpoints)) for _ in range(2)]
        wait_until(lambda: leader(masters), what="a leader")
        first = leader(masters)
        assert first is not None
        standby = next(each for each in masters if each is not first)
        assert role(standby) == "standby"
        assert not listens(standby.rpc), "readiness tells a standby by its closed RPC port"

        def ready(address_of: Callable[[Master], str]) -> Callable[[], str | None]:
            return lambda: address_of(each) if (each := leader(masters)) else None

        rpc = stack.enter_context(service(ready(lambda each: each.rpc)))
        http_address = stack.enter_context(service(ready(lambda each: each.http)))
        node_http = f"127.0.0.1:{free_port()}"
        argv = [
            sys.executable, "-m", "kvstore", "--set=node.node_id=store-0", f"--set=node.http_port={node_http.rpartition(':')[2]}",
            f"--set=registry.url={redis_url}", f"--set=kvstore.master_rpc={rpc}", f"--set=kvstore.master_http={http_address}",
            "--set=kvstore.pool_bytes=67108864", f"--set=kvstore.client_port={free_port()}",
        ]  # fmt: skip
        env = os.environ | {"MC_FORCE_TCP": "1", "GLOG_minloglevel": "1"}

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(argv, env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        store = start()
        wait_until(lambda: is_ready(node_http), what="the store process is ready")
        first.process.send_signal(fault)
        wait_until(lambda: leader(masters) is standby, timeout_s=LONGEST_FAILOVER_S, what="the standby leads")
        assert store.wait(LONGEST_FAILOVER_S) == 1, "its blocks are gone: it ends, for a new boot"
        start()
        wait_until(lambda: is_ready(node_http), timeout_s=LONGEST_FAILOVER_S, what="the new boot is ready")
        if fault == signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            wait_until(lambda: role(first) == "standby", what="the old leader steps down")
            assert leader(masters) is standby
