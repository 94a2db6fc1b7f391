"""PackedLinear: nn.Linear in bfloat16 with its weight in the order the native kernel reads.

Tensor shapes: T rows, I inputs, O outputs.
"""

import torch
from torch import Tensor, nn

from model_runner.native.kernels import NativeKernels

_READ_ELSEWHERE = frozenset({"kv_b_proj"})
"""Linears whose weight the attention of MLA models reads as a matrix."""


class PackedLinear(nn.Module):
    """Computes what the nn.Linear computes; each row's sum has one order, whatever else is in the call."""

    def __init__(self, linear: nn.Linear, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._packed = kernels.pack(linear.weight.detach().contiguous())
        self._bias_O = None if linear.bias is None else linear.bias.detach().contiguous()
        self._num_outputs = linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        out_TO = self._kernels.linear(input.reshape(-1, input.shape[-1]), self._packed, self._bias_O, self._num_outputs)
        return out_TO.view(*input.shape[:-1], self._num_outputs)


def pack_linears(model: nn.Module, kernels: NativeKernels) -> None:
    """Replace every plain linear layer of `model` that the kernel fits: bfloat16 on the CPU, an even number of inputs.

    One after the other: a weight is dropped as soon as it is packed, so at most one is held twice. A packed weight is memory
    of this process, while one mapped from a file was shared with other processes; a weight that the embedding shares
    stays for the embedding.
    """
    for parent in model.modules():
        for name, child in parent.named_children():
            if name not in _READ_ELSEWHERE and _fits(child):
                assert isinstance(child, nn.Linear)
                setattr(parent, name, PackedLinear(child, kernels))


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and module.in_features % 2 == 0
