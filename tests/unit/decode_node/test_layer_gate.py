"""LayerGate: a step waits for the layer groups that it needs, and for nothing that does not come."""

from __future__ import annotations

import threading

from decode_node.layer_gate import LayerGate
from tests.unit.decode_node.decode_rig import TIMEOUT_S


def test_groups_that_are_there_are_not_waited_for() -> None:
    gate = LayerGate()
    gate.open(2)
    assert gate.wait(1, timeout_s=0)
    assert gate.wait(2, timeout_s=0)
    assert not gate.wait(3, timeout_s=0)


def test_a_waiting_step_goes_on_when_its_group_comes() -> None:
    gate = LayerGate()
    answers: list[bool] = []
    step = threading.Thread(target=lambda: answers.append(gate.wait(2, timeout_s=TIMEOUT_S)))
    step.start()
    gate.open(1)
    step.join(0.01)
    assert answers == []
    gate.open(2)
    step.join(TIMEOUT_S)
    assert answers == [True]


def test_the_end_of_a_pull_ends_the_wait_for_what_it_did_not_bring() -> None:
    gate = LayerGate()
    answers: list[bool] = []
    step = threading.Thread(target=lambda: answers.append(gate.wait(2, timeout_s=TIMEOUT_S)))
    step.start()
    gate.open(1)
    gate.end()
    step.join(TIMEOUT_S)
    assert answers == [False]
    assert gate.wait(1, timeout_s=0), "what was there stays there"
