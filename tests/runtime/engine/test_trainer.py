"""Stopping, evaluating and resuming a training in one process."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from carpool.core.errors import UnknownName
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import CheckpointError, Diverged, TrainingError
from carpool.runtime.state.checkpoint import load, save
from carpool.runtime.state.digest import digest
from carpool.testing import plain_loop


def averaged(make_training: Any, **changes: Any) -> Training:
    """With an EMA of the weights in its state."""
    ema: list[AveragedModel] = []

    def start(model: nn.Module, step: int) -> None:
        ema[0].update_parameters(model)

    training: Training = make_training(after_update=start, **changes)
    ema.append(AveragedModel(training.model, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p))
    training.state["ema"] = ema[0]  # type: ignore[index]
    return training


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"exact": True},
    "cosine": {"schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 6)},
    "milestones": {"schedule": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5)},
    "one cycle": {"schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10)},
    "sequence": {
        "schedule": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        )
    },
    "plateau": {
        "schedule": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        "schedule_every": "evaluation",
        "evaluate": lambda model: {"loss": 1.0},
        "best": "min loss",
    },
    "fp16": {"autocast": "fp16"},
    "bf16, clip": {"autocast": "bf16", "clip_norm": 0.05},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("at", [1, 2, 3, 4], ids=["in epoch", "before end", "end of epoch", "after end"])
def test_resuming_changes_nothing(make_training: Any, tmp_path: Path, case: dict[str, Any], at: int) -> None:
    changes = dict(case)
    options = {"exact": changes.pop("exact", False)}
    whole = Trainer(averaged(make_training, **changes), **options)
    losses = [done.loss for done in whole.steps()]

    first = Trainer(averaged(make_training, **changes), **options)
    before = [first.step().loss for _ in range(at)]
    save(tmp_path / "a.ckpt", first.state_dict())
    second = Trainer(averaged(make_training, **changes, seed=99), **options)
    second.load_state_dict(load(tmp_path / "a.ckpt"))
    assert before + [done.loss for done in second.steps()] == losses
    for one, two in ((whole, second),):
        assert digest(one.training.model) == digest(two.training.model)
        assert digest(one.training.state["ema"]) == digest(two.training.state["ema"])  # type: ignore[arg-type]
        assert one.progress.losses == two.progress.losses
        assert one.progress.metrics == two.progress.metrics
        assert one.stop_reason == two.stop_reason
        assert one.training.whole_optimizer.param_groups[0]["lr"] == two.training.whole_optimizer.param_groups[0]["lr"]


def test_non_persistent_buffers_are_restored(make_training: Any) -> None:
    class Counting(nn.Linear):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return super().forward(inputs)

    first, second = (Trainer(make_training(model=Counting())) for _ in range(2))
    first.step()
    second.load_state_dict(first.state_dict())
    assert float(second.training.model.get_buffer("seen")) == 1.0


def test_a_resized_batch_is_restored(make_training: Any, tmp_path: Path) -> None:
    first, second = (Trainer(make_training()) for _ in range(2))
    first.step()
    first.resize_batch(10)
    save(tmp_path / "a.ckpt", first.state_dict())
    second.load_state_dict(load(tmp_path / "a.ckpt"))
    assert second.step().num_samples == 10


@pytest.mark.parametrize(
    ("stop", "steps", "reason"),
    [
        (Stop(epochs=2), 6, "reached 2 epochs"),
        (Stop(steps=4), 4, "reached 4 steps"),
        (Stop(epochs=5, steps=2), 2, "reached 2 steps"),
        (Stop(steps=9, target_loss=100.0), 9, "reached 9 steps"),
        (Stop(steps=99, target_loss=100.0), 10, "mean loss of the last 10 steps is "),
        (Stop(epochs=9, target_loss=100.0, window=3), 3, "mean loss of the last 3 steps is "),
        (Stop(epochs=9, target_metric="accuracy >= 0.25"), 6, "accuracy is 0.3, target accuracy >= 0.25"),
        (Stop(epochs=9, target_metric="error <= 0.05"), 9, "error is 0.05, target error <= 0.05"),
    ],
)
def test_stopping(make_training: Any, stop: Stop, steps: int, reason: str) -> None:
    rounds: list[int] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        rounds.append(1)
        return {"accuracy": len(rounds) * 0.15, "error": 0.08 - 0.01 * len(rounds)}

    training = make_training(stop=stop, evaluate=evaluate)
    trainer = Trainer(training)
    done = [done.step for done in trainer.steps()]
    assert done[-1] == steps
    assert trainer.stop_reason.startswith(reason)
    assert training.model.training
    rounds.clear()
    assert len(plain_loop(make_training(stop=stop, evaluate=evaluate)).losses) == steps


def test_evaluation_and_the_best(make_training: Any) -> None:
    values = iter([0.5, 0.7, math.nan, 0.7, 0.9, 0.1])
    trainer = Trainer(make_training(stop=Stop(epochs=6), evaluate=lambda model: next(values), best="max metric"))
    best = []
    for done in trainer.steps():
        if done.step % 3 == 0:
            assert trainer.progress.best is not None
            best.append((trainer.progress.best.step, trainer.progress.best.value))
    assert best == [(3, 0.5), (6, 0.7), (6, 0.7), (6, 0.7), (15, 0.9), (15, 0.9)]


def test_evaluation_every_second_epoch_and_at_the_end(make_training: Any) -> None:
    counts = itertools.count()
    training = make_training(stop=Stop(steps=10), evaluate_every=2, evaluate=lambda model: next(counts))
    trainer = Trainer(training)
    seen = [(done.step, trainer.progress.metrics.get("metric")) for done in trainer.steps()]
    assert [seen[i] for i in (4, 5, 8, 9)] == [(5, None), (6, 0.0), (9, 0.0), (10, 1.0)]


def test_evaluation_changes_nothing(make_training: Any) -> None:
    def evaluate(model: nn.Module) -> float:
        torch.rand(5)
        return float(model(torch.randn(7, 6)).sum())

    plain, evaluated = (Trainer(make_training(**c)) for c in ({}, {"evaluate": evaluate}))
    assert [d.loss for d in plain.steps()] == [d.loss for d in evaluated.steps()]
    again = Trainer(make_training(evaluate=evaluate))
    for _ in again.steps():
        pass
    assert again.progress.metrics == evaluated.progress.metrics
    torch.manual_seed(77)
    assert again.evaluate() == evaluated.progress.metrics, "the seed of an evaluation depends on the step only"


def test_a_frozen_layer_stays_frozen_over_an_evaluation(make_training: Any) -> None:
    training = make_training(evaluate=lambda model: 0.0)
    training.model[1].eval()
    for _ in Trainer(training).steps():
        pass
    assert [module.training for module in training.model] == [True, False, True, True, True]


def test_unknown_metric(make_training: Any) -> None:
    training = make_training(stop=Stop(epochs=1, target_metric="acuracy >= 1"), evaluate=lambda model: {"accuracy": 1})
    with pytest.raises(UnknownName, match=r"evaluate: unknown metric 'acuracy'\. Did you mean accuracy\?"):
        list(Trainer(training).steps())


def test_a_diverged_loss_leaves_the_weights_unchanged(make_training: Any) -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (math.nan if len(calls) == 5 else 1.0)

    trainer = Trainer(make_training(loss=loss))
    for _ in range(4):
        trainer.step()
    before = digest(trainer.training.model)
    with pytest.raises(Diverged, match=r"step 5, epoch 2: the loss is nan; .* [\d.]+, [\d.]+, [\d.]+"):
        trainer.step()
    assert digest(trainer.training.model) == before


def test_a_diverged_first_loss_names_no_losses_before_it(make_training: Any) -> None:
    trainer = Trainer(make_training(loss=lambda model, batch: model(batch[0]).sum() * math.nan))
    with pytest.raises(Diverged, match=r"step 1, epoch 1: the loss is nan\."):
        trainer.step()


def test_a_diverged_gradient_is_named(make_training: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return (model[4].weight * 0.0).sqrt().sum() + model(batch[0]).sum()

    trainer = Trainer(make_training(loss=loss))
    with pytest.raises(Diverged, match=r"step 1, epoch 1: the gradient of '4\.weight' is not finite; the loss is "):
        trainer.step((1, 1))


def test_on_one_device_a_diverged_gradient_shows_in_the_next_loss(make_training: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return (model[4].weight * 0.0).sqrt().sum() + model(batch[0]).sum()

    trainer = Trainer(make_training(loss=loss))
    trainer.step()
    with pytest.raises(Diverged, match=r"step 2, epoch 1: the loss is nan"):
        trainer.step()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b[0]), r"loss returned a tensor of shape \(36, 3\)"),
        (lambda m, b: 1.0, r"loss returned a float"),
        (lambda m, b: None, r"loss returned a NoneType"),
        (lambda m, b: (m(b[0]).sum(), 1, 2), r"loss returned 3 values"),
        (lambda m, b: (m(b[0]).sum(), "x"), r"loss returned a count that is a str"),
        (lambda m, b: (m(b[0]).sum(), torch.ones(2)), r"loss returned a count of shape \(2,\)"),
        (lambda m, b: m(b[0]).sum().detach(), "detached"),
    ],
)
def test_wrong_losses_are_rejected(make_training: Any, loss: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Trainer(make_training(loss=loss)).step()


def test_sparse_gradients_and_growing_buffers_are_rejected(make_training: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    sparse = make_training(
        model=model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda m, b: m(b[1]).sum(),
    )
    with pytest.raises(TrainingError, match=r"the gradient of '0\.weight' is sparse.* sparse=False"):
        Trainer(sparse).step()

    class Growing(nn.Linear):
        rows: torch.Tensor

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("rows", torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.rows = torch.cat([self.rows, self.rows])
            return super().forward(inputs)

    with pytest.raises(TrainingError, match=r"buffer 'rows' changed its shape from \(1,\) to \(2,\)"):
        Trainer(make_training(model=Growing())).step()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"seed": 1}, "seed 0; this training has 1"),
        ({}, {"exact": True}, "shards None; this training has 8"),
        ({"num_samples": 90}, {}, "num_samples 100; this training has 90"),
        (
            {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0)},
            {},
            "optimizer 'Adam'; this training has 'SGD'",
        ),
        ({"state": {"ema": nn.Linear(1, 1)}}, {}, r"state \[\]; this training has \['ema'\]"),
        ({"model": nn.Linear(6, 3)}, {}, "does not fit this training: Error.* loading state_dict for Linear"),
    ],
)
def test_states_of_other_trainings_are_rejected(make_training: Any, changes: Any, options: Any, message: str) -> None:
    state = Trainer(make_training()).state_dict()
    with pytest.raises(CheckpointError, match=message):
        Trainer(make_training(**changes), **options).load_state_dict(state)


def test_states_of_another_schema_are_rejected(make_training: Any) -> None:
    with pytest.raises(CheckpointError, match=r"schema 7.* reads 1"):
        Trainer(make_training()).load_state_dict({"schema": 7})


def test_nondeterministic_operations_are_named(make_training: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        torch.zeros(4).put_(torch.tensor([1]), torch.tensor([2.0]))
        return model(batch[0]).sum()

    first = Trainer(make_training(loss=loss))
    first.step()
    first.step()
    assert first.nondeterministic_ops.operations == ["put_"]
    second = Trainer(make_training())
    second.step()
    assert second.nondeterministic_ops.operations == []
    second.load_state_dict(first.state_dict())
    assert second.nondeterministic_ops.operations == ["put_"]
