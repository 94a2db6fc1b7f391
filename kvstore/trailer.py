"""The last 64 bytes of every stored object, which prove whose bytes it holds.

Without them a forced removal or a restart of the store's master can hand a reader another object's bytes with success.

    magic 4 | version 4 | key digest 24 | layout digest 16 | payload length 8 | xxh3-64 of the payload 8     little-endian
"""

import ctypes
import hashlib
import struct

import xxhash

from kvstore.layout import TRAILER_BYTES

_TRAILER = struct.Struct("<4sI24s16sQQ")
_MAGIC = b"MTKV"
_VERSION = 1
assert _TRAILER.size == TRAILER_BYTES


def slot_at(address: int, object_bytes: int) -> memoryview:
    """The bytes of an object in an arena, writable."""
    return memoryview((ctypes.c_char * object_bytes).from_address(address)).cast("B")


def write_trailer(slot: memoryview, key: str, layout_digest: bytes) -> None:
    """Complete an object whose payload is written."""
    slot[-TRAILER_BYTES:] = _trailer_of(slot, key, layout_digest)


def is_intact(slot: memoryview, key: str, layout_digest: bytes) -> bool:
    """Whether key, layout, length and checksum agree with what the slot holds."""
    return bytes(slot[-TRAILER_BYTES:]) == _trailer_of(slot, key, layout_digest)


def _trailer_of(slot: memoryview, key: str, layout_digest: bytes) -> bytes:
    payload = slot[:-TRAILER_BYTES]
    return _TRAILER.pack(
        _MAGIC,
        _VERSION,
        hashlib.sha256(key.encode()).digest()[:24],
        layout_digest[:16],
        len(payload),
        xxhash.xxh3_64_intdigest(payload),
    )
