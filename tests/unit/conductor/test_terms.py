"""On which terms a request is served: API keys, SLOs, priority and when to come again, over HTTP and gRPC alike."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from front import MODEL, PROMPT_TEXT, Front, open_front

from conductor.answer import OutputDelta
from conductor.cost import Slo
from conductor.tenants import Tenant
from conductor.validation import Submission, Wishes
from moontide.client import MoontideClient
from moontide.errors import BadRequest, MoontideError, Rejected, RejectReason, Unauthorized
from moontide.rpc import open_channel
from moontide_proto.v1 import moontide_pb2, moontide_pb2_grpc

KEY = "sk-secret"
ACME = {"name": "acme", "priority": 2, "ttft_slo_s": 5.0, "api_key_sha256": [hashlib.sha256(KEY.encode()).hexdigest()]}


class Seen:
    """Takes the conductor's place: notes what it is asked, then refuses it."""

    def __init__(self, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
        self.submissions: list[Submission] = []
        self.error: MoontideError = Rejected("full", reason=RejectReason.TTFT_SLO, retry_after_s=2.4)
        monkeypatch.setattr(front.conductor, "generate", self._generate)

    async def _generate(self, submission: Submission) -> AsyncIterator[OutputDelta]:
        self.submissions.append(submission)
        raise self.error
        yield

    @property
    def terms(self) -> tuple[str, Slo, int, str]:
        last = self.submissions[-1]
        return last.tenant.name, last.slo, last.priority, last.idempotency_key


@pytest_asyncio.fixture
async def guarded(model_dir: Path, tmp_path: Path) -> AsyncIterator[Front]:
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": [ACME]}))
    async with open_front(model_dir, tenants_file=file, tbt_slo_s=0.5) as opened:
        yield opened


@pytest.fixture
def seen(guarded: Front, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(guarded, monkeypatch)


async def post(front: Front, headers: dict[str, str], path: str = "/v1/completions") -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 5}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": PROMPT_TEXT}
    async with httpx.AsyncClient(base_url=front.http_url, timeout=30.0) as client:
        return await client.post(path, json=body, headers=headers)


BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_http_headers_say_who_asks_and_on_which_terms(guarded: Front, seen: Seen, path: str) -> None:
    await post(guarded, BEARER, path)
    assert seen.terms == ("acme", Slo(ttft_s=5.0, tbt_s=0.5), 2, "")
    terms = {
        "X-Moontide-TTFT-SLO": "1.5",
        "X-Moontide-TBT-SLO": "0.05",
        "X-Moontide-Priority": "-3",
        "Idempotency-Key": "k1",
    }
    await post(guarded, {**BEARER, **terms}, path)
    assert seen.terms == ("acme", Slo(ttft_s=1.5, tbt_s=0.05), -3, "k1")


async def test_grpc_metadata_and_fields_say_the_same(guarded: Front, seen: Seen) -> None:
    async with MoontideClient(guarded.grpc_address, api_key=KEY) as client:
        for terms in (
            {},
            {"ttft_slo_s": 1.5, "tbt_slo_s": 0.05, "priority": -3, "idempotency_key": "k1"},
        ):
            with pytest.raises(Rejected) as refused:
                async for _ in client.generate(PROMPT_TEXT, **terms):  # type: ignore[arg-type]
                    pass
            assert refused.value.retry_after_s == 2.4
    assert len(seen.submissions) == 2
    assert seen.terms == ("acme", Slo(ttft_s=1.5, tbt_s=0.05), -3, "k1")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
async def test_without_a_right_key_nothing_is_done(guarded: Front, seen: Seen, headers: dict[str, str]) -> None:
    answer = await post(guarded, headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "Unauthorized"
    async with MoontideClient(guarded.grpc_address, api_key="wrong" if headers else "") as client:
        with pytest.raises(Unauthorized, match="API key"):
            async for _ in client.generate(PROMPT_TEXT):
                pass
    assert seen.submissions == []


async def test_grpc_status_of_a_missing_key_is_unauthenticated(guarded: Front) -> None:
    async with open_channel(guarded.grpc_address) as channel:
        stub = moontide_pb2_grpc.MoontideStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in stub.Generate(moontide_pb2.GenerateRequest(text="x")):
                pass
        assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("retry_after_s", "header"), [(2.4, "3"), (0.01, "1"), (None, "1")])
async def test_who_is_refused_is_told_when_to_come_again(
    guarded: Front, seen: Seen, retry_after_s: float | None, header: str
) -> None:
    seen.error = Rejected("full", reason=RejectReason.TTFT_SLO, retry_after_s=retry_after_s)
    answer = await post(guarded, BEARER)
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == header


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Moontide-TTFT-SLO", "soon"),
        ("X-Moontide-TTFT-SLO", "0"),
        ("X-Moontide-TBT-SLO", "nan"),
        ("X-Moontide-Priority", "high"),
        ("X-Moontide-Priority", "3"),
        ("X-Moontide-Priority", "-1000"),
    ],
)
async def test_terms_that_make_no_sense_are_refused_by_name(
    guarded: Front, seen: Seen, header: str, value: str
) -> None:
    answer = await post(guarded, {**BEARER, header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].replace("_", "-").lower().removesuffix("-s") in header.lower()
    assert seen.submissions == []


def test_a_request_may_ask_for_a_lower_class_than_its_tenant_has_and_not_for_a_higher_one() -> None:
    tenant = Tenant(name="a", priority=1)
    assert Wishes().priority_of(tenant) == 1
    assert Wishes(priority=-5).priority_of(tenant) == -5
    with pytest.raises(BadRequest, match="at most 1"):
        Wishes(priority=2).priority_of(tenant)


BUSY_PREFILL = {"step_token_s": 0.001, "num_stages": 1.0, "chunk_tokens": 512.0, "queued_s": 10.0, "num_pages": 1000.0}
SLOW_DECODE = {
    "step_overhead_s": 0.5,
    "step_token_s": 0.001,
    "max_batch": 64.0,
    "free_pages": 1000.0,
    "num_pages": 1000.0,
}


@asynccontextmanager
async def loaded(model_dir: Path, **settings: Any) -> AsyncIterator[Front]:
    """A prefill group with 10 s of work before it, and a decode instance that needs half a second per step."""
    async with open_front(model_dir, policy="kvcache-centric", **settings) as front:
        for node_id, load in (("prefill-0", BUSY_PREFILL), ("decode-0", SLOW_DECODE)):
            record = front.cluster.registry.records[node_id]
            await front.cluster.registry.set(dataclasses.replace(record, load=load))
        yield front
        await front.settle()


@pytest.mark.parametrize(
    ("terms", "reason", "code"),
    [
        ({"X-Moontide-TTFT-SLO": "4"}, "first token is expected after", 429),
        ({"X-Moontide-TBT-SLO": "0.1"}, "tokens are expected every 0.50", 429),
        ({"X-Moontide-TTFT-SLO": "20", "X-Moontide-TBT-SLO": "0.9"}, "", 200),
        ({}, "", 200),
    ],
)
async def test_what_would_miss_its_slo_is_refused_before_any_work(
    model_dir: Path, terms: dict[str, str], reason: str, code: int
) -> None:
    async with loaded(model_dir) as front:
        answer = await post(front, terms)
        assert answer.status_code == code, answer.text
        assert len(front.cluster.prompts()) == (code == 200)
        if code == 429:
            assert reason in answer.json()["error"]["message"]
        if "X-Moontide-TTFT-SLO" in terms and code == 429:
            assert 5 <= int(answer.headers["Retry-After"]) <= 8, "what is late of about 10 s"
            assert front.metric("conductor_rejected_total", reason="ttft_slo", tenant="default") == 1


async def test_without_admission_nothing_is_refused(model_dir: Path) -> None:
    async with loaded(model_dir, admission="off") as front:
        assert (await post(front, {"X-Moontide-TTFT-SLO": "0.001", "X-Moontide-TBT-SLO": "0.001"})).status_code == 200


async def test_the_bounds_of_the_model_hold_for_requests_that_name_none(model_dir: Path) -> None:
    async with loaded(model_dir, ttft_slo_s=4.0) as front:
        assert (await post(front, {})).status_code == 429
        assert (await post(front, {"X-Moontide-TTFT-SLO": "60"})).status_code == 200
