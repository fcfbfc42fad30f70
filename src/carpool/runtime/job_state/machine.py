"""Job state machine: events in, actions out; no clock, no sockets, no torch.

Every event updates the `JobState`; then `reconcile` does everything towards the newest order that is possible now. It
decides from the current state alone, so after a fault the same rules apply as before it.
"""

from __future__ import annotations

from carpool.core.messages import ProgressReported
from carpool.runtime.job_state.actions import Action, Emit, Kill, Persist
from carpool.runtime.job_state.batch_split import MemoryShortage, why_not_split
from carpool.runtime.job_state.reconcile import needs_new_epoch, reconcile
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import (
    AT_BOUNDARY,
    STEPPING,
    ProcessGroupEpoch,
    Target,
    WorkerMode,
    WorkerState,
    entry_mismatch,
)
from carpool.runtime.process.protocol import (
    Apply,
    Contributed,
    Done,
    Evaluated,
    Gather,
    Halted,
    Loaded,
    MemoryReleased,
    Message,
    MetricsMeasured,
    Noted,
    Published,
    Ready,
    Saved,
    Stepped,
    Updated,
    WorkerFailed,
)

_MIN_RATE = 1e-9  # steps per second; the time of a slower step is unknown
_MAX_AHEAD = 64  # steps


class JobMachine:
    """Handles the events of one job; every method takes the time and returns the actions to carry out, in order."""

    def __init__(self, state: JobState) -> None:
        self.state = state

    def order(self, at: float, target: Target) -> list[Action]:
        """Follow a new order; one that is older than the current target is ignored."""
        state = self.state
        if target.generation > state.target.generation and not state.failure and not state.is_over:
            state.target = target
            state.actions += state.exclusive.end_probe()
        return reconcile(state, at)

    def suspend(self, at: float, *, suspended: bool) -> list[Action]:
        """Halt with the state on disk while the executor has no client, or continue."""
        self.state.is_suspended, self.state.saved_while_suspended = suspended, False
        return reconcile(self.state, at)

    def stop(self, at: float, *, checkpoint: bool) -> list[Action]:
        """Let all workers exit at a step boundary; without `checkpoint`, steps since the last one are lost."""
        self.state.stopping = checkpoint
        return reconcile(self.state, at)

    def fail(self, at: float, error: str) -> list[Action]:
        """Fail the job for an error of the executor."""
        self.state.fail(error)
        return reconcile(self.state, at)

    def set_time_sliced(self, at: float, *, time_sliced: bool) -> list[Action]:
        self.state.time_sliced = time_sliced
        return reconcile(self.state, at)

    def pause(self, at: float, *, paused: bool, free_memory: bool = True) -> list[Action]:
        """Halt for another job's exclusive access and free cached memory, or continue."""
        self.state.is_paused, self.state.pause_frees_memory = paused, free_memory
        return reconcile(self.state, at)

    def exclusive_granted(self, at: float) -> list[Action]:
        self.state.exclusive.on_granted()
        return reconcile(self.state, at)

    def message(self, at: float, worker_id: int, message: Message) -> list[Action]:
        worker = self.state.workers.get(worker_id)
        if worker is None or worker.mode is WorkerMode.EXITING:
            return []
        _on_message(self.state, at, worker, message)
        return reconcile(self.state, at)

    def exited(self, at: float, worker_id: int, why: str, steps: int = 0) -> list[Action]:
        worker = self.state.workers.pop(worker_id, None)
        if worker is not None and worker.mode is not WorkerMode.EXITING:
            self.state.record_steps(worker, steps)
            self.state.lose_worker(at, worker, f"died ({why})")
        return reconcile(self.state, at)

    def hung(self, at: float, worker_id: int, steps: int = 0) -> list[Action]:
        return self.faulted(at, worker_id, "sent no heartbeat and was killed", counts=True, steps=steps)

    def faulted(self, at: float, worker_id: int, how: str, *, counts: bool, steps: int = 0) -> list[Action]:
        """Kill a worker after a fault; it ``counts`` against the retry budget if the job may have caused it."""
        worker = self.state.workers.get(worker_id)
        if worker is not None:
            self.state.record_steps(worker, steps)
            self.state.kill_worker(at, worker, how, counts=counts)
        return reconcile(self.state, at)

    def tick(self, at: float) -> list[Action]:
        self._kill_overdue_workers(at)
        self._check_time_limit(at)
        self._copy_state(at)
        return reconcile(self.state, at)

    def _kill_overdue_workers(self, at: float) -> None:
        for worker in self.state.workers.values():
            if worker.mode is WorkerMode.EXITING and at - worker.exiting_since > self.state.options.grace_s:
                self.state.actions.append(Kill(worker.id))
                worker.exiting_since = at

    def _check_time_limit(self, at: float) -> None:
        state, epoch, limit_s = self.state, self.state.epoch, self.state.options.time_limit_s
        if epoch is None or epoch.halting or not limit_s:
            return
        if state.ran_s + at - epoch.since > limit_s:
            state.fail(f"exceeded its time limit of {limit_s:g} s at step {epoch.step}")

    def _copy_state(self, at: float) -> None:
        state, epoch = self.state, self.state.epoch
        if epoch is None or epoch.halting or state.failure:
            return
        first = state.workers[epoch.members[0]]
        if first.mode is not WorkerMode.RUNNING or any(w.mode is WorkerMode.LOADING for w in state.workers.values()):
            return  # the older mirror is being read and must not be overwritten
        state.actions += state.copies.due(at, epoch.step, first.id)


def _on_message(state: JobState, at: float, worker: WorkerState, message: Message) -> None:
    match message:
        case Ready():
            _on_ready(state, worker, message)
        case Loaded():
            worker.mode, worker.has_state, worker.step = WorkerMode.IDLE, True, message.step
            worker.loading_path, worker.is_warming_up = "", False
        case Contributed():
            _on_contributed(state, at, worker, message)
        case Updated():
            _on_updated(state, worker, message)
        case Stepped():
            _on_stepped(state, worker, message)
        case Noted(text):
            state.note(text)
        case Evaluated():
            _on_evaluated(state, worker, message)
        case Halted(step):
            if worker.mode is WorkerMode.HALTING:  # otherwise a later message has overtaken the Halt that it answers
                worker.mode, worker.step = WorkerMode.IDLE, step
                state.on_progress(step)
        case Published(step):
            state.actions += state.copies.on_published(at, worker.id, step)
            state.on_progress(step)
        case MemoryReleased():
            state.memory_released[worker.id] = True
        case Saved(step):
            state.copies.on_saved(worker.id, step)
        case Done():
            _on_done(state, worker, message)
        case WorkerFailed():
            _on_failed(state, at, worker, message)
        case _:
            pass


def _on_ready(state: JobState, worker: WorkerState, ready: Ready) -> None:
    worker.mode, worker.step = WorkerMode.IDLE, 0
    if state.ready is None:
        state.splitter.ready = ready
        for note in ready.notes:
            state.note(note)
    elif problem := entry_mismatch(state.ready, ready):
        state.fail(problem)


def _on_contributed(state: JobState, at: float, worker: WorkerState, message: Contributed) -> None:
    epoch = state.epoch
    if epoch is None or message.epoch != epoch.number or message.step != epoch.granted:
        return
    if message.seconds or message.done is None:
        state.splitter.on_pass(epoch.layout.slots[epoch.members.index(worker.id)], message)
    epoch.contributed[worker.id] = message.seconds
    if len(epoch.contributed) == len(epoch.members):
        _apply_step(state, at, epoch, message.done)


def _apply_step(state: JobState, at: float, epoch: ProcessGroupEpoch, done: int | None) -> None:
    """All ranks have contributed: let them update, and halt if the group is to change."""
    if (sync_s := epoch.timing.on_barrier(at, epoch.contributed, epoch.last_grant)) is not None:
        state.splitter.on_step(epoch.layout, sync_s)
    epoch.halting = epoch.halting or needs_new_epoch(state, epoch)
    steps = 1 if done is None or epoch.halting else _steps_ahead(state, epoch)
    for member in epoch.members:
        state.send(member, Apply(epoch.number, epoch.granted, epoch.halting, steps))
        if epoch.halting:
            state.workers[member].mode = WorkerMode.HALTING
    epoch.contributed.clear()
    epoch.granted, epoch.last_grant = epoch.granted + steps, steps
    epoch.step = max(epoch.step, epoch.granted if done is None else done)
    state.on_progress(epoch.step)


def _steps_ahead(state: JobState, epoch: ProcessGroupEpoch) -> int:
    """How many steps one `Apply` allows ranks on several nodes to make: few, because changes wait until all are made.

    They end before a repeated step that was divided among the devices in another way the first time.
    """
    step_s, change = epoch.timing.step_s, state.splitter.same_split_until(epoch.granted)
    steps = max(1, min(_MAX_AHEAD, int(state.options.ahead_s / step_s))) if step_s else 1
    return steps if change is None else max(1, min(steps, change - 1 - epoch.granted))


def _on_updated(state: JobState, worker: WorkerState, message: Updated) -> None:
    epoch = state.epoch
    if epoch is None or message.epoch != epoch.number or message.step != epoch.step - 1:
        return
    epoch.updated.add(worker.id)
    if len(epoch.updated) == len(epoch.members):
        epoch.updated.clear()
        for member in epoch.members:
            state.send(member, Gather(epoch.number, message.step))


def _on_stepped(state: JobState, worker: WorkerState, message: Stepped) -> None:
    epoch = state.epoch
    state.memory_bytes = max(state.memory_bytes, message.memory_bytes)
    if epoch is None or epoch.members[0] != worker.id:
        return
    epoch.step = max(epoch.step, message.step)
    state.on_progress(message.step)
    generation = state.acks.generation
    is_alone = message.probed and state.exclusive.is_probing(generation)
    if message.probed:
        state.actions += state.exclusive.on_probe_measured(generation)
    if not state.acks.is_assigned:
        return
    step_s = 1.0 / message.steps_per_s if message.steps_per_s > _MIN_RATE else None
    progress = ProgressReported(
        state.job,
        generation,
        float(message.step),
        message.steps_per_s,
        message.loss,
        message.noise,
        step_s=epoch.timing.step_s or step_s,
        sync_s=epoch.timing.sync_s if epoch.timing.step_s else None,
        alone=is_alone,
        memory_bytes=state.memory_bytes,
        busy=epoch.timing.busy([member for _, member in sorted(zip(epoch.layout.devices, epoch.members, strict=True))]),
    )
    state.splitter.lr_gain.on_noise(message.noise)
    state.actions.append(Emit(progress))


def _on_evaluated(state: JobState, worker: WorkerState, message: Evaluated) -> None:
    state.last_metrics = MetricsMeasured(message.step, message.metrics)
    for other in state.workers.values():
        # A loading worker may get a copy from before this evaluation, and would wait for its metrics forever.
        takes_part = other.has_state and other.mode in AT_BOUNDARY | STEPPING
        if other is not worker and (takes_part or other.mode is WorkerMode.LOADING):
            state.send(other.id, state.last_metrics)


def _on_done(state: JobState, worker: WorkerState, message: Done) -> None:
    is_first = state.epoch is not None and state.epoch.members[0] == worker.id
    worker.mode, worker.step, worker.digest = WorkerMode.DONE, message.step, message.digest
    state.memory_bytes = max(state.memory_bytes, message.memory_bytes)
    state.on_progress(message.step)
    if is_first:
        state.result = message
        for note in message.notes:
            state.note(note)


def _on_failed(state: JobState, at: float, worker: WorkerState, failure: WorkerFailed) -> None:
    error = failure.error
    if failure.kind == "disk":
        _on_write_failed(state, worker, failure)
    elif failure.kind == "lane":
        state.kill_worker(at, worker, f"did not get its GPU share ({error})", counts=False)
    elif failure.kind == "device":
        state.kill_worker(at, worker, f"lost its GPU ({error})")
    elif failure.kind == "memory" and worker.mode in STEPPING:
        _on_out_of_memory(state, at, worker, failure)
    elif failure.kind == "memory":
        state.kill_worker(at, worker, f"ran out of memory ({error})")
    elif worker.loading_path and failure.kind != "protocol":
        _fall_back_to_older_checkpoint(state, worker, error)
    else:
        state.fail(f"{error} (on {state.device_name(worker.device)}, step {failure.step})")


def _on_write_failed(state: JobState, worker: WorkerState, failure: WorkerFailed) -> None:
    state.note(f"saving the state failed at step {failure.step}: {failure.error.rstrip('.')}")
    was_publishing = state.copies.is_publishing
    state.actions += state.copies.discard_writes_of(worker.id)
    if was_publishing and state.is_idle:  # other workers wait for this state
        state.fail(f"its state could not be copied to other workers: {failure.error}")


def _on_out_of_memory(state: JobState, at: float, worker: WorkerState, failure: WorkerFailed) -> None:
    """Retry the step while the other jobs on the device are paused; if that fails too, use smaller micro-batches."""
    worker.mode, worker.step = WorkerMode.IDLE, failure.step
    state.on_progress(failure.step)  # an earlier step that had run out of memory may be done by now
    if state.exclusive.is_retry:
        _use_micro_batches(state, worker, failure)
    else:
        where = f"on {state.device_name(worker.device)} at step {failure.step + 1}"
        state.note(f"ran out of memory {where}; retrying while other jobs on the device are paused")
        state.actions += state.exclusive.request_for_memory(failure.step, worker.device)
    if state.epoch is not None:
        state.end_epoch(at)


def _use_micro_batches(state: JobState, worker: WorkerState, failure: WorkerFailed) -> None:
    device = state.devices[worker.device]
    batch_size = state.splitter.batch_size(state.target, len(state.target.slots))
    shortage = MemoryShortage(failure, device, batch_size)
    if problem := why_not_split(shortage, state.options, state.ready):
        state.fail(problem)
    elif (limit := state.micro_batching.halve(failure.step, failure.samples)) is None:
        state.fail(f"{shortage.description} Not even one sample fits: choose a smaller model or a larger device.")
    else:
        passes = -(-failure.samples // limit.samples)
        where = f"on {device.name} at step {failure.step + 1}"
        into = f"{passes} micro-batches of {limit.samples} samples"
        state.note(f"ran out of memory {where} with the device to itself: splitting into {into}; rounding differs")
        state.actions.append(Persist(limit))


def _fall_back_to_older_checkpoint(state: JobState, worker: WorkerState, error: str) -> None:
    state.note(f"a checkpoint is unusable: {error}")
    if not state.copies.fall_back_from(worker.loading_path):
        state.fail(f"no usable checkpoint is left: {error}")
    worker.mode, worker.loading_path = WorkerMode.IDLE, ""
