"""Job state machine: events in, actions out; no clock, no sockets, no torch.

Every event changes what is known (what workers say does so in `hearing.py`); then whatever step towards the newest
order is possible is taken (`settling.py`). After any fault the same rules look at what is left and go on from there.
"""

from __future__ import annotations

from carpool.runtime.job_state.actions import Action, Kill
from carpool.runtime.job_state.on_message import handle_message
from carpool.runtime.job_state.reconcile import reconcile
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import ProcessGroupEpoch, Target, WorkerMode
from carpool.runtime.process.protocol import Message, Ready


class JobMachine:
    """One job's workers. Every event comes with its time and returns what is to be done, in order."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    # -- what others may know -----------------------------------------------------------------------------------------

    @property
    def wish(self) -> Target:
        """What the newest order asks for."""
        return self._state.wish

    @property
    def formation(self) -> ProcessGroupEpoch | None:
        """Who works together just now."""
        return self._state.formation

    @property
    def ready(self) -> Ready | None:
        """What the first worker said of the training."""
        return self._state.ready

    @property
    def done(self) -> int:
        """Steps done, as far as is known."""
        return self._state.done

    @property
    def is_still(self) -> bool:
        """Whether no worker of it computes."""
        return self._state.is_still

    @property
    def has_made_room(self) -> bool:
        """Whether it stands still and holds no memory but what its state needs."""
        return self._state.has_made_room

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, or the team was stopped, and no process is left."""
        return self._state.is_over

    # -- what whoever decides wants -----------------------------------------------------------------------------------

    def order(self, at: float, wish: Target) -> list[Action]:
        """The scheduler wants this; what is older than the newest order is ignored."""
        state = self._state
        if wish.generation > state.wish.generation and not state.failure and not state.is_over:
            state.wish = wish
            state.actions += state.seclusion.end_probe()
        return reconcile(state, at)

    def wait(self, at: float, *, waits: bool) -> list[Action]:
        """Stand still at the next boundary, with the state on disk, until somebody decides again; or go on."""
        self._state.waits, self._state.was_waiting_saved = waits, False
        return reconcile(self._state, at)

    def stop(self, at: float, *, checkpoint: bool) -> list[Action]:
        """End all workers at a boundary; the job can be resumed from its checkpoint."""
        self._state.stopping = checkpoint
        return reconcile(self._state, at)

    # -- what neighbours want -----------------------------------------------------------------------------------------

    def take_turns(self, at: float, *, by_token: bool) -> list[Action]:
        """Whether a token is needed for a step, because neighbours want it so."""
        self._state.by_token = by_token
        return reconcile(self._state, at)

    def hold(self, at: float, *, held: bool, clears: bool = True) -> list[Action]:
        """Stand still at the next boundary for a neighbour, and make room if that `clears`; or go on."""
        self._state.is_held, self._state.clears = held, clears
        return reconcile(self._state, at)

    def left_alone(self, at: float) -> list[Action]:
        """The neighbours stand still."""
        self._state.seclusion.granted()
        return reconcile(self._state, at)

    # -- what becomes of workers --------------------------------------------------------------------------------------

    def said(self, at: float, worker: int, message: Message) -> list[Action]:
        """A worker said something."""
        who = self._state.workers.get(worker)
        if who is None or who.mode is WorkerMode.LEAVING:
            return []
        handle_message(self._state, at, who, message)
        return reconcile(self._state, at)

    def died(self, at: float, worker: int, why: str, steps: int = 0) -> list[Action]:
        """A worker's process has ended, with so many steps done."""
        who = self._state.workers.pop(worker, None)
        if who is not None and who.mode is not WorkerMode.LEAVING:
            self._state.counted(who, steps)
            self._state.lose(at, who, f"died ({why})")
        return reconcile(self._state, at)

    def silent(self, at: float, worker: int, steps: int = 0) -> list[Action]:
        """A worker has given no sign of life for too long: it is killed and counts as dead at once."""
        return self.faulted(at, worker, "gave no sign of life and was killed", counts=True, steps=steps)

    def faulted(self, at: float, worker: int, how: str, *, counts: bool, steps: int = 0) -> list[Action]:
        """A worker's GPU failed under it: it is killed, and counts as lost only where it is to blame."""
        who = self._state.workers.get(worker)
        if who is not None:
            self._state.counted(who, steps)
            self._state.kill(at, who, how, counts=counts)
        return reconcile(self._state, at)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, at: float) -> list[Action]:
        """Time has passed."""
        self._end_the_slow(at)
        self._keep_state(at)
        return reconcile(self._state, at)

    def _end_the_slow(self, at: float) -> None:
        """Kill workers that were sent away and do not go, and a job that runs for longer than it may."""
        state, rules, formation = self._state, self._state.rules, self._state.formation
        for worker in state.workers.values():
            if worker.mode is WorkerMode.LEAVING and at - worker.left_at > rules.grace_s:
                state.actions.append(Kill(worker.id))
                worker.left_at = at
        if formation is None or formation.halting or not rules.time_limit_s:
            return
        if state.ran_s + at - formation.since > rules.time_limit_s:
            state.fail(f"it ran for longer than its time limit of {rules.time_limit_s:g} s (step {formation.step})")

    def _keep_state(self, at: float) -> None:
        """Have the mirror or the checkpoint written that is due."""
        state, formation = self._state, self._state.formation
        if formation is None or formation.halting or state.failure:
            return
        first = state.workers[formation.members[0]]
        if first.mode is not WorkerMode.WORKING or any(w.mode is WorkerMode.LOADING for w in state.workers.values()):
            return  # the older mirror is being read and must not be written to
        state.actions += state.safe.due(at, formation.step, first.id)
