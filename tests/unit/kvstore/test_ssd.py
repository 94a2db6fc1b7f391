from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.block import BlockHash
from kvstore.config import KvStoreSettings
from kvstore.ssd import MIN_SEGMENTS, SsdTier
from moontide.errors import ConfigError

DIGEST = b"L" * 32
OTHER_DIGEST = b"M" * 32
ROOT = BlockHash(b"r" * 32)
SIZES = (300, 200)
"""Bytes of the objects of a block."""
RECORD_BYTES = 124 + sum(SIZES)
FILE_MAGIC_BYTES = 8
ROOMY = 1 << 20


def name(idx: int) -> BlockHash:
    return BlockHash(idx.to_bytes(32, "big"))


def content(idx: int) -> list[bytes]:
    return [random.Random(1000 * idx + size).randbytes(size) for size in SIZES]


def put(tier: SsdTier, *idxs: int) -> None:
    for idx in idxs:
        tier.put_block(DIGEST, name(idx), name(idx - 1) if idx else ROOT, [memoryview(part) for part in content(idx)])


def read(tier: SsdTier, idx: int, digest: bytes = DIGEST) -> list[bytes] | None:
    slots = [bytearray(size) for size in SIZES]
    is_here = tier.read_block(digest, name(idx), [memoryview(slot) for slot in slots])
    return [bytes(slot) for slot in slots] if is_here else None


def here(tier: SsdTier, idxs: Sequence[int]) -> list[int]:
    return [idx for idx in idxs if read(tier, idx) is not None]


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.kv"))


def check_bytes(tier: SsdTier, directory: Path) -> None:
    stats = tier.stats()
    assert stats.used_bytes == sum(path.stat().st_size for path in segments(directory))
    assert stats.used_bytes <= stats.capacity_bytes
    assert stats.num_blocks == len(tier.blocks())


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[SsdTier]:
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    yield tier
    tier.close()


def test_what_was_put_is_read_and_only_under_its_layout(roomy: SsdTier) -> None:
    put(roomy, 0, 1)
    assert read(roomy, 1) == content(1)
    assert read(roomy, 0) == content(0)
    assert read(roomy, 0, OTHER_DIGEST) is None
    assert read(roomy, 2) is None
    assert {(block.hash, block.parent, block.num_bytes) for block in roomy.blocks()} == {
        (name(0), ROOT, sum(SIZES)),
        (name(1), name(0), sum(SIZES)),
    }


def test_a_chain_hits_up_to_its_first_gap(roomy: SsdTier) -> None:
    put(roomy, 0, 1, 3)
    chain = [name(idx) for idx in range(4)]
    assert roomy.chain_hit(DIGEST, chain) == 2
    assert roomy.chain_hit(DIGEST, chain[:1]) == 1
    assert roomy.chain_hit(DIGEST, chain[2:]) == 0
    assert roomy.chain_hit(OTHER_DIGEST, chain) == 0
    assert roomy.touch(chain) == [name(2)]


def test_a_block_is_written_once(roomy: SsdTier, tmp_path: Path) -> None:
    put(roomy, 0)
    used_bytes = roomy.stats().used_bytes
    put(roomy, 0)
    assert roomy.stats().used_bytes == used_bytes == FILE_MAGIC_BYTES + RECORD_BYTES
    check_bytes(roomy, tmp_path)


def small(directory: Path, *, records_per_segment: int = 2) -> SsdTier:
    """Room for MIN_SEGMENTS segments."""
    segment_bytes = FILE_MAGIC_BYTES + records_per_segment * RECORD_BYTES
    return SsdTier.open(directory, capacity_bytes=MIN_SEGMENTS * segment_bytes)


def test_the_cap_drops_the_segment_that_was_used_least_recently(tmp_path: Path) -> None:
    tier = small(tmp_path)
    full = 2 * MIN_SEGMENTS
    put(tier, *range(full))
    assert len(segments(tmp_path)) == MIN_SEGMENTS
    assert read(tier, 0) == content(0)
    put(tier, full)
    assert here(tier, range(full + 1)) == [0, 1, *range(4, full + 1)]
    check_bytes(tier, tmp_path)
    assert not tier.touch([name(4)])
    put(tier, *range(full + 1, full + 5))
    assert here(tier, [0, 1, 4, 5, 6, 7]) == [4, 5], "a touch counts as a use"
    tier.close()


def test_blocks_larger_than_a_segment_get_files_of_their_own(tmp_path: Path) -> None:
    tier = SsdTier.open(tmp_path, capacity_bytes=3 * (FILE_MAGIC_BYTES + RECORD_BYTES))
    put(tier, *range(5))
    assert here(tier, range(5)) == [2, 3, 4]
    check_bytes(tier, tmp_path)
    tier.close()


def test_a_block_larger_than_the_cap_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    tier = SsdTier.open(tmp_path, capacity_bytes=RECORD_BYTES)
    with pytest.raises(OSError, match="ssd_bytes") as caught:
        put(tier, 0)
    assert caught.value.errno == errno.ENOSPC
    assert here(tier, [0]) == []
    assert not segments(tmp_path)
    tier.close()


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    tier = small(tmp_path)
    put(tier, *range(7))
    before = tier.stats()
    tier.close()
    tier = small(tmp_path)
    assert tier.stats() == before
    assert [read(tier, idx) for idx in range(7)] == [content(idx) for idx in range(7)]
    put(tier, 7)
    assert read(tier, 7) == content(7)
    check_bytes(tier, tmp_path)
    tier.close()


def test_the_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    tier = small(tmp_path)
    full = 2 * MIN_SEGMENTS
    put(tier, *range(full))
    for age_s, path in enumerate(reversed(segments(tmp_path)), start=1):
        os.utime(path, ns=(0, path.stat().st_mtime_ns - age_s * 10**9))
    assert read(tier, 0) == content(0)
    tier.close()
    tier = small(tmp_path)
    put(tier, full)
    assert here(tier, range(4)) == [0, 1]
    tier.close()


def test_a_smaller_cap_is_kept_from_the_start(tmp_path: Path) -> None:
    tier = small(tmp_path)
    put(tier, *range(8))
    tier.close()
    tier = SsdTier.open(tmp_path, capacity_bytes=2 * (FILE_MAGIC_BYTES + 2 * RECORD_BYTES))
    assert tier.stats().num_blocks == 4
    check_bytes(tier, tmp_path)
    tier.close()


@pytest.mark.parametrize("cut_bytes", [1, sum(SIZES), sum(SIZES) + 1, RECORD_BYTES - 1])
def test_a_torn_tail_is_cut(tmp_path: Path, cut_bytes: int) -> None:
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    put(tier, 0, 1, 2)
    tier.close()
    (path,) = segments(tmp_path)
    os.truncate(path, path.stat().st_size - cut_bytes)
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    assert here(tier, range(3)) == [0, 1]
    check_bytes(tier, tmp_path)
    assert path.stat().st_size == FILE_MAGIC_BYTES + 2 * RECORD_BYTES
    tier.close()


def test_a_file_without_a_whole_record_is_removed(tmp_path: Path) -> None:
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    put(tier, 0)
    tier.close()
    (path,) = segments(tmp_path)
    os.truncate(path, FILE_MAGIC_BYTES + 10)
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    assert not segments(tmp_path)
    assert tier.stats().used_bytes == 0
    tier.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("offset_in_record", [0, 50, 100, 110, 120, 124, RECORD_BYTES - 1])
def test_a_flipped_byte_is_a_miss_that_is_counted_and_can_be_kept_again(tmp_path: Path, offset_in_record: int) -> None:
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    put(tier, 0, 1, 2)
    (path,) = segments(tmp_path)
    flip(path, FILE_MAGIC_BYTES + RECORD_BYTES + offset_in_record)
    assert here(tier, range(3)) == [0, 2]
    assert tier.stats().num_damaged == 1
    assert tier.chain_hit(DIGEST, [name(idx) for idx in range(3)]) == 1
    put(tier, 1)
    assert read(tier, 1) == content(1)
    check_bytes(tier, tmp_path)
    tier.close()


def test_a_damaged_header_ends_its_file_at_the_next_start(tmp_path: Path) -> None:
    tier = small(tmp_path, records_per_segment=3)
    put(tier, *range(4))
    tier.close()
    flip(segments(tmp_path)[0], FILE_MAGIC_BYTES + RECORD_BYTES + 10)
    tier = small(tmp_path, records_per_segment=3)
    assert here(tier, range(4)) == [0, 3]
    check_bytes(tier, tmp_path)
    tier.close()


def test_a_file_of_another_version_is_removed_and_foreign_files_are_not_touched(tmp_path: Path) -> None:
    old = tmp_path / "segment-000000000007.kv"
    old.write_bytes(b"MTSSD000" + bytes(1000))
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    assert not old.exists()
    assert foreign.read_text() == "mine"
    put(tier, 0)
    assert here(tier, [0]) == [0]
    tier.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    made, used = tmp_path / "made", tmp_path / "used"
    tier = SsdTier.open(made, capacity_bytes=ROOMY)
    put(tier, 0)
    tier.close()
    (outside,) = segments(made)
    inside = used / outside.name
    used.mkdir()
    inside.symlink_to(outside)
    tier = SsdTier.open(used, capacity_bytes=ROOMY)
    assert here(tier, [0]) == []
    put(tier, 1)
    tier.close()
    assert outside.stat().st_size == FILE_MAGIC_BYTES + RECORD_BYTES
    assert inside.is_symlink()
    (used / "lock").unlink()
    (used / "lock").symlink_to(outside)
    with pytest.raises(ConfigError, match="cannot be used"):
        SsdTier.open(used, capacity_bytes=ROOMY)


def test_a_segment_that_became_a_link_is_a_miss(roomy: SsdTier, tmp_path: Path) -> None:
    put(roomy, 0)
    (path,) = segments(tmp_path)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert read(roomy, 0) is None


TAKE = """
import sys
from pathlib import Path
from kvstore.ssd import SsdTier
from moontide.errors import ConfigError
try:
    SsdTier.open(Path(sys.argv[1]), capacity_bytes=1 << 20).close()
except ConfigError as error:
    print(error)
"""


def test_another_process_cannot_use_the_directory_until_it_is_closed(tmp_path: Path) -> None:
    def take() -> str:
        argv = [sys.executable, "-c", TAKE, str(tmp_path)]
        return subprocess.run(argv, capture_output=True, check=True, text=True, timeout=30).stdout

    tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
    refusal = take()
    assert str(tmp_path) in refusal
    assert f"in use by process {os.getpid()};" in refusal
    tier.close()
    assert take() == ""


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kvstore\.ssd_dir=.*file/ssd"):
        SsdTier.open(tmp_path / "file" / "ssd", capacity_bytes=ROOMY)


def test_a_cap_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kvstore\.ssd_bytes=1000 is below 16 MiB"):
        KvStoreSettings(master_rpc="127.0.0.1:1", master_http="127.0.0.1:2", ssd_bytes=1000)


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "ssd"
    tier = SsdTier.open(directory, capacity_bytes=ROOMY)
    put(tier, 0)
    tier.close()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("is_short", [False, True])
def test_a_failed_write_keeps_the_rest_and_the_next_one_works(
    roomy: SsdTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    real_pwritev = os.pwritev

    def failing(fd: int, parts: Sequence[bytes], offset: int) -> int:
        num_written = real_pwritev(fd, [parts[0][:60]], offset)
        if not is_short:
            raise OSError(errno.EIO, "disk")
        return num_written

    put(roomy, 0)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", failing)
        for idx in (1, 2):
            with pytest.raises(OSError):
                put(roomy, idx)
    assert here(roomy, range(3)) == [0]
    assert len(segments(tmp_path)) == 1
    check_bytes(roomy, tmp_path)
    put(roomy, 1)
    assert here(roomy, range(3)) == [0, 1]
    check_bytes(roomy, tmp_path)


def test_a_file_that_is_gone_is_a_miss(roomy: SsdTier, tmp_path: Path) -> None:
    put(roomy, 0)
    (path,) = segments(tmp_path)
    path.unlink()
    assert read(roomy, 0) is None


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_dict_that_may_forget_and_never_lies(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    capacity_bytes = MIN_SEGMENTS * (FILE_MAGIC_BYTES + 3 * RECORD_BYTES)
    tier = SsdTier.open(tmp_path, capacity_bytes=capacity_bytes)
    stored: set[int] = set()
    damaged: set[int] = set()
    for _ in range(600):
        idx = rng.randrange(40)
        act = rng.choices(["put", "read", "damage", "restart"], weights=[10, 10, 1, 0.5])[0]
        if act == "put":
            is_new = bool(tier.touch([name(idx)]))
            put(tier, idx)
            stored.add(idx)
            if is_new:
                damaged.discard(idx)
                assert read(tier, idx) == content(idx)
        elif act == "read":
            found = read(tier, idx)
            if found is not None:
                assert idx in stored - damaged
                assert found == content(idx)
        elif act == "damage" and (files := segments(tmp_path)):
            path = rng.choice(files)
            flip(path, rng.randrange(FILE_MAGIC_BYTES, path.stat().st_size))
            damaged = {idx for idx in stored if read(tier, idx) is None}
        elif act == "restart":
            tier.close()
            tier = SsdTier.open(tmp_path, capacity_bytes=capacity_bytes)
        check_bytes(tier, tmp_path)
    tier.close()


def test_without_damage_nothing_is_forgotten_below_the_cap(tmp_path: Path) -> None:
    rng = random.Random(7)
    stored: set[int] = set()
    for _ in range(5):
        tier = SsdTier.open(tmp_path, capacity_bytes=ROOMY)
        for idx in rng.sample(range(200), 60):
            put(tier, idx)
            stored.add(idx)
        assert here(tier, range(200)) == sorted(stored)
        tier.close()


def test_readers_and_the_writer_at_once_see_whole_blocks_or_none(tmp_path: Path) -> None:
    tier = small(tmp_path)
    wrong: list[int] = []
    stop = threading.Event()

    def reader() -> None:
        rng = random.Random(1)
        while not stop.is_set():
            idx = rng.randrange(60)
            if read(tier, idx) not in (None, content(idx)):
                wrong.append(idx)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for round_idx in range(20):
        put(tier, *random.Random(round_idx).sample(range(60), 40))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.stats().num_damaged == 0
    check_bytes(tier, tmp_path)
    tier.close()
