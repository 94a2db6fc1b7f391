"""YAML file + `--set a.b=c` -> frozen dataclasses, with errors that name the key and the way out.

A service's config is a tree of frozen, keyword-only dataclasses. The string under a field is its documentation and shows up in
`--help-config`. Nothing else in Moontide reads the environment.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import difflib
import errno
import inspect
import itertools
import os
import random
import re
import socket
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml

from moontide.errors import ConfigError

T = TypeVar("T")
FREE_PORTS = range(20_000, 32_000)
"""Below those that Linux takes for outgoing connections, so that a port stays free until its process listens, and while it restarts."""
_PORT_TRIES = 1_000
_USER_PASSWORD = re.compile(r"(://[^/\s:@]*:)\S*@")
"""A password that is not percent-encoded may hold anything: all up to the last @ of the word goes."""
_QUERY_PASSWORD = re.compile(r"([?&]password=)[^&\s]*")


def load_config(
    cls: type[T], *, path: Path | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> T:
    """Build `cls` from `base`, a YAML file and `a.b=c` overrides, later ones win.

    Raises: ConfigError for a missing file, invalid YAML, an unknown key, a value of the wrong type, or what `__post_init__` refuses.
    """
    tree: dict[str, Any] = copy.deepcopy(dict(base or {}))
    if path is not None:
        _merge(tree, read_yaml(path))
    for override in overrides:
        _apply_override(cls, tree, override)
    return build(cls, tree)


def build(cls: type[T], tree: Mapping[str, Any], prefix: str = "") -> T:
    """A dataclass from nested mappings; unknown keys and wrong types raise ConfigError."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(unknown_key(prefix + str(key), [prefix + name for name in fields]))
        values[key] = _coerce(hints[key], value, prefix + key)
    required = [
        prefix + name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if required:
        raise ConfigError(f"missing setting {required[0]}; set it in the config file or with --set {required[0]}=...")
    return cls(**values)


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Message for a key that does not exist, with the nearest ones that do."""
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(sorted(known))}"
    return f"unknown setting {key!r}; {hint}"


def to_tree(config: Any) -> dict[str, Any]:
    """Nested plain values of a config, fit for YAML and for `build`."""
    tree: dict[str, Any] = dataclasses.asdict(config)
    return typing.cast(dict[str, Any], _plain(tree))


def shown_tree(config: Any) -> dict[str, Any]:
    """`to_tree` as logs and terminals may show it: without passwords."""
    return typing.cast(dict[str, Any], _map_text(to_tree(config), without_password))


def to_yaml(config: Any) -> str:
    """`shown_tree` as YAML."""
    return yaml.safe_dump(shown_tree(config), sort_keys=False)


def without_password(text: str) -> str:
    """`text` with *** for the password of an address: redis://user:password@host, or ?password=... behind it."""
    return _QUERY_PASSWORD.sub(r"\1***", _USER_PASSWORD.sub(r"\1***@", text))


def describe(cls: type[Any], prefix: str = "") -> str:
    """One line per setting: dotted name, default, documentation."""
    lines = []
    docs = _field_docs(cls)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            lines.append(describe(typing.cast(type[Any], hint), f"{prefix}{f.name}."))
            continue
        default = "required" if f.default is dataclasses.MISSING else f"default {f.default!r}"
        lines.append(f"{prefix}{f.name}  ({default})\n    {docs.get(f.name, '')}")
    return "\n".join(lines)


def service_arguments(description: str) -> argparse.ArgumentParser:
    """The command line that every `python -m <service>` has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, default=None, help="YAML file with the settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override one setting; may be repeated"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resulting settings and exit")
    parser.add_argument("--help-config", action="store_true", help="list every setting and exit")
    return parser


def load_service_config(cls: type[T], argv: Sequence[str] | None, description: str) -> T:
    """Parse a service's command line; `--print-config` and `--help-config` print and exit 0, a wrong setting exits 2."""
    parser = service_arguments(description)
    args = parser.parse_args(argv)
    if args.help_config:
        print(describe(cls))
        raise SystemExit(0)
    try:
        config = load_config(cls, path=args.config, overrides=args.set)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    if args.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment that a child process gets: ours, plus `extra`."""
    return {**os.environ, **extra}


def cache_dir() -> Path:
    """Where prepared models and measurements are kept: $MOONTIDE_CACHE, else ~/.cache/moontide."""
    return Path(os.environ.get("MOONTIDE_CACHE") or Path.home() / ".cache" / "moontide")


def api_key() -> str:
    """The key under which commands ask a conductor: $MOONTIDE_API_KEY, else none."""
    return os.environ.get("MOONTIDE_API_KEY", "")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Where one service listens and what it is called."""

    node_id: str
    """Unique name of this process in the cluster, e.g. prefill-0-stage-1."""
    host: str = "127.0.0.1"
    """Address to bind and to announce. Loopback unless told otherwise."""
    grpc_port: int = 0
    """Port of the gRPC service; 0 takes a free one."""
    http_port: int = 0
    """Port of /metrics, /live and /ready; 0 takes a free one."""
    host_id: str = ""
    """Processes with the same one share a store process. Empty: the host's name; in a pod the name of its machine is right."""

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ConfigError("node.node_id is empty; give every process its own name")
        if self.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"node.host={self.host!r} cannot be announced to other nodes; name the address they reach this host by"
            )
        for name in ("grpc_port", "http_port"):
            check_port(f"node.{name}", getattr(self, name))

    def resolve_host_id(self) -> str:
        return self.host_id or socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """The Redis or Valkey that holds what nodes and conductors share."""

    url: str
    """redis://[user:password@]host:port/db, or rediss:// for TLS."""
    heartbeat_s: float = 1.0
    """Seconds between two announcements of a node."""
    lease_s: float = 5.0
    """A node that was silent for so long counts as lost."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError(
                f"registry.url={without_password(self.url)!r} is no Redis address; write redis://host:port/0"
            )
        self._check_place()
        if self.heartbeat_s <= 0:
            raise ConfigError(f"registry.heartbeat_s={self.heartbeat_s} must be above 0")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"registry.lease_s={self.lease_s} must be at least twice registry.heartbeat_s={self.heartbeat_s}"
            )

    def _check_place(self) -> None:
        """The client would take a database that is no number for 0, and name a part of the password in its error for a port."""
        parts = urlsplit(self.url)
        try:
            is_right = parts.scheme == "unix" or (parts.port != 0 and re.fullmatch(r"(/\d*)?", parts.path) is not None)
        except ValueError:
            is_right = False
        if not is_right:
            raise ConfigError(
                f"registry.url={without_password(self.url)!r} has no port or database that is a number; write "
                "redis://host:port/0, and percent-encode what a password has of / ? # @ and :"
            )


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Section `tls`: certificates of this process, and whom it trusts (docs/decisions/019)."""

    cert_file: str = ""
    """PEM certificate, with those between it and the authority. With it the gRPC server and the conductor's HTTP APIs use TLS."""
    key_file: str = ""
    """PEM key of that certificate, not encrypted."""
    ca_file: str = ""
    """PEM authorities. With it every channel to another service uses TLS, verifies the peer, and shows the certificate if there is one."""
    require_client_cert: bool = False
    """Whether the gRPC server refuses clients without a certificate of the authorities."""
    server_name: str = "moontide"
    """DNS name that the certificate of a peer must hold; empty: the host in its address."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            given, missing = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise ConfigError(
                f"tls.{given}={getattr(self, given)!r} is set without tls.{missing}; set both files of one certificate, or neither"
            )
        if self.require_client_cert and not (self.ca_file and self.cert_file):
            missing = "tls.cert_file and tls.key_file" if self.ca_file else "tls.ca_file"
            raise ConfigError(f"tls.require_client_cert needs {missing}; set it too, or require_client_cert to false")


def check_port(name: str, port: int) -> None:
    """Raises: ConfigError when `port` is no TCP port (0 means: take a free one)."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{name}={port} is no TCP port; use 1..65535, or 0 for a free one")


def free_port(host: str = "127.0.0.1", *, besides: Collection[int] = ()) -> int:
    """A TCP port of FREE_PORTS that was free a moment ago and is none of `besides`, for programs that cannot bind port 0 themselves.

    Raises: ConfigError when none is found; OSError when `host` is no address of this host.
    """
    for _ in range(_PORT_TRIES):
        port = random.SystemRandom().choice(FREE_PORTS)  # tests seed the other random numbers
        with socket.socket() as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
        if port not in besides:
            return port
    raise ConfigError(
        f"found no free TCP port between {FREE_PORTS[0]} and {FREE_PORTS[-1]} on {host}; stop something that listens there"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a config file. Raises: ConfigError when it cannot be read or holds anything else."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is no valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold a mapping of settings, not {type(tree).__name__}")
    return tree


def _merge(tree: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Lay `upper` over `tree`, section by section."""
    for key, value in upper.items():
        below = tree.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            _merge(below, value)
        else:
            tree[key] = value


def _apply_override(cls: type[Any], tree: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set {override!r} is not of the form a.b=c")
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is no valid YAML scalar") from error
    node, kind = tree, cls
    parts = dotted.split(".")
    for depth, part in enumerate(parts):
        fields = {f.name for f in dataclasses.fields(kind)}
        here = ".".join(parts[: depth + 1])
        if part not in fields:
            parent = ".".join(parts[:depth])
            raise ConfigError(unknown_key(here, [f"{parent}.{name}" if parent else name for name in fields]))
        hint = typing.get_type_hints(kind)[part]
        is_last = depth == len(parts) - 1
        if _is_free(hint) and depth == len(parts) - 2:
            _merge(node, {part: {parts[-1]: value}})
            return
        if dataclasses.is_dataclass(hint) == is_last:
            raise ConfigError(
                f"--set {dotted}: {here} is a {'section; name a setting in it' if is_last else 'setting, not a section'}"
            )
        if is_last:
            node[part] = value
            return
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"setting {here} must be a section (a mapping) in the config file")
        kind = typing.cast(type[Any], hint)


def _is_free(hint: Any) -> bool:
    """Whether a section takes any keys: somebody else reads it."""
    return any(typing.get_origin(option) is dict for option in (hint, *typing.get_args(hint)))


def _coerce(hint: Any, value: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _coerce(next(o for o in options if o is not type(None)), value, name)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type[Any], hint)):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a section (a mapping), not {value!r}")
        return build(typing.cast(type[Any], hint), value, f"{name}.")
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a section (a mapping), not {value!r}")
        return dict(value)
    if typing.get_origin(hint) in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name}={value!r} must be a list")
        item = typing.get_args(hint)[0]
        return typing.get_origin(hint)(_coerce(item, v, f"{name}[]") for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and value is False:
        return "off"  # YAML takes the word for a truth value
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name}={value!r} must be of type {hint.__name__}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """A tree of plain values with every text changed."""
    if isinstance(value, dict):
        return {k: _map_text(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_text(v, change) for v in value]
    return change(value) if isinstance(value, str) else value


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The string under each field, read from the source."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = typing.cast(ast.ClassDef, ast.parse(inspect.cleandoc(inspect.getsource(base))).body[0]).body
        for node, follower in itertools.pairwise(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
            ):
                docs[node.target.id] = " ".join(str(follower.value.value).split())
    return docs
