"""LocalPrefill: how far a prompt is that this node computes itself, and where its time went.

Open ---- queue_s: pages, pins ---- pull ---- queue_s: its turn ---- first chunk ... last chunk, first token
                                    fetch_s                          compute_s
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.session import LocalPrefillDone
from decode_node.step_plan import PromptPart
from kvstore.pool import RequestKey
from moontide.token_ids import TokenArray


@dataclass(kw_only=True)
class LocalPrefill:
    token_ids: TokenArray
    hit_tokens: int = 0
    num_left: int = 0
    """Tokens to be computed; 0 while the prefix hit is not known."""
    fetch_started_s: float | None = None
    fetch_ended_s: float | None = None
    compute_started_s: float | None = None
    predicted_s: float = 0.0
    is_written: bool = False
    """The write of the prompt has its pins."""

    @property
    def part(self) -> PromptPart:
        num_tokens = len(self.token_ids)
        return PromptPart(num_tokens - self.num_left, num_tokens)

    def set_hit(self, hit_tokens: int) -> None:
        """So many leading tokens are, or will be, in the pages."""
        self.hit_tokens = hit_tokens
        self.num_left = len(self.token_ids) - hit_tokens

    def computed(self, num_tokens: int, *, step_started_s: float) -> None:
        """A step computed some tokens."""
        self.num_left -= num_tokens
        if self.compute_started_s is None:
            self.compute_started_s = step_started_s

    def done(self, key: RequestKey, *, opened_s: float, ended_s: float) -> LocalPrefillDone:
        """What to tell once every token is computed."""
        assert self.compute_started_s is not None
        fetch_s = 0.0
        if self.fetch_started_s is not None and self.fetch_ended_s is not None:
            # The first chunk may begin before the last layer groups are there.
            fetch_s = max(0.0, min(self.fetch_ended_s, self.compute_started_s) - self.fetch_started_s)
        compute_s = ended_s - self.compute_started_s
        return LocalPrefillDone(
            key=key,
            hit_tokens=self.hit_tokens,
            queue_s=max(0.0, ended_s - opened_s - fetch_s - compute_s),
            fetch_s=fetch_s,
            compute_s=compute_s,
            predicted_s=self.predicted_s,
        )
