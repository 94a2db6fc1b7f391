"""A lock between processes of one host, for what only one of them should make, such as a file in the cache."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def locked(file: Path, *, timeout_s: float, error: Callable[[str], Exception]) -> Iterator[None]:
    """Hold an exclusive lock that dies with its process.

    Raises: what `error` makes of the reason when another process has held it for so long.
    """
    deadline_s = time.monotonic() + timeout_s
    with file.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as blocked:
                if time.monotonic() > deadline_s:
                    raise error(f"another process has held {file} for {timeout_s:.0f} s") from blocked
                time.sleep(_POLL_S)
        yield
