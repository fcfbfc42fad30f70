"""Where the pieces of a step are passed: one after another here, or side by side on the cores of the device."""

from __future__ import annotations

import itertools
import pickle
import time

from carpool.runtime.flat import Layout
from carpool.runtime.pass_figures import PassFigures
from carpool.runtime.passes import Gathered, Passes, Places, Step
from carpool.runtime.repetition import Repetition
from carpool.runtime.scaling import LossScale
from carpool.runtime.training import Training
from carpool.runtime.twins import MOST_SHARDS, PATIENCE_S, Twins, slots_bytes
from carpool.runtime.update import calls_hooks
from carpool.runtime.watching import available_bytes

_FITS = 0.25  # of the machine's free memory that contributions may take
_TRIED = 3  # pieces that are passed before the first of them is passed again


class Beside:
    """Passes the shards of an exact job on so many cores, each on one thread: their number does not show in the bits.

    That holds where a pass follows from what other processes can be told: the model, the step, learning rates and
    schedule. So all keep to one core where the user's code has a say in more: where it is called after updates or keeps
    state of its own, and where data is not rows of tensors but read by code, from files that know one place. Whether it
    remembers anything from pass to pass is tried out while the first step is made on one core.
    """

    def __init__(
        self, training: Training, passes: Passes, layout: Layout, shards: int, scale: LossScale | None
    ) -> None:
        self._passes = passes
        self._layout = layout
        self._shards = shards
        self._figures = PassFigures(training, scale)
        self._obstacle = _obstacle(training, passes, shards, self._figures)  # in words; empty: there is none
        self._twins: Twins | None = None
        self._repetition: Repetition | None = None
        self._is_tried = False
        self._step_s = 0.0  # that the last step took which was passed here alone
        self._cores = 1
        self._news: list[str] = []

    def meet(self, cores: int) -> None:
        """Have so many cores from now on, in a new formation: twins of the old one hold on to its memory."""
        self.end()
        self._cores = cores
        if cores > 1 and self._obstacle:
            self._keep_to_one(self._obstacle)

    def stay_alone(self) -> None:
        """Keep to one core until the next formation: memory is short."""
        self.meet(1)

    def contribute(self, step: Step, pieces: range, places: Places | None) -> Gathered:
        """The maximal aligned subtrees of a range of pieces, each added up in tree order."""
        if self._twins is None and self._cores > 1:
            self._prepare(step, pieces)
        if not self._twins:  # none, or none any more
            began = time.monotonic()
            made = self._passes.contribute(step, pieces, places)
            self._step_s = time.monotonic() - began
            return made
        before = len(self._twins)
        try:
            self._twins.begin(step, pieces)
            made = self._passes.contribute(step, pieces, places, self._twins)
        except BaseException:
            self.end()  # they may still be at this step
            raise
        if lost := before - len(self._twins):
            self._news.append(f"{lost} of {before} processes that passed shards beside the worker died, failed or hung")
        return made

    def end(self) -> None:
        """End all twins: the training is another one now. They are called again when they are wanted."""
        for one in (self._twins, self._repetition):
            if one is not None:
                one.close()
        self._twins = self._repetition = None

    def take_news(self) -> list[str]:
        """What was found out since the last time, for the job's story."""
        news, self._news = self._news, []
        return news

    def _prepare(self, step: Step, pieces: range) -> None:
        """Call twins, if passes can be repeated; where that is not known yet, have it tried meanwhile."""
        if self._is_tried:
            self._call()
        elif self._repetition is not None:
            self._judge(self._repetition.is_repeatable(PATIENCE_S + 2.0 * self._step_s))
        elif some := list(itertools.islice((piece for piece in pieces if not step.is_empty(piece)), _TRIED)):
            try:
                self._repetition = Repetition(self._passes, self._figures, step, some)
            except OSError:
                self._keep_to_one("the system allows no more processes")

    def _judge(self, is_repeatable: bool | None) -> None:
        self.end()
        if is_repeatable:
            self._is_tried = True
            self._call()
            return
        self._obstacle = (
            "a copy of the worker's process could not pass a shard (the log may say why)"
            if is_repeatable is None
            else "a shard that was passed twice came out with other bits: the training remembers something between "
            "passes. It may learn something else on other devices, or after it was resumed"
        )
        self._keep_to_one(self._obstacle)

    def _keep_to_one(self, why: str) -> None:
        self._cores = 1
        self._news.append(f"shards are passed on one core of the device: {why}")

    def _call(self) -> None:
        """Fork a twin for each further core, unless what the shards contribute would take too much memory."""
        wanted = slots_bytes(self._layout, self._shards)
        if wanted > _FITS * available_bytes():
            self._keep_to_one(
                f"places for what {self._shards} shards contribute would take {wanted / 1e6:.0f} MB, "
                f"over a quarter of the machine's free memory"
            )
            return
        count = min(self._cores, self._shards) - 1
        self._twins = Twins(self._passes, self._layout, self._shards, count, self._figures)


def _obstacle(training: Training, passes: Passes, shards: int, figures: PassFigures) -> str:
    """Why shards cannot be passed in several processes, in words; empty if they can, as far as is seen from outside."""
    if training.after_update is not None:
        return "after_update may change what a pass follows from"
    if training.state:
        return f"state ({', '.join(sorted(training.state))}) may be what a pass follows from"
    if calls_hooks(training.optimizer):
        return "hooks of the optimizer may change what a pass follows from"
    if not passes.samples.is_rows or passes.samples.depth:
        return "the data is not rows of tensors (carpool.datasets), but read by code"
    if shards > MOST_SHARDS:
        return f"there are {shards} shards; at most {MOST_SHARDS} are dealt out"
    if not _can_be_told(figures):
        return "other processes cannot be told of its schedule or its optimizer's settings"
    return ""


def _can_be_told(figures: PassFigures) -> bool:
    """Whether another process can be told of them: a schedule of the user's own may keep anything."""
    try:
        pickle.dumps(figures.told())
    except Exception:  # noqa: BLE001 - whatever its state_dict does
        return False
    return True
