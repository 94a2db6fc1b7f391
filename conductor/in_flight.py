"""This conductor's own work on nodes. Heartbeats lag, so what was sent since a node's last report is added to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conductor.router import OwnWork


@dataclass(frozen=True)
class _Item:
    node_id: str
    amount: int
    since_s: float


class InFlight:
    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._prefill: dict[str, _Item] = {}
        self._decode: dict[str, _Item] = {}

    @property
    def is_empty(self) -> bool:
        return not self._prefill and not self._decode

    def begin(self, attempt_id: str, *, prefill_node: str, tokens: int, decode_node: str | None, now_s: float) -> None:
        self._prefill[attempt_id] = _Item(prefill_node, tokens, now_s)
        if decode_node is not None:
            self._decode[attempt_id] = _Item(decode_node, 1, now_s)

    def prefill_done(self, attempt_id: str) -> None:
        self._prefill.pop(attempt_id, None)

    def end(self, attempt_id: str) -> None:
        self._prefill.pop(attempt_id, None)
        self._decode.pop(attempt_id, None)

    def unreported(self, read_s: Mapping[str, float]) -> OwnWork:
        """Work that the records read at `read_s` (by node id) cannot contain yet."""
        return OwnWork(
            prefill_tokens=self._sums(self._prefill, read_s), decode_requests=self._sums(self._decode, read_s)
        )

    def _sums(self, items: Mapping[str, _Item], read_s: Mapping[str, float]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for item in items.values():
            if item.since_s > read_s.get(item.node_id, 0.0) - self._heartbeat_s:
                sums[item.node_id] = sums.get(item.node_id, 0) + item.amount
        return sums
