"""A training's memory that leaves and comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from carpool.runtime.compat.vmm import HostRegion
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.device_state import DeviceState, device_state_of
from carpool.runtime.state.digest import digest

MakeTraining = Callable[..., Training]


def test_a_parked_training_goes_on_bit_for_bit(make_training: MakeTraining) -> None:
    plain, parked = Trainer(make_training(seed=3)), Trainer(make_training(seed=3))
    residence = device_state_of(parked, loosely=False)
    for number in range(6):
        plain.step()
        residence.come_back()
        residence.await_weights()
        residence.await_rest()
        residence.change()
        parked.step()
        residence.settle()
        weight = next(parked.training.model.parameters())
        address = weight.data_ptr()
        residence.leave(wholly=number % 2 == 0)
        if number % 2 == 0:
            assert not weight.detach().any(), "its pages are gone"
            assert address == weight.data_ptr()
            with residence.readable():
                assert digest(parked.training.model) == digest(plain.training.model)
    residence.come_back()
    assert digest(parked.training.model) == digest(plain.training.model)
    assert [*parked.progress.losses] == [*plain.progress.losses]


def test_what_was_not_changed_is_not_copied_out_again(make_training: MakeTraining) -> None:
    trainer = Trainer(make_training())
    residence = device_state_of(trainer, loosely=False)
    trainer.step()
    residence.settle()
    residence.leave(wholly=True)
    residence.come_back()
    weight = next(trainer.training.model.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()  # not said: what is parked is what was there when it came
    residence.leave(wholly=True)
    residence.come_back()
    assert torch.equal(weight, kept)


def test_another_state_can_be_taken_over_after_parking(make_training: MakeTraining) -> None:
    first, second = Trainer(make_training()), Trainer(make_training())
    residence = device_state_of(second, loosely=False)
    for trainer in (first, second):
        trainer.step()
    residence.settle()
    residence.leave(wholly=True)
    first.step()
    residence.unsettle()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    residence.settle()
    residence.leave(wholly=True)
    residence.come_back()
    for trainer in (first, second):
        trainer.step()
    assert digest(first.training.model) == digest(second.training.model)


def test_what_lies_beside_torchs_own_memory_is_counted_as_long_as_it_does(make_training: MakeTraining) -> None:
    trainer = Trainer(make_training())
    counted: list[int] = []
    state = HostRegion()
    residence = DeviceState(trainer, state, None, counted.append)
    residence.unsettle()
    for _ in range(2):
        trainer.step()
        residence.settle()
        assert sum(counted) == state.size > 0
        residence.unsettle()
        assert sum(counted) == 0
