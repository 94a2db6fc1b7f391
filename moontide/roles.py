"""How a compute node changes its role: it drains and goes on as the other program, in the same process.

    SwitchRole -> settings of the other role (pure) -> drain, leave the registry, close -> exec
What is derived comes from what the node was deployed with, `home`, every time: after there and back it is what it was. Whoever started
the process sees the same process id; when it starts it again after a crash, the node is back in the role that it was deployed in.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TypeAlias

import yaml

from moontide.errors import RoleRefused
from moontide.log import get_logger
from moontide.rpc import grpc_errors
from moontide_proto.v1 import node_pb2, node_pb2_grpc

MODULES = {"prefill": "prefill_node", "decode": "decode_node"}
"""Role -> `python -m` name of its program; the settings of a role are the section of its name."""
SERVICE_NAME = node_pb2.DESCRIPTOR.services_by_name["Node"].full_name

log = get_logger(__name__)

Context: TypeAlias = Any
"""grpc.aio.ServicerContext; gRPC ships no types."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """What a node was deployed as."""

    role: str
    settings: dict[str, Any]
    """Its whole config."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of a stage in a prefill group; fields as in section `prefill`."""

    group_id: str
    stage_idx: int
    num_stages: int
    control_address: str

    def __post_init__(self) -> None:
        """Raises: RoleRefused."""
        host, _, port = self.control_address.rpartition(":")
        is_address = bool(host) and port.isdigit() and 0 < int(port) <= 65535
        if not (self.group_id and 0 <= self.stage_idx < self.num_stages and is_address):
            raise RoleRefused(
                f"{self} is no place in a group; give its name, a stage of it, and host:port of its first stage"
            )

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Place | None:
        """The one that a config's section `prefill` names, if any."""
        section = settings.get("prefill") or {}
        known: dict[str, Any] = {name: section.get(name) for name in cls.__dataclass_fields__}
        return None if None in known.values() else cls(**known)


@dataclass(frozen=True, kw_only=True)
class Successor:
    """What a node becomes."""

    role: str
    settings: Mapping[str, Any]

    @property
    def module(self) -> str:
        return MODULES[self.role]

    @property
    def node_id(self) -> str:
        return str(self.settings["node"]["node_id"])


class RoleChange(Exception):
    """A service has drained and closed, and its process is to go on as the successor."""

    def __init__(self, successor: Successor) -> None:
        super().__init__(f"{successor.node_id} is to serve as {successor.role}")
        self.successor = successor


def renamed(node_id: str, role: str) -> str:
    """The node id after a change to `role`: that of the deployed role, or one with the role as its ending."""
    (other,) = MODULES.keys() - {role}
    return node_id.removesuffix(f".{other}") if node_id.endswith(f".{other}") else f"{node_id}.{role}"


def deployed(role: str, settings: Mapping[str, Any]) -> Home:
    """What a node that serves as `role` with these settings was deployed as."""
    if settings.get("home"):
        return Home(**settings["home"])
    return Home(role=role, settings={name: value for name, value in settings.items() if name != "home"})


def change_role(running: str, settings: Mapping[str, Any], role: str, place: Place | None = None) -> Successor:
    """What a node that serves as `running` with these settings becomes.

    Args:
        place: of a prefill stage; None: the one that it was deployed with.
    Raises: RoleRefused.
    """
    node_id = settings["node"]["node_id"]
    if role not in MODULES:
        raise RoleRefused(f"role={role!r} is unknown; choose one of {', '.join(MODULES)}")
    if role == running:
        raise RoleRefused(f"{node_id} serves as {role} already")
    home = deployed(running, settings)
    own_place = Place.of_settings(home.settings)
    if role == home.role and (place is None or place == own_place):
        return Successor(role=role, settings=home.settings)
    section = home.settings.get(role)
    if section is None:
        raise RoleRefused(f"{node_id} has no settings for the role {role}; add a section `{role}` to its config file")
    if role == "prefill":
        place = place or own_place
        if place is None:
            raise RoleRefused(
                f"{node_id} has no place in a prefill group; give it one in section `prefill` of its config file"
            )
        section = {
            **section,
            **asdict(place),
            "layer_split": _split_for(section.get("layer_split", ""), place.num_stages),
        }
    common = {name: home.settings[name] for name in ("registry", "tls", "model", "kv", "store")}
    node = {**home.settings["node"], "node_id": renamed(node_id, role)}
    derived = {"node": node, **common, role: section, "home": asdict(home)}
    return Successor(role=role, settings=derived)


def _split_for(layer_split: str, num_stages: int) -> str:
    """The same, unless it names the layers of another number of stages."""
    names_layers = bool(layer_split) and layer_split[0].isdigit()
    return "" if names_layers and len(layer_split.split(",")) != num_stages else layer_split


class RoleSwitch:
    """One node's readiness to change: takes the order, and tells the node's main when to leave."""

    def __init__(
        self,
        role: str,
        settings: Mapping[str, Any],
        *,
        check: Callable[[Successor], Awaitable[None]],
        companions: Callable[[], list[str]] = list,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            settings: the whole config of the node.
            check: raises RoleRefused when the node cannot become that now.
            companions: node ids of the processes that change with it.
            on_leaving: tells them.
        """
        self.leaving = asyncio.Event()
        """Set when the node is to drain and close."""
        self._role = role
        self._settings = settings
        self._check = check
        self._companions = companions
        self._on_leaving = on_leaving
        self._successor: Successor | None = None

    @property
    def is_away(self) -> bool:
        """Whether the node serves as something else than it was deployed as."""
        return self._settings.get("home") is not None

    async def order(self, role: str, place: Place | None) -> list[str]:
        """Agree to change; returns the node ids afterwards. `leave` comes next. Raises: RoleRefused, ConfigError."""
        successor = change_role(self._role, self._settings, role, place)
        await self._check(successor)
        if self._successor is not None:
            raise RoleRefused(
                f"it is about to serve as {self._successor.role}; wait until {self._successor.node_id} is there"
            )
        self._successor = successor
        is_known = role == "decode" or successor.settings["prefill"]["stage_idx"] == 0
        return [successor.node_id] * is_known + [renamed(node_id, role) for node_id in self._companions()]

    def leave(self) -> None:
        """Drain and change, as agreed."""
        assert self._successor is not None
        log.info("changing role", role=self._successor.role, next_node_id=self._successor.node_id)
        self._on_leaving()
        self.leaving.set()

    def follow(self, role: str) -> None:
        """Change because the first stage does, which has checked that all may. A node that cannot stays what it is, and says so."""
        try:
            self._successor = change_role(self._role, self._settings, role)
        except RoleRefused as error:
            log.error("role not changed", role=role, reason=str(error))
            return
        self.leaving.set()

    def return_home(self) -> None:
        """Become again what it was deployed as."""
        home = deployed(self._role, self._settings)
        self._successor = Successor(role=home.role, settings=home.settings)
        self.leaving.set()

    def raise_if_leaving(self) -> None:
        """Raises: RoleChange once it is to leave; for the end of the node's main, when all is closed."""
        if self.leaving.is_set():
            assert self._successor is not None
            raise RoleChange(self._successor)


class NodeServicer(node_pb2_grpc.NodeServicer):
    """moontide.v1.Node."""

    def __init__(self, switch: RoleSwitch) -> None:
        self._switch = switch

    async def SwitchRole(self, request: node_pb2.SwitchRoleRequest, context: Context) -> node_pb2.SwitchRoleReply:
        async with grpc_errors(context):
            node_ids = await self._switch.order(request.role, _place(request))
        # The caller has its answer before the server closes.
        context.add_done_callback(lambda _context: self._switch.leave())
        return node_pb2.SwitchRoleReply(node_ids=node_ids)


def _place(request: node_pb2.SwitchRoleRequest) -> Place | None:
    if not request.HasField("place"):
        return None
    place = request.place
    return Place(
        group_id=place.group_id,
        stage_idx=place.stage_idx,
        num_stages=place.num_stages,
        control_address=place.control_address,
    )


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a node's `main` as this whole process, which goes on as what the node becomes."""
    try:
        code = main()
    except RoleChange as change:
        _execute(change.successor)
    # Not `sys.exit`: all is closed, and when requests were cut off the store's native library keeps the end of the interpreter for 5 s and
    # more.
    _flush()
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _execute(successor: Successor) -> NoReturn:
    """The settings go along in memory: they may hold a password, and there is no file to remove afterwards."""
    settings = os.memfd_create("settings", 0)
    with open(settings, "w", closefd=False) as file:
        yaml.safe_dump(dict(successor.settings), file, sort_keys=False)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != settings:
            # Those of native libraries too: a connection that lives on keeps its peer waiting.
            with suppress(OSError):
                os.set_inheritable(int(name), False)
    _flush()
    os.execv(sys.executable, [sys.executable, "-m", successor.module, "--config", f"/proc/self/fd/{settings}"])
