"""Transfer over Mooncake Store: this process is a light client of its host's store process and shares memory with it.

Bytes go by memcpy between an arena here and the store process, and from there to other hosts through the transfer engine.
The store process owns all objects, so killing this process loses none. When the store process dies every call fails at
once; the library attaches again by itself, arenas included, within about three seconds of its restart on the same port.
It can do so for one MooncakeTransfer per process only, because it mixes up the memory of several. A process that stood
still for more than ten seconds is given up by the store process, and the library does not notice: see AttachmentLost.

A store process that stands still is worse than a dead one: the library gives a call up after 30 seconds, and the store process does it
all the same when it goes on, into memory that may have a new owner by then. So a call without an answer ends only when the store process
is dead or this process is about to end.
"""

import asyncio
import ctypes
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvstore.access import StoreAccessConfig
from kvstore.master import find_segment, http_get, query_places
from kvstore.transfer.base import (
    Arena,
    AttachmentLost,
    GetItem,
    GetStatus,
    PutItem,
    PutStatus,
    RemoveStatus,
    StoreUnavailable,
    check_arena_room,
)
from moontide.clock import Clock, MonotonicClock
from moontide.errors import ConfigError
from moontide.log import get_logger

_Item = TypeVar("_Item")

_MAX_BATCH = 256
"""Entries per call, and on their way at once in each direction and to one segment, over all threads: far below the 1,024 that
the engine queues per peer, where calls begin to fail in part. An URL of 256 keys is 28 KiB."""
_INTERNAL_BYTES = 1 << 20
"""The library's own pool and buffer; arenas are allocated beside them."""
_HTTP_TIMEOUT_S = 1.0
_ATTACH_TIMEOUT_S = 60.0
"""Longest wait at start for this host's store process."""
_ATTACH_RETRY_S = 0.2
_REATTACH_TIMEOUT_S = 10.0
_UNKNOWN_TIMEOUT_S = 2.0
"""The library attaches again only when it has noticed that the store process was away, and it looks every second or two: to one that came
back sooner it stays connected and unknown for good."""
"""Longest wait until a store process that answers reaches our memory again; the library needs three seconds after a restart."""
_NO_ANSWER_S = 25.0
"""A failed call that took so long was not answered: the library waits for 30 seconds, and what it does itself takes a few."""
_OUTLAST_TIMEOUT_S = 60.0
"""Longest wait after that until somebody asks `healthy`, which ends this process."""
_OUTLAST_POLL_S = 0.05
_PROBE_KEY = "probe"
"""Names no object, ever."""
# Codes of the library, from its troubleshooting page.
_NO_SPACE = -200
_NOT_COMPLETE = -703
_NOT_FOUND = -704
_EXISTS = -705
_UNKNOWN = -600
_LEASED = -706
_RPC_FAILED = -900

log = get_logger(__name__)


class MooncakeTransfer:
    """See Transfer. Thread safe."""

    def __init__(self, *, client_address: str, master_http: str, arena_bytes: int, clock: Clock | None = None) -> None:
        """Attach to the store process at `client_address`.

        Args:
            client_address: host:port of this host's `mooncake_client`.
            master_http: host:port of the master's HTTP server.
            arena_bytes: most bytes that `allocate` hands out in all.
        Raises: StoreUnavailable if nothing answers there.
        """
        self._client_address = client_address
        self._master_http = master_http
        self._arena_bytes = arena_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._reads = _InFlight()
        self._puts: dict[str, _InFlight] = defaultdict(_InFlight)
        """Of each segment."""
        self._closed = False
        self._clock = clock or MonotonicClock()
        self._probe_address: int | None = None
        self._detached_since_s: float | None = None
        self._unknown_since_s: float | None = None
        self._has_no_answer = False
        """Whether a call that was given up may still be done."""
        self._is_given_up = False
        """Whether AttachmentLost was raised, so that this process ends."""
        self._peer = _PeerWatch(client_address)
        if not self._peer.alive():
            raise StoreUnavailable(
                f"no store process answers at {client_address}; start `python -m kvstore` on this host"
            )
        self._store = _load_library().MooncakeDistributedStore()
        code = self._store.setup_dummy(_INTERNAL_BYTES, _INTERNAL_BYTES, client_address)
        if code != 0:
            self._peer.close()
            raise StoreUnavailable(f"cannot attach to the store process at {client_address}: code {code}")

    @property
    def segment(self) -> str:
        return self._client_address  # DataClient names its segment so

    def allocate(self, nbytes: int) -> Arena:
        with self._lock:
            check_arena_room(nbytes, used_bytes=self._used_bytes, arena_bytes=self._arena_bytes)
            address = self._store.alloc_from_mem_pool(nbytes)
            if not address:
                raise StoreUnavailable(f"the store process at {self._client_address} gave no memory for {nbytes} bytes")
            code = self._store.register_buffer(address, nbytes)
            if code != 0:
                raise StoreUnavailable(
                    f"the store process at {self._client_address} refused {nbytes} bytes: code {code}"
                )
            self._used_bytes += nbytes
            self._probe_address = address
        return Arena(address, nbytes, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"))

    def put(self, items: Sequence[PutItem], *, segment: str = "") -> list[PutStatus]:
        place = _load_library().ReplicateConfig()
        place.preferred_segment = segment or self.segment
        with self._lock:
            in_flight = self._puts[place.preferred_segment]

        def call(batch: Sequence[PutItem]) -> list[int]:
            keys, addresses, sizes = zip(*((i.key, i.address, i.nbytes) for i in batch), strict=True)
            with in_flight.of(len(batch)):
                return self._touch(self._store.batch_put_from, list(keys), list(addresses), list(sizes), place)

        return [_put_status(code) for code in self._in_batches(items, call)]

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        def call(batch: Sequence[GetItem]) -> list[int]:
            keys, addresses, sizes = zip(*((i.key, i.address, i.nbytes) for i in batch), strict=True)
            with self._reads.of(len(batch)):
                return self._touch(self._store.batch_get_into, list(keys), list(addresses), list(sizes))

        codes = self._in_batches(items, call)
        return [_get_status(code, item.nbytes) for code, item in zip(codes, items, strict=True)]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        # The master's HTTP query is the only look-up that grants no lease; a lease would block the object's removal.
        return [bool(places) for places in self._places(keys)]

    def misplaced(self, keys: Sequence[str]) -> list[str]:
        endpoint = find_segment(self._master_http, self.segment).endpoint
        return [key for key, places in zip(keys, self._places(keys), strict=True) if places and endpoint not in places]

    def remove(self, keys: Sequence[str]) -> list[RemoveStatus]:
        def call(batch: Sequence[str]) -> list[int]:
            codes: list[int] = self._store.batch_remove(list(batch))
            return codes

        return [_remove_status(code) for code in self._in_batches(keys, call)]

    def healthy(self) -> bool:
        try:
            status, _ = http_get(self._master_http, "/health", timeout_s=_HTTP_TIMEOUT_S)
        except StoreUnavailable:
            return False
        return status == 200 and self._is_attached()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._store.close()
        self._peer.close()

    def _is_attached(self) -> bool:
        """Ask for an object that is not there: the answer is "not found" only if it could have been copied to our memory."""
        if self._probe_address is None:
            return True
        if self._closed or not self._peer.alive():
            self._detached_since_s = self._unknown_since_s = None
            return False
        (code,) = self._store.batch_get_into([_PROBE_KEY], [self._probe_address], [1])
        if self._has_no_answer and self._peer.alive():
            self._is_given_up = True
            raise AttachmentLost(
                f"the store process at {self._client_address} did not answer for {_NO_ANSWER_S} s and may still touch this process' "
                "memory; this process has to be started again"
            )
        if code == _NOT_FOUND:
            self._detached_since_s = self._unknown_since_s = None
            return True
        now_s = self._clock.now()
        if self._detached_since_s is None:
            self._detached_since_s = now_s
        if code != _UNKNOWN or self._unknown_since_s is None:
            self._unknown_since_s = now_s if code == _UNKNOWN else None
        is_unknown = self._unknown_since_s is not None and now_s - self._unknown_since_s >= _UNKNOWN_TIMEOUT_S
        if is_unknown or now_s - self._detached_since_s >= _REATTACH_TIMEOUT_S:
            detached_s = now_s - self._detached_since_s
            raise AttachmentLost(
                f"the store process at {self._client_address} has not reached this process' memory for {detached_s:.1f} s "
                f"(code {code}); this process has to be started again"
            )
        return False

    def _touch(self, call: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """Make a call that touches our memory; one without an answer ends when it surely is over, or when this process has to end."""
        started_s = self._clock.now()
        codes = call(*arguments)
        if set(codes) == {_RPC_FAILED} and self._clock.now() - started_s >= _NO_ANSWER_S:
            self._outlast()
        return codes

    def _outlast(self) -> None:
        log.error("the store process does not answer", address=self._client_address)
        self._has_no_answer = True
        give_up_s = self._clock.now() + _OUTLAST_TIMEOUT_S
        while self._peer.alive() and not (self._closed or self._is_given_up):
            if self._clock.now() >= give_up_s:
                return
            time.sleep(_OUTLAST_POLL_S)
        self._has_no_answer = self._peer.alive()

    def _in_batches(self, items: Sequence[_Item], call: Callable[[Sequence[_Item]], list[int]]) -> list[int]:
        """Codes of all items; when the store process is dead the rest fails without being tried."""
        codes: list[int] = []
        for batch in _batches(items):
            if self._closed or not self._peer.alive():
                break
            codes += call(batch)
            if all(code == _RPC_FAILED for code in codes[-len(batch) :]):
                break
        return codes + [_RPC_FAILED] * (len(items) - len(codes))

    def _places(self, keys: Sequence[str]) -> list[frozenset[str]]:
        return [places for batch in _batches(keys) for places in query_places(self._master_http, batch)]


async def attach(access: StoreAccessConfig, *, arena_bytes: int) -> MooncakeTransfer:
    """Attach to this host's store process, which may still be on its way up.

    Raises: ConfigError when none answers within a minute.
    """
    try:
        async with asyncio.timeout(_ATTACH_TIMEOUT_S):
            while True:
                try:
                    return await asyncio.to_thread(
                        MooncakeTransfer,
                        client_address=access.client_address,
                        master_http=access.master_http,
                        arena_bytes=arena_bytes,
                    )
                except StoreUnavailable as error:
                    log.info("waiting for the store", reason=str(error))
                    await asyncio.sleep(_ATTACH_RETRY_S)
    except TimeoutError as error:
        raise ConfigError(
            f"no store process answers at store.client_address={access.client_address} within {_ATTACH_TIMEOUT_S} s; "
            "start `python -m kvstore` on this host, or correct the address"
        ) from error


class _InFlight:
    """Counts entries on their way and makes callers wait above _MAX_BATCH."""

    def __init__(self) -> None:
        self._entries = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, entries: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._entries + entries <= _MAX_BATCH)
            self._entries += entries
        try:
            yield
        finally:
            with self._changed:
                self._entries -= entries
                self._changed.notify_all()


class _PeerWatch:
    """Tells within microseconds whether the store process lives: an idle connection to it breaks when it dies.

    The library itself notices only after four seconds of retries per calling thread. This can go when its calls take a
    deadline.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._endpoint = (host, int(port))
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def alive(self) -> bool:
        with self._lock:
            if self._socket is not None and not _is_broken(self._socket):
                return True
            self._drop()
            try:
                self._socket = socket.create_connection(self._endpoint, timeout=1.0)
            except OSError:
                return False
            self._socket.setblocking(False)
            return True

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _is_broken(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _load_library() -> Any:
    # The library reads its log level once, while it is loaded; its INFO lines are one per reconnect and per buffer.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    import mooncake.store

    return mooncake.store


def _batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (items[start : start + _MAX_BATCH] for start in range(0, len(items), _MAX_BATCH))


def _put_status(code: int) -> PutStatus:
    if code in (0, _EXISTS):
        return PutStatus.STORED_OR_OPEN
    return PutStatus.NO_SPACE if code == _NO_SPACE else PutStatus.FAILED


def _get_status(code: int, nbytes: int) -> GetStatus:
    if code == nbytes:
        return GetStatus.HIT
    return GetStatus.MISS if code in (_NOT_COMPLETE, _NOT_FOUND) else GetStatus.FAILED


def _remove_status(code: int) -> RemoveStatus:
    if code == 0:
        return RemoveStatus.REMOVED
    if code == _NOT_FOUND:
        return RemoveStatus.MISSING
    return RemoveStatus.LEASED if code in (_NOT_COMPLETE, _LEASED) else RemoveStatus.FAILED
