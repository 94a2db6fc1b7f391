"""A dashboard and the answers to its queries as one picture: panels in their grid, drawn much as Grafana draws them (pure).

    answers -> series of each panel -> SVG of each panel -> SVG of the board
What is not there: what needs a mouse, and options that no dashboard of ours sets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from deploy.grafana import svg
from deploy.grafana.queries import default_values, panels, substitute
from deploy.grafana.units import format_value, ticks

COLUMN_WIDTH, ROW_HEIGHT, GAP = 60, 30, 8
MARGIN = 12
HEADER_HEIGHT = 58
PADDING = 10
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 13.0, 11.0, 10.0
LEGEND_LINE_HEIGHT = 14
MOST_LEGEND_LINES = 6
AXIS_WIDTH, AXIS_HEIGHT = 58, 18
HEATMAP_COLUMNS = 60
"""Heatmaps are asked in so many steps."""

BACKGROUND, CARD, BORDER, GRID = "#f4f5f5", "#ffffff", "#e0e2e5", "#ececee"
INK, FAINT = "#24292f", "#6b7280"
PALETTE = ("#3b9a3b", "#e0a800", "#2f6fd6", "#f2711c", "#d8314a", "#8f46b5", "#159a9c", "#8a5a34", "#6b7280", "#c2569f")
NAMED_COLORS = {"green": "#2e8b3d", "red": "#d8314a", "orange": "#f2711c", "text": INK}
HEAT = (
    "#30205c",
    "#3f52c4",
    "#3f8cf0",
    "#27bfd8",
    "#2fdc9c",
    "#83ee58",
    "#cfe13a",
    "#f9b436",
    "#f16f23",
    "#c83110",
    "#7e0a05",
)
_LABEL = re.compile(r"\{\{\s*([A-Za-z_]+)\s*\}\}")
_MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
_TIME_STEPS_S = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True)
class Series:
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    """(unix time, value), ascending; what is not a number is not among them."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a Prometheus said to the queries of a dashboard."""

    start_s: float
    end_s: float
    step_s: float
    heat_step_s: float
    series: Mapping[tuple[int, str], Sequence[Series]]
    """By id of the panel and refId of the query; one point per series where the query is instant."""

    def of(self, panel: Mapping[str, Any], target: Mapping[str, Any]) -> Sequence[Series]:
        return self.series.get((panel["id"], target["refId"]), ())


def drawn_series(panel: Mapping[str, Any], answers: Answers) -> list[tuple[str, Series]]:
    """(name, series) of a panel in the order of its queries, without those that have no value in the time shown."""
    return [
        (_name(target, series), series)
        for target in panel.get("targets", ())
        for series in answers.of(panel, target)
        if series.points
    ]


def empty_panels(board: Mapping[str, Any], answers: Answers) -> list[str]:
    """Titles of the panels whose queries gave no value at all."""
    return [panel["title"] for panel in panels(board) if panel.get("targets") and not drawn_series(panel, answers)]


def draw_board(board: Mapping[str, Any], answers: Answers, values: Mapping[str, str]) -> str:
    """The whole dashboard as one SVG. `values`: what its variables stand for, beside their defaults."""
    known = default_values(board) | dict(values)
    width = MARGIN * 2 + 24 * COLUMN_WIDTH - GAP
    height: float = HEADER_HEIGHT
    parts = _header(board, answers, known, width)
    for panel in panels(board):
        place = panel["gridPos"]
        x, y = MARGIN + place["x"] * COLUMN_WIDTH, HEADER_HEIGHT + place["y"] * (ROW_HEIGHT + GAP)
        frame = Frame(x, y, place["w"] * COLUMN_WIDTH - GAP, place["h"] * (ROW_HEIGHT + GAP) - GAP)
        height = max(height, frame.bottom)
        parts += _draw_panel(panel, frame, answers, known)
    return svg.document(width, height + MARGIN, board["title"], parts, background=BACKGROUND)


@dataclass(frozen=True)
class Frame:
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From time and value to a place in the frame of a plot."""

    frame: Frame
    start_s: float
    end_s: float
    low: float
    high: float

    def x(self, when_s: float) -> float:
        return self.frame.x + self.frame.width * (when_s - self.start_s) / (self.end_s - self.start_s)

    def y(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return self.frame.bottom - self.frame.height * (inside - self.low) / (self.high - self.low)


def _header(board: Mapping[str, Any], answers: Answers, known: Mapping[str, str], width: float) -> list[str]:
    shown = [variable for variable in board["templating"]["list"] if variable["type"] == "custom"]
    chosen = " · ".join(f"{variable['label']}: {known[variable['name']]}" for variable in shown)
    start, end = (
        datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S") for moment in (answers.start_s, answers.end_s)
    )
    return [
        svg.text(MARGIN, 26, board["title"], size=18, bold=True),
        svg.text(MARGIN, 45, svg.fitted(board["description"], width - len(chosen) * 7, TEXT_SIZE), color=FAINT),
        svg.text(width - MARGIN, 26, f"{start} to {end} UTC", anchor="end", color=FAINT),
        svg.text(width - MARGIN, 45, chosen, anchor="end", color=FAINT),
    ]


def _draw_panel(panel: Mapping[str, Any], frame: Frame, answers: Answers, known: Mapping[str, str]) -> list[str]:
    if panel["type"] == "row":
        return [svg.text(frame.x + 2, frame.y + 21, panel["title"], size=15, bold=True)]
    parts = [svg.box(frame.x, frame.y, frame.width, frame.height, fill=CARD, stroke=BORDER, radius=3)]
    room = frame.width - 2 * PADDING
    title = svg.fitted(substitute(_plain(panel["title"]), known), room, TITLE_SIZE)
    parts.append(svg.text(frame.x + PADDING, frame.y + 19, title, size=TITLE_SIZE, bold=True))
    about = svg.wrapped(panel["description"], room, SMALL_SIZE, lines=2)
    for idx, words in enumerate(about):
        parts.append(svg.text(frame.x + PADDING, frame.y + 33 + 12 * idx, words, size=SMALL_SIZE, color=FAINT))
    top = frame.y + 28 + 12 * (2 if panel["type"] == "stat" else len(about))
    body = Frame(frame.x + PADDING, top, room, frame.bottom - top - 6)
    if panel["type"] == "text":
        return parts + _draw_text(panel, body, known)
    if not drawn_series(panel, answers):
        middle = body.y + body.height / 2
        return [
            *parts,
            svg.text(body.x + body.width / 2, middle, "No data", size=TITLE_SIZE, anchor="middle", color=FAINT),
        ]
    draw = {"timeseries": _draw_lines, "stat": _draw_number, "heatmap": _draw_heat, "table": _draw_table}[panel["type"]]
    return parts + draw(panel, body, answers)


def _draw_lines(panel: Mapping[str, Any], body: Frame, answers: Answers) -> list[str]:
    defaults = _defaults(panel)
    unit, custom = defaults.get("unit", "none"), defaults.get("custom", {})
    named = drawn_series(panel, answers)
    options = panel["options"]["legend"]
    lines = list(zip(named, _colors([series for _, series in named]), strict=True))
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    stacks = _stacked([series for _, series in named]) if is_stacked else [(series.points, ()) for _, series in named]
    legend = min(len(lines), MOST_LEGEND_LINES) + 1
    plot_height = body.height - AXIS_HEIGHT - legend * LEGEND_LINE_HEIGHT - 2
    plot = Frame(body.x + AXIS_WIDTH, body.y + 4, body.width - AXIS_WIDTH - 4, plot_height)
    numbers = [value for upper, _ in stacks for _, value in upper]
    marks = ticks(*_bounds(numbers, defaults), unit=unit, most=max(3, min(6, int(plot_height / 24))))
    scale = Scale(frame=plot, start_s=answers.start_s, end_s=answers.end_s, low=marks[0], high=marks[-1])
    parts = [*_value_axis(scale, marks, unit), *_time_axis(scale)]
    opacity = custom.get("fillOpacity", 0) / 100
    for (_, color), (upper, lower) in zip(lines, stacks, strict=True):
        runs = _runs(upper, answers.step_s)
        edges = [_places(run, scale) for run in runs]
        base = dict(lower)
        floor = [_places([(when, base.get(when, max(0.0, scale.low))) for when, _ in run], scale) for run in runs]
        parts += [
            svg.area(list(zip(edges, floor, strict=True)), color=color, opacity=opacity),
            svg.polyline(edges, color=color),
        ]
    for limit, color in _limits(defaults, custom):
        if scale.low < limit <= scale.high:
            y = scale.y(limit)
            parts.append(svg.line((plot.x, y), (plot.right, y), color=color, dash="6 4"))
            parts.append(svg.text(plot.right - 2, y - 3, format_value(limit, unit), size=9, anchor="end", color=color))
    return parts + _legend(lines, body, plot.bottom + AXIS_HEIGHT, unit=unit, options=options)


def _draw_number(panel: Mapping[str, Any], body: Frame, answers: Answers) -> list[str]:
    defaults = _defaults(panel)
    (_, series), *_ = drawn_series(panel, answers)
    now = series.points[-1][1]
    color = _threshold_color(now, defaults)
    numbers = [value for _, value in series.points]
    low, high = min(0.0, *numbers), max(numbers)
    top = body.y + body.height * 0.6
    frame = Frame(body.x, top, body.width, body.bottom - top)
    scale = Scale(
        frame=frame, start_s=answers.start_s, end_s=answers.end_s, low=low, high=high if high > low else low + 1
    )
    runs = [_places(run, scale) for run in _runs(series.points, answers.step_s)]
    floors = [[(x, frame.bottom) for x, _ in run] for run in runs]
    shown = format_value(now, defaults.get("unit", "none"))
    size = min(28.0, body.height * 0.5, body.width / (len(shown) * 0.66))
    return [
        svg.area(list(zip(runs, floors, strict=True)), color=color, opacity=0.12),
        svg.polyline(runs, color=color, width=1),
        svg.text(
            body.x + body.width / 2, body.y + body.height * 0.3 + size * 0.35,
            shown, size=size, anchor="middle", color=color, bold=True,
        ),
    ]  # fmt: skip


def _draw_heat(panel: Mapping[str, Any], body: Frame, answers: Answers) -> list[str]:
    unit = panel["options"]["yAxis"].get("unit", "none")
    borders, columns = _bucket_columns([series for _, series in drawn_series(panel, answers)])
    filled = [idx for column in columns.values() for idx, value in enumerate(column) if value > 1e-9]
    first, last = (min(filled), max(filled)) if filled else (0, len(borders) - 1)
    plot = Frame(body.x + AXIS_WIDTH, body.y + 4, body.width - AXIS_WIDTH - 4, body.height - AXIS_HEIGHT - 24)
    scale = Scale(frame=plot, start_s=answers.start_s, end_s=answers.end_s, low=float(first), high=float(last + 1))
    most = max((value for column in columns.values() for value in column), default=0.0)
    width = plot.width * answers.heat_step_s / (answers.end_s - answers.start_s)
    height = plot.height / (last + 1 - first)
    by_color: dict[str, list[svg.Point]] = {}
    for when_s, column in columns.items():
        for idx, value in enumerate(column):
            if value > 1e-9 and scale.start_s < when_s:
                place = (max(plot.x, scale.x(when_s) - width), scale.y(idx + 1))
                by_color.setdefault(_heat_color(value / most), []).append(place)
    parts = [svg.box(plot.x, plot.y, plot.width, plot.height, fill="#fafafa"), *_time_axis(scale)]
    parts += [
        svg.cells(corners, width=width - 0.6, height=height - 0.6, color=color) for color, corners in by_color.items()
    ]
    every = math.ceil((last + 1 - first) * 13 / plot.height)
    for idx in range(first, last + 1, every):
        parts.append(_axis_label(plot.x, scale.y(idx + 1) + 4, format_value(borders[idx], unit)))
    return [*parts, *_heat_legend(Frame(plot.x, plot.bottom + AXIS_HEIGHT + 4, plot.width, 10), most)]


def _draw_table(panel: Mapping[str, Any], body: Frame, answers: Answers) -> list[str]:
    unit = _defaults(panel).get("unit", "none")
    found = sorted((series for _, series in drawn_series(panel, answers)), key=lambda series: -series.points[-1][1])
    rows = [{**series.labels, "Value": format_value(series.points[-1][1], unit)} for series in found]
    columns = _organized(panel, {name for row in rows for name in row})
    width = body.width / max(1, len(columns))
    room = int((body.height - 24) / 16)
    parts = [svg.line((body.x, body.y + 20), (body.right, body.y + 20), color=BORDER)]
    for idx, (name, title) in enumerate(columns.items()):
        x = body.x + idx * width
        parts.append(svg.text(x, body.y + 14, svg.fitted(title, width - 6, TEXT_SIZE), bold=True))
        for line, row in enumerate(rows[:room]):
            cell = svg.fitted(row.get(name, ""), width - 6, TEXT_SIZE)
            parts.append(svg.text(x, body.y + 35 + 16 * line, cell))
    return parts


def _organized(panel: Mapping[str, Any], names: Set[str]) -> dict[str, str]:
    """Column -> title, in the order that Grafana's transformation `organize` gives them."""
    options = next(change["options"] for change in panel["transformations"] if change["id"] == "organize")
    order: Mapping[str, int] = options["indexByName"]
    shown = sorted(names - options["excludeByName"].keys(), key=lambda name: (order.get(name, len(order)), name))
    return {name: options["renameByName"].get(name, name) for name in shown}


def _draw_text(panel: Mapping[str, Any], body: Frame, known: Mapping[str, str]) -> list[str]:
    """Paragraphs and the rows of Markdown tables; links without their addresses."""
    parts: list[str] = []
    y = body.y + 12
    content = substitute(_plain(panel["options"]["content"]), known)
    for line in content.splitlines():
        if not line or set(line) <= set("|- "):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [line]
        for idx, cell in enumerate(cells):
            words = _MARKDOWN_LINK.sub(r"\1", cell).replace("`", "")
            color = NAMED_COLORS["text"] if words == cell or "`" in cell else PALETTE[2]
            x = body.x + idx * body.width * 0.36
            parts.append(
                svg.text(
                    x, y, svg.fitted(words, body.width - (x - body.x), TEXT_SIZE + 1), size=TEXT_SIZE + 1, color=color
                )
            )
        y += 20
    return parts


def _legend(
    lines: Sequence[tuple[tuple[str, Series], str]], body: Frame, top: float, *, unit: str, options: Mapping[str, Any]
) -> list[str]:
    """A table: name, mean, highest and last value of each series."""
    ends = [body.right - 4 - idx * 78 for idx in (2, 1, 0)]
    y = top + 10
    parts = [
        svg.text(x, y, name, size=9, anchor="end", color=FAINT)
        for x, name in zip(ends, ("mean", "max", "last"), strict=True)
    ]
    if options.get("sortBy") == "Max":
        lines = sorted(lines, key=lambda line: -max(value for _, value in line[0][1].points))
    shown = lines if len(lines) <= MOST_LEGEND_LINES else lines[: MOST_LEGEND_LINES - 1]
    for (name, series), color in shown:
        y += LEGEND_LINE_HEIGHT
        numbers = [value for _, value in series.points]
        parts.append(svg.box(body.x, y - 5, 12, 3, fill=color))
        parts.append(
            svg.text(body.x + 18, y, svg.fitted(name, ends[0] - 60 - body.x - 18, SMALL_SIZE), size=SMALL_SIZE)
        )
        for x, value in zip(ends, (sum(numbers) / len(numbers), max(numbers), numbers[-1]), strict=True):
            parts.append(svg.text(x, y, format_value(value, unit), size=SMALL_SIZE, anchor="end"))
    if len(shown) < len(lines):
        hint = f"and {len(lines) - len(shown)} more"
        parts.append(svg.text(body.x + 18, y + LEGEND_LINE_HEIGHT, hint, size=SMALL_SIZE, color=FAINT))
    return parts


def _heat_legend(frame: Frame, most: float) -> list[str]:
    width = 120 / len(HEAT)
    parts = [svg.box(frame.x + idx * width, frame.y - 4, width, 8, fill=color) for idx, color in enumerate(HEAT)]
    label = f"0 to {format_value(most, 'none')} observations per second"
    return [*parts, svg.text(frame.x + 128, frame.y + 4, label, size=SMALL_SIZE, color=FAINT)]


def _value_axis(scale: Scale, marks: Sequence[float], unit: str) -> Iterator[str]:
    heights = [scale.y(value) for value in marks]
    frame = scale.frame
    yield svg.rules([(frame.x, y) for y in heights], [(frame.right, y) for y in heights], color=GRID)
    for value, y in zip(marks, heights, strict=True):
        yield _axis_label(frame.x, y + 3.5, format_value(0.0 if abs(value) < 1e-12 else value, unit))


def _axis_label(x: float, y: float, content: str) -> str:
    return svg.text(x - 6, y, content, size=SMALL_SIZE, anchor="end", color=FAINT)


def _time_axis(scale: Scale) -> Iterator[str]:
    span_s = scale.end_s - scale.start_s
    most = max(2, int(scale.frame.width / 75))
    step_s = next((step for step in _TIME_STEPS_S if span_s / step <= most), _TIME_STEPS_S[-1])
    shape = "%H:%M:%S" if step_s < 60 else "%H:%M"
    first = math.ceil(scale.start_s / step_s)
    moments = [idx * step_s for idx in range(first, math.floor(scale.end_s / step_s) + 1)]
    places = [scale.x(when_s) for when_s in moments]
    yield svg.rules([(x, scale.frame.y) for x in places], [(x, scale.frame.bottom) for x in places], color=GRID)
    for when_s, x in zip(moments, places, strict=True):
        if scale.frame.x + 14 < x < scale.frame.right - 14:
            label = datetime.fromtimestamp(when_s, UTC).strftime(shape)
            yield svg.text(x, scale.frame.bottom + 13, label, size=SMALL_SIZE, anchor="middle", color=FAINT)


def _defaults(panel: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = panel.get("fieldConfig", {}).get("defaults", {})
    return found


def _bounds(numbers: Sequence[float], defaults: Mapping[str, Any]) -> tuple[float, float]:
    low = min([*numbers, defaults["min"]]) if "min" in defaults else min(numbers)
    high = max([*numbers, defaults["max"]]) if "max" in defaults else max(numbers)
    return low, high if high > low else low + 1


def _limits(defaults: Mapping[str, Any], custom: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    if custom.get("thresholdsStyle", {}).get("mode") == "dashed":
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None:
                yield step["value"], NAMED_COLORS.get(step["color"], step["color"])


def _threshold_color(value: float, defaults: Mapping[str, Any]) -> str:
    color = "text"
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    return NAMED_COLORS.get(color, color)


def _stacked(lines: Sequence[Series]) -> list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]:
    """(upper edge, lower edge) of each series: every one stands on the sum of those before it."""
    sums: dict[float, float] = {}
    edges = []
    for series in lines:
        lower = [(when, sums.get(when, 0.0)) for when, _ in series.points]
        for when, value in series.points:
            sums[when] = sums.get(when, 0.0) + value
        edges.append(([(when, sums[when]) for when, _ in series.points], lower))
    return edges


def _runs(points: Sequence[tuple[float, float]], step_s: float) -> list[list[tuple[float, float]]]:
    """Split where a value is missing."""
    runs: list[list[tuple[float, float]]] = [[points[0]]] if points else []
    for before, point in pairwise(points):
        if point[0] - before[0] > 1.5 * step_s:
            runs.append([])
        runs[-1].append(point)
    return runs


def _places(points: Sequence[tuple[float, float]], scale: Scale) -> list[svg.Point]:
    return [(scale.x(when_s), scale.y(value)) for when_s, value in points]


def _bucket_columns(buckets: Sequence[Series]) -> tuple[list[float], dict[float, list[float]]]:
    """Upper borders in order; time -> observations of each bucket alone, from what Prometheus counts up to each border."""
    ordered = sorted(buckets, key=lambda series: float(series.labels["le"].replace("+Inf", "inf")))
    borders = [float(series.labels["le"].replace("+Inf", "inf")) for series in ordered]
    columns: dict[float, list[float]] = {}
    for idx, series in enumerate(ordered):
        for when, value in series.points:
            columns.setdefault(when, [0.0] * len(ordered))[idx] = value
    for when, sums in columns.items():
        columns[when] = [max(0.0, here - before) for before, here in pairwise([0.0, *sums])]
    return borders, columns


def _heat_color(share: float) -> str:
    """Square roots, so that few observations beside many are seen."""
    return HEAT[min(len(HEAT) - 1, int(math.sqrt(share) * len(HEAT)))]


def _colors(lines: Sequence[Series]) -> list[str]:
    """In the order of the series; those that are never above 0 come last, so that the others differ."""
    order = sorted(range(len(lines)), key=lambda idx: max(value for _, value in lines[idx].points) <= 0)
    return [PALETTE[order.index(idx) % len(PALETTE)] for idx in range(len(lines))]


def _name(target: Mapping[str, Any], series: Series) -> str:
    template = target.get("legendFormat", "")
    return _LABEL.sub(lambda match: series.labels.get(match.group(1), ""), template) or target["expr"]


def _plain(text: str) -> str:
    """Variables without braces, as `substitute` reads them."""
    return re.sub(r"\$\{([A-Za-z_]+)(?::[a-z]+)?\}", r"$\1", text)
