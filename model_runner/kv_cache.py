"""PagedKVCache: the K/V pages of one stage's layers, laid out as the store wants them.

    arena | group 0: page 0 | page 1 | ... | group 1: page 0 | ...          one region per layer group of this stage
    page of a group = one slot: [layer][plane][kv_head][token][dim] | room for the 64-byte trailer

A slot has exactly the bytes of the stored object, so a put or a get is one contiguous copy and needs no packing.

On CUDA pages are copied between the device and their host slots on streams of their own:

    compute thread  | layers of group 0 | mark_written(0) | layers of group 1 | mark_written(1) | ...
    put thread                            copy_out(0): waits for its mark, copies, returns when the bytes are on the host
    fetch thread      copy_in(g): copies, returns when the bytes are on the device; only then is a step told of them

so no copy waits for layers that came after its own, and the compute stream waits for none.

Tensor shapes: P pages, K KV heads, S tokens per page, H head size.
"""

import weakref

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from model_runner.stage import StageSpec
from moontide.errors import ConfigError

WriteMark = torch.cuda.Event
"""The moment on the device after all writes of a step to a layer group."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PagedKVCache:
    """Pages of the layers of one stage. On a CPU the tensors are views into the arena that the store reads and writes.

    On CUDA the pages live on the device, the arena is a page-locked host mirror of the same layout, and `copy_out` /
    `copy_in` move pages between the two. On a CPU both do nothing, so callers need not tell the devices apart.
    """

    groups: range
    """Global indices of the layer groups held by this stage."""

    @staticmethod
    def arena_bytes(layout: KVLayout, spec: StageSpec, num_pages: int) -> int:
        """Bytes of host memory that `num_pages` pages of this stage need."""
        return sum(layout.object_bytes(group_idx) for group_idx in _stage_groups(layout, spec)) * num_pages

    def __init__(
        self, layout: KVLayout, spec: StageSpec, *, num_pages: int, device: str = "cpu", arena: memoryview | None
    ) -> None:
        """Lay the pages out in `arena` (writable, 64-byte aligned, at least `arena_bytes` long), or in memory of its own.

        Raises: ConfigError if a stage border cuts a layer group, or the arena is too small or cannot be page-locked.
        """
        self.groups = _stage_groups(layout, spec)
        self.num_pages = num_pages
        self.page_tokens = layout.block_tokens
        self._layout = layout
        self._start_layer = spec.start_layer
        self._device = torch.device(device)
        nbytes = self.arena_bytes(layout, spec, num_pages)
        self._host = _host_bytes(arena, nbytes)
        self._copies: _Copies | None = None
        bytes_on_device = self._host
        if self._device.type == "cuda":
            _page_lock(self._host, self._device, owner=self)
            self._copies = _Copies(self._device)
            bytes_on_device = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._offsets: dict[int, int] = {}
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}
        self._layers: list[Tensor] = []
        self._group_pages: list[Tensor] = []
        offset = 0
        for group_idx in self.groups:
            region_bytes = layout.object_bytes(group_idx) * num_pages
            self._offsets[group_idx] = offset
            region = bytes_on_device[offset : offset + region_bytes]
            slots_host = self._host[offset : offset + region_bytes].view(num_pages, -1)
            self._slots[group_idx] = (region.view(num_pages, -1), slots_host)
            pages = _group_view(region, layout, group_idx, num_pages)
            self._group_pages.append(pages)
            self._layers.extend(pages.unbind(1))
            offset += region_bytes

    def layer(self, local_layer_idx: int) -> Tensor:
        """View [P, planes, K, S, H] of one layer, counted from this stage's first."""
        return self._layers[local_layer_idx]

    def slot_address(self, group_idx: int, page: int) -> int:
        """Host address of the `object_bytes` of one page in one layer group."""
        assert 0 <= page < self.num_pages, f"page {page} of {self.num_pages}"
        return int(self._host.data_ptr()) + self._offsets[group_idx] + page * self._layout.object_bytes(group_idx)

    def slot_bytes(self, group_idx: int) -> int:
        """Bytes of one page in one layer group."""
        return self._layout.object_bytes(group_idx)

    def zero_tail(self, page: int, from_token: int) -> None:
        """Zero the positions >= `from_token` of a page in all layers, so that a partial block carries no other's K/V."""
        assert 0 <= page < self.num_pages
        assert 0 <= from_token <= self.page_tokens
        for pages in self._group_pages:
            pages[page, ..., from_token:, :] = 0

    def mark_written(self, group_idx: int) -> None:
        """The compute thread has issued all writes of a step to this group's pages; what `copy_out` waits for."""
        if self._copies is not None:
            self._copies.written[group_idx] = torch.cuda.current_stream(self._device).record_event()

    def last_mark(self, group_idx: int) -> WriteMark | None:
        """The group's last mark, for a `copy_out` later on. None where nothing has to be waited for."""
        return None if self._copies is None else self._copies.written.get(group_idx)

    def copy_out(self, group_idx: int, pages: list[int], *, written: WriteMark | None = None) -> None:
        """Bring the host slots of these pages up to date, before they are put: all that is written up to the mark
        `written`, by default the group's last. A later step's mark is a wait for that step. Returns when the bytes are there."""
        if self._copies is None:
            return
        mark = written or self.last_mark(group_idx)
        if mark is not None:
            self._copies.out_stream.wait_event(mark)
        on_device, on_host = self._slots[group_idx]
        _copy(on_host, on_device, pages, self._copies.out_stream)

    def copy_in(self, group_idx: int, pages: list[int]) -> None:
        """Bring the device's pages up to date, after their host slots were got from the store. Returns when the bytes
        are there. Steps that used these pages before must have ended on the device: so a page is freed."""
        if self._copies is None:
            return
        on_device, on_host = self._slots[group_idx]
        _copy(on_device, on_host, pages, self._copies.in_stream)


class _Copies:
    """Streams for each direction, and per layer group the moment after its last write."""

    def __init__(self, device: torch.device) -> None:
        self.out_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.in_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.written: dict[int, torch.cuda.Event] = {}


def _copy(target: Tensor, source: Tensor, pages: list[int], stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        for page in pages:
            target[page].copy_(source[page], non_blocking=True)
    stream.synchronize()


def _page_lock(host: Tensor, device: torch.device, *, owner: object) -> None:
    """Let the device copy from and to this memory while other work runs, as long as `owner` lives."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(host.data_ptr(), host.numel(), 0)
    if error != runtime.cudaError.success:
        raise ConfigError(
            f"{host.numel()} bytes of host memory for pages cannot be page-locked (CUDA error {int(error)}); raise the "
            "limit of locked memory (ulimit -l) or take fewer pages"
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr()).atexit = False


def _stage_groups(layout: KVLayout, spec: StageSpec) -> range:
    if layout.num_layers != spec.num_layers:
        raise ConfigError(
            f"the KV layout has {layout.num_layers} layers and the stage's model {spec.num_layers}; use one model"
        )
    groups = range(layout.group_of_layer(spec.start_layer), layout.group_of_layer(spec.end_layer - 1) + 1)
    start, end = layout.group_layers(groups[0]).start, layout.group_layers(groups[-1]).stop
    if (start, end) != (spec.start_layer, spec.end_layer):
        raise ConfigError(
            f"stage layers [{spec.start_layer}, {spec.end_layer}) cut a layer group of {layout.layer_group} layers; "
            f"take borders that are multiples of {layout.layer_group} (split_layers does)"
        )
    return groups


def _host_bytes(arena: memoryview | None, nbytes: int) -> Tensor:
    if arena is None:
        return torch.zeros(nbytes, dtype=torch.uint8)
    if arena.nbytes < nbytes:
        raise ConfigError(
            f"arena of {arena.nbytes} bytes is too small for the pages; allocate arena_bytes() = {nbytes} bytes"
        )
    return torch.frombuffer(arena, dtype=torch.uint8, count=nbytes)


def _group_view(region: Tensor, layout: KVLayout, group_idx: int, num_pages: int) -> Tensor:
    """View [P, layers, planes, K, S, H] of one group's slots; the trailers are the gaps between pages."""
    elements = region.view(TORCH_DTYPES[layout.dtype])
    size = (
        num_pages,
        len(layout.group_layers(group_idx)),
        layout.num_planes,
        layout.num_kv_heads,
        layout.block_tokens,
        layout.head_dim,
    )
    strides = [1]
    for extent in reversed(size[2:]):
        strides.insert(0, strides[0] * extent)
    return elements.as_strided(size, (layout.object_bytes(group_idx) // layout.element_bytes, *strides))
