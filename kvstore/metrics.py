"""Counters of the KV store: of its clients in other services, and of the store process itself."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moontide.metrics import start_at_zero


class ClientMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.puts = Counter(
            "kvstore_client_puts",
            "Objects put, by result: stored_or_open, no_space, failed.",
            ["result"],
            registry=registry,
        )
        start_at_zero(self.puts, "stored_or_open", "no_space", "failed")
        self.gets = Counter(
            "kvstore_client_gets",
            "Objects fetched, by result: hit, miss, failed, corrupt (trailer or checksum did not agree; used as a miss).",
            ["result"],
            registry=registry,
        )
        start_at_zero(self.gets, "hit", "miss", "failed", "corrupt")


class StoreMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self.capacity_bytes = gauge("kvstore_capacity_bytes", "Bytes that reservations and cached blocks may use.")
        self.used_bytes = gauge("kvstore_used_bytes", "Bytes reserved, cached, or not yet removed.")
        self.sealed_blocks = gauge("kvstore_sealed_blocks", "Blocks that a prompt can hit.")
        self.pinned_blocks = gauge("kvstore_pinned_blocks", "Blocks that a reservation refers to.")
        self.reservations = gauge("kvstore_reservations", "Prompts that hold room or pins.")
        self.removals = gauge("kvstore_objects_to_remove", "Objects that are to go and may still be there.")
        self.reserves = Counter(
            "kvstore_reserves", "Calls of Reserve, by result: reserved, wait, too_large.", ["result"], registry=registry
        )
        start_at_zero(self.reserves, "reserved", "wait", "too_large")
        self.hit_blocks = Counter("kvstore_hit_blocks", "Sealed leading blocks at the first grant.", registry=registry)
        self.asked_blocks = Counter(
            "kvstore_asked_blocks", "Full blocks asked for at the first grant.", registry=registry
        )
        self.evicted_blocks = Counter(
            "kvstore_evicted_blocks", "Sealed blocks dropped to make room.", registry=registry
        )
        self.expired = Counter(
            "kvstore_expired_reservations", "Reservations that ended with their lease.", registry=registry
        )
        self.misplaced = Counter(
            "kvstore_misplaced_objects", "Sealed objects that lie in another host's segment.", registry=registry
        )
        self.replicated_blocks = Counter(
            "kvstore_replicated_blocks", "Blocks copied from another host.", registry=registry
        )
        self.unreachable_peers = gauge("kvstore_unreachable_peers", "Other hosts' data ports that do not answer us.")


class SsdMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self.capacity_bytes = gauge("kvstore_ssd_capacity_bytes", "Bytes that segment files may take.")
        self.used_bytes = gauge("kvstore_ssd_used_bytes", "Bytes of segment files.")
        self.blocks = gauge("kvstore_ssd_blocks", "Blocks that can come back from the SSD.")
        self.kept = counter("kvstore_ssd_kept_blocks", "Blocks copied to the SSD.")
        self.not_kept = counter("kvstore_ssd_not_kept_blocks", "Blocks evicted from the pool that were not on the SSD.")
        self.hit_blocks = counter("kvstore_ssd_hit_blocks", "Blocks that came back from the SSD for a prompt.")
        self.damaged = counter("kvstore_ssd_damaged_blocks", "Blocks on the SSD that were found damaged and forgotten.")
        self.promote_seconds = Histogram(
            "kvstore_ssd_promote_seconds", "Time a reservation waited for blocks from the SSD.", registry=registry
        )
