"""KV store: how full it is, what it saves, what moving KV costs, and what leaves."""

from __future__ import annotations

from deploy.grafana.promql import Scope, optional
from deploy.grafana.style import Board, Query, Row, heat, lines, number, quantiles

_ALL = Scope()
_RESULT_CORRUPT = 'result="corrupt"'
_RESULT_WAIT = 'result="wait"'


def board() -> Board:
    return Board(
        name="kvstore",
        title="Moontide / KV store",
        description=(
            "The distributed store of KV cache, in blocks of tokens: how full it is, what it saves, what moving KV cache costs, "
            "what leaves."
        ),
        rows=(_now(), _fill(), _hits(), _bandwidth(), _leaving(), _copies(), _ssd(), _index()),
    )


def _now() -> Row:
    return Row(
        title="Now",
        panels=(
            number(
                "Fill",
                "Of the bytes that may be used. Near 100% is normal for a cache.",
                f"{_ALL.total('kvstore_used_bytes')} / {_ALL.total('kvstore_capacity_bytes')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Token hit ratio",
                "Prompt tokens of the last hour whose KV cache was there.",
                f"{_ALL.total_rate('conductor_prefix_hit_tokens_total', window='1h')} / "
                f"{_ALL.total_rate('conductor_prompt_tokens_total', window='1h')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Unreachable peers",
                "Store processes of other hosts that do not answer.",
                _ALL.total("kvstore_unreachable_peers"),
                unit="short",
                bad_above=0.5,
                width=4,
            ),
            number(
                "Damaged objects",
                "Of the last hour: failed their checksum, and were not used.",
                optional(f"sum(increase({_ALL.select('kvstore_client_gets_total', _RESULT_CORRUPT)}[1h]))"),
                unit="short",
                bad_above=0.5,
                width=4,
            ),
            number(
                "Waits for room",
                "Tries per second that found no room: the store is too small.",
                optional(_ALL.total_rate("kvstore_reserves_total", extra=_RESULT_WAIT)),
                unit="cps",
                bad_above=0.1,
                width=4,
            ),
            number(
                "Stores not indexed",
                "Store processes whose blocks a conductor does not know completely.",
                f"max({_ALL.select('conductor_index_nodes_behind')})",
                unit="short",
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
                "Reserved, cached or not yet removed, and what may be used, by store process.",
                Query(_ALL.select("kvstore_used_bytes"), "used {{instance}}"),
                Query(_ALL.select("kvstore_capacity_bytes"), "capacity {{instance}}"),
                unit="bytes",
                width=8,
            ),
            lines(
                "Blocks",
                "sealed: complete, a prompt can hit them. pinned: in use by a prompt, not to be evicted.",
                Query(_ALL.total("kvstore_sealed_blocks"), "sealed"),
                Query(_ALL.total("kvstore_pinned_blocks"), "pinned"),
                unit="short",
                width=8,
            ),
            lines(
                "Reservations by result",
                "Tries to reserve room for a prompt, per second. wait: none yet. too_large: can never fit.",
                Query(_ALL.total_rate("kvstore_reserves_total", "result"), "{{result}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Prompts with a reservation",
                "By store process. Must return to 0 when idle.",
                Query(_ALL.select("kvstore_reservations")),
                unit="short",
            ),
            lines(
                "Failed renewals and releases",
                "Of reservations, by operation: the store process is slow or gone.",
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
                "Prompt tokens by tier",
                "pages: still on a prefill group. store: read from the store. computed: no hit.",
                Query(pages, "pages"),
                Query(f"clamp_min({cached} - {pages}, 0)", "store"),
                Query(f"clamp_min({prompt} - {cached}, 0)", "computed"),
                unit="si:tok/s",
                stacked=True,
                width=8,
            ),
            lines(
                "Blocks asked for, by tier",
                "Per second, all store processes: in memory, on the SSD, or not there.",
                Query(f"{hit} - ({optional(ssd)})", "memory"),
                Query(optional(ssd), "SSD"),
                Query(f"clamp_min({asked} - {hit}, 0)", "missed"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Hit ratio by store process",
                "Share of the blocks that prompts asked for.",
                Query(f"{_ALL.rate('kvstore_hit_blocks_total')} / {_ALL.rate('kvstore_asked_blocks_total')}"),
                unit="percentunit",
                top=1,
                width=8,
            ),
            lines(
                "Objects read",
                "Reads per second by result, all processes. corrupt: failed the checksum, counts as missing.",
                Query(_ALL.total_rate("kvstore_client_gets_total", "result"), "{{result}}"),
                unit="cps",
                stacked=True,
            ),
            lines(
                "Objects written",
                "Writes per second by result, all processes.",
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
                "Bytes over the time in calls: what the path to the store gives.",
                Query(f"{put_bytes} / {put_seconds}", "push"),
                Query(f"{pulled} / {_ALL.total_rate('decode_pull_seconds_sum')}", "pull"),
                unit="Bps",
                width=8,
            ),
            lines(
                "Time of a pull",
                "One read by a decode instance: all layers of a few blocks.",
                *quantiles(_ALL, "decode_pull_seconds", (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Exposed latency: hand-off",
                "End of prefill to decode holding all KV cache. Milliseconds, however long the prompt is.",
                *quantiles(_ALL, "conductor_handoff_seconds", (0.5, 0.9, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Exposed latency: tail of the push",
                "First token to all KV cache of the prompt in the store.",
                *quantiles(_ALL, "prefill_tail_seconds", (0.5, 0.9, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Exposed latency: back-pressure",
                "How long a prefill step waited because earlier ones were still being written, mean over all steps.",
                Query(
                    f"{_ALL.total_rate('prefill_put_wait_seconds_total')} / {_ALL.total_rate('prefill_stage_steps_total')}",
                    "per step",
                ),
                unit="s",
                width=8,
            ),
            heat(
                "Hand-off, distribution",
                "Requests per second by how long the hand-off took.",
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
                "Blocks dropped for room per second, by store process.",
                Query(_ALL.rate("kvstore_evicted_blocks_total")),
                unit="cps",
                width=8,
            ),
            lines(
                "Objects on their way out",
                "Evicted, but still being read, by store process. For seconds, not minutes.",
                Query(_ALL.select("kvstore_objects_to_remove")),
                unit="short",
                width=8,
            ),
            lines(
                "Expired and misplaced",
                "Per second: reservations that nobody renewed (a conductor died or hung); objects that landed on another host.",
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
                "Copied from another host per second, by the store process that copied.",
                Query(_ALL.rate("kvstore_replicated_blocks_total")),
                unit="cps",
                width=8,
            ),
            lines(
                "Copies of hot prefixes",
                "Prefixes that many prompts share, copied to one more store: by outcome, and their blocks, per second.",
                Query(_ALL.total_rate("conductor_hot_copies_total", "outcome"), "{{outcome}}"),
                Query(_ALL.total_rate("conductor_hot_copied_blocks_total"), "blocks"),
                unit="cps",
                width=8,
            ),
            lines(
                "Prefixes watched",
                "Whose use is counted, to find those worth a copy, by conductor.",
                Query(_ALL.select("conductor_hot_prefixes")),
                unit="short",
                width=8,
            ),
        ),
    )


def _ssd() -> Row:
    return Row(
        title="SSD tier (with the setting kvstore.ssd_dir)",
        panels=(
            lines(
                "Bytes on the SSD",
                "And what they may take. 0: there is no SSD tier.",
                Query(optional(_ALL.total("kvstore_ssd_used_bytes")), "used"),
                Query(optional(_ALL.total("kvstore_ssd_capacity_bytes")), "capacity"),
                unit="bytes",
                width=6,
            ),
            lines(
                "Blocks on the SSD",
                "A prompt can hit them.",
                Query(optional(_ALL.total("kvstore_ssd_blocks")), "blocks"),
                unit="short",
                width=6,
            ),
            lines(
                "Blocks kept and not kept",
                "Per second. not kept: evicted from memory without a copy on the SSD. damaged: failed the checksum, and forgotten.",
                Query(optional(_ALL.total_rate("kvstore_ssd_kept_blocks_total")), "kept"),
                Query(optional(_ALL.total_rate("kvstore_ssd_not_kept_blocks_total")), "not kept"),
                Query(optional(_ALL.total_rate("kvstore_ssd_damaged_blocks_total")), "damaged"),
                unit="cps",
                width=6,
            ),
            lines(
                "Wait for the SSD",
                "By prompts, for blocks on the SSD. After 2 s they are computed instead.",
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
                "Known to each conductor, all store processes. Drops when one of them restarts.",
                Query(_ALL.select("conductor_indexed_blocks")),
                unit="short",
                width=6,
            ),
            lines(
                "Memory of the index",
                "By conductor, about 20 bytes a block.",
                Query(_ALL.select("conductor_index_bytes")),
                unit="bytes",
                width=6,
            ),
            lines(
                "Stores not indexed",
                "Store processes whose blocks are not all known. Above 0 for more than seconds: one does not answer.",
                Query(_ALL.select("conductor_index_nodes_behind")),
                unit="short",
                width=6,
            ),
            lines(
                "Snapshots read",
                "Full lists of blocks read from store processes, by reason. gap: events were lost.",
                Query(_ALL.total_rate("conductor_index_snapshots_total", "reason"), "{{reason}}"),
                unit="cps",
                width=6,
            ),
        ),
    )
