"""The same stage on every device: logits as on the CPU, and K/V that survives the way through host slots. CUDA cases need a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from model_runner.model_source import ModelSource
from model_runner.runner import StageRunner
from model_runner.stage import split_layers
from tests.fakes.tiny_models import tiny_model_dir
from tests.unit.model_runner.stages import decode, kv_of, load_stages, make_layout, prefill

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
PROMPT = [3 + (7 * idx) % 250 for idx in range(61)]
PAGES = [5, 2, 9, 0, 7]


def load_on(device: str, model_dir: Path, num_stages: int) -> list[StageRunner]:
    source = ModelSource(path=model_dir, model_id=model_dir.name)
    layout = make_layout(source)
    return [
        StageRunner.load(source, spec, dtype="float32", layout=layout, num_pages=24, device=device)
        for spec in split_layers(layout.num_layers, num_stages, layer_group=1)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("device", DEVICES)
def test_stages_compute_the_same_on_every_device(device: str, family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    expected_stages, stages = load_stages(model_dir, 2), load_on(device, model_dir, 2)
    expected, logits = (prefill(s, PROMPT, PAGES, chunk=16) for s in (expected_stages, stages))
    for position, row in expected.items():
        torch.testing.assert_close(logits[position].cpu(), row, atol=1e-3, rtol=0)
    first = int(expected[len(PROMPT) - 1].argmax())
    tokens = decode(stages, len(PROMPT), first, PAGES, num_tokens=8)
    assert tokens == decode(expected_stages, len(PROMPT), first, PAGES, num_tokens=8)


@pytest.mark.parametrize("device", DEVICES)
def test_kv_goes_through_host_slots_into_other_pages_and_decodes_alike(device: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root)
    (sender,), (receiver,) = load_on(device, model_dir, 1), load_on(device, model_dir, 1)
    logits = prefill([sender], PROMPT, PAGES, chunk=32)
    there = [11, 12, 3, 4, 8]
    for group_idx in sender.kv.groups:
        sender.kv.copy_out(group_idx, PAGES)
        for source_page, target_page in zip(PAGES, there, strict=True):
            ctypes.memmove(
                receiver.kv.slot_address(group_idx, target_page),
                sender.kv.slot_address(group_idx, source_page),
                make_layout(ModelSource(path=model_dir, model_id="llama")).object_bytes(group_idx),
            )
        receiver.kv.copy_in(group_idx, there)
    assert torch.equal(kv_of([receiver], there).cpu(), kv_of([sender], PAGES).cpu())
    first = int(logits[len(PROMPT) - 1].argmax())
    tokens = decode([receiver], len(PROMPT), first, there, num_tokens=8)
    assert tokens == decode([sender], len(PROMPT), first, PAGES, num_tokens=8)
