"""Accounting of this host's segment: who holds which block, what may leave, and what is still on its way out. No I/O.

    absent --reserve--> open --seal--> sealed --evict--> leaving --> absent        every state but absent counts its bytes
                          |                                 ^
                          `--last reference is dropped------'       a block that is leaving and is reserved again is open

What holds at any time:
- used + free = capacity; a request gets all the room it needs, or none.
- Sealed blocks are closed under "parent of": a block that was completed before its parent is sealed together with it.
- References are closed under "parent of" too, because a reservation lists its chain from the first block on. So every
  unreferenced block can be evicted, children before parents; `eviction.py` says which of those without children first.
- A leaving block's bytes count until its objects are seen to be gone. It is looked at again for a while after its last
  writer let go, because a put of a dying writer may arrive late.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from kvstore.block import BlockHash
from kvstore.eviction import EVICTION_POLICIES
from kvstore.keys import LOCAL_NODE_ID, block_key, check_request_id, partial_key
from kvstore.layout import KVLayout
from kvstore.transfer.base import RemoveStatus
from moontide.clock import Clock
from moontide.errors import BadRequest, BlockMissing

RETRY_REMOVAL_S = 0.5
"""Seconds until a removal that a reader's lease blocked is tried again."""
_RECHECKS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Ages, counted from the last writer's end, at which objects that are gone are looked for again."""


class RequestKey(NamedTuple):
    """One attempt of one request."""

    request_id: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class ReserveRequest:
    owner: RequestKey
    layout: KVLayout
    root: BlockHash
    hashes: tuple[BlockHash, ...]
    """Every full block of the prompt, from the first on."""
    has_partial: bool
    lease_s: float

    @property
    def total_bytes(self) -> int:
        return (len(self.hashes) + self.has_partial) * self.layout.block_bytes


class ReserveResult(Enum):
    RESERVED = auto()
    WAIT = auto()
    """Room is short now: ask again."""
    TOO_LARGE = auto()
    """More than the pool can ever hold."""


@dataclass(frozen=True, kw_only=True)
class ReserveReply:
    result: ReserveResult
    hit_blocks: int
    """Leading blocks that are sealed."""
    needed_bytes: int
    """TOO_LARGE: bytes of all blocks; else what was, or must become, free for this request."""
    capacity_bytes: int
    segment: str = ""
    """Where puts of this reservation belong; "" when the store has one segment only."""
    promoted_blocks: int = 0
    """Of the hit, those that came back from the SSD."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Blocks that were sealed together; each one's parent is the one before, the first one's is `parent`."""

    parent: BlockHash
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Objects to remove now; the outcome goes to `finish_removal`."""

    owner: BlockHash | RequestKey
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """What an operator's call did."""

    hashes: list[BlockHash]
    """Blocks that stopped being sealed, children before parents."""
    num_bytes: int
    num_pinned: int
    """Blocks that were asked for and stay, because requests hold them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockInfo:
    hash: BlockHash
    parent: BlockHash
    layout: KVLayout
    is_sealed: bool
    num_refs: int
    """Reservations that hold it."""
    num_uses: int
    idle_s: float
    """Seconds since the last reservation ended; 0 while one holds it."""


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    capacity_bytes: int
    used_bytes: int
    sealed_blocks: int
    reservations: int
    pinned_blocks: int
    objects_to_remove: int
    ssd_capacity_bytes: int = 0
    """0: no SSD tier."""
    ssd_used_bytes: int = 0
    ssd_blocks: int = 0


@dataclass(slots=True)
class _Block:
    parent: BlockHash
    layout: KVLayout
    position: int
    num_refs: int = 0
    is_complete: bool = False
    is_sealed: bool = False
    children: set[BlockHash] = field(default_factory=set)
    last_use: int = 0
    num_uses: int = 0
    released_s: float = 0.0


@dataclass(slots=True)
class _Reservation:
    request: ReserveRequest
    expires_s: float


@dataclass(slots=True)
class _Leaving:
    layout: KVLayout
    nbytes: int
    """Still counted; 0 once the objects were seen to be gone."""
    released_s: float
    due_s: float
    is_busy: bool = False


_ColdEntry: TypeAlias = tuple[tuple[int, ...], BlockHash]


class PoolState:
    """Not thread safe: one owner calls it, between two awaits."""

    def __init__(self, *, capacity_bytes: int, clock: Clock, policy: str = "lru", node_id: str = LOCAL_NODE_ID) -> None:
        """`policy` is a name in EVICTION_POLICIES; `node_id` names the holder in the keys of its objects."""
        self.capacity_bytes = capacity_bytes
        self.node_id = node_id
        self._rank = EVICTION_POLICIES[policy]
        self._clock = clock
        self._used_bytes = 0
        self._idle_bytes = 0
        """Of sealed blocks without references."""
        self._leaving_bytes = 0
        """Of full blocks. A partial one was just read, so that its reader's lease, seconds, keeps it: nobody waits for its room while
        there are cold blocks."""
        self._num_sealed = 0
        self._num_pinned = 0
        self._use_count = 0
        self._blocks: dict[BlockHash, _Block] = {}
        self._reservations: dict[RequestKey, _Reservation] = {}
        self._leaving: dict[BlockHash | RequestKey, _Leaving] = {}
        self._counted: dict[BlockHash | RequestKey, _Leaving] = {}
        """Those that are leaving and still count bytes."""
        self._cold: list[_ColdEntry] = []
        """Heap of (rank, hash). Entries go stale; `_is_cold` tells which ones count."""

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self._used_bytes

    def stats(self) -> PoolStats:
        return PoolStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            sealed_blocks=self._num_sealed,
            reservations=len(self._reservations),
            pinned_blocks=self._num_pinned,
            objects_to_remove=sum(leaving.layout.num_groups for leaving in self._counted.values()),
        )

    @property
    def used_fraction(self) -> float:
        return self._used_bytes / self.capacity_bytes

    def keys_of(self, hashes: Sequence[BlockHash]) -> list[str]:
        """Names of the objects of those blocks that are known here."""
        known = [(each, self._blocks[each].layout) for each in hashes if each in self._blocks]
        return [key for each, layout in known for key in object_keys(each, layout, holder=self.node_id)]

    def holds(self, owner: RequestKey) -> bool:
        return owner in self._reservations

    def find_sealed(self, block_hash: BlockHash) -> tuple[BlockHash, KVLayout] | None:
        """Parent and layout of a block that prefix matching may use, None if it is not here."""
        block = self._blocks.get(block_hash)
        return (block.parent, block.layout) if block is not None and block.is_sealed else None

    def hit_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, are sealed."""
        for position, block_hash in enumerate(hashes):
            if not self.is_sealed(block_hash):
                return position
        return len(hashes)

    def is_sealed(self, block_hash: BlockHash) -> bool:
        block = self._blocks.get(block_hash)
        return block is not None and block.is_sealed

    def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Pin every block of a prompt and set room aside for the ones that are not there. All or nothing; idempotent.

        Raises: BadRequest for a chain that contradicts itself, the pool, or an earlier call of the same owner.
        """
        held = self._reservations.get(request.owner)
        if held is not None:
            _check_same_chain(held.request, request)
            held.expires_s = self._clock.now() + request.lease_s
            return self._reply(ReserveResult.RESERVED, request, 0)
        self._check_chain(request)
        if request.total_bytes > self.capacity_bytes:
            return self._reply(ReserveResult.TOO_LARGE, request, request.total_bytes)
        needed = self._needed_bytes(request)
        if needed > self.free_bytes or self._is_being_removed(request):
            return self._reply(ReserveResult.WAIT, request, needed)
        self._grant(request)
        return self._reply(ReserveResult.RESERVED, request, needed)

    def evict_for(self, request: ReserveRequest) -> list[BlockHash]:
        """Start to remove cold blocks until `request` fits, in the order of the policy, never one that it asks for.

        Returns: the blocks that stopped being sealed; empty when nothing is short, when what is leaving already will do,
            or when even all cold blocks are not enough.
        """
        short = self._needed_bytes(request) - self.free_bytes - self._leaving_bytes
        asked = set(request.hashes)
        idle_asked = sum(
            block.layout.block_bytes
            for block in map(self._blocks.get, asked)
            if block is not None and block.is_sealed and not block.num_refs
        )
        if short <= 0 or short > self._idle_bytes - idle_asked:
            return []
        return self._evict(short, spared=asked)

    def evict_coldest(self, num_bytes: int) -> Eviction:
        """Start to remove blocks of at least `num_bytes` in the order of the policy, or all that nobody holds."""
        idle_bytes = self._idle_bytes
        hashes = self._evict(min(num_bytes, idle_bytes))
        return Eviction(hashes=hashes, num_bytes=idle_bytes - self._idle_bytes, num_pinned=0)

    def evict_chains(self, hashes: Iterable[BlockHash]) -> Eviction:
        """Start to remove these blocks and all that follow them, but for those that reservations hold. Unknown ones are gone already."""
        found: dict[BlockHash, _Block] = {}
        stack = list(hashes)
        while stack:
            block_hash = stack.pop()
            block = self._blocks.get(block_hash)
            if block is not None and block_hash not in found:
                found[block_hash] = block
                stack.extend(block.children)
        idle = [block_hash for block_hash, block in found.items() if not block.num_refs]
        idle.sort(key=lambda block_hash: found[block_hash].position, reverse=True)
        for block_hash in idle:
            self._start_leaving(block_hash)
        num_bytes = sum(found[block_hash].layout.block_bytes for block_hash in idle)
        return Eviction(hashes=idle, num_bytes=num_bytes, num_pinned=len(found) - len(idle))

    def seal(self, owner: RequestKey, *, first_block: int, num_blocks: int) -> list[StoredRun]:
        """Mark blocks whose objects were all seen to exist; returns what became visible to prefix matching. Idempotent.

        Raises: BlockMissing if the reservation ended; BadRequest for positions outside of it.
        """
        reservation = self._reservations.get(owner)
        if reservation is None:
            raise BlockMissing(
                f"request {owner.request_id} epoch {owner.epoch} holds no reservation here: its lease ended or it was "
                "released; reserve again"
            )
        hashes = reservation.request.hashes
        if not 0 <= first_block <= first_block + num_blocks <= len(hashes):
            raise BadRequest(
                f"blocks [{first_block}, {first_block + num_blocks}) are outside of the {len(hashes)} reserved ones"
            )
        sealed: list[BlockHash] = []
        for block_hash in hashes[first_block : first_block + num_blocks]:
            self._blocks[block_hash].is_complete = True
            self._seal_from(block_hash, sealed)
        return self._runs(sealed)

    def renew(self, request_ids: Iterable[str], *, lease_s: float) -> list[str]:
        """Extend the leases of every epoch of these requests; returns the ids that hold nothing here."""
        unknown = dict.fromkeys(request_ids)
        wanted = set(unknown)
        expires_s = self._clock.now() + lease_s
        for owner, reservation in self._reservations.items():
            if owner.request_id in wanted:
                reservation.expires_s = expires_s
                unknown.pop(owner.request_id, None)
        return list(unknown)

    def release(self, owner: RequestKey) -> None:
        """Drop the pins; the partial block, and full blocks that were not sealed and nobody else waits for, leave. Idempotent."""
        reservation = self._reservations.pop(owner, None)
        if reservation is None:
            return
        now = self._clock.now()
        self._use_count += 1
        request = reservation.request
        for block_hash in reversed(request.hashes):
            block = self._blocks[block_hash]
            block.num_refs -= 1
            block.released_s = now
            if block.num_refs:
                continue
            self._num_pinned -= 1
            if block.is_sealed:
                self._idle_bytes += block.layout.block_bytes
                block.last_use = self._use_count
                self._note_if_cold(block_hash)
            else:
                self._start_leaving(block_hash)
        if request.has_partial:
            self._leave(owner, _Leaving(request.layout, request.layout.block_bytes, released_s=now, due_s=now))

    def expire(self) -> list[RequestKey]:
        """Release what was not renewed in time; returns it."""
        now = self._clock.now()
        expired = [owner for owner, held in self._reservations.items() if held.expires_s <= now]
        for owner in expired:
            self.release(owner)
        return expired

    def due_removals(self, *, max_objects: int) -> list[Removal]:
        """Hand out objects to remove now, first those whose bytes still count: somebody may wait for them, and nobody for a look at
        what is gone. Until `finish_removal` nobody can reserve them."""
        now = self._clock.now()
        due: list[Removal] = []
        num_objects = 0
        for owner, leaving in chain(self._counted.items(), self._leaving.items()):
            if leaving.is_busy or leaving.due_s > now:
                continue
            if num_objects >= max_objects:
                break
            leaving.is_busy = True
            # Named only now: a long prompt that is given up has a million objects.
            due.append(Removal(owner, object_keys(owner, leaving.layout, holder=self.node_id)))
            num_objects += leaving.layout.num_groups
        return due

    def finish_removal(self, removal: Removal, statuses: Sequence[RemoveStatus]) -> None:
        """Take the outcome of one attempt and plan the next one, if it takes one."""
        leaving = self._leaving[removal.owner]
        leaving.is_busy = False
        now = self._clock.now()
        if any(status not in (RemoveStatus.REMOVED, RemoveStatus.MISSING) for status in statuses):
            leaving.due_s = now + RETRY_REMOVAL_S
            return
        self._used_bytes -= leaving.nbytes
        if not isinstance(removal.owner, RequestKey):
            self._leaving_bytes -= leaving.nbytes
        leaving.nbytes = 0
        self._counted.pop(removal.owner, None)
        age_s = now - leaving.released_s
        recheck_s = next((at_s for at_s in _RECHECKS_S if at_s > age_s), None)
        if recheck_s is None:
            del self._leaving[removal.owner]
        else:
            leaving.due_s = leaving.released_s + recheck_s

    def blocks(self, *, max_blocks: int | None = None) -> Iterator[BlockInfo]:
        """What is held, in the order of arrival. Other calls may come between two blocks; what left by then is left out."""
        now = self._clock.now()
        for block_hash in list(islice(self._blocks, max_blocks)):
            block = self._blocks.get(block_hash)
            if block is not None:
                yield BlockInfo(
                    hash=block_hash,
                    parent=block.parent,
                    layout=block.layout,
                    is_sealed=block.is_sealed,
                    num_refs=block.num_refs,
                    num_uses=block.num_uses,
                    idle_s=0.0 if block.num_refs else max(0.0, now - block.released_s),
                )

    def check_invariants(self) -> None:
        """Assert what the module promises; costs a walk over everything."""
        refs = dict.fromkeys(self._blocks, 0)
        for held in self._reservations.values():
            for block_hash in held.request.hashes:
                refs[block_hash] += 1
        idle_bytes = 0
        cold = set(self._cold)
        for block_hash, block in self._blocks.items():
            assert block.num_refs == refs[block_hash], "references differ from what reservations list"
            assert block.is_sealed or block.num_refs, "an open block that nobody holds"
            assert block_hash not in self._leaving, "a block is held and leaving"
            assert all(self._blocks[child].parent == block_hash for child in block.children), "wrong child"
            parent = self._blocks.get(block.parent)
            if parent is not None:
                assert block_hash in parent.children, "a child that its parent does not know"
                assert parent.is_sealed or not block.is_sealed, "a sealed block under an open one"
                assert parent.num_refs >= 1 or not block.num_refs, "a pinned block under one that may leave"
                assert parent.num_uses >= block.num_uses, "a block that was used more often than its parent"
            assert block.position == (0 if parent is None else parent.position + 1), "a block at a wrong position"
            if block.is_sealed and not block.num_refs:
                idle_bytes += block.layout.block_bytes
                assert block.children or (self._rank(block), block_hash) in cold, "a cold block that is never evicted"
        block_bytes = sum(block.layout.block_bytes for block in self._blocks.values())
        partial_bytes = sum(
            held.request.layout.block_bytes for held in self._reservations.values() if held.request.has_partial
        )
        leaving_bytes = sum(leaving.nbytes for leaving in self._leaving.values())
        leaving_full = sum(each.nbytes for owner, each in self._leaving.items() if not isinstance(owner, RequestKey))
        counted_leaving = {owner: each for owner, each in self._leaving.items() if each.nbytes}
        assert counted_leaving == self._counted, "what is leaving is not listed by whether it counts bytes"
        assert idle_bytes == self._idle_bytes, f"idle bytes {self._idle_bytes}, counted {idle_bytes}"
        assert leaving_full == self._leaving_bytes, f"leaving bytes {self._leaving_bytes}, counted {leaving_full}"
        assert self._num_sealed == sum(block.is_sealed for block in self._blocks.values()), "sealed blocks miscounted"
        assert self._num_pinned == sum(bool(block.num_refs) for block in self._blocks.values()), "pins miscounted"
        counted = block_bytes + partial_bytes + leaving_bytes
        assert self._used_bytes == counted, f"used bytes {self._used_bytes}, counted {counted}"
        assert 0 <= self._used_bytes <= self.capacity_bytes, f"used {self._used_bytes} of {self.capacity_bytes}"

    def _check_chain(self, request: ReserveRequest) -> None:
        check_request_id(request.owner.request_id)
        if len(set(request.hashes)) != len(request.hashes) or request.root in request.hashes:
            raise BadRequest("block_hashes names a block twice; send the chain of one prompt")
        parent = request.root
        for position, block_hash in enumerate(request.hashes):
            block = self._blocks.get(block_hash)
            if block is not None and block.parent != parent:
                raise BadRequest(
                    f"block {position} ({block_hash.hex()}) is known under another parent; send whole chains"
                )
            parent = block_hash

    def _needed_bytes(self, request: ReserveRequest) -> int:
        nbytes = request.layout.block_bytes
        owners: list[BlockHash | RequestKey] = [h for h in request.hashes if h not in self._blocks]
        if request.has_partial:
            owners.append(request.owner)
        counted = sum(self._leaving[owner].nbytes for owner in owners if owner in self._leaving)
        return len(owners) * nbytes - counted

    def _is_being_removed(self, request: ReserveRequest) -> bool:
        """Old objects of a full block serve a new reservation as well; those of a partial one do not, for its name does not
        tell what is in it."""
        partial = self._leaving.get(request.owner)
        if partial is not None and (partial.is_busy or partial.nbytes):
            return True
        return any(h in self._leaving and self._leaving[h].is_busy for h in request.hashes)

    def _grant(self, request: ReserveRequest) -> None:
        parent = request.root
        for position, block_hash in enumerate(request.hashes):
            block = self._blocks.get(block_hash)
            if block is None:
                self._stop_leaving(block_hash)
                block = self._blocks[block_hash] = _Block(parent, request.layout, position)
                self._used_bytes += request.layout.block_bytes
                if parent in self._blocks:
                    self._blocks[parent].children.add(block_hash)
            elif block.is_sealed and not block.num_refs:
                self._idle_bytes -= block.layout.block_bytes
            self._num_pinned += not block.num_refs
            block.num_refs += 1
            block.num_uses += 1
            parent = block_hash
        if request.has_partial:
            self._stop_leaving(request.owner)
            self._used_bytes += request.layout.block_bytes
        self._reservations[request.owner] = _Reservation(request, self._clock.now() + request.lease_s)

    def _reply(self, result: ReserveResult, request: ReserveRequest, needed_bytes: int) -> ReserveReply:
        return ReserveReply(
            result=result,
            hit_blocks=self.hit_blocks(request.hashes),
            needed_bytes=needed_bytes,
            capacity_bytes=self.capacity_bytes,
        )

    def _seal_from(self, block_hash: BlockHash, sealed: list[BlockHash]) -> None:
        """Seal a complete block if its parent is sealed, and complete ones below it that waited; append them in order."""
        stack = [block_hash]
        while stack:
            candidate = stack.pop()
            block = self._blocks[candidate]
            parent = self._blocks.get(block.parent)
            if block.is_sealed or not block.is_complete or (parent is not None and not parent.is_sealed):
                continue
            block.is_sealed = True
            self._num_sealed += 1
            sealed.append(candidate)
            stack.extend(block.children)

    def _runs(self, ordered: Sequence[BlockHash]) -> list[StoredRun]:
        runs: list[list[BlockHash]] = []
        for block_hash in ordered:
            if runs and runs[-1][-1] == self._blocks[block_hash].parent:
                runs[-1].append(block_hash)
            else:
                runs.append([block_hash])
        return [StoredRun(self._blocks[run[0]].parent, tuple(run)) for run in runs]

    def _evict(self, num_bytes: int, *, spared: Set[BlockHash] = frozenset()) -> list[BlockHash]:
        """Blocks of at least `num_bytes`, which are there, start to leave."""
        victims: list[BlockHash] = []
        kept: list[_ColdEntry] = []
        while num_bytes > 0:
            entry = heapq.heappop(self._cold)
            block_hash = entry[1]
            if not self._is_cold(entry):
                continue
            if block_hash in spared:
                kept.append(entry)
                continue
            num_bytes -= self._blocks[block_hash].layout.block_bytes
            self._start_leaving(block_hash)
            victims.append(block_hash)
        for entry in kept:
            heapq.heappush(self._cold, entry)
        return victims

    def _is_cold(self, entry: _ColdEntry) -> bool:
        rank, block_hash = entry
        block = self._blocks.get(block_hash)
        return (
            block is not None
            and block.is_sealed
            and not block.num_refs
            and not block.children
            and self._rank(block) == rank
        )

    def _note_if_cold(self, block_hash: BlockHash) -> None:
        block = self._blocks[block_hash]
        if block.children or block.num_refs or not block.is_sealed:
            return
        heapq.heappush(self._cold, (self._rank(block), block_hash))
        if len(self._cold) > 2 * len(self._blocks) + 1024:
            self._cold = [entry for entry in set(self._cold) if self._is_cold(entry)]
            heapq.heapify(self._cold)

    def _start_leaving(self, block_hash: BlockHash) -> None:
        """Take a block without references and children out; its bytes stay counted until its objects are gone."""
        block = self._blocks.pop(block_hash)
        layout = block.layout
        if block.is_sealed:
            self._num_sealed -= 1
            self._idle_bytes -= layout.block_bytes
        self._leave(
            block_hash,
            _Leaving(layout, layout.block_bytes, released_s=block.released_s, due_s=self._clock.now()),
        )
        self._leaving_bytes += layout.block_bytes
        if block.parent in self._blocks:
            self._blocks[block.parent].children.discard(block_hash)
            self._note_if_cold(block.parent)

    def _leave(self, owner: BlockHash | RequestKey, leaving: _Leaving) -> None:
        self._leaving[owner] = self._counted[owner] = leaving

    def _stop_leaving(self, owner: BlockHash | RequestKey) -> None:
        """Its objects, as far as they are still there, belong to the new reservation."""
        leaving = self._leaving.pop(owner, None)
        self._counted.pop(owner, None)
        if leaving is not None:
            self._used_bytes -= leaving.nbytes
            if not isinstance(owner, RequestKey):
                self._leaving_bytes -= leaving.nbytes


def object_keys(owner: BlockHash | RequestKey, layout: KVLayout, *, holder: str) -> tuple[str, ...]:
    """Names of the objects of a full block, or of the partial block of a request."""
    groups = range(layout.num_groups)
    if isinstance(owner, RequestKey):
        return tuple(partial_key(owner.request_id, owner.epoch, group_idx) for group_idx in groups)
    digest = layout.digest()
    return tuple(block_key(digest, group_idx, owner, holder) for group_idx in groups)


def _check_same_chain(held: ReserveRequest, asked: ReserveRequest) -> None:
    if (held.root, held.hashes, held.has_partial) != (asked.root, asked.hashes, asked.has_partial):
        raise BadRequest(
            f"request {asked.owner.request_id} epoch {asked.owner.epoch} holds a reservation for another chain; "
            "release it or use a new epoch"
        )
