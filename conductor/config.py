"""Settings of a conductor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moontide.config import NodeConfig, RegistryConfig
from moontide.errors import ConfigError


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
    """Times one request is started before a failure of nodes is reported to the client."""
    default_timeout_s: float = 600.0
    """Time one request may take when the client names none; also the most it may ask for."""
    lease_s: float = 10.0
    """Length of the lease by which a request's KV stays reserved in the store; it is renewed every third of it."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Largest HTTP request body."""
    max_active_requests: int = 1024
    """Requests in work at once; more are refused with status 429."""
    drain_s: float = 30.0
    """At shutdown, time that running requests get to finish."""

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ConfigError("conductor.served_model_name is empty; give the name that clients ask for")
        for name in ("max_attempts", "max_body_bytes", "max_active_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"conductor.{name}={getattr(self, name)} must be at least 1")
        for name in ("default_timeout_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"conductor.{name}={getattr(self, name)} must be above 0 seconds")
        if self.drain_s < 0:
            raise ConfigError(f"conductor.drain_s={self.drain_s} must be 0 (cut off at once) or more seconds")


@dataclass(frozen=True, kw_only=True)
class ConductorConfig:
    """Everything `python -m conductor` needs."""

    node: NodeConfig
    registry: RegistryConfig
    conductor: ConductorSettings
