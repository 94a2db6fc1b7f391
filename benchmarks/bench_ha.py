"""What clients and operators see when a conductor, Valkey or both are killed (kill -9) under load: two conductors, one host.

Clients send prompts of a fixed set, each request with an idempotency key of its own, to one of the two conductors each; a client whose
connection breaks asks the other one with the same key. Every answer is compared with the one that the same prompt got before anything
was killed (greedy, float32). Lost is a request without its whole answer after the retry.

    conductor   kill -> first token again, for the requests that it served (they begin anew at the other one)
                pause that a client of the living conductor sees, whose request joined an answer which the dead one was making
                kill -> the conductor that starts in its place serves, under load: that is also "a conductor is added"
    valkey      kill -> both conductors connected, every node announced again; and the index equal to what the store holds, although
                blocks were evicted and stored in the outage
    both        the two at once
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from harness import CpuWatch, machine, noise, print_result
from redis.exceptions import RedisError

from moontide.client import GenerateOptions, MoontideClient
from moontide.config import RegistryConfig
from moontide.errors import MoontideError
from moontide.registry import connect, read_records
from tests.cluster import RunningCluster, running_cluster
from tests.fault.harness import fault_model_dir, random_prompt
from tests.fault.index_watch import IndexWatch, evict_all, watching

SETTINGS = (
    "kvstore.pool_bytes=268435456",
    "kv.block_tokens=64",
    "kv.layer_group=1",
    "prefill.chunk_tokens=256",
    "prefill.num_pages=160",
    "decode.num_pages=200",
    "model.threads=1",
)
NUM_PROMPTS = 16
PROMPT_TOKENS = 320
MAX_TOKENS = 48
LONG_TOKENS = 600
"""Of the answer that two clients read when the conductor that makes it is killed."""
NUM_CLIENTS = 6
TIMEOUT_S = 60.0
CALM_S = 10.0
AFTER_S = 3.0
"""Load after everything is back, before the next kill."""
POLL_S = 0.02
NUM_NODES = 5


@dataclass(kw_only=True)
class Sent:
    """One request of the load."""

    conductor: int
    sent_s: float
    first_token_s: list[float] = field(default_factory=list)
    """Of each try."""
    end_s: float = 0.0
    num_tries: int = 0
    answer: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(kw_only=True)
class Kill:
    """One kill and what came of it."""

    victims: tuple[str, ...]
    at_s: float = 0.0
    back_s: dict[str, float] = field(default_factory=dict)
    """Seconds from the kill to each sign of recovery."""
    load: list[Sent] = field(default_factory=list)
    """Requests that ended after the kill and before the next phase."""
    pause_s: float = 0.0
    """The longest of the client that had joined the dead conductor's answer; 0 without one."""
    evicted_blocks: int = 0
    """While Valkey was away."""


class Load:
    """Clients that ask all the time."""

    def __init__(self, clients: list[MoontideClient], prompts: list[list[int]], seed: int) -> None:
        self._clients = clients
        self.prompts = prompts
        self._random = random.Random(seed)
        self._number = 0
        self.expected: list[list[int]] = []
        self.done: list[tuple[int, Sent]] = []
        """Prompt and request."""

    async def learn(self) -> None:
        """What is right: the answers of a cluster that nobody disturbs, twice, by each conductor."""
        for prompt in range(len(self.prompts)):
            first, second = [await self.ask(prompt, conductor, f"learn {prompt} {conductor}") for conductor in (0, 1)]
            assert not first.error, first.error
            assert first.answer == second.answer, "the conductors disagree before anything was killed"
            self.expected.append(first.answer)

    async def run(self, client: int) -> None:
        """One client, until it is cancelled."""
        while True:
            prompt = self._random.randrange(len(self.prompts))
            self._number += 1
            self.done.append((prompt, await self.ask(prompt, client % 2, f"load {self._number}")))

    async def ask(self, prompt: int, conductor: int, key: str, *, max_tokens: int = MAX_TOKENS) -> Sent:
        """One request, with one retry at the other conductor."""
        sent = Sent(conductor=conductor, sent_s=time.monotonic())
        for idx in (conductor, 1 - conductor):
            sent.num_tries += 1
            sent.answer = []
            try:
                await self._try(sent, idx, self.prompts[prompt], key, max_tokens)
                sent.error = ""
                break
            except MoontideError as error:
                sent.error = f"{error.code}: {error}"
        sent.end_s = time.monotonic()
        return sent

    async def _try(self, sent: Sent, conductor: int, prompt: list[int], key: str, max_tokens: int) -> None:
        params = GenerateOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
        chunks = self._clients[conductor].generate(prompt, params=params, idempotency_key=key)
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.tokens and not sent.answer:
                    sent.first_token_s.append(time.monotonic())
                sent.answer += [token.token_id for token in chunk.tokens]

    def wrong_and_lost(self) -> tuple[int, int]:
        lost = sum(bool(sent.error) for _, sent in self.done)
        wrong = sum(not sent.error and sent.answer != self.expected[prompt] for prompt, sent in self.done)
        return wrong, lost


class Experiment:
    def __init__(self, cluster: RunningCluster, load: Load, watch: IndexWatch, clients: list[MoontideClient]) -> None:
        self._cluster = cluster
        self._load = load
        self._watch = watch
        self._clients = clients

    async def kill(self, *victims: str) -> Kill:
        """Kill them at once under load, and wait until everything is back."""
        kill = Kill(victims=victims)
        first = len(self._load.done)
        joined = await self._join() if "conductor-0" in victims else None
        pids = {name: self._cluster.kill(name) for name in victims}
        kill.at_s = time.monotonic()
        if "valkey" in victims:
            kill.evicted_blocks = await evict_all(self._cluster.store_address)
        signs: dict[str, Callable[[], Awaitable[bool]]] = {}
        if "conductor-0" in victims:
            signs["conductor_serves"] = lambda: asyncio.to_thread(
                self._serves_again, "conductor-0", pids["conductor-0"]
            )
        if "valkey" in victims:
            signs["nodes_announced"] = lambda: self._all_announced(pids["valkey"])
            signs["index_equal"] = self._index_equal
        for name, seconds in zip(
            signs, await asyncio.gather(*(self._until(s, kill) for s in signs.values())), strict=True
        ):
            kill.back_s[name] = seconds
        if joined is not None:
            kill.pause_s = await joined
        await asyncio.sleep(AFTER_S)
        kill.load = [sent for _, sent in self._load.done[first:] if sent.end_s >= kill.at_s]
        return kill

    async def _join(self) -> Awaitable[float]:
        """A long answer made by conductor 0 and read at conductor 1 too; the longest pause that the reader there sees."""
        key = f"long {time.monotonic()}"
        maker = asyncio.create_task(self._load.ask(0, 0, key, max_tokens=LONG_TOKENS))
        times: list[float] = []
        reader = asyncio.create_task(self._read_long(key, times))
        while len(times) < 20:
            assert not reader.done(), reader
            await asyncio.sleep(POLL_S)

        async def pause() -> float:
            answer, made = await asyncio.gather(reader, maker)
            assert made.answer == answer, "two clients with one key got two answers"
            return max(after - before for before, after in pairwise(times))

        return pause()

    async def _read_long(self, key: str, times: list[float]) -> list[int]:
        params = GenerateOptions(max_tokens=LONG_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
        answer: list[int] = []
        chunks = self._clients[1].generate(self._load.prompts[0], params=params, idempotency_key=key)
        async with aclosing(chunks):
            async for chunk in chunks:
                times.append(time.monotonic())
                answer += [token.token_id for token in chunk.tokens]
        assert len(answer) == LONG_TOKENS
        return answer

    async def _until(self, sign: Callable[[], Awaitable[bool]], kill: Kill) -> float:
        async with asyncio.timeout(TIMEOUT_S):
            while not await sign():
                await asyncio.sleep(POLL_S)
        return time.monotonic() - kill.at_s

    def _serves_again(self, name: str, old_pid: int) -> bool:
        return self._cluster.pid(name) not in (None, old_pid) and self._cluster.is_ready(name)

    async def _all_announced(self, old_pid: int) -> bool:
        """Whether both conductors are connected, and the Valkey that has started in the old one's place, empty, holds every node."""
        if self._cluster.pid("valkey") in (None, old_pid):
            return False
        try:
            async with connect(RegistryConfig(url=self._cluster.registry_url)) as registry:
                num_nodes = len(await read_records(registry))
            statuses = await asyncio.gather(*(client.status() for client in self._clients))
        except (MoontideError, RedisError, OSError):
            return False
        return num_nodes == NUM_NODES and all(status.registry_connected and status.ready for status in statuses)

    async def _index_equal(self) -> bool:
        return self._watch.registry.connected and self._watch.follower.is_whole and await self._watch.difference() == ""


async def measure(cluster: RunningCluster, runs: int, seed: int) -> dict[str, Any]:
    clients = [MoontideClient(address) for address in cluster.conductor_addresses]
    load = Load(clients, [random_prompt(PROMPT_TOKENS, seed=seed + idx) for idx in range(NUM_PROMPTS)], seed)
    await load.learn()
    kills: list[Kill] = []
    async with watching(cluster.registry_url) as watch:
        experiment = Experiment(cluster, load, watch, clients)
        work = [asyncio.create_task(load.run(idx)) for idx in range(NUM_CLIENTS)]
        await asyncio.sleep(CALM_S)
        calm = [sent for _, sent in load.done]
        for _ in range(runs):
            for victims in (("conductor-0",), ("valkey",), ("valkey", "conductor-0")):
                kills.append(await experiment.kill(*victims))
                print(f"{' + '.join(victims)}: {kills[-1].back_s}, pause {kills[-1].pause_s:.3f} s", flush=True)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    for client in clients:
        await client.close()
    wrong, lost = load.wrong_and_lost()
    return {
        "requests": len(load.done),
        "wrong_answers": wrong,
        "lost_answers": lost,
        "errors": sorted({sent.error for _, sent in load.done if sent.error}),
        "calm_latency_s": latency([sent for sent in calm if sent.num_tries == 1]),
        **{
            "_and_".join(victims): summary([k for k in kills if k.victims == victims])
            for victims in {k.victims: 0 for k in kills}
        },
    }


def summary(kills: list[Kill]) -> dict[str, Any]:
    """Medians and worst values over the kills of one kind."""
    broken = [(kill, sent) for kill in kills for sent in kill.load if sent.num_tries > 1 and sent.sent_s <= kill.at_s]
    at_living = [s for k in kills for s in k.load if s.conductor == 1 and s.sent_s <= k.at_s + 1.0]
    recovered = [sent.first_token_s[-1] - kill.at_s for kill, sent in broken if not sent.error]
    return {
        "kills": len(kills),
        **{name: spread([kill.back_s[name] for kill in kills]) for name in kills[0].back_s},
        "evicted_blocks": sum(kill.evicted_blocks for kill in kills),
        "requests_broken": len(broken),
        "first_token_again_s": spread(recovered),
        "joined_pause_s": spread([kill.pause_s for kill in kills if kill.pause_s]),
        "requests_at_the_living": len(at_living),
        "of_these_disturbed": sum(sent.num_tries > 1 or bool(sent.error) for sent in at_living),
        "latency_at_the_living_s": latency(at_living),
    }


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(median(values), 3), "max": round(max(values), 3)}


def latency(load: list[Sent]) -> dict[str, float] | None:
    """Of whole answers."""
    return spread([sent.end_s - sent.sent_s for sent in load])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="kills of each kind (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and load (default %(default)s)")
    args = parser.parse_args()
    watch = CpuWatch()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = fault_model_dir(Path(folder))
        with running_cluster(model=model_dir, stages=2, conductors=2, settings=SETTINGS) as cluster:
            result = asyncio.run(measure(cluster, args.runs, args.seed))
    share = watch.others_share()
    print_result(
        {
            "benchmark": "ha",
            **result,
            "machine": machine(),
            **noise(share),
        }
    )


if __name__ == "__main__":
    main()
