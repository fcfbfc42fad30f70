from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import carpool
from carpool.core.errors import InputError
from carpool.federated.updates import Weights, weights_digest
from carpool.jobs.program import Program
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.training import Training
from carpool.runtime.federation.local_task import LocalTask, as_arrays, check_federated, labels_of, with_proximal_term

CPU = torch.device("cpu")


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, outputs = batch
    return mse_loss(model(inputs), outputs)


def training(make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, size: int = 40, **more: Any) -> Training:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    inputs = torch.randn(size, 4)
    data = TensorDataset(inputs, inputs[:, :2] * 2)
    stop = carpool.Stop(steps=1 << 40)
    values: dict[str, Any] = {"loss": loss, "batch_size": 8, "stop": stop, "dataset": data, **more}
    return Training(model, make(model.parameters(), lr=0.05), **values)


def trained(task: LocalTask, weights: Weights, start: int, samples: int) -> Weights:
    task.begin(weights, start, samples, 8)
    while not task.progress.is_done:
        task.step()
    assert task.progress.samples == samples
    return task.weights()


def test_a_round_does_not_depend_on_the_rounds_before() -> None:
    first, second = (LocalTask(training(torch.optim.Adam), Program(), 0, CPU) for _ in range(2))
    initial = first.weights()
    between = trained(first, initial, 0, 24)
    assert weights_digest(trained(first, between, 24, 24)) == weights_digest(trained(second, between, 24, 24))


def test_rounds_of_one_device_are_one_training() -> None:
    """SGD without momentum keeps no state, so that whole batches give bitwise equal weights however rounds are cut."""
    plain, model = training(), nn.Linear(4, 2)
    whole = Training(model, torch.optim.SGD(model.parameters(), lr=0.05), plain.dataset, loss, 8, plain.stop)
    task = LocalTask(whole, Program(), 0, CPU)
    initial = task.weights()
    at_once = trained(task, initial, 0, 48)
    assert weights_digest(trained(task, trained(task, initial, 0, 24), 24, 24)) == weights_digest(at_once)


def test_devices_draw_different_samples_in_each_epoch() -> None:
    task = LocalTask(training(), Program(), 0, CPU)
    initial = task.weights()
    assert weights_digest(trained(task, initial, 0, 16)) != weights_digest(trained(task, initial, 40, 16))


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 40, 41, 100])
def test_a_round_processes_exactly_its_samples(samples: int) -> None:
    task = LocalTask(training(), Program(), 0, CPU)
    task.begin(task.weights(), 3, samples, 8)
    while not task.progress.is_done:
        task.step()
    assert task.progress.samples == samples


def test_batch_norm_never_sees_a_single_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    data = training(size=41).dataset
    whole = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, 8, carpool.Stop(steps=1 << 40))
    task = LocalTask(whole, Program(), 0, CPU)
    task.begin(task.weights(), 0, 90, 8)
    while not task.progress.is_done:
        task.step()
    assert 89 <= task.progress.samples <= 90


def test_a_proximal_term_keeps_weights_near_those_of_the_round() -> None:
    def distance(proximal: float) -> float:
        task = LocalTask(training(), Program(), 0, CPU, proximal)
        initial = task.weights()
        after = trained(task, initial, 0, 80)
        return sum(float(np.square(after[name] - initial[name]).sum()) for name in initial)

    assert distance(10.0) < 0.5 * distance(0.0)


@pytest.mark.parametrize("form", ["mean", "mean and metrics", "sum", "sum and metrics"])
def test_the_proximal_term_is_added_to_the_mean(form: str) -> None:
    def formed(model: nn.Module, batch: Any) -> Any:
        mean = loss(model, batch)
        metrics = ({"m": mean.detach()},) if "metrics" in form else ()
        if "sum" in form:
            return (mean * 8, 8, *metrics)
        return (mean, *metrics) if metrics else mean

    whole = training(loss=formed)
    anchor = [parameter.detach() + 1.0 for parameter in whole.model.parameters()]
    near = with_proximal_term(whole, anchor, 0.5)
    whole.model.eval()
    batch = whole.dataset[:8]
    assert near.loss is not None
    with torch.no_grad():
        found, plain = near.loss(whole.model, batch), float(loss(whole.model, batch))
    mean = found if isinstance(found, torch.Tensor) else found[0] / (8 if "sum" in form else 1)
    count = sum(parameter.numel() for parameter in whole.model.parameters())
    assert float(mean) == pytest.approx(plain + 0.25 * count, rel=1e-5)


def test_labels_are_found() -> None:
    labels = torch.arange(6)
    assert labels_of(TensorDataset(torch.zeros(6, 2), labels)) is not None
    assert labels_of(TensorData(torch.zeros(6, 2), labels)) is not None
    assert labels_of(TensorDataset(torch.zeros(6, 2), torch.zeros(6))) is None
    assert labels_of([1, 2, 3]) is None


def test_trainings_that_cannot_be_federated_are_refused() -> None:
    whole = training()
    whole.model.to(torch.bfloat16)
    with pytest.raises(InputError):
        check_federated(whole, "a.py:f", 0.0)
    own_step = training(loss=None, step=lambda model, batch, optimizer: 0.0)
    check_federated(own_step, "a.py:f", 0.0)
    with pytest.raises(InputError):
        check_federated(own_step, "a.py:f", 0.1)


def test_the_digest_of_weights_is_that_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert weights_digest(as_arrays(model)) == carpool.digest(model)
