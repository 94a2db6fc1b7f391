"""Settings that every process which holds or reads KV shares: block geometry and where the store is."""

from __future__ import annotations

from dataclasses import dataclass

from moontide.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KvConfig:
    """Section `kv`: geometry of blocks and stored objects. Every node that shares a store uses the same values."""

    block_tokens: int = 64
    """Tokens per block: 64 for small models, 256 in production."""
    layer_group: int = 0
    """Consecutive layers per stored object; 0 takes the fewest that make an object of at least 192 KiB."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"kv.block_tokens={self.block_tokens} must be at least 1")
        if self.layer_group < 0:
            raise ConfigError(f"kv.layer_group={self.layer_group} must be 0 (automatic) or a number of layers")


@dataclass(frozen=True, kw_only=True)
class StoreAccessConfig:
    """Section `store`: how a compute process reaches the store."""

    master_rpc: str
    """host:port of the Mooncake master's RPC."""
    master_http: str
    """host:port of the Mooncake master's HTTP (health, queries that grant no lease)."""
    client_address: str
    """host:port of this host's Mooncake client, whose shared memory the process attaches to."""
    service_address: str
    """host:port of the store service that accounts what this node stores: this host's, or for a later stage that of stage 0."""
