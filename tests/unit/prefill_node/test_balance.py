"""Stages that take unequally long: what is said of them, and that following it makes them even."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.paced_models import write_paced_model
from model_runner.stage import StageSpec, parse_layer_split, split_layers
from moontide.errors import ConfigError
from moontide.perf_model import StepModel
from moontide_proto.v1 import prefill_pb2
from prefill_node.balance import UnevenStages, uneven_stages
from tests.unit.prefill_node.rig import Group, eventually, make_prompt, running_group

LAYER = StepModel(overhead_s=0.0, token_s=1e-6, pair_s=1e-10)
"""One layer on a host of speed 1."""


def models_of(split: Sequence[StageSpec], speeds: Sequence[float]) -> list[StepModel]:
    """Stages whose time is in proportion to their layers and the slowness of their host."""
    factors = [spec.num_local_layers / speed for spec, speed in zip(split, speeds, strict=True)]
    return [
        StepModel(overhead_s=0.0, token_s=LAYER.token_s * factor, pair_s=LAYER.pair_s * factor) for factor in factors
    ]


def judge(text: str, speeds: Sequence[float], *, layer_group: int = 1) -> UnevenStages | None:
    """What is said of 30 layers that are split in that way."""
    split = parse_layer_split(text, 30, len(speeds), layer_group=layer_group)
    return uneven_stages(split, models_of(split, speeds), layer_group=layer_group, chunk_tokens=1000)


@pytest.mark.parametrize(
    ("speeds", "split", "misplaced"),
    [([0.5, 1.0], "10,20", 0), ([1.0, 0.5], "20,10", None), ([1.0, 0.5, 1.0], "12,6,12", 1)],
)
def test_a_host_of_half_the_speed_gets_half_the_layers_and_the_last_place(
    speeds: list[float], split: str, misplaced: int | None
) -> None:
    found = judge("", speeds)
    assert found is not None
    assert found.better_split == split
    assert found.misplaced_stage == misplaced
    # Half the speed made one stage take twice as long as it should; the better split spreads that.
    now_s = 30 / len(speeds) / 0.5
    assert found.gain == pytest.approx(
        1 - max(int(n) / v for n, v in zip(split.split(","), speeds, strict=True)) / now_s
    )
    assert judge(split, speeds) is None, "whoever follows the advice hears no more"


def test_line_names_times_setting_gain_and_place() -> None:
    line = str(judge("", [0.5, 1.0], layer_group=5))
    assert line == (
        "for a chunk of 1000 tokens the stages take 0.0345, 0.0172 s, 0.0023, 0.00115 s per layer; "
        "prefill.layer_split=10,20 makes the slowest stage 33% faster; the slow host of stage 0 costs least as the last stage"
    )


def test_equal_hosts_whose_layer_groups_do_not_come_out_even_hear_why() -> None:
    found = judge("", [1.0, 1.0, 1.0, 1.0], layer_group=5)
    assert found is not None
    assert found.better_split is None
    assert found.misplaced_stage is None
    assert "no other split on borders of kv.layer_group is better" in str(found)


def test_a_given_split_that_is_worse_than_the_even_one_is_named() -> None:
    found = judge("20,10", [1.0, 1.0])
    assert found is not None
    assert found.better_split == "15,15"


def test_nothing_is_said_of_small_differences_lone_stages_and_stages_that_were_not_measured() -> None:
    assert judge("", [1.0, 1.09]) is None
    assert judge("", [1.0]) is None
    split = split_layers(30, 2, layer_group=1)
    assert uneven_stages(split, [*models_of(split, [1.0, 0.5])[:1], None], layer_group=1, chunk_tokens=1000) is None


async def told(group: Group) -> str:
    status: prefill_pb2.PrefillStatus = await group.stub.GetStatus(prefill_pb2.PrefillStatusRequest())
    return status.uneven_stages


@pytest.mark.parametrize(
    ("speeds", "advice", "speeds_then", "split_then", "said_then"),
    [
        ([1.0, 1 / 3], "prefill.layer_split=6,2 makes the slowest stage 50% faster", [1.0, 1 / 3], "6,2", ""),
        (
            [0.5, 1.0],
            "prefill.layer_split=2,6 makes the slowest stage 25% faster; the slow host of stage 0 costs least as the last stage",
            [1.0, 0.5],
            "5,3",
            "no other split",
        ),
    ],
)
async def test_group_with_a_slow_stage_says_what_to_do_and_not_again_when_it_is_done(
    speeds: list[float],
    advice: str,
    speeds_then: list[float],
    split_then: str,
    said_then: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pace = {"overhead_s": 0.0, "token_s": 1e-5, "pair_s": 0.0}
    settings = {"num_stages": 2, "chunking": "equal-time"}
    model = write_paced_model(tmp_path / "before", stage_speed=speeds, **pace)
    async with running_group(model.directory, profile=model.profile, **settings) as group:
        assert (await told(group)).endswith(advice)
        assert caplog.text.count(advice) == 1
    caplog.clear()
    model = write_paced_model(tmp_path / "then", stage_speed=speeds_then, **pace)
    async with running_group(model.directory, profile=model.profile, layer_split=split_then, **settings) as group:
        assert ",".join(str(stage._runner.spec.num_local_layers) for stage in group.stages) == split_then
        assert said_then in await told(group)
        assert "faster" not in caplog.text
        assert (await group.prefill(make_prompt(70))).completed is not None


async def test_given_split_computes_the_same_token(model_dir: Path) -> None:
    prompt = make_prompt(70)
    tokens = []
    for layer_split in ("", "1,5", "4,2"):
        async with running_group(model_dir, num_stages=2, layer_split=layer_split) as group:
            tokens.append((await group.prefill(prompt)).token_id)
    assert len(set(tokens)) == 1


@pytest.mark.parametrize("stage_idx", [0, 1])
async def test_every_stage_refuses_a_split_that_does_not_fit(model_dir: Path, stage_idx: int) -> None:
    with pytest.raises(ConfigError, match="has 8 layers in all and the model 6"):
        await Group(model_dir, num_stages=2, layer_split="4,4").start_stage(stage_idx)


async def test_stage_with_another_split_is_not_taken(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_group(model_dir, num_stages=2, layer_split="4,2") as group:
        await group.stages.pop().close()
        other = Group(model_dir, num_stages=2)
        other.join_address = group.control_address
        stranger = await other.start_stage(1)
        refusal = (
            "its stages have 3,3 layers and those of this group 4,2; start all stages with one prefill.layer_split"
        )
        await eventually(lambda: refusal in caplog.text, "a refusal")
        assert not stranger.is_grouped
        await stranger.close()


async def test_real_stages_measure_themselves_and_plan_by_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    async with running_group(model_dir, num_stages=2, chunking="equal-time") as group:
        session = group.stages[0].coordinator.session
        assert session.predict_s(0, 300) > 0
        answer = await group.prefill(make_prompt(300))
        assert answer.first_token.timings.predicted_s > 0
        await group.until_idle()
