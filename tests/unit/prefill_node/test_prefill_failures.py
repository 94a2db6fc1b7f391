"""Cancels in every phase, and stages or connections that die: nothing hangs, nothing leaks, the group serves again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.node import LocalStoreNode, NodeIdentity
from kvstore.transfer.memory import MemoryTransfer
from model_runner.runner import Segment, StageRunner
from moontide import rpc
from moontide.errors import NodeLost, TransferFailed
from moontide_proto.v1 import prefill_pb2_grpc
from prefill_node import stage as stage_module
from tests.unit.prefill_node.rig import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    WAIT_S,
    Answer,
    Group,
    HeldForwards,
    eventually,
    group_behind_proxy,
    make_prompt,
    running_group,
)


async def cancel_when(group: Group, prompt: Sequence[int], reached: Callable[[Group], Awaitable[None]]) -> Answer:
    """Start request "victim", cancel its call at the named place; returns what it had got until then."""
    call = group.call(prompt, "victim")
    answer = Answer()

    async def read() -> None:
        async for event in call:
            answer.take(event)

    reading = asyncio.create_task(read())
    await reached(group)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return answer


async def assert_serves(group: Group, request_id: str = "after") -> None:
    assert (await group.prefill(make_prompt(CHUNK_TOKENS + 3, seed=99), request_id)).completed is not None
    await group.until_idle()
    assert (await group.node.stats()).reservations == 0


async def test_cancel_while_waiting_for_pages(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2, num_pages=8) as group:
        group.gates.exists.shut()
        holding = asyncio.create_task(group.prefill(make_prompt(8 * BLOCK_TOKENS), "holds"))
        await eventually(lambda: group.gates.exists.arrived > 0, "the first request at its seal")

        async def waits(group: Group) -> None:
            await eventually(lambda: group.stages[0].coordinator.num_waiting == 1, "a waiting request")

        answer = await cancel_when(group, make_prompt(CHUNK_TOKENS), waits)
        assert answer.order == []
        group.gates.exists.open()
        await holding
        await assert_serves(group)


async def test_cancel_while_waiting_for_room_in_the_store(model_dir: Path) -> None:
    block_bytes = 30_000  # more than one block of the tiny model takes
    async with running_group(model_dir, num_stages=2, pool_bytes=10 * block_bytes) as group:
        num_blocks = 8 * block_bytes // group.stages[0]._layout.block_bytes
        async for _ in group.call(make_prompt(num_blocks * BLOCK_TOKENS), "holds"):
            pass  # its reservation stays

        async def waits(group: Group) -> None:
            coordinator = group.stages[0].coordinator
            await eventually(
                lambda: coordinator.num_waiting == coordinator.num_reservations == 1, "a reservation asked for"
            )

        answer = await cancel_when(group, make_prompt(num_blocks * BLOCK_TOKENS, seed=5), waits)
        assert answer.order == []
        await group.until_idle()
        await group.node.release(request_id="holds", epoch=1)
        await assert_serves(group)


async def test_cancel_while_fetching(model_dir: Path) -> None:
    prompt = make_prompt(2 * CHUNK_TOKENS)
    async with running_group(model_dir, num_stages=2) as group:
        await group.prefill(prompt, "first")
        await group.until_idle()
        group.forget_pages()
        group.gates.get.shut()

        async def fetches(group: Group) -> None:
            await eventually(lambda: group.gates.get.arrived >= 2, "a fetch on both stages")

        answer = await cancel_when(group, prompt, fetches)
        assert answer.order == []
        # The fence: pages may not be free while the store still writes into them.
        coordinator = group.stages[0].coordinator
        await eventually(lambda: not coordinator._open, "the call's end")
        assert coordinator.session.pages.num_free < coordinator.session.pages.num_pages
        group.gates.get.open()
        await group.until_idle()
        await eventually(lambda: len(group.node.pool._reservations) == 0, "a released reservation")
        await assert_serves(group)


@pytest.mark.parametrize("stage_idx", [0, 1])
async def test_cancel_while_computing(model_dir: Path, monkeypatch: pytest.MonkeyPatch, stage_idx: int) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        held = HeldForwards(monkeypatch, stage_idx=stage_idx)

        async def computes(_: Group) -> None:
            await eventually(held.arrived.is_set, "a forward")

        answer = await cancel_when(group, make_prompt(6 * CHUNK_TOKENS + 1), computes)
        assert answer.first_token is None
        coordinator = group.stages[0].coordinator
        await eventually(lambda: not coordinator._open, "the call's end")
        assert coordinator.session.pages.num_free < coordinator.session.pages.num_pages
        held.release()
        await group.until_idle()
        await group.node.release(request_id="victim", epoch=1)
        await assert_serves(group)


@pytest.mark.parametrize("place", ["put", "exists"])
async def test_cancel_while_putting_or_sealing(model_dir: Path, place: str) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        gate = getattr(group.gates, place)
        gate.shut()

        async def arrives(_: Group) -> None:
            await eventually(lambda: gate.arrived > 0, place)

        answer = await cancel_when(group, make_prompt(2 * CHUNK_TOKENS + 1), arrives)
        assert answer.completed is None
        gate.open()
        await group.until_idle()
        await group.node.release(request_id="victim", epoch=1)
        await assert_serves(group)


async def test_cut_control_connection_ends_requests_retriable_and_the_group_forms_again(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group_behind_proxy(model_dir) as (group, proxy):
        await assert_serves(group, "before")
        first_epoch = group.stages[0].coordinator.session.epoch
        with monkeypatch.context() as patch:
            held = HeldForwards(patch, stage_idx=1)
            failing = asyncio.create_task(group.prefill(make_prompt(6 * CHUNK_TOKENS), "open"))
            await eventually(held.arrived.is_set, "a forward on stage 1")
            proxy.cut()
            with pytest.raises(NodeLost, match="group prefill-0 was lost"):
                await failing
            assert group.stages[0].not_ready() is not None
            held.release()
        await group.until_ready()
        assert group.stages[0].coordinator.session.epoch > first_epoch
        await assert_serves(group)


async def test_requests_of_an_incomplete_group_fail_at_once(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        await group.stages.pop().close()
        await eventually(lambda: not group.stages[0].is_grouped, "the loss of stage 1")
        with pytest.raises(NodeLost, match="not complete"):
            await group.prefill(make_prompt(3))
        assert "no stage 1" in str(group.stages[0].not_ready())


async def test_stage_that_starts_anew_joins_and_the_cache_still_hits(model_dir: Path) -> None:
    prompt = make_prompt(2 * CHUNK_TOKENS + 1)
    async with running_group(model_dir, num_stages=2) as group:
        first = await group.prefill(prompt, "first")
        await group.stages.pop().close()
        group.stages.append(await group.start_stage(1))
        await eventually(lambda: group.stages[1].is_grouped, "the new stage in the group")
        await group.until_ready()
        second = await group.prefill(prompt, "second")
        assert second.token_id == first.token_id
        assert second.accepted is not None
        assert second.accepted.hit_tokens == 2 * CHUNK_TOKENS
        await assert_serves(group)


async def test_stage_0_that_starts_anew_gets_its_stages_back(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        await group.stages[0].close()
        group.stages[0] = await group.start_stage(0)
        await group.until_ready()
        answer = Answer()
        async with rpc.open_channel(group.stages[0].grpc_address) as channel:
            group.stub = prefill_pb2_grpc.PrefillStub(channel)
            async for event in group.call(make_prompt(CHUNK_TOKENS), "r2"):
                answer.take(event)
        assert answer.completed is not None


async def test_forward_that_raises_ends_the_epoch_with_its_message(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        with monkeypatch.context() as patch:
            forward: Callable[..., Any] = StageRunner.forward

            def broken(runner: StageRunner, segments: Sequence[Segment], **given: Any) -> Any:
                if runner.spec.is_last_stage:
                    raise RuntimeError("no memory left")
                return forward(runner, segments, **given)

            patch.setattr(StageRunner, "forward", broken)
            with pytest.raises(NodeLost, match="no memory left"):
                await group.prefill(make_prompt(CHUNK_TOKENS))
        await eventually(lambda: not group.stages[1].is_grouped or group.stages[1].not_ready() is None, "an end")
        await group.until_ready()
        await assert_serves(group)


async def test_stage_of_another_group_shape_is_refused(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        await group.stages.pop().close()
        odd = Group(model_dir, num_stages=3)
        odd.join_address = odd.control_address = group.control_address
        stranger = await odd.start_stage(1)
        await eventually(lambda: "start all stages with one prefill.num_stages" in caplog.text, "a refusal")
        assert not stranger.is_grouped
        await stranger.close()
        group.stages.append(await group.start_stage(1))
        await group.until_ready()
        await assert_serves(group)


async def test_stage_that_stores_elsewhere_is_refused(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_group(model_dir, num_stages=2) as group:
        await group.stages.pop().close()
        elsewhere = Group(model_dir, num_stages=2)
        elsewhere.join_address = group.control_address
        elsewhere.node.pool.node_id = "another host's"
        elsewhere.store_node = LocalStoreNode(elsewhere.node.pool, MemoryTransfer(elsewhere.store))
        stranger = await elsewhere.start_stage(1)
        await eventually(lambda: "start all stages with one store.service_address" in caplog.text, "a refusal")
        assert not stranger.is_grouped
        await stranger.close()


async def test_store_that_is_down_turns_ready_red_and_back(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2) as group, httpx.AsyncClient() as http:
        ready_urls = [f"http://{stage.http_address}/ready" for stage in group.stages]
        assert [(await http.get(url)).status_code for url in ready_urls] == [200, 200]
        group.store.available = False
        await eventually(lambda: all(stage.not_ready() for stage in group.stages), "red stages")
        answers = [await http.get(url) for url in ready_urls]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert all("store" in answer.text for answer in answers)
        assert group.stages[0]._record() is None
        group.store.available = True
        await group.until_ready()
        record = group.stages[0]._record()
        assert record is not None
        assert (record.role, record.load["free_pages"], record.load["num_pages"]) == ("prefill", 64, 64)
        metrics = (await http.get(f"http://{group.stages[0].http_address}/metrics")).text
        assert "prefill_ttft_seconds_bucket" in metrics
        await assert_serves(group)


async def test_store_that_stands_still_turns_ready_red_and_back(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not refuse: it does not answer, and what was asked is answered when it goes on."""
    monkeypatch.setattr(stage_module, "_STORE_ANSWER_S", 0.05)
    goes_on = threading.Event()
    async with running_group(model_dir, num_stages=1) as group:
        monkeypatch.setattr(group.stages[0]._transfer, "healthy", lambda: goes_on.wait(WAIT_S))
        await eventually(lambda: "has not answered for" in str(group.stages[0].not_ready()), "a red stage")
        goes_on.set()
        await group.until_ready()
        await assert_serves(group)


async def test_restarted_store_ends_open_requests_at_once_and_retriable(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=2, seal_timeout_s=2 * WAIT_S) as group:
        group.gates.exists.shut()
        answering = asyncio.create_task(group.prefill(make_prompt(CHUNK_TOKENS)))
        await eventually(lambda: group.gates.exists.arrived > 0, "a request that waits for its objects")
        group.node._identity = NodeIdentity(node_id="local", boot_id="another")
        with pytest.raises(TransferFailed, match="restarted"):
            await answering
        group.gates.exists.open()
        await group.until_idle()
        await assert_serves(group)


async def test_store_that_leaves_look_ups_unanswered_is_still_seen_to_be_down(model_dir: Path) -> None:
    async with running_group(model_dir, num_stages=1) as group:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        group.gates.exists.shut()
        asking = asyncio.create_task(group.prefill(make_prompt(CHUNK_TOKENS)))
        await eventually(lambda: group.gates.exists.arrived > 0, "a look-up that waits")
        group.store.available = False
        await eventually(lambda: group.stages[0].not_ready() is not None, "a red stage")
        assert not asking.done()
        group.store.available = True
        group.gates.exists.open()
        assert (await asking).completed is not None


async def test_drain_lets_open_requests_end(model_dir: Path) -> None:
    group = Group(model_dir, num_stages=2)
    try:
        await group.start()
        group.gates.exists.shut()
        answering = asyncio.create_task(group.prefill(make_prompt(CHUNK_TOKENS)))
        await eventually(lambda: group.gates.exists.arrived > 0, "a request at its seal")
        closing = asyncio.gather(*(stage.close(grace_s=WAIT_S) for stage in group.stages))
        await eventually(lambda: group.stages[0].not_ready() == "draining", "a drain")
        group.gates.exists.open()
        assert (await answering).completed is not None
        await closing
    finally:
        await group.close()


async def test_close_while_an_epoch_ends_keeps_the_pages_until_the_forward_is_over(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(model_dir, num_stages=2)
    try:
        await group.start()
        held = HeldForwards(monkeypatch, stage_idx=0)
        stage, freed = group.stages[0], asyncio.Event()
        stage._resources.callback(freed.set)
        asking = asyncio.create_task(group.prefill(make_prompt(CHUNK_TOKENS)))
        await eventually(held.arrived.is_set, "a forward on stage 0")
        await group.stages[1].close()
        await eventually(lambda: not stage.is_grouped, "the loss of stage 1")
        with pytest.raises(NodeLost):
            await asking
        closing = asyncio.create_task(stage.close())
        await eventually(lambda: all(task.done() for task in stage._tasks), "the end of the stage's tasks")
        # Whatever else the close does, it must not get past the forward.
        done, _ = await asyncio.wait([closing, asyncio.create_task(freed.wait())], timeout=0.5)
        assert not done
        held.release()
        await closing
        assert freed.is_set()
    finally:
        held.release()
        await group.close()
