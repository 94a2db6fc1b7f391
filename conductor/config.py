"""Settings of a conductor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moontide.config import NodeConfig, RegistryConfig, TlsConfig
from moontide.errors import ConfigError

ROLES = ("off", "propose", "auto")
ADMISSION_MODES = ("off", "per-stage", "early", "predictive")


@dataclass(frozen=True, kw_only=True)
class ConductorSettings:
    """Section `conductor`."""

    model_dir: Path
    """Prepared Hugging Face directory of the served model (config.json, tokenizer.json, chat template); weights are not read."""
    served_model_name: str
    """Name that clients ask for."""
    model_id: str = ""
    """Use only nodes that announce this model; empty: the registry must hold nodes of one model only."""
    max_attempts: int = 4
    """Times in a row that one request is started without a new token or more sealed blocks before the client is told of the failure."""
    nodes_wait_s: float = 60.0
    """Time that new requests wait for nodes when the last one of a role has gone, as while the only group starts again; 0: not at all."""
    default_timeout_s: float = 600.0
    """Time one request may take when the client names none; also the most it may ask for."""
    lease_s: float = 10.0
    """Length of the lease by which a request's KV stays reserved in the store; it is renewed every third of it."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest HTTP request body."""
    max_active_requests: int = 1024
    """Requests in work at once; more are refused with status 429."""
    policy: str = "moontide"
    """random | round-robin | least-loaded | cache-aware | kvcache-centric | moontide: how nodes are chosen (docs/decisions/012)."""
    balancing_threshold: float = 2.0
    """For kvcache-centric: a group recomputes, instead of having it copied, what another one's prefix hit has beyond its own, unless that
    hit is longer than its own by this factor."""
    local_prefill: bool = True
    """Whether decode instances may compute short prompts themselves, beside their batch, when that is faster."""
    admission: str = "predictive"
    """off | per-stage | early | predictive: which requests are refused because their SLO would not be met (docs/decisions/013)."""
    ttft_slo_s: float | None = None
    """Bound on the time to first token, for requests and tenants that name none; empty: no bound."""
    tbt_slo_s: float | None = None
    """Bound on the mean time between the tokens of an answer, likewise."""
    tenants_file: Path | None = None
    """YAML that names the tenants by the hashes of their API keys (docs/operations.md); empty: one tenant, no key needed."""
    release_queue_s: float = 3.0
    """Predicted work that each prefill group gets ahead; more waits here, in a fair order. Below two heartbeats a group may idle."""
    kv_event_sources: tuple[str, ...] = ()
    """Publishers of KV events of other engines (vLLM, SGLang, Mooncake Store), each INSTANCE=tcp://host:port; what they hold is told by the
    indexer API."""
    kv_event_endpoint: str = ""
    """ZMQ address, such as tcp://127.0.0.1:5557, at which the KV events of our stores are told in the public format; empty: nowhere."""
    kv_event_token_ids: bool = False
    """Whether those events tell token ids, which are the prompts in clear, where this conductor knows them."""
    indexer_port: int | None = None
    """Port of the indexer API (POST /query), which tells whoever reaches it what is cached; 0: a free one, empty: not served."""
    roles: str = "propose"
    """off | propose: a log line and a metric say when a node would serve better in the other role | auto: it is also switched; with several
    conductors by the first of them."""
    drain_s: float = 30.0
    """At shutdown, time that running requests get to finish."""

    answers_kept_s: float = 600.0
    """Time for which the answer to a request with an idempotency key is kept after its end, for the same request to read it again."""
    answers_kept_bytes: int = 128 * 1024 * 1024
    """Memory for such answers; the oldest leave first, and are made again with the same seed when they are asked for."""
    unread_answer_s: float = 15.0
    """Time for which such an answer goes on when its client is gone."""

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ConfigError("conductor.served_model_name is empty; give the name that clients ask for")
        for name in ("max_attempts", "max_body_bytes", "max_active_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"conductor.{name}={getattr(self, name)} must be at least 1")
        for name in ("default_timeout_s", "lease_s", "release_queue_s", "ttft_slo_s", "tbt_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"conductor.{name}={value} must be above 0 seconds")
        if self.admission not in ADMISSION_MODES:
            raise ConfigError(f"conductor.admission={self.admission!r} must be one of {', '.join(ADMISSION_MODES)}")
        if self.roles not in ROLES:
            raise ConfigError(f"conductor.roles={self.roles!r} must be one of {', '.join(ROLES)}")
        if self.drain_s < 0:
            raise ConfigError(f"conductor.drain_s={self.drain_s} must be 0 (cut off at once) or more seconds")
        for name in ("answers_kept_s", "answers_kept_bytes", "unread_answer_s", "nodes_wait_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"conductor.{name}={getattr(self, name)} must be 0 (off) or more")


@dataclass(frozen=True, kw_only=True)
class ConductorConfig:
    """Everything `python -m conductor` needs."""

    node: NodeConfig
    registry: RegistryConfig
    tls: TlsConfig = field(default_factory=TlsConfig)
    conductor: ConductorSettings
