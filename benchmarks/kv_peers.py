"""The other side of kv_bandwidth.py: a process with a transfer engine, or with a plain TCP socket. Ends when its standard input does."""

from __future__ import annotations

import ctypes
import mmap
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HOST = "127.0.0.1"
READ = b"r"


class Engine:
    """A transfer engine with registered memory."""

    def __init__(self, nbytes: int) -> None:
        from mooncake.engine import TransferEngine

        self.library: Any = TransferEngine()
        code = self.library.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
        assert code == 0, f"the transfer engine does not start: {code}"
        self._memory = mmap.mmap(-1, nbytes)
        self._memory.write(bytes(nbytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        code = self.library.register_memory(self.address, nbytes)
        assert code == 0, f"the transfer engine refuses {nbytes} bytes: {code}"


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False when the other side has closed."""
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


@contextmanager
def peer(kind: str, nbytes: int) -> Iterator[list[str]]:
    """Start this file with `nbytes` of memory; yields what it says of itself."""
    process = subprocess.Popen(
        [sys.executable, __file__, kind, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words, f"the {kind} peer ended; its message is above"
        yield words
    finally:
        process.kill()
        process.communicate()


def _serve_engine(nbytes: int) -> None:
    engine = Engine(nbytes)
    print(engine.library.get_rpc_port(), engine.address, flush=True)
    sys.stdin.read()


def _serve_socket(nbytes: int) -> None:
    """Again and again: 8 bytes that say how many follow, these, and one byte back; then one byte, and they go back."""
    buffer = memoryview(bytearray(nbytes))
    sign = memoryview(bytearray(1))
    length = memoryview(bytearray(8))
    with socket.create_server((HOST, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive(connection, length):
            payload = buffer[: int.from_bytes(length, "little")]
            receive(connection, payload)
            connection.sendall(READ)
            receive(connection, sign)
            connection.sendall(payload)


if __name__ == "__main__":
    {"engine": _serve_engine, "socket": _serve_socket}[sys.argv[1]](int(sys.argv[2]))
