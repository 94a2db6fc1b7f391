"""What a sandbox gives to a program, and that it mounts nothing where all programs see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.docker import sandbox
from deploy.docker.sandbox import Container, Sandbox


def test_nobody_mounts_in_the_namespace_of_all() -> None:
    assert not sandbox.is_inside(["--only", "host"])
    with pytest.raises(RuntimeError, match="mounts of its own"):
        sandbox.is_inside([sandbox.INSIDE, "/tmp/x"])


def test_directory_with_mounts_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    kept = tmp_path / "kept"
    kept.touch()

    def with_mount(path: Path) -> str:
        return f"36 35 98:0 / {tmp_path}/usr ro - ext4 /dev/vda ro\n" if path.name == "mountinfo" else read_text(path)

    monkeypatch.setattr(Path, "read_text", with_mount)
    with pytest.raises(RuntimeError, match="something is mounted"):
        sandbox.remove(tmp_path)
    assert kept.exists()
    monkeypatch.undo()
    sandbox.remove(tmp_path)
    assert not tmp_path.exists()


def test_program_is_confined_and_sees_the_mounts_of_its_container(tmp_path: Path) -> None:
    root = Sandbox(root=tmp_path, env={"PATH": "/bin", "A": "image"})
    mounts = [(Path("/my config"), "/etc/moontide", True), (Path("/volume"), "/var/cache/moontide", False)]
    argv = root._argv(["true"], Container(env={"A": "container"}, mounts=mounts, tmpfs=("/tmp",), user="999:1000"))
    script = argv[argv.index("-ec") + 1].splitlines()
    assert script == [
        f"mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs {tmp_path}/tmp",
        f"mount --bind '/my config' {tmp_path}/etc/moontide",
        f"mount -o remount,ro,bind {tmp_path}/etc/moontide",
        f"mount --bind /volume {tmp_path}/var/cache/moontide",
        'exec "$@"',
    ]
    assert {"--reuid=999", "--regid=1000", "--bounding-set=-all", "--no-new-privs", "--clear-groups"} <= set(argv)
    assert "A=container" in argv
    assert "A=image" not in argv
    assert argv[-1] == "true"


def test_build_sees_how_packages_are_reached_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} /no/such/folder")
    monkeypatch.setenv("SOME_PASSWORD", "secret")
    assert sandbox.build_environment()["PIP_FIND_LINKS"].startswith(str(tmp_path))
    assert "SOME_PASSWORD" not in sandbox.build_environment()
    assert sandbox.wheel_folders() == [tmp_path]
