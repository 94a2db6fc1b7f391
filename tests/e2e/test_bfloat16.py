"""bfloat16 is judged by teacher forcing: how often the most likely next token differs from float32's, for us and for stock transformers.

Chunk shapes change the order of sums, so equal tokens cannot be asked for; the stock model runs the same chunk plan with its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from model_runner.model_source import resolve_model
from model_runner.runner import Segment, StageRunner
from tests.e2e.real_text import RealText
from tests.unit.model_runner.stages import PAGE_TOKENS, load_stages, run_step

NUM_TOKENS = 1500
CHUNK = 256
TEXT_STARTS = (20_000, 90_000)
"""A single piece has some 30 flips, too few to tell 20 % from chance."""
MOST_FLIPS = 1.2
"""Ours may flip so many times as often as the stock model."""


def chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[first : first + CHUNK] for first in range(0, len(ids), CHUNK)]


def stock_choices(model: Any, ids: Sequence[int]) -> Tensor:
    """[T] most likely next token after each position."""
    cache = DynamicCache(config=model.config)
    found = []
    with torch.inference_mode():
        for chunk in chunks(ids):
            logits = model(input_ids=torch.tensor([chunk]), cache=cache, use_cache=True).logits[0]
            found.append(logits.float().argmax(-1))
    return torch.cat(found)


def our_choices(stages: Sequence[StageRunner], ids: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The same of our stages. A runner computes logits of the rows that someone wants; here these are all."""
    monkeypatch.setattr(
        StageRunner, "_logit_rows", lambda _self, segments: torch.arange(sum(s.num_tokens for s in segments))
    )
    pages = list(range(-(-len(ids) // PAGE_TOKENS)))
    found, start = [], 0
    for chunk in chunks(ids):
        segment = Segment(start=start, num_tokens=len(chunk), pages=pages, wants_logits=True)
        found.append(run_step(stages, [segment], chunk).argmax(-1))
        start += len(chunk)
    return torch.cat(found)


def test_flips_no_more_often_than_stock_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = resolve_model("smollm2").path
    text = RealText(model_dir)
    pieces = [text.piece(start, NUM_TOKENS) for start in TEXT_STARTS]
    stock = {
        dtype: AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    stages = load_stages(model_dir, 2, num_pages=NUM_TOKENS // PAGE_TOKENS + 1, dtype="bfloat16")
    stock_flips = our_flips = 0
    for ids in pieces:
        reference = stock_choices(stock[torch.float32], ids)
        ours = our_choices(stages, ids, monkeypatch)
        assert len(ours) == NUM_TOKENS
        stock_flips += int((stock_choices(stock[torch.bfloat16], ids) != reference).sum())
        our_flips += int((ours != reference).sum())
    print(f"of {len(pieces) * NUM_TOKENS} tokens flipped: ours {our_flips}, stock {stock_flips}")
    assert our_flips <= MOST_FLIPS * stock_flips
