"""The kernels are compiled once, and where they cannot be, torch computes or the reason is named."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_runner.config import ModelConfig
from model_runner.native import build, kernels
from model_runner.native.build import build_library
from model_runner.native.kernels import load_kernels
from moontide import native_build
from moontide.errors import ConfigError
from moontide.native_build import BuildFailed

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on PATH")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for the kernels: compiles in a moment, on any machine."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "FLAGS", ())
    return source


@pytest.fixture
def able_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_cpu_flags", lambda: sorted(kernels._CPU_FLAGS))


@needs_compiler
@pytest.mark.usefixtures("small_source")
def test_processes_that_ask_at_once_compile_once(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    compiled: list[Path] = []
    compile_now = native_build._compile

    def counting(command: Sequence[str], source: Path, library: Path) -> None:
        compiled.append(library)
        compile_now(command, source, library)

    monkeypatch.setattr(native_build, "_compile", counting)
    with ThreadPoolExecutor(3) as threads:
        libraries = {future.result() for future in [threads.submit(build_library) for _ in range(3)]}
    assert len(compiled) == 1
    assert libraries == set(compiled)
    assert sorted(file.suffix for file in (own_cache / "native").iterdir()) == [".lock", ".so"]


@needs_compiler
def test_edited_source_makes_another_library(small_source: Path) -> None:
    before = build_library()
    small_source.write_text('extern "C" int answer() { return 43; }\n')
    assert build_library() != before


@needs_compiler
def test_shipped_library_needs_no_compiler_until_its_source_changes(
    monkeypatch: pytest.MonkeyPatch, small_source: Path
) -> None:
    shipped = native_build.ship_library(small_source)
    with monkeypatch.context() as without:
        without.setattr(shutil, "which", lambda _: None)
        assert build_library() == shipped
        assert shipped.parent == small_source.parent
        small_source.write_text('extern "C" int answer() { return 43; }\n')
        with pytest.raises(BuildFailed, match=r"there is no g\+\+"):
            build_library()
    assert build_library() != shipped


@needs_compiler
@pytest.mark.usefixtures("able_cpu")
def test_source_that_does_not_compile_is_named_or_left_to_torch(small_source: Path) -> None:
    small_source.write_text("int answer() { return nothing; }\n")
    with pytest.raises(BuildFailed, match="nothing"):
        build_library()
    assert load_kernels("auto", dtype="bfloat16", device="cpu") is None
    with pytest.raises(ConfigError, match=r"g\+\+ failed.*set model.kernels=auto or torch"):
        load_kernels("native", dtype="bfloat16", device="cpu")


@pytest.mark.usefixtures("able_cpu")
def test_without_a_compiler_torch_computes_or_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert load_kernels("auto", dtype="bfloat16", device="cpu") is None
    with pytest.raises(ConfigError, match=r"there is no g\+\+ on PATH"):
        load_kernels("native", dtype="bfloat16", device="cpu")


@needs_compiler
@pytest.mark.usefixtures("able_cpu")
def test_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, small_source: Path) -> None:
    monkeypatch.setenv("MOONTIDE_CACHE", str(small_source))
    with pytest.raises(ConfigError, match="is not writable"):
        load_kernels("native", dtype="bfloat16", device="cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        ("bfloat16", "cpu", "the CPU has no avx512_bf16"),
        ("float32", "cpu", "dtype is float32"),
        ("bfloat16", "cuda", "device cuda is no CPU"),
    ],
)
def test_what_does_not_fit_is_left_to_torch_or_named(
    dtype: str, device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_cpu_flags", lambda: sorted(kernels._CPU_FLAGS - {"avx512_bf16"}))
    assert load_kernels("auto", dtype=dtype, device=device) is None
    assert load_kernels("torch", dtype=dtype, device=device) is None
    with pytest.raises(ConfigError, match=reason):
        load_kernels("native", dtype=dtype, device=device)


def test_setting_knows_its_values() -> None:
    assert ModelConfig().kernels == "auto"
    with pytest.raises(ConfigError, match=r"model\.kernels='fast' is unknown; choose one of auto, native, torch"):
        ModelConfig(kernels="fast")
