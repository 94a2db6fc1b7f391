"""FusedStep: chunks of a step over paged K/V by torch's own fused kernels, which keep no scores. What CUDA devices use.

    plain causal layer, in a dtype and head size that flash attention takes     flash attention
    sliding window, soft-capped scores, sinks, float32, larger heads            compiled flex attention

A segment's keys and values are gathered from the pages once per layer, without those outside its window; beside them
memory grows with the rows of the chunk, not with rows x keys. Latents (MLA) and segments of one token stay with the tiles
and batches of attention.py; their K/V are written here too. On a CPU the same calls compute the same by materialising
scores: that is for tests, which is the only place where this has run so far; the kernels themselves need a GPU.

Tensor shapes: T rows of the step or segment, N query heads, K KV heads, H head size, P pages, S tokens per page, C keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from model_runner.attention import ScoreRules, StepSegment

BLOCK = 128
"""Rows and keys of a block that flex attention skips, computes without a mask, or masks."""
_RECOMPILE_LIMIT = 64
"""Most variants of one call that are compiled: shapes become symbolic after the first change, but one block of rows or
of keys, another cap, other head counts and sizes are compiled anew. Beyond it a step fails, where eager flex attention
would materialise all scores."""


class FusedStep:
    """Where the rows and keys of one step live, laid out once for all its layers."""

    def __init__(self, segments: Sequence[StepSegment], *, page_tokens: int, device: torch.device) -> None:
        self._segments = segments
        self._page_tokens = page_tokens
        self._device = device
        positions = [torch.arange(each.start, each.end) for each in segments]
        written = [
            torch.tensor(each.pages[each.start // page_tokens :])[rows // page_tokens - each.start // page_tokens]
            for each, rows in zip(segments, positions, strict=True)
        ]
        self._page_T = torch.cat(written).to(device)
        self._offset_T = torch.cat(positions).remainder(page_tokens).to(device)
        self._written_rows: Tensor | None = None
        """None: all of them."""
        self._chunks: dict[tuple[int, int | None], _Chunk] = {}

    def leave_out(self, silent: Collection[int]) -> None:
        """The segments of these indices write nothing from now on."""
        is_written_T = torch.ones(len(self._page_T), dtype=torch.bool)
        for idx in silent:
            is_written_T[self._segments[idx].first_row : self._segments[idx].end_row] = False
        self._written_rows = is_written_T.nonzero()[:, 0].to(self._device)

    def write(self, plane_PKSH: Tensor, new_KTH: Tensor) -> None:
        """Put one plane of the rows where their positions live."""
        if self._written_rows is None:
            plane_PKSH[self._page_T, :, self._offset_T] = new_KTH.transpose(0, 1)
        else:
            rows = self._written_rows
            plane_PKSH[self._page_T[rows], :, self._offset_T[rows]] = new_KTH[:, rows].transpose(0, 1)

    def attend(self, query_NTH: Tensor, segment: StepSegment, pages: Tensor, rules: ScoreRules) -> Tensor:
        """[N, T, H]: the rows of one segment over its own pages [P, 2, K, S, H]."""
        name = segment.first_row, rules.window
        if name not in self._chunks:
            self._chunks[name] = self._chunk(segment, rules.window)
        return self._chunks[name].attend(query_NTH, pages, rules)

    def _chunk(self, segment: StepSegment, window: int | None) -> _Chunk:
        first = 0 if window is None else max(0, segment.start - window + 1)
        first_page = first // self._page_tokens
        skip = first - first_page * self._page_tokens
        table = torch.tensor(segment.pages[first_page : -(-segment.end // self._page_tokens)], device=self._device)
        return _Chunk(table, slice(skip, skip + segment.end - first), segment.end_row - segment.first_row, window)


class _Chunk:
    """A segment in layers of one window. Its last row sees the last of its keys."""

    def __init__(self, table: Tensor, keys: slice, num_rows: int, window: int | None) -> None:
        """`table`: the pages to gather; `keys`: what of them is visible to any row."""
        self._table = table
        self._keys = keys
        self._num_rows = num_rows
        self._num_keys: int = keys.stop - keys.start
        self._window = window

    def attend(self, query_NTH: Tensor, pages: Tensor, rules: ScoreRules) -> Tensor:
        # An index on a moved dimension copies the gathered pages only; index_select would first copy the whole pool.
        gathered = pages.movedim(0, 2)[:, :, self._table].flatten(2, 3)[:, None, :, self._keys]
        query, keys, values = query_NTH[None], gathered[0], gathered[1]
        hides_keys = self._window is not None and self._window < self._num_keys
        is_plain = not hides_keys and rules.softcap is None and rules.sinks_KG is None
        attend = self._attend_plain if is_plain and _takes_plain(query, keys, values) else self._attend_flex
        return attend(query, keys, values, rules)

    def _attend_plain(self, query: Tensor, keys: Tensor, values: Tensor, rules: ScoreRules) -> Tensor:
        bias: Any = causal_lower_right(self._num_rows, self._num_keys)
        return scaled_dot_product_attention(query, keys, values, bias, scale=rules.scaling, enable_gqa=True)[0]

    def _attend_flex(self, query: Tensor, keys: Tensor, values: Tensor, rules: ScoreRules) -> Tensor:
        attended, aux = _flex(query.device.type)(
            query,
            keys,
            values,
            score_mod=None if rules.softcap is None else _cap(rules.softcap),
            block_mask=self._block_mask,
            scale=rules.scaling,
            enable_gqa=True,
            return_aux=AuxRequest(lse=rules.sinks_KG is not None),
        )
        attended_NTH: Tensor = attended[0]
        if rules.sinks_KG is not None:
            # A sink adds exp(sink) to the sum exp(lse) that the weights were divided by.
            share_NT = torch.sigmoid(aux.lse[0] - rules.sinks_KG.flatten()[:, None])
            attended_NTH = (attended_NTH * share_NT[..., None]).to(query.dtype)
        return attended_NTH

    @cached_property
    def _block_mask(self) -> BlockMask:
        window = self._num_keys if self._window is None else self._window
        return causal_block_mask(self._num_rows, self._num_keys, window=window, device=self._table.device)


def causal_block_mask(num_rows: int, num_keys: int, *, window: int, device: torch.device) -> BlockMask:
    """Mask of the last `num_rows` of `num_keys` positions, where a row sees itself and the window - 1 keys before it.

    Made from the borders of blocks: flex attention's own maker evaluates every row and key.
    """
    row_Q1 = torch.arange(num_keys - num_rows, num_keys, BLOCK, device=device)[:, None]
    key_1B = torch.arange(0, num_keys, BLOCK, device=device)[None]
    last = BLOCK - 1
    is_seen = (key_1B <= row_Q1 + last) & (key_1B + last > row_Q1 - window)
    is_full = (key_1B + last <= row_Q1) & (key_1B > row_Q1 + last - window)
    # Tensors, so that other values need no other kernel.
    shift, reach = (torch.tensor(value, device=device) for value in (num_keys - num_rows, window))

    def is_visible(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row + shift) & (key > row + shift - reach)

    return BlockMask.from_kv_blocks(
        *_ordered(is_seen & ~is_full),
        *_ordered(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_rows, num_keys),
        compute_q_blocks=False,
    )


def _ordered(chosen_QB: Tensor) -> tuple[Tensor, Tensor]:
    """Per block of rows how many blocks of keys are chosen, [1, 1, Q], and their indices before all others, [1, 1, Q, B]."""
    indices = chosen_QB.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_QB.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]


def _takes_plain(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether scaled_dot_product_attention needs no mask tensor. On a CPU it makes one, of a test's size."""
    return query.device.type == "cpu" or can_use_flash_attention(
        SDPAParams(query, keys, values, None, 0.0, False, True)
    )


@cache
def _flex(device_type: str) -> Callable[..., Any]:
    if device_type == "cpu":
        eager: Callable[..., Any] = flex_attention
        return eager
    compiler: Any = torch.compile  # its declared signature lacks the limit
    compiled: Callable[..., Any] = compiler(flex_attention, fullgraph=True, recompile_limit=_RECOMPILE_LIMIT)
    return compiled


@cache
def _cap(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _row: Tensor, _key: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return capped
