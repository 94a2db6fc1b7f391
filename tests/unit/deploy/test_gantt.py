from __future__ import annotations

import dataclasses
import json
import re

from deploy.gantt import (
    busy_s,
    chrome_trace,
    overlap_s,
    pipeline_sentence,
    plan_line,
    render_gantt,
    stage_chunks,
    stage_table,
    stage_uses,
    ttft_table,
)
from moontide.timeline import Span, Timeline, TtftParts


def chunk(stage: int, idx: int, start_s: float, duration_s: float = 1.0) -> Span:
    return Span(
        name=f"chunk {idx}",
        track=f"stage {stage}",
        start_s=start_s,
        duration_s=duration_s,
        first_token=512 * idx,
        num_tokens=512,
    )


PIPELINE = tuple(
    [chunk(0, idx, float(idx)) for idx in range(3)] + [chunk(1, idx, idx + 1.0) for idx in range(3)]
)  # fmt: skip
PARTS = TtftParts(
    tokenize_s=0.001,
    route_s=0.002,
    dispatch_s=0.003,
    queue_s=0.004,
    fetch_s=0.0,
    prefill_s=0.990,
    detokenize_s=0.0,
    ttft_s=1.0,
)


def timeline(spans: tuple[Span, ...] = PIPELINE) -> Timeline:
    return Timeline(request_id="r1", spans=spans, duration_s=4.0, outcome="stop", ttft_parts=PARTS, handoff_s=0.01)


def rows(picture: str) -> dict[str, str]:
    return {line[:18].strip(): line[19:] for line in picture.splitlines()[1:]}


def test_a_row_per_stage_with_bars_where_the_work_was() -> None:
    found = rows(render_gantt(PIPELINE, width=19 + 40))
    assert list(found) == ["stage 0", "stage 1"]
    assert re.sub(r"\d", "#", found["stage 0"]).rstrip() == "█#████████▒#▒▒▒▒▒▒▒▒█#████████"
    assert found["stage 1"].startswith(" " * 10 + "█0")
    assert found["stage 1"].rstrip().endswith("2████████")


def test_stages_come_first_in_numeric_order_and_kinds_of_work_get_rows() -> None:
    spans = [
        chunk(10, 0, 0), chunk(2, 0, 0),
        Span(name="put chunk 0", track="stage 2 put", start_s=0, duration_s=1),
        Span(name="pull", track="decode", start_s=0, duration_s=1),
        Span(name="route", track="conductor", start_s=0, duration_s=1),
    ]  # fmt: skip
    found = list(rows(render_gantt(spans)))
    assert found[:3] == ["conductor route", "stage 2", "stage 10"]
    assert found[3].startswith("stage 2 put")
    assert found[4] == "decode pull"


def test_neighbouring_short_bars_do_not_overwrite_each_other() -> None:
    spans = [chunk(0, idx, idx * 0.25, 0.25) for idx in range(40)]
    picture = rows(render_gantt(spans, width=19 + 40))["stage 0"]
    assert picture == "█▒" * 20


def test_no_line_is_wider_than_asked() -> None:
    assert max(len(line) for line in render_gantt(PIPELINE, width=60).splitlines()) <= 60


def test_empty_and_instant_timelines_have_a_picture() -> None:
    assert render_gantt([]) == "(no spans)"
    assert "stage 0" in render_gantt([chunk(0, 0, 0.0, 0.0)])


def test_overlap_counts_each_moment_once() -> None:
    first = [chunk(0, 0, 0.0, 2.0), chunk(0, 1, 1.0, 2.0)]
    second = [chunk(1, 0, 2.5, 2.0)]
    assert overlap_s(first, second) == 0.5
    assert busy_s(first) == 3.0


def test_sentence_states_the_share_of_the_possible_overlap() -> None:
    sentence = pipeline_sentence(timeline())
    assert sentence is not None
    assert "stage 1 computed chunk 0, stage 0 already computed chunk 1" in sentence
    assert "2.00 s, 100 % of what 3 chunks allow" in sentence


def test_sentence_says_when_stages_took_turns() -> None:
    in_turn = (chunk(0, 0, 0), chunk(1, 0, 1), chunk(0, 1, 2), chunk(1, 1, 3))
    assert pipeline_sentence(timeline(in_turn)) == "The stages did not work at the same time."
    assert pipeline_sentence(timeline((chunk(0, 0, 0),))) is None


def test_stage_chunks_leave_out_other_work() -> None:
    spans = (
        *PIPELINE,
        Span(name="put chunk 0", track="stage 0 put", start_s=0, duration_s=9),
        Span(name="fetch", track="stage 0", start_s=0, duration_s=0.1),
    )
    assert [len(spans) for spans in stage_chunks(timeline(spans))] == [3, 3]


def test_chrome_trace_has_named_tracks_and_microseconds() -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline())))
    names = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert names.keys() == {"stage 0", "stage 1"}
    assert len(bars) == 6
    assert {"name": "chunk 2", "ts": 3e6, "dur": 1e6, "tid": names["stage 1"]}.items() <= bars[-1].items()
    assert bars[-1]["args"] == {"first_token": 1024, "num_tokens": 512}


def test_table_sums_its_parts_and_shows_the_measured_value() -> None:
    lines = {line.split()[0]: line.split()[1] for line in ttft_table(PARTS).splitlines()[1:]}
    assert lines["prefill"] == "990.0"
    assert lines["sum"] == lines["measured"] == "1000.0"


def test_table_compares_with_what_the_client_measured() -> None:
    last = ttft_table(PARTS, client_ttft_s=1.002).splitlines()[-1]
    assert "1002.0" in last
    assert "by the client; difference +2.0 ms" in last


def test_a_row_of_more_bars_than_cells_shows_how_busy_and_where() -> None:
    spans = [chunk(0, idx, idx * 0.05, 0.05) for idx in range(400)]
    spans += [chunk(0, 400 + idx, 20 + idx * 0.05, 0.0125) for idx in range(400)]
    picture = rows(render_gantt(spans, width=19 + 80))["stage 0"]
    assert len(picture) == 80
    assert re.findall(r"\d+", picture) == [str(number) for number in range(0, 800, 100)]
    assert set(re.sub(r"\d", "", picture[:40])) == {"█"}
    assert set(re.sub(r"\d", "", picture[41:])) == {"░"}


def test_a_dense_row_shows_its_gaps() -> None:
    spans = [chunk(0, idx, idx * 0.01, 0.01) for idx in range(100)] + [
        chunk(0, 100 + idx, 3 + idx * 0.01, 0.01) for idx in range(100)
    ]
    picture = rows(render_gantt(spans, width=19 + 40))["stage 0"]
    assert picture[10:30] == " " * 20
    assert " " not in picture[:10] + picture[30:]


def test_uses_of_the_stages_add_up_to_the_makespan() -> None:
    spans = (
        chunk(0, 0, 1.0), chunk(0, 1, 2.0), chunk(0, 2, 5.0),
        chunk(1, 0, 2.5), chunk(1, 1, 3.5), chunk(1, 2, 6.25, 2.0),
        Span(name="fetch", track="stage 0", start_s=0.0, duration_s=0.75),
        Span(name="chunk 2", track="stage 1 put", start_s=8.0, duration_s=0.5),
        Span(name="chunk 0", track="stage 1 recv", start_s=1.0, duration_s=1.5),
        Span(name="chunk 2", track="stage 1 recv", start_s=4.5, duration_s=1.5),
        Span(name="chunk 0", track="stage 0 send", start_s=2.0, duration_s=0.25),
        Span(name="chunk 1", track="stage 0 send", start_s=3.0, duration_s=0.5),
    )  # fmt: skip
    first, second = stage_uses(timeline(spans))
    assert (first.busy_s, first.fill_s, first.recv_s, first.other_s, first.drain_s) == (3.0, 0.0, 0.0, 2.0, 2.25)
    assert (second.busy_s, second.fill_s, second.recv_s, second.other_s, second.drain_s) == (4.0, 1.5, 1.5, 0.25, 0.0)
    assert first.busy_s + first.bubble_s == second.busy_s + second.bubble_s == 7.25
    assert (first.store_s, second.store_s) == (0.75, 0.25)
    assert (first.send_s, second.send_s) == (0.75, 0.0)
    assert " 0.750    0.750    41.4" in (stage_table(timeline(spans)) or "")


def test_table_of_the_stages_has_the_plan_and_predicted_beside_measured() -> None:
    spans = tuple(dataclasses.replace(span, predicted_s=0.9) for span in PIPELINE)
    table = stage_table(timeline(spans))
    assert table is not None
    plan, makespan, _, first, second = table.splitlines()
    assert plan == "plan: 3 chunks, 1536 tokens: 512 x3"
    assert makespan == "first chunk to last stage's end: 4.000 s  (predicted 3.600 s, -10.0 %)"
    assert first.split()[:3] == ["0", "3.000", "1.000"]
    assert "75.0  (predicted 2.700 s, -10.0 %)" in second


def test_table_without_predictions_or_chunks() -> None:
    table = stage_table(timeline())
    assert table is not None
    assert "predicted" not in table
    assert stage_table(timeline(())) is None


def test_a_long_plan_is_cut_in_the_middle() -> None:
    tokens = list(range(2048, 0, -64))
    assert plan_line([*tokens, 64]) == (
        f"plan: 33 chunks, {sum(tokens) + 64} tokens: 2048, 1984, 1920, 1856, (24 more), 256, 192, 128, 64 x2"
    )


def test_predictions_and_plan_survive_the_wire() -> None:
    found = timeline(tuple(dataclasses.replace(span, predicted_s=0.9) for span in PIPELINE))
    found = dataclasses.replace(found, plan="mode cpp, policy lars, chunking fixed")
    assert Timeline.from_proto(found.to_proto()) == found
