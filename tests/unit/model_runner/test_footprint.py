"""What stages need in memory, and when nodes fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.access import KvConfig
from model_runner.config import DEFAULT_CONTEXTS, ModelConfig
from model_runner.footprint import Footprint, cgroup_room_bytes, check_room, footprint_in_role, free_bytes
from model_runner.model_source import describe_model
from moontide.errors import RoleRefused
from tests.fakes.tiny_models import tiny_model_dir


def test_stages_add_up_to_the_whole_model(tmp_path: Path) -> None:
    """The embedding is on the first stage, the head on the last; without shared weights nothing is twice."""
    model = ModelConfig(name=str(tiny_model_dir("llama", tmp_path)), dtype="float32")
    described = describe_model(model, KvConfig(block_tokens=64, layer_group=1))
    whole = footprint_in_role(described, "decode", {"decode": {"num_pages": 10}})
    stages = [
        footprint_in_role(described, "prefill", {"prefill": {"stage_idx": idx, "num_stages": 2, "num_pages": 10}})
        for idx in range(2)
    ]
    assert sum(stage.weight_bytes for stage in stages) >= whole.weight_bytes
    assert all(stage.weight_bytes < whole.weight_bytes for stage in stages)
    assert sum(stage.page_bytes for stage in stages) == whole.page_bytes == 10 * described.layout.block_bytes
    unset = footprint_in_role(described, "decode", {"decode": {"num_pages": 0}})
    assert (
        unset.page_bytes
        == DEFAULT_CONTEXTS["decode"] * -(-described.info.max_context // 64) * described.layout.block_bytes
    )


def test_nodes_that_do_not_fit_are_refused_with_the_figures() -> None:
    now, needed = Footprint(weight_bytes=30, page_bytes=10), Footprint(weight_bytes=60, page_bytes=20)
    check_room(needed, now=now, free_bytes=80, num_nodes=2)
    with pytest.raises(
        RoleRefused, match="60 bytes of weights and 20 bytes of pages each do not fit: 160 bytes of 159, of which 79"
    ):
        check_room(needed, now=now, free_bytes=79, num_nodes=2)


def test_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert cgroup_room_bytes(tmp_path, 500) == 500
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_room_bytes(tmp_path, 500) == 500
    (tmp_path / "memory.max").write_text("400\n")
    assert cgroup_room_bytes(tmp_path, 500) == 150
    assert free_bytes(ModelConfig()) > 0
