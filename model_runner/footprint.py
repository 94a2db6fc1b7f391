"""What a stage of a model needs in memory, and what there is: asked before a node takes another role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from model_runner.config import DEFAULT_CONTEXTS, ModelConfig
from model_runner.kv_cache import TORCH_DTYPES, PagedKVCache
from model_runner.model_source import DescribedModel, load_config
from model_runner.stage import StageSpec, parse_layer_split
from model_runner.weights import drop_other_stages
from moontide.errors import RoleRefused

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    weight_bytes: int
    page_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.page_bytes


def footprint(described: DescribedModel, spec: StageSpec, *, num_pages: int) -> Footprint:
    """Of a runner of that stage; its working memory comes on top."""
    return Footprint(
        weight_bytes=_weight_bytes(described, spec),
        page_bytes=PagedKVCache.arena_bytes(described.layout, spec, num_pages),
    )


def footprint_in_role(described: DescribedModel, role: str, settings: Mapping[str, Any]) -> Footprint:
    """Of a node with these settings. Raises: ConfigError for a split of layers that the model does not have."""
    info, layout, section = described.info, described.layout, settings.get(role) or {}
    num_stages, stage_idx = (section["num_stages"], section["stage_idx"]) if role == "prefill" else (1, 0)
    split = parse_layer_split(
        section.get("layer_split", ""), info.num_layers, num_stages, layer_group=layout.layer_group
    )
    pages_per_context = -(-info.max_context // layout.block_tokens)
    num_pages = section.get("num_pages") or DEFAULT_CONTEXTS[role] * pages_per_context
    return footprint(described, split[stage_idx], num_pages=num_pages)


def check_room(needed: Footprint, *, now: Footprint, free_bytes: int, num_nodes: int) -> None:
    """Raises: RoleRefused, with the figures, when `num_nodes` nodes that need `now` each would not fit with `needed` each."""
    there = free_bytes + num_nodes * now.total_bytes
    wanted = num_nodes * needed.total_bytes
    if wanted > there:
        raise RoleRefused(
            f"{num_nodes} node(s) of {needed.weight_bytes} bytes of weights and {needed.page_bytes} bytes of pages each do not fit: "
            f"{wanted} bytes of {there}, of which {free_bytes} are free and the rest is what they have now; choose fewer pages "
            "(num_pages), or nodes with more memory"
        )


def free_bytes(model: ModelConfig) -> int:
    """Memory that is free now, where `model` is computed: on the device, or on this host as far as its cgroup may use it."""
    if model.device != "cpu":
        return int(torch.cuda.mem_get_info(model.device)[0])
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    return min(free, cgroup_room_bytes(_CGROUP, free))


def cgroup_room_bytes(cgroup: Path, unlimited: int) -> int:
    """What its limit leaves, beyond what it uses and cannot give back; `unlimited` without one."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return unlimited
    return unlimited if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))


def _weight_bytes(described: DescribedModel, spec: StageSpec) -> int:
    if described.source.load_format == "paced":
        return 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            load_config(described.source), dtype=TORCH_DTYPES[described.info.dtype]
        )
    drop_other_stages(model, spec)
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
