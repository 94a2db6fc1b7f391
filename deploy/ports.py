"""TCP ports for programs that must be told one."""

from __future__ import annotations

import socket

from deploy.config import ClusterConfig
from deploy.plan import HOST, fixed_ports
from moontide.config import free_port
from moontide.errors import ConfigError


class PortPicker:
    """Hands out ports that nobody listens on, each at most once."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def __call__(self) -> int:
        """Raises: ConfigError when none is found."""
        port = free_port(HOST, besides=self._given)
        self._given.add(port)
        return port


def _why_not(port: int) -> str | None:
    """Why nobody can listen there now."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError as error:
            return error.strerror
        return None


def check_fixed_ports(config: ClusterConfig) -> None:
    """Raises: ConfigError naming the option when a port that the user chose is taken."""
    for option, port in fixed_ports(config):
        if reason := _why_not(port):
            raise ConfigError(f"{option}: port {port} on {HOST}: {reason}; choose another one, or 0 for a free one")
