"""Chooses where a request runs: filter -> score -> pick. Pure: takes what is known, returns a choice and why.

view.py      filter: nodes that can serve the model at all, once per read of the registry
options.py   filter: nodes that can serve this request; score: what each of them would cost
policies.py  pick
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from conductor.cost import Corrections, Placed, Prediction
from conductor.options import Need, Options, Way
from conductor.policies import Policy
from conductor.view import ClusterView, Dropped, Sent, SentWork
from moontide.registry import NodeRecord

__all__ = ["Candidate", "Choice", "Need", "choose"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Nodes for one request, and what is expected of them."""

    prefill: NodeRecord | None
    """None: the decode instance computes the prompt itself."""
    decode: NodeRecord
    hit_store: NodeRecord | None
    """Where the prefix hit, or what is copied of it, comes from; None without a hit."""
    hit_blocks: int
    """Leading blocks that need not be computed."""
    copy_blocks: int
    """Of those, how many the group's store has to copy from `hit_store` first."""
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Choice(Candidate):
    store: NodeRecord
    """Where the prompt is reserved: on the prefill group's host; for a local prefill where its hit is, else on decode's host."""
    policy: str
    reason: str
    """One sentence."""
    others: tuple[Candidate, ...]
    """Next best, best first."""
    dropped: tuple[Dropped, ...]
    busy_s: float
    """Time that the prompt keeps the slowest stage, or the decode instance, busy."""
    corrections: Corrections
    """What was learnt of these nodes, as far as it is in the prediction."""

    @property
    def replicate_blocks(self) -> int:
        """PrefillRequest.copy_blocks: leading blocks that the group's store is to hold before the prompt starts; 0: it has what counts."""
        return self.hit_blocks if self.copy_blocks else 0

    @property
    def placed(self) -> Placed:
        return Placed(
            prefill_node_id=self.decode.node_id if self.prefill is None else self.prefill.node_id,
            decode_node_id=self.decode.node_id,
            busy_s=self.busy_s,
            prediction=self.prediction,
            corrections=self.corrections,
        )

    def sent(self, *, context_tokens: int, block_bytes: int, needs_decode: bool, now_s: float) -> Sent:
        """What this choice adds to the nodes' work. `context_tokens`: of the prompt, with what the client has."""
        return Sent(
            sent_s=now_s,
            prefill_node_id=self.placed.prefill_node_id,
            busy_s=self.busy_s,
            decode_node_id=self.decode.node_id if needs_decode else None,
            context_tokens=context_tokens,
            holder_id=self.hit_store.node_id if self.hit_store is not None and self.copy_blocks else None,
            copy_bytes=self.copy_blocks * block_bytes,
        )


def choose(
    view: ClusterView,
    need: Need,
    hits: Mapping[str, int],
    sent: SentWork,
    *,
    policy: Policy,
    rng: Random,
    now_s: float,
) -> Choice:
    """Pick who prefills and who decodes.

    Args:
        hits: leading blocks of the prompt by store node id.
        sent: of this view.
        now_s: on the clock of the view's reports.
    """
    options = Options(view, need, hits, sent, now_s=now_s)
    pick = policy.pick(options, rng)
    best = _candidate(view, pick.way)
    return Choice(
        prefill=best.prefill,
        decode=best.decode,
        hit_store=best.hit_store,
        hit_blocks=best.hit_blocks,
        copy_blocks=best.copy_blocks,
        prediction=best.prediction,
        store=_store(view, pick.way),
        policy=policy.name,
        reason=pick.reason,
        others=tuple(_candidate(view, way) for way in pick.others),
        dropped=(*view.dropped, *options.dropped()),
        busy_s=pick.way.busy_s,
        corrections=options.corrections(pick.way),
    )


def _candidate(view: ClusterView, way: Way) -> Candidate:
    return Candidate(
        prefill=None if way.prefill_row is None else view.prefill.records[way.prefill_row],
        decode=view.decode.records[way.decode_row],
        hit_store=None if way.holder_row is None else view.stores[way.holder_row],
        hit_blocks=way.hit_blocks,
        copy_blocks=way.copy_blocks,
        prediction=way.prediction,
    )


def _store(view: ClusterView, way: Way) -> NodeRecord:
    if way.prefill_row is not None:
        return view.stores[int(view.prefill.store_rows[way.prefill_row])]
    if way.holder_row is not None:
        return view.stores[way.holder_row]
    return view.stores[int(view.decode.store_rows[way.decode_row])]
