"""Reads sealed blocks back, for operators: is every object there, and is it what its trailer says?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from kvstore.block import BlockHash
from kvstore.keys import block_key
from kvstore.layout import KVLayout
from kvstore.trailer import is_intact, slot_at
from kvstore.transfer.base import Arena, GetItem, GetStatus, StoreUnavailable, Transfer


class BlockHealth(IntEnum):
    """From good to bad; a block is as bad as the worst of its objects."""

    INTACT = auto()
    UNREAD = auto()
    """The get failed, which says nothing about the bytes: a transfer that broke off, or another length."""
    DAMAGED = auto()
    """It is not what its trailer says."""
    MISSING = auto()
    """It is gone."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    num_blocks: int
    """Blocks that were read."""
    missing: list[BlockHash]
    damaged: list[BlockHash]
    unread: list[BlockHash]
    """Those whose gets failed, twice."""


def read_back(
    transfer: Transfer, arena: Arena, layout: KVLayout, hashes: Sequence[BlockHash], *, holder: str
) -> list[BlockHealth]:
    """Read all objects that `holder` has of these blocks through `arena`, which has room for one or more.

    Raises: StoreUnavailable when the store does not serve, which says nothing about the blocks.
    """
    digest = layout.digest()
    slot_bytes = layout.object_bytes(0)
    num_slots = arena.nbytes // slot_bytes
    places = [(position, group_idx) for position in range(len(hashes)) for group_idx in range(layout.num_groups)]
    found = [BlockHealth.INTACT] * len(hashes)
    for start in range(0, len(places), num_slots):
        batch = places[start : start + num_slots]
        items = [
            GetItem(
                block_key(digest, group_idx, hashes[position], holder),
                arena.address + slot_idx * slot_bytes,
                layout.object_bytes(group_idx),
            )
            for slot_idx, (position, group_idx) in enumerate(batch)
        ]
        statuses = transfer.get(items)
        if GetStatus.FAILED in statuses and not transfer.healthy():
            raise StoreUnavailable("the store stopped serving while blocks were read back; try again when it is ready")
        for (position, _), item, status in zip(batch, items, statuses, strict=True):
            found[position] = max(found[position], _health_of(item, status, digest))
    return found


def _health_of(item: GetItem, status: GetStatus, layout_digest: bytes) -> BlockHealth:
    if status is GetStatus.MISS:
        return BlockHealth.MISSING
    if status is GetStatus.FAILED:
        return BlockHealth.UNREAD
    is_good = is_intact(slot_at(item.address, item.nbytes), item.key, layout_digest)
    return BlockHealth.INTACT if is_good else BlockHealth.DAMAGED
