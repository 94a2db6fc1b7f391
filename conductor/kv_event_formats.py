"""KV events as other systems write and read them; pure.

read     a ZMQ batch [timestamp, [event, ...], dp rank] of vLLM or SGLang (BlockStored, BlockRemoved, AllBlocksCleared, each an array or a
         map), or of a publisher of the KV events standard (event_type stored | removed | cleared; RFC kvcache-ai/Mooncake#1527)
written  the standard's events, for what our store processes hold

Other engines name blocks in ways of their own. What they hold is kept under the standard's rolling hash, computed from the tokens in the
events, so that one prompt is looked up in all of them with one chain: XXH3-64 of (hash before, hash of the block's tokens).
Events of adapters (LoRA) are left out: their KV is another one under the same tokens.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from conductor.prefix_index import PrefixIndex
from kvstore.block import BLOCK_HASH_BYTES, BlockHash
from kvstore.index import KvEntry, Removed, Stored, split_hashes

HASH_SEED = 1337
"""The standard leaves it open; this is what its users have in common."""
_NO_PARENT = BlockHash(bytes(BLOCK_HASH_BYTES))
_VLLM_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
"""Order of what an event that is an array holds behind its name; more may follow."""
_STANDARD_TYPES = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}

Name = int | bytes
"""Of a block, as its engine calls it."""


class UnreadableEvents(ValueError):
    """A batch that is in none of the formats; says why."""


@dataclass(frozen=True)
class ForeignStored:
    names: tuple[Name, ...]
    parent: Name | None
    token_ids: tuple[int, ...]
    """Empty: the names are the standard's hashes."""
    block_tokens: int


@dataclass(frozen=True)
class ForeignRemoved:
    names: tuple[Name, ...]


@dataclass(frozen=True)
class ForeignCleared:
    pass


ForeignEvent = ForeignStored | ForeignRemoved | ForeignCleared


def parse_batch(payload: bytes) -> list[ForeignEvent]:
    """Raises: UnreadableEvents."""
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
        events = [_event(each) for each in batch[1]]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise UnreadableEvents(f"{len(payload)} bytes are no batch of KV events: {error!r}") from error
    return [event for event in events if event is not None]


def _event(raw: Any) -> ForeignEvent | None:
    if isinstance(raw, Mapping):
        kind = _STANDARD_TYPES.get(raw.get("event_type", ""), raw.get("type"))
        fields = dict(raw)
        fields.setdefault("block_hashes", raw.get("seq_hashes"))
        fields.setdefault("parent_block_hash", raw.get("parent_hash"))
    else:
        kind = raw[0]
        fields = dict(zip(_VLLM_FIELDS[kind], raw[1:], strict=False))
    if kind == "AllBlocksCleared":
        return ForeignCleared()
    names = tuple(fields["block_hashes"])
    if kind == "BlockRemoved":
        return ForeignRemoved(names)
    if kind != "BlockStored":
        raise ValueError(f"event type {kind!r}")
    if fields.get("lora_id") is not None or fields.get("lora_name") is not None:
        return None
    token_ids = tuple(fields.get("token_ids") or ())
    block_tokens = int(fields["block_size"])
    if block_tokens < 1 or (token_ids and len(token_ids) != len(names) * block_tokens):
        raise ValueError(f"{len(token_ids)} tokens for {len(names)} blocks of {block_tokens}")
    return ForeignStored(names, fields.get("parent_block_hash"), token_ids, block_tokens)


def standard_hashes(
    token_ids: npt.NDArray[np.uint32], *, block_tokens: int, parent: int | None = None
) -> list[BlockHash]:
    """Rolling hashes of the full blocks, in the first 8 bytes of each BlockHash; `parent` is that of the block before."""
    packed = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    step = block_tokens * 4
    hashes = []
    for start in range(0, len(packed) - step + 1, step):
        rolling = xxhash.xxh3_64_intdigest(packed[start : start + step], seed=HASH_SEED)
        if parent is not None:
            rolling = xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, rolling), seed=HASH_SEED)
        parent = rolling
        hashes.append(block_hash_of(rolling))
    return hashes


def block_hash_of(standard: int) -> BlockHash:
    """Under which an index keeps a hash of 8 bytes."""
    return BlockHash(standard.to_bytes(8, "little") + bytes(BLOCK_HASH_BYTES - 8))


def _standard_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


@dataclass
class _Block:
    hash: BlockHash
    parent: Name | None
    children: set[Name] = field(default_factory=set)


class ForeignHolder:
    """What one instance of another engine holds, written into an index of standard hashes.

    Engines drop a block while later blocks of its prefix stay: those are no hit any more, so they leave with it.
    """

    def __init__(self, index: PrefixIndex, instance_id: str) -> None:
        self._index = index
        self._instance_id = instance_id
        self._blocks: dict[Name, _Block] = {}
        self._uses: Counter[BlockHash] = Counter()
        """Names by hash: engines may know one block under several."""

    def apply(self, event: ForeignEvent) -> None:
        match event:
            case ForeignStored():
                self._store(event)
            case ForeignRemoved():
                self._remove(event.names)
            case ForeignCleared():
                self.clear()

    def clear(self) -> None:
        self._blocks.clear()
        self._uses.clear()
        self._index.reset(self._instance_id)

    def _store(self, event: ForeignStored) -> None:
        parent = self._blocks.get(event.parent) if event.parent is not None else None
        if event.parent is not None and parent is None:
            return  # what stands before it was never heard of, or is gone
        if event.token_ids:
            hashes = standard_hashes(
                np.array(event.token_ids, np.uint32),
                block_tokens=event.block_tokens,
                parent=None if parent is None else _standard_hash(parent.hash),
            )
        else:
            hashes = [block_hash_of(int.from_bytes(n, "big") if isinstance(n, bytes) else n) for n in event.names]
        before = event.parent
        for name, block_hash in zip(event.names, hashes, strict=True):
            if name not in self._blocks:
                self._blocks[name] = _Block(block_hash, before)
                self._uses[block_hash] += 1
                if before is not None:
                    self._blocks[before].children.add(name)
            before = name
        self._index.apply(self._instance_id, Stored(_NO_PARENT, b"".join(hashes)))

    def _remove(self, names: Iterable[Name]) -> None:
        stack, gone = list(names), []
        while stack:
            name = stack.pop()
            block = self._blocks.pop(name, None)
            if block is None:
                continue
            stack.extend(block.children)
            if block.parent in self._blocks:
                self._blocks[block.parent].children.discard(name)
            self._uses[block.hash] -= 1
            if not self._uses[block.hash]:
                del self._uses[block.hash]
                gone.append(block.hash)
        self._index.apply(self._instance_id, Removed(b"".join(gone)))


def standard_event(
    entry: KvEntry, *, model_name: str, block_tokens: int, token_ids: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """An entry of our stream as an event of the standard; None where it has none.

    Hashes are the first 8 bytes of ours and not the standard's: a consumer that hashes prompts needs the token ids.
    """
    event = {
        "event_id": entry.number,
        "timestamp": None,
        "model_name": model_name,
        "block_size": block_tokens,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": "default",
        "backend_id": entry.node_id,
        "medium": "cpu",
        "dp_rank": None,
    }
    match entry.change:
        case None:
            # A boot begins; a later mark changes nothing.
            return event | {"event_type": "cleared"} if entry.number == 0 else None
        case Removed(packed):
            hashes = [_standard_hash(each) for each in split_hashes(packed)]
            return event | {"event_type": "removed", "seq_hashes": hashes, "base_block_idx": None}
        case Stored(parent, packed):
            return event | {
                "event_type": "stored",
                "seq_hashes": [_standard_hash(each) for each in split_hashes(packed)],
                "base_block_idx": None,
                "parent_hash": _standard_hash(parent),
                "token_ids": None if token_ids is None else list(token_ids),
            }


def pack_batch(events: Sequence[Mapping[str, Any]], *, timestamp_s: float) -> bytes:
    packed: bytes = msgpack.packb([timestamp_s, list(events), None])
    return packed
