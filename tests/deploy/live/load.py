"""A mixed load over HTTP: what clients do right, what they do wrong, and what is refused.

load = MixedLoad(FrontDoor(urls=["http://127.0.0.1:8000"], model="smollm2"))
with in_background(load):
    ...until load.num_requests > 100...

A round sends each kind of request once or a few times, all of them at once. Text is words of one seed, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 60.0
CANCELLED, LOST = 0, -1
"""Instead of an HTTP status: the client went away, or the conductor did."""
WORDS = ("the", "moon", "pulls", "a", "tide", "over", "long", "sand", "and", "some", "harbour", "waits", "for", "water")


@dataclass(frozen=True, kw_only=True)
class FrontDoor:
    """Where requests go, and as whom."""

    urls: Sequence[str]
    """http://host:port of every conductor."""
    model: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Tenant -> API key; empty: no tenants."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Characters of prompts: tokens, where the model's tokenizer has one for each byte."""

    short: int = 60
    document: int = 3000
    """What several requests begin with."""
    long: int = 4000
    too_long: int = 9000
    """More than a prefill group has pages for."""
    beyond_context: int = 20_000
    num_documents: int = 8


class MixedLoad:
    def __init__(self, door: FrontDoor, *, sizes: Sizes | None = None, seed: int = 0, pause_s: float = 1.0) -> None:
        """`pause_s`: between two rounds."""
        self._door = door
        self._sizes = sizes or Sizes()
        self._pause_s = pause_s
        self._random = random.Random(seed)
        self._number = 0
        self._documents = [self._text(self._sizes.document) for _ in range(self._sizes.num_documents)]
        self.num_requests = 0
        """Answered, refused or cancelled."""
        self.answers: Counter[tuple[str, int]] = Counter()
        """(kind, HTTP status) -> number; also CANCELLED and LOST."""
        self.errors: dict[tuple[str, int], str] = {}
        """The first one of each."""

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Rounds until `is_over`."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while not is_over():
                await self._round(http)
                await asyncio.sleep(self._pause_s)

    async def _round(self, http: aiohttp.ClientSession) -> None:
        self._number += 1
        client = _Client(http, self)
        async with asyncio.TaskGroup() as tasks:
            for send in self._requests(client):
                tasks.create_task(_awaited(send))

    def _requests(self, client: _Client) -> Iterator[Awaitable[object]]:
        sizes, text = self._sizes, self._text
        first, *_ = names = list(self._door.keys) or [""]
        last = names[-1]
        hot, other = self._documents[0], self._documents[self._number % len(self._documents)]
        yield client.send("long", text(sizes.long), max_tokens=12)
        yield client.send("long, high priority", text(sizes.long), tenant=first, priority=1, stream=True)
        for _ in range(3):
            yield client.send("long, low priority", text(sizes.long), tenant=last, priority=-1)
        for tenant in names:
            yield client.send("short", text(sizes.short), tenant=tenant, max_tokens=16)
            yield client.send("streamed", text(sizes.short), tenant=tenant, stream=True)
        for url in range(len(self._door.urls)):
            yield client.send("repeated prefix", hot + text(sizes.short), url=url)
            yield client.send("older prefix", other + text(sizes.short), url=url)
        yield self._conversation(client)
        yield self._keyed(client)
        for _ in range(2):
            yield client.cancelled("cancelled", text(sizes.long))
        yield client.send("too long", text(sizes.too_long))
        yield client.send("beyond context", text(sizes.beyond_context))
        yield client.send("TTFT SLO", text(sizes.long), headers={"X-Moontide-TTFT-SLO": "0.002"})
        yield client.send("TBT SLO", text(sizes.long), headers={"X-Moontide-TBT-SLO": "0.00001"})
        yield client.send("unknown model", text(sizes.short), model=f"model-{self._number}")
        yield client.send("priority too high", text(sizes.short), priority=90 + self._number % 10)
        yield client.send("wrong body", text(sizes.short), max_tokens=-1)
        if self._door.keys:
            yield client.send("wrong key", text(sizes.short), headers={"Authorization": f"Bearer wrong-{self._number}"})

    async def _conversation(self, client: _Client) -> None:
        """Three turns, each with everything before it."""
        said = self._text(self._sizes.document // 3)
        for _ in range(3):
            said += await client.send("conversation", said, max_tokens=64)
            said += self._text(self._sizes.short)

    async def _keyed(self, client: _Client) -> None:
        """One key: made, read again at each conductor, and then used for another request."""
        headers = {"Idempotency-Key": f"key-{self._number}"}
        prompt = self._text(self._sizes.short)
        for url in (0, *range(len(self._door.urls))):
            await client.send("idempotency key", prompt, url=url, headers=headers)
        await client.send("idempotency key", self._text(self._sizes.short), headers=headers)

    def _text(self, length: int) -> str:
        """Words that no other text of this load begins with."""
        words = [f"{self._random.getrandbits(64):016x}"]
        while sum(map(len, words)) + len(words) <= length:
            words += self._random.choices(WORDS, k=1 + length // 8)
        return " ".join(words)[:length]


class _Client:
    """Sends requests of one round and counts how they ended."""

    def __init__(self, http: aiohttp.ClientSession, load: MixedLoad) -> None:
        self._http = http
        self._load = load

    async def send(
        self, kind: str, prompt: str, *, tenant: str = "", headers: Mapping[str, str] | None = None, **rest: Any
    ) -> str:
        """The text of the answer; "" where there is none."""
        try:
            async with self._post(prompt, tenant=tenant, headers=headers or {}, **rest) as answer:
                body = await answer.read()
        except aiohttp.ClientError:
            self._count(kind, LOST)
            return ""
        self._count(kind, answer.status)
        if answer.status != 200:
            self._load.errors.setdefault((kind, answer.status), body.decode())
            return ""
        if rest.get("stream"):
            return ""
        text: str = json.loads(body)["choices"][0]["text"]
        return text

    async def cancelled(self, kind: str, prompt: str) -> None:
        """A client that goes away at the first token."""
        async with self._post(prompt, stream=True, max_tokens=400) as answer:
            await answer.content.readline()
            answer.close()
        self._count(kind, CANCELLED)

    def _post(
        self,
        prompt: str,
        *,
        tenant: str = "",
        headers: Mapping[str, str] | None = None,
        priority: int | None = None,
        url: int | None = None,
        **body: Any,
    ) -> Any:
        door, number = self._load._door, self._load.num_requests
        self._load.num_requests += 1
        sent = dict(headers or {})
        if door.keys:
            key = door.keys[tenant or next(iter(door.keys))]
            sent.setdefault("Authorization", f"Bearer {key}")
        if priority is not None:
            sent["X-Moontide-Priority"] = str(priority)
        asked = {"model": door.model, "prompt": prompt, "max_tokens": 8, "temperature": 0} | body
        address = door.urls[number % len(door.urls) if url is None else url]
        return self._http.post(f"{address}/v1/completions", json=asked, headers=sent)

    def _count(self, kind: str, status: int) -> None:
        self._load.answers[kind, status] += 1


async def _awaited(send: Awaitable[object]) -> None:
    await send


@contextmanager
def in_background(load: MixedLoad) -> Iterator[None]:
    """Rounds of `load` while the body runs; the last one ends before this returns. Raises what the load raised."""
    is_over = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(load.run(is_over.is_set))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if failed:
        raise failed[0]


def wait_requests(load: MixedLoad, number: int, *, timeout_s: float) -> None:
    """Until so many requests were sent."""
    give_up_s = time.monotonic() + timeout_s
    while load.num_requests < number:
        assert time.monotonic() < give_up_s, f"{load.num_requests} requests of {number} after {timeout_s:.0f} s"
        time.sleep(0.2)
