from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moontide.config import (
    NodeConfig,
    RegistryConfig,
    api_key,
    describe,
    load_config,
    load_service_config,
    shown_tree,
    to_yaml,
)
from moontide.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    size_tokens: int = 64
    """Tokens in one thing."""
    ratio: float = 0.5
    """Share of something."""
    name: str | None = None
    """A name, or none."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    inner: InnerConfig = field(default_factory=InnerConfig)
    """A section."""
    enabled: bool = True
    """Whether."""
    peers: tuple[str, ...] = ()
    """Addresses."""
    other: dict[str, Any] | None = None
    """Section of another program."""


def test_file_and_overrides_are_merged_and_the_override_wins(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("inner: {size_tokens: 128, ratio: 1}\npeers: [a:1, b:2]\n")
    config = load_config(OuterConfig, path=path, overrides=["inner.size_tokens=256", "enabled=false", "inner.name=x"])
    assert config == OuterConfig(
        inner=InnerConfig(size_tokens=256, ratio=1.0, name="x"), enabled=False, peers=("a:1", "b:2")
    )


def test_override_reaches_a_section_that_somebody_else_reads(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("other: {kept: 1, changed: 2}\n")
    assert load_config(OuterConfig, path=path, overrides=["other.changed=3"]).other == {"kept": 1, "changed": 3}
    assert load_config(OuterConfig, overrides=["other.new=a:1"]).other == {"new": "a:1"}


def test_printed_config_reads_back_as_the_same_config(tmp_path: Path) -> None:
    config = OuterConfig(inner=InnerConfig(size_tokens=7), peers=("a:1",))
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(OuterConfig, path=tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.size_token=1", "did you mean inner.size_tokens"),
        ("outer.size_tokens=1", "unknown setting 'outer'"),
        ("inner=1", "inner is a section; name a setting in it"),
        ("enabled.x=1", "enabled is a setting, not a section"),
        ("inner.size_tokens=many", "must be of type int"),
        ("inner.size_tokens=true", "must be of type int"),
        ("inner.size_tokens", "not of the form a.b=c"),
        ("peers=a", "must be a list"),
    ],
)
def test_wrong_override_names_the_key_and_the_way_out(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_config(OuterConfig, overrides=[override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner: [", "no valid YAML"),
        ("- 1", "must hold a mapping"),
        ("inner: 3", "must be a section"),
        ("innr: {}", "inner"),
    ],
)
def test_wrong_file_is_a_clear_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(OuterConfig, path=tmp_path / "c.yaml")


def test_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config file .*absent\.yaml"):
        load_config(OuterConfig, path=tmp_path / "absent.yaml")


def test_help_lists_every_setting_with_its_documentation() -> None:
    text = describe(OuterConfig)
    assert "inner.size_tokens  (default 64)\n    Tokens in one thing." in text
    assert "peers" in text


def test_service_command_line_refuses_an_unknown_key_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load_service_config(OuterConfig, ["--set", "inner.size=1"], "test")
    assert exit_info.value.code == 2
    assert "unknown setting 'inner.size'" in capsys.readouterr().err


def test_node_and_registry_refuse_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="cannot be announced"):
        NodeConfig(node_id="n", host="0.0.0.0")
    with pytest.raises(ConfigError, match="no TCP port"):
        NodeConfig(node_id="n", grpc_port=70_000)
    with pytest.raises(ConfigError, match="redis://"):
        RegistryConfig(url="localhost:6379")
    with pytest.raises(ConfigError, match="twice"):
        RegistryConfig(url="redis://h:1/0", heartbeat_s=2.0, lease_s=3.0)
    with pytest.raises(ConfigError, match=r"heartbeat_s=0\.0 must be above 0"):
        RegistryConfig(url="redis://h:1/0", heartbeat_s=0.0, lease_s=0.0)


def test_commands_take_their_api_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONTIDE_API_KEY", raising=False)
    assert api_key() == ""
    monkeypatch.setenv("MOONTIDE_API_KEY", "sk-1")
    assert api_key() == "sk-1"


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    registry: RegistryConfig
    peers: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://user:secret@redis.llm.svc:6379/0", "rediss://user:***@redis.llm.svc:6379/0"),
        ("redis://:secret@redis:6379", "redis://:***@redis:6379"),
        ("redis://:c:ret@secret@redis:6379", "redis://:***@redis:6379"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
    ],
)
def test_a_password_is_in_no_config_that_is_shown(url: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = ServiceConfig(registry=RegistryConfig(url=url), peers=(url,))
    tree = shown_tree(config)
    assert (tree["registry"]["url"], tree["peers"]) == (shown, [shown])
    with pytest.raises(SystemExit):
        load_service_config(ServiceConfig, ["--set", f"registry.url={url}", "--print-config"], "a service")
    printed = capsys.readouterr().out
    assert shown in printed
    assert "secret" not in printed
    assert config.registry.url == url


@pytest.mark.parametrize("url", ["redis://h:port/0", "redis://h:70000/0", "redis://h:1/two", "redis://:secr/et@h:1/0"])
def test_a_registry_address_without_a_number_for_port_and_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encode") as refused:
        RegistryConfig(url=url)
    assert "secr" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_password_is_not_in_the_error_about_its_address() -> None:
    with pytest.raises(ConfigError, match=r"http://:\*\*\*@redis") as refused:
        RegistryConfig(url="http://:secret@redis")
    assert "secret" not in str(refused.value)
