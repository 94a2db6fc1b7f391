"""A chart of a few lines over lengths that double, as SVG text (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
TEXT_SIZE = 13
COLORS = ("#1f6f8b", "#c8553d", "#7a9e3f", "#7d5ba6")
TICK = 0.1


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    x_values: Sequence[int]
    lines: Mapping[str, Sequence[float]]
    """By name, one value per x."""
    marks: Mapping[str, float]
    """Dashed horizontal lines by name."""

    def svg(self) -> str:
        values = [value for line in self.lines.values() for value in line] + [*self.marks.values(), 0.0]
        bottom, top = math.floor(min(values) / TICK) * TICK, math.ceil(max(values) / TICK) * TICK
        first, last = math.log2(self.x_values[0]), math.log2(self.x_values[-1])

        def x(value: int) -> float:
            return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(value) - first) / (last - first)

        def y(value: float) -> float:
            return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - bottom) / (top - bottom)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="{TEXT_SIZE}">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(LEFT, 24, self.title, size=15),
            _text(WIDTH / 2, HEIGHT - 12, self.x_label, anchor="middle"),
            f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, self.y_label, anchor="middle")}</g>',
        ]
        for tick in range(round((top - bottom) / TICK) + 1):
            value = bottom + tick * TICK
            parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#dddddd"))
            parts.append(_text(LEFT - 8, y(value) + 4, f"{100 * value:.0f} %", anchor="end"))
        parts += [_text(x(at), HEIGHT - BOTTOM + 20, _short(at), anchor="middle") for at in self.x_values]
        for name, value in self.marks.items():
            parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "#888888", dash="6 4"))
            parts.append(_text(WIDTH - RIGHT, y(value) - 5, name, anchor="end", color="#666666"))
        for idx, (name, values) in enumerate(self.lines.items()):
            color = COLORS[idx % len(COLORS)]
            points = [(x(at), y(value)) for at, value in zip(self.x_values, values, strict=True)]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{color}"/>' for px, py in points]
            middle_x, middle_y = points[len(points) // 2]
            marks_above = [y(value) for value in self.marks.values() if 0 <= middle_y - y(value) < 2 * TEXT_SIZE]
            parts.append(_text(middle_x, min([middle_y, *marks_above]) - 10, name, anchor="middle", color=color))
        return "\n".join([*parts, "</svg>", ""])


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, dash: str = "") -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{style}/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = "#222222", size: int = TEXT_SIZE
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>'
    )
