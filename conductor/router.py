"""Chooses where a request runs: filter -> score -> pick. Pure: takes what is known, returns a choice or the reason there is none.

prefill group   alive, of our model, with a live store process on its host   longest prefix hit, then fewest queued tokens
decode          alive, same layout as the prefill group                      has the pages, then fewest requests, then most pages
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from conductor.registry import Node
from moontide.registry import NodeRecord

Cost = Callable[[NodeRecord], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one request asks of its nodes."""

    request_id: str
    max_tokens_in_cache: int
    """Prompt and answer together."""
    avoid: Collection[str] = ()
    """Node ids that failed recently; taken only when there are no others."""


@dataclass(frozen=True, kw_only=True)
class OwnWork:
    """What this conductor sent and the nodes have not reported yet, by node id: heartbeats lag."""

    prefill_tokens: Mapping[str, int] = field(default_factory=dict)
    decode_requests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Capable:
    """Nodes that can serve the model together, grouped by the layout they share."""

    layout_json: str
    prefill: tuple[NodeRecord, ...]
    decode: tuple[NodeRecord, ...]
    stores: Mapping[str, NodeRecord]
    """Live store process of each host, by host id."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    prefill: NodeRecord
    decode: NodeRecord
    store: NodeRecord
    hit_blocks: int
    copy_blocks: int = 0


@dataclass(frozen=True)
class NoChoice:
    reason: str


def capable_nodes(nodes: Sequence[Node], *, model_id: str) -> Capable | NoChoice:
    """The nodes that can serve now, or why no prompt would be served.

    `model_id` "": whatever model the nodes have, as long as it is one. With several layouts the one with most prefill groups counts.
    """
    alive = [node.record for node in nodes if node.alive]
    stores = {r.host_id: r for r in alive if r.role == "kvstore"}
    workers = [r for r in alive if r.role in ("prefill", "decode") and model_id in ("", r.model_id)]
    models = sorted({r.model_id for r in workers})
    if len(models) > 1:
        return NoChoice(f"the registry holds nodes of several models ({', '.join(models)}); set conductor.model_id")
    of_model = f" for model {model_id}" if model_id else ""
    prefill = [r for r in workers if r.role == "prefill"]
    decode = [r for r in workers if r.role == "decode"]
    if not prefill:
        return NoChoice(f"no complete prefill group is alive{of_model}")
    if not decode:
        return NoChoice(f"no decode instance is alive{of_model}")
    if not stores:
        return NoChoice("no store process is alive")
    stored = [r for r in prefill if r.host_id in stores]
    if not stored:
        hosts = ", ".join(sorted({r.host_id for r in prefill}))
        return NoChoice(f"no store process is alive on the hosts of the prefill groups ({hosts})")
    shared = {r.layout_json for r in stored} & {r.layout_json for r in decode}
    if not shared:
        return NoChoice(
            "prefill groups and decode instances have different KV layouts; give them equal `kv` and `model` settings"
        )
    layout = max(sorted(shared), key=lambda text: sum(r.layout_json == text for r in stored))
    return Capable(
        layout_json=layout,
        prefill=tuple(r for r in stored if r.layout_json == layout),
        decode=tuple(r for r in decode if r.layout_json == layout),
        stores=stores,
    )


def choose(capable: Capable, need: Need, *, hit_blocks: Mapping[str, int], own: OwnWork, block_tokens: int) -> Choice:
    """Pick one prefill group and one decode instance. `hit_blocks`: leading blocks of the prompt by store node id."""

    def hits(record: NodeRecord) -> int:
        return hit_blocks.get(capable.stores[record.host_id].node_id, 0)

    def prefill_cost(record: NodeRecord) -> tuple[float, ...]:
        queued_tokens = record.load.get("queued_tokens", 0.0) + own.prefill_tokens.get(record.node_id, 0)
        return (-hits(record), queued_tokens)

    def decode_cost(record: NodeRecord) -> tuple[float, ...]:
        load = record.load
        num_requests = sum(load.get(key, 0.0) for key in ("waiting", "pulling", "running"))
        num_requests += own.decode_requests.get(record.node_id, 0)
        free_pages = load.get("free_pages", 0.0)
        has_pages = free_pages * block_tokens >= need.max_tokens_in_cache
        return (not has_pages, num_requests, -free_pages)

    prefill = _cheapest(capable.prefill, need, prefill_cost)
    decode = _cheapest(capable.decode, need, decode_cost)
    return Choice(prefill=prefill, decode=decode, store=capable.stores[prefill.host_id], hit_blocks=hits(prefill))


def _cheapest(records: Sequence[NodeRecord], need: Need, cost: Cost) -> NodeRecord:
    """Equal nodes take turns: the request id decides between them."""
    preferred = [r for r in records if r.node_id not in need.avoid] or records
    return min(preferred, key=lambda r: (*cost(r), _turn(need.request_id, r.node_id)))


def _turn(request_id: str, node_id: str) -> bytes:
    return hashlib.blake2b(f"{request_id} {node_id}".encode(), digest_size=8).digest()
