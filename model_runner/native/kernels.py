"""NativeKernels: the compiled kernels as calls on torch tensors, and the choice whether to use them.

The calls release Python's lock while they compute, and use as many threads as torch does. Structures mirror those of
kernels.cpp field by field. Nothing is checked there, so shapes, dtypes and strides are checked here.

Tensor shapes: T rows of a step, N query heads, K KV heads, H head size, P pages, S tokens per page, I inputs and O outputs
of a linear layer.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from model_runner.native.build import build_library
from moontide.errors import ConfigError
from moontide.log import get_logger
from moontide.native_build import BuildFailed

log = get_logger(__name__)

_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
_AMX_FLAGS = frozenset({"amx_tile", "amx_bf16"})
HEAD_SIZE_STEP = 32
"""Attention needs a head size that is a multiple of this: one register of bfloat16."""


class _Pages(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("plane_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("page_tokens", ctypes.c_int64),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("pages", _Pages),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_row_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("has_amx", ctypes.c_int64),
    )


class _Linear(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("has_amx", ctypes.c_int64),
    )


class NativeKernels:
    """The functions of one compiled library."""

    def __init__(self, library: Path, *, use_amx: bool = True) -> None:
        """
        Args:
            use_amx: where the CPU has it; its results have other bits than those without.
        Raises: OSError if the library cannot be loaded, for one from a file system that is mounted noexec.
        """
        functions = ctypes.CDLL(str(library))
        pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._write = functions.moontide_write
        rows = (pointer, number, number)
        self._write.argtypes = (pointer, pointer, number, pointer, *rows, *rows, number, number)
        self._attend = functions.moontide_attend
        self._attend.argtypes = (pointer, threads)
        self._packed_size = functions.moontide_packed_size
        self._packed_size.argtypes = (number, number)
        self._packed_size.restype = number
        self._pack = functions.moontide_pack
        self._pack.argtypes = (pointer, number, number, pointer)
        self._linear = functions.moontide_linear
        self._linear.argtypes = (pointer, threads)
        self._norm = functions.moontide_norm
        self._norm.argtypes = (pointer, pointer, number, number, ctypes.c_float, pointer, threads)
        for function in (self._write, self._attend, self._pack, self._linear, self._norm):
            function.restype = None
        has_amx = functions.moontide_has_amx
        has_amx.argtypes, has_amx.restype = (), ctypes.c_int
        self._has_amx = use_amx and _AMX_FLAGS.issubset(_cpu_flags()) and bool(has_amx())

    @property
    def instructions(self) -> str:
        """avx512_bf16 or amx: what multiplies."""
        return "amx" if self._has_amx else "avx512_bf16"

    def write(
        self, key_KTH: Tensor, value_KTH: Tensor, pages_PpKSH: Tensor, *, segments_B4: Tensor, tables: Tensor
    ) -> None:
        """Put the step's keys and values where their positions live.

        Args:
            pages_PpKSH: one layer's pages with planes for keys and values; any strides but the last, which is 1.
            segments_B4: int64, per segment: first row, number of rows, first position, where its pages start in `tables`.
            tables: int64, page numbers of all segments, one block table after the other.
        """
        key_KTH, value_KTH = _rows_of(key_KTH), _rows_of(value_KTH)
        pages = _pages(pages_PpKSH)
        self._write(
            ctypes.addressof(pages),
            segments_B4.data_ptr(),
            segments_B4.shape[0],
            tables.data_ptr(),
            key_KTH.data_ptr(),
            key_KTH.stride(0),
            key_KTH.stride(1),
            value_KTH.data_ptr(),
            value_KTH.stride(0),
            value_KTH.stride(1),
            key_KTH.shape[0],
            key_KTH.shape[2],
        )

    def attend(
        self,
        query_NTH: Tensor,
        pages_PpKSH: Tensor,
        *,
        segments_B4: Tensor,
        tables: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attention of every segment's rows to the keys of its pages up to their own position.

        Args:
            pages_PpKSH, segments_B4, tables: as for `write`.
            sinks_N: float32, a logit per query head that takes part in the softmax and has no value.
        Returns: [T, N, H] bfloat16. A row's bits depend on nothing but its own keys.
        """
        query_NTH = _rows_of(query_NTH)
        num_heads, num_rows, head_dim = query_NTH.shape
        num_kv_heads = pages_PpKSH.shape[2]
        assert head_dim % HEAD_SIZE_STEP == 0
        assert head_dim == pages_PpKSH.shape[4]
        assert num_heads % num_kv_heads == 0
        assert scaling > 0
        attended_TNH = query_NTH.new_empty(num_rows, num_heads, head_dim)
        call = _Attention(
            pages=_pages(pages_PpKSH),
            segments=segments_B4.data_ptr(),
            num_segments=segments_B4.shape[0],
            tables=tables.data_ptr(),
            query=query_NTH.data_ptr(),
            query_row_stride=query_NTH.stride(1),
            query_head_stride=query_NTH.stride(0),
            out=attended_TNH.data_ptr(),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            sinks=None if sinks_N is None else sinks_N.data_ptr(),
            scaling=scaling,
            softcap=softcap or 0.0,
            window=window or 0,
            has_amx=self._has_amx,
        )
        self._attend(ctypes.addressof(call), torch.get_num_threads())
        return attended_TNH

    def pack(self, weight_OI: Tensor) -> Tensor:
        """The weight in the order that `linear` reads; as large, with the outputs rounded up to a multiple of 64."""
        assert weight_OI.dtype == torch.bfloat16
        assert weight_OI.is_contiguous()
        num_outputs, num_inputs = weight_OI.shape
        assert num_inputs % 2 == 0
        packed = weight_OI.new_empty(self._packed_size(num_outputs, num_inputs))
        self._pack(weight_OI.data_ptr(), num_outputs, num_inputs, packed.data_ptr())
        return packed

    def linear(
        self,
        input_TI: Tensor,
        packed: Tensor,
        *,
        num_outputs: int,
        bias_O: Tensor | None = None,
        packed_gate: Tensor | None = None,
    ) -> Tensor:
        """[T, O] bfloat16: input x weight^T + bias, summed in float32. A row's bits depend on nothing but its input.

        Args:
            packed_gate: a second weight; the result is then silu(input x gate^T) * (input x weight^T). Excludes a bias.
        """
        assert input_TI.dtype == torch.bfloat16
        assert packed_gate is None or (bias_O is None and packed_gate.shape == packed.shape)
        if input_TI.stride(1) != 1:
            input_TI = input_TI.contiguous()
        num_rows, num_inputs = input_TI.shape
        out_TO = input_TI.new_empty(num_rows, num_outputs)
        call = _Linear(
            input=input_TI.data_ptr(),
            input_stride=input_TI.stride(0),
            weight=packed.data_ptr(),
            gate=None if packed_gate is None else packed_gate.data_ptr(),
            bias=None if bias_O is None else bias_O.data_ptr(),
            out=out_TO.data_ptr(),
            num_rows=num_rows,
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            has_amx=self._has_amx,
        )
        self._linear(ctypes.addressof(call), torch.get_num_threads())
        return out_TO

    def norm(self, input_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        """[T, D] bfloat16: each row over its root mean square, times the weight."""
        assert input_TD.dtype == weight_D.dtype == torch.bfloat16
        input_TD = input_TD.contiguous()
        num_rows, width = input_TD.shape
        assert weight_D.shape == (width,)
        out_TD = torch.empty_like(input_TD)
        self._norm(
            input_TD.data_ptr(),
            weight_D.data_ptr(),
            num_rows,
            width,
            epsilon,
            out_TD.data_ptr(),
            torch.get_num_threads(),
        )
        return out_TD


def load_kernels(choice: str, *, dtype: str, device: str) -> NativeKernels | None:
    """The kernels that `model.kernels` = auto | native | torch stands for; None: torch computes everything.

    Raises: ConfigError for `native` where they cannot run, with the reason.
    """
    if choice == "torch":
        return None
    reason = why_not_native(dtype=dtype, device=device)
    if reason is None:
        try:
            library = build_library()
            kernels = NativeKernels(library)
            log.info("native kernels", library=library, instructions=kernels.instructions)
            return kernels
        except (BuildFailed, OSError) as error:
            reason = str(error)
    if choice == "native":
        raise ConfigError(f"model.kernels='native' cannot be had: {reason}; set model.kernels=auto or torch")
    log.info("torch kernels", reason=reason)
    return None


def why_not_native(*, dtype: str, device: str) -> str | None:
    """Why this dtype, device or CPU cannot use the kernels; None if they can."""
    if device != "cpu":
        return f"device {device} is no CPU"
    if dtype != "bfloat16":
        return f"they compute bfloat16 and dtype is {dtype}"
    absent = sorted(_CPU_FLAGS.difference(_cpu_flags()))
    return f"the CPU has no {', '.join(absent)}" if absent else None


def _cpu_flags() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else []


def _pages(pages_PpKSH: Tensor) -> _Pages:
    assert pages_PpKSH.dtype == torch.bfloat16
    page, plane, head, token, dim = pages_PpKSH.stride()
    assert dim == 1
    return _Pages(pages_PpKSH.data_ptr(), page, plane, head, token, pages_PpKSH.shape[3])


def _rows_of(heads_KTH: Tensor) -> Tensor:
    """As given, or copied if a head's numbers do not lie side by side."""
    assert heads_KTH.dtype == torch.bfloat16
    return heads_KTH if heads_KTH.stride(2) == 1 else heads_KTH.contiguous()
