"""Local task: a device's part of a federated training, kept ready between rounds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from carpool.core.errors import InputError
from carpool.federated.partition import Partition
from carpool.federated.updates import Array, Weights
from carpool.jobs.program import Program
from carpool.runtime.data.sampler import Cursor
from carpool.runtime.engine.determinism import derive
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Loss, Training
from carpool.runtime.process.worker_setup import load_program

_ENDLESS = Stop(steps=1 << 40)


@dataclass(slots=True)
class RoundProgress:
    """Progress of a local task in its current round."""

    samples: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    is_done: bool = False

    @property
    def loss(self) -> float:
        """The mean over the steps."""
        return self.loss_sum / max(self.steps, 1)


class LocalTask:
    """Trains on a device's part of a dataset, from the weights of each round.

    Nothing else is carried over from round to round: optimizer, schedule and random numbers start anew, and the
    position in the data is given. So a round has the same result on a process that was just started.
    """

    def __init__(
        self, training: Training, program: Program, part: int, device: torch.device, proximal: float = 0.0
    ) -> None:
        self.num_samples = training.num_samples
        self.batch_size = training.batch_size
        self.progress = RoundProgress()
        self.awaits_device = True  # after each step, so that its time is known and the next task has the device
        self._left = 0
        self._anchor = [parameter.detach().clone().to(device) for parameter in training.model.parameters()]
        if proximal:
            training = with_proximal_term(training, self._anchor, proximal)
        seed = derive("federated", program.seed, part) & ((1 << 63) - 1)
        self._trainer = Trainer(
            training, seed=seed, device=device, graph=program.graph, deterministic=program.deterministic
        )
        self._initial = copy.deepcopy(self._trainer.state_dict())

    @property
    def has_graphs(self) -> bool:
        """Whether its steps are captured as CUDA graphs, which takes a few of them."""
        return self._trainer.graphs is not None

    def begin(self, weights: Weights, start: int, samples: int, batch_size: int) -> None:
        """Load a round's weights; `start` is the number of samples this device has processed in earlier rounds."""
        cursor = {"step": start, "epoch": start // self.num_samples, "offset": start % self.num_samples}
        model = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        self._trainer.load_state_dict({**copy.deepcopy(self._initial), "model": model, "cursor": cursor})
        for anchor, parameter in zip(self._anchor, self._trainer.training.model.parameters(), strict=True):
            anchor.copy_(parameter.detach())
        self.batch_size = min(batch_size, self.num_samples)
        self.progress = RoundProgress()
        self._left = samples

    def step(self) -> None:
        """Make one step; the last one of a round is as small as needed."""
        trainer, done = self._trainer, self.progress
        if trainer.training.batch_norms:
            self._skip_single_sample()
        trainer.resize_batch(min(self.batch_size, self._left))
        made = trainer.step()
        self._left -= made.num_samples
        done.samples += made.num_samples
        if self.awaits_device:
            trainer.synchronize()
        done.steps += 1
        done.loss_sum += made.loss
        done.is_done = self._left <= (1 if trainer.training.batch_norms else 0)

    def _skip_single_sample(self) -> None:
        """Leave out the last sample of an epoch if it would be a step of its own, which BatchNorm cannot train on."""
        cursor = self._trainer.cursor
        if self.num_samples > 1 and cursor.offset == self.num_samples - 1:
            self._trainer.cursor = Cursor(cursor.step, cursor.epoch + 1, 0)

    def weights(self) -> dict[str, Array]:
        return as_arrays(self._trainer.training.model)


def load_local_task(
    spec: Mapping[str, Any], part: int, num_parts: int, device: torch.device
) -> tuple[LocalTask | None, int]:
    """The local task of a device and its number of samples; no task if that is 0."""
    program = Program(**spec["program"])
    training = load_program(program)
    check_federated(training, program.entry, spec["proximal"])
    partition = Partition(**{**spec["partition"], "sizes": tuple(spec["partition"].get("sizes", ()))})
    indices = partition.split(training.num_samples, num_parts, labels_of(training.dataset))[part]
    if not len(indices):
        return None, 0
    batch_size = min(program.batch_size or training.batch_size, len(indices))
    by_evaluation = training.schedule_every == "evaluation"
    training = replace(
        training,
        dataset=Subset(training.dataset, indices.tolist()),
        batch_size=batch_size,
        stop=_ENDLESS,
        evaluate=None,
        best="",
        on_step_end=None,
        on_epoch_end=None,
        schedule=None if by_evaluation else training.schedule,
        schedule_every="step" if by_evaluation else training.schedule_every,
    )
    return LocalTask(training, program, part, device, spec["proximal"]), len(indices)


def check_federated(training: Training, where: str, proximal: float) -> None:
    """InputError for a training that devices cannot share."""
    if training.is_stream:
        raise InputError("an IterableDataset cannot be partitioned", where=where, way_out="Use a map-style dataset.")
    if proximal and training.loss is None:
        raise InputError("fedprox needs loss=…, not step=…", where=where, way_out="Use algorithm 'fedavg'.")
    for name, value in training.model.state_dict().items():
        if not isinstance(value, Tensor) or value.dtype is torch.bfloat16:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"{name!r} of the model is {kind}, which cannot be aggregated", where=where, way_out="Use float32."
            )


def labels_of(dataset: Any) -> Array | None:
    """Integer labels of a dataset: its ``targets``, or the last of its tensors; None if it has none."""
    found = getattr(dataset, "targets", None)
    if found is None:
        found = (getattr(dataset, "tensors", None) or (None,))[-1]
    if found is None:
        return None
    labels = np.asarray(found)
    return labels if labels.shape == (len(dataset),) and labels.dtype.kind in "iub" else None


def as_arrays(model: nn.Module) -> dict[str, Array]:
    """The ``state_dict`` of a model as arrays of its own."""
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def trained_names(model: nn.Module) -> list[str]:
    """Names of the floating-point parameters, which a server optimizer may step."""
    return sorted(name for name, value in model.named_parameters() if value.is_floating_point())


def with_proximal_term(training: Training, anchor: list[Tensor], proximal: float) -> Training:
    """The training with ``proximal``/2 · ‖w − anchor‖² added to the mean loss of a step (FedProx)."""
    plain = training.loss
    assert plain is not None

    def loss(model: nn.Module, batch: Any) -> Any:
        result = plain(model, batch)
        pairs = zip(model.parameters(), anchor, strict=True)
        squares = [(weight - old).square().sum() for weight, old in pairs if weight.requires_grad]
        term = proximal / 2 * torch.stack([each.float() for each in squares]).sum()
        if not isinstance(result, tuple):
            return result + term
        if isinstance(result[-1], dict) and len(result) == 2:
            return result[0] + term, result[1]
        return (result[0] + term * result[1], *result[1:])

    proximal_loss: Loss = loss
    return replace(training, loss=proximal_loss)
