"""A paced stage takes the time of its profile, tells of its layer groups on the way, and makes up K/V and tokens that show mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.paced_models import HEAD_DIM, NUM_LAYERS, VOCAB_SIZE, write_paced_model
from kvstore.access import KvConfig
from model_runner.config import ModelConfig
from model_runner.kv_cache import PagedKVCache
from model_runner.load import load_runner
from model_runner.model_source import DescribedModel, ModelInfo, describe_model
from model_runner.paced import PacedProfile, PacedRunner, paced_kv, paced_token
from model_runner.pages import OutOfPages
from model_runner.runner import Segment, StageRunner
from model_runner.stage import StageSpec, split_layers
from moontide.clock import MonotonicClock
from moontide.errors import ConfigError
from moontide.perf_model import StepModel, StepShape

PAGE_TOKENS = 16
NUM_PAGES = 12
LAYER_GROUP = 2
PACE = StepModel(overhead_s=1.0, token_s=0.25, pair_s=0.125)
NO_TIME = StepModel(overhead_s=0.0, token_s=0.0, pair_s=0.0)


class SleptClock:
    """Time that passes only by sleeping, and a little with every look at it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += 1e-6
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    model = write_paced_model(tmp_path_factory.mktemp("paced"), overhead_s=1.0, token_s=0.5, pair_s=0.25)
    return ModelConfig(name=str(model.directory), load_format="paced", profile=str(model.profile), dtype="bfloat16")


@pytest.fixture(scope="module")
def described(config: ModelConfig) -> DescribedModel:
    return describe_model(config, KvConfig(block_tokens=PAGE_TOKENS, layer_group=LAYER_GROUP))


def specs(num_stages: int) -> list[StageSpec]:
    return split_layers(NUM_LAYERS, num_stages, layer_group=LAYER_GROUP)


def paced(
    described: DescribedModel, spec: StageSpec, pace: StepModel = NO_TIME, clock: SleptClock | None = None
) -> PacedRunner:
    kv = PagedKVCache(described.layout, spec, num_pages=NUM_PAGES, arena=None)
    clock = clock or SleptClock()
    return PacedRunner(described.info, spec, layout=described.layout, kv=kv, pace=pace, clock=clock, sleep=clock.sleep)


def segment(start: int, num_tokens: int, pages: list[int], *, wants_logits: bool = False) -> Segment:
    return Segment(start=start, num_tokens=num_tokens, pages=pages, wants_logits=wants_logits)


def ids(num_tokens: int) -> Tensor:
    return torch.zeros(num_tokens, dtype=torch.int64)


def test_step_takes_the_time_of_its_shape_and_groups_are_told_of_in_proportion(described: DescribedModel) -> None:
    clock = SleptClock()
    runner = paced(described, specs(1)[0], PACE, clock)
    told: list[tuple[int, float]] = []
    segments = [segment(0, 20, [3, 5]), segment(16, 4, [1, 7])]
    hidden = runner.forward(
        segments, token_ids_T=ids(24), on_layer_group=lambda group_idx: told.append((group_idx, clock.now()))
    )
    step_s = PACE.time_s(StepShape.of_chunk(20, 0) + StepShape.of_chunk(4, 16))
    assert step_s == 1.0 + 24 * 0.25 + (20 * 10 + 4 * 18) * 0.125
    assert [group_idx for group_idx, _ in told] == [0, 1, 2, 3]
    assert [moment_s for _, moment_s in told] == pytest.approx([step_s * n / 4 for n in (1, 2, 3, 4)], abs=1e-3)
    assert clock.now() == pytest.approx(step_s, abs=1e-4)
    assert hidden.shape == (0, VOCAB_SIZE)


def test_what_a_step_waits_for_kv_comes_on_top_of_its_time(described: DescribedModel) -> None:
    clock = SleptClock()
    runner = paced(described, specs(1)[0], PACE, clock)
    waits_s = {0: 0.0, 1: 3.0, 2: 0.0, 3: 5.0}
    began: list[tuple[int, float]] = []

    def wait(group_idx: int) -> tuple[()]:
        began.append((group_idx, clock.now()))
        clock.sleep(waits_s[group_idx])
        return ()

    runner.forward([segment(0, 20, [3, 5])], token_ids_T=ids(20), before_layer_group=wait)
    step_s = PACE.time_s(StepShape.of_chunk(20, 0))
    assert [group_idx for group_idx, _ in began] == [0, 1, 2, 3]
    quarter_s = step_s / 4
    expected = [0.0, quarter_s, 3 + 2 * quarter_s, 3 + 3 * quarter_s]
    assert [moment_s for _, moment_s in began] == pytest.approx(expected, abs=1e-3)
    assert clock.now() == pytest.approx(step_s + 8.0, abs=1e-3)


def test_segment_whose_kv_is_late_writes_nothing_from_that_group_on(described: DescribedModel) -> None:
    runner = paced(described, specs(1)[0])
    segments = [segment(0, 20, [3, 5]), segment(16, 1, [1, 7]), segment(4, 1, [2])]
    runner.forward(segments, token_ids_T=ids(22), before_layer_group=lambda group_idx: {1} if group_idx >= 2 else ())
    for layer in range(NUM_LAYERS):
        is_written = [bool(runner.kv.layer(layer)[page].any()) for page in (3, 5, 7, 2)]
        assert is_written == [True, True, layer < 2 * LAYER_GROUP, True]


def test_a_sleep_on_the_real_clock_is_never_short(described: DescribedModel) -> None:
    kv = PagedKVCache(described.layout, specs(1)[0], num_pages=NUM_PAGES, arena=None)
    pace = StepModel(overhead_s=0.02, token_s=0.0, pair_s=0.0)
    runner = PacedRunner(described.info, specs(1)[0], layout=described.layout, kv=kv, pace=pace)
    started_s = MonotonicClock().now()
    runner.forward([segment(0, 1, [0])], token_ids_T=ids(1))
    assert MonotonicClock().now() - started_s >= 0.02


@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_position_of_every_layer_has_its_own_kv_and_nothing_else_is_written(
    described: DescribedModel, num_stages: int
) -> None:
    pages, num_tokens = [9, 2, 4], 40
    for spec in specs(num_stages):
        runner = paced(described, spec)
        for start in (0, 24):
            count = min(24, num_tokens - start)
            given = {"token_ids_T": ids(count)} if spec.is_first_stage else {"hidden_TD": torch.zeros(count, 16)}
            runner.forward([segment(start, count, pages)], **given)
        for local_idx in range(spec.num_local_layers):
            layer = runner.kv.layer(local_idx)
            rows = layer[pages].permute(0, 3, 1, 2, 4).reshape(-1, 2, 1, HEAD_DIM)
            expected = paced_kv(spec.start_layer + local_idx, torch.arange(num_tokens), head_dim=HEAD_DIM)
            assert torch.equal(rows[:num_tokens], expected[:, None, None].expand(-1, 2, 1, -1).to(layer.dtype))
            assert not rows[num_tokens:].any()
            assert not layer[[page for page in range(NUM_PAGES) if page not in pages]].any()


def test_made_up_kv_differs_by_position_and_by_layer_and_fits_bfloat16() -> None:
    positions = torch.tensor([0, 1, 255, 256, 65_536, 999_999, 1_048_575])
    rows = torch.cat([paced_kv(layer_idx, positions, head_dim=HEAD_DIM) for layer_idx in range(NUM_LAYERS)])
    assert len(rows.unique(dim=0)) == NUM_LAYERS * len(positions)
    assert torch.equal(rows.to(torch.bfloat16).long(), rows)


def test_tokens_follow_the_position_and_the_segments_that_want_them(described: DescribedModel) -> None:
    runner = paced(described, specs(1)[0])
    segments = [segment(0, 5, [0], wants_logits=True), segment(0, 7, [1]), segment(30, 3, [2, 3, 4], wants_logits=True)]
    logits = runner.forward(segments, token_ids_T=ids(15))
    assert logits.dtype == torch.float32
    assert logits.argmax(dim=1).tolist() == [paced_token(5, described.info), paced_token(33, described.info)]


def test_tokens_of_all_positions_are_all_ids_but_those_that_end_an_answer(described: DescribedModel) -> None:
    assert described.info.eos_token_ids == (2,)
    tokens = [paced_token(position, described.info) for position in range(VOCAB_SIZE - 1)]
    assert tokens == [idx for idx in range(VOCAB_SIZE) if idx != 2]
    assert paced_token(VOCAB_SIZE - 1, described.info) == 0


def test_a_stage_that_is_not_the_last_returns_hidden_states(described: DescribedModel) -> None:
    hidden = paced(described, specs(2)[0]).forward([segment(0, 5, [0])], token_ids_T=ids(5))
    assert (hidden.shape, hidden.dtype) == ((5, described.info.hidden_size), torch.bfloat16)


def test_block_table_that_is_too_short_writes_nothing(described: DescribedModel) -> None:
    runner = paced(described, specs(1)[0])
    with pytest.raises(OutOfPages, match="does not reach position 16"):
        runner.forward([segment(0, 4, [1]), segment(0, 17, [0])], token_ids_T=ids(21))
    assert not any(runner.kv.layer(idx).any() for idx in range(NUM_LAYERS))


def test_profile_is_shared_out_by_layers_and_speeds() -> None:
    profile = PacedProfile(overhead_s=1.0, token_s=0.8, pair_s=0.4, knee_tokens=7, stage_speed=(1.0, 1.0, 0.5))
    stages = [profile.stage_model(spec) for spec in specs(3)]
    assert [spec.num_local_layers for spec in specs(3)] == [4, 2, 2]
    assert [stage.token_s for stage in stages] == pytest.approx([0.4, 0.2, 0.4])
    assert [stage.pair_s for stage in stages] == pytest.approx([0.2, 0.1, 0.2])
    assert {(stage.overhead_s, stage.knee_tokens) for stage in stages} == {(1.0, 7)}
    with pytest.raises(ConfigError, match="for 3 stages and the group has 2; give one speed per stage"):
        profile.stage_model(specs(2)[0])


def test_decode_steps_have_a_time_of_their_own_or_the_token_part_of_the_batch() -> None:
    shape = StepShape.of_chunk(1, 1000) + StepShape.of_chunk(1, 2000)
    profile = {"overhead_s": 1.0, "token_s": 0.5, "pair_s": 0.25}
    assert PacedProfile(**profile).decode_model().time_s(shape) == 2.0
    decode = PacedProfile(**profile, decode_step_s=2.25).decode_model()
    assert decode.time_s(shape) == 2.25
    assert decode.time_s(shape + StepShape.of_chunk(2, 0)) == 2.25, "prompt tokens have room in a step of few requests"
    assert decode.time_s(shape + StepShape.of_chunk(8, 0)) == 5.25


def test_load_runner_knows_the_pace_of_stage_and_decode_without_measuring(
    config: ModelConfig, described: DescribedModel
) -> None:
    spec = specs(2)[0]
    for is_decode, pair_s in ((False, 0.125), (True, 0.0)):
        arena = memoryview(bytearray(PagedKVCache.arena_bytes(described.layout, spec, NUM_PAGES)))
        runner = load_runner(config, described, spec, num_pages=NUM_PAGES, arena=arena, is_decode=is_decode)
        assert runner.step_model is not None
        assert runner.step_model.pair_s == pair_s
    assert StageRunner.step_model is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is no readable JSON file"),
        ("[1]", "holds no JSON object; write one with overhead_s"),
        ({"overhead_s": 1, "token_s": 1}, "missing setting pair_s"),
        ({"overhead_s": 1, "token_s": 1, "pair_s": 1, "knee": 3}, "unknown setting 'knee'; did you mean knee_tokens"),
        ({"overhead_s": -1, "token_s": 1, "pair_s": 1}, "overhead_s=-1.0 is below 0"),
        ({"overhead_s": 1, "token_s": 1, "pair_s": 1, "decode_step_s": -2}, "decode_step_s=-2.0 is below 0"),
        ({"overhead_s": 1, "token_s": 1, "pair_s": 1, "stage_speed": [1, 0]}, "must hold numbers above 0"),
    ],
)
def test_profile_that_is_wrong_is_refused_by_file_and_reason(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=message) as caught:
        PacedProfile.read(path)
    assert str(path) in str(caught.value)


def test_profile_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"model.profile=nowhere/profile.json is no readable JSON file"):
        PacedProfile.read(Path("nowhere/profile.json"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_format": "paced"}, "paced needs a profile"),
        ({"profile": "p.json"}, "nothing else takes one"),
        ({"load_format": "paced", "profile": "p.json", "device": "cuda"}, "set model.device=cpu"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)


def test_paced_kv_never_meets_kv_of_weights(described: DescribedModel, config: ModelConfig) -> None:
    dummy = ModelConfig(name=config.name, load_format="dummy", dtype="bfloat16")
    other: ModelInfo = describe_model(dummy, KvConfig(block_tokens=PAGE_TOKENS, layer_group=LAYER_GROUP)).info
    assert other.fingerprint != described.info.fingerprint
