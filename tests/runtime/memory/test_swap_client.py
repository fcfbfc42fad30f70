"""A worker whose memory comes and goes with its turns."""

from __future__ import annotations

from collections.abc import Callable

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.device_state import device_state_of
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.protocol import Message, SwapIn, SwapOut, SwappedOut
from carpool.runtime.state.digest import digest

MakeTraining = Callable[..., Training]


def test_who_is_through_leaves_at_once_and_can_still_be_read(make_training: MakeTraining) -> None:
    plain, trainer = Trainer(make_training(seed=3)), Trainer(make_training(seed=3))
    said: list[Message] = []
    residence = device_state_of(trainer, loosely=False)
    lodger = SwapClient(residence, said.append)
    for _ in range(3):
        plain.step()
        lodger.enter_wholly()
        trainer.step()
        lodger.settle()
    lodger.hear(SwapOut(wholly=False))
    lodger.part()
    assert not residence.is_in
    lodger.make_way()
    assert said == [SwappedOut(wholly=True)], "nothing is left of what it was told before"
    with lodger.readable():
        assert digest(trainer.training.model) == digest(plain.training.model)


def test_who_ends_before_it_has_settled_has_nothing_to_give_back(make_training: MakeTraining) -> None:
    said: list[Message] = []
    trainer = Trainer(make_training())
    lodger = SwapClient(device_state_of(trainer, loosely=False), said.append)
    lodger.part()
    assert said == []
    with lodger.readable():
        digest(trainer.training.model)


def test_a_state_comes_before_its_scratch_where_it_is_told_so(make_training: MakeTraining) -> None:
    residence = device_state_of(trainer := Trainer(make_training()), loosely=False)
    lodger = SwapClient(residence, lambda message: None)
    trainer.step()
    lodger.settle()
    lodger.hear(SwapOut(wholly=True))
    lodger.make_way()
    lodger.hear(SwapIn(wholly=False))
    assert (residence.is_in, residence.has_scratch) == (True, False)
    lodger.come()
    assert residence.has_scratch
