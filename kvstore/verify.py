"""Reads sealed blocks back, for operators: is every object there, and is it what its trailer says?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvstore.block import BlockHash
from kvstore.keys import block_key
from kvstore.layout import KVLayout
from kvstore.trailer import is_intact, slot_at
from kvstore.transfer.base import Arena, GetItem, GetStatus, StoreUnavailable, Transfer


class BlockHealth(Enum):
    INTACT = auto()
    MISSING = auto()
    """At least one of its objects is gone."""
    DAMAGED = auto()
    """At least one of its objects cannot be read, or is not what its trailer says."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    num_blocks: int
    """Blocks that were read."""
    missing: list[BlockHash]
    damaged: list[BlockHash]


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
            if status is GetStatus.MISS:
                found[position] = BlockHealth.MISSING
            elif found[position] is BlockHealth.INTACT and not (
                status is GetStatus.HIT and is_intact(slot_at(item.address, item.nbytes), item.key, digest)
            ):
                found[position] = BlockHealth.DAMAGED
    return found
