"""Steps that are made and undone: what they leave ready, and that nobody notices them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest
from carpool.runtime.state.state_io import run_warmup_steps
from tests.runtime.echo import recorded


def never() -> bool:
    return False


def mirrored(training: Any) -> tuple[Trainer, dict[str, Any]]:
    """A training after some steps, and its state then."""
    trainer, _, _ = recorded(training)
    for _ in range(3):
        trainer.step()
    return trainer, copy.deepcopy(trainer.state_dict())


def test_after_a_rehearsal_every_step_is_replayed_and_learns_the_same(make_training: Any) -> None:
    here, state = mirrored(make_training(batch_size=50))
    there, echo, graphs = recorded(make_training(batch_size=50))
    there.load_state_dict(copy.deepcopy(state))
    words = run_warmup_steps(there, never)
    there.load_state_dict(state)
    assert (words.startswith("rehearsed 4 steps"), graphs.is_settled) == (True, True)
    echo.replays = 0
    for _ in range(4):
        here.step()
        there.step()
    assert echo.replays == 12  # forward, backward and update
    assert digest(here.training.model) == digest(there.training.model)
    assert here.cursor == there.cursor


def test_a_rehearsal_calls_no_hook_and_evaluates_nothing(make_training: Any) -> None:
    called: list[str] = []

    def evaluate(model: Any) -> dict[str, float]:
        called.append("evaluated")
        return {"accuracy": 1.0}

    hook = {"after_update": lambda model, step: called.append("updated")}
    trainer, _, _ = recorded(make_training(batch_size=50, evaluate=evaluate, **hook))
    run_warmup_steps(trainer, never)
    assert called == []


def test_without_recordings_a_few_steps_do(make_training: Any) -> None:
    trainer = Trainer(make_training())
    assert run_warmup_steps(trainer, never).startswith("rehearsed 2 steps")


def test_who_is_called_ends_the_rehearsal(make_training: Any) -> None:
    trainer, _, graphs = recorded(make_training(batch_size=50))
    assert run_warmup_steps(trainer, lambda: trainer.cursor.step == 1).startswith("rehearsed 1 steps")
    assert not graphs.is_settled


def test_what_fails_in_a_rehearsal_fails_in_earnest_only(make_training: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    trainer = Trainer(make_training(loss=loss))
    assert run_warmup_steps(trainer, never) == "a rehearsal ended at step 1: no more"
