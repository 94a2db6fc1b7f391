"""In which order the prompts of a group are served (pure): whose pages come first, whose chunk is next.

lars  least slack relative to its work first: a long prompt is not starved, and once late it does not hold up everybody
      (Medha, arXiv:2409.17264: slack / predicted work)
edf   earliest deadline first         srpt  shortest remaining work first         fcfs  first come, first served

The policy orders the prompts of one tenant; above it, a higher priority class goes first, and the tenants of a class share the
group (moontide/fair_share.py). Whatever the policy, a prompt that has waited for a step longer than the starvation bound goes before
all others of its tenant; each time that was so its bound is halved, so that under any load it goes on and comes to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.pool import RequestKey
from moontide.fair_share import Share

_MOST_HALVINGS = 5
"""Of the starvation bound. 30 s become about one: at least one step in a second is left to a long prompt, and the rest to the others."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A prompt in line. Times are moments or durations on stage 0's clock."""

    key: RequestKey
    order: int
    """Place in the line of arrivals."""
    deadline_s: float
    """When its first token is wanted."""
    work_s: float
    """Predicted time of the whole prompt, alone in the group; 0 when nothing was measured yet."""
    work_left_s: float
    served_s: float
    """When it was last given a step; its arrival before that."""
    share: Share
    """Whose part of the group's time it uses up."""
    num_starved: int = 0
    """Steps that it was given because it had waited too long."""


def ranked(
    candidates: Iterable[Candidate], *, policy: str, now_s: float, starvation_s: float, shares: Sequence[Share]
) -> list[Candidate]:
    """The candidates in the order of service. Without predictions every policy but edf is first come, first served.

    Args:
        shares: those of all candidates at least, in the order in which it is their turn.
    """
    places = {share.key: place for place, share in enumerate(shares)}

    def place(candidate: Candidate) -> tuple[int, bool, float, int]:
        turn = places[candidate.share.key]
        if is_starved(candidate, now_s=now_s, starvation_s=starvation_s):
            return turn, False, candidate.served_s, candidate.order
        return turn, True, _score(candidate, policy, now_s), candidate.order

    return sorted(candidates, key=place)


def keeps_turn(current: Candidate, first: Candidate, *, policy: str, now_s: float, starvation_s: float) -> bool:
    """Whether the prompt that got the last step gets the next one too, although `first` is ranked before it.

    Under lars a prompt that runs keeps its slack while the others lose theirs, so prompts of one length would take turns and
    all be done only at the end. Finishing the one with less work left first delays the other by less than its own work; it is
    not done where the other order meets more deadlines of the two.
    """
    return (
        policy == "lars"
        and current.share.key == first.share.key
        and current.work_left_s <= first.work_left_s
        and not is_starved(first, now_s=now_s, starvation_s=starvation_s)
        and _deadlines_met([current, first], now_s) >= _deadlines_met([first, current], now_s)
    )


def _deadlines_met(line: Sequence[Candidate], now_s: float) -> int:
    """How many of some prompts are done in time, one after the other."""
    ends_s = itertools.accumulate((candidate.work_left_s for candidate in line), initial=now_s)
    next(ends_s)
    return sum(end_s <= candidate.deadline_s for end_s, candidate in zip(ends_s, line, strict=True))


def is_starved(candidate: Candidate, *, now_s: float, starvation_s: float) -> bool:
    return now_s - candidate.served_s >= starvation_s * 0.5 ** min(candidate.num_starved, _MOST_HALVINGS)


def _score(candidate: Candidate, policy: str, now_s: float) -> float:
    if policy == "edf":
        return candidate.deadline_s
    if policy == "srpt":
        return candidate.work_left_s
    if policy == "lars" and candidate.work_s > 0:
        return (candidate.deadline_s - now_s - candidate.work_left_s) / candidate.work_s
    return 0.0
