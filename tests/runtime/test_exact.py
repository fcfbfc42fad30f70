"""Exact mode: any owners and any resizes give the bits of a plain loop."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.core.errors import InputError
from carpool.runtime.engine.forward_backward import Contributions
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import StepDone, Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.state.digest import digest
from carpool.testing import plain_loop

Owners = list[range]


def owners(*sizes: int) -> Owners:
    return list(itertools.starmap(range, itertools.pairwise(itertools.accumulate(sizes, initial=0))))


def shared_step(trainer: Trainer, owned: Owners) -> StepDone:
    """One step as several processes make it: each owner contributes, then all is summed."""
    step = trainer.next_step()
    gathered: Contributions = []
    for pieces in reversed(owned):  # who is first must not matter
        gathered = [*trainer.contribute(step, pieces), *gathered]
    total = trainer.combine(step, gathered)
    done = trainer.advance(step, trainer.apply(step, total))
    if trainer.evaluation_due:
        trainer.record_metrics(trainer.evaluate())
    return done


def trained(training: Training, choose: Any) -> tuple[str, list[float]]:
    trainer = Trainer(training, exact=True, shards=8)
    losses = []
    while not trainer.stop_reason:
        losses.append(shared_step(trainer, choose()).loss)
    return digest(training.model), losses


OWNERSHIPS = {
    "1": owners(8),
    "2": owners(4, 4),
    "3": owners(3, 3, 2),
    "5": owners(2, 1, 2, 1, 2),
    "8": owners(*[1] * 8),
    "1+7": owners(1, 7),
    "7+1": owners(7, 1),
    "none for the second": owners(5, 0, 3),
}


@pytest.mark.parametrize("owned", OWNERSHIPS.values(), ids=OWNERSHIPS)
def test_any_number_of_owners_gives_the_bits_of_the_plain_loop(make_training: Any, owned: Owners) -> None:
    plain = plain_loop(make_training(), shards=8)
    assert trained(make_training(), lambda: owned) == (plain.digest, plain.losses)


def test_random_resizes_give_the_same_bits(make_training: Any) -> None:
    chance = random.Random(5)

    def resize() -> Owners:
        edges = sorted(chance.choices(range(9), k=chance.randint(0, 7)))
        return list(itertools.starmap(range, itertools.pairwise([0, *edges, 8])))

    plain = plain_loop(make_training(stop=Stop(steps=9)), shards=8)
    for _ in range(3):
        assert trained(make_training(stop=Stop(steps=9)), resize) == (plain.digest, plain.losses)


def test_the_number_of_shards_changes_the_bits(make_training: Any) -> None:
    assert plain_loop(make_training(), shards=8).digest != plain_loop(make_training(), shards=4).digest


def token_loss(model: nn.Module, batch: Any) -> Any:
    each = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    counts = batch[1] > 0  # class 0 stands for padding
    return each[counts].sum(), counts.sum()


class Sometimes(nn.Module):
    """Has a parameter that most batches do not use, constant and counting buffers, and a buffer it replaces."""

    table: torch.Tensor
    calls: torch.Tensor
    last: torch.Tensor
    first: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.rare = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.rand(3) / 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("first", torch.zeros((), dtype=torch.int32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.first = (inputs[0, 0].detach() * 1e6).to(torch.int32)  # another in every shard: that of shard 0 counts
        self.last = 0.9 * self.last + 0.1 * inputs.mean()
        outputs: torch.Tensor = self.body(inputs) * self.table
        return outputs * self.rare if inputs[0, 0] > 1.0 else outputs


CASES: dict[str, dict[str, Any]] = {
    "sum and count": {"loss": token_loss},
    "momentum, clip, schedule": {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=1e-2, nesterov=True),
        "schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        "clip_norm": 0.1,
    },
    "schedule by epoch": {
        "schedule": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        "schedule_every": "epoch",
    },
    "schedule by what evaluations find": {
        "schedule": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1),
        "schedule_every": "evaluation",
        "evaluate": lambda model: {"loss": 1.0},  # never better than before
        "best": "min loss",
    },
    "bf16": {"autocast": "bf16"},
    "augmented": {"augment": lambda batch, chance: (batch[0] + chance.uniform(6), batch[1])},
    "float64": {
        "model": nn.Linear(6, 3).double(),
        "loss": lambda m, b: nn.functional.cross_entropy(m(b[0].double()), b[1]),
    },
    "bfloat16 weights": {
        "model": nn.Linear(6, 3).bfloat16(),
        "loss": lambda m, b: nn.functional.cross_entropy(m(b[0].bfloat16()), b[1]),
    },
}


class Turned(nn.Module):
    """Complex weights, a complex running mean, and a buffer whose elements all lie in one place."""

    mean: Tensor
    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.cfloat))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.cfloat))
        self.register_buffer("one", torch.ones(()).expand(6))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = (inputs * self.one).to(torch.cfloat) @ self.weight
        self.mean.lerp_(outputs.detach().mean(0), 0.1)
        return (outputs - self.mean).abs()


CASES["complex, expanded"] = {"model": Turned()}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("owned", [owners(8), owners(3, 1, 4)], ids=["1", "3"])
def test_every_option_keeps_the_bits(make_training: Any, changes: dict[str, Any], owned: Owners) -> None:
    start = {k: v.clone() for k, v in changes["model"].state_dict().items()} if "model" in changes else {}
    plain = plain_loop(make_training(**changes), shards=8)
    if start:
        changes["model"].load_state_dict(start)
    assert trained(make_training(**changes), lambda: owned) == (plain.digest, plain.losses)


def test_odd_models_keep_the_bits(make_training: Any) -> None:
    def build() -> Training:
        torch.manual_seed(1)
        made: Training = make_training(model=Sometimes(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
        return made

    first = build()
    table = first.model.get_buffer("table").clone()
    plain = plain_loop(first, shards=8)
    for owned in (owners(8), owners(1, 5, 2)):
        training = build()
        assert trained(training, lambda owned=owned: owned) == (plain.digest, plain.losses)
        assert torch.equal(training.model.get_buffer("table"), table), "a constant buffer is not rounded"
        assert int(training.model.get_buffer("calls")) == 6, "an integer buffer counts steps, not shards"


def test_fewer_samples_than_shards(make_training: Any) -> None:
    """The last batch of the epoch holds 4 samples: shards 0, 2, 4 and 6 are empty."""
    changes: dict[str, Any] = {"batch_norm": False, "num_samples": 40, "stop": Stop(epochs=3)}
    plain = plain_loop(make_training(**changes), shards=8)
    for owned in (owners(8), owners(1, 7), owners(5, 3)):
        assert trained(make_training(**changes), lambda owned=owned: owned) == (plain.digest, plain.losses)


def test_one_shard_is_one_device_in_default_mode(make_training: Any) -> None:
    default, one = (Trainer(make_training(), exact=exact, shards=1) for exact in (False, True))
    with torch.random.fork_rng():
        torch.set_num_threads(1)
        assert [d.loss for d in default.steps()] == [d.loss for d in one.steps()]
    assert digest(default.training.model) == digest(one.training.model)


def test_a_failed_pass_leaves_the_trainer_unchanged(make_training: Any) -> None:
    broken = {"at": 2}

    def loss(model: nn.Module, batch: Any) -> Any:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if broken["at"] == 0:
            broken["at"] = -1
            raise OSError("the device fell off")
        broken["at"] -= 1
        return value

    trainer = Trainer(make_training(loss=loss), exact=True)
    before = digest(trainer.training.model)
    with pytest.raises(OSError, match="fell off"):
        trainer.step()
    assert digest(trainer.training.model) == before
    assert all(parameter.grad is None for parameter in trainer.training.model.parameters())
    for _ in trainer.steps():
        pass
    assert digest(trainer.training.model) == plain_loop(make_training(), shards=8).digest


@pytest.mark.parametrize(
    ("changes", "shards", "message"),
    [
        ({"batch_size": 10}, 8, r"a batch has 10 samples;.* 8 shards.* BatchNorm \(1\)"),
        ({"batch_size": 30}, 8, r"the last batch of an epoch has 10 samples;.* 8 shards.* BatchNorm \(1\)"),
    ],
)
def test_shards_too_small_for_batch_norm_are_rejected(
    make_training: Any, changes: dict[str, Any], shards: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Trainer(make_training(**changes), exact=True, shards=shards)
    Trainer(make_training(**changes, batch_norm=False), exact=True, shards=shards)
    Trainer(make_training(**changes), exact=False)


def test_frozen_batch_norm_takes_no_statistics(make_training: Any) -> None:
    training = make_training(batch_size=12)
    training.model[1].eval()
    trainer = Trainer(training, exact=True)
    trainer.step()
    assert training.model[1].running_mean.abs().sum() == 0


def test_a_batch_size_that_makes_shards_too_small_is_rejected(make_training: Any) -> None:
    trainer = Trainer(make_training(), exact=True, shards=8)
    trainer.step()
    with pytest.raises(InputError, match="4 samples"):
        trainer.resize_batch(60)  # 64 are left in this epoch
    trainer.resize_batch(64)
    assert trainer.step().num_samples == 64
    with pytest.raises(InputError, match=r"batch size 101;.*100 samples"):
        trainer.resize_batch(101)


def test_a_shard_is_computed_by_one_thread(make_training: Any) -> None:
    seen = []

    def loss(model: nn.Module, batch: Any) -> Any:
        seen.append(torch.get_num_threads())
        return model(batch[0]).sum()

    torch.set_num_threads(2)
    Trainer(make_training(loss=loss), exact=True, shards=2).step()
    assert torch.get_num_threads() == 2, "others in the process keep theirs"
    Trainer(make_training(loss=loss)).step()
    assert seen == [1, 1, 2]
