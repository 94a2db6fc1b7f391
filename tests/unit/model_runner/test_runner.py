"""Stages of every family compute what stock transformers computes, for any split, chunk plan and packing."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner import attention
from model_runner.model_source import ModelSource
from model_runner.pages import OutOfPages
from model_runner.runner import Segment, StageRunner
from moontide.errors import ConfigError, ModelError
from tests.fakes.tiny_models import FAMILIES, reference_generate, reference_model, tiny_model_dir
from tests.unit.model_runner.stages import (
    PAGE_TOKENS,
    decode,
    kv_of,
    load_stages,
    make_layout,
    prefill,
    run_step,
)

PROMPT = random.Random(5).choices(range(3, 259), k=101)
CHUNKS = (1000, 33, 16, 7)
NUM_DECODED = 12
TOLERANCE = 1e-3


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that are smaller than the tiny prompts and no multiple of a page, so that every edge occurs."""
    monkeypatch.setattr(attention, "KEY_TILE", 24)
    monkeypatch.setattr(attention, "QUERY_TILE", 10)
    monkeypatch.setattr(attention, "BATCH_KEYS", 104)


def shuffled_pages(num_pages: int, *, of: int = 24, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(of), num_pages)


def reference_logits(model_dir: Path, ids: Sequence[int]) -> Tensor:
    """[T, V] of the stock model in one shot."""
    return _reference_logits(model_dir, tuple(ids))


@functools.cache
def _reference_logits(model_dir: Path, ids: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        return reference_model(model_dir)(torch.tensor([ids])).logits[0].float()


def assert_close(logits_V: Tensor, expected_V: Tensor) -> None:
    difference = float((logits_V - expected_V).abs().max())
    assert difference <= TOLERANCE, f"logits differ by {difference:.1e}"


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logits_equal_transformers(family: str, num_stages: int, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    expected_tokens = reference_generate(model_dir, PROMPT, NUM_DECODED)
    expected = reference_logits(model_dir, PROMPT)
    stages = load_stages(model_dir, num_stages)
    for chunk in CHUNKS:
        pages = shuffled_pages(8, seed=chunk)
        logits = prefill(stages, PROMPT, pages, chunk=chunk)
        for position, logits_V in logits.items():
            assert_close(logits_V, expected[position])
        first = int(logits[len(PROMPT) - 1].argmax())
        tokens = [first, *decode(stages, len(PROMPT), first, pages, num_tokens=NUM_DECODED - 1)]
        assert tokens == expected_tokens, f"chunk {chunk}"


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_segments_of_mixed_kinds_equal_transformers(family: str, tiny_root: Path) -> None:
    """Each step packs a chunk of one request, a short one of another, and single tokens of two that decode."""
    model_dir = tiny_model_dir(family, tiny_root)
    rng = random.Random(7)
    prompts = [rng.choices(range(3, 259), k=num_tokens) for num_tokens in (97, 61, 58, 9)]
    expected = [reference_logits(model_dir, prompt) for prompt in prompts]
    stages = load_stages(model_dir, 2, num_pages=20)
    order = shuffled_pages(20, of=20)
    pages = [order[:7], order[7:11], order[11:15], order[15:16]]
    done = [0, 0, 0, 0]
    sizes = [23, 11, 1, 1]
    for idx in (2, 3):
        prefill(stages, prompts[idx][: -5 if idx == 2 else -7], pages[idx], chunk=40)
        done[idx] = len(prompts[idx]) - (5 if idx == 2 else 7)
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        alive = [idx for idx in range(4) if done[idx] < len(prompts[idx])]
        segments, ids = [], []
        for idx in alive:
            chunk = prompts[idx][done[idx] : done[idx] + sizes[idx]]
            segments.append(Segment(start=done[idx], num_tokens=len(chunk), pages=pages[idx], wants_logits=idx != 1))
            ids += chunk
            done[idx] += len(chunk)
        logits = run_step(stages, segments, ids)
        wanted = [idx for idx in alive if idx != 1]
        assert logits.shape[0] == len(wanted)
        for logits_V, idx in zip(logits, wanted, strict=True):
            assert_close(logits_V, expected[idx][done[idx] - 1])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_smaller_than_the_prompt_change_nothing(family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    expected = reference_logits(model_dir, PROMPT)
    stages = load_stages(model_dir, 1)
    for chunk in (1000, 19):
        for position, logits_V in prefill(stages, PROMPT, shuffled_pages(7), chunk=chunk).items():
            assert_close(logits_V, expected[position])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_position_encodings_equal_transformers(rope: dict[str, Any], tiny_root: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root, rope_parameters={"rope_theta": 1e4, **rope})
    expected = reference_logits(model_dir, PROMPT)
    for position, logits_V in prefill(load_stages(model_dir, 2), PROMPT, shuffled_pages(7), chunk=33).items():
        assert_close(logits_V, expected[position])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_number_of_stages_changes_no_bit(family: str, dtype: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    pages = shuffled_pages(7)
    seen = []
    for num_stages in (1, 2, 3):
        stages = load_stages(model_dir, num_stages, dtype=dtype)
        logits = prefill(stages, PROMPT, pages, chunk=33)
        seen.append((torch.stack(list(logits.values())), kv_of(stages, pages)))
    for logits, kv in seen[1:]:
        assert torch.equal(logits, seen[0][0])
        assert torch.equal(kv, seen[0][1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    exact = reference_logits(model_dir, PROMPT)
    with torch.inference_mode():
        stock = reference_model(model_dir, torch.bfloat16)(torch.tensor([PROMPT])).logits[0].float()
    logits = prefill(load_stages(model_dir, 2, dtype="bfloat16"), PROMPT, shuffled_pages(7), chunk=1)
    ours = torch.stack([logits[position] for position in range(len(PROMPT))])
    assert (ours - exact).square().mean().sqrt() <= 1.2 * (stock - exact).square().mean().sqrt()


@pytest.fixture(params=["llama", "mistral", "deepseek_v3"])
def filled(request: pytest.FixtureRequest, tiny_root: Path) -> tuple[list[StageRunner], list[int], Tensor]:
    """Stages whose pages hold the prompt but its last token, and the logits expected of that token."""
    model_dir = tiny_model_dir(request.param, tiny_root)
    stages = load_stages(model_dir, 2)
    pages = shuffled_pages(7)
    prefill(stages, PROMPT[:-1], pages, chunk=33)
    return stages, pages, reference_logits(model_dir, PROMPT)[-1]


def last_logits(stages: list[StageRunner], pages: list[int], *, start: int = len(PROMPT) - 1) -> Tensor:
    return run_step(stages, [Segment(start=start, num_tokens=1, pages=pages, wants_logits=True)], PROMPT[-1:])[0]


def test_unspoilt_pages_give_the_expected_logits(filled: Any) -> None:
    stages, pages, expected = filled
    assert_close(last_logits(stages, pages), expected)


def test_swapped_pages_are_seen_in_the_logits(filled: Any) -> None:
    """One of them is the last: a row that sees two whole pages does not care about their order, for K holds its angles."""
    stages, pages, expected = filled
    pages[5], pages[6] = pages[6], pages[5]
    with pytest.raises(AssertionError, match="logits differ"):
        assert_close(last_logits(stages, pages), expected)


def test_positions_shifted_by_one_are_seen_in_the_logits(filled: Any) -> None:
    stages, pages, expected = filled
    with pytest.raises(AssertionError, match="logits differ"):
        assert_close(last_logits(stages, pages, start=len(PROMPT)), expected)


def test_page_of_another_prompt_is_seen_in_the_logits(filled: Any) -> None:
    stages, pages, expected = filled
    others = [page for page in range(24) if page not in pages]
    prefill(stages, PROMPT[::-1], others, chunk=33)
    pages[5] = others[5]
    with pytest.raises(AssertionError, match="logits differ"):
        assert_close(last_logits(stages, pages), expected)


def test_one_dropped_layer_group_of_one_page_is_seen_in_the_logits(filled: Any) -> None:
    stages, pages, expected = filled
    stages[1].kv.layer(1)[pages[5]] = 0
    with pytest.raises(AssertionError, match="logits differ"):
        assert_close(last_logits(stages, pages), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2"])
def test_garbage_in_unused_places_reaches_nobody(family: str, tiny_root: Path) -> None:
    """Places of a page that no position has written hold what the last owner left, even NaN."""
    model_dir = tiny_model_dir(family, tiny_root)
    expected = reference_logits(model_dir, PROMPT)
    stages = load_stages(model_dir, 1)
    for layer in range(stages[0].spec.num_local_layers):
        stages[0].kv.layer(layer).fill_(float("nan"))
    long, short = shuffled_pages(10)[:7], shuffled_pages(10)[7:]
    prefill(stages, PROMPT[:-1], long, chunk=33)
    prefill(stages, PROMPT[:36], short, chunk=33)
    segments = [
        Segment(start=100, num_tokens=1, pages=long, wants_logits=True),
        Segment(start=36, num_tokens=1, pages=short, wants_logits=True),
    ]
    logits = run_step(stages, segments, [PROMPT[100], PROMPT[36]])
    assert_close(logits[0], expected[100])
    assert_close(logits[1], expected[36])


def test_layer_groups_are_announced_in_order_once_their_kv_is_final(tiny_root: Path) -> None:
    stages = load_stages(tiny_model_dir("qwen3", tiny_root), 2, layer_group=2)
    pages = shuffled_pages(4)
    layers = {layer: (stage, idx) for stage in stages for idx, layer in enumerate(_layers_of(stage))}
    announced: dict[int, Tensor] = {}

    def snapshot(group_idx: int) -> None:
        held = [layers[layer] for layer in (2 * group_idx, 2 * group_idx + 1)]
        announced[group_idx] = torch.stack([stage.kv.layer(idx)[pages].clone() for stage, idx in held])

    segment = Segment(start=0, num_tokens=50, pages=pages, wants_logits=False)
    logits = run_step(stages, [segment], PROMPT[:50], on_layer_group=snapshot)
    assert logits.shape == (0, stages[0].info.vocab_size)
    assert list(announced) == [0, 1, 2]
    final = kv_of(stages, pages)
    for group_idx, kv in announced.items():
        assert torch.equal(kv, final[2 * group_idx : 2 * group_idx + 2])


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2"])
def test_kv_that_arrives_before_its_layer_group_is_computed_is_early_enough(family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    stages = load_stages(model_dir, 2, layer_group=2)
    pages = shuffled_pages(7)
    prefill(stages, PROMPT[:-1], pages, chunk=33)
    layers = {layer: stage.kv.layer(idx) for stage in stages for idx, layer in enumerate(_layers_of(stage))}
    computed = {layer: kv.clone() for layer, kv in layers.items()}
    for kv in layers.values():
        kv.fill_(float("nan"))
    arrived: list[int] = []

    def arrive(group_idx: int) -> tuple[()]:
        arrived.append(group_idx)
        for layer in (2 * group_idx, 2 * group_idx + 1):
            if layer in layers:
                layers[layer].copy_(computed[layer])
        return ()

    segment = Segment(start=len(PROMPT) - 1, num_tokens=1, pages=pages, wants_logits=True)
    out = stages[0].forward([segment], token_ids_T=torch.tensor(PROMPT[-1:]), before_layer_group=arrive)
    logits = stages[1].forward([segment], hidden_TD=out, before_layer_group=arrive)
    assert arrived == list(range(-(-len(layers) // 2)))
    assert_close(logits[0], reference_logits(model_dir, PROMPT)[-1])


@pytest.mark.parametrize(
    ("family", "how"), [("llama", "torch"), ("llama", "fused"), ("llama", "native"), ("deepseek_v2", "torch")]
)
@pytest.mark.parametrize("silent", [{0}, {1}, {2}, {0, 2}, {0, 1, 2, 3}])
def test_segment_whose_kv_is_late_writes_nothing_from_that_group_on(
    family: str, how: str, silent: set[int], tiny_root: Path, request: pytest.FixtureRequest
) -> None:
    """What other segments write and compute has the same bits as if nobody were late."""
    if how == "native":
        request.getfixturevalue("native")
    model_dir = tiny_model_dir(family, tiny_root, **({"head_dim": 32} if family == "llama" else {}))
    dtype, kernels = ("bfloat16", "native") if how == "native" else ("float32", "torch")
    (stage,) = load_stages(model_dir, 1, layer_group=2, dtype=dtype, kernels=kernels)
    stage._is_fused = how == "fused"
    assert stage.attention == how
    tables = [[5, 1, 8], [2, 7, 0], [9, 3, 4], [6, 10]]
    spans = [(36, 1), (33, 9), (40, 1), (17, 1)]
    for table, (start, _) in zip(tables, spans, strict=True):
        prefill([stage], PROMPT[:start], table, chunk=40)
    segments = [
        Segment(start=start, num_tokens=count, pages=table, wants_logits=True)
        for table, (start, count) in zip(tables, spans, strict=True)
    ]
    ids = torch.tensor(PROMPT[: sum(count for _, count in spans)])
    before = kv_of([stage], range(11))
    logits = stage.forward(segments, token_ids_T=ids)
    after = kv_of([stage], range(11))
    for layer in range(stage.spec.num_local_layers):
        stage.kv.layer(layer)[:11] = before[layer]
    late_group = 1
    again = stage.forward(segments, token_ids_T=ids, before_layer_group=lambda idx: silent if idx >= late_group else ())
    kv = kv_of([stage], range(11))
    first_layer = stage._layout.group_layers(late_group)[0]
    assert torch.equal(kv[:first_layer], after[:first_layer])
    for idx, table in enumerate(tables):
        expected = before if idx in silent else after
        assert torch.equal(kv[first_layer:, table], expected[first_layer:, table]), f"segment {idx}"
        assert not torch.equal(before[first_layer:, table], after[first_layer:, table])
        assert idx in silent or torch.equal(again[idx], logits[idx])


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama", "the head size 16 is no multiple of 32"), ("deepseek_v2", "the pages hold latents")],
)
@pytest.mark.usefixtures("native")
def test_kernels_that_leave_attention_to_torch_say_so(
    family: str, reason: str, tiny_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        (stage,) = load_stages(tiny_model_dir(family, tiny_root), 1, dtype="bfloat16", kernels="auto")
    assert stage.attention == "torch"
    (said,) = [line for line in caplog.messages if line.startswith("torch attention")]
    assert reason in said


def _layers_of(stage: StageRunner) -> range:
    return range(stage.spec.start_layer, stage.spec.end_layer)


def test_block_table_that_is_too_short_is_refused_before_anything_is_written(tiny_root: Path) -> None:
    stages = load_stages(tiny_model_dir("llama", tiny_root), 1)
    segments = [
        Segment(start=0, num_tokens=4, pages=[3], wants_logits=True),
        Segment(start=0, num_tokens=PAGE_TOKENS + 1, pages=[4], wants_logits=True),
    ]
    with pytest.raises(OutOfPages, match="does not reach position 16"):
        run_step(stages, segments, PROMPT[: 5 + PAGE_TOKENS])
    assert not kv_of(stages, [3, 4]).any()


def test_loading_leaves_all_pages_zero(tiny_root: Path) -> None:
    stages = load_stages(tiny_model_dir("llama", tiny_root), 2, num_pages=3)
    assert not kv_of(stages, range(3)).any()


def test_unknown_attention_keyword_is_refused_by_name() -> None:
    tensor = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ModelError, match=r"Identity passes \['new_feature'\]"):
        attention.paged_attention(torch.nn.Identity(), tensor, tensor, tensor, None, new_feature=1)


def test_layout_of_another_model_is_refused(tiny_root: Path) -> None:
    stages = load_stages(tiny_model_dir("llama", tiny_root), 1)
    other = ModelSource(path=tiny_model_dir("olmo2", tiny_root), model_id="other")
    layout = make_layout(ModelSource(path=tiny_model_dir("llama", tiny_root), model_id="llama"))
    with pytest.raises(ConfigError, match="the KV layout is of model"):
        StageRunner.load(other, stages[0].spec, dtype="float32", layout=layout, num_pages=1)
    with pytest.raises(ConfigError, match="dtype='float32'"):
        StageRunner.load(other, stages[0].spec, dtype="bfloat16", layout=layout, num_pages=1)
