"""Early gradients: complete, without gaps, in the order of the vector, and never where they could be incomplete."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.early_gradients import EarlyGradients
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import TrainingError

SIZE = 8


class Chain(nn.Module):
    """Linear layers in an order of their own; those left out get no gradient."""

    def __init__(self, order: tuple[int, ...], num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(num_layers))
        self.order = order

    def forward(self, inputs: Tensor) -> Tensor:
        for index in self.order:
            inputs = self.layers[index](inputs).tanh()
        return inputs


def train(model: nn.Module, loss: Any = None) -> Trainer:
    training = carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=TensorData(torch.randn(12, SIZE, generator=torch.Generator().manual_seed(1))),
        loss=loss or (lambda model, batch: model(batch[0]).square().mean()),
        batch_size=12,
        stop=carpool.Stop(steps=4),
    )
    return Trainer(training, seed=0)


class Seen:
    """Offsets that were reported, and the gradients that the vector held then."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, Tensor]] = []

    def __call__(self, contribution: Contribution, start: int) -> None:
        self.reports.append((start, contribution.values[start:].clone()))


def contributed(trained: Trainer, seen: Seen | None) -> Tensor:
    (_, made), *_ = trained.contribute(trained.next_step((1, 1)), range(1), None, seen)
    assert made is not None
    return made.values


@given(order=st.permutations(range(4)), num_used=st.integers(1, 4))
def test_reported_gradients_are_final_and_the_vector_is_the_same(order: list[int], num_used: int) -> None:
    trained, seen = train(Chain(tuple(order[:num_used]))), Seen()
    expected = contributed(trained, None)
    for _ in range(2):  # the first pass counts, the second one collects
        assert torch.equal(contributed(trained, seen), expected)
    offsets = [start for start, _ in seen.reports]
    assert offsets == sorted(offsets, reverse=True)
    gradients = trained.layout.gradients
    for start, values in seen.reports:
        assert torch.equal(values[: gradients.stop - start], expected[start : gradients.stop])
    if order == [0, 1, 2, 3] and num_used == 4:
        assert offsets[-1] == 0


def test_nothing_is_reported_in_the_first_pass() -> None:
    trained, seen = train(Chain((0, 1, 2, 3))), Seen()
    contributed(trained, seen)
    assert not seen.reports
    contributed(trained, seen)
    assert seen.reports


def test_a_shared_layer_under_reentrant_checkpointing_is_never_collected_early() -> None:
    def loss(model: Chain, batch: Any) -> Tensor:
        inputs = batch[0].requires_grad_()
        for _ in range(2):
            inputs = checkpoint(model, inputs, use_reentrant=True)
        mean: Tensor = inputs.square().mean()
        return mean

    trained, seen = train(Chain((0, 1)), loss), Seen()
    expected = contributed(trained, None)
    for _ in range(3):
        assert torch.equal(contributed(trained, seen), expected)
    assert not seen.reports


def test_a_gradient_that_grows_after_it_was_sent_fails_the_step() -> None:
    model = Chain((0, 1), 2)
    layout = FlatLayout(model, torch.optim.SGD(model.parameters(), lr=0.1))
    early, vector = EarlyGradients(layout), layout.new()
    with early.collecting(vector, Seen(), accumulate=False):
        model(torch.ones(1, SIZE)).sum().backward()
    with early.collecting(vector, Seen(), accumulate=False):
        model(torch.ones(1, SIZE)).sum().backward()
        with pytest.raises(TrainingError, match=r"layers\.1\.\w+.*twice"):
            model(torch.ones(1, SIZE)).sum().backward()


def test_hooks_end_with_the_pass() -> None:
    trained, seen = train(Chain((0, 1, 2, 3))), Seen()
    for _ in range(2):
        contributed(trained, seen)
    count = len(seen.reports)
    trained.training.model(torch.ones(1, SIZE)).sum().backward()
    assert len(seen.reports) == count


def test_a_failed_pass_leaves_nothing_collected() -> None:
    model = Chain((0, 1, 2, 3))
    first = model.layers[0].weight
    assert isinstance(first, Tensor)
    trained, seen = train(model), Seen()
    expected = contributed(trained, seen)

    def fail(gradient: Tensor) -> None:
        raise ValueError("no memory")

    hook = first.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="no memory"):
        contributed(trained, seen)
    hook.remove()
    assert seen.reports
    assert torch.equal(contributed(trained, None), expected)
