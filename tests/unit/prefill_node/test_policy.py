"""policy: who is served first under which policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.pool import RequestKey
from moontide.fair_share import Share
from prefill_node.policy import Candidate, keeps_turn, ranked

NOBODY = Share(tenant="")


def candidate(name: str, order: int, share: Share = NOBODY, **fields: float) -> Candidate:
    given = {"deadline_s": 100.0, "work_s": 1.0, "work_left_s": 1.0, "served_s": 0.0} | fields
    return Candidate(key=RequestKey(name, 1), order=order, share=share, **given)


def names(
    candidates: list[Candidate],
    policy: str,
    *,
    now_s: float = 0.0,
    starvation_s: float = 1e9,
    shares: Sequence[Share] = (NOBODY,),
) -> list[str]:
    line = ranked(candidates, policy=policy, now_s=now_s, starvation_s=starvation_s, shares=shares)
    return [each.key.request_id for each in line]


LONG = candidate("long", 0, deadline_s=16.0, work_s=10.0, work_left_s=10.0)  # slack / work = 0.6
SHORT = candidate("short", 1, deadline_s=1.0, work_s=0.5, work_left_s=0.5)  # slack / work = 1.0


def test_each_policy_has_its_own_order() -> None:
    assert names([SHORT, LONG], "fcfs") == ["long", "short"]
    assert names([LONG, SHORT], "edf") == ["short", "long"]
    assert names([LONG, SHORT], "srpt") == ["short", "long"]
    assert names([SHORT, LONG], "lars") == ["long", "short"], "the short one can wait, relative to its work"


def test_under_lars_a_late_long_prompt_does_not_hold_up_a_late_short_one() -> None:
    assert names([LONG, SHORT], "lars", now_s=20.0) == ["short", "long"]
    assert names([LONG, SHORT], "edf", now_s=20.0) == ["short", "long"]
    latest = candidate("late", 2, deadline_s=30.0, work_s=0.5, work_left_s=0.5)
    assert names([LONG, latest], "edf", now_s=29.0) == ["long", "late"], "the convoy that lars avoids"
    assert names([LONG, latest], "lars", now_s=31.0) == ["late", "long"]


def test_a_started_prompt_keeps_its_slack_while_it_runs() -> None:
    half_done = candidate("half", 0, deadline_s=16.0, work_s=10.0, work_left_s=5.0)
    assert names([half_done, LONG], "lars", now_s=0.0) == ["long", "half"]
    assert names([half_done, candidate("new", 1, deadline_s=11.0, work_s=10.0, work_left_s=10.0)], "lars") == [
        "new",
        "half",
    ]


def test_whoever_starves_goes_first_under_every_policy() -> None:
    starved = candidate("starved", 9, deadline_s=1e6, work_s=1e3, work_left_s=1e3, served_s=0.0)
    longer = candidate("longer", 10, deadline_s=1e6, work_s=1e3, work_left_s=1e3, served_s=-1.0)
    fresh = candidate("fresh", 1, served_s=29.0)
    for policy in ("fcfs", "edf", "srpt", "lars"):
        line = names([fresh, starved, longer], policy, now_s=30.0, starvation_s=30.0)
        assert line == ["longer", "starved", "fresh"]


def test_without_predictions_the_first_come_is_first() -> None:
    unknown = {"work_s": 0.0, "work_left_s": 0.0}
    first = candidate("first", 0, deadline_s=50.0, **unknown)
    second = candidate("second", 1, deadline_s=40.0, **unknown)
    for policy in ("fcfs", "srpt", "lars"):
        assert names([second, first], policy) == ["first", "second"]


A, B = Share(tenant="a"), Share(tenant="b")


def test_the_policy_orders_the_prompts_of_a_tenant_and_the_turns_order_the_tenants() -> None:
    line = [
        candidate("a-late", 0, A, deadline_s=9.0),
        candidate("a-soon", 1, A, deadline_s=3.0),
        candidate("b-late", 2, B, deadline_s=8.0),
        candidate("b-soon", 3, B, deadline_s=5.0),
    ]
    assert names(line, "edf", shares=[B, A]) == ["b-soon", "b-late", "a-soon", "a-late"]
    assert names(line, "edf", shares=[A, B]) == ["a-soon", "a-late", "b-soon", "b-late"]


def test_prompts_that_starve_go_before_those_of_their_tenant_and_of_nobody_else() -> None:
    line = [candidate("b-fresh", 0, B, served_s=29.0), candidate("a-fresh", 1, A, served_s=29.0)]
    line.append(candidate("a-starved", 2, A))
    assert names(line, "fcfs", now_s=30.0, starvation_s=30.0, shares=[B, A]) == ["b-fresh", "a-starved", "a-fresh"]


def test_no_prompt_keeps_its_turn_where_the_other_order_meets_more_deadlines() -> None:
    given = {"policy": "lars", "now_s": 0.0, "starvation_s": 30.0}
    current = candidate("current", 0, work_left_s=5.0, deadline_s=60.0)
    first = candidate("first", 1, work_left_s=5.1, deadline_s=6.0)
    assert not keeps_turn(current, first, **given)
    assert keeps_turn(current, replace(first, deadline_s=5.0), **given), "it is late in any order"
    assert keeps_turn(current, replace(first, deadline_s=11.0), **given), "it is in time in any order"
    assert keeps_turn(replace(current, deadline_s=5.5), first, **given), "one of the two is late in any order"


def test_no_prompt_keeps_its_turn_against_another_tenant() -> None:
    current = candidate("current", 0, A, work_left_s=0.1)
    given = {"policy": "lars", "now_s": 0.0, "starvation_s": 30.0}
    assert keeps_turn(current, candidate("first", 1, A), **given)
    assert not keeps_turn(current, candidate("first", 1, B), **given)
    assert not keeps_turn(current, candidate("first", 1, replace(A, priority=1)), **given)
