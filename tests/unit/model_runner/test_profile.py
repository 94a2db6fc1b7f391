"""What is measured of a stage before it serves, and what is kept of it on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paced_models import write_paced_model
from kvstore.access import KvConfig
from kvstore.layout import KVLayout
from model_runner.config import ModelConfig
from model_runner.kv_cache import PagedKVCache
from model_runner.model_source import ModelSource, describe_model
from model_runner.paced import PacedRunner
from model_runner.profile import BUDGET_S, _read, _write, measure, measured_model
from model_runner.runner import StageRunner
from model_runner.stage import split_layers
from moontide.perf_model import StepModel, StepSample, StepShape, fit
from tests.fakes.tiny_models import tiny_model_dir
from tests.unit.model_runner.stages import PAGE_TOKENS, make_layout
from tests.unit.model_runner.test_devices import DEVICES
from tests.unit.model_runner.test_paced import SleptClock

NUM_PAGES = 12
ABOUT = {"host": "here"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture(scope="module")
def model_dir(tiny_root: Path) -> Path:
    return tiny_model_dir("llama", tiny_root)


def load(
    model_dir: Path, stage_idx: int = 0, *, num_stages: int = 3, device: str = "cpu"
) -> tuple[StageRunner, KVLayout]:
    source = ModelSource(path=model_dir, model_id=model_dir.name)
    layout = make_layout(source)
    spec = split_layers(layout.num_layers, num_stages, layer_group=1)[stage_idx]
    runner = StageRunner.load(source, spec, dtype="float32", layout=layout, num_pages=NUM_PAGES, device=device)
    return runner, layout


def paced(root: Path, pace: StepModel, clock: SleptClock, *, num_pages: int, max_context: int) -> PacedRunner:
    model = write_paced_model(root, max_context=max_context)
    config = ModelConfig(name=str(model.directory), load_format="paced", profile="-", dtype="bfloat16")
    described = describe_model(config, KvConfig(block_tokens=PAGE_TOKENS, layer_group=1))
    spec = split_layers(described.info.num_layers, 2, layer_group=1)[1]
    kv = PagedKVCache(described.layout, spec, num_pages=num_pages, arena=None)
    return PacedRunner(described.info, spec, layout=described.layout, kv=kv, pace=pace, clock=clock, sleep=clock.sleep)


def sizes(samples: list[StepSample]) -> tuple[int, int]:
    """The longest chunk, and the last position of the longest prefix that came before one."""
    return max(each.shape.tokens for each in samples), max(round(last_position(each.shape)) for each in samples)


def last_position(shape: StepShape) -> float:
    return shape.pairs / shape.tokens + shape.tokens / 2


def counting(runner: StageRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward from now on."""
    tokens: list[int] = []
    forward: Callable[..., Any] = runner.forward

    def counted(segments: Any, **given: Any) -> Any:
        tokens.append(segments[0].num_tokens)
        return forward(segments, **given)

    monkeypatch.setattr(runner, "forward", counted)
    return tokens


@pytest.mark.parametrize("knee_tokens", [0, 128])
def test_fit_of_the_samples_is_the_pace_of_the_stage(knee_tokens: int, tmp_path: Path) -> None:
    clock = SleptClock()
    pace = StepModel(overhead_s=2e-3, token_s=2e-5, pair_s=3e-9, knee_tokens=knee_tokens)
    runner = paced(tmp_path, pace, clock, num_pages=4096, max_context=32768)
    samples = measure(runner, chunk_tokens=2048, clock=clock)
    assert sizes(samples) == (2048, 32768)
    found = fit(samples)
    for tokens, prefix in ((64, 0), (700, 0), (2048, 0), (700, 9000), (100, 30000)):
        shape = StepShape.of_chunk(tokens, prefix)
        assert found.time_s(shape) == pytest.approx(pace.time_s(shape), rel=0.02)


@pytest.mark.parametrize("overhead_s", [0.0, 0.5])
def test_slow_stage_is_measured_at_few_small_shapes_in_about_the_budget(overhead_s: float, tmp_path: Path) -> None:
    clock = SleptClock()
    pace = StepModel(overhead_s=overhead_s, token_s=1.5e-3, pair_s=1e-6)
    runner = paced(tmp_path, pace, clock, num_pages=4096, max_context=32768)
    samples = measure(runner, chunk_tokens=2048, clock=clock)
    assert len(samples) >= 2
    assert sizes(samples)[0] <= 64
    assert clock.now() < 1.5 * BUDGET_S


@pytest.mark.parametrize(
    ("num_pages", "max_context", "chunk_tokens", "expected"),
    [
        (4096, 4096, 512, (512, 4096)),
        (20, 4096, 64, (64, 20 * PAGE_TOKENS)),
        (4, 4096, 2048, (4 * PAGE_TOKENS, 4 * PAGE_TOKENS)),
        (1, 5, 2048, (5, 5)),
    ],
)
def test_no_step_goes_beyond_chunk_pages_or_context(
    num_pages: int, max_context: int, chunk_tokens: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    clock = SleptClock()
    pace = StepModel(overhead_s=1e-4, token_s=1e-7, pair_s=1e-12)
    runner = paced(tmp_path, pace, clock, num_pages=num_pages, max_context=max_context)
    assert sizes(measure(runner, chunk_tokens=chunk_tokens, clock=clock)) == expected


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_stage_measures_itself_and_leaves_its_pages_empty(device: str, family: str, tiny_root: Path) -> None:
    for stage_idx in range(3):
        runner, _ = load(tiny_model_dir(family, tiny_root), stage_idx, device=device)
        samples = measure(runner, chunk_tokens=64, budget_s=0.2)
        assert all(each.time_s > 0 for each in samples)
        assert len({each.shape for each in samples}) == len(samples) >= 2
        assert not any(runner.kv.layer(idx).any() for idx in range(runner.spec.num_local_layers))


def test_first_run_of_a_shape_is_left_out(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = load(model_dir)
    clock = SleptClock()
    seen: set[tuple[int, int]] = set()

    def forward(segments: Any, **_: Any) -> torch.Tensor:
        shape = (segments[0].start, segments[0].num_tokens)
        clock.sleep(1e-3 if shape in seen else 10.0)
        seen.add(shape)
        return torch.empty(0)

    monkeypatch.setattr(runner, "forward", forward)
    assert max(each.time_s for each in measure(runner, chunk_tokens=64, clock=clock)) < 2e-3


def test_pages_are_emptied_when_a_forward_fails(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = load(model_dir)
    forward: Callable[..., Any] = runner.forward

    def failing(segments: Any, **given: Any) -> Any:
        forward(segments, **given)
        raise RuntimeError("no memory left")

    monkeypatch.setattr(runner, "forward", failing)
    with pytest.raises(RuntimeError, match="no memory left"):
        measure(runner, chunk_tokens=64)
    assert not runner.kv.layer(0).any()


class Host:
    """Starts stages of one model again and again; `cpu` tells how busy the CPU is with other things."""

    def __init__(self, runner: StageRunner, layout: KVLayout) -> None:
        self.runner = runner
        self.layout = layout
        self.cpu_s = 0.0
        self.is_cpu_ours = True

    def cpu_time(self) -> float:
        self.cpu_s += 1000.0 * self.is_cpu_ours
        return self.cpu_s

    def model(self, *, chunk_tokens: int = 32, **settings: Any) -> StepModel:
        return measured_model(
            self.runner,
            ModelConfig(**settings),
            self.layout,
            chunk_tokens=chunk_tokens,
            budget_s=0.05,
            cpu_time=self.cpu_time,
        )


def test_second_start_measures_nothing(model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(*load(model_dir))
    forwards = counting(host.runner, monkeypatch)
    first = host.model()
    assert forwards
    forwards.clear()
    assert host.model() == first
    assert not forwards
    assert len(list(cache.iterdir())) == 1


def test_other_stage_settings_or_host_are_measured_anew(
    model_dir: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(*load(model_dir)).model()
    Host(*load(model_dir, 1)).model()
    Host(*load(model_dir, 0, num_stages=2)).model()
    Host(*load(model_dir)).model(threads=2)
    Host(*load(model_dir)).model(kernels="torch")
    Host(*load(model_dir)).model(chunk_tokens=64)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    Host(*load(model_dir)).model()
    assert len(list(cache.iterdir())) == 7


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"samples": 3}', '{"samples": []}', '{"samples": [[16, 128.0, -1]]}', '{"samples": [[16, 128.0]]}', "\0"],
)  # fmt: skip
def test_unreadable_file_is_measured_again_and_replaced(content: str, model_dir: Path, cache: Path) -> None:
    host = Host(*load(model_dir))
    host.model()
    (file,) = cache.iterdir()
    file.write_text(content)
    found = host.model()
    assert host.model() == found
    assert list(cache.iterdir()) == [file]


def test_times_of_a_busy_cpu_are_not_kept(model_dir: Path, cache: Path) -> None:
    host = Host(*load(model_dir))
    host.is_cpu_ours = False
    host.model()
    assert not cache.exists()
    host.is_cpu_ours = True
    host.model()
    assert len(list(cache.iterdir())) == 1


def test_cache_folder_that_cannot_be_written_costs_only_the_cache(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path / "file"))
    assert Host(*load(model_dir)).model().time_s(StepShape.of_chunk(32, 0)) > 0
    assert "step times are not kept" in caplog.text


def test_who_reads_while_others_write_gets_the_samples_of_one_of_them(tmp_path: Path) -> None:
    file = tmp_path / "profiles" / "x.json"
    written = [[StepSample(StepShape(tokens, 8.0), 1e-3 * tokens)] * 500 for tokens in (1, 2)]
    _write(file, ABOUT, written[0])
    writers = [
        threading.Thread(target=lambda samples=samples: [_write(file, ABOUT, samples) for _ in range(20)])
        for samples in written
    ]
    for writer in writers:
        writer.start()
    reads = [_read(file)]
    while any(writer.is_alive() for writer in writers):
        reads.append(_read(file))
    assert all(samples in written for samples in reads)
    assert list(file.parent.iterdir()) == [file]
