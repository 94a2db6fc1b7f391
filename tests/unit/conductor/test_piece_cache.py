from __future__ import annotations

import numpy as np

from conductor.piece_cache import PieceCache


def test_the_piece_that_was_not_used_for_longest_goes_first() -> None:
    ids = np.zeros(10, np.uint32)
    cache = PieceCache(max_bytes=3 * (4 * 5 + ids.nbytes))
    for piece in ("first", "other", "third"):
        cache.put(piece, ids)
    assert cache.get("first") is ids
    cache.put("forth", ids)
    assert cache.get("other") is None
    assert all(cache.get(piece) is ids for piece in ("first", "third", "forth"))
    cache.check_invariants()


def test_piece_larger_than_the_cache_is_not_kept() -> None:
    cache = PieceCache(max_bytes=100)
    cache.put("x" * 100, np.zeros(1, np.uint32))
    assert cache.get("x" * 100) is None
    cache.check_invariants()


def test_putting_a_piece_twice_counts_it_once() -> None:
    cache = PieceCache(max_bytes=1000)
    for _ in range(2):
        cache.put("piece", np.zeros(3, np.uint32))
    cache.check_invariants()
