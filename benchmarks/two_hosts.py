"""A cluster whose processes stand on two hosts: two network namespaces with a link between them, or twice the loopback of this one.

The host without the store process gets a data client without a segment: compute processes there attach to it, and their
bytes go over TCP from and to the segment of the other host.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.config import ClusterConfig
from deploy.local import LocalCluster
from deploy.plan import HOST, ClusterPlan, ConductorAddress, ProcessSpec
from kvstore.data_client import binary_path
from moontide.config import free_port
from tests.netns import Side

DATA_CLIENT = "data-client"
STORE = "kvstore-0"
_CLONE_NEWNET = 0x40000000
_ADDRESS = re.compile(re.escape(HOST) + r"(?::(\d+))?")


@dataclass(frozen=True)
class Host:
    address: str
    prefix: tuple[str, ...] = ()
    """Of a command line that runs there."""


LOOPBACK = Host(HOST)


def far_host(side: Side) -> Host:
    return Host(side.address, tuple(side.argv([])))


def enter(side: Side) -> Host:
    """Move this thread, and the threads and processes that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(side.namespace).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {side.namespace}: {os.strerror(ctypes.get_errno())}")
    return Host(side.address)


class TwoHostCluster(LocalCluster):
    """A LocalCluster with some of its processes on the far host; the others, and this process, are on the near one."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        model_dir: Path,
        model_id: str,
        near: Host,
        far: Host,
        on_far: Collection[str],
    ) -> None:
        """`on_far`: names of the processes there."""
        super().__init__(config, model_dir=model_dir, model_id=model_id)
        self.plan = spread(self.plan, near=near, far=far, on_far=on_far, pool_threads=config.kvstore.client_threads)
        self._write_configs()


def spread(plan: ClusterPlan, *, near: Host, far: Host, on_far: Collection[str], pool_threads: int) -> ClusterPlan:
    """The same processes with the addresses of their hosts, and the data client of the host that has no store process."""
    far_ports = {port for spec in plan.processes if spec.name in on_far for port in _ports(spec)}
    move = _Move(near, far, frozenset(far_ports))
    store = plan.spec(STORE)
    store_is_far = STORE in on_far
    lone = near if store_is_far else far
    client = _data_client(store, move(store.config["kvstore"]["master_rpc"], lone), lone, pool_threads)
    processes = []
    for spec in plan.processes:
        is_far = spec.name in on_far
        moved = _moved(spec, far if is_far else near, move)
        if "store" in moved.config and is_far != store_is_far:
            access = {**moved.config["store"], "client_address": client.listens_on[0]}
            moved = replace(moved, config={**moved.config, "store": access})
        processes.append(moved)
        if spec.role == "mooncake-master":
            processes.append(client)
    return ClusterPlan(
        processes=tuple(processes),
        conductors=tuple(
            ConductorAddress(http=move(address.http, near), grpc=move(address.grpc, near))
            for address in plan.conductors
        ),
        registry_url=move(plan.registry_url, near),
        store_addresses=tuple(move(address, near) for address in plan.store_addresses),
    )


@dataclass(frozen=True)
class _Move:
    """Loopback addresses in a text -> those of the hosts."""

    near: Host
    far: Host
    far_ports: frozenset[int]

    def __call__(self, text: str, own: Host) -> str:
        """An address with a port is that of the host where the port is, one without means `own`."""

        def address(found: re.Match[str]) -> str:
            if found[1] is None:
                return own.address
            host = self.far if int(found[1]) in self.far_ports else self.near
            return f"{host.address}:{found[1]}"

        return _ADDRESS.sub(address, text)


def _moved(spec: ProcessSpec, own: Host, move: _Move) -> ProcessSpec:
    # Valkey without a password serves loopback only, unless told otherwise.
    more = ("--protected-mode", "no") if spec.role == "valkey" else ()
    return replace(
        spec,
        argv=(*own.prefix, *(move(word, own) for word in spec.argv), *more),
        config=json.loads(move(json.dumps(dict(spec.config)), own)),
        listens_on=tuple(move(address, own) for address in spec.listens_on),
        http_address=move(spec.http_address, own),
    )


def _ports(spec: ProcessSpec) -> list[int]:
    """Where a process listens, as far as the plan says it."""
    node, store = spec.config.get("node", {}), spec.config.get("kvstore", {})
    ports = [int(address.rpartition(":")[2]) for address in spec.listens_on]
    ports += [node.get("grpc_port"), node.get("http_port"), store.get("client_port")]
    return [port for port in ports if port]


def _data_client(store: ProcessSpec, master_rpc: str, host: Host, threads: int) -> ProcessSpec:
    port = free_port(HOST)
    argv: Sequence[str] = (
        str(binary_path("mooncake_client")), "-metadata_server", "P2PHANDSHAKE", "-host", host.address, "-port", str(port),
        "-global_segment_size", "0", "-master_server_address", master_rpc, "-protocol", "tcp", "-threads", str(threads),
    )  # fmt: skip
    return ProcessSpec(
        name=DATA_CLIENT,
        role=DATA_CLIENT,
        argv=(*host.prefix, *argv),
        env={**store.env, "MC_LOG_LEVEL": "WARNING"},
        listens_on=(f"{host.address}:{port}",),
    )
