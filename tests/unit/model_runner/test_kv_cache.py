"""A page slot has the bytes of the stored object, in its order."""

import ctypes
import itertools
import mmap
import struct

import pytest
import torch

from kvstore.layout import TRAILER_BYTES, KVLayout
from model_runner.kv_cache import PagedKVCache
from model_runner.stage import StageSpec, split_layers
from moontide.errors import ConfigError

LAYOUT = KVLayout(
    model_fingerprint="m",
    num_layers=5,
    num_planes=2,
    num_kv_heads=3,
    head_dim=4,
    dtype="float32",
    block_tokens=8,
    layer_group=2,
)
FIRST, LAST = split_layers(5, 2, layer_group=2)


def slot_bytes(kv: PagedKVCache, group_idx: int, page: int) -> bytes:
    return ctypes.string_at(kv.slot_address(group_idx, page), LAYOUT.object_bytes(group_idx))


def test_slot_is_layer_plane_head_token_dim_little_endian_then_the_trailer() -> None:
    kv = PagedKVCache(LAYOUT, FIRST, num_pages=3, arena=None)
    assert kv.groups == range(2)
    for layer in range(FIRST.num_local_layers):
        view = kv.layer(layer)
        assert view.shape == (3, 2, 3, 8, 4)
        view.copy_(torch.arange(view.numel()).view(view.shape) + 1000 * layer)
    payload = slot_bytes(kv, 1, 2)[:-TRAILER_BYTES]
    expected = torch.stack([kv.layer(2)[2], kv.layer(3)[2]]).flatten().tolist()
    assert payload == struct.pack(f"<{len(expected)}f", *expected)
    assert not any(slot_bytes(kv, 1, 2)[-TRAILER_BYTES:])


def test_pages_are_views_of_the_given_arena() -> None:
    nbytes = PagedKVCache.arena_bytes(LAYOUT, LAST, 2)
    assert nbytes == 2 * LAYOUT.object_bytes(2)
    memory = mmap.mmap(-1, nbytes)
    kv = PagedKVCache(LAYOUT, LAST, num_pages=2, arena=memoryview(memory))
    kv.layer(0)[1, 1, 2, 7, 3] = 2.5
    at = LAYOUT.object_bytes(2) + LAYOUT.payload_bytes(2) - 4
    assert struct.unpack_from("<f", memory, at) == (2.5,)
    struct.pack_into("<f", memory, 0, 7.0)
    assert kv.layer(0)[0, 0, 0, 0, 0] == 7.0


def test_slots_do_not_overlap_and_fill_the_arena() -> None:
    kv = PagedKVCache(LAYOUT, FIRST, num_pages=3, arena=None)
    slots = sorted(
        (kv.slot_address(group, page), LAYOUT.object_bytes(group)) for group in kv.groups for page in range(3)
    )
    for (address, nbytes), (following, _) in itertools.pairwise(slots):
        assert address + nbytes == following
    assert sum(nbytes for _, nbytes in slots) == PagedKVCache.arena_bytes(LAYOUT, FIRST, 3)


def test_zero_tail_clears_later_tokens_of_one_page_in_all_layers() -> None:
    kv = PagedKVCache(LAYOUT, FIRST, num_pages=3, arena=None)
    for layer in range(4):
        kv.layer(layer).fill_(1)
    kv.zero_tail(1, 5)
    for layer in range(4):
        view = kv.layer(layer)
        assert view[1, :, :, :5].all()
        assert not view[1, :, :, 5:].any()
        assert view[[0, 2]].all()


def test_stage_that_cuts_a_layer_group_is_refused() -> None:
    spec = StageSpec(stage_idx=0, num_stages=2, start_layer=0, end_layer=3, num_layers=5)
    with pytest.raises(ConfigError, match="cut a layer group of 2 layers"):
        PagedKVCache(LAYOUT, spec, num_pages=1, arena=None)


def test_arena_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="arena of 100 bytes is too small"):
        PagedKVCache(LAYOUT, FIRST, num_pages=1, arena=memoryview(bytearray(100)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_wait_for_what_was_marked_and_not_for_compute_that_came_later() -> None:
    """A later layer is a kernel that spins; while it does, both directions get through."""
    kv = PagedKVCache(LAYOUT, FIRST, num_pages=3, device="cuda", arena=None)
    compute = torch.cuda.current_stream()
    kv.layer(0)[1] = 2.5
    kv.mark_written(0)
    torch.cuda._sleep(5_000_000_000)
    kv.copy_out(0, [1])
    assert struct.unpack_from("<f", slot_bytes(kv, 0, 1))[0] == 2.5
    ctypes.memmove(kv.slot_address(0, 2), slot_bytes(kv, 0, 1), LAYOUT.object_bytes(0))
    kv.copy_in(0, [2])
    assert not compute.query()
    compute.synchronize()
    assert torch.equal(kv.layer(0)[2], kv.layer(0)[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copy_out_of_an_earlier_step_does_not_wait_for_a_later_one() -> None:
    """The later step is a kernel that spins, and has marked the same group behind it."""
    kv = PagedKVCache(LAYOUT, FIRST, num_pages=3, device="cuda", arena=None)
    compute = torch.cuda.current_stream()
    kv.layer(0)[1] = 2.5
    kv.mark_written(0)
    earlier = kv.last_mark(0)
    torch.cuda._sleep(5_000_000_000)
    kv.mark_written(0)
    kv.copy_out(0, [1], written=earlier)
    assert struct.unpack_from("<f", slot_bytes(kv, 0, 1))[0] == 2.5
    assert not compute.query()
    compute.synchronize()
