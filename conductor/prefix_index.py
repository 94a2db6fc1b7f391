"""Which store node holds which blocks, and how much of a prompt each of them has. May lag behind the truth: what a reservation says counts.

    segments of an open-addressing table             holder sets
    block -> | first 8 bytes of its hash | set id |  -> bit mask of places, counted        place -> node id

Equal sets are stored once. What a node holds is closed under "parent of" (stores evict leaves first), so along a prompt the holder
sets only shrink, and the end of each run of equal sets is found by bisection: O(sets * log blocks) probes. A node whose holdings are
forgotten leaves the masks, not the table: entries without holders are reused, or dropped when their segment is built anew.
Segments grow one at a time, so that no growth is felt. Two blocks with equal first bytes (2^-64) share an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.index import Removed, Stored

_NUM_SEGMENTS = 512
_MIN_PLACES = 16
_MAX_FILL = 0.75
_FILL_AFTER_GROWTH = 0.58
"""Of a large segment. A small one doubles: memory matters less there, and each growth has its fixed cost."""
_FILL_AFTER_DOUBLING = 0.375
_LARGE_BLOCKS = 4096
_HASH_WORDS = 4
"""Of 8 bytes; the first one is the key."""
_KEY = Struct("=Q")
_EMPTY = 0
"""Set id of nobody, which is also that of a free place; key 0 marks free places."""

Words: TypeAlias = npt.NDArray[np.uint64]


class PrefixIndex:
    def __init__(self) -> None:
        # Of unequal size from the start, so that they do not all grow at the same time.
        self._segments = [_Segment(_MIN_PLACES + _MIN_PLACES * i // _NUM_SEGMENTS) for i in range(_NUM_SEGMENTS)]
        self._sets = _HolderSets()
        self._nodes: list[str | None] = []
        """Node id by bit of a mask; None: free, or being filled by a Replacement."""
        self._num_held: list[int] = []
        """Blocks by bit."""
        self._free_bits: list[int] = []
        self._bits: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks over all nodes; one that two nodes hold counts twice."""
        return sum(self._num_held[bit] for bit in self._bits.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return sum(segment.keys.nbytes + segment.sets.nbytes for segment in self._segments)

    def num_blocks_of(self, node_id: str) -> int:
        bit = self._bits.get(node_id)
        return 0 if bit is None else self._num_held[bit]

    def apply(self, node_id: str, change: Stored | Removed) -> None:
        bit = self._bits.get(node_id)
        if bit is None:
            bit = self._bits[node_id] = self._new_bit()
            self._nodes[bit] = node_id
        if isinstance(change, Stored):
            self._add(bit, _keys(change.packed))
        else:
            self._remove(bit, _keys(change.packed))

    def reset(self, node_id: str) -> None:
        """Forget all that this node holds."""
        bit = self._bits.pop(node_id, None)
        if bit is not None:
            self._forget(bit)

    def hit_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Per store node, how many leading blocks of the chain it holds; nodes that hold none are left out."""
        hits: dict[str, int] = {}
        num_blocks = len(hashes)
        holders = self._holders(hashes[0]) if hashes else 0
        first = 0
        ends: list[tuple[int, int]] = [(num_blocks, 0)]
        # Positions behind the run that begins at `first`, nearest last, with their holders: one probe serves later runs too.
        while holders:
            while ends[-1][1] & holders == holders:
                first = ends.pop()[0]
            while (position := (first + ends[-1][0]) // 2) > first:
                found = self._holders(hashes[position])
                if found & holders == holders:
                    first = position
                else:
                    ends.append((position, found))
            first, found = ends[-1]
            self._tell(holders & ~found, first, hits)
            holders &= found
        return hits

    def replacement(self, node_id: str) -> Replacement:
        """All that a node holds, to be filled piece by piece while the index goes on to answer from what it had."""
        return Replacement(self, node_id, self._new_bit())

    def _holders(self, block_hash: bytes) -> int:
        key: int = _KEY.unpack_from(block_hash)[0]
        segment = self._segments[key % _NUM_SEGMENTS]
        keys = segment.key_at
        at = (key >> 32) * segment.num_places >> 32
        # Downwards, because index -1 is the last place.
        while (found := keys[at]) != key:
            if not found:
                return 0
            at -= 1
        return self._sets.masks[segment.set_at[at]]

    def _tell(self, mask: int, num_blocks: int, hits: dict[str, int]) -> None:
        """Write the hit of every node in `mask`."""
        nodes = self._nodes
        if mask.bit_count() > 8:
            packed = np.frombuffer(mask.to_bytes((len(nodes) + 7) // 8, "little"), dtype=np.uint8)
            bits = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
        else:
            bits = []
            while mask:
                bits.append((mask & -mask).bit_length() - 1)
                mask &= mask - 1
        for bit in bits:
            node_id = nodes[bit]
            if node_id is not None:
                hits[node_id] = num_blocks

    def _add(self, bit: int, keys: Words) -> None:
        segments, sets = self._segments, self._sets
        num_users = sets.num_users
        before, after = -1, -1
        num_added = 0
        homes, segment_idxs = (keys >> np.uint64(32)).tolist(), (keys % np.uint64(_NUM_SEGMENTS)).tolist()
        for key, home, segment_idx in zip(keys.tolist(), homes, segment_idxs, strict=True):
            segment = segments[segment_idx]
            key_at = segment.key_at
            at = home * segment.num_places >> 32
            while (found := key_at[at]) != key and found:
                at -= 1
            old = segment.set_at[at]
            if old != before:
                before, after = old, sets.joined(old, bit)
            if after == old:
                continue
            segment.set_at[at] = after
            num_added += 1
            num_users[after] += 1
            if old:
                num_users[old] -= 1
                if not num_users[old]:
                    sets.free(old)
                    before = -1
            if not found:
                key_at[at] = key
                segment.num_free -= 1
                if not segment.num_free:
                    segment.rebuild(sets)
                    before = -1
        self._num_held[bit] += num_added

    def _remove(self, bit: int, keys: Words) -> None:
        sets = self._sets
        num_removed = 0
        for key in keys.tolist():
            segment = self._segments[key % _NUM_SEGMENTS]
            key_at = segment.key_at
            at = (key >> 32) * segment.num_places >> 32
            while (found := key_at[at]) != key and found:
                at -= 1
            old = segment.set_at[at]
            new = sets.left(old, bit)
            if new == old:
                continue
            segment.set_at[at] = new
            num_removed += 1
            if new:
                sets.num_users[new] += 1
            sets.num_users[old] -= 1
            if not sets.num_users[old]:
                sets.free(old)
        self._num_held[bit] -= num_removed

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._nodes.append(None)
        self._num_held.append(0)
        return len(self._nodes) - 1

    def _forget(self, bit: int) -> None:
        self._sets.drop(bit)
        self._nodes[bit] = None
        self._num_held[bit] = 0
        self._free_bits.append(bit)

    def _take_over(self, bit: int, node_id: str) -> None:
        self.reset(node_id)
        self._bits[node_id] = bit
        self._nodes[bit] = node_id


class Replacement:
    """Ends with exactly one call of `commit` or `discard`."""

    def __init__(self, index: PrefixIndex, node_id: str, bit: int) -> None:
        self._index = index
        self._node_id = node_id
        self._bit = bit

    def add(self, packed: bytes) -> None:
        """Blocks that the node holds: hashes back to back, in any order."""
        self._index._add(self._bit, _keys(packed))

    def commit(self) -> None:
        """From now on the node holds what was added, and nothing else."""
        self._index._take_over(self._bit, self._node_id)

    def discard(self) -> None:
        self._index._forget(self._bit)


class _Segment:
    """Keys and set ids side by side; linear probing. The memoryviews are the quick way to single values."""

    __slots__ = ("key_at", "keys", "num_free", "num_places", "set_at", "sets")

    def __init__(self, num_places: int) -> None:
        self.keys: npt.NDArray[np.uint64]
        self.sets: npt.NDArray[np.uint32]
        self._allot(num_places)

    def _allot(self, num_places: int) -> None:
        self.num_places = num_places
        self.keys = np.zeros(num_places, np.uint64)
        self.sets = np.zeros(num_places, np.uint32)
        self.key_at = self.keys.data
        self.set_at = self.sets.data
        self.num_free = int(num_places * _MAX_FILL)
        """Places that may still be taken."""

    def rebuild(self, sets: _HolderSets) -> None:
        """Drop what nobody holds and make room for more."""
        held = np.flatnonzero(self.sets)
        keys, ids = self.keys[held], self.sets[held]
        if sets.forgotten:
            nobody = np.isin(ids, list(sets.forgotten))
            for set_id, count in zip(*np.unique(ids[nobody], return_counts=True), strict=True):
                sets.release(int(set_id), int(count))
            keys, ids = keys[~nobody], ids[~nobody]
        fill = _FILL_AFTER_GROWTH if len(keys) >= _LARGE_BLOCKS else _FILL_AFTER_DOUBLING
        self._allot(max(_MIN_PLACES, int(len(keys) / fill)))
        self.num_free -= len(keys)
        places = (keys >> np.uint64(32)) * np.uint64(self.num_places) >> np.uint64(32)
        at = places.astype(np.int64)
        while len(keys):
            free = self.keys[at] == 0
            self.keys[at[free]] = keys[free]
            placed = self.keys[at] == keys
            self.sets[at[placed]] = ids[placed]
            at, keys, ids = at[~placed] - 1, keys[~placed], ids[~placed]


class _HolderSets:
    """Sets of bits under small ids. An id lives as long as table entries use it, and may come to mean fewer holders than when it was
    made: two ids can stand for equal sets."""

    def __init__(self) -> None:
        self.masks = [0]
        self.num_users = [0]
        self.forgotten: set[int] = set()
        """Ids in use whose holders are all forgotten."""
        self._ids = {0: _EMPTY}
        self._free_ids: list[int] = []

    def joined(self, set_id: int, bit: int) -> int:
        """Id of the set with one holder more."""
        mask = self.masks[set_id]
        return set_id if mask >> bit & 1 else self._id_of(mask | 1 << bit)

    def left(self, set_id: int, bit: int) -> int:
        """Id of the set with one holder less."""
        mask = self.masks[set_id]
        return self._id_of(mask ^ 1 << bit) if mask >> bit & 1 else set_id

    def release(self, set_id: int, num_users: int) -> None:
        self.num_users[set_id] -= num_users
        if not self.num_users[set_id]:
            self.free(set_id)

    def free(self, set_id: int) -> None:
        """Nobody uses it any more."""
        mask = self.masks[set_id]
        if self._ids.get(mask) == set_id:
            del self._ids[mask]
        self.forgotten.discard(set_id)
        self.masks[set_id] = 0
        self._free_ids.append(set_id)

    def drop(self, bit: int) -> None:
        """Take one holder out of all sets."""
        for set_id, mask in enumerate(self.masks):
            if mask >> bit & 1:
                if self._ids.get(mask) == set_id:
                    del self._ids[mask]
                mask ^= 1 << bit
                self.masks[set_id] = mask
                self._ids.setdefault(mask, set_id)
                if not mask:
                    self.forgotten.add(set_id)

    def _id_of(self, mask: int) -> int:
        set_id = self._ids.get(mask)
        if set_id is None:
            if self._free_ids:
                set_id = self._free_ids.pop()
                self.masks[set_id] = mask
            else:
                set_id = len(self.masks)
                self.masks.append(mask)
                self.num_users.append(0)
            self._ids[mask] = set_id
        return set_id


def _keys(packed: bytes) -> Words:
    return np.frombuffer(packed, np.uint64)[::_HASH_WORDS]
