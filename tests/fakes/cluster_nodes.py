"""Records of nodes as a registry shows them, for whatever decides from records alone."""

from __future__ import annotations

from typing import Any

from conductor.registry import Node
from kvstore.layout import KVLayout
from moontide.registry import NodeRecord

LAYOUT = KVLayout(
    model_fingerprint="m", num_layers=4, num_planes=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=8, layer_group=1
)  # fmt: skip
PREFILL_LOAD = {
    "queued_tokens": 0.0,
    "queued_s": 0.0,
    "num_pages": 1000.0,
    "free_pages": 1000.0,
    "num_stages": 2.0,
    "step_overhead_s": 0.01,
    "step_token_s": 0.001,
    "step_pair_s": 1e-7,
    "step_knee_tokens": 16.0,
    "chunk_tokens": 256.0,
    "max_step_s": 0.5,
    "fetch_bytes_per_s": 1e6,
    "copy_bytes_per_s": 1e6,
    "tail_s": 0.02,
}
DECODE_LOAD = {
    "running": 1.0,
    "context_tokens": 100.0,
    "num_pages": 500.0,
    "free_pages": 400.0,
    "max_batch": 16.0,
    "chunk_tokens": 64.0,
    "prefill_room_tokens": 256.0,
    "step_overhead_s": 0.005,
    "step_token_s": 0.001,
    "step_pair_s": 1e-6,
}


def node(node_id: str, role: str, host: str = "h0", *, alive: bool = True, read_s: float = 0.0, **fields: Any) -> Node:
    fields = {"model_id": "" if role == "kvstore" else "m", "layout_json": LAYOUT.to_json(), **fields}
    record = NodeRecord(node_id=node_id, role=role, address="a:1", http_address="", boot_id="1", host_id=host, **fields)
    return Node(record=record, alive=alive, read_s=read_s)


def prefill(node_id: str, host: str = "h0", /, **load: float) -> Node:
    """A group that reports its step model; `load` overrides what it says."""
    return node(node_id, "prefill", host, load=PREFILL_LOAD | load)


def decode(node_id: str, host: str = "h0", /, **load: float) -> Node:
    return node(node_id, "decode", host, load=DECODE_LOAD | load)


def store(node_id: str, host: str = "h0") -> Node:
    return node(node_id, "kvstore", host)
