"""NativeStep: where the rows of one step live, in the form the native attention reads."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model_runner.native.kernels import HEAD_SIZE_STEP, NativeKernels

if TYPE_CHECKING:
    from model_runner.attention import ScoreRules, StepSegment


def why_no_native_attention(*, num_planes: int, head_dim: int) -> str | None:
    """Why attention over pages of this shape is left to torch; None if the kernels compute it."""
    if num_planes != 2:
        return "the pages hold latents (MLA)"
    if head_dim % HEAD_SIZE_STEP:
        return f"the head size {head_dim} is no multiple of {HEAD_SIZE_STEP}"
    return None


class NativeStep:
    """Segments and block tables of a step, laid out once for all its layers."""

    def __init__(self, kernels: NativeKernels, segments: "Sequence[StepSegment]") -> None:
        self._kernels = kernels
        rows: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        for segment in segments:
            rows.append((segment.first_row, segment.end_row - segment.first_row, segment.start, len(tables)))
            tables.extend(segment.pages)
        self._segments_B4 = torch.tensor(rows, dtype=torch.int64)
        self._written_B4 = self._segments_B4
        self._tables = torch.tensor(tables, dtype=torch.int64)

    def leave_out(self, silent: Collection[int]) -> None:
        """The segments of these indices write nothing from now on."""
        self._written_B4 = self._segments_B4.clone()
        self._written_B4[sorted(silent), 1] = 0

    def write(self, key_KTH: Tensor, value_KTH: Tensor, pages: Tensor) -> None:
        """Put the step's K/V into one layer's pages [P, 2, K, S, H]."""
        self._kernels.write(key_KTH, value_KTH, pages, segments_B4=self._written_B4, tables=self._tables)

    def attend(self, query_NTH: Tensor, pages: Tensor, rules: "ScoreRules") -> Tensor:
        """[T, N, H]: every segment's rows over its own pages."""
        return self._kernels.attend(
            query_NTH,
            pages,
            segments_B4=self._segments_B4,
            tables=self._tables,
            scaling=rules.scaling,
            window=rules.window,
            softcap=rules.softcap,
            sinks_N=None if rules.sinks_KG is None else rules.sinks_KG.flatten(),
        )
