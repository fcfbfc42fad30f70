"""Where the pieces of a step are passed: one after another here, or side by side on the cores of the device."""

from __future__ import annotations

from carpool.runtime.flat import Layout
from carpool.runtime.passes import Gathered, Passes, Places, Step
from carpool.runtime.twins import MOST_SHARDS, Follow, Twins


class Beside:
    """Passes the shards of an exact job on so many cores, each on one thread: their number does not show in the bits.

    Trainings that read ahead keep to one core: the readers know one process.
    """

    def __init__(self, passes: Passes, layout: Layout, shards: int, follow: Follow) -> None:
        self._passes = passes
        self._layout = layout
        self._shards = shards
        self._follow = follow
        self._twins: Twins | None = None
        self._count = 0  # of twins that were forked; some may be gone
        self.cores = 1

    def contribute(self, step: Step, pieces: range, places: Places | None) -> Gathered:
        """The maximal aligned subtrees of a range of pieces, each added up in tree order."""
        self._call(min(self.cores, self._shards) - 1)
        if not self._twins:
            return self._passes.contribute(step, pieces, places)
        try:
            self._twins.begin(step, pieces)
            return self._passes.contribute(step, pieces, places, self._twins)
        except BaseException:
            self.end()  # they may still be at this step
            raise

    def show(self, done: int, *, updated: bool) -> None:
        """So many steps are done; the user's hook has not been called yet."""
        if self._twins:
            self._twins.show(done, updated=updated)

    def end(self) -> None:
        """End all twins: the training is another one now. They are called again when they are wanted."""
        if self._twins is not None:
            self._twins.close()
        self._twins, self._count = None, 0

    def _call(self, count: int) -> None:
        """Have so many twins, as far as they can be had."""
        if count == self._count or self._passes.samples.depth or self._shards > MOST_SHARDS:
            return
        self.end()
        if count:
            self._twins, self._count = Twins(self._passes, self._layout, self._shards, count, self._follow), count
