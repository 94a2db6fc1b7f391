"""A prompt of token ids in a JSON body, read without making a Python object of each: a million ids would stop the event loop for 200 ms."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import numpy as np

from moontide.token_ids import TokenArray

MIN_BYTES = 64 * 1024
"""Of a body that is worth it."""
SLICE_BYTES = 64 * 1024
"""Read at a time, in well under a millisecond; then others have their turn."""

_KEY = b'"prompt"'
_BEFORE_IDS = re.compile(rb"\s*:\s*(?=\[\s*[0-9])")
_ALLOWED = b"0123456789, \t\r\n"


@dataclass(frozen=True)
class CutBody:
    """A body whose list of ids is replaced by the string `mark`."""

    rest: bytes
    mark: str
    ids: TokenArray


async def cut_ids(data: bytes) -> CutBody | None:
    """Take the ids out of a large body. None when there is no plain list of ids, or what looks like one needs a closer look."""
    if len(data) < MIN_BYTES:
        return None
    at = data.find(_KEY)
    before = _BEFORE_IDS.match(data, at + len(_KEY)) if at >= 0 else None
    end = data.find(b"]", before.end()) if before is not None else -1
    if before is None or end < 0:
        return None
    parts = []
    start = before.end() + 1
    while start < end:
        cut = data.find(b",", start + SLICE_BYTES, end)
        stop = end if cut < 0 else cut
        part = _ids(data[start:stop])
        if part is None:
            return None
        parts.append(part)
        start = stop + 1
        await asyncio.sleep(0)
    if data[end - 1 : end] == b",":
        return None
    mark = f"ids at {before.end()}"
    return CutBody(data[: before.end()] + f'"{mark}"'.encode() + data[end + 1 :], mark, np.concatenate(parts))


def _ids(text: bytes) -> TokenArray | None:
    """Of numbers with commas between them; None for anything else."""
    text = text.strip()
    if not text or text.endswith(b",") or text.translate(None, _ALLOWED):
        return None
    try:
        values = np.fromstring(text, np.int64, sep=",")
    except ValueError:
        return None
    if len(values) != text.count(b",") + 1 or values.max() >= 2**32:
        return None
    return values.astype(np.uint32)
