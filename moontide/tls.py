"""Certificates of one process: for its servers, and for its channels to others. New files are taken up while it runs.

Every handshake of a server and every call of a client asks for `current()`, which looks at the files. What is read is used only when the
process could talk to itself with it.
"""

from __future__ import annotations

import argparse
import os
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import grpc

from moontide.config import TlsConfig
from moontide.errors import ConfigError
from moontide.log import get_logger

HTTP2 = "h2"
_READS = 5
"""Tries to read files of one time while they are being replaced."""
_HANDSHAKE_TURNS = 10
REFUSED_S = 60.0
"""Files that cannot be used are looked at again after so long: a certificate may not be valid yet."""

log = get_logger(__name__)

_Stamp = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificates:
    """What the files held at one time."""

    stamp: _Stamp
    chain: bytes = b""
    key: bytes = b""
    authorities: bytes = b""
    server_context: ssl.SSLContext | None = None
    """For HTTP: asks clients for no certificate."""
    client_context: ssl.SSLContext | None = None
    """For HTTP/2."""


class Tls:
    """What a `TlsConfig` names, read. Safe from several threads: gRPC asks from its own."""

    def __init__(self, config: TlsConfig, *, serves: bool = True) -> None:
        """`serves`: the certificate is one of a service, not of a client. Raises: ConfigError for files that cannot be used."""
        self._config = config
        self._serves = serves
        self._lock = threading.Lock()
        self._current = _read(config, serves=serves)
        self._refused: _Stamp | None = None
        """Files that were seen and cannot be used."""
        self._refused_s = 0.0
        self._reason = ""

    @classmethod
    def load(cls, config: TlsConfig, *, serves: bool = True) -> Tls | None:
        """None when nothing is configured. Raises: ConfigError."""
        return cls(config, serves=serves) if config.cert_file or config.ca_file else None

    @property
    def has_certificate(self) -> bool:
        """Whether servers listen with TLS."""
        return bool(self._config.cert_file)

    @property
    def verifies_peers(self) -> bool:
        """Whether channels use TLS."""
        return bool(self._config.ca_file)

    def current(self) -> Certificates:
        """Of the files as they are now, or as they were when they could last be used."""
        with self._lock:
            if self._refused is not None and time.monotonic() - self._refused_s > REFUSED_S:
                self._refused = None
            if (stamp := _stamp(self._config)) not in (self._current.stamp, self._refused):
                try:
                    self._current = _read(self._config, serves=self._serves)
                    self._reason = ""
                    log.info("new certificates", cert_file=self._config.cert_file, ca_file=self._config.ca_file)
                except ConfigError as error:
                    self._refused, self._refused_s = stamp, time.monotonic()
                    if str(error) != self._reason:
                        self._reason = str(error)
                        log.warning("new certificates refused, the old ones stay in use", reason=self._reason)
            return self._current

    def peer_name(self, host: str) -> str:
        """What the certificate of the peer at `host` must name."""
        return self._config.server_name or host

    def grpc_server(self) -> grpc.ServerCredentials:
        """Credentials of a server; each new connection gets the certificate of its time."""
        used = self.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            if (now := self.current()) is used:
                return None
            used = now
            return self._grpc_certificate(now)

        return grpc.dynamic_ssl_server_credentials(
            self._grpc_certificate(used), fetch, require_client_authentication=self._config.require_client_cert
        )

    def grpc_channel(self, certificates: Certificates) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials and options of a channel."""
        credentials = grpc.ssl_channel_credentials(
            certificates.authorities, certificates.key or None, certificates.chain or None
        )
        name = self._config.server_name
        return credentials, [("grpc.ssl_target_name_override", name)] if name else []

    def http_server(self) -> ssl.SSLContext | None:
        """Context of a server, each new connection of which gets the certificate of its time; None without a certificate."""
        context = self.current().server_context
        if context is None:
            return None

        def use_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            now = self.current().server_context
            assert now is not None
            connection.context = now

        context.sni_callback = use_current
        return context

    def _grpc_certificate(self, certificates: Certificates) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(certificates.key, certificates.chain)], root_certificates=certificates.authorities or None
        )


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that calls a service."""
    parser.add_argument(
        "--ca", default="", metavar="FILE", help="use TLS; PEM authorities that the service is verified with"
    )
    parser.add_argument("--cert", default="", metavar="FILE", help="PEM certificate to show to the service")
    parser.add_argument("--key", default="", metavar="FILE", help="PEM key of --cert")
    parser.add_argument(
        "--server-name", default="", metavar="NAME", help="name in the certificate of the service (default: its host)"
    )


def client_config(args: argparse.Namespace) -> TlsConfig:
    """What these options say. Raises: ConfigError."""
    if bool(args.cert) != bool(args.key):
        raise ConfigError("--cert and --key belong together; give both or neither")
    if (args.cert or args.server_name) and not args.ca:
        raise ConfigError("--cert and --server-name are for TLS; give --ca FILE too")
    return TlsConfig(ca_file=args.ca, cert_file=args.cert, key_file=args.key, server_name=args.server_name)


def _stamp(config: TlsConfig) -> _Stamp:
    """Changes with the files."""
    found = []
    for path in filter(None, (config.cert_file, config.key_file, config.ca_file)):
        with suppress(OSError):
            status = os.stat(path)
            found.append((status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size))
    return tuple(found)


def _read(config: TlsConfig, *, serves: bool) -> Certificates:
    """Raises: ConfigError."""
    for _ in range(_READS):
        stamp = _stamp(config)
        try:
            certificates = _read_once(config, stamp, serves=serves)
        except ConfigError:
            if stamp == _stamp(config):
                raise
        else:
            if stamp == _stamp(config):
                return certificates
    raise ConfigError(f"the files of section tls keep changing: {config.cert_file} {config.key_file} {config.ca_file}")


def _read_once(config: TlsConfig, stamp: _Stamp, *, serves: bool) -> Certificates:
    chain = _read_pem("cert_file", config.cert_file, "CERTIFICATE")
    key = _read_pem("key_file", config.key_file, "PRIVATE KEY")
    authorities = _read_pem("ca_file", config.ca_file, "CERTIFICATE")
    server = _context(config, ssl.Purpose.CLIENT_AUTH, b"") if chain else None
    client = _context(config, ssl.Purpose.SERVER_AUTH, authorities) if authorities else None
    if client is not None:
        client.set_alpn_protocols([HTTP2])
    if chain and authorities and serves:
        _check_own_handshake(config, authorities)
    return Certificates(
        stamp=stamp, chain=chain, key=key, authorities=authorities, server_context=server, client_context=client
    )


def _read_pem(setting: str, path: str, kind: str) -> bytes:
    """Raises: ConfigError when the file holds nothing of that kind."""
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read tls.{setting}={path}: {error.strerror}; correct the path or its permissions"
        ) from error
    if f"{kind}-----".encode() not in text:
        raise ConfigError(
            f"tls.{setting}={path} holds no PEM {kind.lower()}; give a file with -----BEGIN ...{kind}-----"
        )
    if kind == "PRIVATE KEY" and b"ENCRYPTED" in text:
        raise ConfigError(
            f"tls.{setting}={path} is encrypted; services read keys without a password: `openssl pkey` decrypts it"
        )
    return text


def _context(config: TlsConfig, purpose: ssl.Purpose, authorities: bytes) -> ssl.SSLContext:
    """Raises: ConfigError."""
    try:
        context = ssl.create_default_context(purpose, cadata=authorities.decode("ascii", "ignore") or None)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls.ca_file={config.ca_file} holds no certificate: {_reason(error)}; give a PEM file"
        ) from error
    if not config.cert_file:
        return context
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"tls.key_file={config.key_file} is not the key of tls.cert_file={config.cert_file}; "
                "give the two files of one certificate"
            ) from error
        raise ConfigError(
            f"tls.cert_file={config.cert_file} or tls.key_file={config.key_file} cannot be used: {_reason(error)}; "
            "give a PEM certificate and its PEM key"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read tls.cert_file={config.cert_file} or tls.key_file={config.key_file}: {error.strerror}"
        ) from error
    return context


def _check_own_handshake(config: TlsConfig, authorities: bytes) -> None:
    """Raises: ConfigError when peers with the same authorities and settings would refuse this certificate."""
    server = _context(config, ssl.Purpose.CLIENT_AUTH, authorities)
    client = _context(config, ssl.Purpose.SERVER_AUTH, authorities)
    server.verify_mode = ssl.CERT_REQUIRED if config.require_client_cert else ssl.CERT_NONE
    client.check_hostname = bool(config.server_name)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=config.server_name or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_HANDSHAKE_TURNS):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls.cert_file={config.cert_file} does not pass as a certificate of tls.ca_file={config.ca_file} under the name "
            f"tls.server_name={config.server_name!r}: {_reason(error)}; give one that these authorities signed for the name"
        ) from error


def _reason(error: Exception) -> str:
    """What is wrong, without the number of a line in OpenSSL."""
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error).rstrip(".")
