"""KV events in Valkey: every store process writes which blocks it holds, every conductor follows.

Stream `moontide:kv:events`, one entry per run of blocks; fields `t` (stored | removed | mark), `n` node id, `b` boot id, `e` number,
`p` parent hash, `h` hashes back to back. Entries hold hashes and never token ids. The changes of one boot are numbered from 1 on
without gaps, also those that could not be written; a `mark` changes nothing and says which number came last. So a follower sees what
it missed, and asks the store process itself for everything (KvStore.Snapshot). Followers may lag: what a reservation says is the truth.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
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
    parent: BlockHash
    packed: bytes
    """Hashes back to back; each one's parent is the one before."""


@dataclass(frozen=True, slots=True)
class Removed:
    packed: bytes
    """Hashes back to back."""


@dataclass(frozen=True, slots=True)
class KvEntry:
    """One entry of the stream."""

    node_id: str
    boot_id: str
    number: int
    change: Stored | Removed | None
    """None: a mark."""


Fields = dict[str, str | bytes | int]


class KvEventWriter:
    """Writes the events of one store process, in order. Never raises for a Valkey that is down: `heal` makes it good."""

    def __init__(self, config: RegistryConfig, *, node_id: str, boot_id: str) -> None:
        self._redis = _connect(config)
        self._node_id = node_id
        self._boot_id = boot_id
        self._lock = asyncio.Lock()
        self.number = 0
        """Changes told so far, whether they could be written or not."""
        self.in_sync = False
        """Whether everything told so far is in the stream."""

    async def stored(self, runs: Sequence[StoredRun]) -> None:
        await self._write([self._fields("stored", p=bytes(run.parent), h=b"".join(run.hashes)) for run in runs])

    async def removed(self, hashes: Sequence[BlockHash]) -> None:
        await self._write([self._fields("removed", h=b"".join(hashes))] if hashes else [])

    async def heal(self) -> None:
        """Write a mark if something was lost, here or in Valkey. Call it now and then."""
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
                await self._append([self._fields("mark", e=self.number)])
                await self._redis.set(_MARKER_PREFIX + self._node_id, self._boot_id)
            except (RedisError, OSError) as error:
                self._note(False, error)
                return
            self._note(True)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _write(self, changes: Sequence[Fields]) -> None:
        async with self._lock:
            numbered = [change | {"e": self.number + idx} for idx, change in enumerate(changes, 1)]
            self.number += len(changes)
            if not self.in_sync or not numbered:
                return
            try:
                await self._append(numbered)
            except (RedisError, OSError) as error:
                self._note(False, error)

    async def _append(self, entries: Sequence[Fields]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for entry in entries:
                pipeline.xadd(STREAM_KEY, entry, maxlen=_MAX_STREAM_ENTRIES, approximate=True)  # type: ignore[arg-type]
            await pipeline.execute()

    def _fields(self, kind: str, **more: bytes | int) -> Fields:
        fields: Fields = {"t": kind, "n": self._node_id, "b": self._boot_id}
        return fields | more

    def _note(self, in_sync: bool, error: Exception | None = None) -> None:
        if in_sync != self.in_sync:
            (log.info if in_sync else log.warning)("kv events", in_sync=in_sync, reason=error or "none")
        self.in_sync = in_sync


class KvEvents:
    """What a conductor reads: the entries that come after it was opened."""

    def __init__(self, config: RegistryConfig) -> None:
        self._redis = _connect(config)
        self._last_id: bytes | str = ""
        self.connected = False
        """Whether the last read reached Valkey."""

    async def open(self) -> None:
        """Note where the stream ends now; waits for a Valkey that is away."""
        while not self._last_id:
            try:
                newest: Any = await self._redis.xrevrange(STREAM_KEY, count=1)
                self._last_id = newest[0][0] if newest else "0-0"
                self._note(True)
            except (RedisError, OSError) as error:
                await self._failed(error)
            raise_if_cancelled()

    async def follow(self) -> AsyncIterator[KvEntry]:
        """Yield what was written since `open`, then new entries as they come; ends only by cancelling.

        While Valkey is away nothing comes; afterwards it goes on where it stopped.
        """
        while True:
            try:
                reply = await self._redis.xread({STREAM_KEY: self._last_id}, count=_ENTRIES_PER_READ, block=_BLOCK_MS)
            except (RedisError, OSError) as error:
                await self._failed(error)
                continue
            raise_if_cancelled()
            self._note(True)
            for entry_id, fields in _entries(reply):
                self._last_id = entry_id
                try:
                    entry = _entry(fields)
                except (KeyError, ValueError) as error:
                    log.warning("unreadable kv event left out", error=repr(error))
                    continue
                yield entry

    async def close(self) -> None:
        await self._redis.aclose()

    async def _failed(self, error: Exception) -> None:
        self._note(False, error)
        raise_if_cancelled()
        await asyncio.sleep(_RETRY_S)

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


def _entry(fields: dict[bytes, bytes]) -> KvEntry:
    """Raises: KeyError, ValueError for an entry that is not as the module says."""
    kind, node_id, boot_id = (fields[name].decode() for name in (b"t", b"n", b"b"))
    number = int(fields[b"e"])
    if kind == "mark":
        return KvEntry(node_id, boot_id, number, None)
    packed = fields[b"h"]
    check_packed(packed)
    if kind == "removed":
        return KvEntry(node_id, boot_id, number, Removed(packed))
    if kind != "stored":
        raise ValueError(f"event type {kind!r}")
    return KvEntry(node_id, boot_id, number, Stored(BlockHash(fields[b"p"]), packed))


def check_packed(packed: bytes) -> None:
    """Raises: ValueError when the length is no multiple of a hash's."""
    if len(packed) % BLOCK_HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {BLOCK_HASH_BYTES}-byte block hashes")


def split_hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """Raises: ValueError when the length is no multiple of a hash's."""
    check_packed(packed)
    return tuple(BlockHash(packed[at : at + BLOCK_HASH_BYTES]) for at in range(0, len(packed), BLOCK_HASH_BYTES))


def _connect(config: RegistryConfig) -> redis.Redis:
    """Raw bytes in and out; every operation ends within two seconds."""
    return redis.Redis.from_url(config.url, socket_timeout=2.0, socket_connect_timeout=2.0, retry_on_timeout=False)
