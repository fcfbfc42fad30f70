"""The normalized form of an optimizer, and updates of ranges of parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from carpool.runtime.engine.determinism import intra_op_threads
from carpool.runtime.engine.optimizer_step import _ELEMENTWISE, normalize_optimizer
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest
from carpool.runtime.state.tensor_file import pack, unpack
from tests.runtime.fake_capture import with_graphs

CPU = torch.device("cpu")

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.01 * (1 + i)} for i, q in enumerate(p)]),
}


def trained(training: Any, ranges: tuple[range, ...]) -> tuple[str, list[Any]]:
    trainer = Trainer(training)
    while not trainer.stop_reason:
        step = trainer.next_step()
        total = trainer.combine(step, trainer.contribute(step, range(1)))
        sums = [trainer.apply(step, total, parameters) for parameters in ranges]
        trainer.advance(step, sums[0])
    return digest(training.model), [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for state in training.whole_optimizer.state_dict()["state"].values()
        for value in state.values()
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updating_ranges_equals_updating_all(make_training: Any, optimizer: Any) -> None:
    changes = {"optimizer": optimizer, "clip_norm": 0.1}
    whole = trained(make_training(**changes), (range(6),))
    for ranges in ((range(2), range(2, 6)), tuple(range(i, i + 1) for i in reversed(range(6)))):
        digest_in_ranges, states = trained(make_training(**changes), ranges)
        assert digest_in_ranges == whole[0]
        assert sorted(map(str, states)) == sorted(map(str, whole[1]))


def test_updating_a_range_changes_no_other_parameter(make_training: Any) -> None:
    trainer = Trainer(make_training())
    before = [p.detach().clone() for p in trainer.layout.parameters]
    step = trainer.next_step()
    trainer.apply(step, trainer.combine(step, trainer.contribute(step, range(1))), range(1, 3))
    same = [torch.equal(p, old) for p, old in zip(trainer.layout.parameters, before, strict=True)]
    assert same == [True, False, False, True, True, True]


def test_the_sum_of_a_step_is_not_modified(make_training: Any) -> None:
    trainer = Trainer(make_training(clip_norm=0.01))
    step = trainer.next_step((20, 16))
    total = trainer.combine(step, trainer.contribute(step, range(2)))
    before = total.values.clone()
    trainer.apply(step, total)
    assert torch.equal(total.values, before)


def test_frozen_parameters_and_those_outside_the_optimizer_are_not_updated(make_training: Any) -> None:
    training = make_training(optimizer=lambda p: torch.optim.SGD(list(p)[1:], lr=0.1))
    training.model[4].bias.requires_grad_(False)
    trainer = Trainer(training)
    kept = [training.model[0].weight.detach().clone(), training.model[4].bias.detach().clone()]
    trainer.step()
    assert trainer.layout.names == ["0.bias", "1.weight", "1.bias", "4.weight"]
    assert torch.equal(training.model[0].weight, kept[0])
    assert torch.equal(training.model[4].bias, kept[1])


def test_gradients_have_the_memory_format_of_channels_last_weights(make_training: Any) -> None:
    conv = torch.nn.Conv2d(3, 4, 3)
    model = torch.nn.Sequential(conv, torch.nn.Flatten())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training = make_training(
        model=model, loss=lambda m, b: m(b[0][:, :, None, None].expand(-1, -1, 3, 3)[:, :3]).mean()
    )
    trainer = Trainer(training)
    views = trainer.layout.gradient_views(trainer.layout.new().values)
    assert views[0].stride() == conv.weight.stride() != (27, 9, 3, 1)
    trainer.step()


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam])
def test_a_loaded_state_has_the_memory_format_of_the_weights(make_training: Any, optimizer: Any) -> None:
    def made() -> Trainer:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
        loss = {"loss": lambda m, b: m(b[0][:, :, None, None].expand(-1, -1, 3, 3)[:, :3]).square().mean()}
        training = make_training(model=model, optimizer=optimizer, **loss)
        return Trainer(replace(training, channels_last=True))

    one, other = made(), made()
    one.step()
    other.load_state_dict(unpack(b"".join(pack(one.state_dict())), "a file"))
    for trainer in (one, other):
        for parameter, state in trainer.training.whole_optimizer.state.items():
            alike = [value for value in state.values() if value.shape == parameter.shape]
            assert alike
            assert all(value.stride() == parameter.stride() for value in alike)
    one.step()
    other.step()
    assert digest(one.training.model) == digest(other.training.model)


def test_state_created_in_the_constructor_moves_to_the_device() -> None:
    moved = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adagrad([moved])
    optimizer.state[moved] = {"sum": torch.zeros(3), "step": torch.tensor(0.0)}  # created on the host
    normalize_optimizer(optimizer, torch.device("meta"))
    assert optimizer.state[moved]["sum"].device.type == "meta"
    assert optimizer.state[moved]["step"].device.type == "cpu"  # steps are counted on the host


def test_optimizers_are_normalized() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([weight], fused=True)
    normalize_optimizer(adam, CPU)
    group = adam.param_groups[0]
    assert (group["foreach"], group["fused"], group["capturable"], group["lr"]) == (True, None, False, 0.001)
    normalize_optimizer(adam, CPU, fused=True)
    assert (group["foreach"], group["fused"]) == (False, True)
    adam.param_groups[0] |= {"capturable": True, "lr": torch.tensor(0.5)}  # as on a GPU
    normalize_optimizer(adam, CPU)
    assert (group["capturable"], group["lr"]) == (False, 0.5)
    assert isinstance(group["lr"], float)


@pytest.mark.parametrize(
    "weight", [torch.ones(2, 3).T, torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bfloat16)]
)
def test_fused_kernels_are_used_for_contiguous_floats_only(weight: torch.Tensor) -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(weight)])
    normalize_optimizer(adam, CPU, fused=True)
    assert adam.param_groups[0]["fused"] is None


def test_fused_adam_equals_adam_within_rounding() -> None:
    made = []
    for fused in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1000))
        adam = torch.optim.Adam([weight], lr=0.1, weight_decay=0.1)
        normalize_optimizer(adam, CPU, fused=fused)
        for _ in range(5):
            weight.grad = torch.randn(1000)
            adam.step()
        made.append(weight.detach())
    assert torch.allclose(made[0], made[1], rtol=1e-5, atol=1e-6)


def test_split_steps_use_fused_kernels(make_training: Any) -> None:
    def forms(trainer: Trainer, *cuts: tuple[int, ...]) -> list[Any]:
        found = []
        for parts in cuts:
            trainer.step(parts)
            found.append(trainer.training.whole_optimizer.param_groups[0]["fused"])
        return found

    assert forms(Trainer(make_training()), (), (20, 16), (1, 1), ()) == [None, True, True, None]
    assert forms(Trainer(make_training(), exact=True), (), ()) == [None, None]
    trainer, other = Trainer(make_training()), Trainer(make_training())
    trainer.step((1, 1))
    other.load_state_dict(trainer.state_dict())
    assert forms(other, (1, 1)) == [True]


@pytest.mark.parametrize("kind", sorted(_ELEMENTWISE, key=str))
def test_elementwise_optimizers_do_not_depend_on_threads(kind: Any) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(size)) for size in (100_003, 70_001)]  # threads end within a row
        optimizer = kind(weights, lr=0.01)
        normalize_optimizer(optimizer, CPU, fused=True)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            with intra_op_threads(threads):
                optimizer.step()
        found.append(torch.cat([weight.detach() for weight in weights]))
    assert all(torch.equal(found[0], other) for other in found[1:])


class Summing(torch.optim.SGD):
    """A user's optimizer, which may sum over elements."""

    threads = 0

    def step(self, closure: Any = None) -> Any:
        Summing.threads = torch.get_num_threads()
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Summing])
def test_ranks_with_different_threads_update_alike(make_training: Any, kind: Any) -> None:
    learned = []
    for threads in (1, 3, 4):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 50_003), torch.nn.Linear(50_003, 3))
        training = make_training(model=model, optimizer=lambda p: kind(p, lr=0.1))
        trainer = Trainer(replace(training, clip_norm=1e-3))
        trainer.update.threads = 2
        with intra_op_threads(1):
            step = trainer.next_step()
            total = trainer.combine(step, trainer.contribute(step, range(1)))
        with intra_op_threads(threads):
            trainer.apply(step, total)
            assert torch.get_num_threads() == threads
        assert kind is torch.optim.SGD or Summing.threads == 2
        learned.append(digest(model))
    assert len(set(learned)) == 1


def test_large_parameters_are_updated_one_by_one_on_a_cpu() -> None:
    for sizes, together in (([1 << 18, 64], False), ([64], True), ([1 << 18, *[1 << 16] * 5], True)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(size)) for size in sizes], lr=0.1)
        normalize_optimizer(optimizer, CPU)
        assert optimizer.param_groups[0]["foreach"] is together


def steps_with_callback(training: Any) -> list[int]:
    """The steps after whose update `apply_single_pass` calls back, because no user code follows."""
    trainer, called = Trainer(training), []
    weight = training.model[0].weight
    while not trainer.stop_reason:
        step, before = trainer.next_step(), weight.detach().clone()

        def then(number: int = step.number, before: torch.Tensor = before) -> None:
            assert not torch.equal(weight, before), "the update has been made"
            assert weight.grad is not None, "before the gradients are cleared"
            called.append(number + 1)

        trainer.advance(step, trainer.apply_single_pass(step, trainer.single_pass(step), then))
        if trainer.evaluation_due:
            trainer.record_metrics(trainer.evaluate())
    return called


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"evaluate": lambda model: 0.0}, [1, 2, 4, 5]),  # after each epoch
        ({"evaluate": lambda model: 0.0, "stop": Stop(steps=5), "evaluate_every": 9}, [1, 2, 3, 4]),  # at the end
        ({"evaluate": lambda model: 0.0, "stop": Stop(target_loss=99.0, window=2), "evaluate_every": 9}, [1]),
        ({"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 1), "schedule_every": "step"}, []),
        ({"after_update": lambda model, step: None}, []),
    ],
)
def test_the_update_calls_back_if_no_user_code_follows(
    make_training: Any, changes: dict[str, Any], steps: list[int]
) -> None:
    assert steps_with_callback(make_training(**changes)) == steps


def test_a_captured_update_calls_back_once_it_is_verified(make_training: Any) -> None:
    trainer, capture, _ = with_graphs(make_training(batch_size=50, stop=Stop(steps=12)))
    called: list[tuple[int, int]] = []
    while not trainer.stop_reason:
        step = trainer.next_step()
        loss = trainer.single_pass(step)

        def then(number: int = step.number) -> None:
            called.append((number + 1, capture.replays))

        trainer.advance(step, trainer.apply_single_pass(step, loss, then))
    assert len(called) == len({number for number, _ in called}), "once per step"
    assert called[-1] == (12, capture.replays), "after the replay"
    assert len(called) < 12, "not while it is verified"
