"""From where a team stands towards what is wished: whatever step can be taken now; pure.

    wish        seats that the newest order asks for; workers are started on them aside, while the others work
    formation   workers that make steps together; it is dissolved at a boundary when something is to change
    at rest     workers between formations; the newest state among them (or the mirror, or the checkpoint) is handed
                to those that lack it, then all proceed in a new formation

In default mode a formation waits for every seat, so that a lost worker is replaced and the step is made again with the
same parts. In exact mode the survivors go on at once: who owns which shard does not change the result.
"""

from __future__ import annotations

from carpool.core.messages import (
    AssignApplied,
    JobFailed,
    JobFinished,
    ReleaseApplied,
)
from carpool.runtime.actions import (
    Action,
    BeAlone,
    Emit,
    Ended,
    Kill,
    Rejoin,
    Segment,
    Stopped,
    Write,
)
from carpool.runtime.crew import (
    AT_REST,
    AT_WORK,
    Formation,
    Mode,
    Seat,
    Shape,
    WorkerState,
    owners_of,
)
from carpool.runtime.dealing import segment_bytes
from carpool.runtime.protocol import (
    Halt,
    Proceed,
    Spare,
)
from carpool.runtime.roster import Roster


class Settling(Roster):
    """A roster that moves towards its wish. There is no plan that could be interrupted: it looks at what is there."""

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
        self._ask_for_quiet()
        if self.formation is not None:
            self._steer(at)
        elif not at_work:
            if self._wants_nothing:
                self._withdraw(at)
            elif self._waits:
                self._keep_waiting(at)
            elif self._held:
                if self._clears:
                    self._make_room()
            else:
                self._gather(at)
        self._answer()

    def _staff(self, at: float) -> None:
        """Start workers on wished seats that have none, send away newcomers that are no longer wished."""
        seats = () if self._stop is not None else self.wish.seats
        wished = {self._berth(seat) for seat in seats}
        for worker in list(self.workers.values()):
            is_member = self.formation is None or worker.id in self.formation.members
            is_needed = worker.writes or (worker.holds and is_member)
            if not is_needed and worker.berth not in wished and worker.mode is not Mode.LEAVING:
                self._dismiss(at, worker)
        taken = {worker.berth for worker in self.workers.values()}
        for seat in seats:
            if self._berth(seat) not in taken:
                self._start(seat)

    def _ask_for_quiet(self) -> None:
        """Before a probe: let the neighbours stand still once the worker is there that shall be measured."""
        if self._is_to_probe and not self._quiet_for and not self._awaits_solitude and self._seated():
            self._quiet_for, self._awaits_solitude = self.wish.generation, True
            self._actions.append(BeAlone(self.wish.seats[0].device, clears=False))

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
        if self._held or self._waits or self._wants_nothing or self._awaits_solitude:
            return True
        seated = self._seated()
        if len(seated) < len(self.wish.seats):
            return False  # newcomers are not there yet; meanwhile it goes on as it is
        if seated != list(formation.members):
            return True
        following = formation.step + 1  # the present step is being made as it was cut
        return self._shape(self.wish.seats, following, formation) != formation.shape

    def _shape(self, seats: tuple[Seat, ...], step: int, now: Formation | None) -> Shape:
        is_new = step >= self._losses.high
        return self._cutter.shape(self.wish, seats, step, by_token=self._by_token, now=now, is_new=is_new)

    def _gather(self, at: float) -> None:
        """Bring everybody on the wished seats to the newest state and let them proceed."""
        seated = [self.workers[worker] for worker in self._seated()]
        holders = [w for w in self.workers.values() if w.holds and w.mode in AT_REST]
        if not seated or self._awaits_solitude or self._safe.is_publishing:
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

    def _make_room(self) -> None:
        """While it stands still for a neighbour: let the workers give back memory that is only kept for later."""
        for worker in self.workers.values():
            if worker.mode is Mode.STANDING and worker.id not in self._sparing:
                self._sparing[worker.id] = False
                self._send(worker.id, Spare())

    def _keep_waiting(self, at: float) -> None:
        """While nobody is there to decide: let the newest state be on disk, in case nobody comes any more."""
        holders = [w for w in self.workers.values() if w.holds and w.mode in AT_REST]
        newest = max(holders, key=lambda w: w.step, default=None)
        if newest is None or newest.step <= self._safe.saved_step or self._safe.is_busy or self._was_waiting_saved:
            return
        self._was_waiting_saved = True
        self._actions.append(self._safe.save(at, newest.id))

    def _is_at(self, worker: WorkerState, step: int) -> bool:
        return worker.step == step and (worker.holds or step == 0)

    def _proceed(self, at: float, seated: list[WorkerState], step: int) -> None:
        """Let workers that stand at the same step work together from there."""
        assert self.ready is not None
        seats = tuple(seat for seat in self.wish.seats if any(w.berth == self._berth(seat) for w in seated))
        shape = self._shape(seats, step, None)
        self._sparing.clear()
        self._numbers += 1
        self.formation = Formation(self._numbers, tuple(w.id for w in seated), shape, step, at)
        owners = owners_of(shape, exact=self.rules.exact)
        size = self._shared_bytes(owners)
        if owners and (self._segment is None or self._segment.size_bytes < size):
            self._segment = Segment(self._numbers, size)
        if (cut := self._cutter.record(step, shape)) is not None:
            self._actions.append(Write(cut))
        self._tell_division(shape)
        for rank, (worker, seat) in enumerate(zip(seated, seats, strict=True)):
            proceed = Proceed(
                self._numbers,
                rank,
                len(seated),
                owners,
                parts=() if self.rules.exact else shape.counts,
                updates=shape.updates,
                reducer=self.rules.reducer,
                by_token=shape.by_token,
                batch_size=shape.batch_size,
                gain=self._cutter.gain(self.wish, len(seated)),
                threads=self._cutter.threads(seat),
                update_threads=min(self._cutter.threads(seat) for seat in seats),
                limits=self._splits.limits,
                probe=0 if self._probed >= self.wish.generation else self.wish.probe,
            )
            self._send(worker.id, proceed, self._segment if owners else None)
            worker.mode, worker.holds, worker.has_joined = Mode.WORKING, True, True
            self._losses.joined(worker.device)
        wished = {self._berth(seat) for seat in self.wish.seats}
        for worker in list(self.workers.values()):
            if worker.berth not in wished and worker.mode in AT_REST:
                self._dismiss(at, worker)
        self._first_step = step if self._first_step is None else self._first_step
        self._safe.begin(at)

    def _shared_bytes(self, owners: tuple[tuple[int, int], ...]) -> int:
        """What ranks share: all contributions, or with a process group only its store, a file that grows by itself."""
        assert self.ready is not None
        return 0 if self.rules.reducer == "group" else segment_bytes(owners, self.ready.segment_bytes)

    def _tell_division(self, shape: Shape) -> None:
        """Who updates the parameters, when that has changed."""
        if shape.updates == self._divided:
            return
        self._divided = shape.updates
        if not shape.updates:
            self._tell("every device updates all parameters itself")
            return
        assert self.ready is not None
        parts = [sum(self.ready.sizes[first:stop]) / sum(self.ready.sizes) for first, stop in shape.updates]
        named = [f"{self._name(seat.device)} {part:.0%}" for seat, part in zip(shape.seats, parts, strict=True)]
        self._tell(f"each device updates a part of the parameters for all: {', '.join(named)}")

    def _withdraw(self, at: float) -> None:
        """Keep the newest state outside of the workers, then send all of them away."""
        self._end_quiet()
        if self._short_at is not None:
            self._short_at, self._awaits_solitude = None, False
            self._actions.append(Rejoin())
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
        if not scribes:  # the state lies in a mirror: a worker has to be started to write it
            self._start(Seat(min(self._devices)), writes=True)
        elif scribes[0].mode is Mode.STANDING:
            self._load(scribes[0])
        return True

    def _answer(self) -> None:
        """Tell the scheduler, once, when things are as ordered and nobody is left elsewhere."""
        wish, formation = self.wish, self.formation
        if self._answered >= wish.generation or self._stop is not None:
            return
        wished = {self._berth(seat) for seat in wish.seats}
        if any(worker.berth not in wished for worker in self.workers.values()):
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
        self._end_quiet()
        if self._short_at is not None:
            self._actions.append(Rejoin())
        self._actions += self._safe.empty()
        is_unheard = self._releasing and self._answered < self.wish.generation
        if is_unheard and self.wish.seats and not self._failure:  # the scheduler hears first that it ran
            self._answered, self._releasing = self.wish.generation, False
            self._actions.append(Emit(AssignApplied(self.job, self._answered, float(self._losses.high))))
        generation = self.wish.generation if self._releasing else self._answered
        if self._failure or result is None:
            self._actions.append(Ended(self._failure, self._losses.high, memory_bytes=self._memory_bytes))
            self._actions.append(Emit(JobFailed(self.job, generation, self._failure)))
            return
        batch = self._cutter.batch_size(self.wish, 1)
        steps = result.step - (self._first_step or 0)
        rate = steps * batch / self._ran_s if self._ran_s > 0 else 0.0
        figures = (result.step, result.epoch, result.loss, dict(result.metrics), result.digest, rate)
        self._actions.append(Ended(result.reason, *figures, memory_bytes=self._memory_bytes))
        self._actions.append(Emit(JobFinished(self.job, generation)))
