"""State of one job: workers, process group epoch, acknowledged orders, retry budget, exclusive requests; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.core.messages import AssignApplied, ReleaseApplied
from carpool.core.model import WHOLE, JobId
from carpool.jobs.devices import LocalDevice, RemoteDevice
from carpool.runtime.job_state.actions import (
    Action,
    BatchSplit,
    Emit,
    Kill,
    MicroBatchLimit,
    Mirror,
    Note,
    ReleaseExclusive,
    RequestExclusive,
    Segment,
    Send,
    Start,
)
from carpool.runtime.job_state.batch_split import BatchSplitter, MicroBatching
from carpool.runtime.job_state.state_copies import StateCopies
from carpool.runtime.job_state.types import (
    AT_BOUNDARY,
    STEPPING,
    JobOptions,
    ProcessGroupEpoch,
    SlotKey,
    StateCopy,
    Target,
    WorkerMode,
    WorkerSlot,
    WorkerState,
)
from carpool.runtime.job_state.update_sharding import Ranges
from carpool.runtime.process.protocol import Done, Halt, Leave, Message, MetricsMeasured, Ready
from carpool.runtime.sharing.lanes import percent


class Acks:
    """Acknowledges each order once, when it is in effect."""

    def __init__(self, job: JobId) -> None:
        self._job = job
        self.generation = 0  # newest acknowledged
        self._is_release = True  # whether that was a release

    @property
    def is_assigned(self) -> bool:
        """Whether the scheduler believes that the job runs."""
        return bool(self.generation) and not self._is_release

    def is_pending(self, target: Target) -> bool:
        return self.generation < target.generation

    def assigned(self, generation: int, step: int) -> Emit:
        self.generation, self._is_release = generation, False
        return Emit(AssignApplied(self._job, generation, float(step)))

    def released(self, generation: int, step: int) -> Emit:
        self.generation, self._is_release = generation, True
        return Emit(ReleaseApplied(self._job, generation, float(step)))

    def final_generation(self, target: Target) -> int:
        return target.generation if self._is_release else self.generation


class RetryBudget:
    """Fails a job that loses more than `retries` workers in one step, or on one device before they join an epoch.

    Each loss counts for the step in which it happened, and a step's count is reset when the step completes. After a
    loss, steps are repeated from the last mirror, so only a step that fails every time exhausts the budget.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self.max_step = 0  # most steps ever seen done
        self._lost: dict[int, int] = {}  # by steps done before the failing one
        self._start_failures: dict[int, int] = {}  # by device

    def on_progress(self, step: int) -> None:
        self.max_step = max(self.max_step, step)
        self._lost = {failing: count for failing, count in self._lost.items() if failing >= step}

    def on_loss(self, step: int) -> str:
        """Count a worker lost in an epoch. Returns why the job fails, or nothing."""
        self._lost[step] = self._lost.get(step, 0) + 1
        return self._exhausted(self._lost[step], f"in step {step + 1}")

    def on_start_failure(self, device: int) -> str:
        """Count a worker lost before it joined an epoch. Returns why the job fails, or nothing."""
        self._start_failures[device] = self._start_failures.get(device, 0) + 1
        return self._exhausted(self._start_failures[device], "before it could make a step")

    def on_join(self, device: int) -> None:
        self._start_failures.pop(device, None)

    def _exhausted(self, count: int, when: str) -> str:
        return f"lost its worker {count} times {when} (retries: {self._retries})" if count > self._retries else ""


class ExclusiveRequest:
    """A job's request that the other jobs on a device pause: to retry a step that ran out of memory, or for a probe."""

    def __init__(self) -> None:
        self.is_pending = False
        self._short_at: int | None = None  # the step that ran out of memory and is retried
        self._probing = 0  # generation whose probe the request is for; 0: none
        self._probed = 0  # newest generation whose probe was measured

    @property
    def is_retry(self) -> bool:
        """Whether the current step has run out of memory before."""
        return self._short_at is not None

    def pending_probe(self, target: Target) -> int:
        """Steps still to be measured."""
        return target.probe if self._probed < target.generation else 0

    def is_probing(self, generation: int) -> bool:
        return bool(self._probing) and self._probing == generation

    def request_for_probe(self, target: Target) -> list[Action]:
        """Request exclusive access once per probe; jobs on several devices are measured without it."""
        if self._probing or self.is_pending or not self.pending_probe(target) or len(target.slots) != 1:
            return []
        self._probing, self.is_pending = target.generation, True
        return [RequestExclusive(target.slots[0].device, release_memory=False)]

    def request_for_memory(self, step: int, device: int) -> list[Action]:
        self._short_at, self.is_pending = step, True
        return [RequestExclusive(device)]

    def on_granted(self) -> None:
        self.is_pending = False

    def on_progress(self, step: int) -> list[Action]:
        """Release the device once the step that had run out of memory is done."""
        if self._short_at is None or step <= self._short_at or self.is_pending:
            return []
        self._short_at = None
        return [ReleaseExclusive()]

    def on_probe_measured(self, generation: int) -> list[Action]:
        self._probed = generation
        return self.end_probe()

    def end_probe(self) -> list[Action]:
        if not self._probing:
            return []
        self._probing, self.is_pending = 0, False
        return [ReleaseExclusive()]

    def cancel(self) -> list[Action]:
        actions = self.end_probe()
        if self._short_at is not None:
            self._short_at, self.is_pending = None, False
            actions.append(ReleaseExclusive())
        return actions


class JobState:
    """The workers of one job, their epoch, and the actions decided but not yet returned.

    `machine.py` changes it on events; `reconcile.py` moves it towards the target.
    """

    def __init__(
        self,
        job: JobId,
        devices: Mapping[int, LocalDevice],
        options: JobOptions,
        *,
        checkpoints: Sequence[StateCopy] = (),  # to resume from, oldest first
        batch_splits: Sequence[BatchSplit] = (),  # of the run that is resumed
        micro_batch_limits: Sequence[MicroBatchLimit] = (),
    ) -> None:
        self.job = job
        self.devices = devices
        self.options = options
        self.target = Target(0)
        self.workers: dict[int, WorkerState] = {}
        self.epoch: ProcessGroupEpoch | None = None
        self.actions: list[Action] = []
        self.copies = StateCopies(options, checkpoints)
        self.retry_budget = RetryBudget(options.retries)
        self.splitter = BatchSplitter(devices, options, batch_splits)
        self.micro_batching = MicroBatching(micro_batch_limits)
        self.exclusive = ExclusiveRequest()
        self.acks = Acks(job)
        self.last_number = 0  # of workers and epochs
        self.memory_released: dict[int, bool] = {}  # workers asked to free cached memory: whether they have
        self.segment: Segment | None = None  # of the last epoch; reused because its pages are already mapped
        self.update_ranges: Ranges = ()  # of the last epoch
        self.has_noted_unshared = False  # that devices of several nodes cannot share an update
        self.noted_shards: tuple[int, ...] = ()  # shards per device, as last noted
        self.last_metrics: MetricsMeasured | None = None
        # Requests of the executor.
        self.time_sliced = False
        self.is_paused = False  # for another job's exclusive access
        self.pause_frees_memory = True
        self.is_suspended = False  # the executor has no client
        self.saved_while_suspended = False
        self.stopping: bool | None = None  # None: not asked to stop; else whether with a checkpoint
        self.stop_save_requested = False
        # The end.
        self.is_over = False  # ended or stopped, and no process is left
        self.result: Done | None = None  # from rank 0
        self.failure = ""
        self.first_step: int | None = None
        self.ran_s = 0.0  # in epochs before the current one
        self.memory_bytes = 0  # peak of one worker
        self.lost_workers = 0

    @property
    def ready(self) -> Ready | None:
        return self.splitter.ready

    @property
    def is_stepping(self) -> bool:
        return any(worker.mode in STEPPING for worker in self.workers.values())

    @property
    def is_idle(self) -> bool:
        return self.epoch is None and not self.is_stepping

    @property
    def has_released_memory(self) -> bool:
        idle = [worker.id for worker in self.workers.values() if worker.mode is WorkerMode.IDLE]
        return self.is_idle and all(self.memory_released.get(worker) for worker in idle)

    @property
    def steps_done(self) -> int:
        """Steps known to be done."""
        steps = [worker.step for worker in self.state_holders]
        if self.epoch is not None:
            steps.append(self.epoch.step)
        return max(steps, default=max(self.copies.step, self.copies.saved_step))

    @property
    def state_holders(self) -> list[WorkerState]:
        return [worker for worker in self.workers.values() if worker.has_state and worker.mode in AT_BOUNDARY]

    @property
    def newest_holder(self) -> WorkerState | None:
        """The worker at a boundary with the newest state; one of this node where there is a choice."""
        return max(self.state_holders, key=lambda w: (w.step, not self.is_remote(w.device)), default=None)

    @property
    def newest_step(self) -> int:
        """Steps done in the newest state, in a worker or in a copy."""
        return max([self.copies.step, *(worker.step for worker in self.state_holders)])

    @property
    def is_releasing(self) -> bool:
        """Whether all workers must exit although the job is not over."""
        return self.stopping is not None or not self.target.slots

    @property
    def target_keys(self) -> set[SlotKey]:
        return {self.slot_key(slot) for slot in self.target.slots}

    def workers_on_target(self) -> list[int]:
        found = {w.key: w.id for w in self.workers.values() if w.mode in AT_BOUNDARY | STEPPING}
        return [found[key] for key in map(self.slot_key, self.target.slots) if key in found]

    def slot_key(self, slot: WorkerSlot) -> SlotKey:
        """The device and lane that a worker on this slot must have been started with.

        An exact job always gets the whole device: libraries choose kernels by the number of visible multiprocessors, so
        another lane would change its bits. A job that takes turns also gets the whole device, because the others wait
        while it computes.
        """
        device = self.devices[slot.device]
        if not self.options.has_lanes or device.cuda is None:
            return slot.device, WHOLE
        fraction = 1.0 if self.options.exact or slot.turn else slot.fraction
        return slot.device, percent(fraction * (device.lane_percent or WHOLE) / WHOLE)

    def is_remote(self, device: int) -> bool:
        """Whether a device is of another node."""
        return isinstance(self.devices[device], RemoteDevice)

    def spans_nodes(self, devices: Sequence[int]) -> bool:
        """Whether some of the devices are of other nodes."""
        return any(map(self.is_remote, devices))

    def device_name(self, device: int) -> str:
        return self.devices[device].name

    def start_worker(self, slot: WorkerSlot, *, is_writer: bool = False) -> None:
        self.last_number += 1
        device, lane = self.slot_key(slot)
        self.workers[self.last_number] = WorkerState(self.last_number, device, lane, is_writer=is_writer)
        self.actions.append(Start(self.last_number, device, self.splitter.threads(slot), lane))

    def load_state(self, worker: WorkerState, warmup_bytes: int = 0) -> None:
        """Send the newest copy of the state to a worker, which then runs warm-up steps if that much memory is free."""
        newest = self.copies.newest
        worker.mode, worker.is_warming_up = WorkerMode.LOADING, warmup_bytes > 0
        worker.loading_path = newest.path if newest else ""
        self.actions.append(self.copies.load(worker.id, warmup_bytes))
        if self.last_metrics is not None and self.last_metrics.step == self.copies.step:
            self.send(worker.id, self.last_metrics)  # the copy may have been taken before its evaluation

    def dismiss(self, at: float, worker: WorkerState) -> None:
        """Let a worker exit; kill it if it does not read messages and has nothing to lose."""
        is_loading = worker.mode is WorkerMode.LOADING and not worker.is_warming_up
        if worker.mode is WorkerMode.STARTING or is_loading:
            self.actions.append(Kill(worker.id))
        else:
            self.send(worker.id, Leave())
        worker.mode, worker.exiting_since, worker.standby_until = WorkerMode.EXITING, at, 0.0

    def kill_worker(self, at: float, worker: WorkerState, how: str, *, counts: bool = True) -> None:
        """Kill a worker; it counts as lost at once, but its device is free only when it has exited."""
        self.actions.append(Kill(worker.id))
        if worker.mode is not WorkerMode.EXITING:
            worker.mode, worker.exiting_since = WorkerMode.EXITING, at
            self.lose_worker(at, worker, how, counts=counts)

    def lose_worker(self, at: float, worker: WorkerState, how: str, *, counts: bool = True) -> None:
        """Handle the loss of a worker; if it ``counts``, the job fails once the retry budget is exhausted."""
        device = self.device_name(worker.device)
        self.lost_workers += 1
        self.actions += self.copies.discard_writes_of(worker.id)
        self.stop_save_requested = False  # this worker may have been the one to save
        epoch, exhausted, when = self.epoch, "", ""
        if epoch is not None and worker.id in epoch.members:
            when = f" at step {epoch.step}"
            exhausted = self.retry_budget.on_loss(epoch.step) if counts else ""
            self.segment = None  # a killed worker may still be writing into it
            self.end_epoch(at)
        elif not worker.has_joined:
            when = " before its first step"
            exhausted = self.retry_budget.on_start_failure(worker.device) if counts else ""
        self.note(f"the worker on {device} {how}{when}; starting another one")
        if exhausted and self.result is None:
            self.fail(f"{exhausted}; the last one, on {device}, {how}")

    def end_epoch(self, at: float) -> None:
        """End the epoch now; workers that are still making steps halt at their next boundary."""
        assert self.epoch is not None
        self.ran_s += at - self.epoch.since
        for member in self.epoch.members:
            worker = self.workers.get(member)
            if worker is not None and worker.mode is WorkerMode.RUNNING:
                self.send(member, Halt())
                worker.mode = WorkerMode.HALTING
        self.epoch = None

    def record_steps(self, worker: WorkerState, steps: int) -> None:
        """Take over the step counter of a lost worker: a single rank reports its steps only a few times a second."""
        epoch = self.epoch
        if epoch is not None and epoch.is_solo and worker.id in epoch.members and steps > epoch.step:
            epoch.step = steps
            self.on_progress(steps)

    def on_progress(self, step: int) -> None:
        self.retry_budget.on_progress(step)
        self.actions += self.exclusive.on_progress(step)

    def fail(self, error: str) -> None:
        """Fail the job; the first error is the one reported."""
        self.failure = self.failure or error

    def note(self, text: str) -> None:
        self.actions.append(Note(text))

    def send(self, worker: int, message: Message, memory: Segment | Mirror | None = None) -> None:
        self.actions.append(Send(worker, message, memory))
