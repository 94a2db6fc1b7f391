"""KV layouts that need no model."""

from __future__ import annotations

from kvstore.layout import KVLayout

TINY_LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=2,
    num_planes=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    block_tokens=4,
    layer_group=1,
)
"""Two layers in groups of one, blocks of four tokens."""
