"""Shards side by side in several processes: the bits of one, whatever becomes of the others."""

from __future__ import annotations

import copy
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.runtime import twins
from carpool.runtime.digest import digest
from carpool.runtime.goals import Stop
from carpool.runtime.trainer import Trainer
from carpool.runtime.training import Training
from carpool.testing import plain_loop


def living() -> list[int]:
    """The twins that this process has."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() for pid in children.split()}
    return [pid for pid, name in names.items() if name == "carpool-twin"]


def shared_number() -> Tensor:
    """A zero that all processes forked from now on have in common."""
    return torch.frombuffer(mmap.mmap(-1, 8), dtype=torch.int64)


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert not living()


def side_by_side(training: Training, cores: int, **options: Any) -> Trainer:
    trainer = Trainer(training, exact=True, shards=8, **options)
    assert trainer.beside is not None
    trainer.beside.cores = cores
    return trainer


def begin(trainer: Trainer) -> None:
    """Make two steps: in the second all twins have answered for the first."""
    trainer.step()
    trainer.step()


def learned(trainer: Trainer) -> str:
    assert trainer.beside is not None
    try:
        for _ in trainer.steps():
            pass
    finally:
        trainer.beside.end()
    return digest(trainer.training.model)


@pytest.mark.parametrize("cores", [2, 3, 20])
def test_any_number_of_cores_gives_the_bits_of_the_plain_loop(make_training: Any, cores: int) -> None:
    trainer = side_by_side(make_training(), cores)
    begin(trainer)
    assert len(living()) == min(cores, 8) - 1
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


def test_twins_pass_shards(make_training: Any) -> None:
    """All but one wait for each other in a pass: who is alone would wait for ever."""
    met = shared_number()

    def meet(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        met.add_(1)
        while int(met) < 3:
            os.sched_yield()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = side_by_side(make_training(loss=meet, stop=Stop(steps=1)), 3)
    learned(trainer)
    assert int(met) == 8


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_where_every_process_can_have_a_core_each_keeps_to_one_in_its_passes(make_training: Any) -> None:
    before, kept = os.sched_getaffinity(0), []
    first, second = sorted(before)[:2]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        kept.append(os.sched_getaffinity(0))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    os.sched_setaffinity(0, {first, second})
    try:
        trainer = side_by_side(make_training(loss=loss), 2)
        begin(trainer)
        assert [os.sched_getaffinity(twin) for twin in living()] == [{second}]
        assert kept[0] == {first}
        assert os.sched_getaffinity(0) == {first, second}
        learned(trainer)
    finally:
        os.sched_setaffinity(0, before)


class Cooling:
    """A temperature that the loss divides by, and that falls after every update; it also shrinks the weights."""

    def __init__(self) -> None:
        self.at = 4.0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]) / self.at, batch[1])

    def after_update(self, model: nn.Module, step: int) -> None:
        self.at *= 0.9
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 - 0.01 * step)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def cooling(make_training: Any) -> Training:
    made = Cooling()
    training: Training = make_training(loss=made.loss, after_update=made.after_update, state={"cooling": made})
    return training


def test_hooks_of_the_user_are_followed_and_a_loaded_state_is_too(make_training: Any) -> None:
    plain = plain_loop(cooling(make_training), shards=8)
    trainer = side_by_side(cooling(make_training), 3)
    trainer.step()
    early = copy.deepcopy(trainer.state_dict())
    trainer.step()
    trainer.step()
    trainer.load_state_dict(early)
    assert not living()
    assert learned(trainer) == plain.digest


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_twin_that_dies_or_hangs_in_a_pass_changes_nothing(
    make_training: Any, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    monkeypatch.setattr(twins, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(twins, "_TIMES", 0.0)
    home, struck = os.getpid(), shared_number()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        while os.getpid() == home and int(struck) < 0:
            os.sched_yield()  # until a twin has a piece
        if int(struck) < 0:
            struck.fill_(os.getpid())
            os.kill(os.getpid(), sign)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = side_by_side(make_training(loss=loss), 2)
    trainer.step()
    struck.fill_(-1)
    trainer.step()
    assert int(struck) > 0
    assert int(struck) not in living()
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


def test_a_twin_that_dies_between_steps_changes_nothing(make_training: Any) -> None:
    trainer = side_by_side(make_training(), 3)
    begin(trainer)
    first, second = living()
    os.kill(first, signal.SIGKILL)
    trainer.step()
    trainer.step()  # by now it is missed
    assert living() == [second]
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


def test_an_error_of_the_user_shows_as_it_is_and_the_step_can_be_made_again(make_training: Any) -> None:
    is_wrong = shared_number()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if is_wrong:
            raise ArithmeticError("of the user")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = side_by_side(make_training(loss=loss), 3)
    trainer.step()
    is_wrong.fill_(1)
    with pytest.raises(ArithmeticError, match="of the user"):
        trainer.step()
    assert not living()
    is_wrong.zero_()
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


def test_a_rank_with_few_shards_or_none_keeps_its_twins_informed(make_training: Any) -> None:
    trainer = side_by_side(cooling(make_training), 3)
    assert trainer.beside is not None
    for count in (8, 1, 0, 1, 8, 8):
        step = trainer.begin()
        gathered = [*trainer.contribute(step, range(count)), *trainer.contribute(step, range(count, 8))]
        trainer.advance(step, trainer.apply(step, trainer.combine(step, gathered)))
    trainer.beside.end()
    assert digest(trainer.training.model) == plain_loop(cooling(make_training), shards=8).digest


def test_trainings_that_read_ahead_keep_to_one_process(make_training: Any) -> None:
    tensors = make_training().dataset.tensors
    rows = torch.utils.data.TensorDataset(*tensors)
    trainer = side_by_side(make_training(dataset=rows, workers=1), 3)
    trainer.step()
    assert not living()
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest
