"""Pieces of text with their token ids, so that a conversation that comes back is not encoded again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from moontide.token_ids import TokenArray


class PieceCache:
    """Least recently used first out, bounded by bytes. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[str, TokenArray] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, piece: str) -> TokenArray | None:
        with self._lock:
            ids = self._pieces.get(piece)
            if ids is not None:
                self._pieces.move_to_end(piece)
            return ids

    def put(self, piece: str, ids: TokenArray) -> None:
        with self._lock:
            if piece in self._pieces:
                return
            self._pieces[piece] = ids
            self._num_bytes += _num_bytes(piece, ids)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _num_bytes(*self._pieces.popitem(last=False))

    def check_invariants(self) -> None:
        assert self._num_bytes == sum(_num_bytes(piece, ids) for piece, ids in self._pieces.items())
        assert self._num_bytes <= self._max_bytes


def _num_bytes(piece: str, ids: TokenArray) -> int:
    """One to four bytes a character; four is never too little."""
    return 4 * len(piece) + ids.nbytes
