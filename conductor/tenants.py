"""Who may ask for what: tenants, found by the hash of their API key. Keys themselves are neither kept nor logged.

`conductor.tenants_file` names them; a document of the same form under `moontide:tenants` in Redis takes its place while it is there,
for all conductors at once. Without a file everybody is one tenant that needs no key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from redis.exceptions import RedisError

from conductor.config import ConductorSettings
from conductor.metrics import ConductorMetrics
from moontide.config import RegistryConfig, build, read_yaml
from moontide.errors import ConfigError, Rejected, RejectReason, Unauthorized
from moontide.fair_share import Share
from moontide.log import get_logger
from moontide.registry import connect, raise_if_cancelled

TENANTS_KEY = "moontide:tenants"
MAX_PRIORITY = 100
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEME = "bearer "
_ACTIVE_RETRY_S = 1.0
"""What a tenant with too many requests in work is told to wait; when one ends cannot be said."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    name: str
    """1 to 64 characters of [A-Za-z0-9_.-]; shows up in logs and metrics."""
    api_key_sha256: tuple[str, ...] = ()
    """SHA-256 of each API key, hexadecimal."""
    weight: float = 1.0
    """Share of the prefill time against other tenants of its class, when there is not enough for all."""
    priority: int = 0
    """Class of its requests, which may ask for a lower one; a higher class is served first."""
    ttft_slo_s: float | None = None
    """Bound on the time to first token of requests that name none; empty: the one of `conductor`."""
    tbt_slo_s: float | None = None
    """Bound on the mean time between tokens, likewise."""
    max_active_requests: int | None = None
    """Requests in work at one conductor at once; more are refused with status 429."""
    max_queued_s: float | None = None
    """Predicted seconds of prefill that may wait for their turn at one conductor; more are refused with status 429."""
    shares_cache_with: str = ""
    """Name of a tenant whose prefix cache it uses; empty: its own, which no other tenant's requests hit."""

    def __post_init__(self) -> None:
        where = f"tenant {self.name!r}"
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{where}: a name must be 1 to 64 characters of [A-Za-z0-9_.-]")
        for digest in self.api_key_sha256:
            if not _SHA256.fullmatch(digest):
                raise ConfigError(
                    f"{where}: api_key_sha256 {digest[:8]!r}... must be the 64 lower-case hexadecimal digits that "
                    "`printf %s KEY | sha256sum` prints"
                )
        if not self.weight > 0:
            raise ConfigError(f"{where}: weight={self.weight} must be above 0")
        if abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(f"{where}: priority={self.priority} must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        for field in ("ttft_slo_s", "tbt_slo_s", "max_active_requests", "max_queued_s"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(f"{where}: {field}={value} must be above 0; leave it out for no bound")

    @property
    def cache_salt(self) -> str:
        """Requests hit what was computed under the same salt. "" is for a tenant without keys; salts made of request ids have no colon."""
        return f"tenant:{self.shares_cache_with or self.name}" if self.api_key_sha256 else ""

    def share(self, priority: int) -> Share:
        return Share(tenant=self.name, priority=priority, weight=self.weight)


OPEN_TENANT = Tenant(name="default")
"""Everybody, where no tenants are named."""


@dataclass(frozen=True, kw_only=True)
class TenantList:
    """The document that names all tenants."""

    tenants: tuple[Tenant, ...]

    def __post_init__(self) -> None:
        names = Counter(tenant.name for tenant in self.tenants)
        keys = Counter(digest for tenant in self.tenants for digest in set(tenant.api_key_sha256))
        if not self.tenants:
            raise ConfigError("the list of tenants is empty; name one, or do without conductor.tenants_file")
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ConfigError(f"tenant {twice!r} is listed twice; give each its own name")
        if shared := next((digest for digest, count in keys.items() if count > 1), None):
            raise ConfigError(f"api_key_sha256 {shared[:8]}... belongs to two tenants; give each its own key")
        for tenant in self.tenants:
            if tenant.shares_cache_with and tenant.shares_cache_with not in names:
                raise ConfigError(
                    f"tenant {tenant.name!r} shares its cache with {tenant.shares_cache_with!r}, who is not listed"
                )


class TenantDirectory:
    """The tenants of this moment."""

    def __init__(self, settings: ConductorSettings, registry: RegistryConfig, metrics: ConductorMetrics) -> None:
        """Raises: ConfigError when the file cannot be read or is wrong."""
        self._settings = settings
        self._metrics = metrics
        self._period_s = registry.heartbeat_s
        self._by_key: dict[str, Tenant] = {}
        self._open = self._with_defaults(OPEN_TENANT)
        self._task: asyncio.Task[None] | None = None
        self._override: str | None = None
        if settings.tenants_file is not None:
            self._use(_from_file(settings.tenants_file))
            self._redis = connect(registry)
        else:
            metrics.expect_tenants([self._open.name])

    async def start(self) -> None:
        """Look into Redis once (one that is down is only logged), then follow what is there."""
        if self._settings.tenants_file is not None:
            await self._read()
            self._task = asyncio.create_task(self._run(), name="tenants")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._settings.tenants_file is not None:
            await self._redis.aclose()

    def of(self, authorization: str) -> Tenant:
        """Whose request it is, by the value of its `Authorization` header, "" without one. Raises: Unauthorized."""
        if self._settings.tenants_file is None:
            return self._open
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthorized("the request has no API key; send it as `Authorization: Bearer KEY`")
        digest = hashlib.sha256(authorization[len(_SCHEME) :].strip().encode(errors="surrogateescape")).hexdigest()
        tenant = self._by_key.get(digest)
        if tenant is None:
            raise Unauthorized("no tenant has this API key; check the key, or have its hash added to the tenants")
        return tenant

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._read()
            raise_if_cancelled()

    async def _read(self) -> None:
        """What is wrong or cannot be read changes nothing."""
        try:
            found = await self._redis.get(TENANTS_KEY)
        except (RedisError, OSError):
            return
        text = None if found is None else str(found)
        if text == self._override:
            return
        self._override = text
        file = self._settings.tenants_file
        assert file is not None, "only tenants of a file have an override"
        try:
            self._use(_from_file(file) if text is None else _from_text(text))
        except ConfigError as error:
            log.error("tenants not changed", reason=str(error))

    def _use(self, tenants: TenantList) -> None:
        self._by_key = {
            digest: self._with_defaults(tenant) for tenant in tenants.tenants for digest in tenant.api_key_sha256
        }
        self._metrics.expect_tenants({tenant.name for tenant in self._by_key.values()})
        log.info("tenants", names=",".join(tenant.name for tenant in tenants.tenants))

    def _with_defaults(self, tenant: Tenant) -> Tenant:
        return dataclasses.replace(
            tenant,
            ttft_slo_s=self._settings.ttft_slo_s if tenant.ttft_slo_s is None else tenant.ttft_slo_s,
            tbt_slo_s=self._settings.tbt_slo_s if tenant.tbt_slo_s is None else tenant.tbt_slo_s,
        )


class TenantLimits:
    """Counts the requests of each tenant that are in work here."""

    def __init__(self) -> None:
        self._active: Counter[str] = Counter()

    @contextmanager
    def active(self, tenant: Tenant) -> Iterator[None]:
        """The time of one request. Raises: Rejected beyond the tenant's limit."""
        limit = tenant.max_active_requests
        if limit is not None and self._active[tenant.name] >= limit:
            raise Rejected(
                f"{limit} requests of tenant {tenant.name} are in work, which is its max_active_requests; try again later",
                reason=RejectReason.TENANT_LIMIT,
                retry_after_s=_ACTIVE_RETRY_S,
            )
        self._active[tenant.name] += 1
        try:
            yield
        finally:
            self._active[tenant.name] -= 1
            if not self._active[tenant.name]:
                del self._active[tenant.name]


def _from_file(path: Path) -> TenantList:
    return _from_tree(read_yaml(path), f"conductor.tenants_file {path}")


def _from_text(text: str) -> TenantList:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{TENANTS_KEY} in Redis is no valid YAML: {error}") from error
    return _from_tree(tree, f"{TENANTS_KEY} in Redis")


def _from_tree(tree: Any, source: str) -> TenantList:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{source} must hold a mapping with the key `tenants`, not {type(tree).__name__}")
    try:
        return build(TenantList, tree)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
