"""Which cold block leaves first. A policy ranks blocks, the lowest rank leaves; it sees numbers only, and `pool.py` sees to it that
no block leaves before those that follow it, whatever the policy says.

Source: Mooncake, arXiv:2407.00079, table 1. Its length-aware policy is similar to LFU and gives priority to blocks that occur later in
requests, without saying to what end. Read here as: among blocks of equally many uses the latest one leaves first, for a block is useful
only to prompts that share everything before it. The opposite reading works against leaf-first, and on the conversation trace, the
nearest one to the table's that is public, it is further from LFU (benchmarks/results/cache_policy_2026-11.md).
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias


class Ranked(Protocol):
    """What a policy may look at."""

    last_use: int
    """Grows with every use that ends; equal for the blocks of one request."""
    num_uses: int
    """Requests that asked for the block since it is here."""
    position: int
    """Blocks before it in its prompt."""


EvictionPolicy: TypeAlias = Callable[[Ranked], tuple[int, ...]]


def lru(block: Ranked) -> tuple[int, ...]:
    """Least recently used first."""
    return (block.last_use,)


def lfu(block: Ranked) -> tuple[int, ...]:
    """Fewest uses first. A block that was popular once stays until all others are as popular."""
    return (block.num_uses, block.last_use)


def length_aware(block: Ranked) -> tuple[int, ...]:
    """Fewest uses first, then the latest in its prompt."""
    return (block.num_uses, -block.position, block.last_use)


EVICTION_POLICIES: Mapping[str, EvictionPolicy] = {"lru": lru, "lfu": lfu, "length-aware": length_aware}
