from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block
from kvstore.block import _hash_chain, hash_blocks, root_hash
from kvstore.hash_chain import load_hash_chain

ROOT = root_hash(b"layout", "")


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def test_a_hash_is_sha256_of_parent_and_little_endian_tokens() -> None:
    first, second = hash_blocks(tokens(1, 2, 3, 4), block_tokens=2, root=ROOT)
    assert first == hashlib.sha256(ROOT + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    assert second == hashlib.sha256(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()


def test_the_root_is_the_same_on_every_host_and_run() -> None:
    assert root_hash(b"layout", "salt") == hashlib.sha256(b"moontide block root 1layoutsalt").digest()


def test_layout_and_salt_separate_chains() -> None:
    roots = {root_hash(layout, salt) for layout in (b"a" * 32, b"b" * 32) for salt in ("", "tenant-1", "tenant-2")}
    assert len(roots) == 6


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (8, 2), (11, 2)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_blocks: int) -> None:
    assert len(hash_blocks(np.arange(num_tokens, dtype=np.uint32), block_tokens=4, root=ROOT)) == num_blocks


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(ids: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(ids) // 4 * 4 - 1))
    changed = list(ids)
    changed[position] ^= 1
    before = hash_blocks(tokens(*ids), block_tokens=4, root=ROOT)
    after = hash_blocks(tokens(*changed), block_tokens=4, root=ROOT)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [idx < position // 4 for idx in range(len(before))]


def test_strided_input_hashes_like_its_copy() -> None:
    wide = np.arange(64, dtype=np.uint32)
    assert hash_blocks(wide[::2], block_tokens=8, root=ROOT) == hash_blocks(wide[::2].copy(), block_tokens=8, root=ROOT)


@pytest.mark.parametrize("num_blocks", [0, 1, 5])
@pytest.mark.parametrize("block_tokens", [1, 5, 7, 8, 9, 14, 22, 23, 24, 64, 255, 256])
def test_the_compiled_chain_equals_hashlib_for_every_length_of_a_tail(block_tokens: int, num_blocks: int) -> None:
    compiled = load_hash_chain()
    if compiled is None:
        pytest.skip("no compiler, or a CPU without SHA instructions")
    ids = np.random.default_rng(block_tokens).integers(0, 2**32, num_blocks * block_tokens + 3, dtype=np.uint32)
    assert compiled(ids, block_tokens, ROOT) == _hash_chain(ids, block_tokens, ROOT)


def test_without_a_compiler_hashlib_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hash_blocks(tokens(1, 2, 3, 4), block_tokens=2, root=ROOT)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(block, "load_hash_chain", load_hash_chain.__wrapped__)
    assert hash_blocks(tokens(1, 2, 3, 4), block_tokens=2, root=ROOT) == expected
