"""StageRunner: one stage of one model with its K/V pages; runs one step of packed segments at a time.

Knows nothing of requests, schedules or the network; one thread uses it at a time.

Tensor shapes: T rows (all segments packed), D hidden size, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from model_runner.attention import StepContext, StepSegment
from model_runner.fused_attention import FusedStep
from model_runner.kv_cache import PagedKVCache
from model_runner.model_source import ModelInfo, ModelSource, load_model_info
from model_runner.native.attention import NativeStep, why_no_native_attention
from model_runner.native.kernels import NativeKernels, load_kernels
from model_runner.native.memory import keep_freed_memory
from model_runner.pages import OutOfPages
from model_runner.stage import StageSpec
from model_runner.stage_model import StageModel
from moontide.errors import ConfigError
from moontide.log import get_logger
from moontide.perf_model import StepModel

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive positions of one request that are computed in a step."""

    start: int
    """Position of the first token; everything before it is in the pages already."""
    num_tokens: int
    pages: Sequence[int]
    """Block table: entry i holds positions [i * S, (i + 1) * S); covers [0, start + num_tokens)."""
    wants_logits: bool
    """Whether the last stage computes logits of the segment's last token."""


class Runner(Protocol):
    """What computes a stage's steps: StageRunner, or PacedRunner, which only takes as long."""

    kv: PagedKVCache
    info: ModelInfo
    spec: StageSpec
    step_model: StepModel | None
    """How long a step takes, where that is known without measuring."""

    @property
    def attention(self) -> str:
        """What computes attention here: native | fused | torch | paced."""
        ...

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        token_ids_T: Tensor | None = None,
        hidden_TD: Tensor | None = None,
        before_layer_group: Callable[[int], Collection[int]] | None = None,
        on_layer_group: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run this stage's layers over the packed rows of all segments and write their K/V to the pages.

        Args:
            token_ids_T: [T] int64, the segments' tokens one after the other; on the first stage.
            hidden_TD: [T, D] from the stage before; on the others.
            before_layer_group: called in this thread with a group's global index before anything touches its pages; may wait
                until the K/V of earlier positions is there. Returns the indices of the segments that need not go on because
                it is not: from this group on they write nothing, and their rows of the result mean nothing.
            on_layer_group: called in this thread with a group's global index once all its K/V of this step are in the
                pages; the rest of the group's last layer and later layers may be still to come.
        Returns: [T, D]; on the last stage float32 logits [segments with wants_logits, V] of their last tokens.
        Raises: OutOfPages if a block table is too short; nothing has been written then.
        """
        ...

    def wait_idle(self) -> None:
        """Return once nothing that was started here writes to pages any more. For a caller that frees pages without having
        read a step's result, which waits as well."""
        ...


class StageRunner:
    """Owner of a stage's weights and pages. A Runner."""

    kv: PagedKVCache
    info: ModelInfo
    spec: StageSpec
    step_model: StepModel | None = None

    def __init__(
        self,
        model: StageModel,
        info: ModelInfo,
        spec: StageSpec,
        *,
        layout: KVLayout,
        kv: PagedKVCache,
        attention_kernels: NativeKernels | None = None,
        is_fused: bool = False,
    ) -> None:
        self._model = model
        self._layout = layout
        self._device = kv.layer(0).device
        self._attention_kernels = attention_kernels
        self._is_fused = is_fused
        self.info = info
        self.spec = spec
        self.kv = kv

    @classmethod
    def load(
        cls,
        source: ModelSource,
        spec: StageSpec,
        *,
        dtype: str,
        layout: KVLayout,
        num_pages: int,
        device: str = "cpu",
        arena: memoryview | None = None,
        kernels: str = "auto",
    ) -> "StageRunner":
        """Read one stage's weights, lay out its pages (in `arena`, if given) and run two tokens once as a check.

        Args:
            kernels: `model.kernels`: auto | native | torch.
        Raises: ModelError if the model cannot be served; ConfigError if layout, stage and model do not fit.
        """
        info = load_model_info(source, dtype=dtype)
        check_layout(layout, info)
        kv = PagedKVCache(layout, spec, num_pages=num_pages, device=device, arena=arena)
        native = load_kernels(kernels, dtype=dtype, device=device)
        runner = cls(
            StageModel(source, spec, dtype=dtype, device=device, kernels=native),
            info,
            spec,
            layout=layout,
            kv=kv,
            attention_kernels=native if native is not None and _attention_fits(info, kernels) else None,
            is_fused=kernels == "auto" and torch.device(device).type == "cuda",
        )
        if device == "cpu":
            keep_freed_memory()
        runner._try_out()
        return runner

    @property
    def attention(self) -> str:
        """See Runner."""
        return "native" if self._attention_kernels is not None else "fused" if self._is_fused else "torch"

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        *,
        token_ids_T: Tensor | None = None,
        hidden_TD: Tensor | None = None,
        before_layer_group: Callable[[int], Collection[int]] | None = None,
        on_layer_group: Callable[[int], None] | None = None,
    ) -> Tensor:
        """See Runner."""
        step, positions_T = self._plan(segments, before_layer_group, on_layer_group)
        given = token_ids_T if self.spec.is_first_stage else hidden_TD
        assert given is not None
        assert given.shape[0] == positions_T.shape[0], "rows and segments differ"
        given = given.to(self._device)
        hidden = self._model.embed(given) if self.spec.is_first_stage else given
        if not self.spec.is_last_stage:
            return self._model.hidden(hidden, positions_T, step)
        rows = self._logit_rows(segments)
        if not len(rows):
            self._model.hidden(hidden, positions_T, step)
            # There is nothing to read that would make the caller wait before it frees pages.
            self.wait_idle()
            return torch.empty(0, self._model.vocab_size, device=self._device)
        return self._model.logits(hidden, positions_T, step, rows=rows)

    def wait_idle(self) -> None:
        """See Runner."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _plan(
        self,
        segments: Sequence[Segment],
        before_layer_group: Callable[[int], Collection[int]] | None,
        on_layer_group: Callable[[int], None] | None,
    ) -> tuple[StepContext, Tensor]:
        placed: list[StepSegment] = []
        row = 0
        for segment in segments:
            pages = pages_of(segment, self.kv)
            placed.append(StepSegment(row, row + segment.num_tokens, segment.start, pages))
            row += segment.num_tokens
        positions = torch.cat([torch.arange(each.start, each.end, device=self._device) for each in placed])
        step = StepContext(
            placed,
            page_tokens=self.kv.page_tokens,
            device=self._device,
            layers=self._layer,
            on_layer_written=self._group_notifier(on_layer_group),
            before_layer=None if before_layer_group is None else self._group_opener(before_layer_group),
            native=None if self._attention_kernels is None else NativeStep(self._attention_kernels, placed),
            fused=FusedStep(placed, page_tokens=self.kv.page_tokens, device=self._device) if self._is_fused else None,
        )
        return step, positions

    def _layer(self, layer_idx: int) -> Tensor:
        return self.kv.layer(layer_idx - self.spec.start_layer)

    def _group_opener(self, before_layer_group: Callable[[int], Collection[int]]) -> Callable[[int], Collection[int]]:
        first_layers = {self._layout.group_layers(group_idx)[0]: group_idx for group_idx in self.kv.groups}

        def before_layer(layer_idx: int) -> Collection[int]:
            return before_layer_group(first_layers[layer_idx]) if layer_idx in first_layers else ()

        return before_layer

    def _group_notifier(self, on_layer_group: Callable[[int], None] | None) -> Callable[[int], None]:
        last_layers = {self._layout.group_layers(group_idx)[-1]: group_idx for group_idx in self.kv.groups}

        def on_layer_written(layer_idx: int) -> None:
            if layer_idx in last_layers:
                self.kv.mark_written(last_layers[layer_idx])
                if on_layer_group is not None:
                    on_layer_group(last_layers[layer_idx])

        return on_layer_written

    def _logit_rows(self, segments: Sequence[Segment]) -> Tensor:
        rows: list[int] = []
        end_row = 0
        for segment in segments:
            end_row += segment.num_tokens
            if segment.wants_logits:
                rows.append(end_row - 1)
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _try_out(self) -> None:
        """Run two tokens, so that a keyword or module that this runner cannot serve is refused at start."""
        num_tokens = min(2, self.kv.page_tokens)
        segment = Segment(start=0, num_tokens=num_tokens, pages=[0], wants_logits=True)
        if self.spec.is_first_stage:
            self.forward([segment], token_ids_T=torch.zeros(num_tokens, dtype=torch.int64))
        else:
            dtype = self.kv.layer(0).dtype
            self.forward([segment], hidden_TD=torch.zeros(num_tokens, self.info.hidden_size, dtype=dtype))
        self.kv.zero_tail(0, 0)


def _attention_fits(info: ModelInfo, kernels: str) -> bool:
    reason = why_no_native_attention(num_planes=info.num_planes, head_dim=info.head_dim)
    if reason is not None and kernels == "native":
        raise ConfigError(f"model.kernels='native' cannot be had: {reason}; set model.kernels=auto or torch")
    if reason is not None:
        log.info("torch attention", reason=reason)
    return reason is None


def pages_of(segment: Segment, kv: PagedKVCache) -> Sequence[int]:
    """The pages of all positions up to the segment's end. Raises: OutOfPages if its block table is too short."""
    end = segment.start + segment.num_tokens
    num_pages = -(-end // kv.page_tokens)
    if num_pages > len(segment.pages):
        raise OutOfPages(
            f"a block table of {len(segment.pages)} pages of {kv.page_tokens} tokens does not reach position {end - 1}; "
            f"allocate {num_pages} pages"
        )
    assert segment.num_tokens > 0
    assert all(0 <= page < kv.num_pages for page in segment.pages), f"pages {segment.pages}"
    return segment.pages[:num_pages]


def check_layout(layout: KVLayout, info: ModelInfo) -> None:
    """Raises: ConfigError if the pages would be of another model."""
    for name in ("num_layers", "num_planes", "num_kv_heads", "head_dim", "dtype"):
        wanted, given = getattr(info, name), getattr(layout, name)
        if wanted != given:
            raise ConfigError(
                f"the KV layout has {name}={given!r} and the model {wanted!r}; make the layout from this model"
            )
    if layout.model_fingerprint != info.fingerprint:
        raise ConfigError(
            f"the KV layout is of model {layout.model_fingerprint[:12]} and these weights are {info.fingerprint[:12]}; "
            "start all nodes from the same model directory"
        )
