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
    quantiles,
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
_WAITS = (*_PARTS[1:4], ("wait to send", "prefill_stage_wait_send_seconds_total"))


def board() -> Board:
    return Board(
        name="prefill",
        title="Moontide / Prefill",
        description=(
            "Prefill groups: the stages of a group compute a prompt chunk by chunk, as a pipeline. How busy they are, where they wait, "
            "how prompts are cut, what is in the queue."
        ),
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
                "Below 100%: a group has lost a stage and takes no prompts.",
                f"avg({_ONE.select('prefill_group_complete')})",
                unit="percentunit",
                bad_below=1,
                width=4,
            ),
            number(
                "Bubble share",
                "Of the time in which a group had work: stages computed nothing.",
                f"{bubble} / ({bubble} + {busy})",
                unit="percentunit",
                width=4,
            ),
            number(
                "Prompts ended",
                "Per second, however they ended.",
                _ONE.total_rate("prefill_requests_total"),
                unit="reqps",
                width=4,
            ),
            number(
                "Longest queue",
                "Predicted time until a group has computed everything it was given.",
                f"max({_ONE.select('prefill_queued_seconds')})",
                unit="s",
                width=4,
            ),
            number(
                "Pages in use",
                "A page holds the KV cache of one block of tokens. All groups.",
                f"1 - {_ONE.total('prefill_free_pages')} / {_ONE.total('prefill_num_pages')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Failed writes to the store",
                "Objects given up in the last hour: the store is full or gone.",
                f"sum(increase({_ONE.select('prefill_puts_failed_total')}[1h]))",
                unit="short",
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
                "Mean over the stages; adds up to 100% while groups are complete.",
                *(Query(f"avg({_ONE.rate(counter)})", part) for part, counter in _PARTS),
                unit="percentunit",
                stacked=True,
                top=1,
            ),
            lines(
                "Occupancy by stage",
                "Share of the time in which the stage computes. Uneven: see moontide status and the setting prefill.layer_split.",
                Query(_ONE.rate("prefill_stage_busy_seconds_total")),
                unit="percentunit",
                top=1,
            ),
            lines(
                "Bubbles by stage",
                "Share of time without work for the stage, though its group had some. At best (P - 1) / (m + P - 1): m chunks, P stages.",
                Query(
                    _ONE.total_rate("prefill_bubble_seconds_total", "instance, stage"), "{{instance}} stage {{stage}}"
                ),
                unit="percentunit",
                top=1,
            ),
            lines(
                "Bubbles by kind",
                "Mean share of a stage's time: the stage before is not done; too little CPU; the store or the link is slow.",
                *(Query(f"avg({_ONE.rate(counter)})", part) for part, counter in _WAITS),
                unit="percentunit",
                stacked=True,
            ),
            lines(
                "Overhead of a step",
                "From all input there to the start of the computation. Above 2 ms: the process gets too little CPU.",
                Query(
                    f"{_ONE.rate('prefill_stage_overhead_seconds_total')} / {_ONE.rate('prefill_stage_steps_total')}",
                ),
                unit="s",
                limits=(0.002,),
            ),
            lines(
                "Groups formed anew",
                "In 15 minutes, by stage: a stage dies, or is too slow to answer.",
                Query(f"increase({_ONE.select('prefill_group_epochs_total')}[15m])"),
                unit="short",
            ),
        ),
    )


def _plan() -> Row:
    return Row(
        title="Chunk plan",
        panels=(
            heat(
                "Tokens of a step",
                "A step is one chunk, or several short ones together. Steps per second by their tokens.",
                _ONE.buckets("prefill_step_tokens"),
                unit="short",
                width=8,
            ),
            lines(
                "Planned time of a step",
                "As predicted, on the slowest stage.",
                *quantiles(_ONE, "prefill_planned_step_seconds", (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Prompts in a step",
                "Mean. 1 with small steps: short prompts come one by one.",
                Query(_ONE.mean("prefill_step_chunks", "instance")),
                unit="none",
                width=8,
            ),
            lines(
                "Steps in flight",
                "Of all groups; a pipeline is full with one per stage. And steps computed per second, by all stages.",
                Query(_ONE.total("prefill_in_flight_steps"), "in flight"),
                Query(_ONE.total_rate("prefill_stage_steps_total"), "computed per second"),
                unit="short",
                width=8,
            ),
            lines(
                "Tokens computed",
                "Prompt tokens per second, by stage process.",
                Query(_ONE.rate("prefill_chunk_tokens_total")),
                unit="si:tok/s",
                width=8,
            ),
            latest_table(
                "How the groups plan",
                "What each group pipelines (mode), who comes first (policy), how prompts are cut (chunking).",
                f"group by (instance, mode, policy, chunking) ({_ONE.select('prefill_plan_info')})",
                unit="short",
                columns={"instance": "Group", "mode": "Mode", "policy": "Policy", "chunking": "Chunking"},
                hidden=("Value",),
                width=8,
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
                "Predicted / measured - 1, median, by stage. Away from 0 for long: the machine is shared, or has become slower.",
                Query(_ONE.quantile(0.5, "prefill_step_prediction_error", "stage"), "stage {{stage}}"),
                unit="percentunit",
                width=8,
            ),
            signed_lines(
                "Error of a step, spread",
                "Predicted / measured - 1, all stages.",
                *quantiles(_ONE, "prefill_step_prediction_error", shares),
                unit="percentunit",
                width=8,
            ),
            signed_lines(
                "Error of a prompt",
                "Predicted, as if alone / measured compute time - 1. Below 0: prompts waited for others.",
                *quantiles(_ONE, "prefill_prompt_prediction_error", shares),
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
                "Queue by priority",
                "Requests without pages, or without room in the store, by priority; and those that are being computed.",
                Query(_ONE.total("prefill_waiting_requests", "priority"), "waiting, {{priority}}"),
                Query(_ONE.total("prefill_running_requests"), "running"),
                unit="short",
                stacked=True,
                width=8,
            ),
            lines(
                "Predicted queue",
                "Time until each group has computed everything it was given. Requests are routed by it.",
                Query(_ONE.select("prefill_queued_seconds")),
                unit="s",
                width=8,
            ),
            lines(
                "Queued tokens",
                "Prompt tokens that no step has taken yet.",
                Query(_ONE.select("prefill_queued_tokens")),
                unit="short",
                width=8,
            ),
            lines(
                "Preemptions",
                "Per second: prompts that let another go first; that gave up their pages for it; steps of those that waited too long.",
                Query(_ONE.total_rate("prefill_preemptions_total"), "preempted"),
                Query(_ONE.total_rate("prefill_drops_total"), "gave up pages"),
                Query(_ONE.total_rate("prefill_starved_steps_total"), "steps after too long a wait"),
                unit="cps",
                width=8,
            ),
            lines(
                "Pages",
                "Room for KV cache, free and all, by group.",
                Query(_ONE.select("prefill_free_pages"), "free {{instance}}"),
                Query(_ONE.select("prefill_num_pages"), "all {{instance}}"),
                unit="short",
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
                "Prompt tokens whose KV cache was there, and the part of them that was still in the group's own pages.",
                Query(_ONE.total_rate("prefill_hit_tokens_total"), "hit"),
                Query(_ONE.total_rate("prefill_page_hit_tokens_total"), "of these in own pages"),
                unit="si:tok/s",
                width=8,
            ),
            lines(
                "Copies from other hosts",
                "Prefixes per second. given up: they came too late; the network is slower than predicted, or many copies share it.",
                Query(_ONE.total_rate("prefill_copies_total", "outcome"), "{{outcome}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Waits for copies, and lost hits",
                "Mean number of prompts that wait for a copy; hits per second that turned out shorter, so that the rest was computed.",
                Query(_ONE.total_rate("prefill_copy_wait_seconds_total"), "waiting for a copy"),
                Query(_ONE.total_rate("prefill_rewinds_total"), "shorter hits per second"),
                unit="none",
                width=8,
            ),
        ),
    )


def _push() -> Row:
    return Row(
        title="Push: KV cache to the store",
        panels=(
            lines(
                "Steps by push mode",
                "layer-wise: written while later layers compute. at-end: after the step, because a write costs much.",
                Query(_ONE.total_rate("prefill_pushes_total", "mode"), "{{mode}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Computed KV cache not yet written",
                "Growing during a prompt: the store is slower than the computation.",
                Query(_ONE.select("prefill_put_waiting_bytes")),
                unit="bytes",
                width=8,
            ),
            lines(
                "Writes under way",
                "Steps whose KV cache is not all written, and the mean number of objects written by one call.",
                Query(_ONE.total("prefill_open_puts"), "steps"),
                Query(_ONE.mean("prefill_put_batch_objects"), "objects of a call"),
                unit="short",
                width=8,
            ),
        ),
    )
