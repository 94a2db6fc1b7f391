import pytest

from moontide.errors import BadRequest
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams


def test_params_survive_the_wire() -> None:
    params = SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        seed=2**64 - 1,
        stop_token_ids=(4, 5),
        eos_token_ids=(2,),
        logprobs=0,
    )
    assert SamplingParams.from_proto(params.to_proto()) == params
    assert SamplingParams.from_proto(SamplingParams(max_tokens=1).to_proto()).logprobs is None


def test_token_survives_the_wire() -> None:
    token = SampledToken(token_id=7, logprob=-0.5, top_logprobs=[(7, -0.5), (9, -1.5)])
    assert SampledToken.from_proto(token.to_proto(3)) == token
    assert SampledToken.from_proto(SampledToken(token_id=7).to_proto(0)) == SampledToken(token_id=7)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
    ],
)
def test_value_out_of_range_names_the_field(values: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest, match=param) as error:
        SamplingParams(**{"max_tokens": 1, **values})  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize(
    ("token_id", "output_idx", "ignore_eos", "expected"),
    [
        (2, 0, False, FinishReason.STOP),
        (2, 0, True, None),
        (9, 0, True, FinishReason.STOP),
        (7, 0, False, None),
        (7, 3, False, None),
        (7, 4, False, FinishReason.LENGTH),
        (2, 4, True, FinishReason.LENGTH),
        (2, 4, False, FinishReason.STOP),
    ],
)
def test_end_of_request(token_id: int, output_idx: int, ignore_eos: bool, expected: FinishReason | None) -> None:
    params = SamplingParams(max_tokens=5, stop_token_ids=(9,), eos_token_ids=(2,), ignore_eos=ignore_eos)
    assert params.finish_reason(token_id, output_idx) is expected
