from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from prefill_node.metrics import StageMetrics
from prefill_node.stage_times import StageTimes
from tests.fakes.clock import FakeClock


class World:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.clock = FakeClock()
        self.times = StageTimes(StageMetrics(self.registry), self.clock)
        self.began_s = self.clock.now()

    def seconds(self) -> dict[str, float]:
        """By name; names with 0 are left out."""
        names = ("busy", "wait_recv", "wait_store", "overhead", "idle")
        values = {name: self.registry.get_sample_value(f"prefill_stage_{name}_seconds_total") for name in names}
        return {name: value for name, value in values.items() if value}

    def run_step(self, *, wait_s: float, overhead_s: float, busy_s: float) -> float:
        """A step that is in the log already, from now on; returns its wait for hidden states."""
        self.clock.advance(wait_s)
        ready_s = self.clock.now()
        self.clock.advance(overhead_s)
        started_s = self.clock.now()
        self.clock.advance(busy_s)
        return self.times.close_step(ready_s=ready_s, started_s=started_s, ended_s=self.clock.now())


@pytest.fixture
def world() -> World:
    return World()


def test_every_second_has_exactly_one_name(world: World) -> None:
    world.clock.advance(7)
    world.times.open_store_job()
    world.clock.advance(3)
    world.times.close_store_job()
    world.times.open_step()
    world.times.open_store_job()
    assert world.run_step(wait_s=2, overhead_s=0.5, busy_s=4) == 2
    world.clock.advance(1)
    world.times.close_store_job()
    world.clock.advance(5)
    world.times.settle()
    assert world.seconds() == {"idle": 12, "wait_store": 4, "wait_recv": 2, "overhead": 0.5, "busy": 4}
    assert sum(world.seconds().values()) == world.clock.now() - world.began_s


def test_hidden_states_that_came_during_the_step_before_were_not_waited_for(world: World) -> None:
    world.times.open_step()
    world.times.open_step()
    early_s = world.clock.now()
    world.run_step(wait_s=0, overhead_s=0, busy_s=4)
    started_s = world.clock.now()
    world.clock.advance(3)
    assert world.times.close_step(ready_s=early_s, started_s=started_s, ended_s=world.clock.now()) == 0
    assert world.seconds() == {"busy": 7}


def test_the_first_stage_waits_for_no_hidden_states(world: World) -> None:
    world.times.open_step()
    world.clock.advance(0.25)
    started_s = world.clock.now()
    world.clock.advance(2)
    assert world.times.close_step(ready_s=None, started_s=started_s, ended_s=world.clock.now()) == 0
    assert world.seconds() == {"overhead": 0.25, "busy": 2}


def test_time_of_a_running_step_is_counted_when_it_is_over(world: World) -> None:
    world.times.open_step()
    world.clock.advance(9)
    world.times.settle()
    assert world.seconds() == {}


def test_a_step_that_was_in_the_log_before_the_last_one_ended_leaves_no_idle_time(world: World) -> None:
    world.times.open_step()
    started_s = world.clock.now()
    world.clock.advance(2)
    ended_s = world.clock.now()
    world.clock.advance(0.5)
    world.times.open_step()  # before the loop has seen the end of the first
    world.times.close_step(ready_s=None, started_s=started_s, ended_s=ended_s)
    world.run_step(wait_s=0, overhead_s=0, busy_s=1)
    assert world.seconds() == {"busy": 3, "wait_recv": 0.5}
