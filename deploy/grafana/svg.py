"""The few shapes of SVG that pictures of dashboards are made of (pure). Coordinates are pixels, rounded to tenths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float]
CHARACTER_WIDTH = 0.56
"""Of a usual sans-serif font, mean over text, as a share of its size."""
_LOOK = re.compile(r'style="([^"]*)"')
"""Texts are many and look alike in few ways: `document` makes classes of them."""


def text(
    x: float, y: float, content: str, *, size: float = 11, color: str = "#24292f", anchor: str = "", bold: bool = False
) -> str:
    look = f"font-size:{_short(size)}px;fill:{color}"
    look += f";text-anchor:{anchor}" if anchor else ""
    look += ";font-weight:600" if bold else ""
    return f'<text x="{_short(x)}" y="{_short(y)}" style="{look}">{escape(content)}</text>'


def line(start: Point, end: Point, *, color: str, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{_short(start[0])}" y1="{_short(start[1])}" x2="{_short(end[0])}" y2="{_short(end[1])}"'
    return f'<line {ends} stroke="{color}" stroke-width="{_short(width)}"{dashes}/>'


def box(x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "", radius: float = 0) -> str:
    attributes = f' stroke="{stroke}"' if stroke else ""
    attributes += f' rx="{_short(radius)}"' if radius else ""
    return f'<rect x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}" fill="{fill}"{attributes}/>'


def polyline(runs: Sequence[Sequence[Point]], *, color: str, width: float = 1.4) -> str:
    """One stroke through each run of points; a run of one point is a dot."""
    data = "".join(_run(points) for points in runs if points)
    return (
        f'<path d="{data}" fill="none" stroke="{color}" stroke-width="{_short(width)}" stroke-linecap="round"/>'
        if data
        else ""
    )


def area(runs: Sequence[tuple[Sequence[Point], Sequence[Point]]], *, color: str, opacity: float) -> str:
    """What lies between the upper and the lower edge of each run."""
    data = "".join(_run([*upper, *reversed(lower)]) + "z" for upper, lower in runs if len(upper) > 1)
    return f'<path d="{data}" fill="{color}" fill-opacity="{opacity:g}"/>' if data and opacity else ""


def cells(corners: Sequence[Point], *, width: float, height: float, color: str) -> str:
    """Boxes of equal size by their upper left corners: strokes as wide as a box is high."""
    if not corners:
        return ""
    wide = round(width * 10)
    data, x, y = "", 0, 0
    for left, top in sorted(corners, key=lambda corner: (corner[1], corner[0])):
        to_x, to_y = round(left * 10), round((top + height / 2) * 10)
        data += f"m{_step(to_x - x, to_y - y)}h{_tenths(wide)}"
        x, y = to_x + wide, to_y
    return f'<path d="{data}" stroke="{color}" stroke-width="{_short(height)}" fill="none"/>'


def rules(starts: Sequence[Point], ends: Sequence[Point], *, color: str) -> str:
    """Straight lines, one for each start and end."""
    return polyline([list(both) for both in zip(starts, ends, strict=True)], color=color, width=1)


def document(width: float, height: float, title: str, parts: Sequence[str], *, background: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_short(width)} {_short(height)}" width="{_short(width)}" '
        f'height="{_short(height)}" role="img" aria-label={quoteattr(title)} font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
    )
    body = "\n".join([box(0, 0, width, height, fill=background), *filter(None, parts)])
    looks = {look: f"t{idx}" for idx, look in enumerate(sorted(set(_LOOK.findall(body))))}
    style = "".join(f".{name}{{{look}}}" for look, name in looks.items())
    body = _LOOK.sub(lambda match: f'class="{looks[match.group(1)]}"', body)
    return f"{head}\n<style>{style}</style>\n{body}\n</svg>\n"


def fitted(content: str, width: float, size: float) -> str:
    """`content`, cut with an ellipsis where it is wider than `width`."""
    most = max(1, int(width / (size * CHARACTER_WIDTH)))
    return content if len(content) <= most else content[: most - 1].rstrip() + "…"


def wrapped(content: str, width: float, size: float, *, lines: int) -> list[str]:
    """At most `lines` lines of whole words; the last one is cut where there is more."""
    most = max(1, int(width / (size * CHARACTER_WIDTH)))
    result: list[str] = []
    words = content.split()
    while words and len(result) < lines - 1:
        taken = 1
        while taken < len(words) and len(" ".join(words[: taken + 1])) <= most:
            taken += 1
        result.append(" ".join(words[:taken]))
        words = words[taken:]
    return [*result, fitted(" ".join(words), width, size)] if words else result


def _run(points: Sequence[Point]) -> str:
    """Absolute start, then steps; points on the straight between their neighbours are left out."""
    places = [(round(x * 10), round(y * 10)) for x, y in points]
    kept = [
        place
        for idx, place in enumerate(places)
        if idx in (0, len(places) - 1) or not _is_straight(places[idx - 1], place, places[idx + 1])
    ]
    data = f"M{_tenths(kept[0][0])} {_tenths(kept[0][1])}"
    if len(kept) == 1:
        return data + "h.1"
    for before, after in pairwise(kept):
        dx, dy = after[0] - before[0], after[1] - before[1]
        if dy == 0:
            data += f"h{_tenths(dx)}"
        elif dx == 0:
            data += f"v{_tenths(dy)}"
        else:
            data += f"l{_step(dx, dy)}"
    return data


def _is_straight(before: tuple[int, int], here: tuple[int, int], after: tuple[int, int]) -> bool:
    return before[1] == here[1] == after[1] or before[0] == here[0] == after[0]


def _step(dx: int, dy: int) -> str:
    """A minus sign also separates."""
    return f"{_tenths(dx)}{'' if dy < 0 else ' '}{_tenths(dy)}"


def _tenths(value: int) -> str:
    return _short(value / 10)


def _short(value: float) -> str:
    number = f"{value:.1f}".removesuffix(".0")
    return number.replace("0.", ".", 1) if number.startswith(("0.", "-0.")) else number
