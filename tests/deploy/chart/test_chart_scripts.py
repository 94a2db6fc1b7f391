"""The scripts that pods of the chart run, as processes."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from deploy.check_chart import CHART
from tests.fakes.certificates import CertificateFiles

SCRIPTS = CHART / "files/scripts"


def run(script: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Conductor(BaseHTTPRequestHandler):
    """Answers as a conductor does; remembers what it was asked."""

    text: ClassVar[str] = " Paris"
    asked: ClassVar[list[tuple[str, str | None, dict[str, object]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        answer = json.dumps({"choices": [{"text": self.text}], "usage": {"completion_tokens": int(bool(self.text))}})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], certificates: CertificateFiles | None = None) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    if certificates is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificates.directory / "tls.crt", certificates.directory / "tls.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http{'s' if certificates else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("text", "code"), [(" Paris", 0), ("", 1)])
def test_the_prompt_of_helm_test_wants_text(text: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conductor, "text", text)
    monkeypatch.setattr(Conductor, "asked", [])
    with serving(Conductor) as url:
        done = run("prompt.py", url, "m", "The capital", "8", "10", env={"MOONTIDE_API_KEY": "key"})
    assert done.returncode == code, done.stderr
    (path, key, body) = Conductor.asked[0]
    assert (path, key) == ("/v1/completions", "Bearer key")
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", "The capital", 8)


@pytest.mark.parametrize(("name", "is_trusted"), [("127.0.0.1", True), ("moontide", False)])
def test_the_prompt_verifies_the_conductor_with_the_mounted_authority(
    name: str, is_trusted: bool, tmp_path: Path
) -> None:
    certificates = CertificateFiles(tmp_path)
    certificates.issue(name)
    env = {"SSL_CERT_FILE": str(certificates.directory / "ca.crt")}
    with serving(Conductor, certificates) as url:
        done = run("prompt.py", url, "m", "The capital", "8", "10", env=env)
    assert (done.returncode == 0) == is_trusted, done.stderr
    assert is_trusted or "CERTIFICATE_VERIFY_FAILED" in done.stderr


def test_the_prompt_fails_without_a_conductor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert run("prompt.py", f"http://127.0.0.1:{port}", "m", "p", "8", "5").returncode != 0


def test_wait_ends_when_everything_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        done = run("wait.py", *(f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)))
    assert (done.returncode, done.stdout) == (0, "")


def test_wait_says_what_it_waits_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    waiting = subprocess.Popen([sys.executable, str(SCRIPTS / "wait.py"), address], stdout=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith(f"waiting for {address}: ")
        assert waiting.poll() is None
    finally:
        waiting.kill()
        waiting.communicate()
