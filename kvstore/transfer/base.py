"""The seam between us and whatever moves bytes. `mooncake.py` is the real store, `memory.py` its in-process twin.

Both pass tests/contract/test_transfer_contract.py. All calls may come from any thread, block, and release the GIL while
bytes move. A key is written once: a put of a key that exists keeps the old bytes and succeeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from moontide.errors import ConfigError, TransferFailed


class StoreUnavailable(TransferFailed):
    """The store did not answer. That says nothing about what it holds."""


class AttachmentLost(TransferFailed):
    """The store process serves, but not this process: it took it for dead and let go of its memory. Only a new process helps."""


class PutStatus(Enum):
    STORED_OR_OPEN = auto()
    """Stored now or before, or another writer has the key open: only `exists` proves that the object is there."""
    NO_SPACE = auto()
    FAILED = auto()
    """Unknown: nothing, or all of it, may have arrived. Repeating the put is safe."""


class GetStatus(Enum):
    HIT = auto()
    MISS = auto()
    FAILED = auto()
    """The store is gone, or the object has another length. The slot holds anything."""


class RemoveStatus(Enum):
    REMOVED = auto()
    MISSING = auto()
    LEASED = auto()
    """Somebody reads it, or writes it: try again later."""
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class PutItem:
    key: str
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GetItem:
    key: str
    address: int
    nbytes: int
    """Exact length of the object."""


@dataclass(frozen=True, slots=True)
class Arena:
    """Zeroed memory that puts and gets may name, valid until the transfer is closed."""

    address: int
    nbytes: int
    buffer: memoryview
    """The same bytes, writable, format "B"."""


class Transfer(Protocol):
    @property
    def segment(self) -> str:
        """Name of this host's segment, as `put` takes it; "" when the store has one segment only."""
        ...

    def allocate(self, nbytes: int) -> Arena:
        """Return new registered memory. Raises: ConfigError if the arenas together exceed what the transfer was made for."""
        ...

    def put(self, items: Sequence[PutItem], *, segment: str = "") -> list[PutStatus]:
        """Store whole objects; one status per item. The bytes must not change until the call returns.

        They are put into `segment`, "" stands for this host's own; when that one is full, into any other (see `misplaced`).
        """
        ...

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        """Copy whole objects into arena memory; one status per item. Grants each object a lease: it is not removed meanwhile.

        Nobody writes into that memory after the return, whatever the statuses say.
        """
        ...

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Tell which objects can be read. Grants no lease. Raises: StoreUnavailable."""
        ...

    def misplaced(self, keys: Sequence[str]) -> list[str]:
        """Return those objects that are there, but not in this host's segment. Grants no lease. Raises: StoreUnavailable."""
        ...

    def remove(self, keys: Sequence[str]) -> list[RemoveStatus]:
        """Remove objects that nobody has a lease on; one status per key."""
        ...

    def healthy(self) -> bool:
        """Whether the store answers and reaches this process' memory, asked anew, in about a second at most.

        Raises: AttachmentLost when it will never reach that memory again.
        """
        ...

    def close(self) -> None:
        """Give all arenas back; nobody may touch them any more. Idempotent."""
        ...


def arena_with_room(transfer: Transfer, arena: Arena | None, *, needed_bytes: int, usual_bytes: int) -> Arena:
    """`arena`, or a new one when there is none yet that has room for `needed_bytes`. Raises: ConfigError, StoreUnavailable."""
    if arena is None or arena.nbytes < needed_bytes:
        return transfer.allocate(max(usual_bytes, needed_bytes))
    return arena


def check_arena_room(nbytes: int, *, used_bytes: int, arena_bytes: int) -> None:
    """Raises: ConfigError when `nbytes` more do not fit."""
    if nbytes < 1 or used_bytes + nbytes > arena_bytes:
        raise ConfigError(
            f"cannot allocate {nbytes} bytes of transfer memory: {used_bytes} of {arena_bytes} are in use; "
            f"make the transfer with arena_bytes >= {used_bytes + max(nbytes, 1)}"
        )
