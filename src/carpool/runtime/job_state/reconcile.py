"""Reconciliation: takes every possible step from a job's current state to its target, including shutdown; pure.

    target       the slots of the newest order; workers are started on them while the current epoch continues
    epoch        workers that make steps together; it ends at a step boundary if something has to change
    at boundary  workers between epochs; those that lack the newest state load a copy of it, then a new epoch starts

In default mode an epoch waits for every slot, so that a lost worker is replaced and its step is repeated with the
same parts. In exact mode the remaining workers continue at once: who computes which shard does not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.messages import JobFailed, JobFinished
from carpool.runtime.job_state.actions import Action, Emit, Ended, Kill, Persist, Segment, Stopped
from carpool.runtime.job_state.proportional_split import segment_bytes
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import (
    AT_BOUNDARY,
    STEPPING,
    ProcessGroupEpoch,
    StepLayout,
    WorkerMode,
    WorkerSlot,
    WorkerState,
    owners_of,
)
from carpool.runtime.process.protocol import Halt, Proceed, ReleaseMemory

_STANDBY_S = 30.0  # longer than a policy that searches for a share tries another one


def reconcile(state: JobState, at: float) -> list[Action]:
    """Take every step towards the target that is possible now; returns the actions decided since the last call."""
    if not state.is_over:
        _advance(state, at)
    actions, state.actions = state.actions, []
    return actions


def _advance(state: JobState, at: float) -> None:
    epoch = state.epoch
    if epoch is not None and all(state.workers[member].mode in AT_BOUNDARY for member in epoch.members):
        state.end_epoch(at)
    if state.failure or (state.result is not None and not state.is_stepping):
        _finish(state, at)
        return
    _start_and_dismiss(state, at)
    if state.workers_on_target():
        state.actions += state.exclusive.request_for_probe(state.target)
    if state.epoch is not None:
        _halt_for_change(state, state.epoch)
    elif not state.is_stepping:
        _leave_boundary(state, at)
    _acknowledge(state)


def needs_new_epoch(state: JobState, epoch: ProcessGroupEpoch) -> bool:
    """Whether the epoch should end at the next step boundary."""
    if state.is_paused or state.is_suspended or state.is_releasing or state.exclusive.is_pending:
        return True
    ready = state.workers_on_target()
    if len(ready) < len(state.target.slots):
        return False  # continue unchanged until the new workers are ready
    if ready != list(epoch.members):
        return True
    next_step = max(epoch.step, epoch.granted) + 1  # the current step keeps its layout
    return _layout(state, state.target.slots, next_step, epoch) != epoch.layout


def _start_and_dismiss(state: JobState, at: float) -> None:
    """Start workers on target slots that have none, dismiss new workers that are no longer needed."""
    slots = () if state.stopping is not None else state.target.slots
    wanted = {state.slot_key(slot) for slot in slots}
    for worker in list(state.workers.values()):
        is_member = state.epoch is None or worker.id in state.epoch.members
        is_needed = worker.is_writer or (worker.has_state and is_member) or _is_on_standby(state, at, worker)
        if not is_needed and worker.key not in wanted and worker.mode is not WorkerMode.EXITING:
            state.dismiss(at, worker)
    taken = {worker.key for worker in state.workers.values()}
    for slot in slots:
        if state.slot_key(slot) not in taken:
            state.start_worker(slot)


def _halt_for_change(state: JobState, epoch: ProcessGroupEpoch) -> None:
    if epoch.halting:
        return
    _preload_new_workers(state)
    if not needs_new_epoch(state, epoch):
        return
    epoch.halting = True
    if epoch.is_solo:  # several ranks get it with the Apply of the current step, so that this step still counts
        state.send(epoch.members[0], Halt())
        state.workers[epoch.members[0]].mode = WorkerMode.HALTING


def _preload_new_workers(state: JobState) -> None:
    """Let new workers load the last mirror ahead of time: the final load is faster with memory and code in place.

    On a GPU that is not time-sliced they also run warm-up steps, which load kernels and capture CUDA graphs.
    """
    newest = state.copies.newest
    if newest is None or newest.mirror is None:
        return
    may_warm_up = len(state.target.slots) == 1 and not state.time_sliced and not state.micro_batching.limits
    for worker in state.workers.values():
        if worker.mode is WorkerMode.IDLE and not worker.has_state and not state.is_remote(worker.device):
            on_gpu = state.devices[worker.device].cuda is not None
            state.load_state(worker, state.memory_bytes if may_warm_up and on_gpu else 0)


def _leave_boundary(state: JobState, at: float) -> None:
    if state.is_releasing:
        _release_workers(state, at)
    elif state.is_suspended:
        _save_once(state, at)
    elif state.is_paused:
        if state.pause_frees_memory:
            _release_memory(state)
    else:
        _form_group(state, at)


def _save_once(state: JobState, at: float) -> None:
    """Write the newest state to disk in case no client ever comes back."""
    newest = state.newest_holder
    if newest is None or newest.step <= state.copies.saved_step or state.is_remote(newest.device):
        return
    if not state.copies.is_writing and not state.saved_while_suspended:
        state.saved_while_suspended = True
        state.actions.append(state.copies.save(at, newest.id))


def _release_memory(state: JobState) -> None:
    for worker in state.workers.values():
        if worker.mode is WorkerMode.IDLE and worker.id not in state.memory_released:
            state.memory_released[worker.id] = False
            state.send(worker.id, ReleaseMemory())


def _form_group(state: JobState, at: float) -> None:
    """Bring all workers on target slots to the newest state, then start an epoch."""
    if state.exclusive.is_pending or state.copies.is_publishing:
        return
    if any(worker.mode is WorkerMode.LOADING for worker in state.workers.values()):
        return
    members = _next_members(state)
    step = state.newest_step
    behind = [worker for worker in members if not worker.can_continue_from(step)]
    if members and not behind:
        _start_epoch(state, at, members, step)
    elif members and state.copies.step == step:
        for worker in behind:
            state.load_state(worker)
    elif members and (newest := state.newest_holder) is not None:
        state.actions.append(state.copies.publish(newest.id))


def _next_members(state: JobState) -> list[WorkerState]:
    """The workers of the next epoch; none while a worker is still starting."""
    ready = [state.workers[worker] for worker in state.workers_on_target()]
    if len(ready) == len(state.target.slots):
        return ready
    if state.options.exact:
        is_led = bool(ready) and not state.is_remote(ready[0].device)  # rank 0 writes checkpoints, on this node
        return ready if is_led and any(worker.has_state for worker in ready) else []
    done = [worker for worker in ready if worker.mode is WorkerMode.DONE]
    holders = state.state_holders
    is_over = all(worker.mode is WorkerMode.DONE for worker in holders)
    return done if is_over and any(worker.has_state for worker in ready) else []


def _start_epoch(state: JobState, at: float, members: list[WorkerState], step: int) -> None:
    slots = tuple(slot for slot in state.target.slots if any(w.key == state.slot_key(slot) for w in members))
    layout = _layout(state, slots, step, None)
    state.memory_released.clear()
    state.last_number += 1
    state.epoch = ProcessGroupEpoch(state.last_number, tuple(w.id for w in members), layout, step, at, granted=step)
    if (split := state.splitter.record(step, layout)) is not None:
        state.actions.append(Persist(split))
    _note_shards(state, layout)
    _note_update_ranges(state, layout)
    _send_proceed(state, state.epoch, members)
    wanted = state.target_keys
    _dismiss_or_keep(state, at, [w for w in state.workers.values() if w.key not in wanted and w.mode in AT_BOUNDARY])
    state.first_step = step if state.first_step is None else state.first_step
    state.copies.on_epoch_start(at)


def _send_proceed(state: JobState, epoch: ProcessGroupEpoch, members: list[WorkerState]) -> None:
    layout, splitter = epoch.layout, state.splitter
    owners = owners_of(layout, exact=state.options.exact)
    segment = _segment(state, owners, layout) if owners else None
    for rank, (worker, slot) in enumerate(zip(members, layout.slots, strict=True)):
        proceed = Proceed(
            epoch.number,
            rank,
            len(members),
            owners,
            parts=() if state.options.exact else layout.counts,
            update_ranges=layout.update_ranges,
            reducer="group" if state.spans_nodes(layout.devices) else state.options.reducer,
            time_sliced=layout.time_sliced,
            batch_size=layout.batch_size,
            lr_gain=splitter.lr_gain_of(state.target, len(members)),
            threads=splitter.threads(slot),
            update_threads=min(splitter.threads(slot) for slot in layout.slots),
            limits=state.micro_batching.limits,
            probe=state.exclusive.pending_probe(state.target),
        )
        state.send(worker.id, proceed, segment)
        worker.mode, worker.has_state, worker.has_joined = WorkerMode.RUNNING, True, True
        worker.standby_until = 0.0
        state.retry_budget.on_join(worker.device)


def _segment(state: JobState, owners: tuple[tuple[int, int], ...], layout: StepLayout) -> Segment | None:
    """Shared memory for the ranks; the last segment where it is large enough; none where they are on several nodes.

    It holds all contributions, or with a process group only its store, a file that grows by itself.
    """
    assert state.ready is not None
    if state.spans_nodes(layout.devices):
        return None
    size = 0 if state.options.reducer == "group" else segment_bytes(owners, state.ready.contribution_bytes)
    if state.segment is None or state.segment.size_bytes < size:
        state.segment = Segment(state.last_number, size)
    return state.segment


def _layout(state: JobState, slots: tuple[WorkerSlot, ...], step: int, current: ProcessGroupEpoch | None) -> StepLayout:
    is_new = step >= state.retry_budget.max_step
    return state.splitter.layout(
        state.target, slots, step, time_sliced=state.time_sliced, current=current, is_new=is_new
    )


def _dismiss_or_keep(state: JobState, at: float, unused: Sequence[WorkerState]) -> None:
    """Dismiss workers, but keep the one that has just left a lane on standby.

    A policy that searches for the best share may return to this lane; the worker then runs at the speed measured
    before.
    """
    newest = [worker for worker in unused if not worker.standby_until]
    for worker in newest:
        may_keep = worker.has_joined and worker.mode is WorkerMode.IDLE
        worker.standby_until = at + _STANDBY_S if may_keep else 0.0
    for worker in unused:
        if (newest and worker not in newest) or not _is_on_standby(state, at, worker):
            state.dismiss(at, worker)


def _is_on_standby(state: JobState, at: float, worker: WorkerState) -> bool:
    memory_is_short = state.time_sliced or bool(state.micro_batching.limits) or state.exclusive.is_retry
    devices = [slot.device for slot in state.target.slots]
    return at < worker.standby_until and worker.device in devices and state.stopping is None and not memory_is_short


def _note_shards(state: JobState, layout: StepLayout) -> None:
    """Note the shards of heterogeneous devices when they change."""
    is_heterogeneous = len({state.splitter.device_share(slot) for slot in layout.slots}) > 1
    if state.options.exact and is_heterogeneous and layout.counts != state.noted_shards:
        state.noted_shards = layout.counts
        counts = zip(layout.devices, layout.counts, strict=True)
        state.note(f"shards per device: {', '.join(f'{state.device_name(d)} {count}' for d, count in counts)}")


def _note_update_ranges(state: JobState, layout: StepLayout) -> None:
    """Note which device updates which share of the parameters when that changes, and once why none may."""
    assert state.ready is not None
    if state.ready.can_shard_update and state.spans_nodes(layout.devices) and not state.has_noted_unshared:
        state.has_noted_unshared, state.update_ranges = True, ()
        state.note("every device updates all parameters: devices can share an update only within one machine")
        return
    if layout.update_ranges == state.update_ranges:
        return
    state.update_ranges = layout.update_ranges
    if not layout.update_ranges:
        state.note("every device updates all parameters")
        return
    sizes = state.ready.sizes
    shares = [sum(sizes[first:stop]) / sum(sizes) for first, stop in layout.update_ranges]
    named = [f"{state.device_name(d)} {share:.0%}" for d, share in zip(layout.devices, shares, strict=True)]
    state.note(f"each device updates a share of the parameters: {', '.join(named)}")


def _acknowledge(state: JobState) -> None:
    """Acknowledge the order once it is in effect and no worker is left elsewhere."""
    target, epoch = state.target, state.epoch
    if not state.acks.is_pending(target) or state.stopping is not None:
        return
    wanted = state.target_keys
    if any(worker.key not in wanted and not worker.standby_until for worker in state.workers.values()):
        return
    if not target.slots:
        state.actions.append(state.acks.released(target.generation, state.steps_done))
    elif epoch is not None and epoch.layout.slots == target.slots and not epoch.halting:
        state.actions.append(state.acks.assigned(target.generation, epoch.step))


def _release_workers(state: JobState, at: float) -> None:
    """Copy the newest state out of the workers, then dismiss all of them."""
    state.actions += state.exclusive.cancel()
    if state.copies.is_writing or _is_copying_state(state, at):
        return
    for worker in list(state.workers.values()):
        if worker.mode is not WorkerMode.EXITING:
            state.dismiss(at, worker)
    if not state.workers and state.stopping is not None:
        state.is_over = True
        state.actions.append(Stopped(state.copies.saved_step if state.stopping else state.steps_done))


def _is_copying_state(state: JobState, at: float) -> bool:
    """Start the copy that preserves the newest state beyond its workers; False if none is needed."""
    newest = state.newest_holder
    is_remote = newest is not None and state.is_remote(newest.device)  # it cannot write to this node's disk
    is_to_disk = state.stopping is True and state.newest_step > state.copies.saved_step
    is_to_memory = state.stopping is None or (is_to_disk and is_remote)
    if is_to_memory and newest is not None and state.copies.step < newest.step:
        state.actions.append(state.copies.publish(newest.id))
        return True
    if not is_to_disk:
        return False
    if state.stop_save_requested:
        return False  # it failed, and the job's story says so
    if newest is None or is_remote or newest.step < state.newest_step:
        _save_mirror(state)
        return True
    state.stop_save_requested = True
    state.actions.append(state.copies.save(at, newest.id))
    return True


def _save_mirror(state: JobState) -> None:
    """Let a worker of this node write the mirrored state to disk; one is started for that if there is none."""
    here = [worker for worker in state.workers.values() if not state.is_remote(worker.device)]
    able = [worker for worker in here if worker.mode is not WorkerMode.EXITING]
    taken = {worker.device for worker in here}
    free = [device for device in sorted(state.devices) if not state.is_remote(device) and device not in taken]
    if able and able[0].mode is WorkerMode.IDLE:
        state.load_state(able[0])
    elif not able and free:  # otherwise the exit of a worker makes room
        state.start_worker(WorkerSlot(free[0]), is_writer=True)


def _finish(state: JobState, at: float) -> None:
    """Dismiss all workers of a finished or failed job, then report its end."""
    if state.epoch is not None:
        state.ran_s += at - state.epoch.since
        state.epoch = None
    _compare_weights(state)
    for worker in list(state.workers.values()):
        if worker.mode is WorkerMode.EXITING:
            continue
        if state.failure and worker.mode in STEPPING:
            state.actions.append(Kill(worker.id))
            worker.mode, worker.exiting_since = WorkerMode.EXITING, at
        else:
            state.dismiss(at, worker)
    if not state.workers:
        _report_end(state)


def _compare_weights(state: JobState) -> None:
    result = state.result
    if result is None or state.failure:
        return
    done = [worker for worker in state.workers.values() if worker.mode is WorkerMode.DONE]
    if different := [state.device_name(w.device) for w in done if w.digest != result.digest]:
        state.fail(f"the final weights on {', '.join(different)} differ from those of rank 0: a bug in carpool")


def _report_end(state: JobState) -> None:
    target, acks, result = state.target, state.acks, state.result
    state.is_over = True
    state.actions += state.exclusive.cancel()
    state.actions += state.copies.drop_all()
    is_unacknowledged = acks.is_pending(target) and not acks.is_assigned
    if is_unacknowledged and target.slots and not state.failure:  # the scheduler has to learn first that it ran
        state.actions.append(acks.assigned(target.generation, state.retry_budget.max_step))
    generation = acks.final_generation(target)
    if state.failure or result is None:
        state.actions.append(Ended(state.failure, state.retry_budget.max_step, memory_bytes=state.memory_bytes))
        state.actions.append(Emit(JobFailed(state.job, generation, state.failure)))
        return
    samples = (result.step - (state.first_step or 0)) * state.splitter.batch_size(target, 1)
    rate = samples / state.ran_s if state.ran_s > 0 else 0.0
    figures = (result.step, result.epoch, result.loss, dict(result.metrics), result.digest, rate)
    state.actions.append(Ended(result.reason, *figures, memory_bytes=state.memory_bytes))
    state.actions.append(Emit(JobFinished(state.job, generation)))
