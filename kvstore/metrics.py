"""Counters of the KV store: of its clients in other services, and of the store process itself."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ClientMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.puts = Counter(
            "kvstore_client_puts",
            "Objects put, by result: stored_or_open, no_space, failed.",
            ["result"],
            registry=registry,
        )
        self.gets = Counter(
            "kvstore_client_gets",
            "Objects fetched, by result: hit, miss, failed, corrupt (trailer or checksum did not agree; used as a miss).",
            ["result"],
            registry=registry,
        )


class StoreMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        self.capacity_bytes = gauge("kvstore_capacity_bytes", "Bytes that reservations and cached blocks may use.")
        self.used_bytes = gauge("kvstore_used_bytes", "Bytes reserved, cached, or not yet removed.")
        self.sealed_blocks = gauge("kvstore_sealed_blocks", "Blocks that a prompt can hit.")
        self.pinned_blocks = gauge("kvstore_pinned_blocks", "Blocks that a reservation refers to.")
        self.reservations = gauge("kvstore_reservations", "Prompts that hold room or pins.")
        self.removals = gauge("kvstore_objects_to_remove", "Objects that are to go and may still be there.")
        self.reserves = Counter(
            "kvstore_reserves", "Calls of Reserve, by result: reserved, wait, too_large.", ["result"], registry=registry
        )
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
