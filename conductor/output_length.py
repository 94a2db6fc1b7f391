"""How long answers are, learned per tenant (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 256
"""The last answers that count."""
ENOUGH = 16
"""With fewer answers of a tenant those of all tenants count."""
PRIOR_TOKENS = 256
"""Expected of an answer before any was seen."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Of the length of an answer, in tokens."""

    mean: float
    overrun: float
    """How many more are expected of one that turns out longer than the mean."""


class _Window:
    """The last answers of one source, and the share of answers that are longer than so many tokens.

    An answer that its limit cut would have been longer, nobody knows how much. So the share is the product-limit estimate of
    Kaplan and Meier (1958), in which such an answer counts as one that is at least so long.
    """

    def __init__(self) -> None:
        self._answers: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        self._curve: _Curve | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, num_tokens: int, is_cut: bool) -> None:
        self._answers.append((num_tokens, is_cut))
        self._curve = None

    def expected(self, max_tokens: int) -> Expected:
        """Of answers that end at `max_tokens` at the latest."""
        if self._curve is None:
            self._curve = _curve(self._answers)
        mean = self._curve.mean_up_to(max_tokens)
        overrun = (mean - self._curve.mean_up_to(mean)) / self._curve.share_beyond(mean)
        return Expected(mean=max(1.0, mean), overrun=overrun)


class OutputLengths:
    def __init__(self) -> None:
        self._by_tenant: dict[str, _Window] = {}
        self._all = _Window()

    def observe(self, tenant: str, num_tokens: int, *, is_cut: bool) -> None:
        """An answer is complete. `is_cut`: its max_tokens ended it."""
        self._by_tenant.setdefault(tenant, _Window()).add(num_tokens, is_cut)
        self._all.add(num_tokens, is_cut)

    def expected(self, tenant: str, max_tokens: int) -> Expected:
        """Of an answer of the tenant; the mean is from 1 to `max_tokens`."""
        known = self._by_tenant.get(tenant)
        if known is None or len(known) < ENOUGH:
            known = self._all
        if len(known) < ENOUGH:
            mean = float(min(max_tokens, PRIOR_TOKENS))
            return Expected(mean=mean, overrun=min(mean, max_tokens - mean))
        return known.expected(max_tokens)


@dataclass(frozen=True)
class _Curve:
    lengths: NDArray[np.float64]
    """0, then those that were seen, ascending."""
    longer: NDArray[np.float64]
    """Share of answers that are longer than each."""
    means: NDArray[np.float64]
    """Mean of min(length, x) for each x: the area below the share of longer answers."""

    def mean_up_to(self, num_tokens: float) -> float:
        """Beyond the longest answer seen nothing is added, even where its limit cut it."""
        return float(np.interp(num_tokens, self.lengths, self.means))

    def share_beyond(self, num_tokens: float) -> float:
        """Above 0: of answers longer than any seen there is one too few to tell."""
        position = int(np.searchsorted(self.lengths, num_tokens, side="right")) - 1
        share = float(self.longer[position])
        return share if share > 0 else 1 / len(self.lengths)


def _curve(answers: Collection[tuple[int, bool]]) -> _Curve:
    lengths = np.array(
        sorted(answers), dtype=np.float64
    )  # at one length those that ended come before those that were cut
    at_risk = np.arange(len(lengths), 0, -1)
    longer = np.concatenate([[1.0], np.cumprod(1 - (1 - lengths[:, 1]) / at_risk)])
    points = np.concatenate([[0.0], lengths[:, 0]])
    return _Curve(points, longer, np.concatenate([[0.0], np.cumsum(np.diff(points) * longer[:-1])]))
