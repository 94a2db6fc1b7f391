"""Each kernel computes what plain float32 arithmetic computes, as torch does, and a row's bits depend on that row alone."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model_runner import attention
from model_runner.attention import ScoreRules, StepContext, StepSegment
from model_runner.native.attention import NativeStep
from model_runner.native.kernels import NativeKernels

TOLERANCE = 6e-3
"""Relative error of bfloat16: 8 bits of mantissa, rounded in the weights and in the result."""


@dataclass(frozen=True)
class Case:
    """Shapes of one layer, and for each segment its first position and the one past its last."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    spans: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = {
    "one chunk": Case(9, 3, 64, 64, ((0, 256),)),
    "a chunk after two blocks of keys": Case(6, 2, 64, 16, ((1100, 1237),)),
    "chunks and single tokens": Case(4, 2, 64, 16, ((100, 237), (5, 6), (777, 778), (0, 1), (30, 33))),
    "odd pages": Case(3, 1, 64, 13, ((509, 700), (600, 601))),
    "narrow window": Case(4, 2, 32, 16, ((1000, 1137), (700, 701), (3, 4)), window=24),
    "window over blocks": Case(4, 2, 64, 16, ((900, 1100), (1500, 1501)), window=600),
    "window of one": Case(2, 1, 32, 16, ((500, 530),), window=1),
    "softcap": Case(8, 1, 32, 16, ((600, 637), (20, 21)), softcap=5.0),
    "sinks": Case(8, 2, 64, 16, ((513, 600), (7, 8)), has_sinks=True),
    "all rules, head of one and a half tiles": Case(
        8, 2, 96, 16, ((700, 745), (650, 651)), window=100, softcap=30.0, has_sinks=True
    ),
    "large heads": Case(4, 2, 256, 64, ((500, 560), (200, 201))),
    "one KV head for many": Case(16, 1, 128, 32, ((520, 560), (540, 541))),
}


class Layer:
    """Pages of one layer in random order, in slots with gaps, filled with random keys and values."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        num_pages = [-(-end // case.page_tokens) for _, end in case.spans]
        order = random.Random(1).sample(range(sum(num_pages) + 3), sum(num_pages) + 3)
        shape = (len(order), 2, case.kv_heads, case.page_tokens, case.head_dim)
        slot_size = 3 * shape[1] * shape[2] * shape[3] * shape[4] + 32
        slots = torch.randn(shape[0], slot_size, generator=generator).bfloat16()
        inner = torch.empty(shape[1:]).stride()
        self.pages = slots.as_strided(shape, (slot_size, *inner), slot_size // 3)
        self.segments: list[StepSegment] = []
        row = 0
        for (start, end), count in zip(case.spans, num_pages, strict=True):
            self.segments.append(StepSegment(row, row + end - start, start, [order.pop() for _ in range(count)]))
            row += end - start
        self.query = torch.randn(row, case.heads, case.head_dim, generator=generator).bfloat16().transpose(0, 1)
        sinks = torch.randn(case.kv_heads, case.heads // case.kv_heads, generator=generator)
        self.rules = ScoreRules(case.head_dim**-0.5, case.window, case.softcap, sinks if case.has_sinks else None)

    def attend(self, kernels: NativeKernels | None, segments: list[StepSegment] | None = None) -> Tensor:
        """[T, N, H]"""
        segments = segments or self.segments
        if kernels is not None:
            return NativeStep(kernels, segments).attend(self.query, self.pages, self.rules)
        step = StepContext(
            segments,
            page_tokens=self.pages.shape[3],
            device=torch.device("cpu"),
            layers=lambda _: self.pages,
            on_layer_written=lambda _: None,
        )
        return attention._attend_pages(self.query, step, self.pages, self.rules).transpose(0, 1)

    def expected(self) -> Tensor:
        """[T, N, H] in float32, one row after the other."""
        rows = []
        for segment in self.segments:
            keys, values = (torch.cat(list(self.pages[list(segment.pages), plane].float()), dim=1) for plane in (0, 1))
            for position in range(segment.start, segment.end):
                rows.append(self._expected_row(segment.first_row + position - segment.start, position, keys, values))
        return torch.stack(rows)

    def _expected_row(self, row: int, position: int, keys_KCH: Tensor, values_KCH: Tensor) -> Tensor:
        rules = self.rules
        first = 0 if rules.window is None else max(0, position - rules.window + 1)
        keys, values = keys_KCH[:, first : position + 1], values_KCH[:, first : position + 1]
        query_KGH = self.query[:, row].float().view(keys.shape[0], -1, keys.shape[2])
        scores = query_KGH @ keys.transpose(1, 2) * rules.scaling
        if rules.softcap is not None:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        if rules.sinks_KG is not None:
            scores = torch.cat([scores, rules.sinks_KG[..., None]], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        return (weights @ values).flatten(0, 1)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_equals_plain_float32_arithmetic(case: Case, kernels: NativeKernels | None) -> None:
    layer = Layer(case)
    assert relative_error(layer.attend(kernels), layer.expected()) < TOLERANCE


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bits_of_a_row_do_not_depend_on_the_other_rows(case: Case, native: NativeKernels) -> None:
    """The same rows one by one, and in pieces in another order."""
    layer = Layer(case)
    together = layer.attend(native)
    assert torch.equal(layer.attend(native, cut(layer.segments, [1])), together)
    assert torch.equal(layer.attend(native, cut(layer.segments, [7, 1, 19])[::-1]), together)


def cut(segments: list[StepSegment], sizes: list[int]) -> list[StepSegment]:
    """Every segment in pieces of these sizes, over and over."""
    pieces: list[StepSegment] = []
    for segment in segments:
        row = segment.first_row
        while row < segment.end_row:
            end = min(segment.end_row, row + sizes[len(pieces) % len(sizes)])
            pieces.append(StepSegment(row, end, segment.start + row - segment.first_row, segment.pages))
            row = end
    return pieces


def test_number_of_threads_changes_no_bit(native: NativeKernels) -> None:
    layer = Layer(CASES["chunks and single tokens"])
    weight, inputs = torch.randn(200, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    packed = native.pack(weight)
    ones = torch.ones(64).bfloat16()

    def results() -> list[Tensor]:
        return [
            layer.attend(native),
            native.linear(inputs, packed, num_outputs=200),
            native.linear(inputs, packed, packed_gate=packed, num_outputs=200),
            native.norm(inputs, ones, 1e-5),
        ]

    alone = results()
    torch.set_num_threads(2)
    try:
        for shared, single in zip(results(), alone, strict=True):
            assert torch.equal(shared, single)
    finally:
        torch.set_num_threads(1)


def test_places_that_nobody_has_written_reach_no_row(kernels: NativeKernels | None) -> None:
    layer = Layer(CASES["chunks and single tokens"])
    expected = layer.attend(kernels)
    for segment in layer.segments:
        layer.pages[segment.pages[-1], :, :, (segment.end - 1) % 16 + 1 :] = float("nan")
    assert torch.equal(layer.attend(kernels), expected)


def test_scores_of_any_size_give_finite_weights(kernels: NativeKernels | None) -> None:
    """The largest score may lie anywhere, and the others may be too small to count."""
    layer = Layer(Case(2, 1, 32, 16, ((600, 640),)))
    layer.pages[:, 0] *= 300
    assert relative_error(layer.attend(kernels), layer.expected()) < TOLERANCE


def test_query_whose_numbers_lie_apart_gives_the_same(native: NativeKernels) -> None:
    layer = Layer(CASES["one chunk"])
    expected = layer.attend(native)
    layer.query = layer.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(layer.attend(native), expected)


@pytest.mark.parametrize("case", [CASES["chunks and single tokens"], CASES["odd pages"]])
def test_rows_are_written_where_torch_writes_them(case: Case, native: NativeKernels) -> None:
    layer, twin = Layer(case), Layer(case)
    step = StepContext(
        twin.segments,
        page_tokens=case.page_tokens,
        device=torch.device("cpu"),
        layers=lambda _: twin.pages,
        on_layer_written=lambda _: None,
    )
    key, value = (torch.randn(twin.query.shape[1], case.kv_heads, case.head_dim).bfloat16() for _ in range(2))
    attention._write(step, twin.pages[:, 0], key.transpose(0, 1))
    attention._write(step, twin.pages[:, 1], value.transpose(0, 1))
    NativeStep(native, layer.segments).write(key.transpose(0, 1), value.transpose(0, 1), layer.pages)
    assert torch.equal(layer.pages, twin.pages)
    assert not torch.equal(layer.pages, Layer(case).pages)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (576, 96), (100, 50), (7, 2), (130, 2100), (192, 4096)])
def test_linear_equals_plain_float32_arithmetic(shape: tuple[int, int], has_bias: bool, native: NativeKernels) -> None:
    """The last shapes have more inputs than a panel takes at once; 400 rows are more than meet a panel at once."""
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    bias = torch.randn(num_outputs, generator=generator).bfloat16() if has_bias else None
    packed = native.pack(weight)
    inputs = torch.randn(400, num_inputs, generator=generator).bfloat16()
    together = native.linear(inputs, packed, bias_O=bias, num_outputs=num_outputs)
    exact = torch.nn.functional.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
    assert relative_error(together, exact) < TOLERANCE / 2
    for num_rows in (1, 2, 3, 5, 6, 7, 8, 13):
        some = native.linear(inputs[20 : 20 + num_rows], packed, bias_O=bias, num_outputs=num_outputs)
        assert torch.equal(some, together[20 : 20 + num_rows]), f"{num_rows} rows"


@pytest.mark.parametrize("shape", [(64, 64), (100, 50), (130, 2100)])
def test_gated_linear_equals_plain_float32_arithmetic(shape: tuple[int, int], native: NativeKernels) -> None:
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight, gate = (torch.randn(num_outputs, num_inputs, generator=generator).bfloat16() for _ in range(2))
    inputs = torch.randn(400, num_inputs, generator=generator).bfloat16()
    inputs[7] *= 100
    packed, packed_gate = native.pack(weight), native.pack(gate)
    together = native.linear(inputs, packed, packed_gate=packed_gate, num_outputs=num_outputs)
    gated = torch.nn.functional.silu(inputs.float() @ gate.float().t())
    assert relative_error(together, gated * (inputs.float() @ weight.float().t())) < TOLERANCE / 2
    for num_rows in (1, 6, 7, 13):
        rows = slice(5, 5 + num_rows)
        some = native.linear(inputs[rows], packed, packed_gate=packed_gate, num_outputs=num_outputs)
        assert torch.equal(some, together[rows]), f"{num_rows} rows"


@pytest.mark.parametrize("width", [32, 576, 100, 7])
def test_norm_equals_plain_float32_arithmetic(width: int, native: NativeKernels) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(9, width, generator=generator).bfloat16() * torch.tensor([1e-4, 1.0, 1e4] * 3).bfloat16()[:, None]
    )
    weight = torch.randn(width, generator=generator).bfloat16()
    normed = native.norm(hidden, weight, 1e-5)
    exact = torch.nn.functional.rms_norm(hidden.float(), (width,), weight.float(), 1e-5)
    for row in range(9):
        assert relative_error(normed[row], exact[row]) < TOLERANCE / 2
        assert torch.equal(native.norm(hidden[row : row + 1], weight, 1e-5)[0], normed[row])
    assert torch.equal(native.norm(hidden.t().contiguous().t(), weight, 1e-5), normed)


def test_linear_reads_rows_with_gaps_and_columns_apart(native: NativeKernels) -> None:
    packed = native.pack(torch.randn(64, 32).bfloat16())
    inputs = torch.randn(10, 32).bfloat16()
    expected = native.linear(inputs, packed, num_outputs=64)
    with_gaps = torch.cat([inputs, inputs], dim=1)[:, :32]
    assert torch.equal(native.linear(with_gaps, packed, num_outputs=64), expected)
    assert torch.equal(native.linear(inputs.t().contiguous().t(), packed, num_outputs=64), expected)
    assert native.linear(inputs[:0], packed, num_outputs=64).shape == (0, 64)
