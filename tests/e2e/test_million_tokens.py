"""A prompt of a million token ids goes HTTP -> conductor -> stage 0 -> store -> decode through real processes; the steps are paced."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.paced_models import PacedModel, write_paced_model
from kvstore.access import KvConfig
from model_runner.config import ModelConfig
from model_runner.model_source import describe_model
from model_runner.paced import paced_token
from tests.cluster import RunningCluster, running_cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NUM_TOKENS = 1_000_000
BLOCK = 256
MAX_TOKENS = 64
"""Some of these tokens are letters: a paced answer runs through the vocabulary."""
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PacedModel:
    root = tmp_path_factory.mktemp("paced")
    return write_paced_model(root, overhead_s=1e-3, token_s=4e-6, pair_s=2e-12, decode_step_s=5e-3)


@pytest.fixture(scope="module")
def cluster(model: PacedModel) -> Iterator[RunningCluster]:
    settings = [*model.settings, f"kv.block_tokens={BLOCK}", "prefill.chunk_tokens=8192"]
    with running_cluster(model=model.directory, dtype="bfloat16", stages=2, settings=settings) as running:
        yield running


def call(cluster: RunningCluster, method: str, path: str, body: Any = None) -> Any:
    """One HTTP call to the conductor; the JSON of its answer."""
    host, _, port = cluster.http_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return json.loads(content)
    finally:
        connection.close()


def expected_text(model: PacedModel) -> str:
    config = ModelConfig(name=str(model.directory), load_format="paced", profile=str(model.profile))
    info = describe_model(config, KvConfig()).info
    tokens = [paced_token(position, info) for position in range(NUM_TOKENS, NUM_TOKENS + MAX_TOKENS)]
    text: str = Tokenizer.from_file(str(model.directory / "tokenizer.json")).decode(tokens)
    return text


def seconds_by_part(timeline: dict[str, Any]) -> dict[str, float]:
    """Where the time went: the parts of TTFT, and the sum of each kind of work after it."""
    seconds: dict[str, float] = dict(timeline["ttft_parts"])
    for span in timeline["spans"]:
        if span["name"] in ("fetch", "pull", "handoff", "decode"):
            key = f"{span['name']} ({span['track']})"
            seconds[key] = seconds.get(key, 0.0) + span["duration_s"]
    return {name: round(value, 3) for name, value in seconds.items()}


@pytest.mark.timeout(600)
def test_a_million_token_ids_over_http_cold_and_as_a_prefix_hit(cluster: RunningCluster, model: PacedModel) -> None:
    prompt = random.Random(0).choices(range(3, 259), k=NUM_TOKENS)
    text = expected_text(model)
    assert "ABC" in text
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    for cached_tokens in (0, (NUM_TOKENS - 1) // BLOCK * BLOCK):
        answer = call(cluster, "POST", "/v1/completions", body)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert answer["usage"]["prompt_tokens"] == NUM_TOKENS
        assert answer["usage"]["completion_tokens"] == MAX_TOKENS
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached_tokens
        timeline = call(cluster, "GET", f"/v1/timelines/{answer['id']}")
        print(f"{cached_tokens} tokens cached: {seconds_by_part(timeline)}")
    wait_for(lambda: nothing_is_held(cluster), "pages and reservations of the ended requests are free")


def nothing_is_held(cluster: RunningCluster) -> bool:
    decode, store = cluster.metrics("decode-0"), cluster.metrics("kvstore-0")
    group = cluster.metrics("prefill-0-stage-0")
    return (
        decode["decode_free_pages"] == decode["decode_pages"]
        and group["prefill_free_pages"] == group["prefill_num_pages"]
        and store["kvstore_reservations"] == store["kvstore_pinned_blocks"] == 0
    )
