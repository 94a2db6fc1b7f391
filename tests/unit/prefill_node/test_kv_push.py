"""KVPusher and the seal's look-up: what is repeated, what is given up, what is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstore.block import BlockHash
from kvstore.client import BlockRef
from kvstore.pool import RequestKey
from kvstore.transfer.base import PutStatus, StoreUnavailable
from moontide.errors import TransferFailed
from prefill_node.kv_push import KVPusher, PushBlock, PushResult, StepPush, wait_until_stored
from tests.fakes.clock import FakeClock

A, B = RequestKey("a", 1), RequestKey("b", 1)


def block(key: RequestKey, page: int) -> PushBlock:
    return PushBlock(BlockRef(BlockHash(bytes([page]) * 32), key.request_id, key.epoch), page)


class FakeClient:
    """Answers puts from a script, one list of statuses per call; look-ups from another."""

    def __init__(self, puts: Sequence[Any] = (), missing: Sequence[Any] = ()) -> None:
        self.puts = list(puts)
        self.answers = list(missing)
        self.put_pages: list[list[int]] = []
        self.asked: list[int] = []

    def put_group(self, _group_idx: int, blocks: Sequence[tuple[BlockRef, int]]) -> list[PutStatus]:
        self.put_pages.append([address for _, address in blocks])
        answer = self.puts.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def missing(self, blocks: Sequence[BlockRef]) -> set[tuple[int, int]]:
        self.asked.append(len(blocks))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return set(answer)


class FakePages:
    def copy_out(self, _group_idx: int, _pages: list[int]) -> None:
        pass

    def slot_address(self, _group_idx: int, page: int) -> int:
        return page


def push(
    client: FakeClient,
    *,
    blocks: Sequence[PushBlock],
    num_groups: int = 1,
    skip: Callable[[RequestKey], bool] = lambda _: False,
    epoch_over: bool = False,
) -> list[PushResult]:
    results: list[PushResult] = []
    with ThreadPoolExecutor(1) as thread:
        pusher = KVPusher(
            client=client,  # type: ignore[arg-type]
            kv=FakePages(),  # type: ignore[arg-type]
            put_thread=thread,
            clock=FakeClock(),
            skip=skip,
            on_done=results.append,
            retry_wait=lambda _: epoch_over,
        )
        step = StepPush(seq=4, requests=[A, B], blocks=blocks, groups_left=num_groups)
        for group_idx in range(num_groups):
            pusher.group_done(step, group_idx)
    return results


OK, NO_SPACE, FAILED = PutStatus.STORED_OR_OPEN, PutStatus.NO_SPACE, PutStatus.FAILED


def test_reports_once_after_the_last_group() -> None:
    client = FakeClient(puts=[[OK], [OK], [OK]])
    (result,) = push(client, blocks=[block(A, 7)], num_groups=3)
    assert (result.seq, result.failed, list(result.requests)) == (4, 0, [A, B])
    assert client.put_pages == [[7], [7], [7]]


def test_repeats_only_what_failed() -> None:
    client = FakeClient(puts=[[OK, NO_SPACE, FAILED], [FAILED, OK], [OK]])
    (result,) = push(client, blocks=[block(A, 1), block(A, 2), block(B, 3)])
    assert result.failed == 0
    assert client.put_pages == [[1, 2, 3], [2, 3], [2]]


def test_gives_up_after_some_attempts_and_says_how_many_objects_failed() -> None:
    client = FakeClient(puts=[[FAILED, FAILED]] * 10)
    (result,) = push(client, blocks=[block(A, 1), block(B, 2)])
    assert result.failed == 2
    assert 1 < len(client.put_pages) < 10


def test_ended_epoch_repeats_nothing() -> None:
    client = FakeClient(puts=[[FAILED]] * 10)
    push(client, blocks=[block(A, 1)], epoch_over=True)
    assert len(client.put_pages) == 1


def test_blocks_of_ended_requests_are_left_out() -> None:
    client = FakeClient(puts=[[OK]])
    (result,) = push(client, blocks=[block(A, 1), block(B, 2)], skip=lambda key: key == A)
    assert client.put_pages == [[2]]
    assert result.failed == 0


def test_put_that_raises_counts_as_failed_and_the_next_group_goes_on() -> None:
    client = FakeClient(puts=[RuntimeError("broken"), [OK, OK]])
    (result,) = push(client, blocks=[block(A, 1), block(B, 2)], num_groups=2)
    assert result.failed == 2
    assert len(client.put_pages) == 2


REFS = [block(A, page).ref for page in range(3)]


async def test_look_up_asks_again_only_for_what_was_missing() -> None:
    client = FakeClient(missing=[{(1, 0), (1, 1), (2, 0)}, {(0, 1)}, set()])
    await wait_until_stored(client, REFS, timeout_s=5.0, failed=0)  # type: ignore[arg-type]
    assert client.asked == [3, 2, 1]


async def test_store_that_does_not_answer_is_asked_again() -> None:
    client = FakeClient(missing=[StoreUnavailable("down"), set()])
    await wait_until_stored(client, REFS, timeout_s=5.0, failed=0)  # type: ignore[arg-type]
    assert client.asked == [3, 3]


async def test_missing_objects_whose_put_failed_are_not_waited_for() -> None:
    client = FakeClient(missing=[{(0, 0)}])
    with pytest.raises(TransferFailed, match="2 puts failed"):
        await wait_until_stored(client, REFS, timeout_s=60.0, failed=2)  # type: ignore[arg-type]
    assert client.asked == [3]


async def test_failed_puts_do_not_matter_when_the_objects_are_there() -> None:
    client = FakeClient(missing=[set()])
    await wait_until_stored(client, REFS, timeout_s=5.0, failed=2)  # type: ignore[arg-type]


async def test_missing_objects_end_the_wait_with_its_deadline() -> None:
    client = FakeClient(missing=[{(0, 0), (2, 3)}, {(0, 0), (1, 3)}])
    with pytest.raises(TransferFailed, match=r"2 objects of 3 blocks are not in the store after 0\.03 s"):
        await wait_until_stored(client, REFS, timeout_s=0.03, failed=0)  # type: ignore[arg-type]
