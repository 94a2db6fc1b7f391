"""Before a node serves: does this host reach what its bytes go through?

    this host --> master RPC, master HTTP                     no: it does not start
              --> own segment: engine, data port              no: it does not start
              --> segments of other hosts: engine, data port  no: logged, counted, looked at again

The engine of a segment introduces itself on one port and moves bytes through another one, which only it can tell; firewalls
like to miss both (docs/ports.md).
"""

import asyncio
import json
import socket
import struct
from dataclasses import dataclass

from kvstore.master import Segment, find_segment, query_segments
from kvstore.metrics import StoreMetrics
from kvstore.transfer.base import StoreUnavailable
from moontide.errors import ConfigError
from moontide.log import get_logger

_TIMEOUT_S = 2.0
_LENGTH = struct.Struct("<Q")
_ASK_WHO = b"\x01{}"
"""A message of the engine's handshake: its kind, then what the asker says of itself, which is not looked at."""
_MAX_ANSWER_BYTES = 128 << 20
_PERIOD_S = 30.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Unreachable:
    address: str
    what: str
    reason: str

    def explain(self, host: str) -> str:
        """Where from, what failed and what to do."""
        return (
            f"{host} does not reach {self.what} at {self.address} ({self.reason}): start it, or open the port for this host "
            "(docs/ports.md)"
        )


def require_master(*, master_rpc: str, master_http: str, host: str) -> None:
    """Raises: ConfigError when the store's master cannot be reached from this host."""
    for address, what in ((master_rpc, "the RPC of mooncake_master"), (master_http, "the HTTP of mooncake_master")):
        try:
            _open(address).close()
        except OSError as error:
            raise ConfigError(Unreachable(address, what, str(error)).explain(host)) from error


def require_segment(master_http: str, name: str, *, host: str) -> None:
    """Raises: ConfigError when the segment cannot be reached from this host; StoreUnavailable when the master does not list it."""
    unreachable = _check(find_segment(master_http, name))
    if unreachable is not None:
        raise ConfigError(unreachable.explain(host))


async def require_store(master_http: str, segment: str, *, host: str) -> None:
    """For nodes that store in `segment`, maybe of another host; "" (one process) is always reached.

    Raises: ConfigError when it cannot be reached from this host. A master that does not answer, or not know it yet, proves nothing:
    the node's watch of the store says so as long as it lasts.
    """
    if not segment:
        return
    try:
        await asyncio.to_thread(require_segment, master_http, segment, host=host)
    except StoreUnavailable as error:
        log.warning("segment of the store not checked", segment=segment, reason=str(error))


def unreachable_peers(master_http: str, *, own: str) -> list[Unreachable]:
    """What of the other segments that the master lists cannot be reached from this host. Raises: StoreUnavailable."""
    checked = [_check(segment) for segment in query_segments(master_http) if segment.name != own]
    return [each for each in checked if each is not None]


class PeerCheck:
    """Looks again and again: a host may come, and a port may be closed, at any time."""

    def __init__(self, master_http: str, *, own: str, host: str, metrics: StoreMetrics) -> None:
        self._master_http = master_http
        self._own = own
        self._host = host
        self._metrics = metrics
        self._unreachable: list[Unreachable] = []

    @property
    def num_unreachable(self) -> int:
        return len(self._unreachable)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.check()

    async def check(self) -> None:
        try:
            found = await asyncio.to_thread(unreachable_peers, self._master_http, own=self._own)
        except StoreUnavailable as error:
            log.warning("other hosts not checked", reason=str(error))
            return
        for each in found:
            if each not in self._unreachable:
                log.error("other host not reached", problem=each.explain(self._host))
        self._unreachable = found
        self._metrics.unreachable_peers.set(len(found))


def _check(segment: Segment) -> Unreachable | None:
    address, what = segment.endpoint, f"the engine of segment {segment.name}"
    try:
        port = _data_port(address)
        if port:
            address, what = f"{address.rpartition(':')[0]}:{port}", f"the data port of segment {segment.name}"
            _open(address).close()
    except (OSError, ValueError) as error:
        return Unreachable(address, what, str(error))
    return None


def _data_port(address: str) -> int:
    """Ask an engine where its bytes go; 0 when it uses no TCP port for them. Raises: OSError, ValueError."""
    with _open(address) as connection:
        connection.sendall(_LENGTH.pack(len(_ASK_WHO)) + _ASK_WHO)
        (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
        if length > _MAX_ANSWER_BYTES:
            raise ValueError(f"it answers with {length} bytes and is no engine")
        description = json.loads(_read(connection, length)[1:])
    return int(description.get("tcp_data_port", 0))


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = connection.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise ValueError("it closed the connection in the middle of an answer")
        data += part
    return bytes(data)


def _open(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
