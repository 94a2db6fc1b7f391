from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.config import load_cluster_config
from deploy.ports import PortPicker, check_fixed_ports
from deploy.rundir import LONGEST_PATH, RunDir
from moontide.config import FREE_PORTS
from moontide.errors import ConfigError


@pytest.fixture
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("deploy.rundir.LONGEST_PATH", 1000)
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_directories_of_dead_clusters_are_removed_and_living_ones_are_not(temp_root: Path) -> None:
    dead, living = temp_root / "moontide-dead", RunDir()
    dead.mkdir()
    (dead / "owner.lock").touch()
    foreign = temp_root / "moontide-without-lock"
    foreign.mkdir()
    mine = RunDir()
    assert not dead.exists()
    assert living.path.exists()
    assert foreign.exists()
    for run_dir in (mine, living):
        run_dir.close(keep=False)
        assert not run_dir.path.exists()


def test_chosen_directory_is_kept_and_belongs_to_one_cluster_at_a_time(temp_root: Path) -> None:
    path = temp_root / "mine"
    run_dir = RunDir(str(path))
    with pytest.raises(ConfigError, match="in use by another cluster"):
        RunDir(str(path))
    run_dir.log_path("a").write_text("line")
    run_dir.pid_path("a").write_text("1\n")
    run_dir.close(keep=False)
    again = RunDir(str(path))
    assert again.log_path("a").read_text() == "line"
    assert not again.pid_path("a").exists()
    again.close(keep=False)


def test_log_of_an_earlier_run_says_nothing_about_this_one(temp_root: Path) -> None:
    path = temp_root / "mine"
    run_dir = RunDir(str(path))
    run_dir.log_path("a").write_text("cannot start: taken\n")
    run_dir.close(keep=True)
    again = RunDir(str(path))
    assert again.new_log("a") == again.new_log("b") == ""
    with again.log_path("a").open("a") as log:
        log.write("cannot start: broken\n")
    again.log_path("b").write_text("ready\n")
    assert (again.new_log("a"), again.new_log("b")) == ("cannot start: broken\n", "ready\n")
    again.close(keep=True)


def test_too_long_temporary_directory_is_refused_and_not_left_behind(
    temp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.rundir.LONGEST_PATH", 5)
    with pytest.raises(ConfigError, match="choose a shorter one"):
        RunDir()
    assert list(temp_root.iterdir()) == []


def test_too_long_and_unusable_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a shorter one"):
        RunDir("/tmp/" + "x" * LONGEST_PATH)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        RunDir(str(tmp_path / "file"))


def test_picked_ports_are_free_different_and_below_the_ephemeral_range() -> None:
    picker = PortPicker()
    ports = [picker() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(FREE_PORTS[0] <= port <= FREE_PORTS[-1] < 32_768 for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_port_in_use_is_named_with_its_option(taken_port: int) -> None:
    config = load_cluster_config(overrides=[f"deploy.http_port={taken_port}", "deploy.grpc_port=0"])
    with pytest.raises(ConfigError, match=rf"--http-port: port {taken_port} on 127.0.0.1: Address already in use"):
        check_fixed_ports(config)
