"""Blocks are sealed only when every object of them was seen to exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.block import BlockHash
from kvstore.client import BlockRef
from kvstore.seal import wait_until_stored
from kvstore.transfer.base import StoreUnavailable
from moontide.errors import TransferFailed

REFS = [BlockRef(BlockHash(bytes([idx]) * 32), "a", 1) for idx in range(3)]


class FakeClient:
    """Answers look-ups from a script, whose last line stays."""

    def __init__(self, *missing: Any) -> None:
        self.answers = list(missing)
        self.asked: list[int] = []

    def missing(self, blocks: Sequence[BlockRef]) -> set[tuple[int, int]]:
        self.asked.append(len(blocks))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, set)
        return answer


async def test_look_up_asks_again_only_for_what_was_missing() -> None:
    client = FakeClient({(1, 0), (1, 1), (2, 0)}, {(0, 1)}, set())
    await wait_until_stored(client, REFS, timeout_s=5.0, failed=0)  # type: ignore[arg-type]
    assert client.asked == [3, 2, 1]


async def test_store_that_does_not_answer_is_asked_again() -> None:
    client = FakeClient(StoreUnavailable("down"), set())
    await wait_until_stored(client, REFS, timeout_s=5.0, failed=0)  # type: ignore[arg-type]
    assert client.asked == [3, 3]


async def test_missing_objects_whose_put_failed_are_not_waited_for() -> None:
    client = FakeClient({(0, 0)})
    with pytest.raises(TransferFailed, match="2 puts failed"):
        await wait_until_stored(client, REFS, timeout_s=60.0, failed=2)  # type: ignore[arg-type]
    assert client.asked == [3]


async def test_failed_puts_do_not_matter_when_the_objects_are_there() -> None:
    client = FakeClient(set())
    await wait_until_stored(client, REFS, timeout_s=5.0, failed=2)  # type: ignore[arg-type]


async def test_missing_objects_end_the_wait_with_its_deadline() -> None:
    client = FakeClient({(0, 0), (2, 3)}, {(0, 0), (1, 3)})
    with pytest.raises(TransferFailed, match=r"2 objects of 3 blocks are not in the store after 0\.03 s"):
        await wait_until_stored(client, REFS, timeout_s=0.03, failed=0)  # type: ignore[arg-type]
