"""Description of a federation: its tasks, how a cycle is planned, and the limits of an update."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, NewType

from carpool.core.errors import InputError, UnknownName
from carpool.core.typed_fields import Amount, Range

TaskName = NewType("TaskName", str)
DeviceName = NewType("DeviceName", str)

ALGORITHMS = ("fedavg", "fedprox", "fedadam")
WEIGHTINGS = ("data", "samples", "normalized")
PLANS = ("balanced", "shortest", "equal-steps", "equal-epochs")
_TARGET = re.compile(r"\s*(\S+)\s*(>=|<=)\s*(\S+)\s*")

Count = Annotated[int, Range(1, 1 << 40)]


@dataclass(frozen=True, slots=True)
class Target:
    """A metric that ends a task when it reaches a value: ``accuracy >= 0.9``."""

    metric: str
    value: float
    above: bool = True

    @classmethod
    def parse(cls, text: str, where: str = "target") -> Target:
        found = _TARGET.fullmatch(text)
        try:
            assert found is not None
            return cls(found[1], float(found[3]), found[2] == ">=")
        except (AssertionError, ValueError):
            raise InputError(f"{text!r} is not a target", where=where, way_out="Write 'accuracy >= 0.9'.") from None

    def is_reached(self, value: float) -> bool:
        return value >= self.value if self.above else value <= self.value


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits on an update; 0: no limit."""

    num_bytes: int = 0
    norm: Amount = 0.0  # of the difference to the weights that the device was given


@dataclass(frozen=True, slots=True)
class Task:
    """One model that the devices train together.

    ``algorithm``: ``fedavg``; ``fedprox`` adds ``proximal``/2 · ‖w − w_round‖² to the loss on devices (Li et al. 2020);
    ``fedadam`` applies Adam to the mean difference on the server (Reddi et al. 2021). ``weighting`` says how much a
    device's update counts: ``data`` its data volume; ``samples`` the samples it processed; ``normalized`` its data
    volume, its difference first divided by its number of steps (FedNova, Wang et al. 2020), so that devices that make
    fewer steps do not count less. ``normalized`` suits plain SGD; with local optimizers such as Adam, whose steps do
    not shrink with the gradient, it reaches much lower accuracy.
    """

    name: TaskName
    rounds: Count = 10
    batch_size: Count = 32
    weight: Annotated[float, Range(1e-6, 1e6)] = 1.0  # epochs of this task per epoch of a task of weight 1
    batch_range: tuple[Count, Count] | None = None  # batch sizes that devices may use; None: only its own
    target: Target | None = None
    algorithm: str = "fedavg"
    proximal: Amount = 0.01
    server_lr: Amount = 0.01
    betas: tuple[Amount, Amount] = (0.9, 0.99)
    epsilon: Amount = 1e-3
    weighting: str = "data"
    # epochs of a run, before a device starts another from the round's weights; 0: all of a round in one run
    local_epochs: Amount = 0.0
    min_updates: Count = 1  # with fewer updates the round is repeated
    max_failed_rounds: Count = 3  # in a row, before the task fails
    whole_epochs: bool = False  # its devices cannot process a part of their data (a Flower ClientApp)
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        _known("algorithm", self.algorithm, ALGORITHMS)
        _known("weighting", self.weighting, WEIGHTINGS)
        if max(self.betas) >= 1.0:
            raise InputError(f"betas of task {self.name!r} is {list(self.betas)}", way_out="Give numbers below 1.")
        if self.batch_range is not None and not self.batch_range[0] <= self.batch_size <= self.batch_range[1]:
            raise InputError(
                f"batch_size {self.batch_size} of task {self.name!r} is not in batch_range {list(self.batch_range)}",
                way_out="Widen batch_range, or set batch_size.",
            )


@dataclass(frozen=True, slots=True)
class Federation:
    """The tasks of a federation, and how devices work on them in a cycle.

    In a cycle every task makes one round on the devices that take part. ``plan``:

    - ``balanced``: each device works on each task in proportion to its data there (o_i/o_j = D_i/D_j, with D_i its data
      of task i and o_i the samples it processes), with shares that let all its tasks end together. Every device makes
      at least ``epochs`` epochs; those that would wait for the slowest make more, so that all devices end together and
      no round learns from less than with ``equal-epochs``. The additional epochs are independent runs from the round's
      weights (``local_epochs``), whose weights are averaged.
    - ``shortest``: the same, but all devices together process ``epochs`` times their data: slow ones make fewer epochs.
      Cycles are shorter, and learn less.
    - ``equal-epochs``: equal shares, every device processes all its data ``epochs`` times.
    - ``equal-steps``: equal shares, the same number of steps for every task on every device.

    All but ``balanced`` process equally many samples in a cycle.
    """

    tasks: tuple[Task, ...]
    plan: str = "balanced"
    epochs: Annotated[float, Range(1e-6, 1e6)] = 1.0  # per cycle: the least of a device if balanced, else the mean
    epochs_range: tuple[Amount, Amount] = (0.1, 32.0)  # of one device, relative to `epochs`
    participation: Annotated[float, Range(1e-9, 1)] = 1.0  # fraction of the devices that take part in a cycle
    min_devices: Count = 1  # a cycle starts once this many are present
    deadline_s: Amount = 0.0  # devices stop and return partial work; 0: none
    grace_s: Amount = 5.0  # from the deadline to the end of the cycle
    load_s: Amount = 600.0  # a device that takes longer to load its tasks counts as lost; 0: no limit
    seed: int = 0
    levels: tuple[Amount, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.8, 1.0)  # shares of a device

    def __post_init__(self) -> None:
        _known("plan", self.plan, PLANS)
        names = [task.name for task in self.tasks]
        if self.epochs_range[0] > self.epochs_range[1]:
            raise InputError(f"epochs_range is {list(self.epochs_range)}", way_out="Give the smaller number first.")
        if not self.levels or not all(0.0 < level <= 1.0 for level in self.levels):
            raise InputError(f"levels is {list(self.levels)}", way_out="Give shares above 0, up to 1.")
        if not names or len(set(names)) < len(names):
            raise InputError(f"tasks are {names}", way_out="Give at least one task; each needs a name of its own.")


def _known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownName(what, value, known)
