"""The loop of one stage against a runner, a link and a store that the test holds in its hands."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvstore.node import NodeIdentity
from kvstore.transfer.base import PutStatus
from moontide.errors import Internal
from moontide_proto.v1 import common_pb2, stage_pb2
from prefill_node.metrics import StageMetrics
from prefill_node.pipeline import StagePipeline, StageThreads
from tests.fakes.clock import FakeClock
from tests.unit.prefill_node.rig import WAIT_S, Gate, eventually

STEP_TOKENS = 8
HIDDEN_SIZE = 4
STORE = NodeIdentity(node_id="store", boot_id="boot", segment="host")


class FakeRunner:
    """One layer group; forwards can be held."""

    def __init__(self, *, is_first_stage: bool, is_last_stage: bool) -> None:
        self.info = SimpleNamespace(hidden_size=HIDDEN_SIZE)
        self.spec = SimpleNamespace(stage_idx=0, is_first_stage=is_first_stage, is_last_stage=is_last_stage)
        self.kv = SimpleNamespace(
            groups=range(1),
            page_tokens=STEP_TOKENS,
            last_mark=lambda _: None,
            copy_out=lambda *_, **__: None,
            slot_address=lambda *_: 0,
            slot_bytes=lambda _: 1,
        )
        self.gate = Gate()
        self.num_ended = 0
        self.error: Exception | None = None
        self.after_error: list[str] = []
        self.logits: torch.Tensor | None = None
        self.outputs: list[weakref.ref[torch.Tensor]] = []

    def forward(self, segments: Any, *, on_layer_group: Callable[[int], None], **_: Any) -> torch.Tensor:
        self.gate.pass_through()
        on_layer_group(0)
        if self.error is not None:
            self.after_error.append("raised")
            raise self.error
        output = torch.zeros(STEP_TOKENS, HIDDEN_SIZE) if self.logits is None else self.logits
        self.outputs.append(weakref.ref(output.untyped_storage()))  # type: ignore[arg-type]
        self.num_ended += 1
        return output

    def wait_idle(self) -> None:
        self.after_error.append("waited")


class FakeLink:
    """Both ends. Sends wait until the link is free; frames arrive when the test says so."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.sent: list[int] = []
        self.arrived: asyncio.Queue[int] = asyncio.Queue()
        self.received: list[int] = []

    async def send(self, expected: Any, payload: memoryview, *, timeout_s: float) -> None:
        await self.is_free.wait()
        self.sent.append(expected.seq)

    async def next_header(self) -> tuple[stage_pb2.TensorHeader, int]:
        return stage_pb2.TensorHeader(seq=await self.arrived.get()), 0

    async def payload(self, header: stage_pb2.TensorHeader, *_: Any, **__: Any) -> torch.Tensor:
        self.received.append(header.seq)
        return torch.zeros(STEP_TOKENS, HIDDEN_SIZE)


class World:
    def __init__(self, *, stage: str, push: str) -> None:
        self.clock = FakeClock()
        self.runner = FakeRunner(is_first_stage=stage == "first", is_last_stage=stage == "last")
        self.link = FakeLink()
        self.registry = CollectorRegistry()
        self.reports: list[stage_pb2.StageReport] = []
        self.put_gate = Gate()
        self.num_put = 0
        self.threads = StageThreads(torch_threads=1)
        self.pipeline = StagePipeline(
            epoch=1,
            runner=self.runner,  # type: ignore[arg-type]
            client=SimpleNamespace(put=self._put),  # type: ignore[arg-type]
            store=STORE,
            threads=self.threads,
            report=self.reports.append,
            clock=self.clock,
            metrics=StageMetrics(self.registry),
            dtype="float32",
            transfer_timeout_s=WAIT_S,
            step_model=None,
            push=push,
            max_push_bytes=1 << 20,
        )
        self.num_steps = 0

    def _put(self, objects: list[Any], *, segment: str) -> list[PutStatus]:
        assert segment == STORE.segment
        self.put_gate.pass_through()
        self.num_put += len(objects)
        return [PutStatus.STORED_OR_OPEN] * len(objects)

    def apply_step(self, *, is_last: bool = False, temperature: float = 0.0) -> None:
        self.num_steps += 1
        chunk = stage_pb2.Chunk(
            request_id="r",
            request_epoch=1,
            first_token=STEP_TOKENS * (self.num_steps - 1),
            num_tokens=STEP_TOKENS,
            new_pages=[self.num_steps - 1],
            token_ids=bytes(4 * STEP_TOKENS),
            block_hashes=bytes([self.num_steps]) * 32,
            is_last=is_last,
            sampling=common_pb2.SamplingParams(max_tokens=8, temperature=temperature, top_p=1.0),
        )
        self.pipeline.apply(
            stage_pb2.LogEntry(epoch=1, seq=self.num_steps, compute=stage_pb2.ComputeStep(chunks=[chunk]))
        )

    def apply_end(self) -> None:
        end = stage_pb2.EndRequest(request_id="r", request_epoch=1)
        self.pipeline.apply(stage_pb2.LogEntry(epoch=1, seq=self.num_steps + 1, end=end))

    def reported(self, kind: str) -> int:
        return sum(report.HasField(kind) for report in self.reports)  # type: ignore[arg-type]

    @property
    def done(self) -> list[stage_pb2.StepDone]:
        return [report.step_done for report in self.reports if report.HasField("step_done")]

    def seconds(self, name: str) -> float:
        return self.registry.get_sample_value(f"prefill_stage_{name}_seconds_total") or 0.0


@asynccontextmanager
async def running(stage: str, *, push: str = "layer-wise") -> AsyncIterator[World]:
    world = World(stage=stage, push=push)
    receiver: Any = None if stage == "first" else world.link
    sender: Any = None if stage == "last" else world.link
    loop = asyncio.create_task(world.pipeline.run(receiver=receiver, sender=sender))
    try:
        yield world
    finally:
        world.runner.gate.open()
        world.put_gate.open()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await world.pipeline.close(timeout_s=WAIT_S)
        await world.threads.close(timeout_s=WAIT_S)


async def test_forwards_go_on_while_the_link_is_busy_and_the_wait_is_reported() -> None:
    async with running("first") as world:
        for _ in range(3):
            world.apply_step()
        await eventually(lambda: world.runner.num_ended == 3, "three forwards")
        await eventually(lambda: len(world.done) == 1, "the report of the step whose hidden states are being sent")
        world.clock.advance(2)
        world.link.is_free.set()
        await eventually(lambda: world.link.sent == [1, 2, 3], "three sends")
        assert [done.wait_send_s for done in world.done] == [0.0, 2.0, 2.0]
        assert world.seconds("wait_send") == 4.0


async def test_hidden_states_are_held_until_they_are_sent_and_not_longer() -> None:
    async with running("first") as world:
        world.apply_step()
        await eventually(lambda: len(world.done) == 1, "a forward")
        assert world.runner.outputs[0]() is not None
        world.link.is_free.set()
        await eventually(lambda: world.link.sent == [1], "a send")
        await eventually(lambda: world.runner.outputs[0]() is None, "free memory")


async def test_the_next_hidden_states_are_received_during_a_forward() -> None:
    async with running("last") as world:
        world.runner.gate.shut()
        world.apply_step()
        world.apply_step()
        world.link.arrived.put_nowait(1)
        world.link.arrived.put_nowait(2)
        await eventually(lambda: world.runner.gate.arrived == 1, "the first forward")
        await eventually(lambda: world.link.received == [1, 2], "both tensors")
        assert world.runner.num_ended == 0
        world.clock.advance(3)
        world.runner.gate.open()
        await eventually(lambda: len(world.done) == 2, "two forwards")
        assert [done.wait_recv_s for done in world.done] == [0.0, 0.0]
        assert world.seconds("busy") == 3.0


async def test_a_step_without_its_hidden_states_is_a_wait_for_the_stage_before() -> None:
    async with running("last") as world:
        world.clock.advance(10)
        world.apply_step()
        world.clock.advance(4)
        world.link.arrived.put_nowait(1)
        await eventually(lambda: len(world.done) == 1, "a forward")
        assert world.done[0].wait_recv_s == 4.0
        assert (world.seconds("idle"), world.seconds("wait_recv")) == (10.0, 4.0)


async def test_puts_that_are_open_after_the_last_step_are_a_wait_for_the_store() -> None:
    async with running("last") as world:
        world.put_gate.shut()
        world.apply_step()
        world.link.arrived.put_nowait(1)
        await eventually(lambda: len(world.done) == 1, "a forward")
        world.clock.advance(5)
        world.put_gate.open()
        await eventually(lambda: world.reported("puts_done") == 1, "puts")
        world.clock.advance(1)
        world.pipeline.times.settle()
        assert (world.seconds("wait_store"), world.seconds("idle")) == (5.0, 1.0)


async def test_end_of_a_request_is_acknowledged_only_after_the_put_that_is_under_way() -> None:
    async with running("first") as world:
        world.link.is_free.set()
        world.put_gate.shut()
        world.apply_step()
        await eventually(lambda: world.put_gate.arrived == 1 and world.reported("step_done") == 1, "a put under way")
        world.apply_end()
        assert world.reported("end_done") == 0
        world.put_gate.open()
        await eventually(lambda: world.reported("end_done") == 1, "the end")
        assert world.num_put == 1


async def test_end_of_an_epoch_waits_for_the_put_that_is_under_way_and_leaves_out_the_rest() -> None:
    async with running("first") as world:
        world.link.is_free.set()
        world.put_gate.shut()
        world.apply_step()
        world.apply_step()
        await eventually(lambda: world.put_gate.arrived == 1 and world.reported("step_done") == 2, "a put under way")
        with pytest.raises(Internal, match="a job of an ended epoch still runs"):
            await world.pipeline.close(timeout_s=0.02)
        world.put_gate.open()
        await world.pipeline.close(timeout_s=WAIT_S)
        assert (world.num_put, world.reported("puts_done")) == (1, 0)


async def test_puts_after_prefill_wait_for_the_last_step_of_the_prompt() -> None:
    async with running("first", push="after-prefill") as world:
        world.link.is_free.set()
        world.apply_step()
        await eventually(lambda: world.reported("step_done") == 1, "a forward")
        assert world.num_put == 0
        world.apply_step(is_last=True)
        await eventually(lambda: world.reported("puts_done") == 2, "the puts of both steps")
        assert (world.num_put, world.put_gate.arrived) == (2, 1)


async def test_request_that_ends_before_its_puts_were_due_lets_go_of_its_pages() -> None:
    async with running("first", push="after-prefill") as world:
        world.link.is_free.set()
        world.apply_step()
        await eventually(lambda: world.reported("step_done") == 1, "a forward")
        world.apply_end()
        await eventually(lambda: world.reported("end_done") == 1, "the end")
        assert world.num_put == 0


async def test_forward_that_raises_leaves_an_idle_device_behind() -> None:
    """Its pages are given to others as soon as the epoch has ended."""
    async with running("first") as world:
        world.runner.error = RuntimeError("out of memory")
        world.apply_step()
        await eventually(lambda: world.runner.after_error == ["raised", "waited"], "an idle device")
        await world.pipeline.close(timeout_s=WAIT_S)
        assert not world.done


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_logits_are_the_end_of_one_prompt_and_of_no_epoch(temperature: float) -> None:
    async with running("last") as world:
        world.runner.logits = torch.tensor([[0.0, float("nan"), 1.0]])
        world.apply_step(is_last=True, temperature=temperature)
        world.link.arrived.put_nowait(1)
        await eventually(lambda: len(world.done) == 1, "a forward")
        (token,) = world.done[0].tokens
        assert "NaN logits for token 0" in token.error
        world.runner.logits = torch.tensor([[0.0, 1.0]])
        world.apply_step(is_last=True)
        world.link.arrived.put_nowait(2)
        await eventually(lambda: len(world.done) == 2, "the next forward")
        assert [(each.token_id, each.HasField("error")) for each in world.done[1].tokens] == [(1, False)]
