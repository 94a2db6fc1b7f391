from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.kv_event_formats import (
    HASH_SEED,
    ForeignHolder,
    ForeignRemoved,
    ForeignStored,
    UnreadableEvents,
    pack_batch,
    parse_batch,
    standard_event,
    standard_hashes,
)
from conductor.prefix_index import PrefixIndex
from kvstore.block import BlockHash
from kvstore.index import KvEntry, Removed, Stored

BLOCK_TOKENS = 4
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
LOCAL_1, LOCAL_2 = 14643705804678351452, 16777012769546811212
"""Hashes of the tokens 1..4 and 5..8 by compute_block_hash_for_seq of ai-dynamo-runtime 1.6.1."""


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def batch(*events: Any) -> bytes:
    packed: bytes = msgpack.packb([1.5, events, 0])
    return packed


def hits(index: PrefixIndex, *ids: int) -> dict[str, int]:
    return index.hit_blocks(standard_hashes(tokens(*ids), block_tokens=BLOCK_TOKENS))


def test_standard_hashes_roll_over_the_hashes_of_the_blocks() -> None:
    first, second = standard_hashes(tokens(1, 2, 3, 4, 5, 6, 7, 8, 9), block_tokens=4)
    assert int.from_bytes(first[:8], "little") == LOCAL_1
    expected = xxhash.xxh3_64_intdigest(struct.pack("<QQ", LOCAL_1, LOCAL_2), seed=HASH_SEED)
    assert int.from_bytes(second[:8], "little") == expected
    assert standard_hashes(tokens(5, 6, 7, 8), block_tokens=4, parent=LOCAL_1) == [second]


@pytest.mark.parametrize(
    "stored",
    [
        ["BlockStored", [11, 12], None, PROMPT, 4, None],
        ["BlockStored", [11, 12], None, PROMPT, 4, None, "GPU", None, "a field of a later version"],
        {
            "type": "BlockStored",
            "block_hashes": [11, 12],
            "parent_block_hash": None,
            "token_ids": PROMPT,
            "block_size": 4,
        },
        {"event_type": "stored", "seq_hashes": [11, 12], "parent_hash": None, "token_ids": PROMPT, "block_size": 4},
    ],
    ids=["array", "longer array", "map", "standard"],
)
def test_every_shape_of_a_stored_event_reads_the_same(stored: Any) -> None:
    assert parse_batch(batch(stored)) == [ForeignStored((11, 12), None, tuple(PROMPT), 4)]


def test_removed_and_cleared_leave_in_every_shape() -> None:
    index = PrefixIndex()
    holder = ForeignHolder(index, "e")
    for removal in (
        ["BlockRemoved", [b"x"]],
        {"event_type": "removed", "seq_hashes": [b"x"]},
        ["AllBlocksCleared"],
        {"event_type": "cleared"},
    ):
        for event in parse_batch(batch(["BlockStored", [b"x"], None, [1, 2, 3, 4], 4, None])):
            holder.apply(event)
        assert hits(index, 1, 2, 3, 4) == {"e": 1}
        for event in parse_batch(batch(removal)):
            holder.apply(event)
        assert hits(index, 1, 2, 3, 4) == {}


def test_adapters_are_left_out_and_the_standards_hashes_are_taken_as_they_are() -> None:
    assert parse_batch(batch(["BlockStored", [1], None, [1, 2, 3, 4], 4, 7])) == []
    index = PrefixIndex()
    holder = ForeignHolder(index, "e")
    own = [int.from_bytes(each[:8], "little") for each in standard_hashes(tokens(1, 2, 3, 4, 5, 6, 7, 8), block_tokens=4)]  # fmt: skip
    event = {"event_type": "stored", "seq_hashes": own, "parent_hash": None, "token_ids": None, "block_size": 4}
    holder.apply(parse_batch(batch(event))[0])
    assert hits(index, 1, 2, 3, 4, 5, 6, 7, 8) == {"e": 2}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([1.0]),
        batch(["BlockMoved", [1]]),
        batch(["BlockStored", [1], None, [1, 2, 3], 4, None]),
        batch(["BlockStored", [1]]),
        batch({"event_type": "stored", "seq_hashes": [1], "block_size": 0}),
        batch({"event_type": "stored"}),
        batch([]),
        batch(5),
    ],
)
def test_what_is_no_batch_is_unreadable(payload: bytes) -> None:
    with pytest.raises(UnreadableEvents, match="are no batch of KV events"):
        parse_batch(payload)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_foreign_holder_equals_a_brute_force_oracle(data: st.DataObject) -> None:
    """Prompts of one token per block over a small alphabet; an engine drops any block, and names blocks by what they are made of."""
    index = PrefixIndex()
    holder = ForeignHolder(index, "e")
    held: set[tuple[int, ...]] = set()
    prompts = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)

    def name(prefix: tuple[int, ...]) -> bytes:
        return bytes(prefix)

    for _ in range(data.draw(st.integers(1, 30))):
        prompt = data.draw(prompts)
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, len(prompt) - 1))
            prefixes = [prompt[: i + 1] for i in range(first, len(prompt))]
            holder.apply(
                ForeignStored(tuple(map(name, prefixes)), name(prompt[:first]) if first else None, prompt[first:], 1)
            )
            if not first or prompt[:first] in held:
                held.update(prefixes)
        else:
            holder.apply(ForeignRemoved((name(prompt),)))
            held = {each for each in held if each[: len(prompt)] != prompt}
    for prompt in [data.draw(prompts) for _ in range(10)] + list(held):
        expected = next((i for i in range(len(prompt)) if prompt[: i + 1] not in held), len(prompt))
        found = index.hit_blocks(standard_hashes(tokens(*prompt), block_tokens=1))
        assert found == ({"e": expected} if expected else {})
    assert index.num_blocks == len(held)


def test_our_entries_become_events_of_the_standard_that_read_back() -> None:
    a, b = BlockHash(bytes(range(32))), BlockHash(bytes(range(32, 64)))
    stored = standard_event(KvEntry("store-0", "b1", 3, Stored(a, b)), model_name="m", block_tokens=4)
    assert stored is not None
    assert (stored["event_id"], stored["backend_id"], stored["medium"]) == (3, "store-0", "cpu")
    assert stored["seq_hashes"] == [int.from_bytes(b[:8], "little")]
    assert stored["parent_hash"] == int.from_bytes(a[:8], "little")
    assert stored["token_ids"] is None
    told = standard_event(KvEntry("store-0", "b1", 3, Stored(a, b)), model_name="m", block_tokens=4, token_ids=[1, 2, 3, 4])  # fmt: skip
    removed = standard_event(KvEntry("store-0", "b1", 4, Removed(b)), model_name="m", block_tokens=4)
    cleared = standard_event(KvEntry("store-0", "b2", 0, None), model_name="m", block_tokens=4)
    assert told is not None
    assert removed is not None
    assert cleared is not None
    assert standard_event(KvEntry("store-0", "b2", 9, None), model_name="m", block_tokens=4) is None
    read = parse_batch(pack_batch([told, removed, cleared], timestamp_s=1.0))
    assert [type(each).__name__ for each in read] == ["ForeignStored", "ForeignRemoved", "ForeignCleared"]
