"""What a node becomes in its other role, and how it gets there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moontide import rpc
from moontide.errors import RoleRefused
from moontide.roles import (
    SERVICE_NAME,
    NodeServicer,
    Place,
    RoleChange,
    RoleSwitch,
    Successor,
    change_role,
    deployed,
    renamed,
)
from moontide_proto.v1 import node_pb2, node_pb2_grpc

OWN_PLACE = {"group_id": "decode-1", "stage_idx": 0, "num_stages": 1, "control_address": "127.0.0.1:700"}


def decode_settings(**sections: Any) -> dict[str, Any]:
    return {
        "node": {"node_id": "decode-1", "grpc_port": 50, "host": "127.0.0.1"},
        "registry": {"url": "redis://secret@127.0.0.1:1/0"},
        "tls": {"ca_file": "/ca.crt"},
        "model": {"name": "m"},
        "kv": {"block_tokens": 64},
        "store": {"service_address": "s:1"},
        "decode": {"max_batch": 7},
        "prefill": {"chunk_tokens": 128, "layer_split": "2,2", **OWN_PLACE},
        "home": None,
        **sections,
    }


def stage_settings() -> dict[str, Any]:
    place = {"group_id": "prefill-0", "stage_idx": 1, "num_stages": 2, "control_address": "127.0.0.1:800"}
    return decode_settings(
        node={"node_id": "prefill-0-stage-1"}, prefill={"chunk_tokens": 128, "layer_split": "2,2", **place}
    )


def test_there_and_back_is_what_it_was() -> None:
    start = decode_settings()
    there = change_role("decode", start, "prefill")
    assert (there.module, there.node_id) == ("prefill_node", "decode-1.prefill")
    assert there.settings["prefill"] == {**start["prefill"], "layer_split": ""}, "that split is of two stages"
    assert "decode" not in there.settings
    assert there.settings["tls"] == start["tls"]
    back = change_role("prefill", there.settings, "decode")
    assert back.node_id == "decode-1"
    assert back.settings == {name: value for name, value in start.items() if name != "home"}
    again = change_role("decode", back.settings, "prefill")
    assert again.settings == there.settings, "nothing adds up"


def test_stages_of_a_group_become_decode_instances_and_a_group_again() -> None:
    start = stage_settings()
    there = change_role("prefill", start, "decode")
    assert (there.node_id, there.settings["decode"]) == ("prefill-0-stage-1.decode", {"max_batch": 7})
    assert Place.of_settings(deployed("decode", there.settings).settings) == Place(
        group_id="prefill-0", stage_idx=1, num_stages=2, control_address="127.0.0.1:800"
    ), "it knows where it belongs"
    assert change_role("decode", there.settings, "prefill").settings["prefill"]["layer_split"] == "2,2"


def test_place_that_is_given_counts_for_this_time_only() -> None:
    place = Place(group_id="decode-0", stage_idx=1, num_stages=2, control_address="127.0.0.1:900")
    there = change_role("decode", decode_settings(), "prefill", place)
    assert Place.of_settings(there.settings) == place
    assert there.settings["prefill"]["layer_split"] == "2,2", "it is of two stages"
    back = change_role("prefill", there.settings, "decode")
    assert Place.of_settings(back.settings) == Place(**OWN_PLACE)  # type: ignore[arg-type]
    other = change_role("decode", change_role("prefill", stage_settings(), "decode").settings, "prefill", place)
    assert other.node_id == "prefill-0-stage-1"
    assert other.settings["home"]["role"] == "prefill", "in another group than its own it is away too"
    assert change_role("prefill", other.settings, "decode").node_id == "prefill-0-stage-1.decode"


@pytest.mark.parametrize(
    ("role", "settings", "reason"),
    [
        ("decode", decode_settings(), "serves as decode already"),
        ("kvstore", decode_settings(), "choose one of prefill, decode"),
        ("prefill", decode_settings(prefill=None), "add a section `prefill`"),
        ("prefill", decode_settings(prefill={"chunk_tokens": 128}), "no place in a prefill group"),
    ],
)
def test_what_cannot_be_is_refused(role: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(RoleRefused, match=reason):
        change_role("decode", settings, role)


@pytest.mark.parametrize(
    "wrong",
    [{"stage_idx": 1}, {"num_stages": 0}, {"group_id": ""}, {"control_address": "host"}, {"control_address": ":1"}],
)
def test_place_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RoleRefused, match="no place in a group"):
        Place(**{**OWN_PLACE, **wrong})


def test_names_go_there_and_back() -> None:
    assert renamed("decode-1", "prefill") == "decode-1.prefill"
    assert renamed("decode-1.prefill", "decode") == "decode-1"
    assert renamed("prefill-0-stage-0", "decode") == "prefill-0-stage-0.decode"


async def test_order_over_grpc_is_answered_before_the_node_leaves() -> None:
    told: list[str] = []
    switch = RoleSwitch(
        "prefill",
        decode_settings(node={"node_id": "prefill-0-stage-0"}),
        check=agree,
        companions=lambda: ["prefill-0-stage-1"],
        on_leaving=lambda: told.append("others"),
    )
    async with served(switch) as stub:
        reply = await stub.SwitchRole(node_pb2.SwitchRoleRequest(role="decode"), timeout=5.0)
        assert list(reply.node_ids) == ["prefill-0-stage-0.decode", "prefill-0-stage-1.decode"]
        await asyncio.wait_for(switch.leaving.wait(), 5.0)
        assert told == ["others"]
        with pytest.raises(RoleRefused, match="about to serve as decode"):
            await rpc.call(stub.SwitchRole, node_pb2.SwitchRoleRequest(role="decode"), timeout_s=5.0, peer="node")
    with pytest.raises(RoleChange) as change:
        switch.raise_if_leaving()
    assert change.value.successor.module == "decode_node"


async def test_node_that_has_no_room_stays_what_it_is() -> None:
    async def refuse(_successor: Successor) -> None:
        raise RoleRefused("does not fit: 7 bytes of 5")

    switch = RoleSwitch("decode", decode_settings(), check=refuse)
    async with served(switch) as stub:
        with pytest.raises(RoleRefused, match="7 bytes of 5"):
            await rpc.call(stub.SwitchRole, node_pb2.SwitchRoleRequest(role="prefill"), timeout_s=5.0, peer="node")
    assert not switch.leaving.is_set()
    switch.raise_if_leaving()


async def test_later_stage_is_not_announced_and_returns_home_alone() -> None:
    switch = RoleSwitch("decode", decode_settings(), check=agree)
    place = Place(group_id="g", stage_idx=1, num_stages=2, control_address="h:1")
    assert await switch.order("prefill", place) == []
    away = RoleSwitch("prefill", change_role("decode", decode_settings(), "prefill", place).settings, check=agree)
    assert away.is_away
    away.return_home()
    with pytest.raises(RoleChange) as change:
        away.raise_if_leaving()
    assert (change.value.successor.node_id, change.value.successor.role) == ("decode-1", "decode")


def test_process_goes_on_as_the_other_program(tmp_path: Path) -> None:
    """The same process id, the settings, and no descriptor but the three and the settings."""
    (tmp_path / "prefill_node.py").write_text(
        "import os, sys, yaml\n"
        "settings = yaml.safe_load(open(sys.argv[2]))\n"
        "print(os.getpid(), settings['node']['node_id'], os.path.exists('/proc/self/fd/77'))\n"
        "sys.exit(5)\n"
    )
    (tmp_path / "before.py").write_text(
        "import os\n"
        "from moontide.roles import RoleChange, Successor, run_program\n"
        "os.dup2(os.open('/dev/null', os.O_RDONLY), 77, inheritable=True)\n"
        "print(os.getpid())\n"
        "def main():\n"
        "    raise RoleChange(Successor(role='prefill', settings={'node': {'node_id': 'n'}}))\n"
        "run_program(main)\n"
    )
    ended = subprocess.run(
        [sys.executable, "before.py"], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    first, second = ended.stdout.splitlines()
    assert second == f"{first} n False"
    assert ended.returncode == 5


async def agree(_successor: Successor) -> None:
    """Whatever it is."""


@asynccontextmanager
async def served(switch: RoleSwitch) -> AsyncIterator[Any]:
    """A stub of the service of a switch."""
    server = rpc.Server()
    server.add(node_pb2_grpc.add_NodeServicer_to_server, NodeServicer(switch), SERVICE_NAME)
    async with rpc.open_channel(f"127.0.0.1:{await server.start('127.0.0.1', 0)}") as channel:
        yield node_pb2_grpc.NodeStub(channel)
    await server.close()
