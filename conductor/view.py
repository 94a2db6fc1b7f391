"""The cluster as the router sees it: the nodes that can serve one model, in columns, and what this conductor sent them since.

A view is made once per read of the registry and never changes; SentWork goes with one view and grows with every request that is placed.
Pure: times are given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from conductor.cost import Column, Corrections, CostModel, Pipelines, Steps
from conductor.registry import Node
from kvstore.layout import KVLayout
from moontide.registry import NodeRecord

Rows: TypeAlias = NDArray[np.intp]

_BYTES_PER_S = 1e9
"""From store to node, until some node has measured it."""
_ON_THE_WAY_S = 0.02
"""What was sent so shortly before a report may not have arrived in time to be in it."""
_CHUNK_TOKENS = 2048
"""Most tokens of a step, of groups that do not say."""


@dataclass(frozen=True)
class NoChoice:
    """No prompt can be served."""

    reason: str


@dataclass(frozen=True)
class Dropped:
    """A node that was not considered, and why."""

    node_id: str
    reason: str


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillGroups:
    """One row per group."""

    records: tuple[NodeRecord, ...]
    row_of: Mapping[str, int]
    """By node id."""
    store_rows: Rows
    """The store on the group's host, by its row in ClusterView.stores."""
    reported_s: Column
    """When it said so, on the conductor's clock."""
    pipelines: Pipelines
    free_from_s: Column
    """When the slowest stage will have taken in all that the group had to do at its last report, on the conductor's clock."""
    num_tokens: Column
    """That all its pages hold."""
    fetch_block_s: Column
    """From the store on the group's host to its stages."""
    copy_block_s: Column
    """From a store on another host to that."""
    tail_s: Column
    """Last chunk computed to everything sealed."""
    wait_factor: Column
    fetch_factor: Column
    prefill_factor: Column
    handoff_factor: Column


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeInstances:
    """One row per instance."""

    records: tuple[NodeRecord, ...]
    row_of: Mapping[str, int]
    store_rows: Rows
    """The store on the instance's host; 0 where `has_store` is false."""
    reported_s: Column
    has_store: NDArray[np.bool_]
    steps: Steps
    requests: Column
    context_tokens: Column
    max_batch: Column
    free_tokens: Column
    """That its free pages hold."""
    num_tokens: Column
    """That all its pages hold."""
    free_from_s: Column
    """When it will have computed the prompts that it prefills itself."""
    chunk_tokens: Column
    """Most prompt tokens that it computes in a step."""
    prefill_room_tokens: Column
    """Prompt tokens that it takes on to compute itself."""
    wait_factor: Column
    fetch_factor: Column
    prefill_factor: Column
    tbt_factor: Column
    is_timed: bool
    """Whether any instance has reported its step model. If not, each request in a batch counts as one second."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterView:
    """Nodes that can serve the model together: alive, of one layout, the groups with a live store process on their host."""

    layout: KVLayout
    layout_json: str
    prefill: PrefillGroups
    decode: DecodeInstances
    stores: tuple[NodeRecord, ...]
    store_row_of: Mapping[str, int]
    is_timed: bool
    """Whether any group has reported its step model. If not, a token counts as one second and nothing is predicted."""
    fetch_bytes_per_s: float
    """Usual, from a store to a node."""
    usual_prefill_s: float
    """How long a prompt keeps a group busy."""
    dispatch_s: float
    dropped: tuple[Dropped, ...]

    def can_hold(self, prompt_tokens: int, max_tokens_in_cache: int) -> bool:
        """Whether some group has pages for the prompt, if all are free, and some decode instance for prompt and answer."""
        return bool(
            (self.prefill.num_tokens >= prompt_tokens).any() and (self.decode.num_tokens >= max_tokens_in_cache).any()
        )

    @classmethod
    def build(
        cls,
        nodes: Sequence[Node],
        *,
        model_id: str,
        cost: CostModel,
        distrusted: Collection[str] = (),
        layout_before: str = "",
    ) -> ClusterView | NoChoice:
        """The nodes that can serve now, or why no prompt would be served.

        Args:
            model_id: "": whatever model the nodes have, as long as it is one. With several layouts the one with most groups counts.
            distrusted: nodes that were lost a moment ago, whatever the registry still says.
            layout_before: of the view before this one; it stays while no other has more groups.
        """
        dropped: list[Dropped] = []
        serving = list(_serving(nodes, model_id, distrusted, dropped))
        stores = {node.record.host_id: node.record for node in serving if node.record.role == "kvstore"}
        prefill = [node for node in serving if node.record.role == "prefill"]
        decode = [node for node in serving if node.record.role == "decode"]
        stored = [node for node in prefill if node.record.host_id in stores]
        layouts = [node.record.layout_json for node in stored]
        shared = sorted(set(layouts) & {node.record.layout_json for node in decode})
        if (reason := _why_none(prefill, decode, stores, model_id, bool(shared))) is not None:
            return NoChoice(reason)
        layout_json = max(shared, key=lambda layout: (layouts.count(layout), layout == layout_before))
        for node in [*prefill, *decode]:
            if node.record.layout_json != layout_json:
                dropped.append(Dropped(node.record.node_id, "another KV layout than most prefill groups"))
            elif node.record.role == "prefill" and node.record.host_id not in stores:
                dropped.append(Dropped(node.record.node_id, "no store process is alive on its host"))
        return _view(
            [node for node in stored if node.record.layout_json == layout_json],
            [node for node in decode if node.record.layout_json == layout_json],
            stores,
            layout_json,
            cost,
            tuple(dropped),
        )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request on its way, as far as it loads nodes."""

    sent_s: float
    prefill_node_id: str
    """A prefill group, or the decode instance that computes the prompt itself."""
    busy_s: float
    """Time that the prompt keeps the slowest stage busy."""
    decode_node_id: str | None
    """None: no decode instance takes over."""
    context_tokens: int
    holder_id: str | None
    """Store node that K/V is copied from."""
    copy_bytes: int


class SentWork:
    """What this conductor sent and the reports of a view do not show. One queue per node that drains with time."""

    def __init__(self, view: ClusterView, open_items: Iterable[Sent] = ()) -> None:
        """`open_items`: of requests that are not over, oldest first; what the reports show already is passed over."""
        self._view = view
        self.prefill_free_from_s: Column = view.prefill.free_from_s.copy()
        self.local_free_from_s: Column = view.decode.free_from_s.copy()
        self.decode_requests: Column = np.zeros(len(view.decode.records))
        self.decode_context_tokens: Column = np.zeros(len(view.decode.records))
        self.holder_free_from_s: Column = np.zeros(len(view.stores))
        """When the store will have sent what other hosts copy from it."""
        for item in open_items:
            self.add(item)

    def add(self, item: Sent) -> None:
        """Nodes that the view does not have are passed over."""
        prefill, decode, view = self._view.prefill, self._view.decode, self._view
        arrives_s = item.sent_s + _ON_THE_WAY_S
        if (row := prefill.row_of.get(item.prefill_node_id)) is not None and arrives_s > prefill.reported_s[row]:
            _extend(self.prefill_free_from_s, row, item.sent_s, item.busy_s)
        if (row := decode.row_of.get(item.prefill_node_id)) is not None and arrives_s > decode.reported_s[row]:
            _extend(self.local_free_from_s, row, item.sent_s, item.busy_s)
        row = decode.row_of.get(item.decode_node_id) if item.decode_node_id is not None else None
        if row is not None and arrives_s > decode.reported_s[row]:
            self.decode_requests[row] += 1
            self.decode_context_tokens[row] += item.context_tokens
        if item.holder_id is not None and (row := view.store_row_of.get(item.holder_id)) is not None:
            _extend(self.holder_free_from_s, row, item.sent_s, item.copy_bytes / view.fetch_bytes_per_s)

    def decode_left(self, item: Sent) -> None:
        """A request is over, be it one of those added or one that the report still shows."""
        if item.decode_node_id is not None and (row := self._view.decode.row_of.get(item.decode_node_id)) is not None:
            self.decode_requests[row] -= 1
            self.decode_context_tokens[row] -= item.context_tokens


def _extend(free_from_s: Column, row: int, sent_s: float, busy_s: float) -> None:
    free_from_s[row] = max(free_from_s[row], sent_s) + busy_s


def _serving(
    nodes: Sequence[Node], model_id: str, distrusted: Collection[str], dropped: list[Dropped]
) -> Iterable[Node]:
    """Live nodes of the model and store processes; notes why the others are none of them."""
    for node in nodes:
        record = node.record
        if record.role not in ("prefill", "decode", "kvstore"):
            continue
        if not node.alive:
            dropped.append(Dropped(record.node_id, "its lease has run out"))
        elif record.node_id in distrusted:
            dropped.append(Dropped(record.node_id, "it was lost a moment ago"))
        elif record.role != "kvstore" and model_id not in ("", record.model_id):
            dropped.append(Dropped(record.node_id, f"it serves another model: {record.model_id}"))
        else:
            yield node


def _why_none(
    prefill: Sequence[Node],
    decode: Sequence[Node],
    stores: Mapping[str, NodeRecord],
    model_id: str,
    has_shared_layout: bool,
) -> str | None:
    models = sorted({node.record.model_id for node in [*prefill, *decode]})
    if len(models) > 1:
        return f"the registry holds nodes of several models ({', '.join(models)}); set conductor.model_id"
    of_model = f" for model {model_id}" if model_id else ""
    if not prefill:
        return f"no complete prefill group is alive{of_model}"
    if not decode:
        return f"no decode instance is alive{of_model}"
    if not stores:
        return "no store process is alive"
    hosts = sorted({node.record.host_id for node in prefill})
    if not set(hosts) & set(stores):
        return f"no store process is alive on the hosts of the prefill groups ({', '.join(hosts)})"
    if not has_shared_layout:
        return (
            "prefill groups and decode instances have different KV layouts; give them equal `kv` and `model` settings"
        )
    return None


def _view(
    prefill: Sequence[Node],
    decode: Sequence[Node],
    stores_by_host: Mapping[str, NodeRecord],
    layout_json: str,
    cost: CostModel,
    dropped: tuple[Dropped, ...],
) -> ClusterView:
    layout = layout_of(layout_json)
    stores = tuple(stores_by_host.values())
    row_of_host = {record.host_id: row for row, record in enumerate(stores)}
    is_timed = any(node.record.load.get("step_token_s", 0.0) > 0 for node in prefill)
    fetch_bytes_per_s = _usual(prefill, "fetch_bytes_per_s", _BYTES_PER_S)
    return ClusterView(
        layout=layout,
        layout_json=layout_json,
        prefill=_prefill_groups(prefill, row_of_host, layout, cost, is_timed),
        decode=_decode_instances(decode, row_of_host, layout.block_tokens, cost),
        stores=stores,
        store_row_of={record.node_id: row for row, record in enumerate(stores)},
        is_timed=is_timed,
        fetch_bytes_per_s=fetch_bytes_per_s,
        usual_prefill_s=cost.usual_prefill_s,
        dispatch_s=cost.dispatch_s,
        dropped=dropped,
    )


def _prefill_groups(
    nodes: Sequence[Node], row_of_host: Mapping[str, int], layout: KVLayout, cost: CostModel, is_timed: bool
) -> PrefillGroups:
    steps = _steps(nodes, is_timed)
    chunk_tokens = _column(nodes, "chunk_tokens", _CHUNK_TOKENS)
    max_step_s = np.array([node.record.load.get("max_step_s", 0.0) for node in nodes])
    is_fixed = max_step_s == 0  # groups without such a bound cut prompts into chunks of `chunk_tokens`
    least_tokens = np.clip(steps.knee_tokens, layout.block_tokens, np.maximum(chunk_tokens, layout.block_tokens))
    queued_s = np.array(
        [
            load["queued_s"] if is_timed and "queued_s" in load else load.get("queued_tokens", 0.0) * token_s
            for load, token_s in zip((node.record.load for node in nodes), steps.token_s, strict=True)
        ]
    )
    reported_s = np.array([node.reported_s for node in nodes])
    corrections = [cost.corrections(node.record.node_id) for node in nodes]
    copy_bytes_per_s = _usual(nodes, "fetch_bytes_per_s", _BYTES_PER_S)
    return PrefillGroups(
        records=tuple(node.record for node in nodes),
        row_of={node.record.node_id: row for row, node in enumerate(nodes)},
        store_rows=np.array([row_of_host[node.record.host_id] for node in nodes], np.intp),
        pipelines=Pipelines(
            steps,
            num_stages=_column(nodes, "num_stages", 1),
            chunk_tokens=chunk_tokens,
            least_tokens=np.where(is_fixed, chunk_tokens, least_tokens),
            max_step_s=np.where(is_fixed, np.inf, max_step_s),
        ),
        reported_s=reported_s,
        free_from_s=reported_s + queued_s,
        num_tokens=_column(nodes, "num_pages", np.inf) * layout.block_tokens,
        fetch_block_s=layout.block_bytes / _column(nodes, "fetch_bytes_per_s", _BYTES_PER_S),
        copy_block_s=layout.block_bytes / _column(nodes, "copy_bytes_per_s", copy_bytes_per_s),
        tail_s=np.array([node.record.load.get("tail_s", 0.0) for node in nodes]),
        wait_factor=_factors(corrections, lambda each: each.wait),
        fetch_factor=_factors(corrections, lambda each: each.fetch),
        prefill_factor=_factors(corrections, lambda each: each.prefill),
        handoff_factor=_factors(corrections, lambda each: each.handoff),
    )


def _decode_instances(
    nodes: Sequence[Node], row_of_host: Mapping[str, int], block_tokens: int, cost: CostModel
) -> DecodeInstances:
    loads = [node.record.load for node in nodes]
    reported_s = np.array([node.reported_s for node in nodes])
    corrections = [cost.corrections(node.record.node_id) for node in nodes]
    is_timed = any(load.get("step_token_s", 0.0) > 0 or load.get("step_overhead_s", 0.0) > 0 for load in loads)
    return DecodeInstances(
        records=tuple(node.record for node in nodes),
        row_of={node.record.node_id: row for row, node in enumerate(nodes)},
        store_rows=np.array([row_of_host.get(node.record.host_id, 0) for node in nodes], np.intp),
        has_store=np.array([node.record.host_id in row_of_host for node in nodes]),
        steps=_steps(nodes, is_timed),
        requests=np.array([sum(load.get(key, 0.0) for key in ("waiting", "pulling", "running")) for load in loads]),
        context_tokens=np.array([load.get("context_tokens", 0.0) for load in loads]),
        max_batch=_column(nodes, "max_batch", np.inf),
        free_tokens=np.array([load.get("free_pages", 0.0) for load in loads]) * block_tokens,
        num_tokens=_column(nodes, "num_pages", np.inf) * block_tokens,
        reported_s=reported_s,
        free_from_s=reported_s + np.array([load.get("queued_prefill_s", 0.0) for load in loads]),
        chunk_tokens=_column(nodes, "chunk_tokens", _CHUNK_TOKENS),
        prefill_room_tokens=np.array([load.get("prefill_room_tokens", 0.0) for load in loads]),
        wait_factor=_factors(corrections, lambda each: each.wait),
        fetch_factor=_factors(corrections, lambda each: each.fetch),
        prefill_factor=_factors(corrections, lambda each: each.prefill),
        tbt_factor=_factors(corrections, lambda each: each.tbt),
        is_timed=is_timed,
    )


def _steps(nodes: Sequence[Node], is_timed: bool) -> Steps:
    """Of nodes that have not measured a step the usual one is taken; where none has, a token costs one and nothing else does."""
    if not is_timed:
        zeros = np.zeros(len(nodes))
        return Steps(overhead_s=zeros, token_s=np.ones(len(nodes)), pair_s=zeros, knee_tokens=zeros)
    parts = np.array(
        [
            [node.record.load.get(key, 0.0) for key in ("step_overhead_s", "step_token_s", "step_pair_s", "step_knee_tokens")]
            for node in nodes
        ]
    )  # fmt: skip
    is_known = parts[:, :2].sum(axis=1) > 0
    parts[~is_known] = np.median(parts[is_known], axis=0)
    return Steps(overhead_s=parts[:, 0], token_s=parts[:, 1], pair_s=parts[:, 2], knee_tokens=parts[:, 3])


def _column(nodes: Sequence[Node], key: str, unknown: float) -> Column:
    """What the nodes report under `key`; for those that do not, what is usual."""
    usual = _usual(nodes, key, unknown)
    return np.array([node.record.load.get(key, 0.0) or usual for node in nodes])


def _usual(nodes: Sequence[Node], key: str, unknown: float) -> float:
    known = [value for node in nodes if (value := node.record.load.get(key, 0.0)) > 0]
    return float(np.median(known)) if known else unknown


def _factors(corrections: Sequence[Corrections], part: Callable[[Corrections], float]) -> Column:
    return np.array([part(each) for each in corrections])


@lru_cache(maxsize=16)
def layout_of(layout_json: str) -> KVLayout:
    return KVLayout.from_json(layout_json)
