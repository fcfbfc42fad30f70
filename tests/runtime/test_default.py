"""Default mode: one device gives the bits of a plain loop; parts differ from it by rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from carpool.runtime.engine.flat_buffers import Contribution
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.state.digest import digest
from carpool.testing import plain_loop


def smooth(num_samples: int = 100) -> dict[str, Any]:
    torch.manual_seed(2)
    return {"model": nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)), "num_samples": num_samples}


def token_loss(model: nn.Module, batch: Any) -> Any:
    each = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    counts = batch[1] > 0
    return each[counts].sum(), counts.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_norm": 0.1},
        {"loss": token_loss},
        {"loss": lambda model, batch: (nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), 36)},
        {"autocast": "bf16"},
        {"autocast": "fp16"},
        {"shuffle": False},
    ],
    ids=["plain", "clip", "sum and count", "count as a number", "bf16", "fp16", "in order"],
)
def test_one_device_gives_the_bits_of_the_plain_loop(make_training: Any, changes: dict[str, Any]) -> None:
    plain = plain_loop(make_training(**changes))
    trainer = Trainer(make_training(**changes))
    assert [done.loss for done in trainer.steps()] == plain.losses
    assert digest(trainer.training.model) == plain.digest


def test_the_plain_loop_equals_a_hand_written_one(make_training: Any) -> None:
    """Without dropout no random numbers are drawn, so a loop without carpool gives the same result."""
    changes = smooth()
    start = {name: value.clone() for name, value in changes["model"].state_dict().items()}
    plain = plain_loop(make_training(**changes, shuffle=False))
    changes["model"].load_state_dict(start)
    training = make_training(**changes, shuffle=False)
    optimizer = torch.optim.Adam(training.model.parameters(), lr=0.01, foreach=True)
    for _ in range(2):
        for first in range(0, 100, 36):
            inputs, labels = (tensor[first : first + 36] for tensor in training.dataset.tensors)
            optimizer.zero_grad()
            nn.functional.cross_entropy(training.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert digest(training.model) == plain.digest


def _gradient(trainer: Trainer, total: Contribution) -> tuple[torch.Tensor, float]:
    """The gradient of a step's mean, and its loss."""
    layout = trainer.layout
    sums = layout.read_sums(total.values)
    count = total.values[layout.loss + 1] if sums.counted else 1.0
    assert isinstance(sums.loss, float)
    return total.values[: layout.gradients.stop] / count, sums.loss


@pytest.mark.parametrize("parts", [(18, 18), (30, 6), (5, 20, 11), (9, 9, 9, 9), (1, 34, 1)], ids=str)
@pytest.mark.parametrize("loss", [None, token_loss], ids=["mean", "sum and count"])
def test_uneven_parts_give_the_gradient_of_one_device(make_training: Any, parts: tuple[int, ...], loss: Any) -> None:
    changes = smooth() | ({"loss": loss} if loss else {})
    trainer = Trainer(make_training(**changes, stop=Stop(epochs=3)))
    for _ in range(4):
        gradients = []
        for cut in ((36,), parts):
            step = trainer.next_step(cut)
            total = trainer.combine(step, trainer.contribute(step, range(len(cut))))
            gradients.append(_gradient(trainer, total))
        (alone, loss_alone), (together, loss_together) = gradients
        assert (together - alone).norm() <= 1e-5 * alone.norm()
        assert loss_together == pytest.approx(loss_alone, rel=1e-5)
        trainer.step(parts)


@pytest.mark.parametrize("parts", [(36,), (30, 6)], ids=str)
@pytest.mark.parametrize("loss", [None, token_loss], ids=["mean", "sum and count"])
def test_micro_batches_give_the_gradient_of_the_whole_step(
    make_training: Any, parts: tuple[int, ...], loss: Any
) -> None:
    changes = smooth() | ({"loss": loss} if loss else {})
    trainer = Trainer(make_training(**changes, stop=Stop(epochs=3)))
    for _ in range(4):
        totals = []
        for limits in ((), ((0, 7),)):
            trainer.limits = limits
            step = trainer.next_step(parts)
            totals.append(_gradient(trainer, trainer.combine(step, trainer.contribute(step, range(len(parts))))))
        (whole, whole_loss), (split, split_loss) = totals
        assert not torch.equal(split, whole)
        assert (split - whole).norm() <= 1e-5 * whole.norm()
        assert split_loss == pytest.approx(whole_loss, rel=1e-5)
        trainer.step(parts)


def test_micro_batches_average_buffers(make_training: Any) -> None:
    class Mean(nn.Module):
        """Keeps the mean of its inputs, and counts."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.mean: torch.Tensor
            self.calls: torch.Tensor
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.mean, self.calls = inputs.mean(0), self.calls + 1
            result: torch.Tensor = self.layer(inputs)
            return result

    def means(limits: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        trainer = Trainer(make_training(model=Mean()))
        trainer.limits = limits
        seen = []
        for _ in range(3):
            trainer.step()
            seen.append(dict(trainer.training.model.named_buffers())["mean"].clone())
        assert dict(trainer.training.model.named_buffers())["calls"] == 3
        return seen

    whole, split = means(()), means(((1, 10),))
    assert torch.equal(whole[0], split[0])
    assert not torch.equal(whole[1], split[1])
    assert all(torch.allclose(a, b) for a, b in zip(whole, split, strict=True))


def test_parts_trained_to_the_end_stay_close(make_training: Any) -> None:
    ends = []
    for parts in ((36,), (20, 12, 4)):
        changes = smooth()
        trainer = Trainer(make_training(**changes))
        while not trainer.stop_reason:
            trainer.step(parts)
        ends.append(torch.cat([p.detach().flatten() for p in trainer.training.model.parameters()]))
    alone, together = ends
    assert not torch.equal(alone, together)
    assert torch.allclose(alone, together, rtol=1e-3, atol=1e-4)


def test_unchanged_parts_give_unchanged_bits(make_training: Any) -> None:
    digests = set()
    for _ in range(2):
        trainer = Trainer(make_training())
        while not trainer.stop_reason:
            trainer.step((20, 12, 4))
        digests.add(digest(trainer.training.model))
    assert len(digests) == 1


def test_parts_average_running_statistics_with_their_weights(make_training: Any) -> None:
    trainer = Trainer(make_training(batch_size=40))
    bn = trainer.training.model.get_submodule("1")
    with torch.no_grad():
        inputs = trainer.training.dataset.batch(torch.from_numpy(trainer.next_step().draw.samples))[0]
        hidden = trainer.training.model.get_submodule("0")(inputs)
    trainer.step((30, 10))
    assert torch.allclose(bn.get_buffer("running_mean"), 0.1 * hidden.mean(0), atol=1e-6)
    assert int(bn.get_buffer("num_batches_tracked")) == 1


def test_a_part_with_batch_norm_has_two_samples_or_none(make_training: Any) -> None:
    trainer = Trainer(make_training())
    sizes = [end - start for start, end in trainer.next_step((35, 1)).bounds]
    assert sizes == [36, 0]
    trainer.step((35, 1))


def test_float16_overflow_skips_the_step(make_training: Any) -> None:
    blown: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        factor = 1e30 if len(blown) < 2 else 1.0
        blown.append(factor)
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1]) * factor

    scheduled = []
    training = make_training(
        loss=loss, autocast="fp16", stop=Stop(steps=4), after_update=lambda model, step: scheduled.append(step)
    )
    trainer = Trainer(training)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    assert trainer.step().skipped
    assert trainer.step().skipped
    assert all(torch.equal(p, before[name]) for name, p in training.model.named_parameters())
    assert trainer.state_dict()["scale"] == {"value": 2.0**14, "calm": 0}
    resumed = Trainer(make_training(autocast="fp16"))
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.state_dict()["scale"] == {"value": 2.0**14, "calm": 0}
    assert not trainer.step().skipped
    assert scheduled == [3]
