"""An engine that answers every OpenAI completion at once with the same JSON, for routers that stand in front of engines over HTTP.

`python stub_engine.py --port P --model NAME`. Requests are told apart by the end of their headers and Content-Length alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re

import uvloop

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Engine(asyncio.Protocol):
    def __init__(self, model: str) -> None:
        choice = {"index": 0, "text": " answer", "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 256, "completion_tokens": 1, "total_tokens": 257}
        head = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": model}
        self._completion = _response({**head, "choices": [choice], "usage": usage})
        card = {"id": model, "object": "model", "created": 1, "owned_by": "stub"}
        self._models = _response({"object": "list", "data": [card]})
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < whole:
                return
            self._buffer = self._buffer[whole:]
            self._transport.write(self._completion if head.startswith(b"POST") else self._models)  # type: ignore[attr-defined]


def _response(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve(host: str, port: int, model: str) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Engine(model), host, port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.host, args.port, args.model))
