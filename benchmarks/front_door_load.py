"""Closed-loop HTTP load for bench_front_door.py: clients that send one request after the other over connections that stay open.

`python benchmarks/front_door_load.py --url http://H:P --clients N --seconds S [--stream] ...` prints one JSON object. It is a process of
its own, cheap enough to share a core with the stubs: it looks for the ends of answers and counts events, and parses no JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import cast
from urllib.parse import urlsplit

import uvloop

EVENT = b"data: {"


@dataclass
class Samples:
    """Of the measured time."""

    answers: int = 0
    """That were complete in it."""
    events: int = 0
    """Of all streams, tokens with text and ends alike."""
    errors: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Sending to the first event of a stream; to the whole answer without one."""
    total_s: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection: the next request follows the end of the last answer, after a pause if the load has some."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._think()

    def _think(self) -> None:
        pause_s = 0.0 if self._load.is_over else self._load.pause_s()
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._send)
        else:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        if self._load.is_over:
            self._transport.close()
            return
        self._head, self._tail = b"", b""
        self._length: int | None = None
        self._is_chunked = False
        self._first_s: float | None = None
        self._sent_s = time.monotonic()
        self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        if not self._head:
            head, blank, data = (self._tail + data).partition(b"\r\n\r\n")
            if not blank:
                self._tail = head
                return
            self._head, self._tail = head, b""
            self._read_head(head)
        if self._is_chunked:
            events = (self._tail[-6:] + data).count(EVENT)
            if events and self._first_s is None:
                self._first_s = time.monotonic()
            self._load.note_events(events)
            self._tail = (self._tail + data)[-40:]
            if self._tail.endswith(b"0\r\n\r\n"):
                self._end()
        else:
            assert self._length is not None
            self._length -= len(data)
            if not self._length:
                self._first_s = time.monotonic()
                self._end()

    def _read_head(self, head: bytes) -> None:
        status, *lines = head.split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines)
        if b" 200 " not in status:
            self._load.samples.errors.append(status.decode())
        self._is_chunked = fields.get(b"transfer-encoding") == b"chunked"
        self._length = int(fields.get(b"content-length", 0))

    def _end(self) -> None:
        self._load.note(self._sent_s, self._first_s)
        self._think()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.lost(error)


class Load:
    def __init__(self, args: argparse.Namespace) -> None:
        self.samples = Samples()
        self.is_over = False
        self._host = urlsplit(args.url).netloc
        self._random = random.Random(args.seed)
        self._text = "\n\n".join(topics[name] for name in sorted(topics))
        self._args = args
        self._since_s = float("inf")
        self._until_s = float("inf")
        self._open = args.clients
        self._closed = asyncio.Event()

    def pause_s(self) -> float:
        """Exponential, so that clients whose answers end in one step do not come back together."""
        mean_s = self._args.think_s
        return self._random.expovariate(1 / mean_s) if mean_s else 0.0

    def request(self) -> bytes:
        """A prompt of the asked length that begins like no other."""
        args = self._args
        start = self._random.randrange(len(self._text) - args.prompt_chars)
        name = "".join(self._random.choices(string.ascii_lowercase, k=16))
        text = f"{name} {self._text[start:]}"[: args.prompt_chars]
        fields = {
            "model": args.model, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": args.stream,
        }  # fmt: skip
        if args.chat:
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text
        path = "/v1/chat/completions" if args.chat else "/v1/completions"
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def note_events(self, num: int) -> None:
        if self._since_s <= time.monotonic() <= self._until_s:
            self.samples.events += num

    def note(self, sent_s: float, first_s: float | None) -> None:
        now_s = time.monotonic()
        if not self._since_s <= now_s <= self._until_s:
            return
        self.samples.answers += 1
        self.samples.total_s.append(now_s - sent_s)
        if first_s is not None and sent_s >= self._since_s:
            self.samples.first_s.append(first_s - sent_s)

    def lost(self, error: Exception | None) -> None:
        if not self.is_over:
            self.samples.errors.append(f"connection lost: {error}")
        self._open -= 1
        if not self._open:
            self._closed.set()

    async def run(self) -> dict[str, object]:
        args = self._args
        loop = asyncio.get_running_loop()
        host, _, port = self._host.partition(":")
        for _ in range(args.clients):
            await loop.create_connection(lambda: Client(self), host, int(port))
        await asyncio.sleep(args.warm_up)
        print("measuring", flush=True)
        self._since_s = time.monotonic()
        self._until_s = self._since_s + args.seconds
        await asyncio.sleep(args.seconds)
        print("measured", flush=True)
        self.is_over = True
        async with asyncio.timeout(args.seconds + 30.0):
            await self._closed.wait()
        samples = self.samples
        return {
            "answers": samples.answers,
            "answers_per_s": samples.answers / args.seconds,
            "events_per_s": samples.events / args.seconds,
            "first_ms": _percentiles(samples.first_s),
            "total_ms": _percentiles(samples.total_s),
            "errors": len(samples.errors),
            "error": samples.errors[0] if samples.errors else "",
        }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {f"p{q}": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="stub")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--think-s", type=float, default=0.0, help="mean pause of a client between two requests")
    parser.add_argument("--warm-up", type=float, default=1.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--prompt-chars", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(uvloop.run(Load(parser.parse_args()).run())), flush=True)


if __name__ == "__main__":
    main()
