"""Layer splits."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.stage import StageSpec, format_layer_split, parse_layer_split, split_layers
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


SPEEDS = st.floats(0.2, 5.0)


def slowest_s(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


def all_splits(num_layers: int, num_stages: int, layer_group: int) -> list[list[int]]:
    """Layers of each stage, in every way that cuts no group."""
    inner = itertools.combinations(range(layer_group, num_layers, layer_group), num_stages - 1)
    return [[end - start for start, end in itertools.pairwise([0, *borders, num_layers])] for borders in inner]


@given(st.integers(1, 16), st.integers(1, 3), st.lists(SPEEDS, min_size=1, max_size=4))
def test_split_by_speeds_is_the_best_of_all_and_loads_the_last_stage_as_far_as_that_allows(
    num_layers: int, layer_group: int, speeds: list[float]
) -> None:
    splits = all_splits(num_layers, len(speeds), layer_group)
    if not splits or len(set(speeds)) == 1:
        return
    stages = split_layers(num_layers, len(speeds), layer_group=layer_group, speeds=speeds)
    sizes = [stage.num_local_layers for stage in stages]
    assert sizes in splits
    best_s = min(slowest_s(each, speeds) for each in splits)
    assert slowest_s(sizes, speeds) == pytest.approx(best_s)
    best = [each for each in splits if slowest_s(each, speeds) <= best_s * (1 + 1e-9)]
    assert sizes[-1] == max(each[-1] for each in best)
    others_s = [sum(n / speed for n, speed in zip(each, speeds, strict=True)) for each in best if each[-1] == sizes[-1]]
    assert sum(n / speed for n, speed in zip(sizes, speeds, strict=True)) == pytest.approx(min(others_s))


@given(st.integers(1, 130), st.integers(1, 12), st.integers(1, 9), SPEEDS)
def test_equal_speeds_change_nothing(num_layers: int, num_stages: int, layer_group: int, speed: float) -> None:
    if num_stages <= -(-num_layers // layer_group):
        even = split_layers(num_layers, num_stages, layer_group=layer_group)
        assert split_layers(num_layers, num_stages, layer_group=layer_group, speeds=[speed] * num_stages) == even


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1.0, 2.0], "10,20"),
        ([2.0, 1.0], "20,10"),
        ([1.0, 1.0, 0.5], "10,15,5"),
        ([0.1, 1.0, 1.0], "5,5,20"),
        ([1.0, 1.1], "15,15"),
        ([1.0, 1.0, 1.0, 0.9], "5,10,10,5"),
        ([0.9, 1.0, 1.0, 1.0], "5,5,10,10"),
    ],
)
def test_thirty_layers_in_groups_of_five(speeds: list[float], expected: str) -> None:
    assert format_layer_split(split_layers(30, len(speeds), layer_group=5, speeds=speeds)) == expected


def test_many_stages_of_a_large_model_are_split_at_once() -> None:
    speeds = [1 + idx / 7 for idx in range(16)]
    stages = split_layers(126, 16, layer_group=1, speeds=speeds)
    assert slowest_s([stage.num_local_layers for stage in stages], speeds) >= 126 / sum(speeds)


@pytest.mark.parametrize(("text", "sizes"), [("16,14", [16, 14]), (" 2 , 28", [2, 28]), ("", [16, 14]), ("30", [30])])
def test_layer_split_that_was_asked_for(text: str, sizes: list[int]) -> None:
    stages = parse_layer_split(text, 30, len(sizes), layer_group=2)
    assert [stage.num_local_layers for stage in stages] == sizes
    assert stages[-1].end_layer == stages[-1].num_layers == 30
    assert parse_layer_split(format_layer_split(stages), 30, len(sizes), layer_group=2) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16;14", r"'16;14' is no list of layer counts; .* or leave it empty for 15,15"),
        ("16,", "is no list of layer counts"),
        ("30,0", "one number above 0 per stage"),
        ("31,-1", "one number above 0 per stage"),
        ("10,10,10", r"is for 3 stages and the group has prefill.num_stages=2; give one number per stage"),
        ("16,16", r"has 32 layers in all and the model 30; make the numbers add up"),
        ("16,14", r"cuts a layer group at layer 16, .* kv.layer_group=5 layers; use multiples of 5 for all stages but the last"),
    ],
)  # fmt: skip
def test_layer_split_that_does_not_fit_is_refused_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layer_split(text, 30, 2, layer_group=5)


def test_last_group_may_be_short_in_a_given_split() -> None:
    assert [stage.num_local_layers for stage in parse_layer_split("8,3", 11, 2, layer_group=4)] == [8, 3]
