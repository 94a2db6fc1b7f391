"""A clock that moves only when told."""


class FakeClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds
