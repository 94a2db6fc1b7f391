"""A conductor with both its APIs in front of fake nodes, for the tests of this folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from conductor import grpc_api
from conductor.answer import OutputDelta
from conductor.config import ConductorConfig, ConductorSettings
from conductor.idempotency import Answers
from conductor.metrics import ConductorMetrics
from conductor.openai_api import OpenAiApi
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeRegistry
from conductor.roles import RoleManager
from conductor.service import Conductor
from conductor.tenants import TenantDirectory
from conductor.tokenizer import Tokenizer
from conductor.validation import GenerateParams, Prompt, RequestId, ServedModel, Submission, TextPrompt
from moontide.clock import MonotonicClock
from moontide.config import NodeConfig, RegistryConfig
from moontide.rpc import Server
from tests.fakes.nodes import FakeCluster

MODEL = "fake-model"
ANSWER_TEXT = "The quick brown fox jumps over the lazy dog 🦊 and café runs away"
PROMPT_TEXT = "In the beginning there was a token, and the token was sampled, and the sample was good."
WAIT_S = 20.0


@dataclass(kw_only=True)
class Front:
    cluster: FakeCluster
    conductor: Conductor
    model_dir: Path
    answer_ids: list[int]
    """Ids of ANSWER_TEXT, without the end token that the nodes send after them."""
    prompt_ids: list[int]
    api: OpenAiApi
    http_url: str = ""
    grpc_address: str = ""

    def submission(self, prompt: Prompt | None = None, request_id: str = "r1", **params: Any) -> Submission:
        params = {"max_tokens": 100, "temperature": 0.0, **params}
        return Submission(
            request_id=RequestId(request_id),
            prompt=prompt or TextPrompt(text=PROMPT_TEXT),
            params=GenerateParams(**params),
            arrival_s=self.conductor.clock.now(),
        )

    async def generate(self, **params: Any) -> list[OutputDelta]:
        return [delta async for delta in self.conductor.generate(self.submission(**params))]

    def decoded(self, token_ids: list[int]) -> str:
        return self.conductor.tokenizer.decode(token_ids)

    async def settle(self) -> None:
        """Wait until nothing is held for any request, here and on the nodes."""
        await until(lambda: self.cluster.holds_nothing and self.conductor.num_active == 0)
        await until(lambda: self.conductor._background.num_running == 0)
        self.conductor.check_invariants()

    def metric(self, name: str, **labels: str) -> float:
        return self.conductor.metrics.registry.get_sample_value(name, labels) or 0.0


async def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def text_of(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[OutputDelta]) -> list[int]:
    return [out.token.token_id for delta in deltas for out in delta.tokens]


@asynccontextmanager
async def open_front(
    model_dir: Path, *, num_prefill: int = 1, num_decode: int = 1, answer_text: str = ANSWER_TEXT, **settings: Any
) -> AsyncIterator[Front]:
    tokenizer = Tokenizer.load(model_dir)
    model = ServedModel.load(model_dir, MODEL)
    answer_ids = tokenizer.encode_blocking(answer_text, add_special_tokens=False).tolist()
    prompt_ids = tokenizer.encode_blocking(PROMPT_TEXT, add_special_tokens=True).tolist()
    # After the end token comes text that nobody may see.
    cluster = FakeCluster(
        answer=[*answer_ids, *model.eos_token_ids, *answer_ids], num_prefill=num_prefill, num_decode=num_decode
    )
    config = ConductorConfig(
        node=NodeConfig(node_id="conductor-0"),
        registry=RegistryConfig(url="redis://127.0.0.1:1/0", heartbeat_s=0.02, lease_s=0.1),
        conductor=ConductorSettings(
            model_dir=model_dir,
            served_model_name=MODEL,
            **{"default_timeout_s": 30.0, "lease_s": 0.3, "nodes_wait_s": 0.0, **settings},
        ),
    )
    metrics = ConductorMetrics(CollectorRegistry())
    registry = cast(NodeRegistry, cluster.registry)
    answers = Answers(config, registry=registry, metrics=metrics.registry, clock=MonotonicClock(), boot_id="boot")
    conductor = Conductor(
        config,
        model=model,
        tokenizer=tokenizer,
        registry=registry,
        index=PrefixIndex(),
        answers=answers,
        metrics=metrics,
        clock=MonotonicClock(),
    )
    tenants = TenantDirectory(config.conductor, config.registry, metrics)
    api = OpenAiApi(conductor, tenants, max_body_bytes=config.conductor.max_body_bytes)
    front = Front(
        cluster=cluster,
        conductor=conductor,
        model_dir=model_dir,
        answer_ids=answer_ids,
        prompt_ids=prompt_ids,
        api=api,
    )
    server = Server()
    grpc_api.add_to(server, conductor, tenants, RoleManager(config, registry, metrics, MonotonicClock()))
    try:
        await cluster.start()
        conductor.start()
        front.http_url = f"http://127.0.0.1:{await api.start('127.0.0.1', 0)}"
        front.grpc_address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        await server.set_serving(True)
        yield front
    finally:
        await api.close()
        await server.close()
        await answers.close()
        await tenants.close()
        await conductor.close()
        await cluster.close()
