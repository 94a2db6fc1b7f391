"""What to do when an attempt fails: try again, and where, or give up. Pure decisions and bookkeeping."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.registry import Node
from moontide.errors import Declined, MoontideError, NodeLost, Rejected, TransferFailed

FIRST_PAUSE_S = 0.1
PAUSE_GROWTH = 4
LONGEST_PAUSE_S = 2.0
_MOST_GROWTHS = 8
"""The pause is the longest one by then."""


class AttemptFailed(Exception):
    """One attempt at a request ended without its last token."""

    def __init__(self, error: MoontideError, *, node_id: str | None, is_retriable: bool | None = None) -> None:
        """`node_id` names who failed, when that is known; `is_retriable` None asks the class of `error`."""
        super().__init__(str(error))
        self.error = error
        self.node_id = node_id
        self.is_retriable = error.retriable if is_retriable is None else is_retriable


@dataclass(frozen=True, kw_only=True)
class Retry:
    avoid: str | None
    """Node that the next attempt should not use if there are others."""
    pause_s: float
    """Before it starts; with jitter, so that requests of a dead node do not come back as one wave."""


@dataclass(frozen=True)
class GiveUp:
    error: MoontideError


def is_refusal(failure: AttemptFailed) -> bool:
    """Whether a node that is well had no room or no time, and did no work."""
    return isinstance(failure.error, (Rejected, Declined))


def after_failure(
    failure: AttemptFailed, *, attempt: int, max_attempts: int, num_alternatives: int, outwaits_refusals: bool = False
) -> Retry | GiveUp:
    """Decide after attempt number `attempt` (from 1).

    Args:
        outwaits_refusals: refusals are no end, however many: the client has a part of the answer. `attempt` counts them apart from others.
        num_alternatives: other nodes that could take the failed one's part. A node that refuses a request for lack of room is not asked
            twice; another one may have the room.
    """
    error = failure.error
    is_outwaited = outwaits_refusals and is_refusal(failure)
    is_worth_it = failure.is_retriable or is_outwaited or (isinstance(error, Rejected) and num_alternatives > 0)
    if not is_worth_it:
        return GiveUp(error)
    if attempt >= max_attempts and not is_outwaited:
        return GiveUp(type(error)(f"gave up after {attempt} attempts; the last one: {error}"))
    is_nodes_fault = isinstance(error, (NodeLost, TransferFailed, Rejected))
    if isinstance(error, Declined) and not (is_outwaited and num_alternatives == 0):
        return Retry(avoid=None, pause_s=0.0)
    growth = PAUSE_GROWTH ** min(attempt - 1, _MOST_GROWTHS)
    pause_s = min(FIRST_PAUSE_S * growth, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
    return Retry(avoid=failure.node_id if is_nodes_fault else None, pause_s=pause_s)


class FailedNodes:
    """Nodes that were lost, until there is a sign of life that is newer than the failure.

    The registry shows a dead node for up to one lease. A node comes back into use when its record was withdrawn, when it has a new boot id,
    or when its record has outlived the lease that ran at the failure.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._failed: dict[str, tuple[str, float]] = {}

    def note(self, node_id: str, boot_id: str, now_s: float) -> None:
        self._failed[node_id] = (boot_id, now_s)

    @property
    def is_empty(self) -> bool:
        return not self._failed

    def current(self, nodes: Sequence[Node], now_s: float) -> set[str]:
        """Ids of nodes not to be trusted now; `nodes` is the registry's latest state."""
        boots = {node.record.node_id: node.record.boot_id for node in nodes if node.alive}
        self._failed = {
            node_id: (boot_id, failed_s)
            for node_id, (boot_id, failed_s) in self._failed.items()
            if boots.get(node_id) == boot_id and now_s - failed_s < self._lease_s
        }
        return set(self._failed)
