"""The workers of one job as a state machine: events in, actions out; no clock, no sockets, no torch.

Every event changes what is known (here); then whatever step towards the newest order is possible is taken
(`settling.py`). After any fault the same rules look at what is left and go on from there.
"""

from __future__ import annotations

from carpool.core.messages import (
    ProgressReported,
)
from carpool.runtime.actions import (
    Action,
    BeAlone,
    Emit,
    Kill,
    Write,
)
from carpool.runtime.crew import (
    AT_REST,
    AT_WORK,
    Mode,
    Wish,
    WorkerState,
    fits,
)
from carpool.runtime.protocol import (
    Apply,
    Broke,
    Contributed,
    Done,
    Evaluated,
    Gather,
    Halted,
    Loaded,
    Measured,
    Message,
    Noted,
    Published,
    Ready,
    Saved,
    Spared,
    Stepped,
    Updated,
)
from carpool.runtime.settling import Settling
from carpool.runtime.splitting import Shortage, why_not_split


class Team(Settling):
    """One job's workers. Every method takes the time and returns what is to be done, in order."""

    def order(self, at: float, wish: Wish) -> list[Action]:
        """The scheduler wants this; what is older than the newest order is ignored."""
        if wish.generation > self.wish.generation and not self._is_ending:
            self.wish = wish
            self._end_quiet()
        return self._settled(at)

    def said(self, at: float, worker: int, message: Message) -> list[Action]:
        """A worker said something."""
        who = self.workers.get(worker)
        if who is None or who.mode is Mode.LEAVING:
            return []
        match message:
            case Ready():
                self._on_ready(who, message)
            case Loaded():
                who.mode, who.holds, who.step, who.loads = Mode.STANDING, True, message.step, ""
            case Contributed():
                self._on_contributed(at, who, message)
            case Updated():
                self._on_updated(who, message)
            case Stepped():
                self._on_stepped(who, message)
            case Noted(words):
                self._tell(words)
            case Evaluated():
                self._on_evaluated(who, message)
            case Halted():
                self._on_halted(who, message)
            case Published():
                self._actions += self._safe.published(at, worker, message.step)
                self._progressed(message.step)
            case Spared():
                self._sparing[worker] = True
            case Saved():
                self._safe.saved(worker, message.step)
            case Done():
                self._on_done(at, who, message)
            case Broke():
                self._on_broke(at, who, message)
            case _:
                pass
        return self._settled(at)

    def died(self, at: float, worker: int, why: str, steps: int = 0) -> list[Action]:
        """A worker's process has ended, with so many steps done."""
        who = self.workers.pop(worker, None)
        if who is not None and who.mode is not Mode.LEAVING:
            self._counted(who, steps)
            self._lose(at, who, f"died ({why})")
        return self._settled(at)

    def silent(self, at: float, worker: int, steps: int = 0) -> list[Action]:
        """A worker has given no sign of life for too long: it is killed and counts as dead at once."""
        who = self.workers.get(worker)
        if who is not None:
            self._counted(who, steps)
            self._kill(at, who, "gave no sign of life and was killed")
        return self._settled(at)

    def faulted(self, at: float, worker: int, how: str, *, counts: bool, steps: int = 0) -> list[Action]:
        """A worker's GPU failed under it: it is killed, and counts as lost only where it is to blame."""
        who = self.workers.get(worker)
        if who is not None:
            self._counted(who, steps)
            self._kill(at, who, how, counts=counts)
        return self._settled(at)

    def take_turns(self, at: float, by_token: bool) -> list[Action]:
        """Whether a token is needed for a step, because neighbours want it so."""
        self._by_token = by_token
        return self._settled(at)

    def hold(self, at: float, held: bool, *, clears: bool = True) -> list[Action]:
        """Stand still at the next boundary for a neighbour, and make room if that `clears`; or go on."""
        self._held, self._clears = held, clears
        return self._settled(at)

    def wait(self, at: float, waits: bool) -> list[Action]:
        """Stand still at the next boundary, with the state on disk, until somebody decides again; or go on."""
        self._waits, self._was_waiting_saved = waits, False
        return self._settled(at)

    def left_alone(self, at: float) -> list[Action]:
        """The neighbours stand still."""
        self._awaits_solitude = False
        return self._settled(at)

    def stop(self, at: float, *, checkpoint: bool) -> list[Action]:
        """End all workers at a boundary; the job can be resumed from its checkpoint."""
        self._stop = checkpoint
        return self._settled(at)

    def tick(self, at: float) -> list[Action]:
        """Time has passed."""
        self._keep_time(at)
        return self._settled(at)

    def _on_ready(self, who: WorkerState, ready: Ready) -> None:
        who.mode, who.step = Mode.STANDING, 0
        if self.ready is None:
            self._cutter.ready = ready
            for note in ready.notes:
                self._tell(note)
        elif problem := fits(self.ready, ready):
            self._fail(problem)

    def _on_contributed(self, at: float, who: WorkerState, said: Contributed) -> None:
        formation = self.formation
        if formation is None or said.formation != formation.number or said.step != formation.step:
            return
        seat = formation.shape.seats[formation.members.index(who.id)]
        self._cutter.measure(seat, said)
        formation.contributed[who.id] = said.seconds
        if len(formation.contributed) < len(formation.members):
            return
        if (between_s := formation.rhythm.barrier(at, max(formation.contributed.values()))) is not None:
            self._cutter.passed(formation.shape, between_s)
        formation.halting = formation.halting or self._wants_change()
        for member in formation.members:
            self._send(member, Apply(formation.number, formation.step, formation.halting))
            if formation.halting:
                self.workers[member].mode = Mode.HALTING
        formation.contributed.clear()
        formation.step += 1
        self._progressed(formation.step)

    def _on_updated(self, who: WorkerState, said: Updated) -> None:
        formation = self.formation
        if formation is None or said.formation != formation.number or said.step != formation.step - 1:
            return
        formation.updated.add(who.id)
        if len(formation.updated) == len(formation.members):
            formation.updated.clear()
            for member in formation.members:
                self._send(member, Gather(formation.number, said.step))

    def _on_stepped(self, who: WorkerState, said: Stepped) -> None:
        formation = self.formation
        self._memory_bytes = max(self._memory_bytes, said.memory_bytes)
        if formation is None or formation.members[0] != who.id:
            return
        if formation.is_solo:
            formation.step = max(formation.step, said.step)
            self._progressed(said.step)
        is_alone = said.probed and bool(self._quiet_for) and self._quiet_for == self._answered
        if said.probed:
            self._probed = self._answered
            self._end_quiet()
        if self._answered and not self._releasing:
            step_s = 1.0 / said.steps_per_s if said.steps_per_s > 0.0 else None
            report = ProgressReported(
                self.job,
                self._answered,
                float(said.step),
                said.steps_per_s,
                said.loss,
                said.noise,
                step_s=formation.rhythm.step_s or step_s,
                sync_s=formation.rhythm.sync_s if formation.rhythm.step_s else None,
                alone=is_alone,
                memory_bytes=self._memory_bytes,
            )
            self._cutter.gains.hear(said.noise)
            self._actions.append(Emit(report))

    def _on_evaluated(self, who: WorkerState, said: Evaluated) -> None:
        self._measured = Measured(said.step, said.metrics)
        for other in self.workers.values():
            # Who is just taking a state over may get one from before this evaluation, and would wait for it for ever.
            is_there = other.mode is Mode.LOADING or (other.holds and other.mode in AT_REST | AT_WORK)
            if other is not who and is_there:
                self._send(other.id, self._measured)

    def _on_halted(self, who: WorkerState, said: Halted) -> None:
        if who.mode is Mode.HALTING:  # else it answers a Halt that something else has overtaken
            who.mode, who.step = Mode.STANDING, said.step
            self._progressed(said.step)

    def _on_done(self, at: float, who: WorkerState, said: Done) -> None:
        is_first = self.formation is not None and self.formation.members[0] == who.id
        who.mode, who.step, who.digest = Mode.OVER, said.step, said.digest
        self._memory_bytes = max(self._memory_bytes, said.memory_bytes)
        self._progressed(said.step)
        if is_first:
            self._result = said
            for note in said.notes:
                self._tell(note)

    def _on_broke(self, at: float, who: WorkerState, said: Broke) -> None:
        where = self._name(who.device)
        if said.kind == "disk":
            self._tell(f"nothing was saved at step {said.step}: {said.error}. The training goes on.")
            was_publishing = self._safe.is_publishing
            self._actions += self._safe.given_up(who.id)
            if was_publishing and self.is_still:  # others wait for just this state
                self._fail(f"its state could not be handed on: {said.error}")
        elif said.kind == "lane":
            self._kill(at, who, f"was not put on its lane ({said.error})", counts=False)
        elif said.kind == "device":
            self._kill(at, who, f"lost its GPU ({said.error})")
        elif said.kind == "memory" and who.mode in AT_WORK:
            self._ran_short(at, who, said)
        elif said.kind == "memory":
            self._kill(at, who, f"ran out of memory before it could work ({said.error})")
        elif who.loads:
            self._try_older(who, said.error)
        else:
            self._fail(f"{said.error} (on {where}, step {said.step})")

    def _ran_short(self, at: float, who: WorkerState, said: Broke) -> None:
        """A step ran out of memory: once more while the neighbours stand still, then in smaller passes."""
        where = self._name(who.device)
        who.mode, who.step = Mode.STANDING, said.step
        self._progressed(said.step)  # a step that ran short before may have been made since
        if self._short_at is not None:
            self._split(who, said)
        else:
            self._tell(
                f"ran out of memory on {where} at step {said.step + 1}; tried again while the neighbours stand still"
            )
            self._short_at, self._awaits_solitude = said.step, True
            self._actions.append(BeAlone(who.device))
        if self.formation is not None:
            self._dissolve(at)

    def _split(self, who: WorkerState, said: Broke) -> None:
        """A step ran out of memory even alone: smaller passes from here on, or failure where they would matter."""
        short = Shortage(said, self._devices[who.device], self._cutter.batch_size(self.wish, len(self.wish.seats)))
        if problem := why_not_split(short, self.rules, self.ready):
            self._fail(problem)
        elif (split := self._splits.halve(said.step, said.samples)) is None:
            self._fail(f"{short.words} Not even a single sample fits: choose a smaller model or a larger device.")
        else:
            passes = -(-said.samples // split.samples)
            where = f"on {self._name(who.device)} at step {said.step + 1}"
            into = f"{passes} micro-steps of {split.samples} samples"
            self._tell(f"ran out of memory {where} even alone: split into {into}; rounding differs")
            self._actions.append(Write(split))

    def _try_older(self, who: WorkerState, error: str) -> None:
        """A checkpoint could not be read: the one before it, or failure if there is none."""
        self._tell(f"a checkpoint cannot be used: {error}")
        if not self._safe.is_damaged(who.loads):
            self._fail(f"no checkpoint can be used: {error}")
        who.mode, who.loads = Mode.STANDING, ""

    def _keep_time(self, at: float) -> None:
        rules, formation = self.rules, self.formation
        for worker in self.workers.values():
            if worker.mode is Mode.LEAVING and at - worker.left_at > rules.grace_s:
                self._actions.append(Kill(worker.id))
                worker.left_at = at
        if formation is None or formation.halting or self._is_ending:
            return
        if rules.time_limit_s and self._ran_s + at - formation.since > rules.time_limit_s:
            self._fail(f"it ran for longer than its time limit of {rules.time_limit_s:g} s (step {formation.step})")
            return
        first = self.workers[formation.members[0]]
        if first.mode is not Mode.WORKING or any(w.mode is Mode.LOADING for w in self.workers.values()):
            return  # the older mirror is being read and must not be written to
        self._actions += self._safe.due(at, formation.step, first.id)
