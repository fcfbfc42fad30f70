"""Who works for a job and what is known of it: the state of a team, and what happens when a worker is lost; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.core.model import JobId
from carpool.runtime.actions import (
    Action,
    Cut,
    Kill,
    Mirror,
    Rejoin,
    Segment,
    Send,
    Split,
    Start,
    Tell,
)
from carpool.runtime.crew import (
    AT_REST,
    AT_WORK,
    Berth,
    Formation,
    KeptState,
    Mode,
    Rules,
    Seat,
    Wish,
    WorkerState,
)
from carpool.runtime.cutting import Cutter
from carpool.runtime.devices import LocalDevice
from carpool.runtime.division import Ranges
from carpool.runtime.lanes import WHOLE, percent
from carpool.runtime.losses import Losses
from carpool.runtime.protocol import (
    Done,
    Halt,
    Leave,
    Measured,
    Message,
    Ready,
)
from carpool.runtime.safe import Safe
from carpool.runtime.splitting import Splits


class Roster:
    """The workers of one job, their formation, and the actions that have been decided but not handed out yet."""

    def __init__(
        self,
        job: JobId,
        devices: Mapping[int, LocalDevice],
        rules: Rules,
        *,
        checkpoints: Sequence[KeptState] = (),  # to go on from, oldest first
        cuts: Sequence[Cut] = (),  # that held when the job ran before
        splits: Sequence[Split] = (),
    ) -> None:
        self.job = job
        self.rules = rules
        self.wish = Wish(0)
        self.workers: dict[int, WorkerState] = {}
        self.formation: Formation | None = None
        self.is_over = False  # the job has ended, or the team was stopped, and no process is left
        self._devices = devices
        self._safe = Safe(rules, checkpoints)
        self._losses = Losses(rules.retries)
        self._cutter = Cutter(devices, rules, cuts)
        self._splits = Splits(splits)
        self._sparing: dict[int, bool] = {}  # workers asked to give memory back; whether they have
        self._actions: list[Action] = []
        self._numbers = 0  # of workers, formations and mirrors
        self._answered = 0  # newest generation that was answered
        self._releasing = True  # whether that answer was a release
        self._by_token = False
        self._held = False  # stands still for a neighbour
        self._clears = True  # and makes room for it
        self._waits = False  # stands still because nobody is there who could decide anything
        self._was_waiting_saved = False  # its state was to be written to disk since
        self._stop: bool | None = None  # asked to stop; whether with a checkpoint
        self._was_asked_to_save = False  # at the stop
        self._result: Done | None = None  # what rank 0 said at the end
        self._failure = ""
        self._divided: Ranges = ()  # of the last formation
        self._measured: Measured | None = None  # the last evaluation
        self._ran_s = 0.0  # time in formations before the present one
        self._first_step: int | None = None
        self._segment: Segment | None = None  # of the last formation, for the next one: its pages are there already
        self._short_at: int | None = None  # the step that ran out of memory and is tried again
        self._awaits_solitude = False
        self._probed = 0  # newest generation whose probe was measured
        self._quiet_for = 0  # generation for whose probe the neighbours were asked to stand still; 0: for none
        self._memory_bytes = 0  # that a worker held at most

    @property
    def ready(self) -> Ready | None:
        """What the first worker said of the training."""
        return self._cutter.ready

    @property
    def is_still(self) -> bool:
        """Whether no worker of it computes."""
        return self.formation is None and not any(w.mode in AT_WORK for w in self.workers.values())

    @property
    def has_made_room(self) -> bool:
        """Whether it stands still and holds no memory but what its state needs."""
        standing = [w.id for w in self.workers.values() if w.mode is Mode.STANDING]
        return self.is_still and all(self._sparing.get(worker) for worker in standing)

    @property
    def done(self) -> int:
        """Steps done, as far as is known."""
        steps = [w.step for w in self.workers.values() if w.holds and w.mode in AT_REST]
        if self.formation is not None:
            steps.append(self.formation.step)
        return max(steps, default=self._safe.step)

    @property
    def _is_ending(self) -> bool:
        return bool(self._failure) or self.is_over

    @property
    def _wants_nothing(self) -> bool:
        return self._stop is not None or not self.wish.seats

    @property
    def _is_to_probe(self) -> bool:
        """Whether a measurement is asked for that has not been made; what spans devices is not measured alone."""
        return bool(self.wish.probe) and self._probed < self.wish.generation and len(self.wish.seats) == 1

    def _seated(self) -> list[int]:
        """Workers on the wished seats that are there, by seat."""
        able = AT_REST | AT_WORK
        found = {w.berth: w.id for w in self.workers.values() if w.mode in able}
        return [found[berth] for berth in map(self._berth, self.wish.seats) if berth in found]

    def _berth(self, seat: Seat) -> Berth:
        """What a worker on this seat must have been started with.

        A lane changes the bits, because libraries choose kernels by the multiprocessors they see; a whole one does not.
        So an exact job always has a whole one, and learns the same whatever its share is and whoever it shares with.
        """
        is_lane = self.rules.has_lanes and not self.rules.exact and self._devices[seat.device].cuda is not None
        return seat.device, percent(seat.fraction) if is_lane else WHOLE

    def _newest_step(self, holders: Sequence[WorkerState]) -> int:
        return max([self._safe.step, *(w.step for w in holders)])

    def _counted(self, who: WorkerState, steps: int) -> None:
        """A worker that is lost had done so many steps; alone it says so a few times a second only."""
        formation = self.formation
        if formation is not None and formation.is_solo and who.id in formation.members and steps > formation.step:
            formation.step = steps
            self._progressed(steps)

    def _lose(self, at: float, who: WorkerState, how: str, *, counts: bool = True) -> None:
        """A worker is dead or as good as dead; where it `counts`, often enough is the end of the job."""
        where = self._name(who.device)
        self._actions += self._safe.given_up(who.id)
        formation, enough = self.formation, ""
        if formation is not None and who.id in formation.members:
            self._tell(f"the worker on {where} {how} at step {formation.step} and is replaced")
            enough = self._losses.lost(formation.step) if counts else ""
            self._segment = None  # a worker that was killed may still be writing into it
            self._dissolve(at)
        elif not who.has_joined:
            self._tell(f"the worker on {where} {how} before it could join and is replaced")
            enough = self._losses.lost_before_joining(who.device) if counts else ""
        else:
            self._tell(f"the worker on {where} {how} and is replaced")
        if enough and self._result is None:
            self._fail(f"{enough}; the last one, on {where}, {how}")

    def _kill(self, at: float, who: WorkerState, how: str, *, counts: bool = True) -> None:
        """End a worker by force; it counts as dead at once, though its device is free only when it has ended."""
        self._actions.append(Kill(who.id))
        if who.mode is not Mode.LEAVING:
            who.mode, who.left_at = Mode.LEAVING, at
            self._lose(at, who, how, counts=counts)

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

    def _progressed(self, step: int) -> None:
        self._losses.progressed(step)
        if self._short_at is not None and step > self._short_at and not self._awaits_solitude:
            self._short_at = None
            self._actions.append(Rejoin())

    def _end_quiet(self) -> None:
        """Let neighbours go on that stood still for a probe."""
        if self._quiet_for:
            self._quiet_for, self._awaits_solitude = 0, False
            self._actions.append(Rejoin())

    def _load(self, worker: WorkerState) -> None:
        newest = self._safe.newest
        worker.mode, worker.loads = Mode.LOADING, newest.path if newest else ""
        self._actions.append(self._safe.load(worker.id))
        if self._measured is not None and self._measured.step == self._safe.step:
            self._send(worker.id, self._measured)  # the state may have been taken before its evaluation

    def _start(self, seat: Seat, *, writes: bool = False) -> None:
        self._numbers += 1
        device, lane = self._berth(seat)
        self.workers[self._numbers] = WorkerState(self._numbers, device, lane, writes=writes)
        self._actions.append(Start(self._numbers, device, self._cutter.threads(seat), lane))

    def _dismiss(self, at: float, worker: WorkerState) -> None:
        """Send a worker away: politely where it listens, by force where it has nothing to lose."""
        if worker.mode is Mode.WARMING or worker.mode is Mode.LOADING:
            self._actions.append(Kill(worker.id))
        else:
            self._send(worker.id, Leave())
        worker.mode, worker.left_at = Mode.LEAVING, at

    def _name(self, device: int) -> str:
        return self._devices[device].name

    def _tell(self, words: str) -> None:
        self._actions.append(Tell(words))

    def _send(self, worker: int, message: Message, beside: Segment | Mirror | None = None) -> None:
        self._actions.append(Send(worker, message, beside))
