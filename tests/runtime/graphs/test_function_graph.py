"""Graphs of step functions, with a fake capture: equal weights, and only where a graph can stand for the function."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged
from torch.nn.functional import mse_loss

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.graphs import function_graph
from carpool.runtime.graphs.function_graph import FunctionGraph
from carpool.runtime.state.digest import digest
from tests.runtime.fake_capture import REPLAYED, FakeCapture

STEPS = 24
Step = Callable[[Any, Any, Any], Any]


def data(samples: int = 32) -> TensorData:
    torch.manual_seed(1)
    return TensorData(torch.randn(samples, 4), torch.randn(samples, 1))


def training(step: Step, model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Training:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    return Training(model, optimizer, options.pop("dataset", data()), None, 8, Stop(steps=STEPS), step=step, **options)


def gan() -> Training:
    """Two networks, an optimizer each, and noise."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(2, 4), "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=0.01) for name, part in model.items()}

    def step(net: Any, batch: Any, each: Any) -> Any:
        fake = net["g"](torch.randn(len(batch[0]), 2))
        ones = torch.ones(len(fake), 1)
        each["d"].zero_grad()
        (judged(net["d"](batch[0]), ones) + judged(net["d"](fake.detach()), 0 * ones)).backward()  # type: ignore[no-untyped-call]
        each["d"].step()
        each["g"].zero_grad()
        loss = judged(net["d"](fake), ones)
        loss.backward()  # type: ignore[no-untyped-call]
        each["g"].step()
        return loss, {"fooled": net["d"](fake).sigmoid().mean()}

    return training(step, model, optimizers)


def plain_step(model: Any, batch: Any, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss = mse_loss(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def with_average() -> Training:
    """A moving average of the weights, in the closure."""
    model = linear()
    average = copy.deepcopy(model).requires_grad_(False)

    def step(net: Any, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(net(batch[0]), batch[1]) + 0.1 * mse_loss(net(batch[0]), average(batch[0]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return loss

    return training(step, model)


def with_leftovers() -> Training:
    """The gradients are cleared at the end, in place."""

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return training(step)


def with_epoch_schedule() -> Training:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return training(plain_step, model, optimizer, schedule=schedule, schedule_every="epoch")


def with_partial_batches() -> Training:
    return training(plain_step, dataset=data(29))


def with_local_modules() -> Training:
    from torch.nn import functional

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return training(step)


CAPTURED: dict[str, Callable[[], Training]] = {
    "GAN": gan,
    "one optimizer": lambda: training(plain_step),
    "moving average": with_average,
    "gradients cleared last": with_leftovers,
    "schedule by epoch": with_epoch_schedule,
    "local modules": with_local_modules,
    "partial batches": with_partial_batches,
}


def counting() -> Training:
    """A list in the closure counts the calls; every fifth one makes no update."""
    calls: list[int] = []

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        if len(calls) % 5:
            optimizer.step()
        return loss

    return training(step)


def accumulating() -> Training:
    """Gradients are cleared in no step."""

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return training(step)


def drawing() -> Training:
    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        return plain_step(model, [batch[0] * random.random(), batch[1]], optimizer)

    return training(step)


def with_hidden_state() -> Training:
    """A tensor in the model is replaced by another one."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.Linear(5, 1)
            self.last = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.cell(torch.cat([x, self.last.expand(len(x), 1)], 1))
            self.last = out.detach().mean().reshape(1)
            return out

    return training(plain_step, Recurrent())


def stepping_schedule() -> Training:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training(plain_step, model, optimizer, schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def changed_from_outside() -> Training:
    """A function that is called after each step changes what the step reads."""
    scale = {"factor": 1.0}

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        return plain_step(model, [batch[0], batch[1] * scale["factor"]], optimizer)

    def after_update(model: nn.Module, steps: int) -> None:
        scale["factor"] = 1.0 / (1 + steps // 3)

    return training(step, after_update=after_update)


def changed_by_partial_batches() -> Training:
    scale = {"factor": 1.0}

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        if len(batch[0]) < 8:
            scale["factor"] *= 0.5
        return plain_step(model, [batch[0], batch[1] * scale["factor"]], optimizer)

    return training(step, dataset=data(21))


def with_many_values() -> Training:
    """A large table, and a function that is called after each step and might change it."""
    table = [[place] for place in range(11_000)]

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        return plain_step(model, batch, optimizer) + table[0][0]

    return training(step, dataset=data(800), on_step_end=lambda report: None)


def printing() -> Training:
    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        if len(batch[0]) > 100:
            print("large")  # noqa: T201 - as users do
        return plain_step(model, batch, optimizer)

    return training(step)


def with_generator() -> Training:
    own = random.Random(0)

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        return plain_step(model, [batch[0], batch[1] * own.random()], optimizer)

    return training(step)


def returning_number() -> Training:
    return training(lambda model, batch, optimizer: (plain_step(model, batch, optimizer), {"rate": 0.5}))


EAGER: dict[str, tuple[Callable[[], Training], str]] = {
    "a counter": (counting, "changes values in Python"),
    "accumulated gradients": (accumulating, "gradients differ|other tensors differ|tensors differ"),
    "numbers drawn on the host": (drawing, "the module random"),
    "hidden state": (with_hidden_state, "replaces tensors"),
    "schedule by step": (stepping_schedule, "change between steps"),
    "changed from outside": (changed_from_outside, "change between steps"),
    "changed by partial batches": (changed_by_partial_batches, "Python|change between steps"),
    "many values": (with_many_values, "would have to be compared"),
    "printing": (printing, "print"),
    "own generator": (with_generator, "random.Random"),
    "a number as metric": (returning_number, "returns a number"),
}


def graphed(made: Training, **options: Any) -> tuple[Trainer, FakeCapture, FunctionGraph]:
    trainer, capture = Trainer(made), FakeCapture(made, **options)
    trainer.function_graph = trainer.new_function_graph(capture)
    return trainer, capture, trainer.function_graph


def trained(trainer: Trainer) -> tuple[str, list[float], list[dict[str, float]]]:
    done = [(trainer.step().loss, trainer.step_metrics()) for _ in range(STEPS)]
    return digest(trainer.training.model), [loss for loss, _ in done], [metrics for _, metrics in done]


@pytest.mark.parametrize("make", CAPTURED.values(), ids=CAPTURED)
def test_a_replayed_step_function_trains_the_same(make: Callable[[], Training]) -> None:
    eager = trained(Trainer(make()))
    trainer, capture, graph = graphed(make())
    assert trained(trainer) == eager
    assert REPLAYED in trainer.take_notes()
    assert not graph.eager_reason
    assert capture.replays > STEPS // 2


@pytest.mark.parametrize(("make", "reason"), EAGER.values(), ids=EAGER)
def test_what_a_graph_cannot_repeat_runs_eagerly_and_trains_the_same(make: Callable[[], Training], reason: str) -> None:
    eager = trained(Trainer(make()))
    trainer, _, graph = graphed(make())
    assert trained(trainer) == eager
    assert any(each in graph.eager_reason for each in reason.split("|")), graph.eager_reason
    assert [note for note in trainer.take_notes() if graph.eager_reason in note]


def test_a_function_that_draws_numbers_on_the_host_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(function_graph, "host_rng_state", lambda device: next(numbers))
    trainer, capture, graph = graphed(gan())
    trained(trainer)
    assert "random numbers on the host" in graph.eager_reason
    assert not capture.captures


def test_a_wrong_graph_is_not_used() -> None:
    eager = trained(Trainer(gan()))
    trainer, capture, graph = graphed(gan(), error=1e-3)
    assert trained(trainer) == eager
    assert "check failed" in graph.eager_reason
    assert capture.replays == 1


def test_the_moving_average_is_that_of_eager_steps() -> None:
    def average(made: Training) -> Tensor:
        (cell,) = [cell for cell in made.step.__closure__ or () if isinstance(cell.cell_contents, nn.Module)]  # type: ignore[union-attr]
        return cell.cell_contents.weight.clone()  # type: ignore[no-any-return]

    plain, replayed = with_average(), with_average()
    trained(Trainer(plain))
    trained(graphed(replayed)[0])
    assert torch.equal(average(plain), average(replayed))


def test_a_loaded_state_continues_with_graphs() -> None:
    eager = trained(Trainer(gan()))
    trainer, _, _ = graphed(gan())
    for _ in range(STEPS // 2):
        trainer.step()
    state = copy.deepcopy(trainer.state_dict())
    for _ in range(4):
        trainer.step()
    trainer.load_state_dict(state)
    while not trainer.stop_reason:
        trainer.step()
    assert digest(trainer.training.model) == eager[0]


def test_gradients_that_a_step_leaves_are_in_the_state() -> None:
    plain, replayed = Trainer(training(plain_step)), graphed(training(plain_step))[0]
    for _ in range(STEPS):
        plain.step()
        replayed.step()
    left = [trainer.state_dict()["gradients"] for trainer in (plain, replayed)]
    assert left[0].keys() == left[1].keys()
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])


def test_weights_that_have_moved_are_captured_again() -> None:
    trainer, capture, _ = graphed(training(plain_step, dataset=data(800)))
    for _ in range(STEPS // 2):
        trainer.step()
    assert capture.captures == 1
    weight = next(trainer.training.model.parameters())
    weight.data = weight.data.clone()
    for _ in range(STEPS // 2):
        trainer.step()
    assert capture.captures == 2


def test_values_are_compared_after_every_eager_call() -> None:
    scale = {"factor": 1.0}

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        if len(batch[0]) < 8:
            scale["factor"] = 0.0
        loss: Tensor = model(batch[0]).square().mean() * scale["factor"]
        return loss

    trainer, capture, graph = graphed(training(step))
    batches = [[torch.ones(size, 4)] for size in (8, 4)]
    for number in range(8):
        graph.run(batches[0], number)
    assert trainer.take_notes() == [REPLAYED]
    assert capture.captures == 1
    graph.run(batches[1], 8)
    graph.run(batches[0], 9)
    assert capture.captures == 2
