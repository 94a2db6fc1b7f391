"""Reads compose files as far as ours use them, and checks that services and their settings fit together (pure but for reading files)."""

from __future__ import annotations

import ipaddress
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from conductor.config import ConductorConfig
from decode_node.config import DecodeNodeConfig
from deploy.docker.dockerfile import substitute
from kvstore.config import KvStoreConfig
from moontide.config import load_config, to_tree
from prefill_node.config import PrefillNodeConfig

CONFIGS: dict[str, type[Any]] = {
    "kvstore": KvStoreConfig,
    "prefill_node": PrefillNodeConfig,
    "decode_node": DecodeNodeConfig,
    "conductor": ConductorConfig,
}
"""Program behind `python -m` -> its settings."""
Tree = Mapping[str, Any]


def load(*files: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The files as `docker compose` reads them: variables put in, a later file merged over the ones before."""
    merged: dict[str, Any] = {}
    for file in files:
        tree = _interpolated(yaml.safe_load(file.read_text()), env or {})
        tree = {key: value for key, value in tree.items() if not key.startswith("x-")}
        merged = _merged(merged, tree)
    return merged


def _interpolated(tree: Any, env: Mapping[str, str]) -> Any:
    if isinstance(tree, dict):
        return {key: _interpolated(value, env) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_interpolated(value, env) for value in tree]
    if isinstance(tree, str):
        return substitute(tree.replace("$$", "\0"), env).replace("\0", "$")
    return tree


def _merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merged(below[key], value) if key in below else value for key, value in above.items()}}
    return above


@dataclass(frozen=True)
class Program:
    """`python -m NAME --config FILE --set A=B ...` of a service."""

    name: str
    config: str
    overrides: tuple[str, ...]


def program(command: Sequence[str]) -> Program | None:
    """None for a command that runs none of ours."""
    words = shlex.split(command[2]) if command[:2] == ["sh", "-c"] else list(command)
    if "-m" not in words or words[words.index("-m") + 1] not in CONFIGS:
        return None
    options = list(itertools.pairwise(words))
    config = next(value for option, value in options if option == "--config")
    return Program(words[words.index("-m") + 1], config, tuple(value for option, value in options if option == "--set"))


def settings(services: Tree, directory: Path) -> dict[str, dict[str, Any]]:
    """Service -> all settings of its program. `directory`: where the compose file is.

    Raises: ConfigError, FileNotFoundError.
    """
    found = {}
    for name, service in services.items():
        runs = program(service["command"])
        if runs is not None:
            file = host_path(service, runs.config, directory)
            overrides = [substitute(text, service.get("environment", {})) for text in runs.overrides]
            config = load_config(CONFIGS[runs.name], path=file, overrides=overrides)
            found[name] = to_tree(config)
    return found


def mounts(service: Tree) -> list[tuple[str, str, bool]]:
    """(source, path in the container, whether it is read-only) of `volumes`."""
    split = [str(text).split(":") for text in service.get("volumes", ())]
    return [(parts[0], parts[1], "ro" in parts[2:]) for parts in split]


def host_path(service: Tree, path: str, directory: Path) -> Path:
    """The file that a container sees at `path`. Raises: FileNotFoundError."""
    for source, target, _read_only in mounts(service):
        if path.startswith(target + "/") and source.startswith("."):
            return (directory / source / path.removeprefix(target + "/")).resolve()
    raise FileNotFoundError(path)


def option(service: Tree, name: str) -> str:
    """Value of `--name=value` or `--name value` in its command."""
    words = [str(word) for word in service["command"]]
    for position, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name:
            return words[position + 1]
    raise KeyError(name)


def seconds(text: str) -> float:
    """A duration such as 45s or 1m30s."""
    unit = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * unit[name] for number, name in re.findall(r"([\d.]+)(ms|s|m|h)", text))


def confinement_problems(service: Tree) -> list[str]:
    """Why a container has more rights than it needs."""
    wanted = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    found = [key for key, value in wanted.items() if service.get(key) != value]
    found += [key for key in ("privileged", "cap_add", "devices", "pid", "ipc") if service.get(key)]
    user = str(service.get("user", "10001"))
    if user.partition(":")[0] in ("root", "0") or not user[0].isdigit():
        found.append(f"user {user}")
    for source, _target, read_only in mounts(service):
        if not read_only and source.startswith((".", "/", "~")):
            found.append(f"{source} can be written")
    return found


# --- services and settings -----------------------------------------------------------------------------------------------------------


def listeners(services: Tree, trees: Mapping[str, Tree]) -> list[tuple[str, str]]:
    """(address, service) of every fixed port that something listens on in the shared network namespace."""
    found = []
    for name, tree in trees.items():
        node = tree["node"]
        found += [(f"{node['host']}:{node[port]}", name) for port in ("grpc_port", "http_port")]
        if "kvstore" in tree:
            found.append((f"{node['host']}:{tree['kvstore']['client_port']}", name))
        if (tree.get("prefill") or {}).get("stage_idx") == 0:
            found.append((tree["prefill"]["control_address"], name))
    valkey, master = services["valkey"], services["mooncake-master"]
    found.append((f"{option(valkey, '--bind')}:{option(valkey, '--port')}", "valkey"))
    for host, port in (("--rpc_address", "--rpc_port"), ("--metrics_host", "--metrics_port")):
        found.append((f"{option(master, host)}:{option(master, port)}", "mooncake-master"))
    return found


def wanted_addresses(tree: Tree) -> Iterator[tuple[str, str]]:
    """(setting, address) of every peer that a service is told."""
    yield "registry.url", urlsplit(tree["registry"]["url"]).netloc
    for section, keys in (
        ("store", ("master_rpc", "master_http", "client_address", "service_address")),
        ("kvstore", ("master_rpc", "master_http")),
    ):
        yield from ((f"{section}.{key}", tree[section][key]) for key in keys if section in tree)


def wiring_problems(services: Tree, networks: Tree, trees: Mapping[str, Tree]) -> list[str]:
    """Where ports, addresses, health checks, order of start and settings do not agree. `trees`: settings by service."""
    found = []
    listening: dict[str, str] = {}
    for address, name in listeners(services, trees):
        if address.endswith(":0"):
            found.append(f"{name}: a port that nobody knows")
        if address in listening:
            found.append(f"{address}: both {listening[address]} and {name}")
        listening[address] = name
    for name, tree in trees.items():
        for setting, address in wanted_addresses(tree):
            peer = listening.get(address)
            if peer is None:
                found.append(f"{name}: nobody listens on {setting} {address}")
            elif not _waits_for(services, name, peer):
                found.append(f"{name}: starts before {peer} is healthy ({setting})")
        if "conductor" in tree:
            nodes = [other for other in trees if trees[other].get("prefill") or trees[other].get("decode")]
            found += [f"{name}: ends after {node}" for node in nodes if not _waits_for(services, name, node)]
        found += _health_problems(name, services[name], tree)
        found += _drain_problems(name, services[name], tree)
    found += _group_problems(trees)
    found += _published_problems(services, networks, trees)
    for section in ("kv", "model", "store"):
        if len({str(tree[section]) for tree in trees.values() if section in tree}) > 1:
            found.append(f"section {section} differs between services")
    models = {tree["model"]["name"] for tree in trees.values() if "model" in tree}
    models |= {tree["conductor"]["served_model_name"] for tree in trees.values() if "conductor" in tree}
    if len(models) > 1:
        found.append(f"several models: {sorted(models)}")
    if len({tree["node"]["host_id"] for tree in trees.values() if "conductor" not in tree}) > 1:
        found.append("node.host_id differs on one host")
    if len({tree["node"]["node_id"] for tree in trees.values()}) < len(trees):
        found.append("node.node_id is given twice")
    return found


def _waits_for(services: Tree, name: str, peer: str) -> bool:
    needs = services[name].get("depends_on", {})
    conditions = {n: needs[n].get("condition") for n in needs} if isinstance(needs, dict) else dict.fromkeys(needs)
    if name == peer or conditions.get(peer) == "service_healthy":
        return name == peer or not services[peer].get("healthcheck", {}).get("disable")
    return any(_waits_for(services, other, peer) for other, how in conditions.items() if how == "service_healthy")


def _health_problems(name: str, service: Tree, tree: Tree) -> list[str]:
    node = tree["node"]
    wanted = f"http://{node['host']}:{node['http_port']}/ready"
    has = service.get("environment", {}).get("HEALTH_URL")
    return [] if has == wanted else [f"{name}: HEALTH_URL is {has} instead of {wanted}"]


def _drain_problems(name: str, service: Tree, tree: Tree) -> list[str]:
    drains = {"decode": "drain_timeout_s", "conductor": "drain_s"}
    longest = max((tree[section][key] for section, key in drains.items() if tree.get(section)), default=0.0)
    grace_s = seconds(service["stop_grace_period"])
    return [] if grace_s > longest else [f"{name}: is killed after {grace_s:g} s, but drains for {longest:g} s"]


def _group_problems(trees: Mapping[str, Tree]) -> list[str]:
    found = []
    groups: dict[str, list[Tree]] = {}
    for tree in trees.values():
        if tree.get("prefill"):
            groups.setdefault(tree["prefill"]["group_id"], []).append(tree["prefill"])
    for group, stages in groups.items():
        if sorted(stage["stage_idx"] for stage in stages) != list(range(stages[0]["num_stages"])):
            found.append(f"{group}: stages are not 0 to num_stages - 1")
        if len({(stage["control_address"], stage["num_stages"]) for stage in stages}) > 1:
            found.append(f"{group}: control_address or num_stages differ")
    return found


def _published_problems(services: Tree, networks: Tree, trees: Mapping[str, Tree]) -> list[str]:
    host = services["host"]
    found = []
    address = host["networks"]["default"]["ipv4_address"]
    subnet = networks["default"]["ipam"]["config"][0]["subnet"]
    if ipaddress.ip_address(address) not in ipaddress.ip_network(subnet):
        found.append(f"{address} is not in {subnet}")
    front = {
        f"{t['node']['host']}:{t['node'][p]}"
        for t in trees.values()
        if "conductor" in t
        for p in ("http_port", "grpc_port")
    }
    published = {f"{address}:{text.rpartition(':')[2]}" for text in host["ports"]}
    if published != front:
        found.append(f"published are {sorted(published)}, the conductor listens on {sorted(front)}")
    found += [f"port {text} is open to other machines" for text in host["ports"] if not text.startswith("127.0.0.1:")]
    found += [
        f"{name}: has a network of its own"
        for name, service in services.items()
        if name != "host" and service.get("network_mode") != "service:host"
    ]
    return found


def gpu_problems(services: Tree, overlay: Tree, trees: Mapping[str, Tree]) -> list[str]:
    """Of compose.cuda.yaml: every service that computes, and no other, has a device of its own. `trees`: settings with DEVICE=cuda."""
    computing = {name for name, tree in trees.items() if "model" in tree}
    found = [f"{name}: not in compose.yaml" for name in overlay if name not in services]
    found += [f"{name}: needs a GPU" for name in sorted(computing - overlay.keys())]
    found += [f"{name}: needs no GPU" for name in sorted(overlay.keys() - computing)]
    found += [
        f"{name}: computes on {trees[name]['model']['device']}"
        for name in sorted(computing)
        if trees[name]["model"]["device"] != "cuda"
    ]
    ids = []
    for name, service in overlay.items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        if device["driver"] != "nvidia" or "gpu" not in device["capabilities"]:
            found.append(f"{name}: asks for no NVIDIA GPU")
        ids += device["device_ids"]
    if len(set(ids)) < len(ids):
        found.append("a device is given twice")
    return found
