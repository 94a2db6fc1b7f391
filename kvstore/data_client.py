"""The `mooncake_client` of this host: the child process that owns the segment and moves its bytes.

It dies with us, whatever ends us. When it dies, everything the segment held is gone, so its owner ends too and comes back
under a new boot id.
"""

import asyncio
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
from pathlib import Path

from kvstore.config import KvStoreConfig
from kvstore.master import query_segments
from kvstore.transfer.base import StoreUnavailable
from moontide.clock import Clock, MonotonicClock
from moontide.config import child_environment, free_port
from moontide.deadline import Deadline
from moontide.errors import ConfigError
from moontide.log import get_logger

_START_TIMEOUT_S = 20.0
_FORGET_TIMEOUT_S = 30.0
"""The master forgets a segment about ten seconds after its owner's death (its client_ttl)."""
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
ENGINE_SETTINGS = {
    # The defaults of its TCP transport suit small pages: slices of 64 KiB halve the throughput of our objects, and the processes of
    # one host together can have more than 1,024 entries open to one peer, which then fail after a second.
    "MC_TCP_SLICE_SIZE": str(16 << 20),
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
    # Objects on their way to one peer at once: each has a connection until it is confirmed, so 4 of them leave a link of 1 Gb/s and 10 ms
    # nine tenths idle. The engine takes 64 for 4.
    "MC_TCP_LANES_PER_PEER": "16",
}
"""Environment of the transfer engine."""

log = get_logger(__name__)


class DataClient:
    """Start with `await DataClient.start(config)`, end with `close()`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address
        """host:port that local processes attach to; also the name of the segment."""

    @classmethod
    async def start(cls, config: KvStoreConfig, clock: Clock | None = None) -> "DataClient":
        """Start the child and wait until it listens.

        Must run in the main thread: the child dies with the thread that started it.
        Raises: ConfigError if it ends, or does not listen in time.
        """
        clock = clock or MonotonicClock()
        await _wait_until_dead_segments_are_forgotten(config, clock)
        port = config.kvstore.client_port or free_port(config.node.host)
        address = f"{config.node.host}:{port}"
        if _listens(address):
            # The child would end, and we would take the other program for it.
            raise ConfigError(f"kvstore.client_port={port} on {config.node.host} is in use; choose another one, or 0")
        client = cls(_spawn(config, port), address)
        try:
            await client._wait_until_listening(Deadline.after(_START_TIMEOUT_S, clock))
        except BaseException:
            client.close()
            raise
        return client

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it. What the segment holds is given up."""
        self._process.kill()
        self._process.wait()

    async def _wait_until_listening(self, deadline: Deadline) -> None:
        while not _listens(self.address):
            code = self.exit_code()
            if code is not None:
                raise ConfigError(
                    f"the data client ended with code {code} while it started at {self.address}; is the port free, and does "
                    "the store's master run? Its messages are above"
                )
            if deadline.expired:
                raise ConfigError(f"the data client does not listen at {self.address} after {_START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_POLL_S)


def _spawn(config: KvStoreConfig, port: int) -> subprocess.Popen[bytes]:
    parent_pid = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)

    arguments = [
        str(binary_path("mooncake_client")),
        "-metadata_server", "P2PHANDSHAKE",
        "-host", f"{config.node.host}:{port}",  # with a port it also names the segment
        "-port", str(port),
        "-global_segment_size", str(config.kvstore.pool_bytes),
        "-master_server_address", config.kvstore.master_rpc,
        "-protocol", config.kvstore.protocol,
        "-threads", str(config.kvstore.client_threads),
    ]  # fmt: skip
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        env=child_environment({"MC_LOG_LEVEL": "WARNING", **ENGINE_SETTINGS}),
        preexec_fn=die_with_parent,
    )


def binary_path(name: str) -> Path:
    """A program of the installed `mooncake` package, itself and not its wrapper, so that signals reach it.

    Raises: ConfigError when the package is not installed.
    """
    spec = importlib.util.find_spec("mooncake")
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        path = Path(place) / name
        if path.exists():
            return path
    raise ConfigError(
        f"{name} is not installed; install one of mooncake-transfer-engine-non-cuda (no GPU), mooncake-transfer-engine "
        "(CUDA 12) or mooncake-transfer-engine-cuda13"
    )


async def _wait_until_dead_segments_are_forgotten(config: KvStoreConfig, clock: Clock) -> None:
    """Wait while the master still believes in segments of this host whose owner is dead.

    Until then it says that their objects exist, and a put of one of them succeeds without storing anything.
    """
    deadline = Deadline.after(_FORGET_TIMEOUT_S, clock)
    while dead := await asyncio.to_thread(_dead_segments, config):
        if deadline.expired:
            raise ConfigError(
                f"the store's master still lists segments of dead owners on {config.node.host} after "
                f"{_FORGET_TIMEOUT_S:.0f} s: {', '.join(dead)}; start it with a smaller --client_ttl"
            )
        await asyncio.sleep(10 * _POLL_S)


def _dead_segments(config: KvStoreConfig) -> list[str]:
    try:
        endpoints = [segment.endpoint for segment in query_segments(config.kvstore.master_http)]
    except StoreUnavailable as error:
        raise ConfigError(f"{error}; start mooncake_master first") from error
    return [e for e in endpoints if e.rpartition(":")[0] == config.node.host and not _listens(e)]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return False
    return True
