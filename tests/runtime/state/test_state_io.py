"""Warm-up steps: what they prepare, and that they change nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest
from carpool.runtime.state.state_io import run_warmup_steps
from tests.runtime.fake_capture import with_graphs


def never() -> bool:
    return False


def mirrored(training: Any) -> tuple[Trainer, dict[str, Any]]:
    """A training after some steps, and its state then."""
    trainer, _, _ = with_graphs(training)
    for _ in range(3):
        trainer.step()
    return trainer, copy.deepcopy(trainer.state_dict())


def test_after_a_warmup_every_step_is_replayed(make_training: Any) -> None:
    here, state = mirrored(make_training(batch_size=50))
    there, capture, graphs = with_graphs(make_training(batch_size=50))
    there.load_state_dict(copy.deepcopy(state))
    note = run_warmup_steps(there, never)
    there.load_state_dict(state)
    assert "4 steps" in note
    assert graphs.is_warmed_up
    capture.replays = 0
    for _ in range(4):
        here.step()
        there.step()
    assert capture.replays == 12  # forward, backward and update
    assert digest(here.training.model) == digest(there.training.model)
    assert here.cursor == there.cursor


def test_a_warmup_calls_no_hook_and_no_evaluation(make_training: Any) -> None:
    called: list[str] = []

    def evaluate(model: Any) -> dict[str, float]:
        called.append("evaluated")
        return {"accuracy": 1.0}

    hook = {"after_update": lambda model, step: called.append("updated")}
    trainer, _, _ = with_graphs(make_training(batch_size=50, evaluate=evaluate, **hook))
    run_warmup_steps(trainer, never)
    assert called == []


def test_without_graphs_two_steps_are_enough(make_training: Any) -> None:
    trainer = Trainer(make_training())
    assert "2 steps" in run_warmup_steps(trainer, never)


def test_a_message_interrupts_the_warmup(make_training: Any) -> None:
    trainer, _, graphs = with_graphs(make_training(batch_size=50))
    assert run_warmup_steps(trainer, lambda: trainer.cursor.step == 1).startswith("warmed up with 1 ")
    assert not graphs.is_warmed_up


def test_a_failed_warmup_is_noted(make_training: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    trainer = Trainer(make_training(loss=loss))
    assert run_warmup_steps(trainer, never).endswith("step 1: no more")
