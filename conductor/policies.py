"""How a policy picks among the options of one request. Each one in a class; the same objects serve live traffic and simulations.

random, round-robin   whoever; the baselines of the papers
least-loaded          the shortest queue
cache-aware           the shortest TTFT with each group's own hits ("local" in the papers)
kvcache-centric       Mooncake's Algorithm 1 (arXiv:2407.00079, section 6; FAST'25, section 4)
moontide              the least delay for all: the request's own, and what it adds to those who wait behind it
All but the first two decode where a step with the request is shortest, among those with room.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from conductor.cost import Column
from conductor.options import Mask, Options, PrefillCosts, Way
from conductor.view import Rows
from moontide.errors import ConfigError

_EQUAL = 0.01
"""Costs that differ by no more than this share are equal: chance decides, so that conductors that know the same do not all do the same."""
_EQUAL_S = 1e-4
_LATE_S = 1e6
"""What a broken bound weighs more than any delay."""
_NUM_OTHERS = 3
"""Next best ways that an explanation shows."""
_NUM_PARTLY = 16
"""Groups, the best so far, for which copying a part of a hit is considered."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    way: Way
    others: tuple[Way, ...]
    """Next best, best first."""
    reason: str


class Policy(Protocol):
    """Takes part in one decision after the other; may keep a turn, knows no nodes."""

    @property
    def name(self) -> str: ...

    def pick(self, options: Options, rng: Random) -> Pick: ...


class RandomChoice:
    name = "random"

    def pick(self, options: Options, rng: Random) -> Pick:
        prefill_row = rng.choice(np.flatnonzero(options.allowed_prefill).tolist())
        decode_row = rng.choice(np.flatnonzero(options.allowed_decode).tolist())
        return Pick(way=options.way(options.own_costs, prefill_row, decode_row), others=(), reason="chance")


class RoundRobin:
    name = "round-robin"

    def __init__(self) -> None:
        self._turn = itertools.count()

    def pick(self, options: Options, rng: Random) -> Pick:
        turn = next(self._turn)
        prefill_rows = np.flatnonzero(options.allowed_prefill)
        decode_rows = np.flatnonzero(options.allowed_decode)
        prefill_row = int(prefill_rows[turn % len(prefill_rows)])
        decode_row = int(decode_rows[turn % len(decode_rows)])
        return Pick(way=options.way(options.own_costs, prefill_row, decode_row), others=(), reason="their turn")


class LeastLoaded:
    name = "least-loaded"

    def pick(self, options: Options, rng: Random) -> Pick:
        rows = _best_rows(options.queue_s, options.allowed_prefill, rng)
        return _pick(options, [(options.own_costs, row) for row in rows], rng, why="the shortest queue")


class CacheAware:
    name = "cache-aware"

    def pick(self, options: Options, rng: Random) -> Pick:
        costs = options.own_costs
        rows = _best_rows(costs.ttft_s, options.allowed_prefill, rng)
        return _pick(options, [(costs, row) for row in rows], rng, why="the shortest TTFT with hits of its own")


class KvCacheCentric:
    """A group whose own hit is long enough against the longest one recomputes the rest, any other one gets it copied.

    Long enough: longest < threshold * own. Without any hit there is nothing to copy, and a group without a hit of its own cannot be
    long enough, whatever the quotient's divisor would be.
    """

    name = "kvcache-centric"

    def __init__(self, balancing_threshold: float) -> None:
        self._threshold = balancing_threshold

    def pick(self, options: Options, rng: Random) -> Pick:
        own, most, own_hits = options.own_costs, options.most_hit_blocks, options.own_hit_blocks
        full = options.full_costs if options.may_copy else own
        recomputes = (most < self._threshold * own_hits) | (own_hits >= most)
        rows = _best_rows(np.where(recomputes, own.ttft_s, full.ttft_s), options.allowed_prefill, rng)
        costs = [(own if recomputes[row] else full, row) for row in rows]
        return _pick(options, costs, rng, why="Algorithm 1, the shortest TTFT")


class Moontide:
    """Minimises seconds that anybody waits. As long as some group has no queue, those who come later find one. When even the shortest
    queue is q, prompts of the usual work u arrive about q / u times before it is empty, and a request of work w makes each of them wait w
    longer. Beside the batch of a decode instance a prompt makes every request in it wait for the longer step.

    How much of a hit to copy: blocks that arrive while the request queues cost nothing; beyond them each costs the same time and
    saves more the further back in the prompt it is, so all of them are copied or none.
    """

    name = "moontide"

    def pick(self, options: Options, rng: Random) -> Pick:
        plans = _Plans(options)
        plans.add(options.own_costs)
        if options.may_copy:
            plans.add(options.full_costs)
            if (part := _part_copied(options, plans.delays_s)) is not None:
                plans.add(part)
        rows = _best_rows(plans.delays_s, options.allowed_prefill, rng)
        picked = _pick(options, [plans.at(row) for row in rows], rng, why="the least delay for all")
        if not options.may_be_local:
            return picked
        return self._local_if_better(options, picked, float(plans.delays_s[rows[0]]), rng)

    def _local_if_better(self, options: Options, remote: Pick, delay_s: float, rng: Random) -> Pick:
        local = options.local_costs
        if not local.is_possible.any():
            return remote
        delays_s = local.ttft_s + local.stall_s * options.decode_requests + options.tbt_s
        delays_s = _late_last(options, delays_s, local.ttft_s)
        row = _best_row(delays_s, local.is_possible, rng)
        if delays_s[row] >= delay_s + remote.way.prediction.handoff_s + remote.way.prediction.tbt_s:
            return remote
        way = options.local_way(row)
        reason = _reason(options, way, remote.way, "short, so decode computes it itself")
        return Pick(way=way, others=(remote.way,), reason=reason)


class _Plans:
    """The better of several plans for each group."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._plans: list[tuple[PrefillCosts, Column]] = []
        self.delays_s: Column = np.zeros(0)
        """Of the best plan."""

    def add(self, costs: PrefillCosts) -> None:
        """The first one covers all groups."""
        delays_s = _late_last(self._options, _delays_s(self._options, costs), costs.ttft_s)
        self._plans.append((costs, delays_s))
        if len(self._plans) == 1:
            self.delays_s = delays_s
        elif costs.rows is None:
            self.delays_s = np.minimum(self.delays_s, delays_s)
        else:
            self.delays_s[costs.rows] = np.minimum(self.delays_s[costs.rows], delays_s)

    def at(self, row: int) -> tuple[PrefillCosts, int]:
        """The best plan of a group, and the group's place in it."""
        best, best_s, best_idx = self._plans[0][0], self._plans[0][1][row], row
        for costs, delays_s in self._plans[1:]:
            idx = row
            if costs.rows is not None:
                found = np.flatnonzero(costs.rows == row)
                if not len(found):
                    continue
                idx = int(found[0])
            if delays_s[idx] < best_s:
                best, best_s, best_idx = costs, delays_s[idx], idx
        return best, best_idx


def _part_copied(options: Options, delays_s: Column) -> PrefillCosts | None:
    """The best groups with so much copied as arrives while they queue; None when that is nothing, or all there is."""
    view, full = options.view, options.full_costs
    at_least_s = full.prefill_s + full.busy_s * options.num_behind + options.queue_s
    if at_least_s.min() >= (1 - _EQUAL) * delays_s.min():
        return None  # not even a copy that takes no time would make a group better than the best one is
    rows = _lowest(np.where(options.allowed_prefill, delays_s, np.inf), _NUM_PARTLY)
    missing = options.most_hit_blocks - options.own_hit_blocks[rows]
    copy_block_s = view.prefill.copy_block_s[rows] * view.prefill.fetch_factor[rows]
    hidden = np.floor((options.queue_s[rows] - options.holder_wait_s) / copy_block_s)
    copied = np.minimum(hidden, missing)
    is_part = (copied > 0) & (copied < missing)
    if not is_part.any():
        return None
    rows, copied = rows[is_part], copied[is_part]
    return options.prefill_costs(options.own_hit_blocks[rows] + copied, copied, rows)


def policy_named(name: str, *, balancing_threshold: float) -> Policy:
    """Raises: ConfigError."""
    policies: Mapping[str, Policy] = {
        policy.name: policy
        for policy in (
            RandomChoice(),
            RoundRobin(),
            LeastLoaded(),
            CacheAware(),
            KvCacheCentric(balancing_threshold),
            Moontide(),
        )
    }
    if name not in policies:
        raise ConfigError(f"conductor.policy={name!r} is no policy; use one of {', '.join(POLICIES)}")
    return policies[name]


POLICIES = ("random", "round-robin", "least-loaded", "cache-aware", "kvcache-centric", "moontide")


def _delays_s(options: Options, costs: PrefillCosts) -> Column:
    """What the request and those behind it wait for, all together."""
    if not options.num_behind:
        return costs.ttft_s
    delays_s: Column = costs.ttft_s + costs.busy_s * options.num_behind
    return delays_s


def _late_last(options: Options, delays_s: Column, ttft_s: Column) -> Column:
    """Ways that keep the request's bound come before those that do not."""
    bound_s = options.need.slo.ttft_s
    if bound_s is None:
        return delays_s
    late: Column = delays_s + (ttft_s > bound_s) * _LATE_S
    return late


def _best_rows(costs: Column, allowed: Mask, rng: Random) -> list[int]:
    """The cheapest that are allowed, best first; which of equals is the first, chance decides."""
    first = _best_row(costs, allowed, rng)
    costs = np.where(allowed, costs, np.inf)
    costs[first] = np.inf
    rows = [first]
    for _ in range(min(_NUM_OTHERS, len(costs) - 1)):
        row = int(costs.argmin())
        if costs[row] == np.inf:
            break
        costs[row] = np.inf
        rows.append(row)
    return rows


def _best_row(costs: Column, allowed: Mask, rng: Random) -> int:
    costs = np.where(allowed, costs, np.inf)
    least = float(costs.min())
    equals = (costs <= least + max(abs(least) * _EQUAL, _EQUAL_S)).nonzero()[0]
    return int(equals[int(rng.random() * len(equals))])


def _lowest(costs: Column, num: int) -> Rows:
    rows: Rows = np.argpartition(costs, num)[:num] if num < len(costs) else np.arange(len(costs))
    return rows


def _pick(options: Options, ranked: list[tuple[PrefillCosts, int]], rng: Random, *, why: str) -> Pick:
    """`ranked`: prefill groups by their plan and their place in it, best first."""
    decode_row = _best_row(options.tbt_s, options.roomy_decode, rng)
    way, *others = [options.way(costs, idx, decode_row) for costs, idx in ranked]
    return Pick(way=way, others=tuple(others), reason=_reason(options, way, others[0] if others else None, why))


def _reason(options: Options, way: Way, other: Way | None, why: str) -> str:
    view = options.view
    predicted = way.prediction
    if not view.is_timed:
        return f"{why}; no group has reported how long its steps take, so tokens in its queue and to be computed count"
    than = f", {other.prediction.ttft_s:.3f} s on the next best" if other is not None else ""
    copied = f", {way.copy_blocks} of them copied" if way.copy_blocks else ""
    return (
        f"{why}: TTFT {predicted.ttft_s:.3f} s{than}; {way.hit_blocks} blocks of {_num_blocks(options)} are a hit{copied}; "
        f"a decode step {predicted.tbt_s:.4f} s"
    )


def _num_blocks(options: Options) -> int:
    return -(-options.need.prompt_tokens // options.view.layout.block_tokens)
