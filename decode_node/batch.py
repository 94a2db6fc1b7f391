"""Batch: which request of a decode instance holds which pages, and what may happen to it next.

Pure state: no clock, no thread, no tensor, no socket. One owner calls it (the event loop, see requests.py).

    open --> waiting_pages <-> pulling <-> ready --> running --> ended --> forgotten
                  |               |  ^       |          |         ^
                  |               |  +-------|-put_back-+         |
                  +---------------+----------+--- end() ----------+

Pages are reserved for a whole request before its first block is pulled, first come first served, so that a running
request never runs out; a started request may take them from one that nothing can be pulled for yet (see admit). An ended
request keeps its pages until no get and no forward of it is open (the fence): until then somebody may still write into them.
A request may be ready and run while its last pull is open (make_ready); if that misses a block, it pulls again.
Pages of an ended request that are written back to the store are kept for that, while they keep nobody waiting for long (may_drop_write).
A request whose prompt is computed here starts when its prefix hit is known and pulls only that; the pages of its prompt may be put
while it runs (begin_prompt_write).

Blocks of one request:  [0, num_taken) given to a pull at least once | [.., num_available) may be pulled | not sealed yet
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.pool import RequestKey
from model_runner.pages import PageAllocator
from moontide.errors import BadRequest, Rejected, RejectReason

_WRITE_SHARE = 8
"""While requests wait for pages, write-backs hold no more than one in so many, and those for a bounded time."""


class Phase(Enum):
    WAITING_PAGES = "waiting_pages"
    PULLING = "pulling"
    """Has its pages; blocks arrive as they are sealed."""
    READY = "ready"
    """Everything is in the pages, or will be soon; waits for a place in the batch."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass
class Entry:
    """What the batch knows of one request. Only `Batch` changes it."""

    key: RequestKey
    num_blocks: int
    """Blocks that come from the store: those of the prompt, the partial one included, or its prefix hit if the rest is computed here."""
    num_pages: int
    """Pages for the prompt and every token that may follow."""
    phase: Phase = Phase.WAITING_PAGES
    pages: list[int] = field(default_factory=list)
    started: bool = False
    """Everything is sealed and the first token is known."""
    num_available: int = 0
    num_taken: int = 0
    num_pulled: int = 0
    missing: list[int] = field(default_factory=list)
    """Blocks that a pull did not find; taken again first."""
    num_pulling: int = 0
    """Blocks of the open pull."""
    step_open: bool = False
    """The step loop has it, or may still have it."""
    write_open: bool = False
    """What is left of its pages is on its way into the store."""
    prompt_write_pages: Sequence[int] = ()
    """Pages of its prompt that are on their way into the store, whether it runs or not."""

    @property
    def pull_open(self) -> bool:
        return self.num_pulling > 0

    @property
    def is_pulled(self) -> bool:
        """Whether all that comes from the store is in the pages."""
        return self.num_pulled == self.num_blocks

    @property
    def is_fenced(self) -> bool:
        """Whether somebody may still touch its pages."""
        return self.pull_open or self.step_open or self.write_open or bool(self.prompt_write_pages)


class Batch:
    """Requests of one decode instance, by key, and the owner of its pages."""

    def __init__(self, *, num_pages: int, max_batch: int, max_queue: int) -> None:
        self._pages = PageAllocator(num_pages)
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._entries: dict[RequestKey, Entry] = {}
        self._waiting: deque[RequestKey] = deque()
        self._ready: deque[RequestKey] = deque()
        self._num_in_steps = 0

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def num_write_pages(self) -> int:
        """Pages of ended requests that are written back."""
        return sum(len(entry.pages) for entry in self._entries.values() if entry.write_open)

    @property
    def may_drop_write(self) -> bool:
        """Whether requests wait for pages while write-backs hold more than their share."""
        return bool(self._waiting) and self.num_write_pages > self.num_pages // _WRITE_SHARE

    def has_room_for(self, num_pages: int) -> bool:
        """Whether a request would get its pages at once."""
        return not self._waiting and num_pages <= self.num_free_pages

    @property
    def num_entries(self) -> int:
        """Requests that are not forgotten yet, ended ones behind a fence included."""
        return len(self._entries)

    def count(self, *phases: Phase) -> int:
        return sum(entry.phase in phases for entry in self._entries.values())

    def find(self, key: RequestKey) -> Entry | None:
        return self._entries.get(key)

    def open(self, key: RequestKey, *, num_blocks: int, num_pages: int) -> None:
        """Queue a request for `num_pages` pages.

        Raises: BadRequest for a key that is there already; Rejected for a request that can never fit or a full queue.
            Nothing has changed then.
        """
        if key in self._entries:
            raise BadRequest(
                f"request_id={key.request_id!r} epoch={key.epoch} is open on this node; use a new epoch for every attempt",
                param="request_id",
            )
        if num_pages > self.num_pages:
            raise Rejected(
                f"prompt and remaining output need {num_pages} pages and this decode node has {self.num_pages} "
                "(decode.num_pages); shorten the prompt, lower max_tokens or give the node more pages",
                reason=RejectReason.REQUEST_EXCEEDS_DECODE_PAGES,
            )
        if len(self._waiting) >= self._max_queue:
            raise Rejected(
                f"{len(self._waiting)} requests wait for pages, which is the limit of this decode node (decode.max_queue); "
                "try again later or elsewhere",
                reason=RejectReason.QUEUE_FULL,
            )
        self._entries[key] = Entry(key, num_blocks=num_blocks, num_pages=num_pages)
        self._waiting.append(key)

    def seal(self, key: RequestKey, num_blocks: int) -> None:
        """Blocks [0, num_blocks) of the prompt may be pulled."""
        entry = self._entries[key]
        entry.num_available = max(entry.num_available, min(num_blocks, entry.num_blocks))

    def start(self, key: RequestKey) -> None:
        """Every block of the prompt may be pulled, and the request runs once all are in its pages."""
        entry = self._entries[key]
        entry.started = True
        entry.num_available = entry.num_blocks

    def start_local(self, key: RequestKey, num_blocks: int) -> None:
        """The request computes its prompt after the first `num_blocks` blocks, and runs once these are in its pages."""
        self._entries[key].num_blocks = num_blocks
        self.start(key)

    def shorten(self, key: RequestKey, num_blocks: int) -> None:
        """The blocks from `num_blocks` on, of which the last pull missed some, do not come: the request computes them as well."""
        entry = self._entries[key]
        assert not entry.pull_open, f"a pull of {key} is open"
        assert num_blocks == min(entry.missing), f"{key} is cut at a block that is there"
        entry.missing.clear()
        entry.num_blocks = entry.num_available = entry.num_taken = entry.num_pulled = num_blocks

    def admit(self) -> list[RequestKey]:
        """Give pages to waiting requests, in order, until the next one does not fit; returns those that got theirs.

        A request that has started comes before those of which nothing is sealed yet, and takes the pages of the youngest of
        them if it must: its KV holds room in the store that their prefill may be waiting for, so they could wait for
        each other until a deadline.
        """
        admitted: list[RequestKey] = []
        for entry in [self._entries[key] for key in self._waiting if self._entries[key].started]:
            if self._reclaim(entry.num_pages):
                self._waiting.remove(entry.key)
                self._give_pages(entry)
                admitted.append(entry.key)
        while self._waiting:
            entry = self._entries[self._waiting[0]]
            if entry.num_pages > self._pages.num_free:
                break
            self._waiting.popleft()
            self._give_pages(entry)
            admitted.append(entry.key)
        return admitted

    def take_pull(self, key: RequestKey, *, limit: int) -> list[int]:
        """Take up to `limit` blocks that are to be pulled now; nothing while a pull of the request is open.

        A pull is open from here to `pull_done`, unless the list is empty.
        """
        entry = self._entries[key]
        if entry.phase is not Phase.PULLING or entry.pull_open:
            return []
        blocks = entry.missing[:limit]
        del entry.missing[: len(blocks)]
        num_new = min(limit - len(blocks), entry.num_available - entry.num_taken)
        blocks.extend(range(entry.num_taken, entry.num_taken + num_new))
        entry.num_taken += num_new
        entry.num_pulling = len(blocks)
        return blocks

    def pull_done(self, key: RequestKey, blocks: Sequence[int], *, missing: Sequence[int]) -> None:
        """The open pull is over: of `blocks`, those not in `missing` are in their pages."""
        entry = self._entries[key]
        assert entry.pull_open, f"no pull of {key} is open"
        entry.num_pulling = 0
        if entry.phase is Phase.ENDED:
            self._forget_unless_fenced(entry)
            return
        entry.num_pulled += len(blocks) - len(missing)
        entry.missing = sorted([*entry.missing, *missing])
        if missing and entry.phase is Phase.READY:
            self._ready.remove(key)
            entry.phase = Phase.PULLING

    def make_ready(self, key: RequestKey, *, is_arriving: bool = False) -> bool:
        """Move a request on to READY if it has started and its last block arrived; tells whether it moved just now.

        Args:
            is_arriving: the blocks of the open pull count: its step waits for them where it needs them.
        """
        entry = self._entries[key]
        num_there = entry.num_pulled + (entry.num_pulling if is_arriving else 0)
        if entry.phase is not Phase.PULLING or not entry.started or num_there < entry.num_blocks:
            return False
        entry.phase = Phase.READY
        self._ready.append(key)
        return True

    def join(self) -> list[RequestKey]:
        """Move ready requests into the running batch while it has room; returns them, oldest first."""
        joined: list[RequestKey] = []
        while self._ready and self._num_in_steps < self._max_batch:
            entry = self._entries[self._ready.popleft()]
            entry.phase = Phase.RUNNING
            entry.step_open = True
            self._num_in_steps += 1
            joined.append(entry.key)
        return joined

    def end(self, key: RequestKey) -> bool:
        """End a request from any phase; False if it is unknown or has ended already.

        Its pages are free when this returns, unless a get or a forward of it is open: then with `pull_done` or `let_go`.
        """
        entry = self._entries.get(key)
        if entry is None or entry.phase is Phase.ENDED:
            return False
        if entry.phase is Phase.WAITING_PAGES:
            self._waiting.remove(key)
        elif entry.phase is Phase.READY:
            self._ready.remove(key)
        entry.phase = Phase.ENDED
        self._forget_unless_fenced(entry)
        return True

    def let_go(self, key: RequestKey) -> bool:
        """The step loop is done with a request; tells whether this ends it (else it had ended before)."""
        entry = self._entries[key]
        assert entry.step_open, f"{key} is not in the step loop"
        entry.step_open = False
        self._num_in_steps -= 1
        if entry.phase is Phase.RUNNING:
            return self.end(key)
        self._forget_unless_fenced(entry)
        return False

    def put_back(self, key: RequestKey) -> None:
        """The step loop is done with a running request for now, because blocks were not there in time: it is PULLING again."""
        entry = self._entries[key]
        assert entry.phase is Phase.RUNNING, f"{key} does not run"
        entry.phase = Phase.PULLING
        entry.step_open = False
        self._num_in_steps -= 1

    def begin_prompt_write(self, key: RequestKey, pages: Sequence[int]) -> None:
        """Puts may read these pages, in which no step writes any more, until `prompt_write_done`."""
        entry = self._entries[key]
        assert pages, f"nothing of {key} is written"
        assert not entry.prompt_write_pages, f"the prompt of {key} is written already"
        assert set(pages) <= set(entry.pages), f"{key} does not hold the pages that are written"
        entry.prompt_write_pages = pages

    def prompt_write_done(self, key: RequestKey) -> None:
        """No put of the prompt's pages is open, and none will come."""
        entry = self._entries[key]
        assert entry.prompt_write_pages, f"the prompt of {key} is not written"
        entry.prompt_write_pages = ()
        if entry.phase is Phase.ENDED:
            self._forget_unless_fenced(entry)

    def keep_for_write(self, key: RequestKey, pages: Sequence[int]) -> None:
        """Of a request that no step computes any more, keep these pages until `write_done`, and others only for puts of its prompt
        that are open; again for fewer.
        """
        entry = self._entries[key]
        assert entry.is_pulled, f"{key} is written back and its prompt is not in the pages"
        kept = {*pages, *entry.prompt_write_pages}
        assert kept <= set(entry.pages), f"{key} does not hold the pages that are written back"
        entry.write_open = True
        self._pages.free([page for page in entry.pages if page not in kept])
        entry.pages = [page for page in entry.pages if page in kept]

    def write_done(self, key: RequestKey) -> None:
        """No put of the request's pages is open, and none will come."""
        entry = self._entries[key]
        assert entry.write_open, f"{key} is not written back"
        entry.write_open = False
        self._forget_unless_fenced(entry)

    def check_invariants(self) -> None:
        """free + held pages = all pages, each phase holds what it should, and bounds hold."""
        self._pages.check_invariants()
        held = [page for entry in self._entries.values() for page in entry.pages]
        assert len(held) == len(set(held)), "a page serves two requests"
        assert len(held) + self._pages.num_free == self.num_pages, "a page is lost"
        assert self._num_in_steps == sum(entry.step_open for entry in self._entries.values()) <= self._max_batch
        by_phase = {phase: [e.key for e in self._entries.values() if e.phase is phase] for phase in Phase}
        assert by_phase[Phase.WAITING_PAGES] == list(self._waiting), "the queue is not in order of arrival"
        assert set(by_phase[Phase.READY]) == set(self._ready)
        for entry in self._entries.values():
            _check_entry(entry)

    def _give_pages(self, entry: Entry) -> None:
        entry.pages = self._pages.allocate(entry.num_pages)
        entry.phase = Phase.PULLING

    def _reclaim(self, num_pages: int) -> bool:
        """Make `num_pages` free, from requests that have pages and no block to pull yet; False, and no change, if that is not enough."""
        victims: list[Entry] = []
        num_free = self.num_free_pages
        for entry in reversed(self._entries.values()):
            if num_free >= num_pages:
                break
            if entry.phase is Phase.PULLING and entry.num_available == 0 and not entry.started:
                victims.append(entry)
                num_free += entry.num_pages
        if num_free < num_pages:
            return False
        for entry in victims:
            self._pages.free(entry.pages)
            entry.pages = []
            entry.phase = Phase.WAITING_PAGES
        if victims:
            self._waiting = deque(key for key, entry in self._entries.items() if entry.phase is Phase.WAITING_PAGES)
        return True

    def _forget_unless_fenced(self, entry: Entry) -> None:
        if not entry.is_fenced:
            self._pages.free(entry.pages)
            del self._entries[entry.key]


def _check_entry(entry: Entry) -> None:
    waiting, ended = entry.phase is Phase.WAITING_PAGES, entry.phase is Phase.ENDED
    assert not entry.write_open or ended, f"{entry.key} is written back before its end"
    assert set(entry.prompt_write_pages) <= set(entry.pages), f"pages of {entry.key} are free and are written"
    assert entry.write_open or len(entry.pages) == (0 if waiting else entry.num_pages)
    assert not ended or entry.is_fenced, f"{entry.key} ended and is still there"
    assert ended or entry.step_open == (entry.phase is Phase.RUNNING)
    assert not (entry.pull_open and waiting)
    assert entry.num_pulled + len(entry.missing) <= entry.num_taken <= entry.num_available <= entry.num_blocks
    if entry.phase in (Phase.READY, Phase.RUNNING):
        assert entry.started
        num_there = entry.num_pulled + entry.num_pulling
        assert num_there + len(entry.missing) == entry.num_blocks, f"{entry.key} runs without all its blocks"
        assert not entry.missing or entry.phase is Phase.RUNNING, f"{entry.key} is ready and misses blocks"
