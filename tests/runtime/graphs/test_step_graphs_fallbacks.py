"""Every reason for which a step, or its update, falls back to eager execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.graphs.verification import copies
from tests.runtime.fake_capture import REPLAYED, FakeCapture, with_graphs


class Running(nn.Module):
    """Keeps a running mean of its inputs, in a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(6))
        self.body = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * inputs.detach().mean(0)
        return self.body(inputs)  # type: ignore[no-any-return]


class Called(nn.Module):
    """Counts its calls in Python, which a graph does not."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.body = nn.Linear(6, 3)
        self.change, self.count = change, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.change == "buffers":
            self.calls.fill_(self.count)
        scale = 1.0 + 0.1 * self.count if self.change == "loss" else 1.0
        return self.body(inputs) * scale  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Running, "replaces a weight or a buffer"),
        (lambda: Called("buffers"), "buffers differ"),
    ],
)
def test_a_pass_with_side_effects_runs_eagerly(make_training: Any, model: Any, why: str) -> None:
    trainer, _, graphs = with_graphs(make_training(model=model(), batch_size=50, stop=Stop(epochs=9)))
    for _ in range(12):
        trainer.step()
    assert why in graphs.eager_reason


def test_a_graph_with_another_loss_is_detected(make_training: Any) -> None:
    trainer, _, graphs = with_graphs(make_training(model=Called("loss")))
    for _ in range(4):
        trainer.step()
    assert "loss" in graphs.eager_reason


def test_a_batch_with_an_object_is_not_captured(make_training: Any) -> None:
    def boxed(items: Any) -> Any:
        return items[0], items[1], object()

    training = make_training(batch_size=50)
    trainer, capture, graphs = with_graphs(training)
    fetch = trainer._passes.fetch_batch
    trainer._passes.fetch_batch = lambda step: boxed(fetch(step))  # type: ignore[method-assign]
    trainer.step()
    assert "object" in graphs.eager_reason
    assert capture.captures == 0


def test_only_four_batch_shapes_are_captured(make_training: Any) -> None:
    trainer, _, graphs = with_graphs(make_training(stop=Stop(epochs=40), batch_norm=False))
    for size in (50, 25, 20, 10, 5):
        trainer.resize_batch(size)
        for _ in range(3):
            trainer.step()
    assert any("more than 4 batch shapes" in note for note in graphs.notes)
    assert not graphs.eager_reason


class Odd(torch.optim.SGD):
    """An optimizer that cannot be captured, for one of several reasons."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.5)
        self.kind, self.count = kind, 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.kind == "host":
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("step", torch.zeros((), device="meta"))
        elif self.kind == "python":
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1e-3 * self.count)
        elif self.kind == "raises" and self.count == 4:  # after three eager steps, in the capture
            raise RuntimeError("no\nmore")
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("host", "Odd keeps state on the host"),
        ("python", "weights or optimizer state differ"),
        ("raises", "RuntimeError: no"),
    ],
)
def test_an_odd_optimizer_runs_eagerly(make_training: Any, kind: str, why: str) -> None:
    trainer, capture, graphs = with_graphs(
        make_training(batch_size=50, optimizer=lambda p: Odd(p, kind), stop=Stop(epochs=5))
    )
    for _ in range(6):
        trainer.step()
    assert why in graphs.eager_update_reason
    assert graphs.notes[-1] == REPLAYED or why in graphs.notes[-1]
    assert not graphs.eager_reason
    assert capture.replays > 0  # of passes


def test_an_update_runs_eagerly_without_memory_to_verify_it(
    make_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, graphs = with_graphs(make_training(batch_size=50))
    trainer.step()

    def copies_of(tensors: Any) -> Any:
        if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copies(tensors)

    monkeypatch.setattr("carpool.runtime.graphs.step_graphs.copies", copies_of)
    for _ in range(2):
        trainer.step()
    assert "memory" in graphs.eager_update_reason


def test_an_update_whose_options_keep_changing_runs_eagerly(make_training: Any) -> None:
    training = make_training(
        batch_size=50, stop=Stop(epochs=100), optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)
    )
    trainer, _, graphs = with_graphs(training)
    for step in range(150):
        training.optimizer.param_groups[0]["lr"] = 0.01 / (1 + step // 4)
        trainer.step()
    assert "options changed more than 32 times" in graphs.eager_update_reason


def test_steps_of_several_passes_are_not_captured(make_training: Any) -> None:
    training = make_training()
    trainer = Trainer(training, exact=True, shards=4)
    capture = FakeCapture(training)
    trainer.graphs = trainer.new_graphs(capture)
    trainer.step()
    assert capture.captures == 0
    trainer.graphs.note_eager("each step has 4 passes")
    assert "each step has 4 passes" in trainer.graphs.notes[0]
