"""Settings of the store process."""

from dataclasses import dataclass, field

from kvstore.eviction import EVICTION_POLICIES
from kvstore.keys import check_node_id
from moontide.config import NodeConfig, RegistryConfig, TlsConfig, check_port
from moontide.errors import ConfigError

MASTER_WATERMARK = 0.9
"""Share of the pool above which the store's master evicts by itself; it must never come to that, for it knows no blocks."""


@dataclass(frozen=True, kw_only=True)
class KvStoreSettings:
    """Section `kvstore`."""

    master_rpc: str
    """host:port of the store's master (--rpc_address, --rpc_port)."""
    master_http: str
    """host:port of the HTTP server of the store's master (--metrics_host, --metrics_port)."""
    client_port: int = 0
    """Port of the data client that owns the segment; 0 takes a free one. With a fixed one, local processes attach again after a restart."""
    client_threads: int = 2
    """Threads of the data client."""
    protocol: str = "tcp"
    """How hosts exchange bytes: tcp or rdma."""
    pool_bytes: int = 1 << 30
    """Size of the segment that this host adds to the pool."""
    fill_fraction: float = 0.85
    """Share of pool_bytes that reservations and cached blocks may use; below the master's watermark of 0.9."""
    eviction: str = "lru"
    """Blocks that leave first: lru (least recently used), lfu (fewest uses), length-aware (fewest uses, then latest in its prompt)."""
    check_placement_above: float = 0.8
    """Filled share of what may be used above which sealed blocks are looked for in this host's segment: a full segment spills."""
    drain_s: float = 30.0
    """At shutdown, time that reservations get to end: until then their prompts can be computed and pulled. No new one is granted."""
    ssd_dir: str = ""
    """Directory on a local SSD for blocks that the pool cannot keep, of this process alone; they outlive a restart. Empty: none."""
    ssd_bytes: int = 64 << 30
    """Most bytes of the files in ssd_dir. What was used least recently is dropped."""

    def __post_init__(self) -> None:
        check_address("kvstore.master_rpc", self.master_rpc)
        check_address("kvstore.master_http", self.master_http)
        check_port("kvstore.client_port", self.client_port)
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"kvstore.protocol={self.protocol!r} is unknown; use tcp or rdma")
        if self.drain_s < 0:
            raise ConfigError(f"kvstore.drain_s={self.drain_s} must be 0 (drop what is reserved) or more seconds")
        if self.client_threads < 1:
            raise ConfigError(f"kvstore.client_threads={self.client_threads} is below 1; use 1 or more")
        if self.pool_bytes < 16 << 20:
            raise ConfigError(
                f"kvstore.pool_bytes={self.pool_bytes} is below 16 MiB; a pool that small holds no prompt"
            )
        if not 0 < self.fill_fraction < MASTER_WATERMARK:
            raise ConfigError(
                f"kvstore.fill_fraction={self.fill_fraction} is outside of (0, {MASTER_WATERMARK}): above that the store's master "
                "evicts blocks behind our back; try 0.85"
            )
        if not 0 <= self.check_placement_above <= 1:
            raise ConfigError(
                f"kvstore.check_placement_above={self.check_placement_above} is no share; use 0 (always) to 1 (never)"
            )
        if self.eviction not in EVICTION_POLICIES:
            raise ConfigError(
                f"kvstore.eviction={self.eviction!r} is unknown; use one of {', '.join(EVICTION_POLICIES)}"
            )

        if self.ssd_bytes < 16 << 20:
            raise ConfigError(
                f"kvstore.ssd_bytes={self.ssd_bytes} is below 16 MiB; raise it, or leave kvstore.ssd_dir empty for no SSD tier"
            )

    @property
    def capacity_bytes(self) -> int:
        return int(self.pool_bytes * self.fill_fraction)


@dataclass(frozen=True, kw_only=True)
class KvStoreConfig:
    """All settings of `python -m kvstore`."""

    node: NodeConfig
    registry: RegistryConfig
    tls: TlsConfig = field(default_factory=TlsConfig)
    kvstore: KvStoreSettings

    def __post_init__(self) -> None:
        check_node_id(self.node.node_id)


def check_address(name: str, address: str) -> None:
    """Raises: ConfigError when `address` is not host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ConfigError(f"{name}={address!r} is no address; write host:port, e.g. 127.0.0.1:50051")
