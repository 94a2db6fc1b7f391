"""Stages with native kernels: as exact as torch in every family, and the same bits for any chunk plan and packing."""

import functools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_runner import attention
from model_runner.native.attention import NativeStep
from model_runner.native.kernels import NativeKernels
from model_runner.native.linear import NativeNorm, PackedLinear, PackedMlp
from model_runner.runner import Segment, StageRunner
from model_runner.weights import Elsewhere
from moontide.errors import ConfigError
from tests.fakes.tiny_models import reference_model, tiny_model_dir
from tests.unit.model_runner.stages import PAGE_TOKENS, kv_of, load_stages, prefill, run_step

PROMPT = random.Random(5).choices(range(3, 259), k=101)
PAGES = random.Random(0).sample(range(24), 7)
OTHER_PAGES = [page for page in range(24) if page not in PAGES]
WIDE_HEADS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"head_dim": 64},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gpt_oss": {"head_dim": 64},
    "phi3": {"hidden_size": 128},
    "mixtral": {"head_dim": 32},
}
"""The tiny models with heads that the kernels fit."""
DENSE = [family for family in WIDE_HEADS if family not in ("gpt_oss", "mixtral")]
"""Families whose every product is one of ours; experts are torch's."""


def wide_model(family: str, root: Path) -> Path:
    return tiny_model_dir(family, root, **WIDE_HEADS[family])


@pytest.fixture
def choice(kernels: NativeKernels | None) -> str:
    return "torch" if kernels is None else "native"


@pytest.mark.parametrize("chunk", [1000, 1])
@pytest.mark.parametrize("family", WIDE_HEADS)
def test_logits_are_as_close_to_float32_as_transformers_bfloat16(
    family: str, chunk: int, choice: str, tiny_root: Path
) -> None:
    """A token near the border of two experts goes to the other one by chance, so their families get more room; without
    sinks or window the difference is ten times as large."""
    model_dir = wide_model(family, tiny_root)
    exact, stock = reference_logits(model_dir, torch.float32), reference_logits(model_dir, torch.bfloat16)
    ours = logits_of_all(load_stages(model_dir, 2, dtype="bfloat16", kernels=choice), chunk=chunk)
    room = 1.2 if family in DENSE else 2.0
    assert rms(ours - exact) <= room * rms(stock - exact)


@functools.cache
def reference_logits(model_dir: Path, dtype: torch.dtype) -> Tensor:
    """[T, V] of the stock model in one shot."""
    with torch.inference_mode():
        return reference_model(model_dir, dtype)(torch.tensor([PROMPT])).logits[0].float()


def rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())


def logits_of_all(stages: Sequence[StageRunner], *, chunk: int) -> Tensor:
    """[T, V] of every position: the head over all rows of each chunk, which no request asks for."""
    rows = []
    for first in range(0, len(PROMPT), chunk):
        ids = torch.tensor(PROMPT[first : first + chunk])
        segment = Segment(start=first, num_tokens=len(ids), pages=PAGES, wants_logits=True)
        hidden = stages[0].forward([segment], token_ids_T=ids)
        with torch.inference_mode():
            step, positions = stages[1]._plan([segment], None, None)
            rows.append(stages[1]._model.logits(hidden, positions, step, rows=torch.arange(len(ids))))
    return torch.cat(rows)


@pytest.mark.parametrize("family", DENSE)
def test_any_chunk_plan_and_packing_give_the_same_kv(family: str, choice: str, tiny_root: Path) -> None:
    """Bit for bit with native kernels, so a cached prefix equals a recomputed one; torch sums in another order."""
    model_dir = wide_model(family, tiny_root)
    stages = load_stages(model_dir, 2, dtype="bfloat16", kernels=choice)
    logits = prefill(stages, PROMPT, PAGES, chunk=1000)[100]
    kv = kv_of(stages, PAGES)
    plans: list[list[int]] = [[33, 33, 33, 2], [16] * 6 + [5], [7] * 14 + [3], [64] + [1] * 37]
    for plan in plans:
        for is_packed in (False, True):
            for stage in stages:
                for layer in range(stage.spec.num_local_layers):
                    stage.kv.layer(layer).zero_()
            again = compute(stages, plan, is_packed=is_packed)
            if choice == "native":
                assert torch.equal(kv_of(stages, PAGES), kv), f"{plan} packed={is_packed}"
                assert torch.equal(again, logits), f"{plan} packed={is_packed}"
            else:
                difference = kv_of(stages, PAGES).float() - kv.float()
                assert difference.norm() <= 0.05 * kv.float().norm(), f"{plan} packed={is_packed}"


def compute(stages: Sequence[StageRunner], plan: Sequence[int], *, is_packed: bool) -> Tensor:
    """Logits [V] of the prompt's last token; packed: behind two tokens of another request in each step."""
    done = 0
    logits = torch.empty(0)
    for step, num_tokens in enumerate(plan):
        segments = [Segment(start=done, num_tokens=num_tokens, pages=PAGES, wants_logits=True)]
        ids = PROMPT[done : done + num_tokens]
        if is_packed:
            segments.insert(0, Segment(start=2 * step, num_tokens=2, pages=OTHER_PAGES, wants_logits=False))
            ids = [3 + step, 4 + step, *ids]
        logits = run_step(stages, segments, ids)[-1]
        done += num_tokens
    return logits


@pytest.mark.usefixtures("native")
def test_no_plain_linear_is_left_and_a_shared_embedding_leaves_with_it(tiny_root: Path) -> None:
    first, last = load_stages(wide_model("qwen3", tiny_root), 2, dtype="bfloat16", kernels="native")
    for stage in (first, last):
        assert not [name for name, module in stage._model._model.named_modules() if type(module) is nn.Linear]
    assert not isinstance(first._model._decoder.embed_tokens, Elsewhere)
    assert isinstance(last._model._decoder.embed_tokens, Elsewhere)
    whole = load_stages(wide_model("qwen3", tiny_root), 1, dtype="bfloat16", kernels="native")[0]
    assert not isinstance(whole._model._decoder.embed_tokens, Elsewhere)


@pytest.mark.usefixtures("native")
def test_modules_that_compute_something_else_are_left_alone(tiny_root: Path) -> None:
    """Gemma adds one to the weight of its norm and has another activation; Qwen3 also norms each head."""

    def classes(family: str) -> set[type[nn.Module]]:
        stage = load_stages(wide_model(family, tiny_root), 1, dtype="bfloat16", kernels="native")[0]
        return {type(module) for module in stage._model._model.modules()}

    assert {PackedMlp, NativeNorm} <= classes("qwen3")
    assert not {"Qwen3RMSNorm", "Qwen3MLP"} & {each.__name__ for each in classes("qwen3")}
    assert not {PackedMlp, NativeNorm} & classes("gemma2")
    assert {PackedMlp, PackedLinear} <= classes("llama")


class NewTensors(TorchDispatchMode):
    """Counts the tensors that torch makes, views left out: by whether attention made them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_attention = False
        self.largest_bytes = 0
        self.num: Counter[bool] = Counter()
        self.nbytes: Counter[bool] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                nbytes = each.untyped_storage().nbytes()
                self.largest_bytes = max(self.largest_bytes, nbytes)
                self.num[self.is_in_attention] += 1
                self.nbytes[self.is_in_attention] += nbytes
        return made

    def watch(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What this function makes is attention's."""
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.is_in_attention = True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_in_attention = False

        monkeypatch.setattr(owner, name, watched)


CHUNK = 256
PREFIXES = (1024, 8192)
KINDS_OF_STEPS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gpt_oss": {"head_dim": 64, "num_experts_per_tok": 4},
    "mixtral": {"head_dim": 32, "num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 4},
}
"""Plain attention; windows; windows and soft caps; windows, sinks and experts; experts; latents and experts. Each token goes to all
experts, so that what they make does not depend on the prefix."""
KERNELS = [("native", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")]


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("family", KINDS_OF_STEPS)
def test_the_tensors_of_a_step_do_not_grow_with_the_prefix(
    family: str,
    kernel: str,
    dtype: str,
    tiny_root: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mask of (chunk x prompt) would be the largest one. Torch's attention reads its keys in tiles: more, and no larger ones."""
    if kernel == "native":
        request.getfixturevalue("native")
        if family == "deepseek_v3":
            pytest.skip("the native kernels leave latents to torch")
    num_pages = (max(PREFIXES) + CHUNK) // PAGE_TOKENS
    model_dir = tiny_model_dir(family, tiny_root, max_position_embeddings=16384, **KINDS_OF_STEPS[family])
    stage = load_stages(model_dir, 1, num_pages=num_pages, dtype=dtype, kernels=kernel)[0]
    short, long = (tensors_of_a_step(stage, prefix, num_pages, monkeypatch) for prefix in PREFIXES)
    assert short.num[False] > 0
    assert short.largest_bytes == long.largest_bytes < CHUNK * (max(PREFIXES) + CHUNK)
    assert short.num[False] == long.num[False]
    block_table_bytes = 8 * (PREFIXES[1] - PREFIXES[0]) // PAGE_TOKENS
    assert long.nbytes[False] - short.nbytes[False] <= block_table_bytes
    if kernel == "native":
        assert short.num[True] == long.num[True]
        assert short.nbytes[True] == long.nbytes[True]
    else:
        growth = PREFIXES[1] // PREFIXES[0]
        assert 0 < long.num[True] <= growth * short.num[True]
        assert long.nbytes[True] <= growth * short.nbytes[True]


def tensors_of_a_step(stage: StageRunner, prefix: int, num_pages: int, monkeypatch: pytest.MonkeyPatch) -> NewTensors:
    segment = Segment(start=prefix, num_tokens=CHUNK, pages=range(num_pages), wants_logits=True)
    made = NewTensors()
    with monkeypatch.context() as patch:
        for owner, name in ((attention, "_attend_pages"), (attention, "_attend_latent"), (NativeStep, "attend")):
            made.watch(owner, name, patch)
        with made:
            stage.forward([segment], token_ids_T=torch.ones(CHUNK, dtype=torch.int64))
    return made


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("family", "reason"), [("llama", "the head size 16 is no multiple of 32"), ("deepseek_v3", "latents")]
)
def test_attention_of_another_shape_is_torchs_or_refused_by_name(family: str, reason: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    with pytest.raises(ConfigError, match=reason):
        load_stages(model_dir, 1, dtype="bfloat16", kernels="native")
    assert load_stages(model_dir, 1, dtype="bfloat16", kernels="auto")[0]._attention_kernels is None


def test_float32_is_left_to_torch_or_refused_by_name(tiny_root: Path) -> None:
    model_dir = wide_model("llama", tiny_root)
    with pytest.raises(ConfigError, match=r"model.kernels='native' cannot be had: .* dtype is float32"):
        load_stages(model_dir, 1, kernels="native")
    assert load_stages(model_dir, 1, kernels="auto")[0]._attention_kernels is None
