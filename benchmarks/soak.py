"""Half an hour of mixed load on a small cluster: does anything grow that should not?

    short      new prompts of one or two blocks               long       new prompts of ten to twenty blocks
    chat       each turn asks with the whole conversation     hang-up    long answers; clients leave at random moments, HTTP and gRPC
    stream     server-sent events of the OpenAI API           again      one prompt, whose answer must not change

Every kind has workers that send one request after the other. Each process is looked at every few seconds; slopes are those of a line
through the samples after the first third, in which caches fill. Counts that must be equal (file descriptors, pins, objects) are taken while
nothing is in work: after a warm-up of every kind, and at the end.

Exit code 1 when a bound is broken: `broken` in the result says which.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx
from harness import CpuWatch, cluster, machine, noise, print_result

from deploy.local import LocalCluster
from kvstore.access import KvConfig
from kvstore.client import StoreNodeClient
from kvstore.layout import KVLayout
from model_runner.config import ModelConfig
from model_runner.model_source import describe_model
from moontide.client import GenerateOptions, MoontideClient
from moontide.errors import MoontideError

STAGES = 2
BLOCK = 64
NUM_PAGES = 160
SETTINGS = (
    f"deploy.stages={STAGES}",
    f"kv.block_tokens={BLOCK}",
    f"prefill.num_pages={NUM_PAGES}",
    f"decode.num_pages={NUM_PAGES}",
    "deploy.object_lease_s=2",
    "conductor.local_prefill=true",
)
POOL_BLOCKS = 120
"""So few that cached blocks are evicted all the time."""
SHORT_TOKENS = (BLOCK, 2 * BLOCK)
LONG_TOKENS = (10 * BLOCK, 20 * BLOCK)
CHAT_TURNS = 6
VOCABULARY = range(3, 256)
"""Token ids that every model has."""
MOST_RSS_SLOPE = 1.0
"""MB per minute, of each process."""
MOST_FD_SLOPE = 0.2
"""Per minute."""
MOST_IDLE_FDS = 16
"""More of each process, idle at the end, than idle after the warm-up: pools of connections fill when calls overlap."""
IDLE_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 120.0
MB = 1e6

Prompt = list[int]


@dataclass
class Look:
    """What all processes held at one moment."""

    at_s: float
    rss_bytes: Mapping[str, int]
    num_fds: Mapping[str, int]
    pins: int
    objects: int
    """Blocks' objects that the store's master lists."""
    counted_objects: int
    """Of sealed blocks, by the pool."""


@dataclass
class Tally:
    """What clients saw."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    """Answers to the repeated prompt that differ from the first."""


class Observer:
    """Looks at the processes of a cluster from outside."""

    def __init__(self, running: LocalCluster, layout: KVLayout) -> None:
        self._running = running
        self._layout = layout
        self._store = StoreNodeClient(running.plan.store_address)
        self._client = MoontideClient(running.grpc_address)
        self._master_http = running.plan.spec("mooncake-master").listens_on[1]
        self._started_s = time.monotonic()

    async def close(self) -> None:
        await self._store.close()
        await self._client.close()

    async def look(self) -> Look:
        """Raises: ProcessLookupError when a process is not there; NodeLost."""
        pids = self._pids()
        stats = await self._store.stats()
        return Look(
            at_s=time.monotonic() - self._started_s,
            rss_bytes={name: _rss_bytes(pid) for name, pid in pids.items()},
            num_fds={name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
            pins=stats.pinned_blocks,
            objects=await asyncio.to_thread(self._num_objects),
            counted_objects=stats.sealed_blocks * self._layout.num_groups,
        )

    async def look_when_idle(self) -> Look:
        """The look when nothing is in work, held or on its way out any more, or after a minute."""
        give_up_s = time.monotonic() + IDLE_TIMEOUT_S
        while not await self._is_idle() and time.monotonic() < give_up_s:
            await asyncio.sleep(0.5)
        return await self.look()

    async def _is_idle(self) -> bool:
        stats, cluster_info = await self._store.stats(), await self._client.status()
        is_held = stats.reservations or stats.pinned_blocks or stats.objects_to_remove or cluster_info.active_requests
        look = await self.look()
        # What was put after its client had hung up is found when the pool looks once more, some seconds after the request's end.
        return not is_held and look.objects == look.counted_objects

    def _pids(self) -> dict[str, int]:
        pids = {}
        for name in self._running.names():
            pid = self._running.pid(name)
            if pid is None:
                raise ProcessLookupError(f"{name} is not running")
            pids[name] = pid
            if name.startswith("kvstore"):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if len(children) != 1:
                    raise ProcessLookupError(f"{name} has {len(children)} children, not its data client alone")
                pids[f"{name} data client"] = int(children[0])
        return pids

    def _num_objects(self) -> int:
        connection = http.client.HTTPConnection(self._master_http, timeout=10.0)
        try:
            connection.request("GET", "/get_all_keys")
            keys = connection.getresponse().read().decode().split()
        finally:
            connection.close()
        return sum(key.startswith(("b/", "p/")) for key in keys)


class Clients:
    """Workers that send requests of every kind."""

    def __init__(self, grpc: MoontideClient, web: httpx.AsyncClient, model: str, tally: Tally, *, seed: int) -> None:
        self._grpc = grpc
        self._web = web
        self._model = model
        self._random = random.Random(seed)
        self._again = self._prompt(LONG_TOKENS)
        self._known: list[int] | None = None
        self._tally = tally
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "short": self._short,
            "long": self._long,
            "chat": self._chat,
            "hang-up": self._hang_up,
            "hang-up http": self._hang_up_http,
            "stream": self._stream,
            "again": self._ask_again,
        }

    async def warm_up(self) -> None:
        """Touch every page and the whole pool, so that they count as memory from now on; then send every kind once."""
        longest = LONG_TOKENS[1]
        prompts = [self._prompt((longest, longest)) for _ in range(2 * NUM_PAGES * BLOCK // longest)]
        await asyncio.gather(*(self._ask(prompt, max_tokens=16) for prompt in prompts))
        for kind in self._kinds:
            await self._one(kind)

    async def run(self, until_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for kind in self._kinds:
                tasks.create_task(self._work(kind, until_s))

    async def _work(self, kind: str, until_s: float) -> None:
        while time.monotonic() < until_s:
            await self._one(kind)

    async def _one(self, kind: str) -> None:
        self._tally.requests[kind] += 1
        try:
            await self._kinds[kind]()
        except (MoontideError, httpx.HTTPError) as error:
            print(f"{kind}: {type(error).__name__}: {error}", flush=True)
            self._tally.errors[f"{kind}: {type(error).__name__}"] += 1

    async def _short(self) -> None:
        await self._ask(self._prompt(SHORT_TOKENS), max_tokens=16)

    async def _long(self) -> None:
        await self._ask(self._prompt(LONG_TOKENS), max_tokens=16)

    async def _chat(self) -> None:
        conversation: Prompt = []
        for _ in range(CHAT_TURNS):
            conversation += self._prompt(SHORT_TOKENS)
            conversation += await self._ask(conversation, max_tokens=48)

    async def _ask_again(self) -> None:
        answer = await self._ask(self._again, max_tokens=16)
        self._known = self._known or answer
        self._tally.wrong += answer != self._known

    async def _hang_up(self) -> None:
        await self._leave(self._ask(self._prompt(LONG_TOKENS), max_tokens=400))

    async def _hang_up_http(self) -> None:
        await self._leave(self._stream_events(self._prompt(LONG_TOKENS), max_tokens=400))

    async def _stream(self) -> None:
        await self._stream_events(self._prompt(SHORT_TOKENS), max_tokens=32)

    async def _leave(self, work: Awaitable[Any]) -> None:
        """Cancel a request at a random moment: in its queue, its prefill, its hand-off or its answer."""
        try:
            async with asyncio.timeout(self._random.uniform(0.0, 2.0)):
                await work
        except TimeoutError:
            return

    async def _ask(self, prompt: Prompt, *, max_tokens: int) -> list[int]:
        params = GenerateOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=REQUEST_TIMEOUT_S)
        async with aclosing(self._grpc.generate(prompt, params=params)) as chunks:
            return [token.token_id async for chunk in chunks for token in chunk.tokens]

    async def _stream_events(self, prompt: Prompt, *, max_tokens: int) -> None:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        async with self._web.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_lines():
                pass

    def _prompt(self, lengths: tuple[int, int]) -> Prompt:
        return self._random.choices(VOCABULARY, k=self._random.randint(*lengths))


@asynccontextmanager
async def open_clients(running: LocalCluster, tally: Tally, *, seed: int) -> AsyncIterator[Clients]:
    async with (
        MoontideClient(running.grpc_address) as grpc,
        httpx.AsyncClient(base_url=f"http://{running.http_address}", timeout=REQUEST_TIMEOUT_S) as web,
    ):
        yield Clients(grpc, web, (await grpc.status()).model, tally, seed=seed)


async def soak(
    running: LocalCluster, layout: KVLayout, *, minutes: float, sample_s: float, seed: int
) -> tuple[Tally, list[Look]]:
    """Looks: idle after a warm-up, every `sample_s` under load, idle when all is over."""
    observer = Observer(running, layout)
    try:
        tally = Tally()
        async with open_clients(running, tally, seed=seed) as clients:
            await clients.warm_up()
        looks = [await observer.look_when_idle()]
        async with open_clients(running, tally, seed=seed + 1) as clients:
            loading = asyncio.create_task(clients.run(time.monotonic() + 60 * minutes))
            while not loading.done():
                await asyncio.wait({loading}, timeout=sample_s)
                try:
                    looks.append(await observer.look())
                except (OSError, http.client.HTTPException, MoontideError) as error:
                    print(f"no look: {type(error).__name__}: {error}", flush=True)
                    continue
                _say(looks[-1], tally)
            await loading
        looks.append(await observer.look_when_idle())
        return tally, looks
    finally:
        await observer.close()


def slopes(looks: Sequence[Look], of: Callable[[Look], Mapping[str, int]]) -> dict[str, float]:
    """Growth per minute of each process, after the first third."""
    late = looks[len(looks) // 3 :]
    minutes = [look.at_s / 60 for look in late]
    return {name: linear_regression(minutes, [of(look)[name] for look in late]).slope for name in of(late[0])}


def summary(tally: Tally, looks: Sequence[Look], deaths: Sequence[str]) -> dict[str, Any]:
    first, loaded, last = looks[0], looks[1:-1], looks[-1]
    rss = {name: slope / MB for name, slope in slopes(loaded, lambda look: look.rss_bytes).items()}
    fds = slopes(loaded, lambda look: look.num_fds)
    idle_fds = {name: last.num_fds[name] - number for name, number in first.num_fds.items()}
    bounds = {
        **{f"rss of {name}": slope < MOST_RSS_SLOPE for name, slope in rss.items()},
        **{f"fd slope of {name}": slope < MOST_FD_SLOPE for name, slope in fds.items()},
        **{f"idle fds of {name}": growth <= MOST_IDLE_FDS for name, growth in idle_fds.items()},
        "pins": last.pins == 0,
        "objects": last.objects == last.counted_objects,
        "errors": not tally.errors,
        "wrong answers": not tally.wrong,
        "deaths": not deaths,
    }
    return {
        "broken": [name for name, holds in bounds.items() if not holds],
        "rss_slope_mb_per_min": {name: round(slope, 3) for name, slope in rss.items()},
        "rss_mb_end": {name: round(nbytes / MB, 1) for name, nbytes in last.rss_bytes.items()},
        "fd_slope_per_min": {name: round(slope, 3) for name, slope in fds.items()},
        "idle_fd_growth": idle_fds,
        "pins_end": last.pins,
        "pins_max": max(look.pins for look in loaded),
        "master_keys_end": last.objects,
        "master_keys_counted": last.counted_objects,
        "master_keys_max": max(look.objects for look in loaded),
        "requests": dict(tally.requests),
        "errors": dict(tally.errors),
        "wrong_answers": tally.wrong,
        "deaths": list(deaths),
        "samples": len(loaded),
    }


def _rss_bytes(pid: int) -> int:
    resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def _say(look: Look, tally: Tally) -> None:
    rss = " ".join(f"{name}={nbytes / MB:.0f}" for name, nbytes in look.rss_bytes.items())
    print(
        f"{look.at_s:7.1f} s  {sum(tally.requests.values())} requests, {sum(tally.errors.values())} errors, {look.pins} pins, "
        f"{look.objects} objects, {sum(look.num_fds.values())} fds  MB: {rss}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="smollm2", help="as model.name")
    parser.add_argument("--sample-s", type=float, default=5.0, help="seconds between two looks at the processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="setting for the cluster")
    args = parser.parse_args()
    layout = describe_model(ModelConfig(name=args.model, dtype="float32"), KvConfig(block_tokens=BLOCK)).layout
    settings = [
        f"model.name={args.model}",
        "model.dtype=float32",
        f"kv.layer_group={layout.layer_group}",
        f"kvstore.pool_bytes={max(16 << 20, int(POOL_BLOCKS * layout.block_bytes / 0.85))}",
        *SETTINGS,
        *args.set,
    ]
    watch = CpuWatch()
    with cluster(settings) as running:
        tally, looks = asyncio.run(soak(running, layout, minutes=args.minutes, sample_s=args.sample_s, seed=args.seed))
        result = summary(tally, looks, running.news())
    others_share = watch.others_share()
    print_result({**result, "minutes": args.minutes, "model": args.model, **noise(others_share), **machine()})
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
