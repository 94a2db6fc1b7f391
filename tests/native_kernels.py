"""Whether the native kernels can be tested on this machine."""

from __future__ import annotations

import shutil

from model_runner.native.kernels import why_not_native


def why_absent() -> str | None:
    """Why this CPU or machine has none; None if it has, so that a compiler that refuses them fails the tests."""
    reason = why_not_native(dtype="bfloat16", device="cpu")
    if reason is None and shutil.which("g++") is None:
        return "there is no g++ on PATH"
    return reason
