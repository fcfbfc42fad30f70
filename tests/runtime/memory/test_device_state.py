"""Swapping a training's state out of device memory and in again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from carpool.runtime.compat.vmm import HostRegion
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.memory.device_state import DeviceState, new_device_state
from carpool.runtime.state.digest import digest

MakeTraining = Callable[..., Training]


def test_a_swapped_training_is_unchanged_bit_for_bit(make_training: MakeTraining) -> None:
    plain, swapped = Trainer(make_training(seed=3)), Trainer(make_training(seed=3))
    device_state = new_device_state(swapped, tolerant=False)
    for number in range(6):
        plain.step()
        device_state.swap_in()
        device_state.await_weights()
        device_state.await_state()
        device_state.mark_dirty()
        swapped.step()
        device_state.enter_region()
        weight = next(swapped.training.model.parameters())
        address = weight.data_ptr()
        device_state.swap_out(include_state=number % 2 == 0)
        if number % 2 == 0:
            assert not weight.detach().any(), "its pages are freed"
            assert address == weight.data_ptr()
            with device_state.readable():
                assert digest(swapped.training.model) == digest(plain.training.model)
    device_state.swap_in()
    assert digest(swapped.training.model) == digest(plain.training.model)
    assert [*swapped.progress.losses] == [*plain.progress.losses]


def test_a_clean_state_is_not_copied_out_again(make_training: MakeTraining) -> None:
    trainer = Trainer(make_training())
    device_state = new_device_state(trainer, tolerant=False)
    trainer.step()
    device_state.enter_region()
    device_state.swap_out(include_state=True)
    device_state.swap_in()
    weight = next(trainer.training.model.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()  # without mark_dirty: the old host copy is kept
    device_state.swap_out(include_state=True)
    device_state.swap_in()
    assert torch.equal(weight, kept)


def test_another_state_can_be_loaded_after_a_swap(make_training: MakeTraining) -> None:
    first, second = Trainer(make_training()), Trainer(make_training())
    device_state = new_device_state(second, tolerant=False)
    for trainer in (first, second):
        trainer.step()
    device_state.enter_region()
    device_state.swap_out(include_state=True)
    first.step()
    device_state.leave_region()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    device_state.enter_region()
    device_state.swap_out(include_state=True)
    device_state.swap_in()
    for trainer in (first, second):
        trainer.step()
    assert digest(first.training.model) == digest(second.training.model)


def test_memory_outside_torch_is_counted(make_training: MakeTraining) -> None:
    trainer = Trainer(make_training())
    counted: list[int] = []
    state = HostRegion()
    device_state = DeviceState(trainer, state, None, counted.append)
    device_state.leave_region()
    for _ in range(2):
        trainer.step()
        device_state.enter_region()
        assert sum(counted) == state.size > 0
        device_state.leave_region()
        assert sum(counted) == 0
