"""Blocks on the local SSD: append-only segment files in one directory. Knows bytes and names; nothing of pools and transfers.

    lock                         held while a process uses the directory
    segment-000000000042.kv      file magic 8 | record | record | ...
    record                       magic 4 | layout digest 32 | hash 32 | parent 32 | payload length 8 | xxh3-64 of the payload 8
                                 | xxh3-64 of all before 8 | payload: the objects of all layer groups back to back

It is a cache: nothing is ever synced. A killed process loses nothing, because the kernel has the bytes; what a power loss tears
is found by the checksums and is a miss. The index lives in memory and is built from the headers alone at start. The cap is kept
by dropping whole segments, the one that was used least recently first; a segment's last write or read outlives restarts as its mtime.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvstore.block import BlockHash
from moontide.errors import ConfigError
from moontide.log import get_logger

SEGMENT_BYTES = 256 << 20
"""Largest segment, if it holds more than one block: 4 TB are 16,000 files."""
MIN_SEGMENTS = 8
"""A full tier drops at most this share of what it holds at a time."""
_FILE_MAGIC = b"MTSSD001"
_RECORD_MAGIC = b"MTBR"
_NAMES = struct.Struct("<4s32s32s32sQQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER_BYTES = _NAMES.size + _CHECKSUM.size
_SEGMENT_NAME = re.compile(r"segment-(\d{12})\.kv")
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SsdStats:
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    num_damaged: int
    """Records that were found damaged, since the start."""


@dataclass(frozen=True, slots=True)
class SsdBlock:
    hash: BlockHash
    parent: BlockHash
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Segment:
    name: str
    size: int
    hashes: set[BlockHash] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    segment: _Segment
    offset: int
    layout_digest: bytes
    parent: BlockHash
    payload_bytes: int


class SsdTier:
    """Thread safe. Calls block for the disk, except those that say that they do not."""

    def __init__(self, directory_fd: int, lock_fd: int, *, capacity_bytes: int) -> None:
        """For `open`, which takes the lock."""
        self._directory_fd = directory_fd
        self._lock_fd = lock_fd
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = min(SEGMENT_BYTES, capacity_bytes // MIN_SEGMENTS)
        self._used_bytes = 0
        self._num_damaged = 0
        self._records: dict[BlockHash, _Record] = {}
        self._segments: OrderedDict[str, _Segment] = OrderedDict()
        """Least recently used first."""
        self._next_number = 0
        self._active: tuple[_Segment, int] | None = None
        """Segment that takes the next record, and its file descriptor."""
        self._index_lock = threading.Lock()
        # Guards all of the above but the active segment, and is never held while the disk works.
        self._write_lock = threading.Lock()
        # One writer at a time. Taken before the other one.

    @classmethod
    def open(cls, directory: Path, *, capacity_bytes: int) -> "SsdTier":
        """Take the directory, which is made if it is not there, and find what an earlier run left in it.

        Files of another version, and what a crash cut short, are removed; files that do not look like ours are not touched.
        Raises: ConfigError if another process uses the directory, or if it cannot be used.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                lock_fd = _take_lock(directory, directory_fd)
            except BaseException:
                os.close(directory_fd)
                raise
            tier = cls(directory_fd, lock_fd, capacity_bytes=capacity_bytes)
            try:
                tier._load()
            except BaseException:
                tier.close()
                raise
        except OSError as error:
            raise ConfigError(f"kvstore.ssd_dir={directory} cannot be used: {error}; choose another one") from error
        return tier

    def close(self) -> None:
        """Let go of the directory; what is in it stays."""
        with self._write_lock:
            self._close_active()
            os.close(self._lock_fd)
            os.close(self._directory_fd)

    def put_block(
        self, layout_digest: bytes, block_hash: BlockHash, parent: BlockHash, objects: Sequence[memoryview]
    ) -> None:
        """Keep the objects of one block; nothing is written if it is here already.

        Raises: OSError if the disk fails or is full, or the block alone is larger than the capacity; it is not here then.
        """
        header = _header(layout_digest, block_hash, parent, objects)
        payload_bytes = _total_bytes(objects)
        with self._write_lock:
            if not self.touch([block_hash]):
                return
            segment, fd = self._segment_for(len(header) + payload_bytes)
            try:
                num_written = os.pwritev(fd, [header, *objects], segment.size)
                if num_written != len(header) + payload_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._give_up_active()
                raise
            with self._index_lock:
                self._add(block_hash, _Record(segment, segment.size, layout_digest, parent, payload_bytes))
                self._segments.move_to_end(segment.name)

    def read_block(self, layout_digest: bytes, block_hash: BlockHash, into: Sequence[memoryview]) -> bool:
        """Read the objects of one block into buffers of exactly their sizes.

        Returns: False if it is not here, or is damaged: it is forgotten and counted then. The buffers hold anything.
        """
        with self._index_lock:
            record = self._records.get(block_hash)
        if record is None or record.layout_digest != layout_digest or record.payload_bytes != _total_bytes(into):
            return False
        header = bytearray(_HEADER_BYTES)
        try:
            fd = os.open(record.segment.name, os.O_RDONLY | _OPEN_FLAGS, dir_fd=self._directory_fd)
            try:
                num_read = os.preadv(fd, [header, *into], record.offset)
                with contextlib.suppress(OSError):
                    os.utime(fd)
            finally:
                os.close(fd)
        except OSError:
            num_read = 0
        is_intact = num_read == _HEADER_BYTES + record.payload_bytes and bytes(header) == _header(
            layout_digest, block_hash, record.parent, into
        )
        if is_intact:
            self.touch([block_hash])
        else:
            self._forget(block_hash, record)
        return is_intact

    def chain_hit(self, layout_digest: bytes, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, are here without a gap. Does not block."""
        with self._index_lock:
            for position, block_hash in enumerate(hashes):
                record = self._records.get(block_hash)
                if record is None or record.layout_digest != layout_digest:
                    return position
        return len(hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Count blocks as used now; returns those that are not here. Does not block."""
        with self._index_lock:
            missing = [block_hash for block_hash in hashes if block_hash not in self._records]
            for name in {self._records[h].segment.name: None for h in hashes if h in self._records}:
                self._segments.move_to_end(name)
        return missing

    def blocks(self) -> list[SsdBlock]:
        """Everything that is here. Does not block."""
        with self._index_lock:
            return [SsdBlock(h, record.parent, record.payload_bytes) for h, record in self._records.items()]

    def stats(self) -> SsdStats:
        """Does not block."""
        with self._index_lock:
            return SsdStats(
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes,
                num_blocks=len(self._records),
                num_damaged=self._num_damaged,
            )

    def _load(self) -> None:
        found: list[tuple[int, str]] = []
        for name in sorted(os.listdir(self._directory_fd)):
            match = _SEGMENT_NAME.fullmatch(name)
            if match is None:
                continue
            self._next_number = int(match[1]) + 1
            status = os.stat(name, dir_fd=self._directory_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, name))
        for _, name in found:
            # In the order of numbers: of two records of one block the later one counts.
            try:
                self._load_segment(name)
            except OSError as error:
                log.warning("ssd segment cannot be read", name=name, error=str(error))
        for _, name in sorted(found):
            if name in self._segments:
                self._segments.move_to_end(name)
        with self._index_lock:
            dropped = self._shrink_to(self._capacity_bytes)
        self._unlink(dropped)

    def _load_segment(self, name: str) -> None:
        fd = os.open(name, os.O_RDWR | _OPEN_FLAGS, dir_fd=self._directory_fd)
        try:
            size = os.fstat(fd).st_size
            segment = _Segment(name, len(_FILE_MAGIC))
            if os.pread(fd, len(_FILE_MAGIC), 0) == _FILE_MAGIC:
                self._segments[name] = segment
                self._used_bytes += segment.size
                while (header := _parse_header(os.pread(fd, _HEADER_BYTES, segment.size))) is not None:
                    block_hash, layout_digest, parent, payload_bytes = header
                    if segment.size + _HEADER_BYTES + payload_bytes > size:
                        break
                    self._add(block_hash, _Record(segment, segment.size, layout_digest, parent, payload_bytes))
            if segment.hashes and segment.size < size:
                log.warning("ssd segment is cut", name=name, from_bytes=size, to_bytes=segment.size)
                os.ftruncate(fd, segment.size)
        finally:
            os.close(fd)
        if not segment.hashes:
            if self._segments.pop(name, None) is not None:
                self._used_bytes -= segment.size
            self._unlink([segment])

    def _segment_for(self, nbytes: int) -> tuple[_Segment, int]:
        """The segment that takes a record of `nbytes`, after making room for it."""
        if len(_FILE_MAGIC) + nbytes > self._capacity_bytes:
            raise OSError(
                errno.ENOSPC, f"a block takes {nbytes} bytes, kvstore.ssd_bytes={self._capacity_bytes}; raise it"
            )
        if self._active is not None and self._active[0].size + nbytes > self._segment_bytes:
            self._close_active()
        needed = nbytes if self._active is not None else len(_FILE_MAGIC) + nbytes
        with self._index_lock:
            dropped = self._shrink_to(self._capacity_bytes - needed)
        self._unlink(dropped)
        if self._active is None:
            self._active = self._new_segment()
        return self._active

    def _new_segment(self) -> tuple[_Segment, int]:
        segment = _Segment(f"segment-{self._next_number:012}.kv", len(_FILE_MAGIC))
        self._next_number += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS
        fd = os.open(segment.name, flags, 0o600, dir_fd=self._directory_fd)
        try:
            if os.pwrite(fd, _FILE_MAGIC, 0) != len(_FILE_MAGIC):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(fd)
            self._unlink([segment])
            raise
        with self._index_lock:
            self._segments[segment.name] = segment
            self._used_bytes += segment.size
        return segment, fd

    def _give_up_active(self) -> None:
        """After a failed write: cut off what it left, so that the cap holds, and go on in another file."""
        assert self._active is not None
        segment, fd = self._active
        with contextlib.suppress(OSError):
            os.ftruncate(fd, segment.size)
        self._close_active()
        if not segment.hashes:
            with self._index_lock:
                self._drop(segment)
            self._unlink([segment])

    def _close_active(self) -> None:
        if self._active is not None:
            os.close(self._active[1])
            self._active = None

    def _shrink_to(self, nbytes: int) -> list[_Segment]:
        """Drop the least recently used segments until at most `nbytes` are used; returns them, for `_unlink`."""
        dropped: list[_Segment] = []
        active = self._active[0] if self._active is not None else None
        for segment in [segment for segment in self._segments.values() if segment is not active]:
            if self._used_bytes <= nbytes:
                break
            self._drop(segment)
            dropped.append(segment)
        return dropped

    def _drop(self, segment: _Segment) -> None:
        del self._segments[segment.name]
        self._used_bytes -= segment.size
        for block_hash in segment.hashes:
            del self._records[block_hash]

    def _unlink(self, segments: Sequence[_Segment]) -> None:
        # A reader that has the file open goes on to its end; one that comes later finds no file.
        for segment in segments:
            with contextlib.suppress(OSError):
                os.unlink(segment.name, dir_fd=self._directory_fd)

    def _add(self, block_hash: BlockHash, record: _Record) -> None:
        older = self._records.get(block_hash)
        if older is not None:
            # A damaged record that was forgotten and kept anew.
            older.segment.hashes.discard(block_hash)
        self._records[block_hash] = record
        nbytes = _HEADER_BYTES + record.payload_bytes
        record.segment.hashes.add(block_hash)
        record.segment.size += nbytes
        self._used_bytes += nbytes

    def _forget(self, block_hash: BlockHash, record: _Record) -> None:
        with self._index_lock:
            # Dropped meanwhile: a miss, and no damage.
            if self._records.get(block_hash) is not record:
                return
            del self._records[block_hash]
            record.segment.hashes.discard(block_hash)
            self._num_damaged += 1
        log.warning("ssd block is damaged", block=block_hash.hex(), segment=record.segment.name, offset=record.offset)


def _take_lock(directory: Path, directory_fd: int) -> int:
    lock_fd = os.open("lock", os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600, dir_fd=directory_fd)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
        os.close(lock_fd)
        raise ConfigError(
            f"kvstore.ssd_dir={directory} is in use by process {holder or '(unknown)'}; give each store process a directory "
            "of its own"
        ) from error
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _total_bytes(objects: Sequence[memoryview]) -> int:
    return sum(len(part) for part in objects)


def _header(layout_digest: bytes, block_hash: BlockHash, parent: BlockHash, objects: Sequence[memoryview]) -> bytes:
    checksum = xxhash.xxh3_64()
    for part in objects:
        checksum.update(part)
    names = _NAMES.pack(_RECORD_MAGIC, layout_digest, block_hash, parent, _total_bytes(objects), checksum.intdigest())
    return names + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(names))


def _parse_header(header: bytes) -> tuple[BlockHash, bytes, BlockHash, int] | None:
    """(hash, layout digest, parent, payload length); None where no whole header is."""
    if len(header) < _HEADER_BYTES:
        return None
    names = header[: _NAMES.size]
    magic, layout_digest, block_hash, parent, payload_bytes, _ = _NAMES.unpack(names)
    if magic != _RECORD_MAGIC or header[_NAMES.size :] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(names)):
        return None
    return BlockHash(block_hash), layout_digest, BlockHash(parent), payload_bytes
