"""KVLayout: how the K/V of one block is cut into stored objects, and how many bytes each has.

One object holds one block of one layer group:

    [layer][plane][kv_head][token][dim]  little-endian elements | trailer (64 bytes)

A tensor-parallel rank's heads are one contiguous range per layer and plane, and neither the number of stages nor the
number of ranks is part of the layout, so groups of any shape share one cache.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from moontide.errors import ConfigError

TRAILER_BYTES = 64
"""Room at the end of every object for the trailer that proves whose bytes these are (see trailer.py)."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Geometry of stored KV. All processes that share a store use the same one for a model."""

    model_fingerprint: str
    """Names the weights (id, revision, bytes), so that KV of other weights never matches."""
    num_layers: int
    num_planes: int
    """2: K and V; 1: the latent of multi-head latent attention."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """float32 or bfloat16."""
    block_tokens: int
    layer_group: int
    """Layers per stored object; the last group may be short."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "layer_group"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} of a KV layout is below 1; give a positive number")
        if self.num_planes not in (1, 2):
            raise ConfigError(f"num_planes={self.num_planes} of a KV layout is neither 2 (K and V) nor 1 (latent)")
        if self.dtype not in _ELEMENT_BYTES:
            raise ConfigError(
                f"dtype={self.dtype!r} of a KV layout is not supported; use one of {sorted(_ELEMENT_BYTES)}"
            )
        if self.layer_group > self.num_layers:
            raise ConfigError(
                f"layer_group={self.layer_group} is larger than num_layers={self.num_layers}; use at most {self.num_layers}"
            )

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.num_planes * self.num_kv_heads * self.block_tokens * self.head_dim * self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token in all layers, without trailers."""
        return self.num_layers * self.layer_bytes // self.block_tokens

    @cached_property
    def num_groups(self) -> int:
        return -(-self.num_layers // self.layer_group)

    @cached_property
    def block_bytes(self) -> int:
        """Stored bytes of one block: all layer groups with their trailers."""
        return self.num_layers * self.layer_bytes + self.num_groups * TRAILER_BYTES

    def group_layers(self, group_idx: int) -> range:
        """Layers of one group, in ascending order."""
        assert 0 <= group_idx < self.num_groups, f"group {group_idx} of {self.num_groups}"
        start = group_idx * self.layer_group
        return range(start, min(start + self.layer_group, self.num_layers))

    def group_of_layer(self, layer: int) -> int:
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
        return layer // self.layer_group

    def payload_bytes(self, group_idx: int) -> int:
        return len(self.group_layers(group_idx)) * self.layer_bytes

    def object_bytes(self, group_idx: int) -> int:
        return self.payload_bytes(group_idx) + TRAILER_BYTES

    def digest(self) -> bytes:
        """32 bytes that are equal exactly for equal layouts (and for this version of the byte order)."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(b"moontide kv layout %d " % _FORMAT_VERSION + self.to_json().encode()).digest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "KVLayout":
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)


def choose_layer_group(num_layers: int, layer_bytes: int, *, min_object_bytes: int = 192 * 1024) -> int:
    """Return the layers per object: few objects for small models, truly per layer for large ones.

    The fewest layers that reach `min_object_bytes`, but at most a quarter of all layers, so that a push overlaps with
    the compute of later layers. Up to twice as many layers are taken if that divides the layers evenly.
    """
    cap = max(1, num_layers // 4)
    fewest = min(cap, max(1, -(-min_object_bytes // layer_bytes)))
    even = (size for size in range(fewest, min(cap, 2 * fewest - 1) + 1) if num_layers % size == 0)
    return next(even, fewest)
