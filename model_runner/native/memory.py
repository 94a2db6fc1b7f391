"""keep_freed_memory: the allocator keeps what a step frees for the next step."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_THRESHOLD_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let glibc give no freed memory back to the system; without glibc, do nothing.

    By default every tensor above 32 MiB is mapped anew in each step and smaller ones are after each trim, and the system
    zeroes each page at its first use: a tenth of the time of a step of 1,024 rows at hidden size 2,048.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
