from __future__ import annotations

import pytest

from conductor.recovery import LONGEST_PAUSE_S, AttemptFailed, FailedNodes, GiveUp, Retry, after_failure
from conductor.registry import Node
from moontide.errors import (
    BadRequest,
    BlockMissing,
    DeadlineExceeded,
    Declined,
    Internal,
    MoontideError,
    NodeLost,
    Rejected,
    TransferFailed,
)
from moontide.registry import NodeRecord


def decide(
    error: MoontideError,
    *,
    attempt: int = 1,
    alternatives: int = 1,
    retriable: bool | None = None,
    outwaits_refusals: bool = False,
) -> Retry | GiveUp:
    failure = AttemptFailed(error, node_id="n", is_retriable=retriable)
    return after_failure(
        failure,
        attempt=attempt,
        max_attempts=3,
        num_alternatives=alternatives,
        outwaits_refusals=outwaits_refusals,
    )


@pytest.mark.parametrize(
    ("error", "avoid"),
    [(NodeLost("x"), "n"), (TransferFailed("x"), "n"), (BlockMissing("x"), None), (Rejected("x"), "n")],
)
def test_retriable_errors_start_over_elsewhere_if_the_node_is_to_blame(error: MoontideError, avoid: str | None) -> None:
    decision = decide(error)
    assert isinstance(decision, Retry)
    assert decision.avoid == avoid
    assert 0 < decision.pause_s < 1


@pytest.mark.parametrize("error", [BadRequest("x"), DeadlineExceeded("x"), Internal("x")])
def test_other_errors_go_to_the_client_as_they_are(error: MoontideError) -> None:
    decision = decide(error)
    assert isinstance(decision, GiveUp)
    assert decision.error is error


def test_a_refusal_is_final_without_another_node() -> None:
    assert isinstance(decide(Rejected("full"), alternatives=0), GiveUp)


@pytest.mark.parametrize("error", [Rejected("full"), Declined("slow")])
def test_an_answer_that_has_begun_pauses_while_all_nodes_refuse_it(error: MoontideError) -> None:
    for attempt in (1, 3, 5000):
        decision = decide(error, attempt=attempt, alternatives=0, outwaits_refusals=True)
        assert isinstance(decision, Retry)
        assert 0 < decision.pause_s <= LONGEST_PAUSE_S
    assert isinstance(decide(NodeLost("x"), attempt=3, outwaits_refusals=True), GiveUp), "only refusals cost nothing"


def test_what_the_node_says_about_retrying_counts() -> None:
    assert isinstance(decide(NodeLost("x"), retriable=False), GiveUp)
    assert isinstance(decide(Internal("x"), retriable=True), Retry)


def test_attempts_are_bounded_and_the_error_keeps_its_class() -> None:
    decision = decide(BlockMissing("block 3"), attempt=3)
    assert isinstance(decision, GiveUp)
    assert isinstance(decision.error, BlockMissing)
    assert "3 attempts" in str(decision.error)
    assert "block 3" in str(decision.error)


def node(boot_id: str = "1", *, alive: bool = True) -> Node:
    record = NodeRecord(node_id="n", role="decode", address="", http_address="", boot_id=boot_id)
    return Node(record=record, alive=alive, read_s=0.0)


@pytest.mark.parametrize(
    ("nodes", "now_s", "is_failed"),
    [
        ([node()], 1.0, True),
        ([node()], 5.0, False),
        ([node("2")], 1.0, False),
        ([node(alive=False)], 1.0, False),
        ([], 1.0, False),
    ],
)
def test_lost_node_comes_back_with_a_sign_of_life_newer_than_the_failure(
    nodes: list[Node], now_s: float, is_failed: bool
) -> None:
    failed = FailedNodes(lease_s=5.0)
    failed.note("n", "1", 0.0)
    assert failed.current(nodes, now_s) == ({"n"} if is_failed else set())
    if not is_failed:
        assert failed.current([node()], now_s) == set(), "once trusted again, it stays so"
