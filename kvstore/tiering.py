"""Moves blocks between the pool and the SSD of one store process.

    sealed, or hit and not on the SSD --> waiting --> copied behind everybody's back          evicted: its bytes may go at once
    reserved, on the SSD and not in the pool --> read, put, seen to exist --> the node seals it

Blocks are copied soon after they are sealed and not when they are evicted: reading an object keeps it from being removed for the
length of a read lease (seconds), and who waits for room would wait for that. Right behind the seal the decode instance reads the
block anyway. It also means that a killed store process loses little.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from kvstore.block import BlockHash
from kvstore.layout import KVLayout
from kvstore.metrics import SsdMetrics
from kvstore.pool import PoolState, object_keys
from kvstore.ssd import SsdTier
from kvstore.trailer import is_intact, slot_at, write_trailer
from kvstore.transfer.base import Arena, GetItem, GetStatus, PutItem, Transfer, arena_with_room
from moontide.clock import Clock
from moontide.errors import MoontideError
from moontide.log import get_logger

_BATCH_BYTES = 32 << 20
"""Transfer memory for each direction, taken when it is needed first; a larger block gets as much as it needs."""
_MAX_WAIT_S = 10.0
"""A block that waited longer is not copied: the disk is too slow, and a late read would hold up the block's eviction."""
_PAUSE_S = 10.0
"""Nothing is copied for so long after a disk error."""

log = get_logger(__name__)


class SsdMover:
    """Belongs to the event loop of its node; the blocking halves run in worker threads."""

    def __init__(self, pool: PoolState, transfer: Transfer, ssd: SsdTier, *, clock: Clock, metrics: SsdMetrics) -> None:
        self.ssd = ssd
        self.metrics = metrics
        self._pool = pool
        self._transfer = transfer
        self._clock = clock
        self._waiting: dict[BlockHash, float] = {}
        """Sealed blocks of the pool that are to be copied, and since when, oldest first."""
        self._paused_until_s = clock.now()
        self._num_damaged = 0
        """Of the tier, as far as the metrics tell."""
        self._keep_arena: Arena | None = None
        self._fetch_arena: Arena | None = None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def used(self, hashes: Iterable[BlockHash]) -> None:
        """Sealed blocks were made or hit: they are hot on the SSD too, and those that are not there will be copied."""
        now = self._clock.now()
        missing = self.ssd.touch(list(hashes))
        if now >= self._paused_until_s:
            for block_hash in missing:
                self._waiting.setdefault(block_hash, now)

    def evicted(self, hashes: Sequence[BlockHash]) -> None:
        """Blocks left the pool: what is not on the SSD is lost."""
        for block_hash in hashes:
            self._waiting.pop(block_hash, None)
        self.metrics.not_kept.inc(len(self.ssd.touch(hashes)))

    async def keep_next(self) -> None:
        """Copy the block that waits longest to the SSD, unless that makes no sense any more."""
        block_hash, since_s = next(iter(self._waiting.items()))
        del self._waiting[block_hash]
        found = self._pool.find_sealed(block_hash)
        if found is None or self._clock.now() - since_s > _MAX_WAIT_S:
            return
        parent, layout = found
        # The SSD is closed under "parent of" when a block comes: one whose prefix is not there would never be a hit.
        if self._pool.find_sealed(parent) is not None and self.ssd.touch([parent]):
            return
        try:
            if await asyncio.to_thread(self._copy, block_hash, parent, layout):
                self.metrics.kept.inc()
        except OSError as error:
            self._waiting.clear()
            self._paused_until_s = self._clock.now() + _PAUSE_S
            log.warning("ssd takes no blocks", error=str(error), pause_s=_PAUSE_S)

    def fetch(self, layout: KVLayout, hashes: Sequence[BlockHash]) -> int:
        """Bring leading blocks back whose room is reserved. Blocks the thread; one thread at a time.

        Returns: how many of `hashes`, from the first on, were put and seen to exist: at most one batch, so call again.
        """
        try:
            arena = self._fetch_arena = self._arena_for(layout, self._fetch_arena)
            digest = layout.digest()
            num_blocks = self.ssd.chain_hit(digest, hashes[: arena.nbytes // layout.block_bytes])
            objects: list[PutItem] = []
            for position in range(num_blocks):
                block = self._objects_at(arena.address + position * layout.block_bytes, hashes[position], layout)
                slots = [slot_at(item.address, item.nbytes) for item in block]
                if not self.ssd.read_block(digest, hashes[position], slots):
                    break
                for item, slot in zip(block, slots, strict=True):
                    # Under another node id the objects have other keys.
                    write_trailer(slot, item.key, digest)
                objects += block
            self._transfer.put(objects)
            seen = self._transfer.exists([item.key for item in objects])
        except MoontideError as error:
            log.warning("blocks cannot be brought back from the ssd", error=str(error))
            return 0
        return sum(itertools.takewhile(bool, seen)) // layout.num_groups

    def show(self) -> None:
        stats = self.ssd.stats()
        self.metrics.capacity_bytes.set(stats.capacity_bytes)
        self.metrics.used_bytes.set(stats.used_bytes)
        self.metrics.blocks.set(stats.num_blocks)
        self.metrics.damaged.inc(stats.num_damaged - self._num_damaged)
        self._num_damaged = stats.num_damaged

    def _copy(self, block_hash: BlockHash, parent: BlockHash, layout: KVLayout) -> bool:
        """Whether all objects were there, intact, and are on the SSD now. Raises: OSError when the disk fails."""
        try:
            arena = self._keep_arena = self._arena_for(layout, self._keep_arena)
        except MoontideError as error:
            raise OSError(str(error)) from error
        digest = layout.digest()
        items = self._objects_at(arena.address, block_hash, layout)
        statuses = self._transfer.get([GetItem(item.key, item.address, item.nbytes) for item in items])
        slots = [slot_at(item.address, item.nbytes) for item in items]
        if any(status is not GetStatus.HIT for status in statuses) or not all(
            is_intact(slot, item.key, digest) for slot, item in zip(slots, items, strict=True)
        ):
            return False
        self.ssd.put_block(digest, block_hash, parent, slots)
        return True

    def _objects_at(self, address: int, block_hash: BlockHash, layout: KVLayout) -> list[PutItem]:
        """The objects of a block, back to back from `address` on."""
        items = []
        for group_idx, key in enumerate(object_keys(block_hash, layout, holder=self._pool.node_id)):
            nbytes = layout.object_bytes(group_idx)
            items.append(PutItem(key, address, nbytes))
            address += nbytes
        return items

    def _arena_for(self, layout: KVLayout, arena: Arena | None) -> Arena:
        return arena_with_room(self._transfer, arena, needed_bytes=layout.block_bytes, usual_bytes=_BATCH_BYTES)
