"""How the dashboards look: one function per kind of panel, over grafana-foundation-sdk. Knows no metric."""

# grafana-foundation-sdk is only there where dashboards are made (extra `deploy-tools`).
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

from deploy.grafana.promql import Scope

TAG = "moontide"
FULL_WIDTH = 24
_HEIGHT = 8
_STAT_HEIGHT = 4
_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = "{{instance}}"


def quantiles(scope: Scope, histogram: str, shares: Sequence[float]) -> list[Query]:
    """Of all processes of the scope together, named p50, p99 and so on."""
    return [Query(scope.quantile(share, histogram), f"p{share * 100:g}") for share in shares]


@dataclass(frozen=True)
class Link:
    """Offered where a value is clicked on."""

    title: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Row:
    title: str
    panels: Sequence[Any]
    """Builders of panels, from left to right; those that do not fit go below."""


@dataclass(frozen=True, kw_only=True)
class Board:
    name: str
    """Of the file, and of the uid after the prefix."""
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Any] = field(default_factory=tuple)
    """Builders, beside the data source and the namespace that every board has."""

    @property
    def uid(self) -> str:
        return f"{TAG}-{self.name}"


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    width: int = 12,
    stacked: bool = False,
    low: float | None = 0,
    top: float | None = None,
    limits: Sequence[float] = (),
    links: Sequence[Link] = (),
) -> Any:
    """Values over time. `low`, `top`: where the axis begins and ends at the latest; None: at the values. `limits` are dashed lines."""
    legend = (
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["mean", "max", "lastNotNull"])
    )
    if any("{{" in query.legend for query in queries):
        legend = legend.sort_by("Max").sort_desc(True)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(width)
        .height(_HEIGHT)
        .line_width(1)
        .fill_opacity(_fill_opacity(stacked, queries))
        .show_points(common.VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(
            common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel = panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if low is not None:
        panel = panel.min(low)
    if top is not None:
        panel = panel.max(top)
    if links:
        panel = panel.data_links([_link(link) for link in links])
    if limits:
        colors = ("orange", "red")
        panel = panel.thresholds(_thresholds(zip(limits, colors, strict=False))).thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    return _with_targets(panel, queries)


def signed_lines(title: str, description: str, *queries: Query, unit: str, width: int = 12) -> Any:
    """Values over time that may be below 0, such as errors of predictions."""
    return lines(title, description, *queries, unit=unit, width=width, low=None)


def number(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str,
    bad_below: float | None = None,
    bad_above: float | None = None,
    width: int = 3,
) -> Any:
    """One value now, red beyond a bound."""
    steps: list[tuple[float, str]] = []
    base = "green"
    if bad_below is not None:
        base, steps = "red", [(bad_below, "green")]
    elif bad_above is not None:
        steps = [(bad_above, "red")]
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(width)
        .height(_STAT_HEIGHT)
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.AREA)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .thresholds(_thresholds(steps, base=base))
    )
    return _with_targets(panel, [Query(expr, "")])


def heat(title: str, description: str, expr: str, *, unit: str, width: int = 12, links: Sequence[Link] = ()) -> Any:
    """Observations over time by bucket of a histogram."""
    panel = (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .span(width)
        .height(_HEIGHT)
        .calculate(False)
        .cell_gap(1)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Turbo")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .mode(common.TooltipDisplayMode.SINGLE)
    )
    if links:
        panel = panel.data_links([_link(link) for link in links])
    query = prometheus.Dataquery().expr(expr).legend_format("{{le}}").ref_id("A").range()
    return panel.with_target(query.format(PromQueryFormat.HEATMAP))


def latest_table(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str,
    columns: Mapping[str, str],
    hidden: Sequence[str] = (),
    width: int = 12,
) -> Any:
    """Label sets and their value now. `columns`: title of each label that is shown, and of `Value`; `hidden`: what else comes along."""
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(width)
        .height(_HEIGHT)
        .show_header(True)
        .frame_index(0)
    )
    query = prometheus.Dataquery().expr(expr).ref_id("A").instant().format(PromQueryFormat.TABLE)
    return panel.with_target(query).with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(["Time", *hidden], True),
                "indexByName": {name: idx for idx, name in enumerate(columns)},
                "renameByName": dict(columns),
            },
        )
    )


def markdown(title: str, content: str, *, width: int = FULL_WIDTH, height: int = _HEIGHT) -> Any:
    return (
        text.Panel()
        .title(title)
        .description("What to do with the id of a request.")
        .span(width)
        .height(height)
        .mode(TextMode.MARKDOWN)
        .content(content)
    )


def choice(name: str, label: str, description: str, values: Sequence[str], default: str) -> Any:
    """Variable with one of a few values."""
    options = [dashboard.VariableOption(text=value, value=value, selected=value == default) for value in values]
    return (
        boards.CustomVariable(name)
        .label(label)
        .description(description)
        .values(",".join(values))
        .options(options)
        .current(dashboard.VariableOption(text=default, value=default, selected=True))
    )


def typed_in(name: str, label: str, description: str, default: str) -> Any:
    """Variable with free text."""
    value = dashboard.VariableOption(text=default, value=default, selected=True)
    return (
        boards.TextBoxVariable(name)
        .label(label)
        .description(description)
        .default_value(default)
        .current(value)
        .options([value])
    )


def label_values(name: str, label: str, metric: str) -> Any:
    """Variable with the values of a label of `metric`; all of them by default."""
    return (
        boards.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(f"label_values({metric}, {name})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(text="All", value="$__all", selected=True))
    )


def render(board: Board) -> str:
    """The dashboard as JSON, equal for equal boards."""
    builder = (
        boards.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .editable()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            boards.DatasourceVariable("datasource")
            .label("Data source")
            .type("prometheus")
            .current(dashboard.VariableOption(text="default", value="default", selected=True))
        )
        .with_variable(label_values("namespace", "Namespace", "conductor_active_requests"))
        .link(
            boards.DashboardLink("Moontide")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in board.variables:
        builder = builder.with_variable(variable)
    panel_id = 0
    for row in board.rows:
        panel_id += 1
        builder = builder.with_row(boards.Row(row.title).id(panel_id))
        for panel in row.panels:
            panel_id += 1
            builder = builder.with_panel(panel.id(panel_id))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _fill_opacity(stacked: bool, queries: Sequence[Query]) -> int:
    """Areas of lines that cross each other hide more than they show."""
    if stacked:
        return 25
    return 8 if len(queries) == 1 and "{{" not in queries[0].legend else 0


def _link(link: Link) -> Any:
    return boards.DashboardLink(link.title).type(dashboard.DashboardLinkType.LINK).url(link.url)


def _with_targets(panel: Any, queries: Sequence[Query]) -> Any:
    for idx, query in enumerate(queries):
        panel = panel.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[idx])
            .range()
        )
    return panel


def _thresholds(steps: Any, *, base: str = "transparent") -> Any:
    return (
        boards.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps(
            [
                dashboard.Threshold(value=None, color=base),
                *(dashboard.Threshold(value=value, color=color) for value, color in steps),
            ]
        )
    )
