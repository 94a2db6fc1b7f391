"""KV events in Valkey: every store process writes which blocks it holds, every conductor follows.

Stream `moontide:kv:events`, one entry per run of blocks; fields `t` (stored | removed | reset), `n` node id, `b` boot id,
`p` parent hash, `h` hashes back to back. Entries hold hashes and never token ids. A store process that cannot write, or
finds that Valkey lost its data, starts over with `reset` and everything it holds. Followers may lag: what a reservation
says is the truth.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from kvstore.block import BLOCK_HASH_BYTES, BlockHash
from kvstore.pool import StoredRun
from moontide.config import RegistryConfig
from moontide.log import get_logger
from moontide.registry import raise_if_cancelled

STREAM_KEY = "moontide:kv:events"
_MARKER_PREFIX = "moontide:kv:boot:"
_MAX_STREAM_ENTRIES = 100_000
_ENTRIES_PER_READ = 512
_BLOCK_MS = 1000
"""Longest wait of one read; below the client's socket timeout."""
_RETRY_S = 0.5

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    node_id: str
    parent: BlockHash
    hashes: tuple[BlockHash, ...]
    """Each one's parent is the one before."""


@dataclass(frozen=True, slots=True)
class Removed:
    node_id: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """All that this node had is gone; what it has now follows."""

    node_id: str


KvEvent = Stored | Removed | Reset
Entry = dict[str, str | bytes]


class KvEventWriter:
    """Writes the events of one store process, in order. Never raises for a Valkey that is down: `heal` makes it good."""

    def __init__(
        self, config: RegistryConfig, *, node_id: str, boot_id: str, snapshot: Callable[[], list[StoredRun]]
    ) -> None:
        """`snapshot` returns everything that is sealed at the moment of the call."""
        self._redis = _connect(config)
        self._node_id = node_id
        self._boot_id = boot_id
        self._snapshot = snapshot
        self._lock = asyncio.Lock()
        self.in_sync = False
        """Whether everything said so far is in the stream."""

    async def stored(self, runs: Sequence[StoredRun]) -> None:
        await self._write([self._stored_entry(run) for run in runs])

    async def removed(self, hashes: Sequence[BlockHash]) -> None:
        await self._write([self._entry("removed", h=b"".join(hashes))] if hashes else [])

    async def heal(self) -> None:
        """Write `reset` and everything anew if something was lost, here or in Valkey. Call it now and then."""
        try:
            # Outside of the lock: nobody who seals or evicts waits for a Valkey that is away.
            marker = await self._redis.get(_MARKER_PREFIX + self._node_id)
        except (RedisError, OSError) as error:
            self._note(False, error)
            return
        if self.in_sync and marker == self._boot_id.encode():
            return
        async with self._lock:
            try:
                entries = [self._entry("reset"), *map(self._stored_entry, self._snapshot())]
                await self._append(entries)
                await self._redis.set(_MARKER_PREFIX + self._node_id, self._boot_id)
            except (RedisError, OSError) as error:
                self._note(False, error)
                return
            self._note(True)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _write(self, entries: Sequence[Entry]) -> None:
        async with self._lock:
            if not self.in_sync or not entries:
                return
            try:
                await self._append(entries)
            except (RedisError, OSError) as error:
                self._note(False, error)

    async def _append(self, entries: Sequence[Entry]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for entry in entries:
                pipeline.xadd(STREAM_KEY, entry, maxlen=_MAX_STREAM_ENTRIES, approximate=True)  # type: ignore[arg-type]
            await pipeline.execute()

    def _stored_entry(self, run: StoredRun) -> Entry:
        return self._entry("stored", p=bytes(run.parent), h=b"".join(run.hashes))

    def _entry(self, kind: str, **fields: bytes) -> Entry:
        entry: Entry = {"t": kind, "n": self._node_id, "b": self._boot_id}
        return entry | fields

    def _note(self, in_sync: bool, error: Exception | None = None) -> None:
        if in_sync != self.in_sync:
            (log.info if in_sync else log.warning)("kv events", in_sync=in_sync, reason=error or "none")
        self.in_sync = in_sync


class KvEvents:
    """What a conductor reads."""

    def __init__(self, config: RegistryConfig) -> None:
        self._redis = _connect(config)
        self.connected = False
        """Whether the last read reached Valkey."""

    async def follow(self) -> AsyncIterator[KvEvent]:
        """Yield all events that the stream still holds, then new ones as they come; ends only by cancelling.

        While Valkey is away nothing comes; afterwards it goes on where it stopped. A node's new boot id yields a Reset
        first, and events of an earlier boot that come later are left out.
        """
        boots = _Boots()
        last_id: str | bytes = "0-0"
        while True:
            try:
                reply = await self._redis.xread({STREAM_KEY: last_id}, count=_ENTRIES_PER_READ, block=_BLOCK_MS)
            except (RedisError, OSError) as error:
                self._note(False, error)
                raise_if_cancelled()
                await asyncio.sleep(_RETRY_S)
                continue
            raise_if_cancelled()
            self._note(True)
            for entry_id, fields in _entries(reply):
                last_id = entry_id
                for event in boots.events(fields):
                    yield event

    async def close(self) -> None:
        await self._redis.aclose()

    def _note(self, connected: bool, error: Exception | None = None) -> None:
        if connected != self.connected:
            (log.info if connected else log.warning)("kv events followed", connected=connected, reason=error or "none")
        self.connected = connected


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of our one stream: a list of pairs under RESP2, a dict of lists under RESP3."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [entry for chunk in reply[STREAM_KEY.encode()] for entry in chunk]
    return list(reply[0][1])


class _Boots:
    """Which boot of each node counts."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}
        self._retired: dict[str, set[str]] = {}

    def events(self, fields: dict[bytes, bytes]) -> list[KvEvent]:
        try:
            kind, node_id, boot_id = (fields[name].decode() for name in (b"t", b"n", b"b"))
            event = _event(kind, node_id, fields)
        except (KeyError, ValueError) as error:
            log.warning("unreadable kv event left out", error=repr(error))
            return []
        if boot_id in self._retired.get(node_id, ()):
            return []
        known = self._current.get(node_id)
        self._current[node_id] = boot_id
        if known is None or known == boot_id:
            return [event]
        self._retired.setdefault(node_id, set()).add(known)
        return [event] if isinstance(event, Reset) else [Reset(node_id), event]


def _event(kind: str, node_id: str, fields: dict[bytes, bytes]) -> KvEvent:
    if kind == "reset":
        return Reset(node_id)
    hashes = split_hashes(fields[b"h"])
    if kind == "removed":
        return Removed(node_id, hashes)
    if kind != "stored":
        raise ValueError(f"event type {kind!r}")
    return Stored(node_id, BlockHash(fields[b"p"]), hashes)


def split_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """Raises: ValueError when the length is no multiple of a hash's."""
    if len(packed) % BLOCK_HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {BLOCK_HASH_BYTES}-byte block hashes")
    return tuple(BlockHash(packed[at : at + BLOCK_HASH_BYTES]) for at in range(0, len(packed), BLOCK_HASH_BYTES))


def _connect(config: RegistryConfig) -> redis.Redis:
    """Raw bytes in and out; every operation ends within two seconds."""
    return redis.Redis.from_url(config.url, socket_timeout=2.0, socket_connect_timeout=2.0, retry_on_timeout=False)
