"""Every reason for which a step, or its update, is left to the code, and the words in which that is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.graphs.verification import copies
from tests.runtime.echo import REPLAYED, Echo, recorded


class Running(nn.Module):
    """Keeps a mean of what it sees, in a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(6))
        self.body = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * inputs.detach().mean(0)
        return self.body(inputs)  # type: ignore[no-any-return]


class Called(nn.Module):
    """Remembers in Python how often it was called: a recording would not."""

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
        (Running, "the pass replaces a weight or a buffer of the model by another tensor"),
        (lambda: Called("buffers"), "recorded, it leaves other buffers"),
    ],
)
def test_a_pass_with_side_effects_is_made_by_the_code(make_training: Any, model: Any, why: str) -> None:
    trainer, _, graphs = recorded(make_training(model=model(), batch_size=50, stop=Stop(epochs=9)))
    for _ in range(12):
        trainer.step()
    assert graphs.refusal == why


def test_a_recording_with_another_loss_is_found(make_training: Any) -> None:
    trainer, _, graphs = recorded(make_training(model=Called("loss")))
    for _ in range(4):
        trainer.step()
    assert graphs.refusal.startswith("recorded, it gives another loss: ")


def test_a_batch_with_other_things_than_tensors_is_not_recorded(make_training: Any) -> None:
    def boxed(items: Any) -> Any:
        return items[0], items[1], object()

    training = make_training(batch_size=50)
    trainer, echo, graphs = recorded(training)
    fetch = trainer._passes.fetch
    trainer._passes.fetch = lambda step: boxed(fetch(step))  # type: ignore[method-assign]
    trainer.step()
    assert graphs.refusal == "a batch holds a object"
    assert echo.records == 0


def test_only_so_many_shapes_of_batches_are_recorded(make_training: Any) -> None:
    trainer, _, graphs = recorded(make_training(stop=Stop(epochs=40), batch_norm=False))
    for size in (50, 25, 20, 10, 5):
        trainer.resize_batch(size)
        for _ in range(3):
            trainer.step()
    assert any(words.startswith("batches of more than 4 shapes") for words in graphs.news)
    assert not graphs.refusal


class Odd(torch.optim.SGD):
    """An optimizer with a fault of one kind."""

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
        elif self.kind == "raises" and self.count == 4:  # by the code three times, then while recording
            raise RuntimeError("no\nmore")
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("host", "Odd counts on the host"),
        ("python", "recorded, it gives other weights"),
        ("raises", "it cannot be recorded: RuntimeError: no"),
    ],
)
def test_an_odd_optimizer_is_left_to_the_code(make_training: Any, kind: str, why: str) -> None:
    trainer, echo, graphs = recorded(
        make_training(batch_size=50, optimizer=lambda p: Odd(p, kind), stop=Stop(epochs=5))
    )
    for _ in range(6):
        trainer.step()
    assert graphs.update_refusal == why
    assert graphs.news[-1] == REPLAYED or graphs.news[-1] == f"updates are made without a CUDA graph: {why}"
    assert not graphs.refusal
    assert echo.replays > 0  # passes are


def test_where_there_is_no_memory_to_check_it_the_update_is_left_to_the_code(
    make_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, graphs = recorded(make_training(batch_size=50))
    trainer.step()

    def copies_of(tensors: Any) -> Any:
        if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copies(tensors)

    monkeypatch.setattr("carpool.runtime.graphs.step_graphs.copies", copies_of)
    for _ in range(2):
        trainer.step()
    assert graphs.update_refusal == "there is no memory to check it in"


def test_settings_that_change_again_and_again_are_left_to_the_code(make_training: Any) -> None:
    training = make_training(
        batch_size=50, stop=Stop(epochs=100), optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)
    )
    trainer, _, graphs = recorded(training)
    for step in range(150):
        training.optimizer.param_groups[0]["lr"] = 0.01 / (1 + step // 4)
        trainer.step()
    assert graphs.update_refusal == "it cannot be recorded: RuntimeError: the optimizer's settings change too often"


def test_steps_of_several_passes_are_not_recorded(make_training: Any) -> None:
    training = make_training()
    trainer = Trainer(training, exact=True, shards=4)
    echo = Echo(training)
    trainer.graphs = trainer.recorded_by(echo)
    trainer.step()
    assert echo.records == 0
    trainer.graphs.pass_by("each of them is 4 passes")
    assert trainer.graphs.news == ["steps are made without CUDA graphs: each of them is 4 passes"]
