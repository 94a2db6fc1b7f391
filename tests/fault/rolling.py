"""What the tests of rolling upgrades share: a load balancer, clients that go on and on, processes replaced as Kubernetes does it.

clients -- Balancer -- conductors -- everything else        replace(): SIGTERM, drain, exit code 0, the next one starts
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from moontide.client import GenerateOptions, MoontideClient
from moontide.config import free_port
from moontide.errors import MoontideError
from moontide.sampling_params import SampledToken
from tests.cluster import RunningCluster, running_cluster, wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fakes.tiny_models import MIN_TOP2_GAP, VOCAB_SIZE
from tests.fault.harness import FIRST_TEXT_ID, SETTINGS, Bench

CONDUCTOR_DRAIN_S = 60.0
"""Longer than the longest answer, so that every stream ends whole."""
DECODE_DRAIN_S = 2.0
"""Shorter than that: what is left is handed back and goes on elsewhere."""
STORE_DRAIN_S = 20.0
CLOSE_S = 15.0
"""What a process needs beyond its drain, on a busy machine."""
PREFILL_GRACE_S = 10.0 + CLOSE_S
ROLLING = (
    *SETTINGS,
    "prefill.peer_timeout_s=5",
    f"conductor.drain_s={CONDUCTOR_DRAIN_S}",
    f"decode.drain_timeout_s={DECODE_DRAIN_S}",
    f"kvstore.drain_s={STORE_DRAIN_S}",
    "conductor.nodes_wait_s=60",
)
GROUPS = (("prefill-0-stage-0", "prefill-0-stage-1"), ("prefill-1-stage-0", "prefill-1-stage-1"))
REQUEST_TIMEOUT_S = 120.0
NOTICED_S = 1.0
"""Between the moment in which a load balancer forgets a conductor and its SIGTERM: what a preStop hook waits."""
KINDS: Mapping[str, tuple[int, int]] = {"long prompt": (1500, 12), "stream": (200, 500), "short": (100, 8)}
"""Prompt and answer, in tokens."""
PAUSE_S = {"short": 1.0, "http": 1.0, "long prompt": 0.5}
"""Of a client between two requests, so that the cluster is loaded and not full; streams follow each other at once."""
BUSY_GAUGES = {
    "prefill": ("prefill_waiting_requests", "prefill_running_requests"),
    "decode": ("decode_running_requests",),
    "kvstore": ("kvstore_reservations",),
    "conductor": ("conductor_active_requests",),
}
"""Of which one is above 0 when a process is told to end."""
HTTP_TOKENS = 24
SETTLED_S = 2.0
MOST_OTHERS = 5
"""Answers of each kind that are compared although nothing happened to them: a comparison takes as long as the answer."""
IDLE_GAUGES = {
    "prefill": (
        "prefill_waiting_requests", "prefill_running_requests", "prefill_queued_tokens", "prefill_open_puts", "prefill_in_flight_steps",
    ),
    "decode": ("decode_waiting_requests", "decode_pulling_requests", "decode_running_requests", "decode_write_back_pages"),
    "kvstore": ("kvstore_reservations", "kvstore_pinned_blocks", "kvstore_objects_to_remove"),
    "conductor": ("conductor_active_requests",),
}  # fmt: skip
PAGES = {"prefill": ("prefill_num_pages", "prefill_free_pages"), "decode": ("decode_pages", "decode_free_pages")}


class Balancer:
    """A Service of Kubernetes: each new connection goes to one of the backends in turn, and stays there."""

    def __init__(self, backends: Sequence[str]) -> None:
        self.backends = list(backends)
        """host:port each; may be changed at any time from any thread."""
        self._turn = itertools.count()
        self._address = ""

    @property
    def address(self) -> str:
        return self._address

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self._address = f"{host}:{port}"
        try:
            yield
        finally:
            server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backends = self.backends
        host, _, port = backends[next(self._turn) % len(backends)].rpartition(":")
        try:
            back_reader, back_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer), return_exceptions=True)


@dataclass
class Answered:
    """One request and what its client saw."""

    kind: str
    prompt: Sequence[int]
    max_tokens: int
    began_s: float
    tokens: list[SampledToken] = field(default_factory=list)
    text: str = ""
    error: str = ""
    ended_s: float = math.inf
    longest_pause_s: float = 0.0
    """Without anything new, from its start on."""

    def heard(self, last_s: float) -> float:
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
        return now_s

    def was_open(self, windows: Sequence[tuple[float, float]]) -> bool:
        return any(self.began_s <= end_s and begin_s <= self.ended_s for begin_s, end_s in windows)


class Load:
    """Clients that send one request after the other until told to stop; two of each kind over gRPC, two over HTTP."""

    def __init__(self, grpc: Balancer, http: Balancer, *, seed: int) -> None:
        self._balancers = grpc, http
        self._random = random.Random(seed)
        self._stopping = asyncio.Event()
        self.answered: list[Answered] = []
        self._model = ""

    async def run(self, started: Callable[[], None]) -> None:
        """Return after `stop`, when every request is over."""
        grpc, http = self._balancers
        async with (
            grpc.serving(),
            http.serving(),
            MoontideClient(grpc.address) as one,
            MoontideClient(grpc.address) as other,
            httpx.AsyncClient(base_url=f"http://{http.address}", timeout=REQUEST_TIMEOUT_S) as web,
            asyncio.TaskGroup() as clients,
        ):
            self._model = (await one.status()).model
            await other.connect()
            for kind in KINDS:
                for client in (one, other):
                    clients.create_task(self._repeat(kind, client))
            for _ in range(2):
                clients.create_task(self._repeat_http(web))
            started()

    def stop(self) -> None:
        self._stopping.set()

    async def _repeat(self, kind: str, client: MoontideClient) -> None:
        num_tokens, max_tokens = KINDS[kind]
        while not self._stopping.is_set():
            answer = Answered(kind, self._prompt(num_tokens), max_tokens, time.monotonic())
            self.answered.append(answer)
            await self._ask(client, answer)
            answer.ended_s = time.monotonic()
            await self._pause(kind)

    async def _ask(self, client: MoontideClient, answer: Answered) -> None:
        params = GenerateOptions(
            max_tokens=answer.max_tokens, temperature=0.0, ignore_eos=True, logprobs=0, timeout_s=REQUEST_TIMEOUT_S
        )
        last_s = answer.began_s
        try:
            async with aclosing(client.generate(answer.prompt, params=params)) as chunks:
                async for chunk in chunks:
                    answer.tokens.extend(chunk.tokens)
                    answer.text += chunk.text
                    last_s = answer.heard(last_s)
        except MoontideError as error:
            answer.error = f"{type(error).__name__}: {error}"

    async def _repeat_http(self, web: httpx.AsyncClient) -> None:
        """Every other answer is streamed; all of them to one prompt, of which the text is compared."""
        prompt = self._prompt(300)
        for is_stream in itertools.cycle((False, True)):
            if self._stopping.is_set():
                return
            answer = Answered("http", prompt, HTTP_TOKENS, time.monotonic())
            self.answered.append(answer)
            body = {
                "model": self._model, "prompt": prompt, "max_tokens": HTTP_TOKENS, "temperature": 0, "ignore_eos": True,
                "stream": is_stream,
            }  # fmt: skip
            try:
                answer.text = await (_stream if is_stream else _whole)(web, body)
            except (httpx.HTTPError, AssertionError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            answer.ended_s = answer.heard(answer.began_s)
            await self._pause("http")

    async def _pause(self, kind: str) -> None:
        await asyncio.sleep(PAUSE_S.get(kind, 0.0) * self._random.uniform(0.5, 1.5))

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(FIRST_TEXT_ID, VOCAB_SIZE), k=length)


class Roll:
    """A cluster under load whose processes are replaced."""

    def __init__(self, bench: Bench, load: Load, grpc: Balancer, http: Balancer) -> None:
        self.cluster = bench.cluster
        self._load = load
        self._grpc, self._http = grpc, http
        self.drains: list[str] = []
        self.windows: list[tuple[float, float]] = []
        """From a SIGTERM until the last of those that got it has ended, and SETTLED_S."""

    def replace(self, *names: str, grace_s: float) -> None:
        """SIGTERM to these together, while the first one has work; each ends with code 0 in time, and its successor is ready."""
        self.wait_busy(names[0])
        before = {name: len(self.cluster.exits(name)) for name in names}
        began_s = time.monotonic()
        pids = {name: self.cluster.kill(name, signal.SIGTERM) for name in names}
        wait_for(lambda: all(len(self.cluster.exits(name)) > n for name, n in before.items()), f"{names} end", grace_s)
        ended_s = time.monotonic()
        self.windows.append((began_s, ended_s + SETTLED_S))
        codes = {name: self.cluster.exits(name)[-1] for name in names}
        assert not any(codes.values()), f"exit codes {codes}"
        for name, pid in pids.items():
            if self.cluster.spec(name).http_address:
                self.cluster.wait_restarted(name, pid)
            else:
                wait_for(lambda name=name, pid=pid: self.cluster.pid(name) not in (None, pid), f"{name} runs again")
        self.drains.append(
            f"{' + '.join(names)}: ended after {ended_s - began_s:.1f} s, ready again after {time.monotonic() - began_s:.1f} s"
        )

    def retire(self, *names: str, grace_s: float) -> None:
        """These drain and end for good, while the first one has work."""
        self.wait_busy(names[0])
        began_s = time.monotonic()
        self.cluster.remove(*names, timeout_s=grace_s)
        ended_s = time.monotonic()
        self.windows.append((began_s, ended_s + SETTLED_S))
        self.drains.append(f"{' + '.join(names)}: gone after {ended_s - began_s:.1f} s")

    def wait_busy(self, name: str) -> None:
        """Until it has work, if it is one that can say so."""
        gauges = BUSY_GAUGES.get(self.cluster.spec(name).role, ())
        if gauges:
            wait_for(lambda: any(_sums(self.cluster.metrics(name), gauges).values()), f"{name} has work")

    def replace_conductor(self, idx: int, *, grace_s: float) -> None:
        """Out of the load balancer, SIGTERM, back into it when its successor is ready."""
        name = f"conductor-{idx}"
        http, grpc = self.cluster.service_address(name), self.cluster.conductor_addresses[idx]
        self._http.backends = [address for address in self._http.backends if address != http]
        self._grpc.backends = [address for address in self._grpc.backends if address != grpc]
        time.sleep(NOTICED_S)
        self.replace(name, grace_s=grace_s)
        self._http.backends = [*self._http.backends, http]
        self._grpc.backends = [*self._grpc.backends, grpc]

    def wait_served(self, num_requests: int = 2) -> None:
        """Until so many requests of each kind that begin from now on are over."""
        num_before = len(self._load.answered)

        def is_served() -> bool:
            over = [answer.kind for answer in list(self._load.answered)[num_before:] if _is_over(answer)]
            return all(over.count(kind) >= num_requests for kind in (*KINDS, "http"))

        wait_for(is_served, "every kind of request is served", REQUEST_TIMEOUT_S)


@contextmanager
def rolling(bench: Bench, oracle: GreedyOracle, *, seed: int, title: str) -> Iterator[Roll]:
    """Load before, during and after the `with`, in which processes are replaced. Then no request has failed, every answer is right, and
    nothing is held."""
    cluster = bench.cluster
    conductors = [name for name in cluster.names() if name.startswith("conductor")]
    grpc = Balancer(cluster.conductor_addresses)
    http = Balancer([cluster.service_address(name) for name in conductors])
    load = Load(grpc, http, seed=seed)
    ready: list[bool] = []
    retries = num_retries(cluster, conductors)
    running = bench.spawn(load.run(lambda: ready.append(True)))
    roll = Roll(bench, load, grpc, http)
    try:
        wait_for(lambda: bool(ready) or running.done(), "clients are connected")
        roll.wait_served(1)
        before_s = time.monotonic()
        yield roll
        roll.wait_served(1)
    finally:
        load.stop()
        running.result(REQUEST_TIMEOUT_S + 10.0)
    report(title, roll, load.answered, before_s, num_retries(cluster, conductors) - retries)
    judge(load.answered, oracle, roll.windows)
    wait_nothing_held(cluster)


@contextmanager
def rolling_bench(model_dir: Path, *, prefill_groups: int, decode: int, hosts: int) -> Iterator[Bench]:
    """A cluster with two conductors and the drain times above."""
    with running_cluster(
        model=model_dir,
        prefill_groups=prefill_groups,
        decode=decode,
        conductors=2,
        settings=(*ROLLING, f"deploy.hosts={hosts}"),
    ) as cluster:
        bench = Bench(cluster)
        try:
            yield bench
        finally:
            bench.close()


def add_group(
    cluster: RunningCluster, group_id: str, *, like: tuple[str, ...], **sections: dict[str, object]
) -> list[str]:
    """One more group under new names; returns its stages."""
    control_address = f"127.0.0.1:{free_port()}"
    names = [f"{group_id}-stage-{idx}" for idx in range(len(like))]
    for name, old in zip(names, like, strict=True):
        cluster.add(name, like=old, prefill={"group_id": group_id, "control_address": control_address}, **sections)
    return names


def judge(answered: Sequence[Answered], oracle: GreedyOracle, windows: Sequence[tuple[float, float]]) -> None:
    """No error, every answer whole; token for token right if it was open when a process ended, or is one of some others."""
    failed = [f"{a.kind} after {len(a.tokens)} tokens: {a.error}" for a in answered if a.error]
    assert not failed, f"{len(failed)} of {len(answered)} requests failed: {failed[:8]}"
    texts: dict[tuple[int, ...], set[str]] = {}
    num_others: Counter[str] = Counter()
    for answer in answered:
        if answer.kind == "http":
            texts.setdefault(tuple(answer.prompt), set()).add(answer.text)
            continue
        assert len(answer.tokens) == answer.max_tokens
        if not answer.was_open(windows):
            num_others[answer.kind] += 1
            if num_others[answer.kind] > MOST_OTHERS:
                continue
        oracle.check(answer.prompt, answer.tokens, tie=MIN_TOP2_GAP)
    assert all(len(each) == 1 for each in texts.values()), f"different answers to one prompt: {texts.values()}"


def report(title: str, roll: Roll, answered: Sequence[Answered], before_s: float, num_retries: int) -> None:
    print(
        f"\n{title}: {len(answered)} requests, {sum(bool(a.error) for a in answered)} failed, {num_retries} further attempts"
    )
    for line in roll.drains:
        print(f"  {line}")
    for kind in (*KINDS, "http"):
        quiet = [a.longest_pause_s for a in answered if a.kind == kind and a.ended_s < before_s]
        rolled = [a.longest_pause_s for a in answered if a.kind == kind and a.ended_s >= before_s]
        print(
            f"  longest pause of a client, {kind}: {max(rolled, default=0.0):.2f} s ({max(quiet, default=0.0):.2f} s before)"
        )


def num_retries(cluster: RunningCluster, conductors: Sequence[str]) -> int:
    return sum(cluster.log(name).count("attempt failed, trying again") for name in conductors)


def wait_nothing_held(cluster: RunningCluster, timeout_s: float = 60.0) -> None:
    """On any node, by its own gauges."""
    last: list[str] = []

    def is_idle() -> bool:
        last[:] = _held(cluster)
        return not last

    try:
        wait_for(is_idle, "nothing is held", timeout_s)
    except AssertionError as error:
        raise AssertionError(f"still held after {timeout_s} s: {'; '.join(last)}") from error


def _held(cluster: RunningCluster) -> list[str]:
    held = []
    for name in cluster.names():
        role = cluster.spec(name).role
        if role not in IDLE_GAUGES:
            continue
        samples = cluster.metrics(name)
        sums = _sums(samples, IDLE_GAUGES[role])
        if role in PAGES:
            all_pages, free_pages = (samples.get(gauge, 0.0) for gauge in PAGES[role])
            sums["pages"] = all_pages - free_pages
        held += [f"{name} {gauge} {value:g}" for gauge, value in sums.items() if value]
    return held


def _sums(samples: Mapping[str, float], gauges: Sequence[str]) -> dict[str, float]:
    """Of each gauge over its labels."""
    return {gauge: sum(v for key, v in samples.items() if key.partition("{")[0] == gauge) for gauge in gauges}


def _is_over(answer: Answered) -> bool:
    return bool(answer.error) or len(answer.tokens) == answer.max_tokens or bool(answer.kind == "http" and answer.text)


async def _whole(web: httpx.AsyncClient, body: dict[str, Any]) -> str:
    reply = await web.post("/v1/completions", json=body)
    assert reply.status_code == 200, f"{reply.status_code} {reply.text}"
    return str(reply.json()["choices"][0]["text"])


async def _stream(web: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text = ""
    async with web.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, f"{reply.status_code} {(await reply.aread()).decode()}"
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
    return text


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        writer.transport.abort()
    finally:
        writer.close()
