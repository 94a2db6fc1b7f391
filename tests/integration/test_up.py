"""`moontide up` as a user runs it: the ready line, errors in one line, restarts, drain, and nothing left, whatever ends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deploy.ports import PortPicker
from deploy.sessions import kill_sessions, session_members
from tests.cluster import wait_for
from tests.fakes.tiny_models import tiny_model_dir

MOONTIDE = (sys.executable, "-m", "deploy.cli")
START_TIMEOUT_S = 150.0
GONE_TIMEOUT_S = 10.0
SMALL = ("--set", "kvstore.pool_bytes=67108864", "--set", "prefill.num_pages=64", "--set", "decode.num_pages=64")


class Up:
    """A running `moontide up`."""

    def __init__(self, process: subprocess.Popen[str], out: Path, err: Path) -> None:
        self.process = process
        self._out, self._err = out, err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def grpc_address(self) -> str:
        return re.findall(r"gRPC (\S+?);", self.out)[0]

    @property
    def run_dir(self) -> Path:
        return Path(re.findall(r"logs in (\S+)/logs", self.err)[0])

    def wait_ready(self) -> None:
        wait_for(lambda: "ready:" in self.out or self.process.poll() is not None, "up is ready", START_TIMEOUT_S)
        assert self.process.poll() is None, self.err

    def wait_gone(self, sessions: Sequence[int], timeout_s: float = GONE_TIMEOUT_S) -> None:
        wait_for(lambda: session_members(sessions) == [], "no process is left", timeout_s)

    def sessions(self) -> list[int]:
        """Sessions of the processes that it started: each leads its own."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                _state, parent, _group, session = stat.read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(parent) == self.process.pid:
                found.append(int(session))
        return found

    def generate(self, prompt: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MOONTIDE, "generate", "--address", self.grpc_address, *options, prompt],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@contextmanager
def moontide_up(tmp_path: Path, *options: str) -> Iterator[Up]:
    number = len(list(tmp_path.glob("*.out")))
    out, err = tmp_path / f"{number}.out", tmp_path / f"{number}.err"
    with out.open("w") as out_file, err.open("w") as err_file:
        process = subprocess.Popen(
            [*MOONTIDE, "up", *SMALL, *options], stdout=out_file, stderr=err_file, text=True, start_new_session=True
        )
    up = Up(process, out, err)
    sessions: list[int] = []
    try:
        yield up
        sessions = up.sessions()
    finally:
        process.kill()
        process.wait()
        kill_sessions([process.pid, *sessions])
        print(up.err, file=sys.stderr)
        if match := re.findall(r"/tmp/moontide-\w+", up.err):
            shutil.rmtree(match[0], ignore_errors=True)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def ports() -> tuple[str, str, str, str]:
    picker = PortPicker()
    return "--http-port", str(picker()), "--grpc-port", str(picker())


def test_kill_leaves_nothing_the_next_up_works_on_the_same_ports_and_a_second_interrupt_stops_it_at_once(
    tmp_path: Path, tiny_model: Path, ports: tuple[str, ...]
) -> None:
    options = ("--launcher", "process", "--model", str(tiny_model), *ports)
    with moontide_up(tmp_path, *options) as up:
        up.wait_ready()
        assert up.out.count("\n") == 1
        assert f"http://127.0.0.1:{ports[1]}/v1" in up.out
        assert up.generate("hello", "--max-tokens", "4").returncode == 0
        (targets,) = re.findall(r"file_sd_configs: (\S+)", up.err)
        components = {group["labels"]["component"] for group in json.loads(Path(targets).read_text())}
        assert components == {"conductor", "prefill", "decode", "kvstore", "master"}

        second = subprocess.run(
            [*MOONTIDE, "up", "--model", str(tiny_model), *ports],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 2
        assert f"--http-port: port {ports[1]} on 127.0.0.1: Address already in use" in second.stderr
        assert "Traceback" not in second.stderr

        sessions, run_dir = up.sessions(), up.run_dir
        assert len(session_members(sessions)) >= 8
        up.process.kill()
        up.process.wait()
        up.wait_gone(sessions)

    with moontide_up(tmp_path, *options) as up:
        up.wait_ready()
        assert not run_dir.exists(), "what the killed cluster left is cleaned"
        assert up.generate("hello", "--max-tokens", "4").returncode == 0

        # A frozen conductor holds up the drain that the first interrupt asks for; the second one does not wait for it.
        sessions = up.sessions()
        for pid in session_members(sessions):
            if "-m conductor" in _command_line(pid):
                os.kill(pid, signal.SIGSTOP)
        up.process.send_signal(signal.SIGINT)
        wait_for(lambda: "stopping" in up.err, "the first interrupt is seen")
        assert session_members(sessions)
        up.process.send_signal(signal.SIGINT)
        up.process.wait(20)
        assert session_members(sessions) == []


def test_ray_places_the_nodes_and_starts_a_killed_stage_again(tmp_path: Path, tiny_model: Path) -> None:
    with moontide_up(tmp_path, "--model", str(tiny_model), "--http-port", "0", "--grpc-port", "0") as up:
        up.wait_ready()
        before = up.generate("hello there", "--max-tokens", "8", "--ignore-eos")
        assert before.returncode == 0, before.stderr
        stage = up.run_dir / "pids" / "prefill-0-stage-1"
        (first,) = map(int, stage.read_text().split())
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(stage.read_text().split()) == 2, "Ray starts the stage again")
        wait_for(lambda: "prefill-0-stage-1 died and starts again" in up.err, "it is told")
        status = [*MOONTIDE, "status", "--address", up.grpc_address]
        wait_for(
            lambda: subprocess.run(status, capture_output=True, timeout=30, check=False).returncode == 0,
            "the cluster is ready again",
        )
        after = up.generate("hello there", "--max-tokens", "8", "--ignore-eos")
        assert after.returncode == 0, after.stderr
        assert after.stdout == before.stdout

        sessions = up.sessions()
        assert len(session_members(sessions)) >= 12
        up.process.kill()
        up.process.wait()
        up.wait_gone(sessions)


def test_timings_and_timeline_of_a_request_and_an_interrupt_that_lets_open_requests_finish(
    tmp_path: Path, tiny_model: Path
) -> None:
    with moontide_up(
        tmp_path, "--launcher", "process", "--model", str(tiny_model), "--chunk-tokens", "64",
        "--http-port", "0", "--grpc-port", "0", "--set", "conductor.local_prefill=false",
    ) as up:  # fmt: skip
        up.wait_ready()
        prompt = tmp_path / "prompt.txt"
        prompt.write_text("a long story " * 30)
        answered = subprocess.run(
            [*MOONTIDE, "generate", "--address", up.grpc_address, "--prompt-file", str(prompt), "--timings", "--max-tokens", "4"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        total_ms, measured_ms = (float(re.findall(rf"{word} +([0-9.]+)", answered)[0]) for word in ("sum", "measured"))
        assert 0 < total_ms <= measured_ms
        request_id = re.findall(r"^request (\S+):", answered, flags=re.MULTILINE)[0]
        trace = tmp_path / "trace.json"
        shown = subprocess.run(
            [*MOONTIDE, "timeline", request_id, "--address", up.grpc_address, "--out", str(trace)],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        assert re.search(r"^stage 0 +.*█", shown, flags=re.MULTILINE)
        assert re.search(r"^stage 1 +.*█", shown, flags=re.MULTILINE)
        tracks = {event["cat"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
        assert {"stage 0", "stage 1"} <= tracks

        unknown = subprocess.run(
            [*MOONTIDE, "timeline", "nobody", "--address", up.grpc_address],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert unknown.returncode == 1
        assert "does not know request 'nobody'" in unknown.stderr

        sessions, run_dir = up.sessions(), up.run_dir
        client = subprocess.Popen(
            [*MOONTIDE, "generate", "--address", up.grpc_address, "--max-tokens", "200", "--ignore-eos", "--timings", "hello"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with client:
            assert client.stdout is not None
            client.stdout.read(1)
            up.process.send_signal(signal.SIGINT)
            rest, errors = client.communicate(timeout=60)
        assert client.returncode == 0, errors
        assert "200 tokens answered" in rest
        assert up.process.wait(60) == 0
        assert session_members(sessions) == []
        assert not run_dir.exists()


def test_directory_without_weights_is_refused_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with moontide_up(tmp_path, "--model", str(bare), "--http-port", "0", "--grpc-port", "0") as up:
        assert up.process.wait(60) == 2
        assert str(bare) in up.err
        assert "safetensors" in up.err
        assert "Traceback" not in up.err
        assert "starting" not in up.err


def test_more_stages_than_the_model_has_layer_groups_are_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    with moontide_up(tmp_path, "--model", str(tiny_model), "--stages", "40") as up:
        assert up.process.wait(60) == 2
        assert "40" in up.err
        assert "Traceback" not in up.err
        assert "starting" not in up.err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which a node cannot run on CUDA")
@pytest.mark.parametrize("launcher", ["process", "ray"])
def test_node_that_cannot_start_ends_up_with_its_name_and_log(tmp_path: Path, tiny_model: Path, launcher: str) -> None:
    with moontide_up(
        tmp_path, "--launcher", launcher, "--model", str(tiny_model), "--dtype", "float32", "--stages", "1",
        "--set", "model.device=cuda", "--http-port", "0", "--grpc-port", "0",
    ) as up:  # fmt: skip
        wait_for(lambda: "starting" in up.err, "processes start", 60)
        wait_for(lambda: len(up.sessions()) >= 4, "some run", 60)
        sessions = up.sessions()
        assert up.process.wait(START_TIMEOUT_S) == 1
        assert "ready:" not in up.out
        assert re.search(r"(prefill-0-stage-0|decode-0).* died", up.err)
        assert "the logs are in" in up.err
        assert session_members(sessions) == []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
