"""Certificates of an authority of a test, in files as Kubernetes mounts them: all of them change at once."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

from moontide.config import TlsConfig

SERVER_NAME = "moontide"


@dataclass
class CertificateFiles:
    """tls.crt, tls.key and ca.crt in one directory."""

    root: Path
    authority: trustme.CA = field(default_factory=trustme.CA)
    _versions: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.issue()

    @property
    def directory(self) -> Path:
        return self.root / "current"

    def issue(
        self, *names: str, common_name: str | None = None, authority: trustme.CA | None = None, expired: bool = False
    ) -> None:
        """Replace the files by a new certificate for `names` (SERVER_NAME if none) and its authority."""
        signer = authority or self.authority
        made = signer.issue_cert(
            *(names or (SERVER_NAME,)),
            common_name=common_name,
            not_after=datetime.now(UTC) - timedelta(days=1) if expired else None,
        )
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        self.write({"tls.crt": chain, "tls.key": made.private_key_pem.bytes(), "ca.crt": signer.cert_pem.bytes()})

    def write(self, files: dict[str, bytes]) -> None:
        """Replace all files; those that are not given stay as they are."""
        version = self.root / f"version-{next(self._versions)}"
        version.mkdir(parents=True)
        old = {path.name: path.read_bytes() for path in self.directory.iterdir()} if self.directory.exists() else {}
        for name, content in (old | files).items():
            (version / name).write_bytes(content)
        link = self.root / "next"
        link.symlink_to(version.name)
        os.replace(link, self.directory)

    def config(self, **changed: Any) -> TlsConfig:
        """Section `tls` of a service that uses them for everything."""
        files = {
            "cert_file": str(self.directory / "tls.crt"),
            "key_file": str(self.directory / "tls.key"),
            "ca_file": str(self.directory / "ca.crt"),
        }
        return TlsConfig(**{**files, "require_client_cert": True, **changed})

    def client_config(self, **changed: Any) -> TlsConfig:
        """The same for a client without a certificate."""
        return self.config(cert_file="", key_file="", require_client_cert=False, **changed)
