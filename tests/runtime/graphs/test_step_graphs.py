"""Recorded steps, with a recorder that needs no GPU: what is proved, what is refused, and that bits never change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from carpool.runtime.data.batches import BatchSource, InputMode, InputPlan
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import Diverged
from carpool.runtime.graphs.captured_step import NonStaticBatch, batch_signature, fill_static, static_copy
from carpool.runtime.state.digest import digest
from tests.runtime.echo import REPLAYED, Echo, learned, recorded

CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    "clipped": {"clip_norm": 0.1},
    "sum and count": {"loss": lambda m, b: (nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[1]))},
    "schedule": {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "schedule": lambda o: lr_scheduler.StepLR(o, 7),
    },
    "every step another rate": {"schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 12)},
    "one cycle": {"schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_recorded_steps_learn_the_same(make_training: Any, case: dict[str, Any]) -> None:
    stop = {"stop": Stop(epochs=6)}
    plain = learned(Trainer(make_training(**case, **stop)))
    trainer, echo, graphs = recorded(make_training(**case, **stop))
    assert learned(trainer) == plain
    assert (graphs.refusal, echo.replays > 18) == ("", True)  # 18 steps, most of them by two or three recordings
    assert not graphs.refusal
    assert not graphs.update_refusal


def test_an_update_that_changes_every_step_is_left_to_the_code(make_training: Any) -> None:
    trainer, echo, _ = recorded(make_training(batch_size=50, schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 9)))
    for _ in trainer.steps():
        pass
    assert echo.records == 2  # forward and backward


def test_it_is_told_once_when_steps_are_replayed(make_training: Any) -> None:
    trainer, _, graphs = recorded(make_training(batch_size=50))
    for _ in range(3):
        trainer.step()
        assert all(parameter.grad is None for parameter in trainer.training.model.parameters())
    assert graphs.news == [REPLAYED]


class Listener:
    """Notes how far the recorder had come when it was told of a pass."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self.heard: list[tuple[str, int, int]] = []

    def starts(self) -> None:
        self.heard.append(("starts", self._echo.heads, self._echo.replays))

    def is_queued(self) -> None:
        self.heard.append(("queued", self._echo.heads, self._echo.replays))


def test_who_waits_for_its_turn_is_asked_before_more_than_a_head_is_replayed(make_training: Any) -> None:
    trainer, echo, _ = recorded(make_training(batch_size=50), has_branches=True)
    for _ in range(5):
        trainer.step()
    heads, before, listener = echo.heads, echo.replays, Listener(echo)
    trainer.pass_whole(trainer.begin(), listener)
    assert listener.heard[-2:] == [("starts", heads + 1, before), ("queued", heads + 1, before + 2)]


def test_branches_are_told_and_keep_a_whole_step_from_being_queued(make_training: Any) -> None:
    for has_branches in (False, True):
        trainer, _, graphs = recorded(make_training(batch_size=50), has_branches=has_branches)
        for _ in range(5):
            trainer.step()
        told = "its CUDA graphs have branches: a step is queued up to the first of them before its turn"
        assert (told in graphs.take_news(), graphs.may_queue) == (has_branches, not has_branches)


def test_a_last_partial_batch_has_a_recording_of_its_own(make_training: Any) -> None:
    training = make_training(stop=Stop(epochs=5))
    trainer, echo, _ = recorded(training)
    for _ in range(12):
        trainer.step()
    echo.replays = 0
    for _ in range(3):  # two whole batches and a partial one
        trainer.step()
    assert echo.replays == 9


def host_random(model: nn.Module, batch: Any) -> Any:
    scale = 1.0 + random.random()
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) * scale


def failing_when_recorded() -> Callable[..., Any]:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # by the code, by the code aside, and then while recording
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (host_random, "the pass draws random numbers on the host"),
        (
            failing_when_recorded,
            "it cannot be recorded: RuntimeError: operation not permitted when stream is capturing",
        ),
    ],
)
def test_what_cannot_be_recorded_is_made_by_the_code(make_training: Any, loss: Any, why: str) -> None:
    def fresh() -> Any:
        return loss() if loss is failing_when_recorded else loss

    trainer, echo, graphs = recorded(make_training(loss=fresh()))
    losses = [done.loss for done in trainer.steps()]
    assert graphs.news == [f"steps are made without CUDA graphs: {why}"]
    assert echo.replays == 0
    usual = make_training(loss=host_random) if loss is host_random else make_training()
    plain = Trainer(usual)
    assert losses == [done.loss for done in plain.steps()]
    assert digest(trainer.training.model) == digest(plain.training.model)


def test_a_wrong_recording_is_found_and_changes_nothing(make_training: Any) -> None:
    trainer, _, graphs = recorded(make_training(), wrong=1e-3)
    assert learned(trainer) == learned(Trainer(make_training()))
    assert graphs.refusal == "recorded, it gives other gradients"


class Counting(torch.optim.SGD):
    """Keeps a plain number that its next step depends on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_python_is_not_recorded(make_training: Any) -> None:
    trainer, echo, graphs = recorded(make_training(optimizer=lambda p: Counting(p, lr=0.1, momentum=0.5)))
    plain = Trainer(make_training(optimizer=lambda p: Counting(p, lr=0.1, momentum=0.5)))
    assert learned(trainer) == learned(plain)
    assert graphs.update_refusal == "Counting counts in Python"
    assert not graphs.refusal
    assert echo.replays > 0  # passes are


@pytest.mark.parametrize("steps", [0, 4])
def test_a_state_is_loaded_under_recordings(make_training: Any, steps: int) -> None:
    """They stay where the optimizer goes on remembering in the same tensors; at step 0 it remembers nothing."""
    first, _, _ = recorded(make_training(batch_size=50))
    for _ in range(steps):
        first.step()
    second, echo, graphs = recorded(make_training(batch_size=50))
    for _ in range(5):
        second.step()
    assert graphs.is_settled
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert graphs.is_settled == (steps > 0)
    echo.replays = 0
    for _ in range(5):
        first.step()
        second.step()
    assert (echo.replays > 0, echo.replays == 15) == (True, steps > 0)
    assert digest(first.training.model) == digest(second.training.model)


def test_moved_weights_let_go_of_recordings(make_training: Any) -> None:
    training = make_training(batch_size=50)
    trainer, echo, _ = recorded(training)
    plain = Trainer(make_training(batch_size=50))
    for _ in range(3):
        trainer.step()
        plain.step()
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()
    echo.replays = 0
    trainer.step()
    plain.step()
    assert echo.replays == 0
    assert digest(training.model) == digest(plain.training.model)


def test_a_loss_that_is_no_number_leaves_the_model_as_it_was(make_training: Any) -> None:
    inputs, labels = torch.randn(300, 6), torch.randint(0, 3, (300,))
    inputs[200:] = torch.nan
    training = make_training(dataset=TensorData(inputs, labels), batch_size=20, shuffle=False)
    trainer, echo, _ = recorded(training)
    for _ in range(10):
        trainer.step()
    assert echo.replays > 10
    before = digest(training.model)
    with pytest.raises(Diverged):
        trainer.step()
    assert digest(training.model) == before


def test_outlines_tell_batches_apart() -> None:
    batch = {"x": torch.zeros(2, 3), "n": 4, "rest": [torch.ones(1)]}
    assert batch_signature(batch) == batch_signature({"x": torch.ones(2, 3), "n": 4, "rest": [torch.zeros(1)]})
    assert batch_signature(batch) != batch_signature({**batch, "n": 5})
    assert batch_signature(batch) != batch_signature({**batch, "x": torch.zeros(3, 2)})
    assert batch_signature(batch) != batch_signature({**batch, "x": torch.zeros(3, 2).t()})
    with pytest.raises(NonStaticBatch, match="object"):
        batch_signature([object()])
    held = static_copy(batch)
    fill_static(held, {"x": torch.full((2, 3), 7.0), "n": 4, "rest": [torch.full((1,), 8.0)]})
    assert held["x"].sum() == 42.0
    assert held["rest"][0] == 8.0
    assert batch["x"].sum() == 0.0  # type: ignore[attr-defined]


def test_batches_of_rows_on_the_device_are_gathered_in_the_recording(make_training: Any) -> None:
    def gathering(training: Any) -> Any:
        choice = InputPlan(InputMode.ON_DEVICE, "")
        return BatchSource(training.dataset, seed=0, choice=choice)

    stop = {"stop": Stop(epochs=6)}
    plain = learned(Trainer(make_training(**stop)))
    trainer, _, _ = recorded(make_training(**stop))
    trainer._passes.samples = gathering(trainer.training)
    fetched = []
    fetch = trainer._passes.fetch

    def seen(step: Step) -> Any:
        fetched.append(step.number)
        return fetch(step)

    trainer._passes.fetch = seen  # type: ignore[method-assign]
    assert learned(trainer) == plain
    assert fetched == [0, 1, 2, 3, 5, 8]  # three of each length: seen, recorded, proved once more


def test_rows_that_are_changed_on_their_way_are_not_gathered_in_the_recording(make_training: Any) -> None:
    data = make_training().dataset
    choice = InputPlan(InputMode.ON_DEVICE, "")
    assert BatchSource(data, seed=0, choice=choice).gathering(4) is not None
    assert BatchSource(data, seed=0, choice=choice, augment=lambda batch, chance: batch).gathering(4) is None
    finishing = TensorData(*data.tensors, finish=lambda rows: rows)
    assert BatchSource(finishing, seed=0, choice=choice).gathering(4) is None
    assert BatchSource(data, seed=0).gathering(4) is None
