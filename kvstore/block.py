"""Names of blocks: a SHA-256 chain over token ids, equal on every host and in every run.

A block is `block_tokens` consecutive tokens. Its hash covers the whole prefix, the layout of the stored bytes and the
cache salt, so equal hashes mean interchangeable KV, and two tenants with different salts never share a block.
"""

import hashlib
from typing import NewType, cast

import numpy as np
import numpy.typing as npt

from kvstore.hash_chain import load_hash_chain

BlockHash = NewType("BlockHash", bytes)
"""32 bytes, SHA-256."""

BLOCK_HASH_BYTES = 32
_ROOT_TAG = b"moontide block root 1"


def root_hash(layout_digest: bytes, cache_salt: str) -> BlockHash:
    """Return the parent of every first block that is stored in this layout under this salt ("" is the shared one)."""
    return BlockHash(hashlib.sha256(_ROOT_TAG + layout_digest + cache_salt.encode()).digest())


def hash_blocks(token_ids: npt.NDArray[np.uint32], *, block_tokens: int, root: BlockHash) -> list[BlockHash]:
    """Return the hashes of the full blocks of a prompt, in order; a last block that is not full has none.

    Args:
        token_ids: [n] uint32, the prompt from its first token on.
        block_tokens: tokens in one block.
        root: `root_hash` of the layout and the salt.
    """
    assert token_ids.ndim == 1, f"need [n], got {token_ids.shape}"
    assert token_ids.dtype == np.uint32, f"need uint32, got {token_ids.dtype}"
    token_ids = np.ascontiguousarray(token_ids, dtype="<u4")
    hash_chain = load_hash_chain() or _hash_chain
    return cast(list[BlockHash], hash_chain(token_ids, block_tokens, root))


def _hash_chain(token_ids: npt.NDArray[np.uint32], block_tokens: int, root: bytes) -> list[bytes]:
    packed = token_ids.tobytes()
    step = block_tokens * 4
    hashes = []
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = hashlib.sha256(parent + packed[start : start + step]).digest()
        hashes.append(parent)
    return hashes
