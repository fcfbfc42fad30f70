"""Where the pieces of a step are passed: one after another here, or side by side on the cores of the device."""

from __future__ import annotations

import pickle

from carpool.runtime.flat import Layout
from carpool.runtime.pass_figures import PassFigures
from carpool.runtime.passes import Gathered, Passes, Places, Step
from carpool.runtime.scaling import LossScale
from carpool.runtime.training import Training
from carpool.runtime.twins import MOST_SHARDS, Twins, slots_bytes
from carpool.runtime.watching import available_bytes

_FITS = 0.25  # of the machine's free memory that contributions may take


class Beside:
    """Passes the shards of an exact job on so many cores, each on one thread: their number does not show in the bits.

    That holds where a pass follows from what other processes can be told: the model, the step, learning rates and
    schedule. So all keep to one core where the user's code has a say in more: where it is called after updates or keeps
    state of its own, and where data is not rows of tensors but read by code, from files that know one place.
    """

    def __init__(
        self, training: Training, passes: Passes, layout: Layout, shards: int, scale: LossScale | None
    ) -> None:
        self._passes = passes
        self._layout = layout
        self._shards = shards
        self._figures = PassFigures(training, scale)
        self._may_part = (
            training.after_update is None
            and not training.state
            and passes.samples.is_rows
            and not passes.samples.depth
            and shards <= MOST_SHARDS
            and _can_be_told(self._figures)
        )
        self._twins: Twins | None = None
        self._cores = 1

    def meet(self, cores: int) -> None:
        """Have so many cores from now on, in a new formation: twins of the old one hold on to its memory."""
        self.end()
        self._cores = cores

    def stay_alone(self) -> None:
        """Keep to one core until the next formation: memory is short."""
        self.meet(1)

    def contribute(self, step: Step, pieces: range, places: Places | None) -> Gathered:
        """The maximal aligned subtrees of a range of pieces, each added up in tree order."""
        if self._twins is None and self._may_part and self._cores > 1:
            self._call()
        if not self._twins:  # none, or none any more
            return self._passes.contribute(step, pieces, places)
        try:
            self._twins.begin(step, pieces)
            return self._passes.contribute(step, pieces, places, self._twins)
        except BaseException:
            self.end()  # they may still be at this step
            raise

    def end(self) -> None:
        """End all twins: the training is another one now. They are called again when they are wanted."""
        if self._twins is not None:
            self._twins.close()
        self._twins = None

    def _call(self) -> None:
        """Fork a twin for each further core, unless what the shards contribute would take too much memory."""
        if slots_bytes(self._layout, self._shards) > _FITS * available_bytes():
            self.stay_alone()
            return
        count = min(self._cores, self._shards) - 1
        self._twins = Twins(self._passes, self._layout, self._shards, count, self._figures)


def _can_be_told(figures: PassFigures) -> bool:
    """Whether another process can be told of them: a schedule of the user's own may keep anything."""
    try:
        pickle.dumps(figures.told())
    except Exception:  # noqa: BLE001 - whatever its state_dict does
        return False
    return True
