"""Trainings of all usual kinds learn bit for bit what an ordinary loop learns, also after every resume."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from carpool.core.errors import InputError
from carpool.runtime.engine import trainer as trainer_module
from carpool.runtime.engine.custom_step import check_custom_step
from carpool.runtime.engine.determinism import derive, seed_entry
from carpool.runtime.engine.flat_buffers import PendingLoss
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Report, Training
from carpool.runtime.errors import Diverged, TrainingError
from carpool.runtime.state.checkpoint import load, save
from carpool.runtime.state.digest import digest
from carpool.testing.reference import plain_loop
from tests.runtime.fake_capture import with_graphs
from tests.support import outsider_trainings as outsiders

KINDS: dict[str, Callable[[], Training]] = {
    "gpt": outsiders.gpt,
    "gpt sdpa": lambda: outsiders.gpt(sdpa=True),
    "gpt compiled": lambda: outsiders.gpt(compiled=True),
    "convnet": outsiders.convnet,
    "convnet bf16": lambda: outsiders.convnet(bf16=True),
    "hugging face": outsiders.hugging_face,
    "micro batches": lambda: outsiders.hugging_face(micro_batch=5),
    "two optimizers": outsiders.two_optimizers,
    "gan": outsiders.gan,
    "actor-critic": outsiders.actor_critic,
    "accumulating": outsiders.accumulating,
    "streaming": outsiders.streaming,
    "augmented": outsiders.augmented,
    "extra state": outsiders.annealed,
    "unfreezing": outsiders.unfreezing,
    "momentum encoder": outsiders.momentum_encoder,
}
CUSTOM = ("gan", "actor-critic", "accumulating")
STATEFUL = {"extra state": "get_extra_state", "momentum encoder": "the loss function modifies weights"}
# Several passes; a stream and a custom collate run as usual, the last partial batches among them.
UNCAPTURED = {"micro batches", "streaming", "augmented", *STATEFUL}
by_loss = [name for name in KINDS if name not in CUSTOM]


def made(name: str, **changes: Any) -> Training:
    seed_entry(0)
    return replace(KINDS[name](), **changes)


@pytest.mark.parametrize("name", KINDS)
def test_training_equals_the_plain_loop(name: str) -> None:
    trainer = Trainer(made(name))
    losses = [done.loss for done in trainer.steps()]
    reference = plain_loop(made(name))
    assert losses == reference.losses
    assert digest(trainer.training.model) == reference.digest


@pytest.mark.parametrize("name", [name for name in by_loss if name not in {"convnet", "momentum encoder"}])
def test_shards_equal_the_plain_loop(name: str) -> None:
    trainer = Trainer(made(name), exact=True, shards=4)
    for _ in trainer.steps():
        pass
    assert digest(trainer.training.model) == plain_loop(made(name), shards=4).digest


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("every", [1, 4])
def test_a_training_resumed_often_equals_an_undisturbed_one(name: str, every: int, tmp_path: Path) -> None:
    path, number = tmp_path / "state.ckpt", 0
    trainer = Trainer(made(name))
    while not trainer.stop_reason:
        trainer.step()
        number += 1
        if number % every == 0:
            save(path, trainer.state_dict())
            trainer = Trainer(made(name))
            trainer.load_state_dict(load(path))
    assert number == trainer.cursor.step
    assert digest(trainer.training.model) == plain_loop(made(name)).digest


@pytest.mark.parametrize("name", [name for name in by_loss if name not in UNCAPTURED])
def test_kinds_are_captured(name: str) -> None:
    trainer, capture, graphs = with_graphs(made(name))
    for _ in trainer.steps():
        pass
    assert (graphs.eager_reason, graphs.eager_update_reason) == ("", "")
    assert capture.replays > 0
    assert digest(trainer.training.model) == plain_loop(made(name)).digest


@pytest.mark.parametrize(("name", "reason"), STATEFUL.items())
def test_a_pass_that_changes_more_than_buffers_runs_once_per_step(name: str, reason: str) -> None:
    trainer, capture, graphs = with_graphs(made(name))
    for _ in trainer.steps():
        pass
    assert reason in graphs.eager_reason
    assert capture.captures == 0
    assert digest(trainer.training.model) == plain_loop(made(name)).digest


def seeded(number: int) -> None:
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002
    torch.manual_seed(number)


def test_a_custom_step_is_called_as_in_a_loop_by_hand() -> None:
    """A GAN without a line of the engine: order, seeds and batches are all that it needs to know."""
    seed_entry(0)
    training = outsiders.gan()
    (data,) = training.dataset.tensors
    steps, epoch = 0, 0
    while steps < 12:
        keys = np.random.Philox(key=derive("order", 0, epoch)).random_raw(len(data))
        for samples in torch.from_numpy(np.argsort(keys, kind="stable")).split(16):  # type: ignore[no-untyped-call]
            if steps < 12:
                seeded(derive("pass", 0, steps, 0))
                outsiders.gan_step(training.model, [data[samples]], training.optimizer)
                steps += 1
        epoch += 1
    trainer = Trainer(made("gan"))
    for _ in trainer.steps():
        pass
    assert digest(trainer.training.model) == digest(training.model)


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"step": None}, "neither"),
        ({"loss": lambda m, b: 0}, "both"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"autocast": "bf16"}, "autocast"),
        ({"micro_batch": 4}, "micro_batch"),
        ({"optimizer": {}}, "optimizer"),
        ({"optimizer": {"g": 3}}, "optimizer"),
        ({"stop": Stop(patience=2)}, "best"),
    ],
)
def test_wrong_steps_are_rejected(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        made("gan", **changes)


def test_a_parameter_belongs_to_one_optimizer() -> None:
    training = made("gan")
    twice = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="share"):
        replace(training, optimizer=[twice, training.optimizer["g"]])  # type: ignore[index,call-overload]


def test_a_custom_step_runs_on_one_device() -> None:
    with pytest.raises(InputError, match="max_devices = 1"):
        Trainer(made("gan"), exact=True)
    with pytest.raises(InputError, match="2 devices"):
        check_custom_step(made("gan"), devices=2)
    check_custom_step(made("convnet"), exact=True, devices=2)


@pytest.mark.parametrize("result", [None, torch.ones(2), "0.5", True, (torch.ones(()), 3)])
def test_a_custom_step_returns_its_loss(result: Any) -> None:
    with pytest.raises(TrainingError, match="step returned"):
        Trainer(made("gan", step=lambda m, b, o: result)).step()


def test_a_custom_step_that_diverges_is_reported() -> None:
    with pytest.raises(Diverged, match="step 1"):
        Trainer(made("gan", step=lambda m, b, o: math.nan)).step()


def test_an_empty_epoch_of_a_stream_is_reported() -> None:
    rows = iter([(torch.ones(4), 1)] * 12)
    trainer = Trainer(made("streaming", dataset=_Once(rows)))
    trainer.step()
    with pytest.raises(InputError, match="epoch 2"):
        trainer.step()


class _Once(torch.utils.data.IterableDataset[Any]):
    """Can be iterated only once."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return self.rows


def test_the_users_own_seed_determines_the_initial_weights() -> None:
    def initial(job_seed: int) -> str:
        seed_entry(job_seed)
        return digest(outsiders.gpt().model)

    assert initial(0) == initial(1)  # gpt() calls torch.manual_seed(1337)
    torch.manual_seed(1337)
    torch.randint(0, 17, (60, 7))
    torch.randperm(60)
    by_hand = digest(outsiders.GPT())
    assert initial(0) == by_hand


# -- callbacks, metrics, patience --------------------------------------------------------------------------------------


def test_callbacks_get_a_report() -> None:
    steps: list[Report] = []
    epochs: list[Report] = []
    training = made("convnet", on_step_end=steps.append, on_epoch_end=epochs.append, stop=Stop(epochs=2))
    trainer = Trainer(training)
    done = list(trainer.steps())
    assert [(each.step, each.loss) for each in steps] == [(each.step, each.loss) for each in done]
    assert all(set(each.metrics) == {"accuracy"} for each in steps)
    assert [(each.step, each.epoch) for each in epochs] == [(5, 1), (10, 2)]
    assert [set(each.metrics) for each in epochs] == [{"accuracy", "val_loss"}] * 2
    assert epochs[0].loss == pytest.approx(sum(each.loss for each in done[:5]) / 5)
    assert epochs[0].model is training.model


def test_callbacks_run_on_the_first_rank_only() -> None:
    called: list[Report] = []
    trainer = Trainer(made("convnet", on_step_end=called.append, on_epoch_end=called.append, stop=Stop(epochs=1)))
    trainer.is_first_rank = False
    for _ in trainer.steps():
        pass
    assert called == []


def test_the_mean_loss_of_an_epoch_survives_a_resume() -> None:
    whole: list[Report] = []
    for _ in Trainer(made("gpt", on_epoch_end=whole.append)).steps():
        pass
    parts: list[Report] = []
    trainer = Trainer(made("gpt", on_epoch_end=parts.append))
    while not trainer.stop_reason:
        trainer.step()
        state = trainer.state_dict()
        trainer = Trainer(made("gpt", on_epoch_end=parts.append))
        trainer.load_state_dict(state)
    assert [each.loss for each in parts] == [each.loss for each in whole]


def test_patience_ends_a_training_that_stops_improving() -> None:
    values = iter([3.0, 2.0, 2.5, 2.0, 1.0, 1.0, 9.0, 0.5])
    trainer = Trainer(made("convnet", evaluate=lambda model: {"val_loss": next(values)}, stop=Stop(patience=2)))
    for _ in trainer.steps():
        if trainer.cursor.epoch == 3:  # with one evaluation in vain
            trainer.load_state_dict(trainer.state_dict())
    assert trainer.cursor.epoch == 4
    assert "patience 2" in trainer.stop_reason


def test_metrics_of_passes_are_averaged_over_their_samples() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss, {"first": batch["labels"].float().mean(), "size": len(batch["labels"])}

    trainer = Trainer(made("micro batches", loss=loss))
    step = trainer.next_step()
    trainer.advance(step, trainer.compute(step))
    labels = torch.tensor([trainer.training.dataset[int(each)]["labels"] for each in step.draw.samples])
    assert trainer.step_metrics()["first"] == pytest.approx(float(labels.float().mean()))


def test_metrics_are_those_of_the_replayed_step() -> None:
    trainer, _, graphs = with_graphs(made("convnet", evaluate=None, best="", stop=Stop(epochs=4)))
    eager = Trainer(made("convnet", evaluate=None, best="", stop=Stop(epochs=4)))
    while not trainer.stop_reason:
        trainer.step()
        eager.step()
        assert trainer.step_metrics() == eager.step_metrics()
    assert graphs.eager_reason == ""


def test_a_metric_that_is_a_number_prevents_capture() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().mean(), {"number": 3}

    trainer, _, graphs = with_graphs(made("convnet", loss=loss))
    for _ in range(4):
        trainer.step()
    assert "number" in graphs.eager_reason


# -- losses read late --------------------------------------------------------------------------------------------------


class Late(PendingLoss):
    """As on a GPU: known only when it is read."""

    reads = 0

    @property
    def is_asynchronous(self) -> bool:
        return True

    def value(self) -> float:
        Late.reads += 1
        return super().value()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "PendingLoss", Late)
    Late.reads = 0


@pytest.mark.usefixtures("late")
def test_a_custom_step_does_not_wait_for_its_loss() -> None:
    trainer = Trainer(made("gan"))
    trainer.step()
    assert Late.reads == 0
    trainer.step()
    assert Late.reads == 1
    assert len(trainer.state_dict()["losses"]) == 2
    assert Late.reads == 2
    losses = plain_loop(made("gan")).losses
    assert list(trainer.progress.losses) == losses[:2]
    for _ in trainer.steps():
        pass
    assert list(trainer.progress.losses) == losses[-10:]
    assert digest(trainer.training.model) == plain_loop(made("gan")).digest


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("changes", [{"on_step_end": print}, {"stop": Stop(steps=3, target_loss=0.0)}])
def test_a_loss_that_is_needed_is_read_at_once(changes: dict[str, Any]) -> None:
    trainer = Trainer(made("gan", **changes))
    trainer.step()
    assert Late.reads == 1


@pytest.mark.usefixtures("late")
def test_a_late_loss_that_is_not_finite_is_never_saved() -> None:
    trainer = Trainer(made("gan", step=lambda m, b, o: torch.tensor(math.nan)))
    trainer.step()
    for _ in range(2):
        with pytest.raises(Diverged, match="step 1"):
            trainer.state_dict()
    with pytest.raises(Diverged, match="step 1"):
        trainer.step()


@pytest.mark.usefixtures("late")
def test_a_last_late_loss_is_read_before_the_end() -> None:
    trainer = Trainer(made("gan", step=lambda m, b, o: torch.tensor(math.nan), stop=Stop(steps=1)))
    with pytest.raises(Diverged, match="step 1"):
        trainer.step()
