"""Attention over paged K/V: writes a step's K/V into the pages and attends from its rows to everything before them.

One function serves every model: full and sliding-window layers, soft-capped scores, attention sinks, grouped query
heads, and multi-head latent attention (MLA), whose pages hold one latent per token. It is plain torch and runs on any
device; in a step that brings native kernels, they compute all but MLA instead, and in one that brings fused kernels,
they compute the chunks of all but MLA. It knows neither requests nor the network; the rows of a step and their pages
come in a `StepContext`.

Keys are read in tiles that start at multiples of KEY_TILE, with a softmax that is updated tile by tile, so no tensor of
(chunk x prompt) exists, tiles outside a sliding window are never touched, and only tiles at an edge need a mask:

    positions  0 ........ window start ........ chunk start ........ chunk end
    tiles      |  skipped |  masked |  no mask  |  causal mask, rows block by block |

Segments of one token (a decode batch) are attended together where their lengths are alike.

Tensor shapes: T rows of the step, N query heads, K KV heads, G query heads per KV head, H head size (of keys; V of
values), P pages, S tokens per page, R rows of one block of queries, B segments of one token, C keys of a batch of them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from model_runner.fused_attention import FusedStep
from model_runner.native.attention import NativeStep
from moontide.errors import ModelError

KEY_TILE = 512
"""Keys per tile; with QUERY_TILE rows the scores of one KV head stay in a core's cache."""
QUERY_TILE = 256
"""Rows (positions x query heads of one KV head) that meet a tile at once."""
BATCH_KEYS = 16384
"""Most keys, with padding, that segments of one token gather together; a longer one goes tile by tile."""
_MASKED = torch.finfo(torch.float32).min / 2
"""Score of a key that may not be seen. Finite: a row that sees nothing of a tile stays a number, and its weight for
that tile becomes exactly zero at the row's own position, which comes last and is always visible."""
_HARMLESS_KEYWORDS = frozenset({"position_ids", "use_cache", "output_router_logits"})
"""Keywords that models pass on and that change nothing here."""


@dataclass(frozen=True)
class StepSegment:
    """Rows [first_row, end_row) of a step: positions start, start+1, ... of one request, whose pages are `pages`."""

    first_row: int
    end_row: int
    start: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.end_row - self.first_row


class StepContext:
    """What the attention of every layer of one step needs to know."""

    def __init__(
        self,
        segments: Sequence[StepSegment],
        *,
        page_tokens: int,
        device: torch.device,
        layers: Callable[[int], Tensor],
        on_layer_written: Callable[[int], None],
        before_layer: Callable[[int], Collection[int]] | None = None,
        native: NativeStep | None = None,
        fused: FusedStep | None = None,
    ) -> None:
        """
        Args:
            layers: global layer index -> its pages [P, planes, K, S, H]; asked once a layer, before they are touched.
            on_layer_written: called with the global layer index as soon as the K/V of all rows are in the pages.
            before_layer: called with the global layer index before its pages are touched; returns the indices of the
                segments that write nothing from there on. No segment comes back.
            native: the same segments for the native kernels, where they fit the pages.
            fused: the same segments for torch's fused kernels; not together with `native`.
        """
        self._segments = segments
        self.chunks, self.singles = _by_kind(segments)
        self.page_tokens = page_tokens
        self.device = device
        self._layers = layers
        self._before_layer = before_layer
        self.on_layer_written = on_layer_written
        self.native = native
        self.fused = fused
        self._batches: dict[int | None, list[SingleBatch]] = {}
        self._write_segments(segments)

    def open_layer(self, layer_idx: int) -> Tensor:
        """The layer's pages [P, planes, K, S, H], when its turn has come."""
        silent = self._before_layer(layer_idx) if self._before_layer is not None else ()
        if silent:
            self._write_segments([each for idx, each in enumerate(self._segments) if idx not in silent])
            for kernels in (self.native, self.fused):
                if kernels is not None:
                    kernels.leave_out(silent)
        return self._layers(layer_idx)

    def single_batches(self, window: int | None) -> "list[SingleBatch]":
        """The segments of one token, cut into batches for layers of this window."""
        if window not in self._batches:
            groups = _alike([(each, _first_visible(each.start, window)) for each in self.singles], self.page_tokens)
            self._batches[window] = [SingleBatch(group, self.page_tokens, self.device) for group in groups]
        return self._batches[window]

    def _write_segments(self, segments: Sequence[StepSegment]) -> None:
        """The rows of these are written from now on."""
        self.written_chunks, singles = _by_kind(segments)
        self.single_rows_B = self._indices([each.first_row for each in singles])
        self.single_pages_B = self._indices([each.pages[each.start // self.page_tokens] for each in singles])
        self.single_offsets_B = self._indices([each.start % self.page_tokens for each in singles])

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _by_kind(segments: Sequence[StepSegment]) -> tuple[list[StepSegment], list[StepSegment]]:
    """Chunks, and segments of one token that are attended together."""
    chunks: list[StepSegment] = []
    singles: list[StepSegment] = []
    for segment in segments:
        is_single = segment.end_row - segment.first_row == 1 and segment.end <= BATCH_KEYS
        (singles if is_single else chunks).append(segment)
    return chunks, singles


class SingleBatch:
    """Segments of one token whose visible keys are gathered into one tensor, each padded to the longest."""

    def __init__(self, segments: "Sequence[tuple[StepSegment, int]]", page_tokens: int, device: torch.device) -> None:
        """`segments`: each with the first position that its row sees."""
        tables = [each.pages[first // page_tokens : each.start // page_tokens + 1] for each, first in segments]
        longest = max(len(table) for table in tables)
        self.pages = [page for table in tables for page in (*table, *[table[0]] * (longest - len(table)))]
        """Every segment's pages one after the other; a padded place repeats the segment's own first page."""
        self.size = len(segments)
        self.rows_B = torch.tensor([each.first_row for each, _ in segments], device=device)
        skips = [first % page_tokens for _, first in segments]
        self.ends = [each.start + 1 - first + skip for (each, first), skip in zip(segments, skips, strict=True)]
        """Per segment, where its keys end in the gathered ones."""
        key_C = torch.arange(longest * page_tokens, device=device)
        bounds_B1 = [torch.tensor(bound, device=device)[:, None] for bound in (skips, self.ends)]
        self.masked_B1C = ((key_C < bounds_B1[0]) | (key_C >= bounds_B1[1]))[:, None]

    def gather(self, plane_PKSH: Tensor) -> Tensor:
        """[K, B, C, H]"""
        gathered = _gather(plane_PKSH, self.pages)
        return gathered.view(gathered.shape[0], self.size, -1, gathered.shape[2])


class ScoreRules(NamedTuple):
    """How scores of one layer become weights."""

    scaling: float
    window: int | None
    """A row sees its own position and the window - 1 before it; None: everything before it."""
    softcap: float | None
    sinks_KG: Tensor | None
    """A logit per query head that takes part in the softmax and has no value."""


class KeySource(Protocol):
    """Where a segment's keys and values come from."""

    def tile(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys [K, end-first, H] and values [K, end-first, V] of positions [first, end)."""
        ...


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    step: StepContext | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' modules call (its interface fixes names and shapes).

    Args:
        module: the attention module; `layer_idx` is its global layer, `kv_lora_rank` marks MLA.
        query: [1, N, T, H] after position encoding; key, value: [1, K, T, H]. MLA: the latent [1, 1, T, rank] and the
            rotated key [1, 1, T, rope].
        step: the rows of this step; arrives by keyword through the model's forward.
    Returns: [1, T, N, V] contiguous, and None for the weights.
    Raises: ModelError for a keyword that is not known to be harmless: a new attention feature must not be dropped.
    """
    surprises = sorted(name for name, given in unknown.items() if name not in _HARMLESS_KEYWORDS and given is not None)
    if surprises:
        raise ModelError(
            f"{type(module).__name__} passes {surprises} to its attention, which paged attention does not know; "
            "use a model from the supported list or another transformers version"
        )
    assert step is not None, "attention was called outside of StageRunner.forward"
    assert scaling is not None
    assert attention_mask is None
    assert dropout == 0.0
    layer_idx: int = module.layer_idx
    pages = step.open_layer(layer_idx)
    if hasattr(module, "kv_lora_rank"):
        _write(step, pages[:, 0], torch.cat([key[0], value[0]], dim=-1))
        step.on_layer_written(layer_idx)
        attended_NTV = _attend_latent(module, query[0], step, pages, scaling)
        return attended_NTV.transpose(0, 1)[None].contiguous(), None
    sinks_KG = None if s_aux is None else s_aux.float().view(key.shape[1], -1)
    rules = ScoreRules(scaling, sliding_window, softcap, sinks_KG)
    if step.native is not None:
        step.native.write(key[0], value[0], pages)
        step.on_layer_written(layer_idx)
        return step.native.attend(query[0], pages, rules)[None], None
    _write(step, pages[:, 0], key[0])
    _write(step, pages[:, 1], value[0])
    step.on_layer_written(layer_idx)
    attended_NTH = _attend_pages(query[0], step, pages, rules)
    return attended_NTH.transpose(0, 1)[None].contiguous(), None


def _write(step: StepContext, plane_PKSH: Tensor, new_KTH: Tensor) -> None:
    """Put one plane of the step's rows where their positions live."""
    if step.fused is not None:
        step.fused.write(plane_PKSH, new_KTH)
        return
    page_tokens = step.page_tokens
    for segment in step.written_chunks:
        row, position = segment.first_row, segment.start
        while row < segment.end_row:
            offset = position % page_tokens
            count = min(page_tokens - offset, segment.end_row - row)
            page = segment.pages[position // page_tokens]
            plane_PKSH[page, :, offset : offset + count] = new_KTH[:, row : row + count]
            row, position = row + count, position + count
    if len(step.single_rows_B):
        rows_KBH = new_KTH[:, step.single_rows_B]
        plane_PKSH[step.single_pages_B, :, step.single_offsets_B] = rows_KBH.transpose(0, 1)


def _gather(plane_PKSH: Tensor, pages: Sequence[int]) -> Tensor:
    """[K, len(pages) * S, H]. Joining views copies each page once; an index on another than the first dimension would
    first copy the whole pool."""
    return torch.cat([plane_PKSH[page] for page in pages], dim=1)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _alike(segments: "list[tuple[StepSegment, int]]", page_tokens: int) -> "list[list[tuple[StepSegment, int]]]":
    """Group segments so that padding at most doubles the keys and a batch holds at most BATCH_KEYS of them."""

    def num_pages(item: "tuple[StepSegment, int]") -> int:
        segment, first = item
        return segment.start // page_tokens - first // page_tokens + 1

    groups: list[list[tuple[StepSegment, int]]] = []
    for item in sorted(segments, key=num_pages):
        group = groups[-1] if groups else []
        fits = (len(group) + 1) * num_pages(item) * page_tokens <= BATCH_KEYS
        if group and fits and num_pages(item) <= 2 * num_pages(group[0]):
            group.append(item)
        else:
            groups.append([item])
    return groups


class _PagedKeys:
    """Keys and values gathered tile by tile from one request's pages."""

    def __init__(self, keys_PKSH: Tensor, values_PKSH: Tensor | None, pages: Sequence[int], page_tokens: int) -> None:
        self._planes = (keys_PKSH,) if values_PKSH is None else (keys_PKSH, values_PKSH)
        self._pages = pages
        self._page_tokens = page_tokens

    def tile(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        first_page = first // self._page_tokens
        pages = self._pages[first_page : -(-end // self._page_tokens)]
        skip = first - first_page * self._page_tokens
        gathered = [_gather(plane, pages)[:, skip : skip + end - first] for plane in self._planes]
        return gathered[0], gathered[-1]


class _ExpandedLatents:
    """MLA: keys and values of every head, expanded from the gathered latents."""

    def __init__(self, module: Any, latents: KeySource) -> None:
        self._module = module
        self._latents = latents

    def tile(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        latent_1TH, _ = self._latents.tile(first, end)
        rank = self._module.kv_lora_rank
        # The instance's own method keeps the latents (see stage_model.py); the class still knows how to expand them.
        expand = type(self._module).expand_kv
        keys, values = expand(self._module, latent_1TH[None, ..., :rank], latent_1TH[None, ..., rank:])
        return keys[0], values[0]


class _LatentsAsKeys:
    """MLA: one head whose key is the whole latent and whose value is its compressed part."""

    def __init__(self, latents: KeySource, rank: int) -> None:
        self._latents = latents
        self._rank = rank

    def tile(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        latent_1TH, _ = self._latents.tile(first, end)
        return latent_1TH, latent_1TH[..., : self._rank]


def _attend_pages(query_NTH: Tensor, step: StepContext, pages: Tensor, rules: ScoreRules) -> Tensor:
    """[N, T, H]: every segment's rows over its own pages."""
    keys, values = pages[:, 0], pages[:, 1]
    attended = torch.empty_like(query_NTH)
    for segment in step.chunks:
        rows = slice(segment.first_row, segment.end_row)
        if step.fused is not None:
            attended[:, rows] = step.fused.attend(query_NTH[:, rows], segment, pages, rules)
        else:
            source = _PagedKeys(keys, values, segment.pages, step.page_tokens)
            attended[:, rows] = attend(query_NTH[:, rows], source, segment.start, rules=rules)
    for batch in step.single_batches(rules.window):
        query_NBH = query_NTH[:, batch.rows_B]
        attended[:, batch.rows_B] = attend_singles(
            query_NBH, batch.gather(keys), batch.gather(values), batch, rules=rules
        )
    return attended


def _attend_latent(module: Any, query_NTH: Tensor, step: StepContext, pages: Tensor, scaling: float) -> Tensor:
    """[N, T, V]. Few rows absorb the expansion into query and output; many rows expand the keys and values once.

    Per row and key of one head, absorbed scores and values cost 2 rank + rope products, expanded ones nope + rope + v;
    expanding a key costs (nope + v) rank. Expansion pays from the number of rows where the two sums meet.
    """
    latent = _latent_of(module)
    plane, rules = pages[:, 0], ScoreRules(scaling, None, None, None)
    attended = query_NTH.new_empty(*query_NTH.shape[:2], latent.value_dim)
    for segment in step.chunks:
        rows = slice(segment.first_row, segment.end_row)
        query = query_NTH[:, rows]
        latents = _PagedKeys(plane, None, segment.pages, step.page_tokens)
        if latent.expansion_pays(query.shape[1]):
            attended[:, rows] = attend(query, _ExpandedLatents(module, latents), segment.start, rules=rules)
        else:
            source = _LatentsAsKeys(latents, latent.rank)
            attended[:, rows] = latent.project(attend(latent.absorb(query), source, segment.start, rules=rules))
    for batch in step.single_batches(None):
        keys = batch.gather(plane)
        query = latent.absorb(query_NTH[:, batch.rows_B])
        compressed = attend_singles(query, keys, keys[..., : latent.rank], batch, rules=rules)
        attended[:, batch.rows_B] = latent.project(compressed)
    return attended


class _Latent(NamedTuple):
    """The part of an MLA module that turns latents into keys and values."""

    rank: int
    nope: int
    value_dim: int
    expand_NEr: Tensor
    """[N, nope + v, rank]"""

    def expansion_pays(self, num_rows: int) -> bool:
        saved_per_row = 2 * self.rank - self.nope - self.value_dim
        return saved_per_row * num_rows > (self.nope + self.value_dim) * self.rank

    def absorb(self, query_NTH: Tensor) -> Tensor:
        """Queries that meet latents directly: [N, T, rank + rope]."""
        content, rotated = query_NTH[..., : self.nope], query_NTH[..., self.nope :]
        return torch.cat([content @ self.expand_NEr[:, : self.nope], rotated], dim=-1)

    def project(self, compressed_NTr: Tensor) -> Tensor:
        """Values out of weighted latents: [N, T, V]."""
        return compressed_NTr @ self.expand_NEr[:, self.nope :].transpose(1, 2)


def _latent_of(module: Any) -> _Latent:
    nope, value_dim, rank = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
    return _Latent(rank, nope, value_dim, module.kv_b_proj.weight.view(-1, nope + value_dim, rank))


def attend_singles(
    query_NBH: Tensor, keys_KBCH: Tensor, values_KBCV: Tensor, batch: SingleBatch, *, rules: ScoreRules
) -> Tensor:
    """Attention of one row per segment over its gathered keys. Returns: [N, B, V] in the query's dtype."""
    num_kv_heads = keys_KBCH.shape[0]
    for idx, end in enumerate(batch.ends):
        # A page's unused places hold what its last owner left; a weight of zero does not undo a NaN.
        values_KBCV[:, idx, end:] = 0
    query = _by_kv_head(query_NBH, num_kv_heads).transpose(1, 2).flatten(0, 1)
    keys, values = keys_KBCH.flatten(0, 1), values_KBCV.flatten(0, 1)
    scores = _scaled_scores(query, keys, rules).view(num_kv_heads, batch.size, -1, keys.shape[1])
    scores.masked_fill_(batch.masked_B1C, _MASKED)
    if rules.sinks_KG is None:
        weights = scores.softmax(-1)
    else:
        sinks = rules.sinks_KG[:, None, :, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    attended = torch.bmm(weights.to(values.dtype).flatten(0, 1), values)
    return attended.view(*scores.shape[:3], -1).transpose(1, 2).flatten(0, 1)


def _by_kv_head(rows_NTH: Tensor, num_kv_heads: int) -> Tensor:
    """[K, G, T, H]"""
    num_heads, num_rows, head_dim = rows_NTH.shape
    return rows_NTH.reshape(num_kv_heads, num_heads // num_kv_heads, num_rows, head_dim)


def _scaled_scores(query_BRH: Tensor, keys_BCH: Tensor, rules: ScoreRules) -> Tensor:
    """[B, R, C] float32, scaled and capped. Its own memory: callers change it in place."""
    unused = query_BRH.new_empty(1, 1, 1)
    scores = torch.baddbmm(unused, query_BRH, keys_BCH.transpose(1, 2), beta=0, alpha=rules.scaling).float()
    if rules.softcap is not None:
        scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
    return scores


def attend(query_NTH: Tensor, source: KeySource, start: int, *, rules: ScoreRules) -> Tensor:
    """Attention of rows at positions start, start+1, ... to all keys up to their own position.

    Returns: [N, T, V] in the query's dtype. Scores and weights are summed in float32.
    """
    num_heads, num_rows, _ = query_NTH.shape
    end = start + num_rows
    lowest = 0 if rules.window is None else max(0, start - rules.window + 1)
    blocks: list[_RowBlock] = []
    for first in range(lowest - lowest % KEY_TILE, end, KEY_TILE):
        tile_first, tile_end = max(first, lowest), min(first + KEY_TILE, end)
        keys_KTH, values_KTV = source.tile(tile_first, tile_end)
        if not blocks:
            blocks = _row_blocks(query_NTH, start, keys_KTH.shape[0], values_KTV.shape[2], rules)
        for block in blocks:
            block.meet(keys_KTH, values_KTV, tile_first)
    attended = torch.cat([block.result() for block in blocks], dim=2)
    return attended.reshape(num_heads, num_rows, -1)


def _row_blocks(
    query_NTH: Tensor, start: int, num_kv_heads: int, value_dim: int, rules: ScoreRules
) -> "list[_RowBlock]":
    """Cut the rows into blocks of equal size, about QUERY_TILE rows for each KV head."""
    num_heads, num_rows, _ = query_NTH.shape
    num_blocks = -(-num_rows * (num_heads // num_kv_heads) // QUERY_TILE)
    size = -(-num_rows // num_blocks)
    query_KGTH = _by_kv_head(query_NTH, num_kv_heads)
    return [
        _RowBlock(query_KGTH[:, :, row : row + size], start + row, value_dim, rules) for row in range(0, num_rows, size)
    ]


class _RowBlock:
    """Consecutive positions of one request with the running softmax of all their query heads."""

    def __init__(self, query_KGTH: Tensor, start: int, value_dim: int, rules: ScoreRules) -> None:
        num_kv_heads, self._group, self._count, _ = query_KGTH.shape
        self._start = start
        self._rules = rules
        self._query_KRH = query_KGTH.flatten(1, 2)
        shape = (num_kv_heads, self._group * self._count, 1)
        new = query_KGTH.new_empty(0, dtype=torch.float32)
        if rules.sinks_KG is None:
            self._max_KR1 = new.new_full(shape, _MASKED)
            self._sum_KR1 = new.new_zeros(shape)
        else:
            self._max_KR1 = rules.sinks_KG.repeat_interleave(self._count, dim=1).unsqueeze(-1)
            self._sum_KR1 = new.new_ones(shape)
        self._weighted_KRV = new.new_zeros((*shape[:2], value_dim))

    def meet(self, keys_KTH: Tensor, values_KTV: Tensor, first: int) -> None:
        """Take the keys at positions first, first+1, ... into account."""
        last_row = self._start + self._count - 1
        visible = min(keys_KTH.shape[1], last_row + 1 - first)
        hidden = 0 if self._rules.window is None else max(0, self._start - self._rules.window + 1 - first)
        if hidden >= visible:
            return
        keys, values = keys_KTH[:, hidden:visible], values_KTV[:, hidden:visible]
        scores = self._scores(keys, first + hidden)
        max_KR1 = torch.maximum(self._max_KR1, scores.amax(-1, keepdim=True))
        shrink = self._max_KR1.sub_(max_KR1).exp_()
        weights = scores.sub_(max_KR1).exp_()
        self._sum_KR1.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        self._weighted_KRV.mul_(shrink).add_(torch.bmm(weights.to(values.dtype), values))
        self._max_KR1 = max_KR1

    def _scores(self, keys_KTH: Tensor, first: int) -> Tensor:
        """[K, R, keys] float32 with the layer's scaling, cap and mask."""
        scores = _scaled_scores(self._query_KRH, keys_KTH, self._rules)
        num_keys = keys_KTH.shape[1]
        last_row, window = self._start + self._count - 1, self._rules.window
        if first + num_keys - 1 > self._start or (window is not None and first <= last_row - window):
            row_T1 = torch.arange(self._start, last_row + 1, device=scores.device)[:, None]
            key_1T = torch.arange(first, first + num_keys, device=scores.device)[None]
            masked = key_1T > row_T1
            if window is not None:
                masked |= key_1T <= row_T1 - window
            scores.view(-1, self._group, self._count, num_keys).masked_fill_(masked, _MASKED)
        return scores

    def result(self) -> Tensor:
        """[K, G, T, V] in the query's dtype."""
        attended = self._weighted_KRV.div_(self._sum_KR1).to(self._query_KRH.dtype)
        return attended.view(attended.shape[0], self._group, self._count, -1)
