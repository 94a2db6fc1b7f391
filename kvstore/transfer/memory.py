"""In-process twin of the real store: a dict with capacity and leases, for tests and for stages that share one process."""

import ctypes
import threading
from collections.abc import Sequence

from kvstore.transfer.base import (
    Arena,
    GetItem,
    GetStatus,
    PutItem,
    PutStatus,
    RemoveStatus,
    StoreUnavailable,
    check_arena_room,
)
from moontide.clock import Clock, MonotonicClock


class MemoryStore:
    """What all MemoryTransfers of one store share.

    `objects` is the store's content and may be changed by tests (lost or damaged objects); `available = False` plays a
    store that is down.
    """

    def __init__(self, capacity_bytes: int, *, lease_s: float = 5.0, clock: Clock | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.available = True
        self.objects: dict[str, bytes] = {}
        self._lease_s = lease_s
        self._clock: Clock = clock or MonotonicClock()
        self._leased_until: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(len(value) for value in self.objects.values())

    def put(self, key: str, value: bytes) -> PutStatus:
        with self._lock:
            if not self.available:
                return PutStatus.FAILED
            if key in self.objects:
                return PutStatus.STORED_OR_OPEN
            if self.used_bytes + len(value) > self.capacity_bytes:
                return PutStatus.NO_SPACE
            self.objects[key] = value
            return PutStatus.STORED_OR_OPEN

    def get(self, key: str) -> bytes | None:
        """Return the object, None for a miss; it is leased from now on. Raises: StoreUnavailable."""
        with self._lock:
            self._check_available()
            if key in self.objects:
                self._leased_until[key] = self._clock.now() + self._lease_s
            return self.objects.get(key)

    def contains(self, key: str) -> bool:
        """Whether the object is there; grants no lease. Raises: StoreUnavailable."""
        with self._lock:
            self._check_available()
            return key in self.objects

    def remove(self, key: str) -> RemoveStatus:
        with self._lock:
            if not self.available:
                return RemoveStatus.FAILED
            if key not in self.objects:
                return RemoveStatus.MISSING
            if self._leased_until.get(key, self._clock.now()) > self._clock.now():
                return RemoveStatus.LEASED
            del self.objects[key]
            self._leased_until.pop(key, None)
            return RemoveStatus.REMOVED

    def _check_available(self) -> None:
        if not self.available:
            raise StoreUnavailable("the in-memory store is switched off")


class MemoryTransfer:
    """Transfer over a MemoryStore."""

    def __init__(self, store: MemoryStore, *, arena_bytes: int = 1 << 40) -> None:
        self._store = store
        self._arena_bytes = arena_bytes
        self._arenas: list[ctypes.Array[ctypes.c_char]] = []

    @property
    def segment(self) -> str:
        return ""

    def allocate(self, nbytes: int) -> Arena:
        check_arena_room(nbytes, used_bytes=sum(len(a) for a in self._arenas), arena_bytes=self._arena_bytes)
        memory = ctypes.create_string_buffer(nbytes)
        self._arenas.append(memory)
        return Arena(ctypes.addressof(memory), nbytes, memoryview(memory).cast("B"))

    def put(self, items: Sequence[PutItem], *, segment: str = "") -> list[PutStatus]:
        return [self._store.put(item.key, ctypes.string_at(item.address, item.nbytes)) for item in items]

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        return [self._get_one(item) for item in items]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [self._store.contains(key) for key in keys]

    def misplaced(self, keys: Sequence[str]) -> list[str]:
        self.exists(keys)
        return []

    def remove(self, keys: Sequence[str]) -> list[RemoveStatus]:
        return [self._store.remove(key) for key in keys]

    def healthy(self) -> bool:
        return self._store.available

    def close(self) -> None:
        self._arenas.clear()

    def _get_one(self, item: GetItem) -> GetStatus:
        try:
            value = self._store.get(item.key)
        except StoreUnavailable:
            return GetStatus.FAILED
        if value is None:
            return GetStatus.MISS
        if len(value) != item.nbytes:
            return GetStatus.FAILED
        ctypes.memmove(item.address, value, len(value))
        return GetStatus.HIT
