"""Values as Grafana writes them in the units that the dashboards use, and round numbers for axes (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DURATIONS_S = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_COUNTS = ((1e12, " Tri"), (1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1.0, ""))
_BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"), (1.0, ""))
_RATES = {"reqps": " req/s", "cps": " c/s"}


def format_value(value: float, unit: str) -> str:
    """`value` with its unit; `unit` is one of Grafana's ids, `si:NAME` among them."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "percentunit":
        return f"{_digits(100 * value)}%"
    if unit == "s":
        return _scaled(value, _DURATIONS_S, " {}") if value else "0 s"
    if unit == "bytes":
        return _scaled(value, _BINARY, " {}B")
    if unit == "Bps":
        return _scaled(value, _DECIMAL, " {}B/s")
    if unit.startswith("si:"):
        return _scaled(value, _DECIMAL, " {}" + unit.removeprefix("si:"))
    if unit == "short":
        return _scaled(value, _COUNTS, "{}")
    return _digits(value) + _RATES.get(unit, "")


def ticks(low: float, high: float, *, unit: str, most: int = 5) -> list[float]:
    """At most `most` round values from `low` or below to `high` or above, with equal steps."""
    base = 2.0 if unit == "bytes" else 10.0
    rough = max(high - low, 1e-12) / (most - 1)
    if base == 2.0:
        step = 2.0 ** math.ceil(math.log2(rough))
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * 0.999999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [idx * step for idx in range(first, max(last, first + 1) + 1)]


def _scaled(value: float, scales: Sequence[tuple[float, str]], suffix: str) -> str:
    size = abs(value)
    factor, prefix = next(((factor, prefix) for factor, prefix in scales if size >= factor * 0.9995), scales[-1])
    return _digits(value / factor) + suffix.format(prefix)


def _digits(value: float) -> str:
    """Three digits that matter."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
