"""Whose turn it is when tenants share something by the time it works for them (pure; no clock, no queue).

Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): in each round every waiting tenant may use a quantum times its weight.
A turn may overrun its quantum by the last piece of work; the tenant owes that in later rounds, also if it waits for nothing
meanwhile. What it does not use while it waits for nothing is lost beyond a credit. Rounds are not walked but counted: a tenant's
place is the number of rounds that it has used up.

A higher priority class goes first, whatever its tenants have used; fairness is among the tenants of one class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PRIORITY_LABELS = ("high", "normal", "low")
"""How metrics name the classes above, at and below 0: a client may ask for any number below its tenant's."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One tenant's claim in one priority class."""

    tenant: str
    priority: int = 0
    weight: float = 1.0
    """Above 0: its share against the others."""

    @property
    def key(self) -> tuple[int, str]:
        return self.priority, self.tenant

    @property
    def priority_label(self) -> str:
        """One of PRIORITY_LABELS."""
        if self.priority == 0:
            return "normal"
        return "high" if self.priority > 0 else "low"


class DeficitRoundRobin:
    def __init__(self, quantum_s: float, *, credit_s: float = 0.0) -> None:
        """
        Args:
            quantum_s: seconds of work in a turn of weight 1. Larger: fewer changes between tenants, longer waits of one that comes.
            credit_s: seconds of work of weight 1 that a tenant may be behind the others and make up for, before anybody's turn goes on.
        """
        assert quantum_s > 0, "a turn must have some length"
        self._quantum_s = quantum_s
        self._credit = credit_s / quantum_s
        self._used: dict[tuple[int, str], float] = {}
        """Rounds that a share has used up; shares that have all their credit are left out."""
        self._round: dict[int, float] = {}
        """Of each class, the latest beginning of a turn: nobody who waits has used less, but for its credit."""
        self._idle_round: dict[int, float] = {}
        """Where each class was when nobody waited: credit for what was before is lost, as nobody was kept from anything."""
        self._holder: tuple[int, str] | None = None
        self._turn_end = 0.0

    def ranked(self, waiting: Iterable[Share]) -> list[Share]:
        """The claims in the order of service, each once; the first one has the turn. Asking again changes nothing."""
        shares = {share.key: share for share in waiting}
        if not shares:
            self._idle_round = self._round.copy()
        line = sorted(shares.values(), key=self._place)
        if line and line[0].key != self._holder:
            self._begin_turn(line[0])
        return line

    def charge(self, share: Share, work_s: float) -> None:
        """Work was done for the claim, in its turn or beside another's."""
        self._used[share.key] = self._used_by(share) + work_s / (self._quantum_s * share.weight)
        if share.key == self._holder and self._used[share.key] >= self._turn_end:
            self._holder = None

    def ahead_s(self, share: Share) -> float:
        """Work that the claim got beyond its class's last turn: for so much it waits while others are served."""
        return (self._used_by(share) - self._round.get(share.priority, 0.0)) * self._quantum_s * share.weight

    def _place(self, share: Share) -> tuple[int, float, bool, str]:
        """During a turn its holder stays where it was at the beginning, so that nobody goes before it but who has credit left."""
        has_turn = share.key == self._holder
        return -share.priority, self._turn_end - 1 if has_turn else self._used_by(share), not has_turn, share.tenant

    def _used_by(self, share: Share) -> float:
        least = self._least(share.priority)
        return max(self._used.get(share.key, least), least)

    def _begin_turn(self, share: Share) -> None:
        begun = self._used_by(share)
        self._round[share.priority] = max(begun, self._round.get(share.priority, 0.0))
        self._holder, self._turn_end = share.key, begun + 1
        least = self._least(share.priority)
        self._used = {key: used for key, used in self._used.items() if key[0] != share.priority or used > least}

    def _least(self, priority: int) -> float:
        """Rounds that a share of the class has used up at least."""
        return max(self._round.get(priority, 0.0) - self._credit, self._idle_round.get(priority, -self._credit))
