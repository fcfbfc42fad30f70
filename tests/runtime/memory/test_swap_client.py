"""Swap orders of a worker."""

from __future__ import annotations

from collections.abc import Callable

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.device_state import new_device_state
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.protocol import Message, SwapIn, SwapOut, SwappedOut
from carpool.runtime.state.digest import digest

MakeTraining = Callable[..., Training]


def test_a_finished_training_is_swapped_out_and_stays_readable(make_training: MakeTraining) -> None:
    plain, trainer = Trainer(make_training(seed=3)), Trainer(make_training(seed=3))
    sent: list[Message] = []
    device_state = new_device_state(trainer, tolerant=False)
    swap = SwapClient(device_state, sent.append)
    for _ in range(3):
        plain.step()
        swap.await_state()
        trainer.step()
        swap.enter_region()
    swap.handle(SwapOut(wholly=False))
    swap.swap_out()
    assert not device_state.has_state
    swap.swap_out_if_ordered()
    assert sent == [SwappedOut(wholly=True)], "the pending order is dropped"
    with swap.readable():
        assert digest(trainer.training.model) == digest(plain.training.model)


def test_a_state_outside_the_region_is_not_swapped_out(make_training: MakeTraining) -> None:
    sent: list[Message] = []
    trainer = Trainer(make_training())
    swap = SwapClient(new_device_state(trainer, tolerant=False), sent.append)
    swap.swap_out()
    assert sent == []
    with swap.readable():
        digest(trainer.training.model)


def test_a_state_can_be_swapped_in_before_its_scratch(make_training: MakeTraining) -> None:
    device_state = new_device_state(trainer := Trainer(make_training()), tolerant=False)
    swap = SwapClient(device_state, lambda message: None)
    trainer.step()
    swap.enter_region()
    swap.handle(SwapOut(wholly=True))
    swap.swap_out_if_ordered()
    swap.handle(SwapIn(wholly=False))
    assert (device_state.has_state, device_state.has_scratch) == (True, False)
    swap.swap_in()
    assert device_state.has_scratch
