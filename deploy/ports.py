"""TCP ports for programs that must be told one."""

from __future__ import annotations

import random
import socket

from deploy.config import ClusterConfig
from deploy.plan import HOST, fixed_ports
from moontide.errors import ConfigError

FIRST, LAST = 20_000, 31_999
"""Below the range from which Linux takes ports for outgoing connections, so that a port stays free while its process restarts."""
TRIES = 1_000


class PortPicker:
    """Hands out ports that nobody listens on, each at most once."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._given: set[int] = set()

    def __call__(self) -> int:
        """Raises: ConfigError when none is found."""
        for _ in range(TRIES):
            port = self._rng.randint(FIRST, LAST)
            if port not in self._given and is_free(port):
                self._given.add(port)
                return port
        raise ConfigError(
            f"found no free TCP port between {FIRST} and {LAST} on {HOST}; stop something that listens there"
        )


def is_free(port: int) -> bool:
    return _why_not(port) is None


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
