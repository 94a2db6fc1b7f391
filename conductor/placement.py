"""Where requests go, with what a conductor remembers for it: the view of the moment, what it sent since, what outcomes taught it.

    read of the registry -> view (view.py) -> choose (router.py) -> sent, outcome -> next choice
Decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from random import Random

import numpy as np

from conductor.config import ConductorConfig
from conductor.cost import Column, CostModel
from conductor.policies import policy_named
from conductor.recovery import FailedNodes
from conductor.registry import NodeRegistry
from conductor.router import Choice, Need, choose
from conductor.view import ClusterView, NoChoice, Sent, SentWork
from moontide.clock import Clock


class Placement:
    def __init__(self, config: ConductorConfig, registry: NodeRegistry, clock: Clock) -> None:
        """Raises: ConfigError for an unknown policy."""
        settings = config.conductor
        self.cost = CostModel()
        self.failed = FailedNodes(config.registry.lease_s)
        self._policy = policy_named(settings.policy, balancing_threshold=settings.balancing_threshold)
        self._model_id = settings.model_id
        self._release_queue_s = settings.release_queue_s
        self._registry = registry
        self._clock = clock
        self._rng = Random()
        self._sent: dict[str, Sent] = {}
        self._view: ClusterView | NoChoice = NoChoice("the registry was not read yet")
        self._nodes_wait_s = settings.nodes_wait_s
        self._layout = ""
        """Of the last ClusterView."""
        self._gone_since_s = -inf
        """When the view that was no ClusterView any more was made."""
        self._work: SentWork | None = None
        self._seen: tuple[int, frozenset[str]] = (-1, frozenset())
        """Read of the registry and lost nodes that the view is of."""

    @property
    def is_empty(self) -> bool:
        return not self._sent

    @property
    def num_groups(self) -> int:
        view = self.view()
        return len(view.prefill.records) if isinstance(view, ClusterView) else 0

    def view(self, *, trusting: bool = False) -> ClusterView | NoChoice:
        """Of the moment. Nodes that were lost a moment ago are left out, unless `trusting`, when there is nothing without them."""
        failed: frozenset[str] = frozenset()
        if (
            not self.failed.is_empty
        ):  # asked for several times per request, so nothing here looks at all nodes without need
            failed = frozenset(self.failed.current(self._registry.nodes, self._clock.now()))
        if (seen := (self._registry.num_reads, failed)) != self._seen:
            self._seen = seen
            could_serve = isinstance(self._view, ClusterView)
            self._view = self._build(failed)
            self.cost.keep_only({node.record.node_id for node in self._registry.nodes})
            if isinstance(self._view, ClusterView):
                self._layout = self._view.layout_json
            elif could_serve:
                self._gone_since_s = self._clock.now()
            self._work = SentWork(self._view, self._sent.values()) if isinstance(self._view, ClusterView) else None
        if trusting and failed and isinstance(self._view, NoChoice):
            return self._build(frozenset())
        return self._view

    def not_ready(self) -> str | None:
        """Why a new request would not be served, be it after waiting for nodes that went a moment ago; None if it would."""
        view = self.view(trusting=True)
        if isinstance(view, ClusterView) or self._clock.now() - self._gone_since_s < self._nodes_wait_s:
            return None
        return view.reason

    def _build(self, distrusted: frozenset[str]) -> ClusterView | NoChoice:
        return ClusterView.build(
            self._registry.nodes,
            model_id=self._model_id,
            cost=self.cost,
            distrusted=distrusted,
            layout_before=self._layout,
        )

    def choose(self, view: ClusterView, need: Need, hits: Mapping[str, int]) -> Choice:
        work = self._work if view is self._view and self._work is not None else SentWork(view)
        return choose(view, need, hits, work, policy=self._policy, rng=self._rng, now_s=self._clock.now())

    def sent(self, attempt_id: str, sent: Sent) -> None:
        self._sent[attempt_id] = sent
        if self._work is not None:
            self._work.add(sent)

    def ended(self, attempt_id: str) -> None:
        sent = self._sent.pop(attempt_id, None)
        if sent is not None and self._work is not None:
            self._work.decode_left(sent)

    def room_s(self) -> float:
        """Predicted seconds of work that the prefill groups take now beyond what they have ahead; 0 while there are none, and
        infinite while nothing is predicted."""
        view = self.view()
        if not isinstance(view, ClusterView) or self._work is None:
            # A node that just failed somebody is tried at once when there is no other, and nothing can be said of it.
            return inf if isinstance(self.view(trusting=True), ClusterView) else 0.0
        if not view.is_timed:
            return inf
        return float(np.maximum(self._release_queue_s - self._ahead_s(self._work), 0.0).sum())

    def ahead_s(self) -> float:
        """Predicted seconds of work that all prefill groups together have ahead; 0 while there are none."""
        self.view()
        return 0.0 if self._work is None else float(self._ahead_s(self._work).sum())

    def _ahead_s(self, work: SentWork) -> Column:
        ahead_s: Column = np.maximum(work.prefill_free_from_s - self._clock.now(), 0.0)
        return ahead_s
