"""Puts that are held up inside of the transfer until long after their request, or its whole epoch, has ended: their pages belong to them
until they return, so that no name ever gets another's bytes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moontide.errors import NodeLost
from tests.unit.prefill_node.rig import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Answer,
    Group,
    eventually,
    group_behind_proxy,
    make_prompt,
    running_group,
)

VICTIM = make_prompt(4 * CHUNK_TOKENS, seed=1)
HEIR = make_prompt(4 * CHUNK_TOKENS, seed=2)
NUM_PAGES = len(HEIR) // BLOCK_TOKENS
"""Enough for one of them: the heir gets the victim's pages."""


async def stored_in_peace(model_dir: Path) -> dict[str, bytes]:
    """What belongs under each name."""
    async with running_group(model_dir, num_stages=2) as group:
        await group.prefill(VICTIM, "victim")
        await group.prefill(HEIR, "heir")
        return group.blocks()


async def hold_up_puts(group: Group) -> Any:
    """Start the victim; its puts stand still in the transfer of every stage, and all its chunks are computed."""
    group.gates.put.shut()
    call = group.call(VICTIM, "victim")
    answer = Answer()
    async for event in call:
        answer.take(event)
        if answer.first_token is not None:
            break
    await eventually(lambda: group.gates.put.arrived == 2, "a put of each stage under way")
    return call


def assert_names_have_their_own_bytes(group: Group, expected: dict[str, bytes], *, at_least: int) -> None:
    stored = group.blocks()
    assert len(stored) >= at_least
    assert [key for key, value in stored.items() if value != expected[key]] == []


async def test_pages_of_a_cancelled_request_wait_for_its_delayed_puts(model_dir: Path) -> None:
    expected = await stored_in_peace(model_dir)
    async with running_group(model_dir, num_stages=2, num_pages=NUM_PAGES) as group:
        coordinator = group.stages[0].coordinator
        assert coordinator is not None
        assert coordinator.session is not None
        call = await hold_up_puts(group)
        call.cancel()
        await eventually(lambda: not coordinator.num_waiting and not coordinator.num_reservations, "the cancel")
        heir = asyncio.create_task(group.prefill(HEIR, "heir"))
        await eventually(lambda: coordinator.num_waiting == 1, "a request that waits for the pages")
        assert coordinator.session.pages.num_free == 0
        group.gates.put.open()
        await heir
        await group.node.release(request_id="victim", epoch=1)
        await group.until_idle()
        assert_names_have_their_own_bytes(group, expected, at_least=len(expected) // 2)


async def test_group_forms_again_only_after_the_delayed_puts_of_its_last_epoch(model_dir: Path) -> None:
    expected = await stored_in_peace(model_dir)
    async with group_behind_proxy(model_dir, num_pages=NUM_PAGES) as (group, proxy):
        await hold_up_puts(group)
        proxy.cut()
        await eventually(lambda: not any(stage.is_grouped for stage in group.stages), "the end of the epoch")
        with pytest.raises(NodeLost, match="not complete"):
            await group.prefill(HEIR, "early")
        num_held = len(group.blocks())
        group.gates.put.open()
        await group.until_ready()
        num_late = len(group.blocks()) - num_held
        await group.node.release(request_id="victim", epoch=1)
        await group.prefill(HEIR, "heir")
        await group.until_idle()
        assert num_late > 0
        assert_names_have_their_own_bytes(group, expected, at_least=len(expected) // 2)
