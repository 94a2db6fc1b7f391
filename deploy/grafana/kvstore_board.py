"""KV store: how full it is, what it saves, what moving KV costs, and what leaves."""

from __future__ import annotations

from deploy.grafana.promql import Scope, optional
from deploy.grafana.style import Board, Query, Row, heat, lines, number

_ALL = Scope()
_RESULT_CORRUPT = 'result="corrupt"'
_RESULT_WAIT = 'result="wait"'


def board() -> Board:
    return Board(
        name="kvstore",
        title="Moontide / KV store",
        description="Fill, hits by tier, bandwidth and what of it clients feel, evictions, replicas, hot copies, the index.",
        rows=(_now(), _fill(), _hits(), _bandwidth(), _leaving(), _copies(), _ssd(), _index()),
    )


def _now() -> Row:
    return Row(
        title="Now",
        panels=(
            number(
                "Fill",
                "Of the bytes that may be used. Near 1 is normal for a cache.",
                f"{_ALL.total('kvstore_used_bytes')} / {_ALL.total('kvstore_capacity_bytes')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Token hit ratio",
                "Prompt tokens of the last hour that were not computed.",
                f"{_ALL.total_rate('conductor_prefix_hit_tokens_total', window='1h')} / "
                f"{_ALL.total_rate('conductor_prompt_tokens_total', window='1h')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Unreachable peers",
                "Segments of other hosts that do not answer; the log names the address.",
                _ALL.total("kvstore_unreachable_peers"),
                unit="none",
                bad_above=0.5,
                width=4,
            ),
            number(
                "Damaged objects",
                "Of the last hour: bytes were not what their key says; they were not used.",
                optional(f"sum(increase({_ALL.select('kvstore_client_gets_total', _RESULT_CORRUPT)}[1h]))"),
                unit="none",
                bad_above=0.5,
                width=4,
            ),
            number(
                "Calls that had to wait",
                "Reservations per second that found no room: the pool is too small for the prompts in work.",
                optional(_ALL.total_rate("kvstore_reserves_total", extra=_RESULT_WAIT)),
                unit="cps",
                bad_above=0.1,
                width=4,
            ),
            number(
                "Stores behind",
                "Store nodes whose blocks a conductor does not know completely.",
                f"max({_ALL.select('conductor_index_nodes_behind')})",
                unit="none",
                bad_above=0.5,
                width=4,
            ),
        ),
    )


def _fill() -> Row:
    return Row(
        title="Fill",
        panels=(
            lines(
                "Bytes in use",
                "Reserved, cached, or not yet removed, and what may be used, by store process.",
                Query(_ALL.select("kvstore_used_bytes"), "used {{instance}}"),
                Query(_ALL.select("kvstore_capacity_bytes"), "capacity {{instance}}"),
                unit="bytes",
                width=8,
            ),
            lines(
                "Blocks",
                "That a prompt can hit, and those of them that a reservation refers to.",
                Query(_ALL.total("kvstore_sealed_blocks"), "sealed"),
                Query(_ALL.total("kvstore_pinned_blocks"), "pinned"),
                unit="none",
                width=8,
            ),
            lines(
                "Reservations by result",
                "wait: no room yet. too_large: can never fit.",
                Query(_ALL.total_rate("kvstore_reserves_total", "result"), "{{result}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Prompts under way",
                "That hold room or pins. Must return to 0 when idle.",
                Query(_ALL.select("kvstore_reservations")),
                unit="none",
            ),
            lines(
                "Failed renewals and releases",
                "By operation: the store process is slow or gone.",
                Query(_ALL.total_rate("conductor_store_errors_total", "operation"), "{{operation}}"),
                unit="cps",
            ),
        ),
    )


def _hits() -> Row:
    hit, asked, ssd = (
        _ALL.total_rate(name)
        for name in ("kvstore_hit_blocks_total", "kvstore_asked_blocks_total", "kvstore_ssd_hit_blocks_total")
    )
    prompt, cached, pages = (
        _ALL.total_rate(name)
        for name in (
            "conductor_prompt_tokens_total",
            "conductor_prefix_hit_tokens_total",
            "prefill_page_hit_tokens_total",
        )
    )
    return Row(
        title="Hits by tier",
        panels=(
            lines(
                "Prompt tokens by where their KV came from",
                "Per second: still in the pages of a prefill group, from the store, or computed.",
                Query(pages, "pages"),
                Query(f"clamp_min({cached} - {pages}, 0)", "store"),
                Query(f"clamp_min({prompt} - {cached}, 0)", "computed"),
                unit="none",
                stacked=True,
                width=8,
            ),
            lines(
                "Blocks asked for, by tier",
                "Per second, at the first grant of a prompt, all store processes.",
                Query(f"{hit} - ({optional(ssd)})", "memory"),
                Query(optional(ssd), "SSD"),
                Query(f"clamp_min({asked} - {hit}, 0)", "missed"),
                unit="none",
                stacked=True,
                width=8,
            ),
            lines(
                "Hit ratio by store process",
                "Hit over asked-for blocks.",
                Query(f"{_ALL.rate('kvstore_hit_blocks_total')} / {_ALL.rate('kvstore_asked_blocks_total')}"),
                unit="percentunit",
                top=1,
                width=8,
            ),
            lines(
                "Objects fetched",
                "By result, all processes. corrupt: the bytes were not what their key says; used as a miss.",
                Query(_ALL.total_rate("kvstore_client_gets_total", "result"), "{{result}}"),
                unit="cps",
                stacked=True,
            ),
            lines(
                "Objects put",
                "By result, all processes.",
                Query(_ALL.total_rate("kvstore_client_puts_total", "result"), "{{result}}"),
                unit="cps",
                stacked=True,
            ),
        ),
    )


def _bandwidth() -> Row:
    put_bytes, put_seconds = _ALL.total_rate("prefill_put_bytes_total"), _ALL.total_rate("prefill_put_seconds_total")
    pulled = _ALL.total_rate("decode_pulled_bytes_total")
    return Row(
        title="Push and pull",
        panels=(
            lines(
                "Bytes moved",
                "Per second: pushed by stages, pulled by decode instances, written back after answers.",
                Query(put_bytes, "push"),
                Query(pulled, "pull"),
                Query(_ALL.total_rate("decode_written_bytes_total"), "write-back"),
                unit="Bps",
                width=8,
            ),
            lines(
                "Bandwidth of a call",
                "Bytes over the time in calls: what the way to the store gives.",
                Query(f"{put_bytes} / {put_seconds}", "push"),
                Query(f"{pulled} / {_ALL.total_rate('decode_pull_seconds_sum')}", "pull"),
                unit="Bps",
                width=8,
            ),
            lines(
                "Time of a pull",
                "All layer groups of a few blocks.",
                *(Query(_ALL.quantile(share, "decode_pull_seconds"), f"p{share * 100:g}") for share in (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Exposed: hand-off",
                "Prefill completed to decode holding all KV, as conductors see it. Milliseconds, whatever the length.",
                *(
                    Query(_ALL.quantile(share, "conductor_handoff_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.9, 0.99)
                ),
                unit="s",
                width=8,
            ),
            lines(
                "Exposed: tail of the push",
                "First token to everything of the prompt sealed.",
                *(
                    Query(_ALL.quantile(share, "prefill_tail_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.9, 0.99)
                ),
                unit="s",
                width=8,
            ),
            lines(
                "Exposed: back-pressure",
                "Time that a step with KV to be put waited for the puts before it, mean over all steps.",
                Query(
                    f"{_ALL.total_rate('prefill_put_wait_seconds_total')} / {_ALL.total_rate('prefill_stage_steps_total')}",
                    "per step",
                ),
                unit="s",
                width=8,
            ),
            heat(
                "Hand-off",
                "Observations per second by bucket.",
                _ALL.buckets("conductor_handoff_seconds"),
                unit="s",
                width=24,
            ),
        ),
    )


def _leaving() -> Row:
    return Row(
        title="Evictions",
        panels=(
            lines(
                "Evicted blocks",
                "Sealed blocks dropped for room, per second.",
                Query(_ALL.rate("kvstore_evicted_blocks_total")),
                unit="none",
                width=8,
            ),
            lines(
                "Objects on their way out",
                "Leases of readers hold them for seconds, not minutes.",
                Query(_ALL.select("kvstore_objects_to_remove")),
                unit="none",
                width=8,
            ),
            lines(
                "Expired and misplaced",
                "Reservations that nobody renewed; sealed objects found in another host's segment. Per second.",
                Query(_ALL.total_rate("kvstore_expired_reservations_total"), "reservations expired"),
                Query(_ALL.total_rate("kvstore_misplaced_objects_total"), "objects misplaced"),
                unit="cps",
                width=8,
            ),
        ),
    )


def _copies() -> Row:
    return Row(
        title="Replicas and hot copies",
        panels=(
            lines(
                "Replicated blocks",
                "Copied from another host, per second, by the store process that copied.",
                Query(_ALL.rate("kvstore_replicated_blocks_total")),
                unit="none",
                width=8,
            ),
            lines(
                "Copies of hot prefixes",
                "By outcome, and blocks copied; the conductors order them.",
                Query(_ALL.total_rate("conductor_hot_copies_total", "outcome"), "{{outcome}}"),
                Query(_ALL.total_rate("conductor_hot_copied_blocks_total"), "blocks"),
                unit="cps",
                width=8,
            ),
            lines(
                "Prefixes whose heat is known",
                "By conductor.",
                Query(_ALL.select("conductor_hot_prefixes")),
                unit="none",
                width=8,
            ),
        ),
    )


def _ssd() -> Row:
    return Row(
        title="SSD (with kvstore.ssd_dir)",
        panels=(
            lines(
                "Bytes on the SSD",
                "Of segment files, and what they may take. 0: no SSD is set.",
                Query(optional(_ALL.total("kvstore_ssd_used_bytes")), "used"),
                Query(optional(_ALL.total("kvstore_ssd_capacity_bytes")), "capacity"),
                unit="bytes",
                width=6,
            ),
            lines(
                "Blocks on the SSD",
                "That can come back.",
                Query(optional(_ALL.total("kvstore_ssd_blocks")), "blocks"),
                unit="none",
                width=6,
            ),
            lines(
                "Blocks kept and not kept",
                "Per second. not kept: evicted from the pool and not on the SSD. damaged: found damaged and forgotten.",
                Query(optional(_ALL.total_rate("kvstore_ssd_kept_blocks_total")), "kept"),
                Query(optional(_ALL.total_rate("kvstore_ssd_not_kept_blocks_total")), "not kept"),
                Query(optional(_ALL.total_rate("kvstore_ssd_damaged_blocks_total")), "damaged"),
                unit="cps",
                width=6,
            ),
            lines(
                "Wait for the SSD",
                "Of reservations for blocks from the SSD; near 2 s: what does not come in time is computed.",
                Query(optional(_ALL.quantile(0.5, "kvstore_ssd_promote_seconds")), "p50"),
                Query(optional(_ALL.quantile(0.99, "kvstore_ssd_promote_seconds")), "p99"),
                unit="s",
                width=6,
            ),
        ),
    )


def _index() -> Row:
    return Row(
        title="Prefix index",
        panels=(
            lines(
                "Blocks in the index",
                "Summed over store nodes, by conductor. Drops when a store process restarts.",
                Query(_ALL.select("conductor_indexed_blocks")),
                unit="none",
                width=6,
            ),
            lines(
                "Memory of the index",
                "By conductor.",
                Query(_ALL.select("conductor_index_bytes")),
                unit="bytes",
                width=6,
            ),
            lines(
                "Store nodes behind",
                "Above 0 for more than seconds: a store process answers no snapshots.",
                Query(_ALL.select("conductor_index_nodes_behind")),
                unit="none",
                width=6,
            ),
            lines(
                "Snapshots read",
                "By reason; gap beyond starts and outages of Redis: events get lost.",
                Query(_ALL.total_rate("conductor_index_snapshots_total", "reason"), "{{reason}}"),
                unit="cps",
                width=6,
            ),
        ),
    )
