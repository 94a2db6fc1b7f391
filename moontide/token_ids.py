"""Token ids on the wire: uint32, little-endian, packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.uint32]


def pack_token_ids(token_ids: Sequence[int] | TokenArray) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_token_ids(data: bytes) -> TokenArray:
    """Raises: ValueError when the length is no multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"token_ids has {len(data)} bytes, which is no multiple of 4 (uint32, little-endian)")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
