"""Stop strings, matched on text across token boundaries. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string appears; holds back what might be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._longest = max((len(s) for s in self._stop), default=0)
        self.matched: str | None = None
        """The stop string that was found; nothing passes after it."""

    def feed(self, text: str) -> str:
        """Add text; returns the part that is final. A match cuts before the stop string that begins first."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return text[:at]
        cut = len(text) - self._num_held(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The answer is over: returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for num in range(min(len(text), self._longest - 1), 0, -1):
            if any(s.startswith(text[-num:]) for s in self._stop):
                return num
        return 0
