"""Prefill: are the pipelines full, what is between the chunks, and what waits in front of them."""

from __future__ import annotations

from deploy.grafana.promql import PROCESS, Scope
from deploy.grafana.style import (
    Board,
    Query,
    Row,
    heat,
    label_values,
    latest_table,
    lines,
    number,
    signed_lines,
)

_ONE = Scope(matchers=PROCESS)
_PARTS = (
    ("busy", "prefill_stage_busy_seconds_total"),
    ("wait for hidden states", "prefill_stage_wait_recv_seconds_total"),
    ("wait for the store", "prefill_stage_wait_store_seconds_total"),
    ("overhead", "prefill_stage_overhead_seconds_total"),
    ("idle", "prefill_stage_idle_seconds_total"),
)
"""What the time of a stage in a complete group adds up from (docs/metrics.md)."""


def board() -> Board:
    return Board(
        name="prefill",
        title="Moontide / Prefill",
        description="Occupancy of the pipelines, bubbles by kind, the chunk plan and how well it is predicted, queues, copies.",
        variables=(label_values("instance", "Process", "prefill_stage_steps_total"),),
        rows=(_now(), _pipeline(), _plan(), _prediction(), _queue(), _prefixes(), _push()),
    )


def _now() -> Row:
    busy, bubble = (
        _ONE.total_rate(name) for name in ("prefill_stage_busy_seconds_total", "prefill_bubble_seconds_total")
    )
    return Row(
        title="Now",
        panels=(
            number(
                "Stages in a complete group",
                "Share of the stage processes.",
                f"avg({_ONE.select('prefill_group_complete')})",
                unit="percentunit",
                bad_below=1,
                width=4,
            ),
            number(
                "Bubble share",
                "Of the time in which a group had steps in flight. Best possible: (P - 1) / (m + P - 1) for m "
                "chunks on P stages.",
                f"{bubble} / ({bubble} + {busy})",
                unit="percentunit",
                width=4,
            ),
            number("Prompts ended", "Per second.", _ONE.total_rate("prefill_requests_total"), unit="reqps", width=4),
            number(
                "Longest queue",
                "Predicted time until the slowest stage of a group has done everything that is there.",
                f"max({_ONE.select('prefill_queued_seconds')})",
                unit="s",
                width=4,
            ),
            number(
                "Pages in use",
                "Of all groups.",
                f"1 - {_ONE.total('prefill_free_pages')} / {_ONE.total('prefill_num_pages')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Objects whose put failed",
                "After all attempts, in the last hour: the pool is full beyond its accounting, or the store is gone.",
                f"sum(increase({_ONE.select('prefill_puts_failed_total')}[1h]))",
                unit="none",
                bad_above=0.5,
                width=4,
            ),
        ),
    )


def _pipeline() -> Row:
    return Row(
        title="Pipeline",
        panels=(
            lines(
                "Where the time of the stages goes",
                "Mean over the stages; adds up to 1 in a complete group.",
                *(Query(f"avg({_ONE.rate(counter)})", part) for part, counter in _PARTS),
                unit="percentunit",
                stacked=True,
                top=1,
            ),
            lines(
                "Occupancy by stage",
                "Share of the time in forwards. Uneven stages: moontide status, prefill.layer_split.",
                Query(_ONE.rate("prefill_stage_busy_seconds_total")),
                unit="percentunit",
                top=1,
            ),
            lines(
                "Bubbles by stage",
                "Seconds a second in which the stage computed nothing while its group had steps in flight.",
                Query(
                    _ONE.total_rate("prefill_bubble_seconds_total", "instance, stage"), "{{instance}} stage {{stage}}"
                ),
                unit="percentunit",
            ),
            lines(
                "Bubbles by kind",
                "Seconds a second, all stages: hidden states are not here; the process gets too little CPU; the "
                "link is slower"
                "than the stage.",
                Query(_ONE.total_rate("prefill_stage_wait_recv_seconds_total"), "wait for hidden states"),
                Query(_ONE.total_rate("prefill_stage_overhead_seconds_total"), "overhead"),
                Query(_ONE.total_rate("prefill_stage_wait_store_seconds_total"), "wait for the store"),
                Query(_ONE.total_rate("prefill_stage_wait_send_seconds_total"), "wait to send"),
                unit="percentunit",
                stacked=True,
            ),
            lines(
                "Overhead of a step",
                "Everything was there and the forward had not begun. Above 2 ms: too little CPU beside the "
                "compute thread.",
                Query(
                    f"{_ONE.rate('prefill_stage_overhead_seconds_total')} / {_ONE.rate('prefill_stage_steps_total')}",
                ),
                unit="s",
                limits=(0.002,),
            ),
            lines(
                "Epochs of the groups",
                "Times a stage joined a group anew: a stage dies, or is too slow to answer.",
                Query(f"increase({_ONE.select('prefill_group_epochs_total')}[15m])"),
                unit="none",
            ),
        ),
    )


def _plan() -> Row:
    return Row(
        title="Chunk plan",
        panels=(
            heat(
                "Tokens of a step",
                "Steps per second by their tokens.",
                _ONE.buckets("prefill_step_tokens"),
                unit="none",
                width=8,
            ),
            lines(
                "Planned time of a step",
                "On the slowest stage.",
                *(
                    Query(_ONE.quantile(share, "prefill_planned_step_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.99)
                ),
                unit="s",
                width=8,
            ),
            lines(
                "Prompts in a step",
                "Mean. 1 with small steps: short prompts that nothing shares a step with.",
                Query(_ONE.mean("prefill_step_chunks", "instance")),
                unit="none",
                width=8,
            ),
            lines(
                "Steps and their depth",
                "Forwards per second of all stages; micro-batches in flight.",
                Query(_ONE.total_rate("prefill_stage_steps_total"), "forwards per second"),
                Query(_ONE.total("prefill_in_flight_steps"), "in flight"),
                unit="none",
                width=8,
            ),
            lines(
                "Tokens computed",
                "Per second and stage process.",
                Query(_ONE.rate("prefill_chunk_tokens_total")),
                unit="none",
                width=8,
            ),
            latest_table(
                "How the groups plan", "Mode, policy and chunking.", _ONE.select("prefill_plan_info"), width=8
            ),
        ),
    )


def _prediction() -> Row:
    shares = (0.1, 0.5, 0.9)
    return Row(
        title="Predictor",
        panels=(
            signed_lines(
                "Error of a step",
                "Predicted / measured - 1, by stage, median. Away from 0 for long: the machine is shared, or "
                "slower than measured.",
                Query(_ONE.quantile(0.5, "prefill_step_prediction_error", "stage"), "stage {{stage}}"),
                unit="percentunit",
                width=8,
            ),
            signed_lines(
                "Error of a step, spread",
                "Of all stages.",
                *(
                    Query(_ONE.quantile(share, "prefill_step_prediction_error"), f"p{share * 100:g}")
                    for share in shares
                ),
                unit="percentunit",
                width=8,
            ),
            signed_lines(
                "Error of a prompt",
                "Predicted (alone in the group) / measured compute time - 1. Below 0: prompts waited for others.",
                *(
                    Query(_ONE.quantile(share, "prefill_prompt_prediction_error"), f"p{share * 100:g}")
                    for share in shares
                ),
                unit="percentunit",
                width=8,
            ),
        ),
    )


def _queue() -> Row:
    return Row(
        title="Queue",
        panels=(
            lines(
                "Requests",
                "With pages, and without pages or room in the store.",
                Query(_ONE.total("prefill_running_requests"), "running"),
                Query(_ONE.total("prefill_waiting_requests"), "waiting"),
                unit="none",
                stacked=True,
                width=8,
            ),
            lines(
                "Predicted queue",
                "What conductors route by.",
                Query(_ONE.select("prefill_queued_seconds")),
                unit="s",
                width=8,
            ),
            lines(
                "Queued tokens",
                "Prompt tokens that no step has taken.",
                Query(_ONE.select("prefill_queued_tokens")),
                unit="none",
                width=8,
            ),
            lines(
                "Who gives way to whom",
                "Prompts per second: let another one go first; gave up their pages; went first because they had waited "
                "for prefill.starvation_s.",
                Query(_ONE.total_rate("prefill_preemptions_total"), "preempted"),
                Query(_ONE.total_rate("prefill_drops_total"), "dropped"),
                Query(_ONE.total_rate("prefill_starved_steps_total"), "steps of starved prompts"),
                unit="cps",
                width=8,
            ),
            lines(
                "Pages",
                "Free and all, per group.",
                Query(_ONE.select("prefill_free_pages"), "free {{instance}}"),
                Query(_ONE.select("prefill_num_pages"), "all {{instance}}"),
                unit="none",
                width=8,
            ),
            lines(
                "Prompts by outcome",
                "completed, or the name of the error.",
                Query(_ONE.total_rate("prefill_requests_total", "outcome"), "{{outcome}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
        ),
    )


def _prefixes() -> Row:
    return Row(
        title="Prefixes and copies",
        panels=(
            lines(
                "Prefix hits",
                "Prompt tokens per second that were not computed, and the part that was still in the pages.",
                Query(_ONE.total_rate("prefill_hit_tokens_total"), "hit"),
                Query(_ONE.total_rate("prefill_page_hit_tokens_total"), "of these in pages"),
                unit="none",
                width=8,
            ),
            lines(
                "Copies from other hosts",
                "given up: the way between hosts is slower than predicted, or many copies want it at a time.",
                Query(_ONE.total_rate("prefill_copies_total", "outcome"), "{{outcome}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Wait for copies and rewinds",
                "Seconds a second that prompts with pages waited for their copy; hits that were shorter than promised.",
                Query(_ONE.total_rate("prefill_copy_wait_seconds_total"), "wait for copies"),
                Query(_ONE.total_rate("prefill_rewinds_total"), "rewinds per second"),
                unit="none",
                width=8,
            ),
        ),
    )


def _push() -> Row:
    return Row(
        title="Push",
        panels=(
            lines(
                "Steps by push mode",
                "at-end for long steps: a put call costs much, look at the way to the store.",
                Query(_ONE.total_rate("prefill_pushes_total", "mode"), "{{mode}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Computed KV that waits for a put",
                "Growing during a prompt: puts are slower than compute.",
                Query(_ONE.select("prefill_put_waiting_bytes")),
                unit="bytes",
                width=8,
            ),
            lines(
                "Pushes under way",
                "Micro-batches whose objects are not all put, and objects of a call (mean).",
                Query(_ONE.total("prefill_open_puts"), "open"),
                Query(_ONE.mean("prefill_put_batch_objects"), "objects of a call"),
                unit="none",
                width=8,
            ),
        ),
    )
