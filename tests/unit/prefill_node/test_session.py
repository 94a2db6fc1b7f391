"""GroupSession: what counts as a sign that the group makes progress."""

from __future__ import annotations

import numpy as np

from kvstore.block import BlockHash, hash_blocks
from kvstore.pool import RequestKey
from moontide.sampling_params import SamplingParams
from moontide_proto.v1 import stage_pb2
from prefill_node.prompt import Prompt
from prefill_node.scheduler import Scheduler
from prefill_node.session import GroupSession
from tests.fakes.clock import FakeClock

BLOCK_TOKENS = 4
ROOT = BlockHash(b"r" * 32)


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.entries: list[stage_pb2.LogEntry] = []
        self.session = GroupSession(
            epoch=1,
            num_stages=1,
            num_pages=64,
            scheduler=Scheduler(chunk_tokens=8, max_in_flight_steps=2),
            send=self.entries.append,
            clock=self.clock,
        )

    def prompt(self, request_id: str, num_tokens: int) -> Prompt:
        token_ids = np.arange(num_tokens, dtype=np.uint32)
        prompt = Prompt(
            key=RequestKey(request_id, 1),
            order=0,
            token_ids=token_ids,
            root=ROOT,
            block_hashes=hash_blocks(token_ids, block_tokens=BLOCK_TOKENS, root=ROOT),
            block_tokens=BLOCK_TOKENS,
            sampling=SamplingParams(max_tokens=1),
            output_idx=0,
            arrived_s=self.clock.now(),
        )
        assert self.session.take_pages(prompt)
        return prompt

    def report(self, **report: object) -> None:
        self.session.on_report(0, stage_pb2.StageReport(epoch=1, **report))  # type: ignore[arg-type]


async def test_other_reports_do_not_hide_a_forward_that_hangs() -> None:
    world = World()
    computed = world.prompt("computed", 12)
    world.session.compute(computed, cursor=0)
    started_s = world.session.last_report_s
    assert started_s == world.clock.now()
    fetched = world.prompt("fetched", 9)
    world.clock.advance(100)
    world.session.fetch(fetched, 2)
    world.report(fetch_done=stage_pb2.FetchDone(request_id="fetched", request_epoch=1, num_blocks=2))
    world.session.finish(fetched)
    world.report(end_done=stage_pb2.EndDone(request_id="fetched", request_epoch=1))
    assert world.session.last_report_s == started_s

    world.report(step_done=stage_pb2.StepDone(seq=world.entries[0].seq))
    assert world.session.last_report_s == started_s + 100


async def test_without_a_forward_every_report_is_progress() -> None:
    world = World()
    prompt = world.prompt("fetched", 9)
    world.session.fetch(prompt, 2)
    world.clock.advance(100)
    world.report(fetch_done=stage_pb2.FetchDone(request_id="fetched", request_epoch=1, num_blocks=2))
    assert world.session.last_report_s == world.clock.now()
    world.clock.advance(100)
    world.session.compute(prompt, cursor=8)
    assert world.session.last_report_s == world.clock.now(), "the pipeline was empty until now"
