"""The workers of one job as a state machine: events in, actions out; no clock, no sockets, no torch.

Every event changes what is known; then `_settle` takes whatever step towards the newest order is possible now. There is
no plan that could be interrupted: after any fault the same rules look at what is left and go on from there.

    wish        seats that the newest order asks for; workers are started on them aside, while the others work
    formation   workers that make steps together; it is dissolved at a boundary when something is to change
    at rest     workers between formations; the newest state among them (or the mirror, or the checkpoint) is handed
                to those that lack it, then all proceed in a new formation

In default mode a formation waits for every seat, so that a lost worker is replaced and the step is made again with the
same parts. In exact mode the survivors go on at once: who owns which shard does not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.core.messages import (
    AssignApplied,
    JobFailed,
    JobFinished,
    ProgressReported,
    ReleaseApplied,
)
from carpool.core.model import JobId
from carpool.runtime.actions import (
    Action,
    Cut,
    Emit,
    Ended,
    Kill,
    Mirror,
    Park,
    Segment,
    Send,
    Start,
    Stopped,
    Tell,
    Unpark,
    Write,
)
from carpool.runtime.crew import (
    AT_REST,
    AT_WORK,
    Formation,
    Kept,
    Mode,
    Rules,
    Seat,
    Shape,
    Wish,
    Worker,
    fits,
    owners_of,
)
from carpool.runtime.cutting import Cutter
from carpool.runtime.dealing import segment_bytes
from carpool.runtime.devices import LocalDevice
from carpool.runtime.losses import Losses
from carpool.runtime.protocol import (
    Apply,
    Broke,
    Contributed,
    Done,
    Evaluated,
    Halt,
    Halted,
    Leave,
    Loaded,
    Measured,
    Message,
    Proceed,
    Published,
    Ready,
    Saved,
    Stepped,
)
from carpool.runtime.safe import Safe


class Team:
    """One job's workers. Every method takes the time and returns what is to be done, in order."""

    def __init__(
        self,
        job: JobId,
        devices: Mapping[int, LocalDevice],
        rules: Rules,
        *,
        checkpoints: Sequence[Kept] = (),  # to go on from, oldest first
        cuts: Sequence[Cut] = (),  # that held when the job ran before
    ) -> None:
        self.job = job
        self.rules = rules
        self.wish = Wish(0)
        self.workers: dict[int, Worker] = {}
        self.formation: Formation | None = None
        self.is_over = False  # the job has ended, or the team was stopped, and no process is left
        self._devices = devices
        self._safe = Safe(rules, checkpoints)
        self._losses = Losses(rules.retries)
        self._cutter = Cutter(devices, rules, cuts)
        self._actions: list[Action] = []
        self._numbers = 0  # of workers, formations and mirrors
        self._answered = 0  # newest generation that was answered
        self._releasing = True  # whether that answer was a release
        self._by_token = False
        self._held = False  # stands still for a neighbour
        self._stop: bool | None = None  # asked to stop; whether with a checkpoint
        self._was_asked_to_save = False  # at the stop
        self._result: Done | None = None  # what rank 0 said at the end
        self._failure = ""
        self._measured: Measured | None = None  # the last evaluation
        self._ran_s = 0.0  # time in formations before the present one
        self._first_step: int | None = None
        self._segment: Segment | None = None  # of the last formation, for the next one: its pages are there already
        self._short_at: int | None = None  # the step that ran out of memory and is tried again
        self._awaits_parking = False

    # -- events -------------------------------------------------------------------------------------------------------

    def order(self, at: float, wish: Wish) -> list[Action]:
        """The scheduler wants this; what is older than the newest order is ignored."""
        if wish.generation > self.wish.generation and not self._is_ending:
            self.wish = wish
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
            case Stepped():
                self._on_stepped(who, message)
            case Evaluated():
                self._on_evaluated(who, message)
            case Halted():
                self._on_halted(who, message)
            case Published():
                self._actions += self._safe.published(at, worker, message.step)
                self._progressed(message.step)
            case Saved():
                self._safe.saved(worker, message.step)
            case Done():
                self._on_done(at, who, message)
            case Broke():
                self._on_broke(at, who, message)
            case _:
                pass
        return self._settled(at)

    def died(self, at: float, worker: int, why: str) -> list[Action]:
        """A worker's process has ended."""
        who = self.workers.pop(worker, None)
        if who is not None and who.mode is not Mode.LEAVING:
            self._lose(at, who, f"died ({why})")
        return self._settled(at)

    def silent(self, at: float, worker: int) -> list[Action]:
        """A worker has given no sign of life for too long: it is killed and counts as dead at once."""
        who = self.workers.get(worker)
        if who is not None:
            self._kill(at, who, "gave no sign of life and was killed")
        return self._settled(at)

    def take_turns(self, at: float, by_token: bool) -> list[Action]:
        """Whether a token is needed for a step, because neighbours want it so."""
        self._by_token = by_token
        return self._settled(at)

    def hold(self, at: float, held: bool) -> list[Action]:
        """Stand still at the next boundary for a neighbour, or go on."""
        self._held = held
        return self._settled(at)

    def parked(self, at: float) -> list[Action]:
        """The neighbours stand still."""
        self._awaits_parking = False
        return self._settled(at)

    def stop(self, at: float, *, checkpoint: bool) -> list[Action]:
        """End all workers at a boundary; the job can be resumed from its checkpoint."""
        self._stop = checkpoint
        return self._settled(at)

    def tick(self, at: float) -> list[Action]:
        """Time has passed."""
        self._keep_time(at)
        return self._settled(at)

    @property
    def ready(self) -> Ready | None:
        """What the first worker said of the training."""
        return self._cutter.ready

    @property
    def is_still(self) -> bool:
        """Whether no worker of it computes."""
        return self.formation is None and not any(w.mode in AT_WORK for w in self.workers.values())

    @property
    def done(self) -> int:
        """Steps done, as far as is known."""
        steps = [w.step for w in self.workers.values() if w.holds and w.mode in AT_REST]
        if self.formation is not None:
            steps.append(self.formation.step)
        return max(steps, default=self._safe.step)

    # -- what workers say ---------------------------------------------------------------------------------------------

    def _on_ready(self, who: Worker, ready: Ready) -> None:
        who.mode, who.step = Mode.STANDING, 0
        if self.ready is None:
            self._cutter.ready = ready
            for note in ready.notes:
                self._tell(note)
        elif problem := fits(self.ready, ready):
            self._fail(problem)

    def _on_contributed(self, at: float, who: Worker, said: Contributed) -> None:
        formation = self.formation
        if formation is None or said.formation != formation.number or said.step != formation.step:
            return
        seat = formation.shape.seats[formation.members.index(who.id)]
        self._cutter.measure(seat, said.seconds, said.samples)
        formation.contributed[who.id] = said.seconds
        if len(formation.contributed) < len(formation.members):
            return
        formation.pace.barrier(at, max(formation.contributed.values()))
        formation.halting = formation.halting or self._wants_change()
        for member in formation.members:
            self._send(member, Apply(formation.number, formation.step, formation.halting))
            if formation.halting:
                self.workers[member].mode = Mode.HALTING
        formation.contributed.clear()
        formation.step += 1
        self._progressed(formation.step)

    def _on_stepped(self, who: Worker, said: Stepped) -> None:
        formation = self.formation
        if formation is None or formation.members[0] != who.id:
            return
        if formation.is_solo:
            formation.step = max(formation.step, said.step)
            self._progressed(said.step)
        if self._answered and not self._releasing:
            step_s = 1.0 / said.steps_per_s if said.steps_per_s > 0.0 else None
            report = ProgressReported(
                self.job,
                self._answered,
                float(said.step),
                said.steps_per_s,
                said.loss,
                said.noise,
                step_s=formation.pace.step_s or step_s,
                sync_s=formation.pace.sync_s if formation.pace.step_s else None,
            )
            self._actions.append(Emit(report))

    def _on_evaluated(self, who: Worker, said: Evaluated) -> None:
        self._measured = Measured(said.step, said.metrics)
        for other in self.workers.values():
            if other is not who and other.holds and other.mode in AT_REST | AT_WORK:
                self._send(other.id, self._measured)

    def _on_halted(self, who: Worker, said: Halted) -> None:
        if who.mode is Mode.HALTING:  # else it answers a Halt that something else has overtaken
            who.mode, who.step = Mode.STANDING, said.step
            self._progressed(said.step)

    def _on_done(self, at: float, who: Worker, said: Done) -> None:
        is_first = self.formation is not None and self.formation.members[0] == who.id
        who.mode, who.step, who.digest = Mode.OVER, said.step, said.digest
        self._progressed(said.step)
        if is_first:
            self._result = said
            for note in said.notes:
                self._tell(note)

    def _on_broke(self, at: float, who: Worker, said: Broke) -> None:
        where = self._name(who.device)
        if said.kind == "disk":
            self._tell(f"nothing was saved at step {said.step}: {said.error}. The training goes on.")
            was_publishing = self._safe.is_publishing
            self._actions += self._safe.given_up(who.id)
            if was_publishing and self.is_still:  # others wait for just this state
                self._fail(f"its state could not be handed on: {said.error}")
        elif said.kind == "memory" and who.mode in AT_WORK:
            self._ran_short(at, who, said)
        elif said.kind == "memory":
            self._kill(at, who, f"ran out of memory before it could work ({said.error})")
        elif who.loads:
            self._try_older(who, said.error)
        else:
            self._fail(f"{said.error} (on {where}, step {said.step})")

    def _ran_short(self, at: float, who: Worker, said: Broke) -> None:
        """A step ran out of memory: once more with the neighbours parked, then it is the job's own fault."""
        where = self._name(who.device)
        who.mode, who.step = Mode.STANDING, said.step
        if self._short_at is not None:
            self._fail(f"step {said.step + 1} needs more memory than {where} has, even alone: {said.error}")
            return
        self._tell(f"ran out of memory on {where} at step {said.step + 1}; tried again with the neighbours parked")
        self._short_at, self._awaits_parking = said.step, True
        self._actions.append(Park(who.device))
        if self.formation is not None:
            self._dissolve(at)

    def _try_older(self, who: Worker, error: str) -> None:
        """A checkpoint could not be read: the one before it, or failure if there is none."""
        self._tell(f"a checkpoint cannot be used: {error}")
        if not self._safe.is_damaged(who.loads):
            self._fail(f"no checkpoint can be used: {error}")
        who.mode, who.loads = Mode.STANDING, ""

    # -- losses and ends ----------------------------------------------------------------------------------------------

    def _kill(self, at: float, who: Worker, how: str) -> None:
        """End a worker by force; it counts as dead at once, though its device is free only when it has ended."""
        self._actions.append(Kill(who.id))
        if who.mode is not Mode.LEAVING:
            who.mode, who.left_at = Mode.LEAVING, at
            self._lose(at, who, how)

    def _lose(self, at: float, who: Worker, how: str) -> None:
        """A worker is dead or as good as dead."""
        where = self._name(who.device)
        self._actions += self._safe.given_up(who.id)
        formation, enough = self.formation, ""
        if formation is not None and who.id in formation.members:
            self._tell(f"the worker on {where} {how} at step {formation.step} and is replaced")
            enough = self._losses.lost()
            self._segment = None  # a worker that was killed may still be writing into it
            self._dissolve(at)
        elif not who.has_joined:
            self._tell(f"the worker on {where} {how} before it could join and is replaced")
            enough = self._losses.lost_before_joining(who.device)
        else:
            self._tell(f"the worker on {where} {how} and is replaced")
        if enough and self._result is None:
            self._fail(f"{enough}; the last one, on {where}, {how}")

    def _dissolve(self, at: float) -> None:
        """End the formation now; whoever still works in it stops at its boundary."""
        assert self.formation is not None
        self._ran_s += at - self.formation.since
        for member in self.formation.members:
            worker = self.workers.get(member)
            if worker is not None and worker.mode is Mode.WORKING:
                self._send(member, Halt())
                worker.mode = Mode.HALTING
        self.formation = None

    def _fail(self, words: str) -> None:
        self._failure = self._failure or words

    @property
    def _is_ending(self) -> bool:
        return bool(self._failure) or self.is_over

    def _progressed(self, step: int) -> None:
        self._losses.progressed(step)
        if self._short_at is not None and step > self._short_at and not self._awaits_parking:
            self._short_at = None
            self._actions.append(Unpark())

    # -- settling -----------------------------------------------------------------------------------------------------

    def _settled(self, at: float) -> list[Action]:
        if not self.is_over:
            self._settle(at)
        actions, self._actions = self._actions, []
        return actions

    def _settle(self, at: float) -> None:
        """Take every step towards the wish that can be taken now."""
        formation = self.formation
        if formation is not None and all(self.workers[m].mode in AT_REST for m in formation.members):
            self._dissolve(at)
        at_work = any(w.mode in AT_WORK for w in self.workers.values())
        if self._failure or (self._result is not None and not at_work):
            self._end(at)
            return
        self._staff(at)
        if self.formation is not None:
            self._steer(at)
        elif not at_work:
            if self._wants_nothing:
                self._withdraw(at)
            elif not self._held:
                self._gather(at)
        self._answer()

    @property
    def _wants_nothing(self) -> bool:
        return self._stop is not None or not self.wish.seats

    def _staff(self, at: float) -> None:
        """Start workers on wished seats that have none, send away newcomers that are no longer wished."""
        seats = () if self._stop is not None else self.wish.seats
        wished = {seat.device for seat in seats}
        for worker in list(self.workers.values()):
            is_member = self.formation is None or worker.id in self.formation.members
            is_needed = worker.writes or (worker.holds and is_member)
            if not is_needed and worker.device not in wished and worker.mode is not Mode.LEAVING:
                self._dismiss(at, worker)
        taken = {worker.device for worker in self.workers.values()}
        for seat in seats:
            if seat.device not in taken:
                self._start(seat)

    def _start(self, seat: Seat, *, writes: bool = False) -> None:
        self._numbers += 1
        self.workers[self._numbers] = Worker(self._numbers, seat.device, writes=writes)
        self._actions.append(Start(self._numbers, seat.device, self._cutter.threads(seat)))

    def _steer(self, at: float) -> None:
        """While a formation works: begin to halt it when something is to change."""
        formation = self.formation
        assert formation is not None
        if formation.halting:
            return
        self._rehearse()
        if not self._wants_change():
            return
        formation.halting = True
        if formation.is_solo:  # in company the next Apply says it, so that no pass is wasted
            self._send(formation.members[0], Halt())
            self.workers[formation.members[0]].mode = Mode.HALTING

    def _rehearse(self) -> None:
        """Let newcomers take over the last mirror aside: with memory and code in place the real one goes quicker."""
        newest = self._safe.newest
        for worker in self.workers.values():
            if worker.mode is Mode.STANDING and not worker.holds and newest is not None and newest.mirror is not None:
                self._load(worker)

    def _wants_change(self) -> bool:
        """Whether the formation should stop at the next boundary."""
        formation = self.formation
        assert formation is not None
        if self._held or self._wants_nothing or self._awaits_parking:
            return True
        seated = self._seated()
        if len(seated) < len(self.wish.seats):
            return False  # newcomers are not there yet; meanwhile it goes on as it is
        if seated != list(formation.members):
            return True
        return self._shape(self.wish.seats, formation.step, formation) != formation.shape

    def _shape(self, seats: tuple[Seat, ...], step: int, now: Formation | None) -> Shape:
        is_new = step >= self._losses.high
        return self._cutter.shape(self.wish, seats, step, by_token=self._by_token, now=now, is_new=is_new)

    def _seated(self) -> list[int]:
        """Workers on the wished seats that are there, by seat."""
        able = AT_REST | AT_WORK
        found = {w.device: w.id for w in self.workers.values() if w.mode in able}
        return [found[seat.device] for seat in self.wish.seats if seat.device in found]

    # -- between formations -------------------------------------------------------------------------------------------

    def _gather(self, at: float) -> None:
        """Bring everybody on the wished seats to the newest state and let them proceed."""
        seated = [self.workers[worker] for worker in self._seated()]
        holders = [w for w in self.workers.values() if w.holds and w.mode in AT_REST]
        if not seated or self._awaits_parking or self._safe.is_publishing:
            return
        if any(w.mode is Mode.LOADING for w in self.workers.values()):
            return
        if len(seated) < len(self.wish.seats):
            some_go_on = self.rules.exact or all(w.mode is Mode.OVER for w in holders)
            if not some_go_on or not any(w.holds for w in seated):
                return
            if not self.rules.exact:
                seated = [w for w in seated if w.mode is Mode.OVER]
        step = self._newest_step(holders)
        behind = [w for w in seated if not self._is_at(w, step)]
        if not behind:
            self._proceed(at, seated, step)
        elif self._safe.step == step:
            for worker in behind:
                self._load(worker)
        else:
            self._actions.append(self._safe.publish(max(holders, key=lambda w: w.step).id))

    def _newest_step(self, holders: Sequence[Worker]) -> int:
        return max([self._safe.step, *(w.step for w in holders)])

    def _is_at(self, worker: Worker, step: int) -> bool:
        return worker.step == step and (worker.holds or step == 0)

    def _load(self, worker: Worker) -> None:
        newest = self._safe.newest
        worker.mode, worker.loads = Mode.LOADING, newest.path if newest else ""
        self._actions.append(self._safe.load(worker.id))
        if self._measured is not None and self._measured.step == self._safe.step:
            self._send(worker.id, self._measured)  # the state may have been taken before its evaluation

    def _proceed(self, at: float, seated: list[Worker], step: int) -> None:
        """Let workers that stand at the same step work together from there."""
        assert self.ready is not None
        seats = tuple(seat for seat in self.wish.seats if any(w.device == seat.device for w in seated))
        shape = self._shape(seats, step, None)
        self._numbers += 1
        self.formation = Formation(self._numbers, tuple(w.id for w in seated), shape, step, at)
        owners = owners_of(shape, exact=self.rules.exact)
        size = segment_bytes(owners, self.ready.segment_bytes)
        if size and (self._segment is None or self._segment.size_bytes < size):
            self._segment = Segment(self._numbers, size)
        if (cut := self._cutter.record(step, shape)) is not None:
            self._actions.append(Write(cut))
        for rank, (worker, seat) in enumerate(zip(seated, seats, strict=True)):
            proceed = Proceed(
                self._numbers,
                rank,
                len(seated),
                owners,
                parts=() if self.rules.exact else shape.counts,
                by_token=shape.by_token,
                batch_size=shape.batch_size,
                threads=self._cutter.threads(seat),
            )
            self._send(worker.id, proceed, self._segment if size else None)
            worker.mode, worker.holds, worker.has_joined = Mode.WORKING, True, True
            self._losses.joined(worker.device)
        wished = {seat.device for seat in self.wish.seats}
        for worker in list(self.workers.values()):
            if worker.device not in wished and worker.mode in AT_REST:
                self._dismiss(at, worker)
        self._first_step = step if self._first_step is None else self._first_step
        self._safe.begin(at)

    def _withdraw(self, at: float) -> None:
        """Keep the newest state outside of the workers, then send all of them away."""
        if self._short_at is not None:
            self._short_at, self._awaits_parking = None, False
            self._actions.append(Unpark())
        if self._safe.is_busy or self._is_being_kept(at):
            return
        for worker in list(self.workers.values()):
            if worker.mode is not Mode.LEAVING:
                self._dismiss(at, worker)
        if not self.workers and self._stop is not None:
            self.is_over = True
            self._actions.append(Stopped(self._safe.saved_step if self._stop else self.done))

    def _is_being_kept(self, at: float) -> bool:
        """Start whatever must be done so that the newest state outlasts the workers; whether anything must."""
        holders = [w for w in self.workers.values() if w.holds and w.mode in AT_REST]
        newest = max(holders, key=lambda w: w.step, default=None)
        step = self._newest_step(holders)
        if self._stop is None:
            if newest is None or self._safe.step >= newest.step:
                return False
            self._actions.append(self._safe.publish(newest.id))
            return True
        if not self._stop or step <= self._safe.saved_step:
            return False
        if newest is not None and newest.step == step:
            if self._was_asked_to_save:
                return False  # the disk is full, and the story says so
            self._was_asked_to_save = True
            self._actions.append(self._safe.save(at, newest.id))
            return True
        scribes = [w for w in self.workers.values() if w.writes and w.mode is not Mode.LEAVING]
        if not scribes:  # the state lies parked in a mirror: a worker has to be started to write it
            self._start(Seat(min(self._devices)), writes=True)
        elif scribes[0].mode is Mode.STANDING:
            self._load(scribes[0])
        return True

    def _dismiss(self, at: float, worker: Worker) -> None:
        """Send a worker away: politely where it listens, by force where it has nothing to lose."""
        if worker.mode is Mode.WARMING or worker.mode is Mode.LOADING:
            self._actions.append(Kill(worker.id))
        else:
            self._send(worker.id, Leave())
        worker.mode, worker.left_at = Mode.LEAVING, at

    def _answer(self) -> None:
        """Tell the scheduler, once, when things are as ordered and nobody is left elsewhere."""
        wish, formation = self.wish, self.formation
        if self._answered >= wish.generation or self._stop is not None:
            return
        wished = {seat.device for seat in wish.seats}
        if any(worker.device not in wished for worker in self.workers.values()):
            return
        if not wish.seats:
            self._releasing, self._answered = True, wish.generation
            self._actions.append(Emit(ReleaseApplied(self.job, wish.generation, float(self.done))))
        elif formation is not None and formation.shape.seats == wish.seats and not formation.halting:
            self._releasing, self._answered = False, wish.generation
            self._actions.append(Emit(AssignApplied(self.job, wish.generation, float(formation.step))))

    def _end(self, at: float) -> None:
        """Finish or fail: all workers go, then the scheduler hears of it."""
        if self.formation is not None:
            self._ran_s += at - self.formation.since
            self.formation = None
        result = self._result
        if result is not None and not self._failure:
            unlike = [w for w in self.workers.values() if w.mode is Mode.OVER and w.digest != result.digest]
            if unlike:
                where = ", ".join(self._name(w.device) for w in unlike)
                self._failure = f"the workers on {where} ended with other weights than the first one: a bug of carpool"
        for worker in list(self.workers.values()):
            if worker.mode is Mode.LEAVING:
                continue
            if self._failure and worker.mode in AT_WORK:
                self._actions.append(Kill(worker.id))
                worker.mode, worker.left_at = Mode.LEAVING, at
            else:
                self._dismiss(at, worker)
        if self.workers:
            return
        self._conclude()

    def _conclude(self) -> None:
        result = self._result
        self.is_over = True
        if self._short_at is not None:
            self._actions.append(Unpark())
        self._actions += self._safe.empty()
        is_unheard = self._releasing and self._answered < self.wish.generation
        if is_unheard and self.wish.seats and not self._failure:  # the scheduler hears first that it ran
            self._answered, self._releasing = self.wish.generation, False
            self._actions.append(Emit(AssignApplied(self.job, self._answered, float(self._losses.high))))
        generation = self.wish.generation if self._releasing else self._answered
        if self._failure or result is None:
            self._actions.append(Ended(self._failure, self._losses.high))
            self._actions.append(Emit(JobFailed(self.job, generation, self._failure)))
            return
        batch = self._cutter.batch_size(self.wish, 1)
        steps = result.step - (self._first_step or 0)
        rate = steps * batch / self._ran_s if self._ran_s > 0 else 0.0
        self._actions.append(
            Ended(result.reason, result.step, result.epoch, result.loss, dict(result.metrics), result.digest, rate)
        )
        self._actions.append(Emit(JobFinished(self.job, generation)))

    # -- time ---------------------------------------------------------------------------------------------------------

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

    # -- small words --------------------------------------------------------------------------------------------------

    def _name(self, device: int) -> str:
        return self._devices[device].name

    def _tell(self, words: str) -> None:
        self._actions.append(Tell(words))

    def _send(self, worker: int, message: Message, beside: Segment | Mirror | None = None) -> None:
        self._actions.append(Send(worker, message, beside))
