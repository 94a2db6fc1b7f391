"""Batch: pages are conserved and every request ends once, in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from decode_node.batch import Batch, Phase
from kvstore.pool import RequestKey
from moontide.errors import BadRequest, Rejected, RejectReason

NUM_PAGES = 12
MAX_BATCH = 3
MAX_QUEUE = 4


def key(name: str, epoch: int = 1) -> RequestKey:
    return RequestKey(name, epoch)


def make_batch(*, num_pages: int = NUM_PAGES, max_batch: int = MAX_BATCH, max_queue: int = MAX_QUEUE) -> Batch:
    return Batch(num_pages=num_pages, max_batch=max_batch, max_queue=max_queue)


def pull_everything(batch: Batch, request: RequestKey) -> None:
    while blocks := batch.take_pull(request, limit=2):
        batch.pull_done(request, blocks, missing=[])


def run_one(batch: Batch, request: RequestKey) -> None:
    """Bring an admitted request into the running batch."""
    batch.start(request)
    pull_everything(batch, request)
    assert batch.make_ready(request)


def test_pages_are_reserved_first_come_first_served() -> None:
    batch = make_batch(num_pages=4)
    for name, num_pages in (("a", 3), ("b", 3), ("c", 1)):
        batch.open(key(name), num_blocks=1, num_pages=num_pages)
    assert batch.admit() == [key("a")]
    assert batch.count(Phase.WAITING_PAGES) == 2, "c fits but must not overtake b"
    batch.end(key("a"))
    assert batch.admit() == [key("b"), key("c")]
    batch.check_invariants()


def test_started_request_takes_pages_of_the_youngest_that_has_nothing_to_pull() -> None:
    batch = make_batch(num_pages=6)
    for name in "abc":
        batch.open(key(name), num_blocks=2, num_pages=2)
    assert batch.admit() == [key("a"), key("b"), key("c")]
    batch.open(key("d"), num_blocks=3, num_pages=3)
    batch.seal(key("b"), 1)
    assert batch.admit() == []
    batch.start(key("d"))
    assert batch.admit() == [key("d")], "d holds room in the store that the prefill of a and c may be waiting for"
    assert [batch.find(key(name)).phase for name in "abc"] == [  # type: ignore[union-attr]
        Phase.WAITING_PAGES, Phase.PULLING, Phase.WAITING_PAGES,
    ]  # fmt: skip
    batch.check_invariants()
    batch.end(key("d"))
    assert batch.admit() == [key("a"), key("c")]
    batch.check_invariants()


def test_started_request_waits_for_pages_that_others_already_fill() -> None:
    batch = make_batch(num_pages=4)
    batch.open(key("a"), num_blocks=2, num_pages=4)
    batch.admit()
    batch.seal(key("a"), 1)
    batch.open(key("b"), num_blocks=1, num_pages=1)
    batch.start(key("b"))
    assert batch.admit() == []
    batch.check_invariants()


def test_request_that_never_fits_is_rejected_with_numbers() -> None:
    batch = make_batch(num_pages=4)
    with pytest.raises(Rejected, match="need 5 pages and this decode node has 4") as caught:
        batch.open(key("a"), num_blocks=1, num_pages=5)
    assert caught.value.reason is RejectReason.REQUEST_EXCEEDS_DECODE_PAGES
    assert batch.num_entries == 0


def test_full_queue_rejects() -> None:
    batch = make_batch(num_pages=1, max_queue=1)
    batch.open(key("a"), num_blocks=1, num_pages=1)
    with pytest.raises(Rejected, match="1 requests wait") as caught:
        batch.open(key("b"), num_blocks=1, num_pages=1)
    assert caught.value.reason is RejectReason.QUEUE_FULL


def test_same_request_and_epoch_twice_is_refused_and_another_epoch_is_not() -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=1, num_pages=1)
    with pytest.raises(BadRequest, match="epoch=1 is open"):
        batch.open(key("a"), num_blocks=1, num_pages=1)
    batch.open(key("a", 2), num_blocks=1, num_pages=1)
    assert batch.count(Phase.WAITING_PAGES) == 2


def test_sealed_blocks_are_pulled_before_start_and_missing_ones_again_first() -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=5, num_pages=6)
    batch.seal(key("a"), 3)
    assert batch.take_pull(key("a"), limit=2) == [], "no pages yet"
    batch.admit()
    assert batch.take_pull(key("a"), limit=2) == [0, 1]
    assert batch.take_pull(key("a"), limit=2) == [], "one pull at a time"
    batch.pull_done(key("a"), [0, 1], missing=[1])
    assert batch.take_pull(key("a"), limit=4) == [1, 2]
    batch.pull_done(key("a"), [1, 2], missing=[])
    assert batch.take_pull(key("a"), limit=4) == []
    batch.start(key("a"))
    assert not batch.make_ready(key("a"))
    assert batch.take_pull(key("a"), limit=4) == [3, 4]
    batch.pull_done(key("a"), [3, 4], missing=[])
    assert batch.make_ready(key("a"))
    assert not batch.make_ready(key("a"))


def test_running_batch_is_bounded_until_the_step_loop_lets_go() -> None:
    batch = make_batch(max_batch=1)
    for name in "ab":
        batch.open(key(name), num_blocks=1, num_pages=1)
    batch.admit()
    for name in "ab":
        run_one(batch, key(name))
    assert batch.join() == [key("a")]
    assert batch.end(key("a"))
    assert batch.join() == [], "the step loop may still compute a"
    assert not batch.let_go(key("a")), "it had ended before"
    assert batch.join() == [key("b")]
    assert batch.let_go(key("b")), "this ends it"
    assert batch.num_entries == 0


def arriving(batch: Batch, request: RequestKey) -> list[int]:
    """Make a request ready whose last pull is open; returns the blocks of that."""
    batch.open(request, num_blocks=2, num_pages=3)
    batch.admit()
    batch.start(request)
    blocks = batch.take_pull(request, limit=2)
    assert not batch.make_ready(request)
    assert batch.make_ready(request, is_arriving=True)
    batch.check_invariants()
    return blocks


def test_request_is_ready_before_the_end_of_a_pull_only_if_nothing_else_is_missing() -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=3, num_pages=3)
    batch.admit()
    batch.seal(key("a"), 2)
    blocks = batch.take_pull(key("a"), limit=2)
    assert not batch.make_ready(key("a"), is_arriving=True), "it has not started"
    batch.start(key("a"))
    assert not batch.make_ready(key("a"), is_arriving=True), "a block is not even asked for"
    batch.pull_done(key("a"), blocks, missing=[0])
    blocks = batch.take_pull(key("a"), limit=1)
    assert not batch.make_ready(key("a"), is_arriving=True)
    batch.pull_done(key("a"), blocks, missing=[])
    assert batch.take_pull(key("a"), limit=2) == [2]
    assert batch.make_ready(key("a"), is_arriving=True)
    batch.check_invariants()


def test_ready_request_whose_pull_misses_a_block_pulls_again() -> None:
    batch = make_batch()
    blocks = arriving(batch, key("a"))
    batch.pull_done(key("a"), blocks, missing=blocks[1:])
    batch.check_invariants()
    assert batch.join() == []
    pull_everything(batch, key("a"))
    assert batch.make_ready(key("a"))
    assert batch.join() == [key("a")]


@pytest.mark.parametrize("pull_ends_first", [False, True])
def test_running_request_whose_blocks_are_late_is_put_back(pull_ends_first: bool) -> None:
    batch = make_batch(max_batch=1)
    blocks = arriving(batch, key("a"))
    assert batch.join() == [key("a")]
    if pull_ends_first:
        batch.pull_done(key("a"), blocks, missing=blocks)
        batch.check_invariants()
        assert batch.take_pull(key("a"), limit=2) == [], "the step is to be over first"
    batch.put_back(key("a"))
    batch.check_invariants()
    if not pull_ends_first:
        batch.pull_done(key("a"), blocks, missing=blocks)
    pull_everything(batch, key("a"))
    assert batch.make_ready(key("a"))
    assert batch.join() == [key("a")], "its place was free again"
    batch.check_invariants()


def test_pages_come_back_when_both_pull_and_step_are_over() -> None:
    batch = make_batch()
    blocks = arriving(batch, key("a"))
    batch.join()
    assert batch.end(key("a"))
    assert not batch.let_go(key("a"))
    assert batch.num_free_pages < NUM_PAGES, "the pull may still write into them"
    batch.pull_done(key("a"), blocks, missing=[])
    assert batch.num_free_pages == NUM_PAGES


@pytest.mark.parametrize("fence", ["pull", "step"])
def test_pages_come_back_only_when_nothing_of_the_request_is_open(fence: str) -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=1, num_pages=2)
    batch.admit()
    if fence == "pull":
        batch.seal(key("a"), 1)
        blocks = batch.take_pull(key("a"), limit=1)
    else:
        run_one(batch, key("a"))
        batch.join()
    assert batch.end(key("a"))
    assert batch.num_free_pages == NUM_PAGES - 2
    batch.check_invariants()
    if fence == "pull":
        batch.pull_done(key("a"), blocks, missing=[])
    else:
        batch.let_go(key("a"))
    assert batch.num_free_pages == NUM_PAGES
    assert not batch.end(key("a")), "it ended once"


def test_write_back_keeps_its_pages_and_no_others_until_its_puts_are_over() -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=2, num_pages=5)
    batch.admit()
    run_one(batch, key("a"))
    batch.join()
    entry = batch.find(key("a"))
    assert entry is not None
    pages = entry.pages
    batch.keep_for_write(key("a"), pages[:3])
    assert batch.let_go(key("a")), "the request itself is over"
    assert batch.num_free_pages == NUM_PAGES - 3
    batch.keep_for_write(key("a"), pages[2:3])
    assert batch.num_free_pages == NUM_PAGES - 1
    batch.check_invariants()
    batch.write_done(key("a"))
    assert batch.num_free_pages == NUM_PAGES
    assert batch.num_entries == 0


def test_write_backs_have_a_share_of_the_pages_while_others_wait() -> None:
    batch = make_batch(num_pages=16)
    for name in "ab":
        batch.open(key(name), num_blocks=2, num_pages=2)
    batch.admit()
    for name in "ab":
        run_one(batch, key(name))
    batch.join()
    for name in "ab":
        batch.keep_for_write(key(name), batch.find(key(name)).pages)  # type: ignore[union-attr]
        batch.let_go(key(name))
    assert batch.num_write_pages == 4
    assert not batch.may_drop_write, "nobody waits"
    batch.open(key("c"), num_blocks=2, num_pages=14)
    assert batch.admit() == []
    assert batch.may_drop_write
    batch.write_done(key("a"))
    assert not batch.may_drop_write, "two pages of sixteen are within the share"
    assert batch.admit() == [key("c")]


def test_prompt_that_is_computed_here_pulls_its_hit_and_no_more() -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=5, num_pages=6)
    batch.admit()
    assert batch.take_pull(key("a"), limit=4) == [], "its hit is not known"
    batch.start_local(key("a"), 3)
    assert batch.take_pull(key("a"), limit=4) == [0, 1, 2]
    batch.pull_done(key("a"), [0, 1, 2], missing=[1])
    assert not batch.make_ready(key("a"))
    batch.shorten(key("a"), 1)
    assert batch.take_pull(key("a"), limit=4) == []
    assert batch.make_ready(key("a"))
    batch.check_invariants()
    batch.open(key("b"), num_blocks=5, num_pages=6)
    batch.start_local(key("b"), 0)
    assert batch.admit() == [key("b")]
    assert batch.make_ready(key("b")), "nothing is to be pulled"


def test_pages_of_a_prompt_stay_while_they_are_put_whatever_its_request_does() -> None:
    batch = make_batch()
    batch.open(key("a"), num_blocks=2, num_pages=5)
    batch.admit()
    batch.start_local(key("a"), 0)
    batch.make_ready(key("a"))
    batch.join()
    entry = batch.find(key("a"))
    assert entry is not None
    pages = entry.pages
    batch.begin_prompt_write(key("a"), pages[:2])
    batch.keep_for_write(key("a"), pages[:4])
    assert batch.let_go(key("a"))
    batch.keep_for_write(key("a"), pages[3:4])
    assert batch.num_free_pages == NUM_PAGES - 3
    batch.check_invariants()
    batch.write_done(key("a"))
    assert batch.num_free_pages < NUM_PAGES, "the prompt is still being put"
    batch.prompt_write_done(key("a"))
    assert batch.num_free_pages == NUM_PAGES


def test_room_is_what_nobody_waits_for() -> None:
    batch = make_batch(num_pages=4)
    batch.open(key("a"), num_blocks=1, num_pages=3)
    batch.admit()
    assert batch.has_room_for(1)
    assert not batch.has_room_for(2)
    batch.open(key("b"), num_blocks=1, num_pages=2)
    assert batch.admit() == []
    assert not batch.has_room_for(1), "b is first"


class BatchMachine(RuleBasedStateMachine):
    """Random opens, seals, starts, pulls, steps, writes and ends, of prompts from prefill and prompts that are computed here."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.batch = make_batch()
        self.next_id = 0
        self.opened: set[RequestKey] = set()
        self.terminals: list[RequestKey] = []
        self.pulls: dict[RequestKey, list[int]] = {}
        self.in_steps: set[RequestKey] = set()
        self.writes: dict[RequestKey, list[int]] = {}
        self.local: set[RequestKey] = set()
        self.prompt_writes: dict[RequestKey, list[int]] = {}

    def is_live(self, request: RequestKey) -> bool:
        entry = self.batch.find(request)
        return entry is not None and entry.phase is not Phase.ENDED

    @rule(target=keys, num_blocks=st.integers(1, 6), more=st.integers(0, 8), is_local=st.booleans())
    def open(self, num_blocks: int, more: int, is_local: bool) -> object:
        self.next_id += 1
        request = key(f"r{self.next_id}")
        try:
            self.batch.open(request, num_blocks=num_blocks, num_pages=num_blocks + more)
        except Rejected:
            assert num_blocks + more > NUM_PAGES or self.batch.count(Phase.WAITING_PAGES) >= MAX_QUEUE
            return multiple()
        self.opened.add(request)
        if is_local:
            self.local.add(request)
        return request

    @rule()
    def admit(self) -> None:
        assert all(self.batch.find(request).pages for request in self.batch.admit())

    @rule(request=keys, num_blocks=st.integers(0, 9))
    def seal(self, request: RequestKey, num_blocks: int) -> None:
        if self.is_live(request) and request not in self.local:
            self.batch.seal(request, num_blocks)

    @rule(request=keys)
    def start(self, request: RequestKey) -> None:
        if self.is_live(request) and request not in self.local:
            self.batch.start(request)

    @rule(request=keys, hit_blocks=st.integers(0, 6))
    def start_local(self, request: RequestKey, hit_blocks: int) -> None:
        entry = self.batch.find(request)
        if self.is_live(request) and request in self.local and not entry.started:
            self.batch.start_local(request, min(hit_blocks, entry.num_blocks))
            self.batch.make_ready(request)

    @rule(request=keys, limit=st.integers(1, 4))
    def take_pull(self, request: RequestKey, limit: int) -> None:
        if not self.is_live(request):
            return
        blocks = self.batch.take_pull(request, limit=limit)
        if blocks:
            assert request not in self.pulls
            self.pulls[request] = blocks

    @rule(data=st.data())
    def pull_done(self, data: st.DataObject) -> None:
        if self.pulls:
            request = data.draw(st.sampled_from(sorted(self.pulls)))
            blocks = self.pulls.pop(request)
            missing = data.draw(st.lists(st.sampled_from(blocks), unique=True))
            self.batch.pull_done(request, blocks, missing=missing)
            if self.is_live(request):
                if missing and request in self.local:
                    self.batch.shorten(request, min(missing))
                self.batch.make_ready(request)

    @rule(request=keys)
    def arrive(self, request: RequestKey) -> None:
        if self.is_live(request):
            self.batch.make_ready(request, is_arriving=True)

    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        if running := sorted(request for request in self.in_steps if self.is_live(request)):
            request = data.draw(st.sampled_from(running))
            self.in_steps.remove(request)
            self.batch.put_back(request)

    @rule()
    def join(self) -> None:
        self.in_steps.update(self.batch.join())

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.in_steps:
            request = data.draw(st.sampled_from(sorted(self.in_steps)))
            self.in_steps.remove(request)
            if self.batch.let_go(request):
                self.terminals.append(request)

    @rule(data=st.data())
    def let_go_and_write(self, data: st.DataObject) -> None:
        """A request of which the last token is drawn."""
        entries = [self.batch.find(request) for request in sorted(self.in_steps)]
        done = [
            each for each in entries if each and each.phase is Phase.RUNNING and each.is_pulled and not each.pull_open
        ]
        if done:
            entry = data.draw(st.sampled_from(done))
            self.writes[entry.key] = entry.pages[: data.draw(st.integers(1, len(entry.pages)))]
            self.batch.keep_for_write(entry.key, self.writes[entry.key])
            self.in_steps.remove(entry.key)
            assert self.batch.let_go(entry.key)
            self.terminals.append(entry.key)

    @rule(data=st.data())
    def begin_prompt_write(self, data: st.DataObject) -> None:
        """A request of which the first token is drawn."""
        entries = [self.batch.find(request) for request in sorted(self.in_steps & self.local)]
        done = [each for each in entries if each and each.phase is Phase.RUNNING and each.is_pulled]
        done = [each for each in done if not each.prompt_write_pages]
        if done:
            entry = data.draw(st.sampled_from(done))
            self.prompt_writes[entry.key] = entry.pages[: data.draw(st.integers(1, len(entry.pages)))]
            self.batch.begin_prompt_write(entry.key, self.prompt_writes[entry.key])

    @rule(data=st.data())
    def prompt_write_done(self, data: st.DataObject) -> None:
        if self.prompt_writes:
            request = data.draw(st.sampled_from(sorted(self.prompt_writes)))
            del self.prompt_writes[request]
            self.batch.prompt_write_done(request)

    @rule(data=st.data(), is_over=st.booleans())
    def write_fewer(self, data: st.DataObject, is_over: bool) -> None:
        if self.writes:
            request = data.draw(st.sampled_from(sorted(self.writes)))
            pages = self.writes.pop(request)
            if is_over or len(pages) == 1:
                self.batch.write_done(request)
            else:
                self.writes[request] = pages[1:]
                self.batch.keep_for_write(request, pages[1:])

    @rule(request=keys)
    def end(self, request: RequestKey) -> None:
        if self.batch.end(request):
            self.terminals.append(request)

    @rule(request=consumes(keys))
    def end_twice(self, request: RequestKey) -> None:
        self.end(request)
        assert not self.batch.end(request)

    @invariant()
    def pages_are_conserved(self) -> None:
        self.batch.check_invariants()

    @invariant()
    def pages_of_open_work_are_held(self) -> None:
        for request in {*self.pulls, *self.in_steps}:
            assert self.batch.find(request).pages, "somebody may write into pages that are free"
        for request, pages in (*self.writes.items(), *self.prompt_writes.items()):
            assert set(pages) <= set(self.batch.find(request).pages), "a put may read pages that serve another"

    def teardown(self) -> None:
        for request in self.opened:
            if self.batch.end(request):
                self.terminals.append(request)
        for request in self.in_steps:
            self.batch.let_go(request)
        for request, blocks in self.pulls.items():
            self.batch.pull_done(request, blocks, missing=[])
        for request in self.writes:
            self.batch.write_done(request)
        for request in self.prompt_writes:
            self.batch.prompt_write_done(request)
        assert sorted(self.terminals) == sorted(self.opened), "one terminal state each"
        assert self.batch.num_free_pages == NUM_PAGES
        assert self.batch.num_entries == 0


BatchMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBatchMachine = BatchMachine.TestCase
