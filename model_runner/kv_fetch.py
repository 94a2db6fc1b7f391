"""The way of K/V from the store into pages, for a prefix hit of a stage and for the prompt of a decode instance.

    calls   group 0: blocks 0 1 2 ... | group 0: ... n | group 1: 0 1 2 ... |        group by group, so that the first layers
                                                                                    are complete long before the last ones

A block counts only when every layer group of it is verified in its page. Knows neither requests nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from kvstore.client import BlockRef, StoreClient
from model_runner.kv_cache import PagedKVCache

MAX_CALL_BYTES = 32 * 1024 * 1024
"""Most bytes of one get, some 10 ms from the own host: a cancel waits for no more."""
MIN_CALL_BYTES = 2 * 1024 * 1024
"""Groups share a get until it has so many: the call itself takes about as long as reading half of them."""


def fetch_blocks(
    client: StoreClient,
    kv: PagedKVCache,
    blocks: Sequence[tuple[BlockRef, int]],
    *,
    is_cancelled: Callable[[], bool],
    only_prefix: bool = False,
    on_groups: Callable[[int], None] | None = None,
) -> list[bool]:
    """Read every layer group of this stage of some blocks into their pages; blocks until then.

    Args:
        blocks: (block, page). A block that misses a group is not asked for the next ones.
        is_cancelled: asked before every get; what is not read yet need not be.
        only_prefix: blocks after one that is not there are of no use.
        on_groups: called after a get with the number of the stage's leading layer groups that are complete, as long as no
            block is missing.
    Returns: per block, whether it is complete in its page; False for all when cancelled.
    """
    lost: set[int] = set()
    num_asked = 0
    for call in _calls(kv, len(blocks)):
        if is_cancelled():
            return [False] * len(blocks)
        wanted = [(group_idx, idx) for group_idx, idx in call if idx not in lost]
        if not wanted:
            break
        arrived = client.get(
            [(blocks[idx][0], group_idx, kv.slot_address(group_idx, blocks[idx][1])) for group_idx, idx in wanted]
        )
        lost.update(idx for (_, idx), is_there in zip(wanted, arrived, strict=True) if not is_there)
        if only_prefix and lost:
            lost.update(range(min(lost), len(blocks)))
        for group_idx, objects in groupby(wanted, key=lambda each: each[0]):
            kv.copy_in(group_idx, [blocks[idx][1] for _, idx in objects if idx not in lost])
        num_asked += len(call)
        if on_groups is not None and not lost:
            on_groups(num_asked // len(blocks))
    return [idx not in lost for idx in range(len(blocks))]


def _calls(kv: PagedKVCache, num_blocks: int) -> Iterator[list[tuple[int, int]]]:
    """(group, index of a block) of each get."""
    call: list[tuple[int, int]] = []
    call_bytes = 0
    for group_idx in kv.groups:
        slot_bytes = kv.slot_bytes(group_idx)
        for idx in range(num_blocks):
            if call and call_bytes + slot_bytes > MAX_CALL_BYTES:
                yield call
                call, call_bytes = [], 0
            call.append((group_idx, idx))
            call_bytes += slot_bytes
        if call_bytes >= MIN_CALL_BYTES:
            yield call
            call, call_bytes = [], 0
    if call:
        yield call
