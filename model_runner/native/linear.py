"""Modules of a model that the native kernels compute in bfloat16: linear layers, gated MLPs, RMS norms.

Each row's result depends on that row alone. A module is known by the text of its forward, which the library repeats in
every model family, so a family that computes something else keeps its own module.

Tensor shapes: T rows, I inputs, O outputs, D hidden size.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from model_runner.native.kernels import NativeKernels

_READ_ELSEWHERE = frozenset({"kv_b_proj"})
"""Linears whose weight the attention of MLA models reads as a matrix."""


class PackedLinear(nn.Module):
    """nn.Linear with its weight in the order the kernel reads."""

    def __init__(self, linear: nn.Linear, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._packed = kernels.pack(linear.weight.detach().contiguous())
        self._bias_O = None if linear.bias is None else linear.bias.detach().contiguous()
        self._num_outputs = linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        out_TO = self._kernels.linear(
            input.reshape(-1, input.shape[-1]), self._packed, bias_O=self._bias_O, num_outputs=self._num_outputs
        )
        return out_TO.view(*input.shape[:-1], self._num_outputs)


class PackedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); the gated product is made where the sums are, so gate and up are never tensors."""

    def __init__(self, mlp: Any, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._gate = kernels.pack(mlp.gate_proj.weight.detach().contiguous())
        self._up = kernels.pack(mlp.up_proj.weight.detach().contiguous())
        self._num_gated = mlp.up_proj.out_features
        self._down = PackedLinear(mlp.down_proj, kernels)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        gated = self._kernels.linear(
            hidden.reshape(-1, hidden.shape[-1]), self._up, packed_gate=self._gate, num_outputs=self._num_gated
        )
        down: Tensor = self._down(gated)
        return down.view(hidden.shape)


class NativeNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, norm: Any, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight_D = norm.weight.detach().contiguous()
        self._epsilon = float(norm.variance_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self._kernels.norm(hidden.reshape(-1, hidden.shape[-1]), self._weight_D, self._epsilon).view(
            hidden.shape
        )


def use_kernels(model: nn.Module, kernels: NativeKernels) -> None:
    """Replace every module of `model` that a kernel fits: bfloat16 on the CPU, an even number of inputs.

    One after the other: a weight is dropped as soon as it is packed, so at most one module is held twice. A packed weight
    is memory of this process, while one mapped from a file was shared with other processes; a weight that the embedding
    shares stays for the embedding.
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_gated_mlp(child):
                setattr(parent, name, PackedMlp(child, kernels))
            elif name not in _READ_ELSEWHERE and _is_linear(child):
                assert isinstance(child, nn.Linear)
                setattr(parent, name, PackedLinear(child, kernels))
            elif _computes_as(child, LlamaRMSNorm) and _on_cpu_in_bfloat16(child):
                setattr(parent, name, NativeNorm(child, kernels))


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.in_features % 2 == 0 and _on_cpu_in_bfloat16(module)


def _is_gated_mlp(module: Any) -> bool:
    if not _computes_as(module, LlamaMLP) or type(module.act_fn) is not type(ACT2FN["silu"]):
        return False
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    return all(_is_linear(each) for each in linears) and linears[0].bias is None and linears[1].bias is None


def _computes_as(module: nn.Module, known: type[nn.Module]) -> bool:
    return _text_of(type(module).forward) == _text_of(known.forward)


@functools.cache
def _text_of(function: Callable[..., Any]) -> str:
    return inspect.getsource(function)


def _on_cpu_in_bfloat16(module: Any) -> bool:
    weight: Tensor = module.weight
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
