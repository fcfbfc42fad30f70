"""Shards side by side in several processes: the bits of one, whatever becomes of the others."""

from __future__ import annotations

import copy
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from carpool.runtime import beside, twins
from carpool.runtime.datasets.tensors import TensorData
from carpool.runtime.digest import digest
from carpool.runtime.goals import Stop
from carpool.runtime.room import make_room
from carpool.runtime.trainer import Trainer
from carpool.runtime.training import Training
from carpool.testing import plain_loop


def living() -> list[int]:
    """The twins that this process has, and who tries passes for them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() for pid in children.split()}
    return [pid for pid, name in names.items() if name in {"carpool-twin", "carpool-repeat"}]


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
    trainer.beside.meet(cores)
    return trainer


def begin(trainer: Trainer) -> None:
    """Make three steps: one on one core while passes are tried, and in the last all twins have answered for another."""
    for _ in range(3):
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
    """All three wait for each other in a pass: who is alone would wait for ever."""
    came = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)  # one place for each process: nobody adds up
    is_wanted = shared_number()

    def meet(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        came[os.getpid() % 4096] = 1
        until = time.monotonic() + 60.0
        while is_wanted and int(came.sum()) < 3:
            assert time.monotonic() < until, "the others do not come"
            os.sched_yield()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = side_by_side(make_training(loss=meet, stop=Stop(steps=3)), 3)
    trainer.step()  # on one core, while passes are repeated elsewhere
    trainer.step()  # now that this is through, by all three
    came.zero_()
    is_wanted.fill_(1)
    learned(trainer)
    assert int(came.sum()) == 3


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
        assert kept[-1] == {first}
        assert os.sched_getaffinity(0) == {first, second}
        learned(trainer)
    finally:
        os.sched_setaffinity(0, before)


def annealed(make_training: Any) -> Training:
    """A training whose loss looks at its learning rate, which falls from step to step, and at its schedule."""
    training: Training = make_training()
    optimizer = training.optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weight: float = optimizer.param_groups[0]["lr"] / (1.0 + schedule.last_epoch)
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1.0 + weight)

    return replace(training, loss=loss, schedule=schedule, schedule_every="step")


def test_a_loss_that_looks_at_learning_rate_and_schedule_sees_those_of_the_step(make_training: Any) -> None:
    trainer = side_by_side(annealed(make_training), 3)
    begin(trainer)
    assert len(living()) == 2
    assert learned(trainer) == plain_loop(annealed(make_training), shards=8).digest


class NoisyAdam(torch.optim.Adam):
    """Adds some noise to all weights after an update."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def noisy(make_training: Any) -> Training:
    training: Training = make_training(optimizer=NoisyAdam)
    return training


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_what_an_optimizer_draws_does_not_hang_on_who_passed_what(make_training: Any, cores: int) -> None:
    assert learned(side_by_side(noisy(make_training), cores)) == plain_loop(noisy(make_training), shards=8).digest


def cooling(make_training: Any) -> Training:
    """A temperature that the loss divides by falls after every update, and weights shrink then and get some noise."""
    at = [4.0]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]) / at[0], batch[1])

    def after_update(model: nn.Module, step: int) -> None:
        at[0] *= 0.9
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 - 0.01 * step).add_(torch.randn_like(parameter), alpha=1e-3)

    training: Training = make_training(loss=loss, after_update=after_update)
    return training


class Kept:
    """State of the user's own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def kept(make_training: Any) -> Training:
    training: Training = make_training(state={"own": Kept()})
    return training


def averaged(make_training: Any) -> Training:
    """The loss draws outputs to those of an average of the weights, which a hook of the optimizer keeps."""
    average: list[nn.Module] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        wanted = average[0](batch[0]).detach()
        return nn.functional.cross_entropy(outputs, batch[1]) + nn.functional.mse_loss(outputs, wanted)

    training: Training = make_training(loss=loss, batch_norm=False)
    average.append(copy.deepcopy(training.model))

    def follow(*_: object) -> None:
        for old, new in zip(average[0].parameters(), training.model.parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)

    training.optimizer.register_step_post_hook(follow)
    return training


def foreign(make_training: Any) -> Training:
    training: Training = make_training()
    assert isinstance(training.dataset, TensorData)
    return replace(training, dataset=torch.utils.data.TensorDataset(*training.dataset.tensors))


class Counting(nn.Module):
    """Warms up over its first passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        outputs: Tensor = self.layers(inputs)
        return outputs * min(1.0, self.passes / 100)


def counting(make_training: Any) -> Training:
    torch.manual_seed(0)
    training: Training = make_training(model=Counting())
    return training


def drawing(make_training: Any) -> Training:
    """A loss that has a generator of its own."""
    chance = torch.Generator().manual_seed(7)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=chance)
        return nn.functional.cross_entropy(model(inputs), batch[1])

    training: Training = make_training(loss=loss)
    return training


def looking_back(make_training: Any) -> Training:
    """A loss that looks at what the optimizer remembers."""
    training: Training = make_training(optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    optimizer = training.optimizer

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        total = nn.functional.cross_entropy(model(batch[0]), batch[1])
        for weight in model.parameters():
            if (momentum := optimizer.state[weight].get("momentum_buffer")) is not None:
                total = total + 0.01 * (momentum * weight).sum()
        return total

    return replace(training, loss=loss)


@pytest.mark.parametrize("make", [cooling, kept, averaged, foreign, counting, drawing, looking_back])
def test_where_code_of_the_user_has_a_say_in_more_than_a_pass_all_keep_to_one_core(
    make_training: Any, make: Callable[[Any], Training]
) -> None:
    trainer = side_by_side(make(make_training), 3)
    begin(trainer)
    assert not living()
    (words,) = trainer.take_news()
    assert words.startswith("shards are passed on one core of the device: ")
    assert learned(trainer) == plain_loop(make(make_training), shards=8).digest


def test_where_all_cores_are_used_there_is_nothing_to_tell(make_training: Any) -> None:
    trainer = side_by_side(make_training(), 3)
    learned(trainer)
    assert not trainer.take_news()


def test_what_hangs_while_it_is_tried_is_done_without(make_training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "PATIENCE_S", 0.0)
    home = os.getpid()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        while os.getpid() != home:
            signal.pause()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = side_by_side(make_training(loss=loss), 3)
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest
    (words,) = trainer.take_news()
    assert "could not pass a shard" in words


def test_a_loaded_state_and_a_new_formation_end_twins(make_training: Any) -> None:
    plain = plain_loop(make_training(stop=Stop(steps=12)), shards=8)
    trainer = side_by_side(make_training(stop=Stop(steps=12)), 3)
    trainer.step()
    early = copy.deepcopy(trainer.state_dict())
    begin(trainer)
    trainer.load_state_dict(early)
    assert not living()
    begin(trainer)
    assert trainer.beside is not None
    trainer.beside.meet(2)
    assert not living()
    begin(trainer)
    assert len(living()) == 1
    make_room(trainer)
    begin(trainer)
    assert not living()
    assert learned(trainer) == plain.digest


def test_where_contributions_would_fill_the_memory_all_keep_to_one_core(
    make_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "available_bytes", lambda: 4096)
    trainer = side_by_side(make_training(), 3)
    begin(trainer)
    assert not living()


@pytest.mark.parametrize("allowed", [0, 1])
def test_what_the_system_does_not_allow_is_done_without(
    make_training: Any, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    fork, left = os.fork, iter([True] * (1 + allowed))  # the first tries passes

    def limited() -> int:
        if not next(left, False):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    trainer = side_by_side(make_training(), 3)
    begin(trainer)
    assert len(living()) == allowed
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_twin_that_dies_or_hangs_in_a_pass_changes_nothing(
    make_training: Any, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    monkeypatch.setattr(twins, "PATIENCE_S", 0.2)
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
    begin(trainer)
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
    assert trainer.take_news() == ["1 of 2 processes that passed shards beside the worker died, failed or hung"]
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


def test_an_error_of_the_user_shows_as_it_is_and_the_step_can_be_made_again(make_training: Any) -> None:
    is_wrong = shared_number()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if is_wrong:
            raise ArithmeticError("of the user")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    trainer = side_by_side(make_training(loss=loss), 3)
    begin(trainer)
    is_wrong.fill_(1)
    with pytest.raises(ArithmeticError, match="of the user"):
        trainer.step()
    assert not living()
    is_wrong.zero_()
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest


def test_a_rank_with_few_shards_or_none_keeps_its_twins_informed(make_training: Any) -> None:
    trainer = side_by_side(annealed(make_training), 3)
    assert trainer.beside is not None
    for count in (8, 1, 0, 1, 8, 8):
        step = trainer.begin()
        gathered = [*trainer.contribute(step, range(count)), *trainer.contribute(step, range(count, 8))]
        trainer.advance(step, trainer.apply(step, trainer.combine(step, gathered)))
    assert learned(trainer) == plain_loop(annealed(make_training), shards=8).digest


def test_trainings_that_read_ahead_keep_to_one_process(make_training: Any) -> None:
    tensors = make_training().dataset.tensors
    rows = torch.utils.data.TensorDataset(*tensors)
    trainer = side_by_side(make_training(dataset=rows, workers=1), 3)
    trainer.step()
    assert not living()
    assert learned(trainer) == plain_loop(make_training(), shards=8).digest
