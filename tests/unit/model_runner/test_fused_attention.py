"""Chunks through torch's fused kernels equal the tiles. On a CPU the same calls run unfused; the kernels need a GPU."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from model_runner import attention, fused_attention
from model_runner.attention import ScoreRules, StepContext, StepSegment
from model_runner.fused_attention import BLOCK, FusedStep, causal_block_mask
from model_runner.model_source import ModelSource
from model_runner.runner import StageRunner
from model_runner.stage import split_layers
from tests.fakes.tiny_models import tiny_model_dir
from tests.unit.model_runner.stages import decode, kv_of, load_stages, make_layout, prefill

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
CPU = torch.device("cpu")
PROMPT = [3 + (7 * idx) % 250 for idx in range(61)]
PAGES = [5, 2, 9, 0, 7]


@pytest.fixture(autouse=True)
def unfused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flex attention that is not compiled warns of it, and traces itself anew for every shape."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.inference_mode():
        yield


@dataclass(frozen=True)
class Case:
    """Shapes of one layer, and for each segment its first position and the one past its last."""

    heads: int
    kv_heads: int
    head_dim: int
    spans: tuple[tuple[int, int], ...]
    page_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = {
    "first chunk": Case(8, 2, 32, ((0, 150),)),
    "chunk after a prefix": Case(6, 2, 64, ((700, 837),)),
    "several chunks and single tokens": Case(4, 2, 32, ((100, 237), (5, 6), (777, 778), (0, 1), (30, 33), (256, 384))),
    "pages that end inside of blocks": Case(3, 1, 32, ((509, 700), (600, 601)), page_tokens=13),
    "narrow window": Case(4, 2, 32, ((1000, 1137), (700, 701), (3, 9)), window=24),
    "window over blocks": Case(4, 4, 32, ((900, 1100), (1500, 1501)), window=400),
    "window longer than the prompt": Case(4, 2, 32, ((40, 90),), window=90),
    "window of one": Case(2, 1, 32, ((500, 530),), window=1),
    "softcap": Case(8, 1, 32, ((600, 637), (20, 21)), softcap=5.0),
    "sinks": Case(8, 2, 64, ((513, 600), (0, 130), (7, 8)), has_sinks=True),
    "all rules": Case(8, 2, 96, ((700, 745), (650, 651)), window=100, softcap=30.0, has_sinks=True),
}


class Layer:
    """Pages of one layer in random order, in slots with gaps, filled with random keys and values; NaN where none are."""

    def __init__(self, case: Case, *, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        num_pages = [-(-end // case.page_tokens) for _, end in case.spans]
        order = random.Random(1).sample(range(sum(num_pages) + 3), sum(num_pages) + 3)
        shape = (len(order), 2, case.kv_heads, case.page_tokens, case.head_dim)
        slots = torch.full((shape[0], 3, *shape[1:]), float("nan"))
        self.segments: list[StepSegment] = []
        row = 0
        for (start, end), count in zip(case.spans, num_pages, strict=True):
            pages = [order.pop() for _ in range(count)]
            for position in range(end):
                place = pages[position // case.page_tokens], 1, slice(None), slice(None), position % case.page_tokens
                slots[place] = torch.randn(2, case.kv_heads, case.head_dim, generator=generator)
            self.segments.append(StepSegment(row, row + end - start, start, pages))
            row += end - start
        self.pages = slots.to(device, dtype)[:, 1]
        self.query = torch.randn(row, case.heads, case.head_dim, generator=generator).to(device, dtype).transpose(0, 1)
        sinks = torch.randn(case.kv_heads, case.heads // case.kv_heads, generator=generator).to(device)
        self.rules = ScoreRules(case.head_dim**-0.5, case.window, case.softcap, sinks if case.has_sinks else None)

    def attend(self, *, is_fused: bool) -> Tensor:
        """[N, T, H]"""
        device, page_tokens = self.pages.device, self.pages.shape[3]
        step = StepContext(
            self.segments,
            page_tokens=page_tokens,
            device=device,
            layers=lambda _: self.pages,
            on_layer_written=lambda _: None,
            fused=FusedStep(self.segments, page_tokens=page_tokens, device=device) if is_fused else None,
        )
        return attention._attend_pages(self.query, step, self.pages, self.rules)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_fused_attention_equals_the_tiles_in_float32(device: str, name: str) -> None:
    layer = Layer(CASES[name], device=device, dtype=torch.float32)
    torch.testing.assert_close(layer.attend(is_fused=True), layer.attend(is_fused=False), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_fused_attention_in_bfloat16_is_as_close_to_float32_as_the_tiles(device: str, name: str) -> None:
    layer = Layer(CASES[name], device=device, dtype=torch.bfloat16)
    tiles, fused = layer.attend(is_fused=False).float(), layer.attend(is_fused=True).float()
    layer.pages, layer.query = layer.pages.float(), layer.query.float()
    exact = layer.attend(is_fused=False)
    assert (fused - exact).norm() <= 1.5 * (tiles - exact).norm()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral"])
def test_stages_compute_and_write_the_same_with_fused_kernels(family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    tiles, fused = load_stages(model_dir, 2), load_stages(model_dir, 2)
    for stage in fused:
        stage._is_fused = True
    expected, logits = (prefill(stages, PROMPT, PAGES, chunk=23) for stages in (tiles, fused))
    for position, row in expected.items():
        torch.testing.assert_close(logits[position], row, atol=1e-3, rtol=0)
    torch.testing.assert_close(kv_of(fused, PAGES), kv_of(tiles, PAGES), atol=1e-3, rtol=0)
    first = int(expected[len(PROMPT) - 1].argmax())
    tokens = decode(fused, len(PROMPT), first, PAGES, num_tokens=4)
    assert tokens == decode(tiles, len(PROMPT), first, PAGES, num_tokens=4)


@pytest.mark.parametrize("device", DEVICES)
def test_fused_kernels_are_what_auto_means_on_cuda_only(device: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root)
    source = ModelSource(path=model_dir, model_id="llama")
    layout = make_layout(source)
    (spec,) = split_layers(layout.num_layers, 1, layer_group=1)
    for kernels, is_fused in (("auto", device == "cuda"), ("torch", False)):
        runner = StageRunner.load(
            source, spec, dtype="float32", layout=layout, num_pages=2, device=device, kernels=kernels
        )
        assert runner._is_fused is is_fused


@pytest.mark.parametrize("window", [1, 24, BLOCK, 300, 10**6])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (1, 700), (130, 130), (256, 1024), (200, 777), (77, 1000)])
def test_block_mask_names_the_blocks_that_are_seen_and_needs_no_mask_in_full_ones(
    num_rows: int, num_keys: int, window: int
) -> None:
    mask = causal_block_mask(num_rows, num_keys, window=window, device=CPU)
    row_T1, key_1C = torch.arange(num_rows)[:, None] + num_keys - num_rows, torch.arange(num_keys)[None]
    visible = (key_1C <= row_T1) & (key_1C > row_T1 - window)
    assert torch.equal(mask.mask_mod(*torch.zeros(2, 1), torch.arange(num_rows)[:, None], key_1C), visible)
    blocks = [rows.split(BLOCK, dim=1) for rows in visible.split(BLOCK)]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row, of_row in enumerate(blocks):
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        assert sorted(partial + full) == [idx for idx, block in enumerate(of_row) if block.any()]
        assert all(of_row[idx].all() and of_row[idx].shape[1] == BLOCK for idx in full)
        if num_rows % BLOCK == 0:
            assert full == [idx for idx, block in enumerate(of_row) if block.shape[1] == BLOCK and block.all()]


def attend_compiled(compiled: Any, num_rows: int, num_keys: int, window: int) -> tuple[Tensor, Tensor]:
    """What a compiled flex attention and one that is not compute."""
    query = torch.randn(1, 4, num_rows, 32)
    keys, values = torch.randn(2, 1, 2, num_keys + 9, 32)[:, :, :, 5:-4]
    mask = causal_block_mask(num_rows, num_keys, window=window, device=CPU)
    given: dict[str, Any] = {"block_mask": mask, "scale": 0.2, "enable_gqa": True}
    return compiled(query, keys, values, **given), flex.flex_attention(query, keys, values, **given)


def test_longer_prefixes_other_chunks_and_windows_need_no_other_kernel() -> None:
    graphs = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend=count)
    for shape in [(300, 300, 300), (500, 810, 810)]:
        attend_compiled(compiled, *shape)
    num_graphs = len(graphs)
    assert num_graphs > 0
    for shape in [(300, 900, 100), (256, 1412, 1412), (512, 700, 30), (1000, 2000, 1)]:
        torch.testing.assert_close(*attend_compiled(compiled, *shape))
    assert len(graphs) == num_graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on PATH")
def test_kernels_compiled_for_a_cpu_read_the_block_mask_as_we_make_it() -> None:
    compiled = torch.compile(flex.flex_attention, fullgraph=True)
    for shape in [(300, 300, 300), (310, 610, 610), (300, 900, 100), (256, 1412, 200)]:
        torch.testing.assert_close(*attend_compiled(compiled, *shape), atol=1e-5, rtol=0)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 4096])
def test_a_chunk_keeps_no_tensor_of_rows_by_keys(window: int | None) -> None:
    """One byte per row and key would be 512 MiB; the gathered keys and values are 128 MiB."""
    num_rows, num_keys = 2048, 1 << 18
    pages = torch.zeros(num_keys // 64, 2, 1, 64, 128, dtype=torch.bfloat16, device="cuda")
    query = torch.zeros(4, num_rows, 128, dtype=torch.bfloat16, device="cuda")
    segment = StepSegment(0, num_rows, num_keys - num_rows, range(len(pages)))
    step = FusedStep([segment], page_tokens=64, device=query.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.attend(query, segment, pages, ScoreRules(0.1, window, None, None))
    assert torch.cuda.max_memory_allocated() - before < 400 << 20


@pytest.mark.gpu
@needs_cuda
def test_plain_layers_in_bfloat16_are_flash_attentions_and_float32_is_not() -> None:
    for dtype, takes_plain in ((torch.bfloat16, True), (torch.float32, False)):
        query, keys = (torch.zeros(1, heads, 300, 128, dtype=dtype, device="cuda") for heads in (8, 2))
        assert fused_attention._takes_plain(query, keys, keys) is takes_plain
