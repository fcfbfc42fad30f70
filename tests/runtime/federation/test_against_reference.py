"""FedAvg, FedProx and FedAdam of the whole coordinator against a few lines of numpy, on linear regression.

Devices take one step per epoch over all their data, so that the order of samples does not matter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import carpool
from carpool.core.model import Kind
from carpool.federated.aggregation import ServerModel, next_model
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, Federation, Task, TaskName
from carpool.federated.messages import Aggregate, DeviceJoined, StartWork, TaskResult, WorkReported
from carpool.federated.updates import Weights
from carpool.jobs.program import Program
from carpool.runtime.engine.training import Training
from carpool.runtime.federation.local_task import LocalTask

Vector = NDArray[np.float64]
Data = dict[DeviceName, tuple[Vector, Vector]]

A = TaskName("a")
RATE, EPOCHS, ROUNDS = 0.1, 3, 4
SIZES = {DeviceName("one"): 12, DeviceName("two"): 4, DeviceName("three"): 8}


def data() -> Data:
    random = np.random.default_rng(0)
    inputs = {name: random.normal(size=(size, 3)) for name, size in SIZES.items()}
    wanted = np.array([1.0, -2.0, 0.5])
    return {name: (x, x @ wanted + random.normal(size=len(x), scale=0.1)) for name, x in inputs.items()}


def local_task(inputs: Vector, outputs: Vector, proximal: float) -> LocalTask:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    dataset = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(outputs))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse_loss(model(batch[0]).squeeze(1), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    training = Training(model, optimizer, dataset, loss, len(inputs), carpool.Stop(steps=1 << 40))
    return LocalTask(training, Program(), 0, torch.device("cpu"), proximal)


def federated(task: Task) -> list[Vector]:
    """The weights after each round."""
    proximal = task.proximal if task.algorithm == "fedprox" else 0.0
    devices = {name: local_task(*each, proximal) for name, each in data().items()}
    model = ServerModel({"weight": np.zeros((1, 3))}, frozenset({"weight"}))
    federation = Federation((task,), plan="equal-epochs", epochs=EPOCHS)
    coordinator, found = Coordinator(federation), list[Vector]()
    joined = {name: DeviceJoined(name, Kind("cpu"), {A: size}) for name, size in SIZES.items()}
    orders = coordinator.handle(0.0, list(joined.values()))
    while not coordinator.is_over:
        updates: dict[DeviceName, Weights] = {}
        for order in [each for each in orders if isinstance(each, StartWork)]:
            (work,) = order.work
            local = devices[order.device]
            local.begin(model.weights, work.start, work.samples, SIZES[order.device])
            while not local.progress.is_done:
                local.step()
            updates[order.device] = local.weights()
            result = TaskResult(A, work.round, local.progress.samples, local.progress.steps, 0.1)
            orders = coordinator.handle(coordinator.at + 1.0, [WorkReported(order.device, order.cycle, (result,))])
        for each in orders:
            if isinstance(each, Aggregate):
                model = next_model(task, model, [updates[name] for name in each.devices], each.weights)
                found.append(model.weights["weight"][0].copy())
    return found


def locally(weights: Vector, inputs: Vector, outputs: Vector, proximal: float) -> Vector:
    """Gradient descent of one device in one round."""
    now = weights.copy()
    for _ in range(EPOCHS):
        gradient = 2 * inputs.T @ (inputs @ now - outputs) / len(inputs) + proximal * (now - weights)
        now = now - RATE * gradient
    return now


def reference(proximal: float, server: Callable[[Vector, Vector], Vector]) -> list[Vector]:
    weights, found, total = np.zeros(3), [], sum(SIZES.values())
    for _ in range(ROUNDS):
        mean = sum(SIZES[name] / total * locally(weights, x, y, proximal) for name, (x, y) in data().items())
        weights = server(weights, np.asarray(mean))
        found.append(weights)
    return found


class Adam:
    """Server step of FedAdam (Reddi et al. 2021, algorithm 2)."""

    def __init__(self, rate: float, first: float, second: float, epsilon: float) -> None:
        self.rate, self.first, self.second, self.epsilon = rate, first, second, epsilon
        self.momentum, self.variance = np.zeros(3), np.full(3, epsilon**2)

    def __call__(self, weights: Vector, mean: Vector) -> Vector:
        change = mean - weights
        self.momentum = self.first * self.momentum + (1 - self.first) * change
        self.variance = self.second * self.variance + (1 - self.second) * change**2
        return np.asarray(weights + self.rate * self.momentum / (np.sqrt(self.variance) + self.epsilon))


@pytest.mark.parametrize(
    ("task", "proximal", "server"),
    [
        (Task(A, rounds=ROUNDS), 0.0, lambda weights, mean: mean),
        (Task(A, rounds=ROUNDS, algorithm="fedprox", proximal=0.7), 0.7, lambda weights, mean: mean),
        (Task(A, rounds=ROUNDS, algorithm="fedadam", server_lr=0.3), 0.0, Adam(0.3, 0.9, 0.99, 1e-3)),
    ],
    ids=["fedavg", "fedprox", "fedadam"],
)
def test_every_round_is_that_of_the_reference(task: Task, proximal: float, server: Any) -> None:
    found, expected = federated(task), reference(proximal, server)
    assert len(found) == ROUNDS
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # the proximal term is summed in float32
    assert not np.allclose(found[0], found[-1])
