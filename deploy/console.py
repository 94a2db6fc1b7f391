"""What a person sees in the terminal: progress on standard error, results on standard output."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress


class Console:
    """Progress lines with the time since the start. Colours only where a terminal shows them.

    A terminal or pipe that is gone is no reason to fail: progress and errors are then told to nobody.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def step(self, line: str) -> None:
        stamp = f"[{time.monotonic() - self._began_s:5.1f} s]"
        self._tell(f"{self._dim(stamp)} {line}")

    def heading(self, line: str) -> None:
        bold = f"\033[1m{line}\033[0m" if sys.stdout.isatty() else line
        print(f"\n{bold}", flush=True)

    def error(self, line: str) -> None:
        self._tell(f"moontide: {line}")

    @staticmethod
    def _tell(line: str) -> None:
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    @staticmethod
    def width() -> int:
        return min(160, shutil.get_terminal_size((100, 24)).columns)

    @staticmethod
    def _dim(text: str) -> str:
        return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text
