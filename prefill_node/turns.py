"""Whose turn it is in a group: every prompt that has work left claims its tenant's share; no sockets, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstore.pool import RequestKey
from moontide.fair_share import DeficitRoundRobin, Share
from prefill_node.policy import Candidate, is_starved, keeps_turn, ranked

_CREDIT_TURNS = 20
"""So many turns in a row a tenant may make up for that was below its part: a prompt that comes now and then is then served at once, and
not in every other step of a group that somebody floods."""


class Turns:
    """One order for pages and for steps, so that a tenant whose prompts wait for pages keeps its place while others get steps."""

    def __init__(self, *, policy: str, starvation_s: float, quantum_s: float) -> None:
        """
        Args:
            policy, starvation_s: as in PrefillConfig.
            quantum_s: time of the slowest stage in one turn of a tenant of weight 1.
        """
        self._policy = policy
        self._starvation_s = starvation_s
        self._tenants = DeficitRoundRobin(quantum_s, credit_s=_CREDIT_TURNS * quantum_s)
        self._claims: dict[RequestKey, Share] = {}

    def enter(self, key: RequestKey, share: Share) -> None:
        """The prompt is there, with pages or without."""
        self._claims[key] = share

    def leave(self, key: RequestKey) -> None:
        """Nothing of the prompt is left to be scheduled; one that has left is no error."""
        self._claims.pop(key, None)

    def charge(self, share: Share, work_s: float) -> None:
        """A step was given to the tenant."""
        self._tenants.charge(share, work_s)

    def ranked(self, candidates: Sequence[Candidate], now_s: float) -> list[Candidate]:
        """The candidates in the order of service."""
        claims = itertools.chain(self._claims.values(), (candidate.share for candidate in candidates))
        return ranked(
            candidates,
            policy=self._policy,
            now_s=now_s,
            starvation_s=self._starvation_s,
            shares=self._tenants.ranked(claims),
        )

    def keeps_turn(self, current: Candidate, first: Candidate, now_s: float) -> bool:
        return keeps_turn(current, first, policy=self._policy, now_s=now_s, starvation_s=self._starvation_s)

    def is_starved(self, candidate: Candidate, now_s: float) -> bool:
        return is_starved(candidate, now_s=now_s, starvation_s=self._starvation_s)
