"""StageModel: a transformers model cut to one stage, with its attention over our pages.

The modules, their forward and their weights are the library's; only the list of layers, the output norm and head, and
the attention function differ. No cache object is passed (its keyword changed between versions, and a wrong one vanishes
silently), and no mask function is registered (without one the library makes no masks).

Tensor shapes: T rows, D hidden size, V vocabulary.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from model_runner.attention import StepContext, paged_attention
from model_runner.kv_cache import TORCH_DTYPES
from model_runner.model_source import ModelSource, load_config
from model_runner.native.kernels import NativeKernels
from model_runner.native.linear import PackedLinear, use_kernels
from model_runner.stage import StageSpec
from model_runner.weights import Elsewhere, load_stage_weights

_ATTENTION_NAME = "moontide_paged"


class StageModel:
    """Layers [start_layer, end_layer) of a model; with the embedding on the first stage, the head on the last."""

    def __init__(
        self, source: ModelSource, spec: StageSpec, *, dtype: str, device: str, kernels: NativeKernels | None = None
    ) -> None:
        """Build the model without memory, then read this stage's tensors only. Raises: ModelError.

        Args:
            kernels: compute the modules that they fit; None leaves them to torch.
        """
        AttentionInterface.register(_ATTENTION_NAME, paged_attention)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                load_config(source), attn_implementation=_ATTENTION_NAME, dtype=TORCH_DTYPES[dtype]
            ).eval()
        load_stage_weights(model, source, spec, dtype=TORCH_DTYPES[dtype])
        _cut(model.get_decoder(), spec)
        self._model: Any = model.to(device)
        self._decoder: Any = model.get_decoder()
        if kernels is not None:
            use_kernels(self._model, kernels)
            if not spec.is_first_stage and isinstance(self._model.lm_head, PackedLinear):
                # It was here for the head that shares its weight, which is packed now.
                self._decoder.embed_tokens = Elsewhere()
        self.vocab_size = int(model.config.vocab_size)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T, D] embeddings, with the model's own scaling."""
        embedded: Tensor = self._decoder.embed_tokens(token_ids_T[None])[0]
        return embedded

    def hidden(self, hidden_TD: Tensor, positions_T: Tensor, step: StepContext) -> Tensor:
        """[T, D] after this stage's layers (and the output norm, if it is the last stage)."""
        output = self._decoder(
            inputs_embeds=hidden_TD[None], position_ids=positions_T[None], use_cache=False, step=step
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden_TD: Tensor, positions_T: Tensor, step: StepContext, *, rows: Tensor) -> Tensor:
        """[len(rows), V] float32: this stage's layers over all rows, the head over `rows`. Last stage only."""
        output = self._model(
            inputs_embeds=hidden_TD[None],
            position_ids=positions_T[None],
            use_cache=False,
            logits_to_keep=rows,
            step=step,
        )
        logits: Tensor = output.logits[0].float()
        return logits


def _cut(decoder: Any, spec: StageSpec) -> None:
    """Leave only this stage's layers. They were built with the full config, so what depends on a layer's position
    (dense first layers, experts, layers without position encoding, windows) stays as in the whole model."""
    layers = slice(spec.start_layer, spec.end_layer)
    decoder.layers = nn.ModuleList(decoder.layers[layers])
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = spec.num_local_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[layers]
    decoder.config = config
    for layer in decoder.layers:
        if hasattr(layer.self_attn, "expand_kv"):
            # Multi-head latent attention: the attention function gets the latents and expands them only where it pays.
            layer.self_attn.expand_kv = _keep_latents


def _keep_latents(compressed: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return compressed, rotated
