"""A prefill group that is to serve as decode instances: agreed to by stage 0, for all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moontide import rpc
from moontide.config import to_tree
from moontide.errors import RoleRefused
from moontide.roles import Home, RoleChange
from moontide_proto.v1 import node_pb2, node_pb2_grpc
from prefill_node import stage as stage_module
from prefill_node.config import PrefillNodeConfig
from prefill_node.stage import Stage
from prefill_node.start import start_stage
from tests.unit.prefill_node.rig import GatedTransfer, Group, eventually


class TwoFaced(Group):
    """Its stages have the settings of a decode instance too."""

    num_decode_pages = 8

    def config(self, stage_idx: int) -> PrefillNodeConfig:
        return dataclasses.replace(super().config(stage_idx), decode={"num_pages": self.num_decode_pages})


async def order(group: Group, role: str = "decode") -> list[str]:
    async with rpc.open_channel(group.stages[0].grpc_address) as channel:
        request = node_pb2.SwitchRoleRequest(role=role)
        stub = node_pb2_grpc.NodeStub(channel)
        return list((await rpc.call(stub.SwitchRole, request, timeout_s=10.0, peer="stage 0")).node_ids)


async def test_all_stages_leave_with_stage_0(model_dir: Path) -> None:
    group = TwoFaced(model_dir, num_stages=2)
    await group.start()
    try:
        assert await order(group) == ["prefill-0-stage-0.decode", "prefill-0-stage-1.decode"]
        await eventually(lambda: all(stage.switch.leaving.is_set() for stage in group.stages), "both leave")
        for idx, stage in enumerate(group.stages):
            with pytest.raises(RoleChange) as change:
                stage.switch.raise_if_leaving()
            successor = change.value.successor
            assert (successor.module, successor.node_id) == ("decode_node", f"prefill-0-stage-{idx}.decode")
            assert successor.settings["decode"] == {"num_pages": 8}
    finally:
        await group.close()


async def test_model_that_does_not_fit_on_every_stage_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "free_bytes", lambda _model: 1)
    group = TwoFaced(model_dir, num_stages=2)
    group.num_decode_pages = 100_000
    await group.start()
    try:
        with pytest.raises(RoleRefused, match=r"2 node\(s\) of .* do not fit: .* of which 1 are free"):
            await order(group)
        assert not group.stages[0].switch.leaving.is_set()
        await group.stages.pop().close()
        await eventually(lambda: not group.stages[0].is_grouped, "the loss of a stage")
        with pytest.raises(RoleRefused, match="not complete: no stage 1; wait until it is"):
            await order(group)
    finally:
        await group.close()


async def test_stage_away_from_home_does_not_wait_for_ever(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "_ALONE_S", 0.1)
    group = Group(model_dir, num_stages=2)
    deployed, away = (
        group.config(1),
        dataclasses.replace(group.config(1), home=Home(role="decode", settings=home(group))),
    )
    stages = [await start(group, config) for config in (deployed, away)]
    try:
        await eventually(stages[1].switch.leaving.is_set, "the return")
        assert not stages[0].switch.leaving.is_set(), "that one is at home"
    finally:
        for stage in stages:
            await stage.close()


def home(group: Group) -> dict[str, Any]:
    return {**to_tree(group.config(1)), "node": {"node_id": "decode-1"}}


async def start(group: Group, config: PrefillNodeConfig) -> Stage:
    return await start_stage(config, transfer=GatedTransfer(group.store, group.gates), store_node=group.store_node)
