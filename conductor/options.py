"""What it would cost to serve one request in each of the possible ways. Columns over nodes, as in the view; pure.

wait     = max(queue, copy from another host) + fetch, the fetch hidden behind the queue as far as it goes
prefill  = makespan of what is neither a hit nor copied
local    = the decode instance computes the prompt itself, as one chunk in a step of its batch
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.cost import Column, Corrections, Prediction, Slo
from conductor.view import ClusterView, Dropped, Rows, SentWork

Mask = NDArray[np.bool_]

LEAST_CHUNK_TOKENS = 16
"""A decode instance computes no smaller part of a prompt beside its batch."""
_MOST_DROPPED = 16
"""Nodes that a request's own filters dropped, of which an explanation tells."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one request asks of its nodes."""

    request_id: str
    prompt_tokens: int
    """To be prefilled: the prompt and every token that the client already has."""
    expected_output_tokens: int = 0
    max_tokens_in_cache: int
    """Prompt and longest answer together."""
    slo: Slo = field(default_factory=Slo)
    avoid: Collection[str] = ()
    """Node ids that failed this request; taken only when there are no others."""
    may_prefill_locally: bool = False
    """Whether a decode instance may compute the prompt itself."""
    queue_share: float = 1.0
    """Part of what a group has ahead that goes before this request: groups divide their steps between tenants."""


class Way(NamedTuple):
    """One way to serve a request, with what it is expected to cost."""

    prefill_row: int | None
    """None: the decode instance computes the prompt itself."""
    decode_row: int
    hit_blocks: int
    """Leading blocks that need not be computed, those that are copied included."""
    copy_blocks: int
    holder_row: int | None
    """Store that the hit, or what is copied of it, comes from; None without a hit."""
    busy_s: float
    """Time that the prompt keeps the slowest stage, or the decode instance, busy."""
    prediction: Prediction


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillCosts:
    """Of the same plan on some prefill groups."""

    rows: Rows | None
    """The groups; None: all of them in order."""
    hit_blocks: Column | float
    """A number if all have the same."""
    copy_blocks: Column | float
    queue_s: Column
    fetch_s: Column
    prefill_s: Column
    busy_s: Column
    ttft_s: Column


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalCosts:
    """Of a prefill on each decode instance."""

    queue_s: Column
    fetch_s: Column
    prefill_s: Column
    ttft_s: Column
    stall_s: Column
    """Time that each request in the batch gets its tokens later."""
    is_possible: Mask


class Options:
    """For one request."""

    def __init__(self, view: ClusterView, need: Need, hits: Mapping[str, int], sent: SentWork, *, now_s: float) -> None:
        """`hits`: leading blocks of the prompt by store node id."""
        self.view = view
        self.need = need
        self._sent = sent
        self._now_s = now_s
        self.most_hit_blocks = 0
        self.holder_row: int | None = None
        hits_of_store = np.zeros(len(view.stores) + 1)
        if hits:
            limit = max(0, need.prompt_tokens - 1) // view.layout.block_tokens
            unknown_row = len(view.stores)
            rows = np.array([view.store_row_of.get(node_id, unknown_row) for node_id in hits])
            hits_of_store[rows] = np.minimum(np.array(list(hits.values()), np.float64), limit)
            hits_of_store[unknown_row] = 0
            self.most_hit_blocks = int(hits_of_store.max())
            if self.most_hit_blocks:
                holders = rows[hits_of_store[rows] == self.most_hit_blocks]
                self.holder_row = int(holders[sent.holder_free_from_s[holders].argmin()])
        self.own_hit_blocks: Column = hits_of_store[view.prefill.store_rows]
        self.holder_wait_s = 0.0
        if self.holder_row is not None:
            self.holder_wait_s = max(0.0, float(sent.holder_free_from_s[self.holder_row]) - now_s)
        self.queue_s: Column = np.maximum(sent.prefill_free_from_s - now_s, 0.0) * view.prefill.wait_factor
        self.queue_s *= need.queue_share

    def prefill_costs(
        self, hit_blocks: Column | float, copy_blocks: Column | float, rows: Rows | None = None
    ) -> PrefillCosts:
        """With hits of so many leading blocks, `copy_blocks` of them from another host. `rows`: of these groups only."""
        groups, queue_s = self.view.prefill, self.queue_s
        pipelines, prefill_factor, fetch_factor = groups.pipelines, groups.prefill_factor, groups.fetch_factor
        fetch_block_s, copy_block_s = groups.fetch_block_s, groups.copy_block_s
        if rows is not None:
            pipelines, queue_s = pipelines.take(rows), queue_s[rows]
            prefill_factor, fetch_factor = prefill_factor[rows], fetch_factor[rows]
            fetch_block_s, copy_block_s = fetch_block_s[rows], copy_block_s[rows]
        if self.view.is_timed and self.most_hit_blocks:
            bring_s = hit_blocks * fetch_block_s + copy_blocks * copy_block_s
            if self.holder_wait_s:
                bring_s += (np.asarray(copy_blocks) > 0) * self.holder_wait_s
            fetch_s = np.maximum(bring_s * fetch_factor - queue_s, 0.0)
        else:
            fetch_s = np.zeros(len(queue_s))
        prefill_s, busy_s = pipelines.times_s(
            self.need.prompt_tokens, hit_blocks * float(self.view.layout.block_tokens)
        )
        prefill_s *= prefill_factor
        return PrefillCosts(
            rows=rows,
            hit_blocks=hit_blocks,
            copy_blocks=copy_blocks,
            queue_s=queue_s,
            fetch_s=fetch_s,
            prefill_s=prefill_s,
            busy_s=busy_s * prefill_factor,
            ttft_s=queue_s + fetch_s + prefill_s,
        )

    @cached_property
    def own_costs(self) -> PrefillCosts:
        """With the hits that each group's own store has."""
        return self.prefill_costs(self.own_hit_blocks if self.most_hit_blocks else 0.0, 0.0)

    @cached_property
    def full_costs(self) -> PrefillCosts:
        """With the longest hit there is, copied where the group's own store has less."""
        most = float(self.most_hit_blocks)
        return self.prefill_costs(most, most - self.own_hit_blocks)

    @cached_property
    def tbt_s(self) -> Column:
        """Of each decode instance with this request in its batch."""
        decode, need = self.view.decode, self.need
        context = self._context_tokens + (need.prompt_tokens + need.expected_output_tokens / 2)
        return decode.steps.time_s(np.minimum(self.decode_requests + 1, decode.max_batch), context) * decode.tbt_factor

    @cached_property
    def decode_requests(self) -> Column:
        requests: Column = np.maximum(self.view.decode.requests + self._sent.decode_requests, 0.0)
        return requests

    @cached_property
    def _context_tokens(self) -> Column:
        context: Column = np.maximum(self.view.decode.context_tokens + self._sent.decode_context_tokens, 0.0)
        return context

    @cached_property
    def num_behind(self) -> float:
        """Requests that will come while every group has a queue."""
        usual_s = self.view.usual_prefill_s
        return float(self.queue_s.min()) / usual_s if usual_s and self.view.is_timed else 0.0

    @cached_property
    def local_costs(self) -> LocalCosts:
        """Of computing what no store has in chunks beside the batch, as long as the bound on its steps lets them be."""
        view, decode, need = self.view, self.view.decode, self.need
        layout, steps, requests = view.layout, decode.steps, self.decode_requests
        hit_tokens = self.most_hit_blocks * layout.block_tokens
        tokens = need.prompt_tokens - hit_tokens
        pairs = tokens * (hit_tokens + tokens / 2)
        is_idle = requests == 0
        batch_s = np.where(is_idle, 0.0, steps.time_s(requests, self._context_tokens))
        chunk_tokens = decode.chunk_tokens
        is_possible = self.roomy_decode & (decode.prefill_room_tokens >= tokens)
        if need.slo.tbt_s is not None:
            spare = (need.slo.tbt_s - batch_s) / np.maximum(steps.token_s, 1e-9)
            is_possible &= is_idle | (spare >= LEAST_CHUNK_TOKENS)
            chunk_tokens = np.where(is_idle, chunk_tokens, np.clip(spare, LEAST_CHUNK_TOKENS, chunk_tokens))
        num_chunks = np.ceil(tokens / chunk_tokens)
        steps_s = num_chunks * steps.time_s(requests + tokens / num_chunks, self._context_tokens + pairs / num_chunks)
        queue_s = np.maximum(self._sent.local_free_from_s - self._now_s, 0.0) + batch_s / 2
        fetch_s = self.holder_wait_s + self.most_hit_blocks * layout.block_bytes / view.fetch_bytes_per_s
        prefill_s = steps_s * decode.prefill_factor
        return LocalCosts(
            queue_s=queue_s * decode.wait_factor,
            fetch_s=fetch_s * decode.fetch_factor,
            prefill_s=prefill_s,
            ttft_s=queue_s * decode.wait_factor + fetch_s * decode.fetch_factor + prefill_s,
            stall_s=np.where(is_idle, 0.0, steps_s - num_chunks * batch_s),
            is_possible=is_possible if self.holder_row is not None else is_possible & decode.has_store,
        )

    @property
    def may_copy(self) -> bool:
        """Whether some group's own hit is not the longest one, and it is known what copying costs against computing."""
        return self.view.is_timed and bool(self.own_hit_blocks.min() < self.most_hit_blocks)

    @property
    def may_be_local(self) -> bool:
        """Whether the prompt is short enough for some decode instance, and the times are known."""
        view = self.view
        uncached = self.need.prompt_tokens - self.most_hit_blocks * view.layout.block_tokens
        return (
            self.need.may_prefill_locally
            and view.is_timed
            and view.decode.is_timed
            and bool(uncached <= view.decode.prefill_room_tokens.max())
        )

    @cached_property
    def allowed_prefill(self) -> Mask:
        """Groups that pass the filters; if none is large enough all may be asked, for a node names the limit when it refuses."""
        groups = self.view.prefill
        return self._allowed(groups.num_tokens, self.need.prompt_tokens, groups.row_of)

    @cached_property
    def allowed_decode(self) -> Mask:
        decode = self.view.decode
        return self._allowed(decode.num_tokens, self.need.max_tokens_in_cache, decode.row_of)

    @cached_property
    def roomy_decode(self) -> Mask:
        """Those that have pages and a place in the batch now; if none has, all that are allowed."""
        decode = self.view.decode
        free_tokens = decode.free_tokens - self._sent.decode_context_tokens
        is_roomy = (free_tokens >= self.need.max_tokens_in_cache) & (self.decode_requests < decode.max_batch)
        is_roomy &= self.allowed_decode
        return is_roomy if is_roomy.any() else self.allowed_decode

    def dropped(self) -> list[Dropped]:
        """Nodes that this request's own filters left out."""
        dropped: list[Dropped] = []
        prefill, decode = self.view.prefill, self.view.decode
        for records, mask in ((prefill.records, self.allowed_prefill), (decode.records, self.allowed_decode)):
            if mask.all():
                continue
            for row in np.flatnonzero(~mask)[:_MOST_DROPPED]:
                node_id = records[row].node_id
                failed = node_id in self.need.avoid
                why = "it failed this request before" if failed else "the request needs more pages than it has"
                dropped.append(Dropped(node_id, why))
        return dropped

    def way(self, costs: PrefillCosts, idx: int, decode_row: int) -> Way:
        """Prefill on the group at `idx` of the costs, then decode."""
        groups = self.view.prefill
        row = idx if costs.rows is None else int(costs.rows[idx])
        copy_blocks, hit_blocks = _blocks_at(costs.copy_blocks, idx), _blocks_at(costs.hit_blocks, idx)
        tbt_s = float(self.tbt_s[decode_row])
        handoff_s = float(groups.tail_s[row]) + (tbt_s / 2 if self.view.decode.is_timed else 0.0)
        return Way(
            prefill_row=row,
            decode_row=decode_row,
            hit_blocks=hit_blocks,
            copy_blocks=copy_blocks,
            holder_row=self.holder_row if copy_blocks else int(groups.store_rows[row]) if hit_blocks else None,
            busy_s=float(costs.busy_s[idx]),
            prediction=self._prediction(
                float(costs.queue_s[idx]),
                float(costs.fetch_s[idx]),
                float(costs.prefill_s[idx]),
                handoff_s * float(groups.handoff_factor[row]),
                tbt_s,
            ),
        )

    def local_way(self, decode_row: int) -> Way:
        """The decode instance computes the prompt itself."""
        costs = self.local_costs
        prefill_s = float(costs.prefill_s[decode_row])
        return Way(
            prefill_row=None,
            decode_row=decode_row,
            hit_blocks=self.most_hit_blocks,
            copy_blocks=0,
            holder_row=self.holder_row,
            busy_s=prefill_s,
            prediction=self._prediction(
                float(costs.queue_s[decode_row]),
                float(costs.fetch_s[decode_row]),
                prefill_s,
                0.0,
                float(self.tbt_s[decode_row]),
            ),
        )

    def corrections(self, way: Way) -> Corrections:
        """That its prediction contains."""
        groups, decode = self.view.prefill, self.view.decode
        tbt = float(decode.tbt_factor[way.decode_row])
        if way.prefill_row is None:
            return Corrections(
                wait=float(decode.wait_factor[way.decode_row]),
                fetch=float(decode.fetch_factor[way.decode_row]),
                prefill=float(decode.prefill_factor[way.decode_row]),
                tbt=tbt,
            )
        return Corrections(
            wait=float(groups.wait_factor[way.prefill_row]),
            fetch=float(groups.fetch_factor[way.prefill_row]),
            prefill=float(groups.prefill_factor[way.prefill_row]),
            handoff=float(groups.handoff_factor[way.prefill_row]),
            tbt=tbt,
        )

    def _prediction(
        self, queue_s: float, fetch_s: float, prefill_s: float, handoff_s: float, tbt_s: float
    ) -> Prediction:
        """Nothing where nothing is known."""
        view = self.view
        if not view.decode.is_timed:
            tbt_s = 0.0
        if not view.is_timed:
            return Prediction(tbt_s=tbt_s)
        return Prediction(
            queue_s=queue_s,
            fetch_s=fetch_s,
            prefill_s=prefill_s,
            dispatch_s=view.dispatch_s,
            handoff_s=handoff_s,
            tbt_s=tbt_s,
        )

    def _allowed(self, num_tokens: Column, least: float, row_of: Mapping[str, int]) -> Mask:
        """Nodes that hold so many tokens and have not failed the request."""
        avoided = [row for node_id in self.need.avoid if (row := row_of.get(node_id)) is not None]
        is_large = num_tokens >= least
        if not is_large.any():
            is_large = np.ones(len(is_large), np.bool_)
        if not avoided:
            return is_large
        preferred = is_large.copy()
        preferred[avoided] = False
        return preferred if preferred.any() else is_large


def _blocks_at(blocks: Column | float, idx: int) -> int:
    return int(blocks) if isinstance(blocks, float) else int(blocks[idx])
