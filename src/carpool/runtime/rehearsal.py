"""Steps that a newcomer makes and that are undone, while the training still goes on elsewhere.

What is slow about the first steps of a process happens then: kernels are loaded, and the step is recorded and proven.
All of it stays when the state is loaded anew, because that is copied to where it was. Neither the user's own hooks nor
evaluations are called: nobody shall see such a step.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from carpool.runtime.mishap import is_device, really
from carpool.runtime.room import make_room
from carpool.runtime.trainer import Trainer

_MOST = 6  # steps: one by the code, those that prove recordings of the pass and of the update, and one replayed
_FEWEST = 2


def rehearse(trainer: Trainer, is_called: Callable[[], bool]) -> str:
    """Make steps until none would be slower than the later ones, or something is said; what was done, in words.

    The trainer is left in a state that is worth nothing. A step that fails here ends the rehearsal and is told when it
    fails again in earnest; only a lost GPU is told now.
    """
    began, count = time.perf_counter(), 0
    try:
        is_through = False
        while count < _MOST and not (is_through or is_called()):
            is_replayed = trainer.graphs is None or trainer.graphs.is_settled
            step = trainer.begin()
            trainer.make(step)
            trainer.cursor = step.draw.after
            count += 1
            is_through = is_replayed and count >= _FEWEST
        trainer.await_device()
    except Exception as raised:
        error = really(raised)
        if is_device(error):
            raise error from raised
        traceback.print_exc()
        make_room(trainer)
        return f"a rehearsal ended at step {count + 1}: {error}"
    return f"rehearsed {count} steps in {time.perf_counter() - began:.2f} s"
