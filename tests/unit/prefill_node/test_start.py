"""What a stage tells its supervisor while it starts."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_runner.load import load_runner
from moontide.config import free_port
from prefill_node import start as start_module
from prefill_node.config import PrefillNodeConfig
from tests.store_processes import listens
from tests.unit.prefill_node.rig import Group, eventually


class FixedPort(Group):
    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir, num_stages=1)
        self.http_port = free_port()

    def config(self, stage_idx: int) -> PrefillNodeConfig:
        config = super().config(stage_idx)
        return dataclasses.replace(config, node=dataclasses.replace(config.node, http_port=self.http_port))


async def test_stage_that_loads_its_model_is_alive_but_not_ready(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, go_on = threading.Event(), threading.Event()

    def load_slowly(*args: Any, **kwargs: Any) -> Any:
        is_loading.set()
        assert go_on.wait(30.0)
        return load_runner(*args, **kwargs)

    monkeypatch.setattr(start_module, "load_runner", load_slowly)
    group = FixedPort(model_dir)
    starting = asyncio.create_task(group.start())
    try:
        await eventually(is_loading.is_set, "the model is being loaded")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{group.http_port}") as http:
            assert (await http.get("/live")).status_code == 200
            ready = await http.get("/ready")
            assert (ready.status_code, ready.text) == (503, "the model is being loaded\n")
            go_on.set()
            await starting
            assert (await http.get("/ready")).status_code == 200
            assert "prefill_" in (await http.get("/metrics")).text
    finally:
        go_on.set()
        await asyncio.gather(starting, return_exceptions=True)
        await group.close()
    assert not listens(f"127.0.0.1:{group.http_port}")
