"""Settings of a decode node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.access import KvConfig, StoreAccessConfig
from model_runner.config import DEFAULT_CONTEXTS, ModelConfig
from moontide.config import NodeConfig, RegistryConfig, TlsConfig
from moontide.errors import ConfigError
from moontide.roles import Home


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Section `decode`."""

    num_pages: int = 0
    """Pages of K/V; a request holds enough for its prompt and all its output. 0: room for 4 full contexts of the model."""
    max_batch: int = 32
    """Most requests in one step. Larger: more tokens a second in total, longer time between two tokens of each."""
    max_queue: int = 256
    """Most requests that wait for pages; one more is refused."""
    local_prefill_tokens: int = 2048
    """Most tokens, beyond their prefix hits, of prompts that this node computes itself at a time; what is more is declined. 0: none."""
    chunk_tokens: int = 256
    """Most of them in one step: all running requests wait for it. Fewer, where their TBT SLOs ask for that."""
    pull_retry_s: float = 2.0
    """How long a block that should be in the store is asked for again before the request fails with BlockMissing."""
    write_back: bool = True
    """Whether full blocks that decode completes go into the store, so that a prompt that goes on after the answer hits them."""
    drain_timeout_s: float = 30.0
    """How long requests may still run after SIGTERM before they are handed back to their conductors."""

    def __post_init__(self) -> None:
        if self.num_pages < 0:
            raise ConfigError(f"decode.num_pages={self.num_pages} must be 0 (automatic) or a number of pages")
        if self.local_prefill_tokens < 0:
            raise ConfigError(f"decode.local_prefill_tokens={self.local_prefill_tokens} must be 0 (none) or more")
        for name in ("max_batch", "max_queue", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"decode.{name}={getattr(self, name)} must be at least 1")
        for name in ("pull_retry_s", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"decode.{name}={getattr(self, name)} must be 0 or more seconds")

    def resolve_num_pages(self, *, max_context: int, block_tokens: int) -> int:
        return self.num_pages or DEFAULT_CONTEXTS["decode"] * -(-max_context // block_tokens)


@dataclass(frozen=True, kw_only=True)
class DecodeNodeConfig:
    """All settings of `python -m decode_node`."""

    node: NodeConfig
    registry: RegistryConfig
    tls: TlsConfig = field(default_factory=TlsConfig)
    store: StoreAccessConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    prefill: dict[str, Any] | None = None
    """Section `prefill` that it gets when it becomes a prefill stage, with a place of its own in a group; empty: it does not."""
    home: Home | None = None
    """What it was deployed as, if that is something else. Written by itself."""
