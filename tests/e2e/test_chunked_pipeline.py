"""Chunked pipeline parallelism is real: while stage 1 works on a chunk, stage 0 works on the next chunk of the same prompt."""

from __future__ import annotations

import dataclasses
import math

import pytest

from deploy.gantt import stage_chunks
from moontide.client import MoontideClient
from moontide.timeline import Span, Timeline, TtftParts
from tests.cluster import RunningCluster
from tests.e2e.grpc_answers import Answer, ask, greedy
from tests.e2e.real_text import RealText

pytestmark = pytest.mark.processes

LENGTH = 6000
CHUNK = 512
TEXT_START = 84_000


@pytest.fixture(scope="module")
def text(smollm2_cluster: RunningCluster) -> RealText:
    return RealText(smollm2_cluster.model_dir)


async def answer_and_timeline(cluster: RunningCluster, prompt: list[int]) -> tuple[Answer, Timeline]:
    async with MoontideClient(cluster.grpc_address) as client:
        answer = await ask(client, prompt, greedy(2))
        timeline = await client.timeline(answer.request_id)
    assert timeline is not None
    return answer, timeline


def overlaps(first: Span, second: Span) -> bool:
    return first.start_s < second.end_s and second.start_s < first.end_s


def parts_sum(parts: TtftParts) -> float:
    return math.fsum(value for name, value in dataclasses.asdict(parts).items() if name != "ttft_s")


async def test_stage_1_computes_a_chunk_while_stage_0_computes_the_next(
    smollm2_cluster: RunningCluster, text: RealText
) -> None:
    answer, timeline = await answer_and_timeline(smollm2_cluster, text.piece(TEXT_START, LENGTH))
    stages = stage_chunks(timeline)
    num_chunks = -(-LENGTH // CHUNK)
    ranges = [(first, min(CHUNK, LENGTH - first)) for first in range(0, LENGTH, CHUNK)]
    assert [[(span.first_token, span.num_tokens) for span in spans] for spans in stages] == [ranges, ranges]
    for before, after in zip(*stages, strict=True):
        assert before.end_s <= after.start_s, f"tokens from {after.first_token} on: stage 1 needs what stage 0 made"
    together = [overlaps(stages[1][k], stages[0][k + 1]) for k in range(num_chunks - 1)]
    assert sum(together) > len(together) / 2, together

    assert timeline.ttft_parts == answer.ttft_parts
    assert parts_sum(answer.ttft_parts) == pytest.approx(answer.ttft_parts.ttft_s, abs=1e-9)
    assert answer.ttft_parts.prefill_s > 0


async def test_parts_of_ttft_add_up_on_a_hit_too(smollm2_cluster: RunningCluster, text: RealText) -> None:
    prompt = text.piece(TEXT_START - 1000, 700)
    for _ in range(2):
        answer, timeline = await answer_and_timeline(smollm2_cluster, prompt)
        assert timeline.ttft_parts == answer.ttft_parts
        assert parts_sum(answer.ttft_parts) == pytest.approx(answer.ttft_parts.ttft_s, abs=1e-9)
    assert answer.usage.cached_tokens == 640
    assert not any(span.name == "fetch" for span in timeline.spans), "its blocks are still in the pages"
