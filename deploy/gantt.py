"""Pictures of one request: bars in the terminal, Chrome-trace JSON for Perfetto, tables of its stages and of its TTFT (all pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from moontide.perf_model import makespan_of_times_s
from moontide.timeline import Span, Timeline, TtftParts

SHADES = ("█", "▒")
"""Neighbouring bars of a row differ, so that the border between two chunks is seen."""
DENSITIES = " ░▒▓█"
"""Where bars are narrower than a cell: how much of the cell's time they cover."""
NUMBER_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
NUMBER_COLUMNS = 8
"""Numbers in a dense row stand at least so far apart."""
PLAN_RUNS = 8
"""Longer plans are cut in the middle."""
LABEL_WIDTH = 18
PART_NAMES = ("tokenize_s", "route_s", "dispatch_s", "queue_s", "fetch_s", "prefill_s", "detokenize_s")
TICKS = 4
_NUMBERED = re.compile(r"(.*\S) (\d+)")
"""Spans "chunk 0", "chunk 1", ... share a row; the number is drawn into the bar."""
_COMPUTE_TRACK = re.compile(r"stage (\d+)")


def render_gantt(spans: Sequence[Span], *, width: int = 100) -> str:
    """One row per track and kind of work, stages first; numbers in the bars count the chunks of a row.

    A row with too many bars for its cells shows how busy each cell is, and where every so many-th chunk begins.

    `width`: columns of the whole picture.
    """
    if not spans:
        return "(no spans)"
    columns = max(20, width - LABEL_WIDTH - 1)
    end_s = max(span.end_s for span in spans)
    scale = columns / end_s if end_s > 0 else 0.0
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(_label(span), []).append(span)
    lines = [_axis(end_s, columns)]
    for label, members in sorted(rows.items(), key=lambda row: (_track_order(row[1][0].track), row[1][0].start_s)):
        bars = _row(sorted(members, key=lambda span: (span.start_s, span.end_s)), columns, scale)
        lines.append(f"{label[:LABEL_WIDTH]:<{LABEL_WIDTH}} {bars}".rstrip())
    return "\n".join(lines)


def overlap_s(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which a span of each side is active."""
    total = 0.0
    for a_start, a_end in _merged(first):
        for b_start, b_end in _merged(second):
            total += max(0.0, min(a_end, b_end) - max(a_start, b_start))
    return total


def busy_s(spans: Sequence[Span]) -> float:
    """Seconds in which at least one span is active."""
    return sum(end - start for start, end in _merged(spans))


def stage_chunks(timeline: Timeline) -> list[list[Span]]:
    """The compute spans of each pipeline stage, in order of stage and time."""
    stages: dict[int, list[Span]] = {}
    for span in timeline.spans:
        match = _COMPUTE_TRACK.fullmatch(span.track)
        if match and span.name.startswith("chunk "):
            stages.setdefault(int(match.group(1)), []).append(span)
    return [sorted(stages[idx], key=lambda span: span.start_s) for idx in sorted(stages)]


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """What a stage did between the start of the first chunk and the end of the last one; the parts add up to that makespan."""

    busy_s: float
    fill_s: float
    """Until its first chunk began."""
    recv_s: float
    """Waiting for the hidden states of a later chunk: the stage before still worked on it, or the link was slow."""
    other_s: float
    """Between chunks for other reasons: overhead, no step in the log, steps of other prompts."""
    drain_s: float
    """After its last chunk."""
    send_s: float
    """Hidden states waited for the link, beside the forwards. Not part of the makespan."""
    store_s: float
    """What waited for the store: the fetch before the makespan, and puts after it. Not part of it."""
    predicted_s: float
    """Expected `busy_s`; 0 unless there is a prediction for every chunk."""

    @property
    def bubble_s(self) -> float:
        return self.fill_s + self.recv_s + self.other_s + self.drain_s


def stage_uses(timeline: Timeline) -> list[StageUse]:
    """In order of the stages; empty before any chunk is reported."""
    stages = stage_chunks(timeline)
    if not stages:
        return []
    start_s = stages[0][0].start_s
    end_s = max(span.end_s for spans in stages for span in spans)
    uses: list[StageUse] = []
    for idx, spans in enumerate(stages):
        waited_s = {span.name: span.duration_s for span in _on_track(timeline, f"stage {idx} recv")}
        recv_s = other_s = 0.0
        for before, span in pairwise(spans):
            gap_s = max(0.0, span.start_s - before.end_s)
            gap_recv_s = min(gap_s, waited_s.get(span.name, 0.0))
            recv_s += gap_recv_s
            other_s += gap_s - gap_recv_s
        fetched_s = sum(span.duration_s for span in _on_track(timeline, f"stage {idx}") if span.name == "fetch")
        put_end_s = max((span.end_s for span in _on_track(timeline, f"stage {idx} put")), default=end_s)
        uses.append(
            StageUse(
                busy_s=busy_s(spans),
                fill_s=spans[0].start_s - start_s,
                recv_s=recv_s,
                other_s=other_s,
                drain_s=end_s - spans[-1].end_s,
                send_s=sum(span.duration_s for span in _on_track(timeline, f"stage {idx} send")),
                store_s=fetched_s + max(0.0, put_end_s - end_s),
                predicted_s=sum(s.predicted_s for s in spans) if all(s.predicted_s for s in spans) else 0.0,
            )
        )
    return uses


def predicted_makespan_s(stages: Sequence[Sequence[Span]]) -> float:
    """When the last chunk leaves the last stage if every step takes as long as was expected of it; 0 without predictions."""
    if not all(span.predicted_s for spans in stages for span in spans):
        return 0.0
    return makespan_of_times_s([[span.predicted_s for span in spans] for spans in stages])


def stage_table(timeline: Timeline) -> str | None:
    """Plan, makespan, and a line per stage: predicted against measured time, and where the rest went; None without chunks."""
    stages, uses = stage_chunks(timeline), stage_uses(timeline)
    if not stages:
        return None
    makespan_s = max(span.end_s for spans in stages for span in spans) - stages[0][0].start_s
    predicted_s = predicted_makespan_s(stages)
    lines = [
        plan_line([span.num_tokens for span in stages[0]]),
        f"first chunk to last stage's end: {makespan_s:.3f} s{_against(predicted_s, makespan_s)}",
        "stage    busy s  bubble s  (fill   recv  other  drain)  send s  store s  busy %",
    ]
    for idx, use in enumerate(uses):
        percent = 100 * use.busy_s / makespan_s if makespan_s else 0.0
        lines.append(
            f"  {idx:<4}{use.busy_s:>9.3f}{use.bubble_s:>10.3f} {use.fill_s:>6.3f}{use.recv_s:>7.3f}{use.other_s:>7.3f}"
            f"{use.drain_s:>7.3f} {use.send_s:>8.3f}{use.store_s:>9.3f}{percent:>8.1f}{_against(use.predicted_s, use.busy_s)}"
        )
    return "\n".join(lines)


def plan_line(tokens: Sequence[int]) -> str:
    """The chunks of a prompt by length, equal neighbours together."""
    runs = [(num_tokens, len(list(members))) for num_tokens, members in groupby(tokens)]
    shown = [f"{num_tokens} x{count}" if count > 1 else f"{num_tokens}" for num_tokens, count in runs]
    if len(runs) > PLAN_RUNS:
        half = PLAN_RUNS // 2
        hidden = sum(count for _, count in runs[half:-half])
        shown = [*shown[:half], f"({hidden} more)", *shown[-half:]]
    noun = "chunk" if len(tokens) == 1 else "chunks"
    return f"plan: {len(tokens)} {noun}, {sum(tokens)} tokens: {', '.join(shown)}"


def _against(predicted_s: float, measured_s: float) -> str:
    if not predicted_s or not measured_s:
        return ""
    return f"  (predicted {predicted_s:.3f} s, {100 * (predicted_s / measured_s - 1):+.1f} %)"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a Chrome trace: load the JSON in https://ui.perfetto.dev."""
    tracks = sorted({span.track for span in timeline.spans}, key=_track_order)
    thread_ids = {track: idx + 1 for idx, track in enumerate(tracks)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"request {timeline.request_id}"}}
    ]
    for track, thread_id in thread_ids.items():
        events.append({"ph": "M", "pid": 1, "tid": thread_id, "name": "thread_name", "args": {"name": track}})
        events.append(
            {"ph": "M", "pid": 1, "tid": thread_id, "name": "thread_sort_index", "args": {"sort_index": thread_id}}
        )
    for span in timeline.spans:
        args: dict[str, float] = {}
        if span.num_tokens:
            args = {"first_token": span.first_token, "num_tokens": span.num_tokens}
        if span.predicted_s:
            args["predicted_ms"] = round(span.predicted_s * 1e3, 3)
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": thread_ids[span.track],
                "name": span.name,
                "cat": span.track,
                "ts": round(span.start_s * 1e6, 3),
                "dur": round(span.duration_s * 1e6, 3),
                "args": args,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def ttft_table(parts: TtftParts, *, client_ttft_s: float | None = None) -> str:
    """The parts of TTFT and their sum beside what was measured: by the client if it did, else by the conductor."""
    values = {name: float(getattr(parts, name)) for name in PART_NAMES}
    total_s = sum(values.values())
    lines = ["TTFT part        ms      %"]
    for name, value_s in values.items():
        percent = 100 * value_s / total_s if total_s else 0.0
        lines.append(f"  {name.removesuffix('_s'):<11}{value_s * 1e3:>9.1f}{percent:>7.1f}")
    lines.append(f"  {'sum':<11}{total_s * 1e3:>9.1f}")
    measured_s, by = (parts.ttft_s, "conductor") if client_ttft_s is None else (client_ttft_s, "client")
    lines.append(
        f"  {'measured':<11}{measured_s * 1e3:>9.1f}   (by the {by}; difference {(measured_s - total_s) * 1e3:+.1f} ms)"
    )
    return "\n".join(lines)


def _on_track(timeline: Timeline, track: str) -> list[Span]:
    return [span for span in timeline.spans if span.track == track]


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        if merged and span.start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end_s))
        else:
            merged.append((span.start_s, span.end_s))
    return merged


def _label(span: Span) -> str:
    """A track with chunks needs no more than its name; elsewhere the kind of work makes the row."""
    match = _NUMBERED.fullmatch(span.name)
    kind = match.group(1) if match else span.name
    return span.track if kind == "chunk" or span.track.endswith(kind) else f"{span.track} {kind}"


def _row(spans: Sequence[Span], columns: int, scale: float) -> str:
    """Each bar has at least one cell and ends where the next one begins, so that bars which round into each other stay apart."""
    cells = [" "] * columns
    starts = [min(columns - 1, int(span.start_s * scale)) for span in spans]
    if len(set(starts)) < len(starts):
        return _dense_row(spans, starts, columns, scale)
    for idx, (span, start, following) in enumerate(zip(spans, starts, [*starts[1:], columns], strict=True)):
        stop = max(start + 1, min(round(span.end_s * scale), following))
        cells[start:stop] = SHADES[idx % len(SHADES)] * (stop - start)
        number = _number(span)
        if number and stop - start > len(number) + 1:
            cells[start + 1 : start + 1 + len(number)] = number
    return "".join(cells[:columns])


def _dense_row(spans: Sequence[Span], starts: Sequence[int], columns: int, scale: float) -> str:
    covered = [0.0] * columns
    for start_s, end_s in _merged(spans):
        first, last = start_s * scale, max(end_s * scale, start_s * scale + 1e-9)
        for cell in range(int(first), min(columns, int(last) + 1)):
            covered[cell] += min(last, cell + 1) - max(first, cell)
    full = len(DENSITIES) - 1
    cells = [DENSITIES[min(full, max(1, round(share * full)))] if share > 0 else " " for share in covered]
    cells_per_chunk = (starts[-1] - starts[0] + 1) / len(starts)
    step = next((step for step in NUMBER_STEPS if step * cells_per_chunk >= NUMBER_COLUMNS), NUMBER_STEPS[-1])
    for span, start in zip(spans, starts, strict=True):
        number = _number(span)
        if number and int(number) % step == 0:
            cells[start : start + len(number)] = number
    return "".join(cells[:columns])


def _number(span: Span) -> str:
    match = _NUMBERED.fullmatch(span.name)
    return match.group(2) if match else ""


def _axis(end_s: float, columns: int) -> str:
    cells = [" "] * (columns + 8)
    for tick in range(TICKS + 1):
        label = f"{end_s * tick / TICKS:.2f}s"
        at = round(columns * tick / TICKS) - (len(label) if tick == TICKS else 0)
        cells[at : at + len(label)] = label
    return " " * (LABEL_WIDTH + 1) + "".join(cells).rstrip()


def _track_order(track: str) -> tuple[int, str]:
    """conductor; the stages by number; what they do beside computing, in the same order; the rest by name."""
    if track == "conductor":
        return 0, ""
    match = re.fullmatch(r"stage (\d+)(.*)", track)
    if match is None:
        return 3, track
    return (2 if match.group(2) else 1), f"{int(match.group(1)):06d}{match.group(2)}"


def pipeline_sentence(timeline: Timeline) -> str | None:
    """What the picture proves, in numbers; None with fewer than two stages or chunks."""
    stages = stage_chunks(timeline)
    if len(stages) < 2 or len(stages[0]) < 2:
        return None
    both_s = overlap_s(stages[0], stages[1])
    ideal_s = busy_s(stages[0][1:])
    chunk = next(
        (
            idx
            for idx, (a, b) in enumerate(pairwise(stages[0]))
            if idx < len(stages[1]) and overlap_s([b], [stages[1][idx]])
        ),
        None,
    )
    if chunk is None:
        return "The stages did not work at the same time."
    return (
        f"While stage 1 computed chunk {chunk}, stage 0 already computed chunk {chunk + 1} of the same prompt: "
        f"both were busy for {both_s:.2f} s, {100 * both_s / ideal_s:.0f} % of what {len(stages[0])} chunks allow."
    )
