"""Draws follow the distribution that was asked for and depend on nothing but (logits, parameters, seed, index)."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from model_runner.sampling import sample
from moontide.errors import Internal
from moontide.sampling_params import SamplingParams

LOGITS_V = torch.tensor([2.0, -1.0, 0.5, 3.0, 3.0, -20.0, 1.0])
NUM_DRAWS = 4000


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, **changes})


def draw_many(**changes: Any) -> Counter[int]:
    drawn = sample(LOGITS_V.expand(NUM_DRAWS, -1), [params(seed=3, **changes)] * NUM_DRAWS, range(NUM_DRAWS))
    return Counter(each.token_id for each in drawn)


def test_greedy_takes_the_lowest_of_equally_likely_tokens() -> None:
    assert sample(LOGITS_V[None], [params(temperature=0)], [0])[0].token_id == 3
    assert sample(torch.zeros(1, 1000), [params(temperature=0)], [0])[0].token_id == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_softmax(temperature: float) -> None:
    drawn = draw_many(temperature=temperature)
    expected = torch.softmax(LOGITS_V / temperature, dim=-1)
    for token_id, probability in enumerate(expected.tolist()):
        spread = (probability * (1 - probability) / NUM_DRAWS) ** 0.5
        assert abs(drawn[token_id] / NUM_DRAWS - probability) <= 4 * spread + 1e-3


def test_top_k_and_top_p_keep_the_most_likely_tokens() -> None:
    assert set(draw_many(top_k=2)) == {3, 4}
    assert set(draw_many(top_k=1)) == {3}
    probabilities = torch.softmax(LOGITS_V, dim=-1)
    assert set(draw_many(top_p=float(probabilities[3]) - 0.01)) == {3}
    assert set(draw_many(top_p=float(probabilities[[3, 4]].sum()) + 0.01)) == {0, 3, 4}
    assert set(draw_many(top_k=3, top_p=0.5)) == {3, 4}


def test_draw_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 50, generator=generator)
    settings = [params(seed=idx, temperature=0.5 + idx / 10, top_p=0.9, top_k=idx) for idx in range(20)]
    indices = [7 * idx for idx in range(20)]
    together = sample(logits, settings, indices)
    alone = [sample(logits[idx : idx + 1], [settings[idx]], [indices[idx]])[0] for idx in range(20)]
    backwards = sample(logits.flip(0), settings[::-1], indices[::-1])[::-1]
    assert together == alone == backwards


def test_seed_and_index_choose_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    drawn = {
        (seed, idx): sample(logits, [params(seed=seed)], [idx])[0].token_id
        for seed in (0, 1, 2**64 - 1)
        for idx in (0, 1, 2**31)
    }
    assert len(set(drawn.values())) == 9
    assert drawn[1, 1] == sample(logits, [params(seed=1)], [1])[0].token_id


def test_logprobs_are_the_models_own() -> None:
    expected = torch.log_softmax(LOGITS_V, dim=-1)
    plain, rich = sample(LOGITS_V.expand(2, -1), [params(), params(temperature=0.1, top_k=1, logprobs=3)], [0, 0])
    assert plain.logprob is None
    assert plain.top_logprobs == []
    assert rich.token_id == 3
    assert rich.logprob == pytest.approx(float(expected[3]))
    assert [token_id for token_id, _ in rich.top_logprobs] == [3, 4, 0]
    assert np.allclose([logprob for _, logprob in rich.top_logprobs], expected[[3, 4, 0]])
    only_own = sample(LOGITS_V[None], [params(logprobs=0)], [0])[0]
    assert only_own.logprob == pytest.approx(float(expected[only_own.token_id]))
    assert only_own.top_logprobs == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (float("-inf"), "infinite")]
)
def test_row_without_finite_logits_gives_an_error_and_the_others_their_tokens(
    value: float, what: str, temperature: float
) -> None:
    logits = LOGITS_V.repeat(3, 1)
    logits[1, 2 if value > 0 or what == "NaN" else slice(None)] = value
    settings = params(temperature=temperature, seed=7)
    drawn = sample(logits, [settings] * 3, [4, 5, 6])
    assert isinstance(drawn[1], Internal)
    assert f"{what} logits for token 5 of the answer" in str(drawn[1])
    assert [drawn[0], drawn[2]] == sample(LOGITS_V.repeat(2, 1), [settings] * 2, [4, 6])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_are_ruled_out_are_not_drawn_and_harm_nobody(temperature: float) -> None:
    logits = torch.full((1, 5), float("-inf"))
    logits[0, 3] = 1.0
    assert sample(logits, [params(temperature=temperature)], [0])[0].token_id == 3
