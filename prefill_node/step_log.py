"""The ordered log that stage 0 writes, and what the stages have acknowledged of it. Pure: no sockets, no clock.

    stage 0 appends    fetch r | compute r [0,512) | compute r [512,700) | end r | ...      seq 1, 2, 3, ...
    each stage reports fetch done, step done (forward), puts done (objects handed to the store), end done

Pages of a request are fenced: they may be reused once every stage has reported `end done`, and a stage may do that only
when no forward, put or fetch of the request is open on it. A report that breaks these rules raises LogViolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.pool import RequestKey
from moontide.errors import Internal
from moontide_proto.v1 import stage_pb2


class LogViolation(Internal):
    """A stage reported what cannot be: the group has to start over."""


@dataclass(frozen=True)
class PutsOutcome:
    """All stages have put the blocks of a step, or tried to."""

    chunks: tuple[stage_pb2.Chunk, ...]
    failed: int
    """Objects whose put did not succeed on any stage."""


@dataclass
class _Step:
    chunks: tuple[stage_pb2.Chunk, ...]
    computing: set[int]
    putting: set[int]
    failed: int = 0


@dataclass
class _Request:
    steps: set[int] = field(default_factory=set)
    """Steps on which some stage still computes or puts."""
    fetching: set[int] = field(default_factory=set)
    fetch_blocks: int = 0
    """Blocks asked for, then the fewest that a stage got."""
    ending: set[int] | None = None
    """Stages that have not acknowledged the end; None while the request goes on."""


class StepLog:
    """State of the log of one group epoch."""

    def __init__(self, *, epoch: int, num_stages: int) -> None:
        self.epoch = epoch
        self._stages = frozenset(range(num_stages))
        self._last_seq = 0
        self._last_done = [0] * num_stages
        self._steps: dict[int, _Step] = {}
        self._requests: dict[RequestKey, _Request] = {}

    @property
    def in_flight_steps(self) -> int:
        """Steps that some stage has not computed yet."""
        return sum(1 for step in self._steps.values() if step.computing)

    @property
    def open_puts(self) -> int:
        """Steps whose objects are not all put."""
        return sum(1 for step in self._steps.values() if step.putting)

    @property
    def has_open_work(self) -> bool:
        """Whether the log waits for any report."""
        return bool(self._steps) or any(r.fetching or r.ending is not None for r in self._requests.values())

    def knows(self, key: RequestKey) -> bool:
        """Whether stages hold state of that request."""
        return key in self._requests

    def is_ending(self, key: RequestKey) -> bool:
        """Whether the end is written, so that nothing may follow."""
        return key in self._requests and self._requests[key].ending is not None

    def is_busy(self, key: RequestKey) -> bool:
        """Whether a stage still fetches, computes or puts for the request."""
        request = self._requests.get(key)
        return request is not None and bool(request.fetching or request.steps)

    def append_fetch(
        self, key: RequestKey, *, block_hashes: bytes, pages: Sequence[int], first_block: int
    ) -> stage_pb2.LogEntry:
        """Every stage shall get blocks from the store into the first `pages`. The first entry of a request that fetches.

        Args:
            block_hashes: of the blocks from `first_block` on; those before it are in their pages already.
        """
        assert key not in self._requests, f"fetch after other entries of {key}"
        self._requests[key] = _Request(fetching=set(self._stages), fetch_blocks=len(pages))
        fetch = stage_pb2.FetchPrefix(
            request_id=key.request_id,
            request_epoch=key.epoch,
            block_hashes=block_hashes,
            pages=pages,
            first_block=first_block,
        )
        return self._entry(fetch=fetch)

    def append_compute(self, chunks: Sequence[stage_pb2.Chunk]) -> stage_pb2.LogEntry:
        """One micro-batch."""
        assert chunks, "a step without chunks"
        entry = self._entry(compute=stage_pb2.ComputeStep(chunks=chunks))
        self._steps[entry.seq] = _Step(tuple(chunks), set(self._stages), set(self._stages))
        for chunk in chunks:
            request = self._requests.setdefault(chunk_key(chunk), _Request())
            assert request.ending is None, f"compute after the end of {chunk_key(chunk)}"
            assert not request.fetching, f"compute during the fetch of {chunk_key(chunk)}"
            request.steps.add(entry.seq)
        return entry

    def append_end(self, key: RequestKey) -> stage_pb2.LogEntry:
        """Nothing follows for this request; done or cancelled makes no difference to the stages."""
        request = self._requests[key]
        assert request.ending is None, f"second end of {key}"
        request.ending = set(self._stages)
        return self._entry(end=stage_pb2.EndRequest(request_id=key.request_id, request_epoch=key.epoch))

    def step_chunks(self, seq: int) -> tuple[stage_pb2.Chunk, ...]:
        """What an open step consists of."""
        return self._step(seq).chunks

    def uncomputed(self, stage_idx: int) -> list[tuple[stage_pb2.Chunk, ...]]:
        """Steps that a stage has not computed yet, the next one first."""
        return [step.chunks for step in self._steps.values() if stage_idx in step.computing]

    def step_done(self, stage_idx: int, seq: int) -> tuple[stage_pb2.Chunk, ...]:
        """A stage has computed a step; returns its chunks. Stages compute in the order of the log."""
        step = self._step(seq)
        if stage_idx not in step.computing or seq <= self._last_done[stage_idx]:
            raise LogViolation(f"stage {stage_idx} reports step {seq} after step {self._last_done[stage_idx]}")
        step.computing.discard(stage_idx)
        self._last_done[stage_idx] = seq
        self._close_if_idle(seq, step)
        return step.chunks

    def puts_done(self, stage_idx: int, seq: int, *, failed: int) -> PutsOutcome | None:
        """A stage has put its layer groups of a step; returns the outcome when it was the last stage to do so."""
        step = self._step(seq)
        if stage_idx not in step.putting:
            raise LogViolation(f"stage {stage_idx} reports the puts of step {seq} twice")
        step.putting.discard(stage_idx)
        step.failed += failed
        self._close_if_idle(seq, step)
        return None if step.putting else PutsOutcome(step.chunks, step.failed)

    def fetch_done(self, stage_idx: int, key: RequestKey, num_blocks: int) -> int | None:
        """A stage holds `num_blocks` blocks of the prefix; the last stage's report returns the fewest of all.

        Fewer than asked for is a rewind: the cursor of the request starts there.
        """
        request = self._requests.get(key)
        if request is None or stage_idx not in request.fetching:
            raise LogViolation(f"stage {stage_idx} reports a fetch of {key} that is not open")
        request.fetching.discard(stage_idx)
        request.fetch_blocks = min(request.fetch_blocks, num_blocks)
        return None if request.fetching else request.fetch_blocks

    def end_done(self, stage_idx: int, key: RequestKey) -> bool:
        """A stage has let go of a request; True when it was the last one: the pages are free."""
        request = self._requests.get(key)
        if request is None or request.ending is None or stage_idx not in request.ending:
            raise LogViolation(f"stage {stage_idx} acknowledges an end of {key} that is not open")
        if stage_idx in request.fetching or any(
            stage_idx in self._steps[seq].computing or stage_idx in self._steps[seq].putting for seq in request.steps
        ):
            raise LogViolation(f"stage {stage_idx} acknowledges the end of {key} with work of it open")
        request.ending.discard(stage_idx)
        if request.ending:
            return False
        del self._requests[key]
        return True

    def check_invariants(self) -> None:
        """Open steps and the requests they belong to agree; a request that ends has no open work where it is acknowledged."""
        for seq, step in self._steps.items():
            assert step.computing or step.putting, f"step {seq} is over and still listed"
            for chunk in step.chunks:
                assert seq in self._requests[chunk_key(chunk)].steps, f"step {seq} is not listed by {chunk_key(chunk)}"
        for key, request in self._requests.items():
            assert request.steps <= self._steps.keys(), f"{key} lists steps that are over"

    def _entry(
        self,
        *,
        compute: stage_pb2.ComputeStep | None = None,
        fetch: stage_pb2.FetchPrefix | None = None,
        end: stage_pb2.EndRequest | None = None,
    ) -> stage_pb2.LogEntry:
        self._last_seq += 1
        return stage_pb2.LogEntry(epoch=self.epoch, seq=self._last_seq, compute=compute, fetch=fetch, end=end)

    def _step(self, seq: int) -> _Step:
        step = self._steps.get(seq)
        if step is None:
            raise LogViolation(f"report for step {seq}, which is not open")
        return step

    def _close_if_idle(self, seq: int, step: _Step) -> None:
        if not step.computing and not step.putting:
            del self._steps[seq]
            for chunk in step.chunks:
                self._requests[chunk_key(chunk)].steps.discard(seq)


def chunk_key(chunk: stage_pb2.Chunk) -> RequestKey:
    return RequestKey(chunk.request_id, chunk.request_epoch)
