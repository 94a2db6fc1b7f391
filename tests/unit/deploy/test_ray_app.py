from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import yaml

from deploy.local import start_error
from deploy.ray_app import EXIT_CONFIG_ERROR, NodeActor, check_gpus, current_pid, main, run_module
from moontide.errors import ConfigError
from moontide.roles import Successor


def service(package: Path, program: str) -> None:
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(program)


def test_module_runs_in_this_process_and_gives_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    report = tmp_path / "argv.json"
    service(
        tmp_path / "some_service",
        "import json, pathlib, sys\n"
        "def main(argv):\n"
        f"    pathlib.Path({str(report)!r}).write_text(json.dumps(argv))\n"
        "    sys.exit(2)\n",
    )
    assert run_module("some_service", ["--config", "x"]) == 2
    assert json.loads(report.read_text()) == ["--config", "x"]
    service(tmp_path / "broken_service", "raise RuntimeError('no')\n")
    assert run_module("broken_service", []) == 1


def test_actor_goes_on_in_the_role_that_it_has(tmp_path: Path) -> None:
    """Whatever process it is: it is found beside the config that it was deployed with, until it is at home again."""
    actor = NodeActor.__new__(NodeActor)
    deployed = tmp_path / "decode-1.yaml"
    actor._spec = {"module": "decode_node", "config_path": str(deployed)}
    assert actor._program() == ("decode_node", deployed)
    settings = {"node": {"node_id": "decode-1.prefill"}, "home": {"role": "decode", "settings": {}}}
    actor._keep(Successor(role="prefill", settings=settings))
    module, path = actor._program()
    assert module == "prefill_node"
    assert yaml.safe_load(path.read_text()) == settings
    actor._keep(Successor(role="decode", settings={"node": {"node_id": "decode-1"}}))
    assert actor._program() == ("decode_node", deployed)


def test_last_start_is_the_current_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    assert current_pid(path) is None
    path.write_text("12\n34\n")
    assert current_pid(path) == 34


class ProcessEnded(BaseException):
    pass


def test_wrong_setting_ends_a_node_at_its_first_start_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is taken while a node restarts must not take the cluster down."""

    def end(_code: int) -> None:
        raise ProcessEnded

    slept: list[float] = []
    monkeypatch.setattr("deploy.ray_app.run_module", lambda *_: EXIT_CONFIG_ERROR)
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("time.sleep", slept.append)
    pid_path = tmp_path / "pid"
    actor = NodeActor.__new__(NodeActor)
    actor._spec = {"module": "m", "config_path": str(tmp_path / "m.yaml"), "pid_path": str(pid_path)}
    pid_path.write_text("12\n")
    assert actor.run() == EXIT_CONFIG_ERROR
    pid_path.write_text("12\n34\n")
    with pytest.raises(ProcessEnded):
        actor.run()
    assert len(slept) == 1


def test_too_few_gpus_are_refused_with_the_way_out() -> None:
    specs = [{"num_gpus": 1}, {"num_gpus": 1}, {"num_gpus": 0}]
    check_gpus(specs, num_present=2)
    with pytest.raises(ConfigError, match=r"need 2 GPUs, one each, and Ray sees 1; .*--launcher process"):
        check_gpus(specs, num_present=1)


def test_driver_without_gpus_ends_at_once_and_logs_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("deploy.ray_app.setup_logging", lambda _role: None)
    monkeypatch.setattr("ray.init", lambda **_options: calls.append("init"))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr("ray.shutdown", lambda: calls.append("shutdown"))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"ray_dir": str(tmp_path), "actors": [{"num_gpus": 1}]}))
    with caplog.at_level(logging.ERROR):
        assert main([str(plan)]) == EXIT_CONFIG_ERROR
    assert calls == ["init", "shutdown"]
    assert "need 1 GPUs, one each, and Ray sees 0" in str(start_error(caplog.messages[-1]))
