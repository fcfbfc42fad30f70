from collections.abc import Callable

import numpy as np
import pytest
import torch

from carpool.federated.federation import TaskName
from carpool.federated.messages import Outcome, TaskResult, Work
from carpool.federated.updates import weights_digest
from carpool.jobs.program import Program
from carpool.runtime.federation.device_worker import CycleRun
from carpool.runtime.federation.local_task import LocalTask
from carpool.runtime.process.protocol import RunTasks
from tests.runtime.federation.test_local_task import CPU, trained, training

A, B = TaskName("a"), TaskName("b")


def one_second(action: Callable[[], object]) -> float:
    action()
    return 1.0


def cycle(deadline_s: float, shares: tuple[float, float], samples: int = 80) -> CycleRun:
    """A cycle of two tasks, each of whose beginnings and steps (of 8 samples) takes a second."""
    tasks: dict[str, LocalTask] = {name: LocalTask(training(), Program(), 0, CPU) for name in (A, B)}
    run = CycleRun(RunTasks(1, (), deadline_s), tasks, one_second)
    for name, share in zip((A, B), shares, strict=True):
        run.begin(Work(name, 0, 0, samples, 8, share), tasks[name].weights())
    return run


def finished(run: CycleRun) -> dict[TaskName, TaskResult]:
    while run.step():
        pass
    return {result.task: result for result in run.results()}


def test_all_work_is_done_without_a_deadline() -> None:
    found = finished(cycle(0.0, (0.5, 0.5)))
    assert [(each.samples, each.steps, each.busy_s) for each in found.values()] == [(80, 10, 11.0)] * 2


@pytest.mark.parametrize(("shares", "steps"), [((0.5, 0.5), (5, 5)), ((0.75, 0.25), (8, 2))])
def test_a_deadline_leaves_partial_work_in_proportion_to_shares(
    shares: tuple[float, float], steps: tuple[int, int]
) -> None:
    found = finished(cycle(12.0, shares))
    assert (found[A].steps, found[B].steps) == steps


def test_a_task_that_is_done_leaves_its_time_to_the_other() -> None:
    run = cycle(0.0, (1.0, 0.05), samples=16)
    assert {each.samples for each in finished(run).values()} == {16}


def test_no_step_after_the_deadline() -> None:
    assert {each.steps for each in finished(cycle(1.0, (0.5, 0.5))).values()} == {0}


@pytest.mark.parametrize(("deadline_s", "samples"), [(0.0, (24, 24)), (6.0, (24, 16))])
def test_runs_start_from_the_same_weights_and_are_averaged(deadline_s: float, samples: tuple[int, int]) -> None:
    """Also the one that a deadline cuts off."""
    task = LocalTask(training(torch.optim.Adam), Program(), 0, CPU)
    initial = task.weights()
    run = CycleRun(RunTasks(1, (), deadline_s), {A: task}, one_second)
    run.begin(Work(A, 0, 0, 48, 8, 1.0, runs=2), initial)
    assert finished(run)[A].samples == sum(samples)
    found = run.weights(A)
    one, two = trained(task, initial, 0, samples[0]), trained(task, initial, 24, samples[1])
    for name, value in found.items():
        mean = (one[name].astype(float) * samples[0] + two[name].astype(float) * samples[1]) / sum(samples)
        np.testing.assert_array_equal(value, mean.astype(value.dtype))


def test_a_single_run_is_returned_bit_by_bit() -> None:
    task = LocalTask(training(), Program(), 0, CPU)
    initial = task.weights()
    run = CycleRun(RunTasks(1, (), 0.0), {A: task}, one_second)
    run.begin(Work(A, 0, 0, 24, 8, 1.0), initial)
    finished(run)
    assert weights_digest(run.weights(A)) == weights_digest(trained(task, initial, 0, 24))


def test_a_task_without_data_fails_alone() -> None:
    run = cycle(0.0, (0.5, 0.5))
    run.begin(Work(TaskName("c"), 0, 0, 8, 8, 0.5), {})
    found = finished(run)
    assert found[TaskName("c")].outcome == Outcome.FAILED
    assert found[A].steps == 10
