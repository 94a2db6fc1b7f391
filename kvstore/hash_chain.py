"""The hash chain of block.py compiled: one call per prompt instead of two objects per block, with the CPU's SHA instructions.

Where there is no compiler or no such CPU, `load_hash_chain` returns None and block.py computes the same with hashlib, in two to three
times the time (docs/decisions/011-prefix-index.md).
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from moontide.log import get_logger
from moontide.native_build import BuildFailed, build_library

SOURCE = Path(__file__).with_name("hash_chain.cpp")
_HASH_BYTES = 32

log = get_logger(__name__)

HashChain: TypeAlias = Callable[[npt.NDArray[np.uint32], int, bytes], list[bytes]]
"""(little-endian token ids without gaps, tokens per block, root) -> hashes of the full blocks. Releases Python's lock."""


@functools.cache
def load_hash_chain() -> HashChain | None:
    """The compiled chain, None where it does not run. The first call on a machine compiles, about a second."""
    try:
        library = ctypes.CDLL(str(build_library(SOURCE)))
    except (BuildFailed, OSError) as error:
        log.warning("block hashes are computed with hashlib", reason=str(error))
        return None
    if not library.moontide_can_hash_chain():
        log.warning("block hashes are computed with hashlib", reason="the CPU has no SHA instructions")
        return None
    function = library.moontide_hash_chain
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    function.restype = None

    def hash_chain(token_ids: npt.NDArray[np.uint32], block_tokens: int, root: bytes) -> list[bytes]:
        num_blocks = len(token_ids) // block_tokens
        hashes = np.empty(num_blocks, f"V{_HASH_BYTES}")
        function(root, token_ids.ctypes.data, block_tokens * 4, num_blocks, hashes.ctypes.data)
        found: list[bytes] = hashes.tolist()
        return found

    return hash_chain
