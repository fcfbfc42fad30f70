"""Captured steps without a GPU: what is verified, what is rejected, and that training never changes a bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from carpool.runtime.data.batches import BatchSource, InputMode, InputPlan
from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import Diverged
from carpool.runtime.graphs.captured_step import NonStaticBatch, batch_signature, fill_static, static_copy
from carpool.runtime.graphs.verification import optimizer_tensors, tensors_equal
from carpool.runtime.state.digest import digest
from carpool.testing.reference import plain_loop
from tests.runtime.fake_capture import REPLAYED, FakeCapture, train, with_graphs

CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    "clipped": {"clip_norm": 0.1},
    "sum and count": {"loss": lambda m, b: (nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[1]))},
    "schedule": {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "schedule": lambda o: lr_scheduler.StepLR(o, 7),
    },
    "every step another rate": {"schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 12)},
    "one cycle": {"schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_captured_steps_train_the_same(make_training: Any, case: dict[str, Any]) -> None:
    stop = {"stop": Stop(epochs=6)}
    plain = train(Trainer(make_training(**case, **stop)))
    trainer, capture, graphs = with_graphs(make_training(**case, **stop))
    assert train(trainer) == plain
    assert (graphs.eager_reason, capture.replays > 18) == ("", True)  # 18 steps, most of them with two or three graphs
    assert not graphs.eager_reason
    assert not graphs.eager_update_reason


def test_an_update_that_changes_every_step_runs_eagerly(make_training: Any) -> None:
    trainer, capture, _ = with_graphs(
        make_training(batch_size=50, schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, 9))
    )
    for _ in trainer.steps():
        pass
    assert capture.captures == 2  # forward and backward


def test_replay_is_noted_once(make_training: Any) -> None:
    trainer, _, graphs = with_graphs(make_training(batch_size=50))
    for _ in range(3):
        trainer.step()
        assert all(parameter.grad is None for parameter in trainer.training.model.parameters())
    assert graphs.notes == [REPLAYED]


class Observer:
    """Records how many graphs had been replayed at each call."""

    def __init__(self, capture: FakeCapture) -> None:
        self._capture = capture
        self.calls: list[tuple[str, int, int]] = []

    def before_launch(self) -> None:
        self.calls.append(("before", self._capture.heads, self._capture.replays))

    def after_launch(self) -> None:
        self.calls.append(("after", self._capture.heads, self._capture.replays))


def test_the_observer_is_called_before_more_than_the_head_is_replayed(make_training: Any) -> None:
    trainer, capture, _ = with_graphs(make_training(batch_size=50), has_branches=True)
    for _ in range(5):
        trainer.step()
    heads, before, observer = capture.heads, capture.replays, Observer(capture)
    trainer.single_pass(trainer.next_step(), observer)
    assert observer.calls[-2:] == [("before", heads + 1, before), ("after", heads + 1, before + 2)]


def test_branches_are_noted_and_prevent_queueing_a_whole_step(make_training: Any) -> None:
    for has_branches in (False, True):
        trainer, _, graphs = with_graphs(make_training(batch_size=50), has_branches=has_branches)
        for _ in range(5):
            trainer.step()
        assert any("branches" in note for note in graphs.take_notes()) == has_branches
        assert graphs.can_queue_step != has_branches


def test_a_last_partial_batch_has_its_own_graph(make_training: Any) -> None:
    training = make_training(stop=Stop(epochs=5))
    trainer, capture, _ = with_graphs(training)
    for _ in range(12):
        trainer.step()
    capture.replays = 0
    for _ in range(3):  # two whole batches and a partial one
        trainer.step()
    assert capture.replays == 9


def host_random(model: nn.Module, batch: Any) -> Any:
    scale = 1.0 + random.random()
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) * scale


def failing_in_capture() -> Callable[..., Any]:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # after two eager calls, in the capture
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (host_random, "the pass draws random numbers on the host"),
        (
            failing_in_capture,
            "capture failed: RuntimeError: operation not permitted when stream is capturing",
        ),
    ],
)
def test_what_cannot_be_captured_runs_eagerly(make_training: Any, loss: Any, why: str) -> None:
    def fresh() -> Any:
        return loss() if loss is failing_in_capture else loss

    trainer, capture, graphs = with_graphs(make_training(loss=fresh()))
    losses = [done.loss for done in trainer.steps()]
    assert graphs.eager_reason == why
    assert [why in note for note in graphs.notes] == [True]
    assert capture.replays == 0
    usual = make_training(loss=host_random) if loss is host_random else make_training()
    plain = Trainer(usual)
    assert losses == [done.loss for done in plain.steps()]
    assert digest(trainer.training.model) == digest(plain.training.model)


def test_a_wrong_graph_is_detected_and_changes_nothing(make_training: Any) -> None:
    trainer, _, graphs = with_graphs(make_training(), error=1e-3)
    assert train(trainer) == train(Trainer(make_training()))
    assert "gradients" in graphs.eager_reason


class Counting(torch.optim.SGD):
    """Keeps a plain number that its next step depends on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_python_is_not_captured(make_training: Any) -> None:
    trainer, capture, graphs = with_graphs(make_training(optimizer=lambda p: Counting(p, lr=0.1, momentum=0.5)))
    plain = Trainer(make_training(optimizer=lambda p: Counting(p, lr=0.1, momentum=0.5)))
    assert train(trainer) == train(plain)
    assert "Counting" in graphs.eager_update_reason
    assert not graphs.eager_reason
    assert capture.replays > 0  # of passes


@pytest.mark.parametrize("steps", [0, 4])
def test_loading_a_state_keeps_graphs(make_training: Any, steps: int) -> None:
    """Also one from before the first step, where the optimizer has none."""
    first, _, _ = with_graphs(make_training(batch_size=50))
    for _ in range(steps):
        first.step()
    second, capture, graphs = with_graphs(make_training(batch_size=50))
    for _ in range(5):
        second.step()
    assert graphs.is_warmed_up
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert graphs.is_warmed_up
    capture.replays = 0
    for _ in range(5):
        first.step()
        second.step()
    assert (capture.replays > 0, capture.replays == 15) == (True, steps > 0)
    assert digest(first.training.model) == digest(second.training.model)


def test_moved_weights_drop_graphs(make_training: Any) -> None:
    training = make_training(batch_size=50)
    trainer, capture, _ = with_graphs(training)
    plain = Trainer(make_training(batch_size=50))
    for _ in range(3):
        trainer.step()
        plain.step()
    for parameter in training.model.parameters():
        parameter.data = parameter.data.clone()
    capture.replays = 0
    trainer.step()
    plain.step()
    assert capture.replays == 0
    assert digest(training.model) == digest(plain.training.model)


def test_a_nan_loss_leaves_the_model_unchanged(make_training: Any) -> None:
    inputs, labels = torch.randn(300, 6), torch.randint(0, 3, (300,))
    inputs[200:] = torch.nan
    training = make_training(dataset=TensorData(inputs, labels), batch_size=20, shuffle=False)
    trainer, capture, _ = with_graphs(training)
    for _ in range(10):
        trainer.step()
    assert capture.replays > 10
    before = digest(training.model)
    with pytest.raises(Diverged):
        trainer.step()
    assert digest(training.model) == before


def test_signatures_distinguish_batches() -> None:
    batch = {"x": torch.zeros(2, 3), "n": 4, "rest": [torch.ones(1)]}
    assert batch_signature(batch) == batch_signature({"x": torch.ones(2, 3), "n": 4, "rest": [torch.zeros(1)]})
    assert batch_signature(batch) != batch_signature({**batch, "n": 5})
    assert batch_signature(batch) != batch_signature({**batch, "x": torch.zeros(3, 2)})
    assert batch_signature(batch) != batch_signature({**batch, "x": torch.zeros(3, 2).t()})
    with pytest.raises(NonStaticBatch, match="object"):
        batch_signature([object()])
    static = static_copy(batch)
    fill_static(static, {"x": torch.full((2, 3), 7.0), "n": 4, "rest": [torch.full((1,), 8.0)]})
    assert static["x"].sum() == 42.0
    assert static["rest"][0] == 8.0
    assert batch["x"].sum() == 0.0  # type: ignore[attr-defined]


def test_rows_on_the_device_are_gathered_by_the_graph(make_training: Any) -> None:
    stop = {"stop": Stop(epochs=6)}
    plain = train(Trainer(make_training(**stop)))
    trainer, _, _ = with_graphs(make_training(**stop))
    plan = InputPlan(InputMode.ON_DEVICE, "")
    trainer._passes.batches = BatchSource(trainer.training.dataset, seed=0, plan=plan)
    fetched = []
    fetch = trainer._passes.fetch_batch

    def counted(step: Step) -> Any:
        fetched.append(step.number)
        return fetch(step)

    trainer._passes.fetch_batch = counted  # type: ignore[method-assign]
    assert train(trainer) == plain
    assert fetched == [0, 1, 2, 3, 5, 8]  # three of each size: eager, captured, verified once more


def test_augmented_or_finished_rows_are_not_gathered_by_the_graph(make_training: Any) -> None:
    data = make_training().dataset
    plan = InputPlan(InputMode.ON_DEVICE, "")
    assert BatchSource(data, seed=0, plan=plan).gather_buffer(4) is not None
    assert BatchSource(data, seed=0, plan=plan, augment=lambda batch, rng: batch).gather_buffer(4) is None
    finishing = TensorData(*data.tensors, finish=lambda rows: rows)
    assert BatchSource(finishing, seed=0, plan=plan).gather_buffer(4) is None
    assert BatchSource(data, seed=0).gather_buffer(4) is None


class Masked(nn.Module):
    """Holds a causal mask of −inf, a table with NaN, and a buffer that changes beside a −inf that does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mask: torch.Tensor
        self.seen: torch.Tensor
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("table", torch.tensor([0.1, float("nan"), float("inf")]))
        self.register_buffer("seen", torch.tensor([0.1, float("-inf")]))
        self.body = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen[0] += inputs.detach().mean()
        weights = (inputs[:, :, None] * inputs[:, None, :] + self.mask).softmax(-1)
        return self.body((weights @ inputs[:, :, None]).squeeze(-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tolerant", [False, True])
def test_buffers_with_infinities_and_nan_are_captured(make_training: Any, tolerant: bool) -> None:
    trainer, capture, graphs = with_graphs(make_training(model=Masked(), batch_size=50, stop=Stop(epochs=4)))
    if tolerant:  # as after an operation without a deterministic form, such as SDPA's backward pass on a GPU
        trainer.nondeterministic_ops.operations.append("some operation")
    for _ in trainer.steps():
        pass
    assert graphs.eager_reason == ""
    assert capture.replays > 8


def test_a_replay_that_moves_an_infinity_is_detected() -> None:
    finite, inf, nan = torch.ones(3), torch.tensor([1.0, float("inf"), 1.0]), torch.tensor([1.0, float("nan"), 1.0])
    for one, two in ((finite, inf), (inf, finite), (inf, -inf), (finite, nan), (nan, finite), (inf, nan)):
        assert not tensors_equal([one], [two])
        assert not tensors_equal([one], [two], tolerant=True)
    for same in (finite, inf, nan):
        assert tensors_equal([same], [same.clone()])
        assert tensors_equal([same], [same.clone()], tolerant=True)
    assert tensors_equal([inf], [inf + torch.tensor([1e-4, 0, 0])], tolerant=True)


@pytest.mark.parametrize("shards", [1, 4, 8])
def test_buffers_with_infinities_and_nan_are_exact(make_training: Any, shards: int) -> None:
    training = make_training(model=Masked())
    trainer = Trainer(training, exact=True, shards=shards)
    for _ in trainer.steps():
        pass
    reference = plain_loop(make_training(model=Masked()), shards=shards)
    assert digest(training.model) == reference.digest
    found = dict(training.model.named_buffers())
    for name, buffer in Masked().named_buffers():
        kept = slice(1, None) if name == "seen" else slice(None)
        assert torch.equal(found[name][kept].nan_to_num(nan=7.0), buffer[kept].nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", ["adam", "sgd", "clipped", "every step another rate"])
def test_graphs_outlive_a_return_to_the_state_before_the_first_step(make_training: Any, name: str) -> None:
    """As in each round of a federation: the state that the optimizer creates anew is put where graphs have it."""
    plain = Trainer(make_training(batch_size=50, **CASES[name]))
    trainer, capture, graphs = with_graphs(make_training(batch_size=50, **CASES[name]))
    initial = [copy.deepcopy(each.state_dict()) for each in (plain, trainer)]
    captures, tensors = [], []
    for _ in range(3):
        for each, state in zip((plain, trainer), initial, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        for _ in range(6):
            assert trainer.step().loss == plain.step().loss
        assert digest(trainer.training.model) == digest(plain.training.model)
        captures.append(capture.captures)
        tensors.append([tensor.data_ptr() for tensor in optimizer_tensors(trainer.training.whole_optimizer)])
    assert tensors[0] == tensors[1] == tensors[2]
    assert captures[0] == captures[1] == captures[2]
    assert not graphs.eager_reason


def test_graphs_are_captured_again_if_the_optimizer_creates_other_state(make_training: Any) -> None:
    trainer, capture, _ = with_graphs(make_training(batch_size=50))
    initial = copy.deepcopy(trainer.state_dict())
    for _ in range(6):
        trainer.step()
    before = capture.captures
    trainer.load_state_dict(initial)
    state = trainer.update._unused
    state[next(iter(state))]["exp_avg"] = torch.zeros(1)  # of another form than what the first step creates
    for _ in range(6):
        trainer.step()
    assert capture.captures == 2 * before
