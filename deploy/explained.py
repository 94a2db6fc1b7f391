"""Why a request went where it went, as text."""

from __future__ import annotations

from collections.abc import Sequence

from moontide_proto.v1 import moontide_pb2

_HEADS = ("", "prefill", "decode", "hit", "copied", "queue", "fetch", "prefill", "TTFT", "hand-off", "TBT")
_MOST_DROPPED = 8


def render_explanation(explanation: moontide_pb2.Explanation) -> str:
    """The choice of each attempt, its rivals and what came of it; times in milliseconds."""
    tenant = f" of tenant {explanation.tenant}" if explanation.tenant else ""
    lines = [f"request {explanation.request_id}{tenant}: {explanation.prompt_tokens} prompt tokens"]
    if explanation.refused:
        lines.append(f"refused: {explanation.refused}")
    for attempt in explanation.attempts:
        lines.append(f"attempt {attempt.epoch}, policy {attempt.policy}: {attempt.reason}")
        lines.extend(_table(_rows(attempt)))
        lines.extend(_left_out(attempt.dropped))
    return "\n".join(lines)


def _rows(attempt: moontide_pb2.ExplainedAttempt) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [_HEADS, _row("chosen", attempt.chosen)]
    rows.extend(_row("next best", other) for other in attempt.others)
    happened = [_ms(seconds) if seconds else "" for seconds in (attempt.ttft_s, attempt.tbt_s)]
    if any(happened):
        rows.append(("happened", *[""] * 7, happened[0], "", happened[1]))
    return rows


def _row(name: str, candidate: moontide_pb2.Candidate) -> Sequence[str]:
    hit = f"{candidate.hit_tokens} from {candidate.hit_store_node_id}" if candidate.hit_tokens else "none"
    parts = (candidate.queue_s, candidate.fetch_s, candidate.prefill_s)
    return (
        name,
        candidate.prefill_node_id or "by decode",
        candidate.decode_node_id,
        hit,
        str(candidate.copy_tokens) if candidate.copy_tokens else "",
        *(
            _ms(seconds)
            for seconds in (*parts, sum(parts) + candidate.dispatch_s, candidate.handoff_s, candidate.tbt_s)
        ),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _left_out(dropped: Sequence[moontide_pb2.Dropped]) -> list[str]:
    lines = [f"  left out {each.node_id}: {each.reason}" for each in dropped[:_MOST_DROPPED]]
    if len(dropped) > _MOST_DROPPED:
        lines.append(f"  and {len(dropped) - _MOST_DROPPED} more")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
