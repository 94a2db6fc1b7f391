"""Layer splits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.stage import StageSpec, split_layers
from moontide.errors import ConfigError


@given(st.integers(1, 130), st.integers(1, 12), st.integers(1, 9))
def test_stages_cover_all_layers_on_group_borders_and_the_last_is_never_larger(
    num_layers: int, num_stages: int, layer_group: int
) -> None:
    num_groups = -(-num_layers // layer_group)
    if num_stages > num_groups:
        with pytest.raises(ConfigError, match="a group is never split"):
            split_layers(num_layers, num_stages, layer_group=layer_group)
        return
    stages = split_layers(num_layers, num_stages, layer_group=layer_group)
    assert [stage.stage_idx for stage in stages] == list(range(num_stages))
    assert stages[0].is_first_stage
    assert stages[-1].is_last_stage
    for left, right in itertools.pairwise(stages):
        assert left.end_layer == right.start_layer
        assert right.start_layer % layer_group == 0
    sizes = [-(-stage.num_local_layers // layer_group) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def test_impossible_ranges_are_refused() -> None:
    with pytest.raises(ConfigError, match="stage_idx=2"):
        StageSpec(stage_idx=2, num_stages=2, start_layer=0, end_layer=1, num_layers=4)
    with pytest.raises(ConfigError, match=r"layers \[3, 3\)"):
        StageSpec(stage_idx=0, num_stages=2, start_layer=3, end_layer=3, num_layers=4)
    with pytest.raises(ConfigError, match="num_stages=0"):
        split_layers(4, 0, layer_group=1)
