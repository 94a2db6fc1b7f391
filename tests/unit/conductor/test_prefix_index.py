from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.prefix_index import PrefixIndex
from kvstore.block import BlockHash
from kvstore.index import Removed, Stored

ROOT, A, B, C = (BlockHash(bytes([i]) * 32) for i in range(4))


def stored(*hashes: bytes) -> Stored:
    return Stored(ROOT, b"".join(hashes))


def removed(*hashes: bytes) -> Removed:
    return Removed(b"".join(hashes))


def index_of(**held: Sequence[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for node_id, hashes in held.items():
        index.apply(node_id, stored(*hashes))
    return index


def chain(name: str, num_blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(num_blocks)]


def test_hit_is_the_longest_run_from_the_start() -> None:
    index = index_of(x=[A, B], y=[A, B, C])
    assert index.hit_blocks([A, B, C]) == {"x": 2, "y": 3}
    assert index.hit_blocks([A, B]) == {"x": 2, "y": 2}
    assert index.hit_blocks([C]) == {"y": 1}
    assert index.hit_blocks([]) == {}
    assert index.num_blocks == 5


def test_stored_twice_and_removed_twice_count_once() -> None:
    index = index_of(x=[A, B, C])
    index.apply("x", stored(A, B))
    assert index.num_blocks == 3
    index.apply("x", removed(C, B))
    index.apply("x", removed(C, B))
    index.apply("new", removed(A))
    assert index.hit_blocks([A, B, C]) == {"x": 1}
    assert index.num_blocks == 1


def test_a_reset_forgets_one_node() -> None:
    index = index_of(x=[A, B, C], y=[A, B])
    index.reset("x")
    index.reset("unknown")
    assert index.hit_blocks([A, B, C]) == {"y": 2}
    index.apply("x", stored(A))
    assert index.hit_blocks([A, B, C]) == {"x": 1, "y": 2}
    assert index.num_blocks == 3


def test_a_replacement_shows_only_when_it_is_whole() -> None:
    index = index_of(x=[A, B], y=[A])
    replacement = index.replacement("x")
    replacement.add(A + B + C)
    assert index.hit_blocks([A, B, C]) == {"x": 2, "y": 1}
    assert index.num_blocks == 3
    replacement.commit()
    assert index.hit_blocks([A, B, C]) == {"x": 3, "y": 1}
    index.replacement("x").commit()
    assert index.hit_blocks([A, B, C]) == {"y": 1}
    given_up = index.replacement("x")
    given_up.add(A)
    given_up.discard()
    assert index.hit_blocks([A, B, C]) == {"y": 1}
    assert index.num_blocks == 1


def test_a_thousand_holders_each_have_their_own_length() -> None:
    blocks = chain("hot", 512)
    index = PrefixIndex()
    for i in range(1000):
        index.apply(f"node {i}", stored(*blocks[: 1 + i % 512]))
    assert index.hit_blocks(blocks) == {f"node {i}": 1 + i % 512 for i in range(1000)}


def test_memory_stays_bounded_when_everything_is_replaced_again_and_again() -> None:
    index = index_of(x=chain("0", 10_000))
    before = index.num_bytes
    for turn in range(1, 5):
        fresh = chain(str(turn), 10_000)
        if turn % 2:
            index.reset("x")
        else:
            index.apply("x", removed(*chain(str(turn - 1), 10_000)))
        index.apply("x", stored(*fresh))
        assert index.hit_blocks(fresh) == {"x": 10_000}
        assert index.hit_blocks(chain("0", 1)) == {}
    assert index.num_bytes < 2 * before


CHAINS = [chain("p", 3) + chain(name, 9) for name in "abcdef"]
"""Prompts that share their first blocks."""


def held_prefix(blocks: Sequence[bytes], held: set[bytes]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_index_equals_a_brute_force_oracle(data: st.DataObject) -> None:
    index, truth = PrefixIndex(), dict[str, set[bytes]]()
    filling = index.replacement("n0")
    for _ in range(data.draw(st.integers(1, 25))):
        node_id = data.draw(st.sampled_from(["n0", "n1", "n2"]))
        held = truth.setdefault(node_id, set())
        blocks = data.draw(st.sampled_from(CHAINS))
        length = data.draw(st.integers(0, len(blocks)))
        match data.draw(st.sampled_from(["store", "store", "evict", "reset", "replace", "fill"])):
            case "store":
                index.apply(node_id, stored(*blocks[:length]))
                held.update(blocks[:length])
            case "evict":
                # Leaf first: what another prompt still needs stays.
                needed = {b for other in CHAINS for b in other[: held_prefix(other, held)] if other is not blocks}
                gone = [b for b in reversed(blocks[length:]) if b in held - needed]
                index.apply(node_id, removed(*gone))
                held.difference_update(gone)
            case "reset":
                index.reset(node_id)
                held.clear()
            case "replace":
                replacement = index.replacement(node_id)
                replacement.add(b"".join(blocks[:length]))
                replacement.commit()
                truth[node_id] = set(blocks[:length])
            case "fill":
                filling.add(b"".join(blocks[:length]))
    for blocks in CHAINS:
        expected = {node_id: held_prefix(blocks, held) for node_id, held in truth.items()}
        assert index.hit_blocks(blocks) == {node_id: hit for node_id, hit in expected.items() if hit}
    assert index.num_blocks == sum(len(held) for held in truth.values())
