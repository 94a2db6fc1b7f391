"""Token ids of short texts by the words that were seen before: looking words up takes a fifth of the time that encoding them does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from moontide.token_ids import TokenArray

MAX_KEPT_CHARS = 1 << 22
"""Text of the words that are kept, about a million tokens; beyond that all are forgotten."""
MAX_WORD_CHARS = 512
"""Longer ones are not kept."""

_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏЀ-ҁҊ-ӿ"
_GAP = re.compile(f" (?=[{_LETTERS}])(?<=[{_LETTERS}.,;:!?)] )")
"""The space that begins a word. Other places may be cut as well, but none of them is as frequent and as sure."""

Encode = Callable[[str], Sequence[int]]


class WordCache:
    """Right only for a tokenizer whose ids of a text are those of its words in a row (`cut_into_words`)."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._first: dict[str, bytes] = {}
        """Ids, as uint32 in a row, of words at the beginning of a text."""
        self._others: dict[str, bytes] = {}
        """Of words after a space, which is not part of the key."""
        self._num_chars = 0

    def ids(self, text: str) -> TokenArray:
        first, *others = _GAP.split(text)
        known = self._others.get
        parts = [known(word) or self._learn(word, " ", self._others) for word in others]
        head = self._first.get(first) or self._learn(first, "", self._first)
        return np.frombuffer(head + b"".join(parts), np.uint32)

    def _learn(self, word: str, before: str, kept: dict[str, bytes]) -> bytes:
        ids = np.asarray(self._encode(before + word), np.uint32).tobytes()
        if len(word) <= MAX_WORD_CHARS:
            if self._num_chars + len(word) > MAX_KEPT_CHARS:
                self._first.clear()
                self._others.clear()
                self._num_chars = 0
            self._num_chars += len(word)
            kept[word] = ids
        return ids


def cut_into_words(text: str) -> list[str]:
    """Each with the space before it. All joined are the text."""
    first, *others = _GAP.split(text)
    return [first, *(" " + word for word in others)]
