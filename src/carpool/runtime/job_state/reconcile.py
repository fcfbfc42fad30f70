"""Reconciliation: takes every possible step from a job's present state to its target, including shutdown; pure."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.messages import JobFailed, JobFinished
from carpool.runtime.job_state.actions import Action, Emit, Ended, Kill, Segment, Stopped, Write
from carpool.runtime.job_state.proportional_split import segment_bytes
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import (
    AT_REST,
    AT_WORK,
    ProcessGroupEpoch,
    StepLayout,
    WorkerMode,
    WorkerSlot,
    WorkerState,
    owners_of,
)
from carpool.runtime.process.protocol import Halt, Proceed, ReleaseMemory


def release_workers(team: JobState, at: float) -> None:
    """Keep the newest state outside of the workers, then send all of them away."""
    team.actions += team.seclusion.end()
    if team.safe.is_busy or _is_being_kept(team, at):
        return
    for worker in list(team.workers.values()):
        if worker.mode is not WorkerMode.LEAVING:
            team.dismiss(at, worker)
    if not team.workers and team.stopping is not None:
        team.is_over = True
        team.actions.append(Stopped(team.safe.saved_step if team.stopping else team.done))


def _is_being_kept(team: JobState, at: float) -> bool:
    """Start whatever must be done so that the newest state outlasts the workers; whether anything must."""
    newest = max(team.holders, key=lambda worker: worker.step, default=None)
    step = team.newest_step
    if team.stopping is None:
        if newest is None or team.safe.step >= newest.step:
            return False
        team.actions.append(team.safe.publish(newest.id))
        return True
    if not team.stopping or step <= team.safe.saved_step:
        return False
    if newest is not None and newest.step == step:
        if team.was_asked_to_save:
            return False  # the disk is full, and the story says so
        team.was_asked_to_save = True
        team.actions.append(team.safe.save(at, newest.id))
        return True
    scribes = [w for w in team.workers.values() if w.writes and w.mode is not WorkerMode.LEAVING]
    if not scribes:  # the state lies in a mirror: a worker has to be started to write it
        team.start(WorkerSlot(min(team.devices)), writes=True)
    elif scribes[0].mode is WorkerMode.STANDING:
        team.load(scribes[0])
    return True


def finish(team: JobState, at: float) -> None:
    """Finish or fail: all workers go, then the scheduler hears of it."""
    if team.formation is not None:
        team.ran_s += at - team.formation.since
        team.formation = None
    result = team.result
    if result is not None and not team.failure:
        unlike = [w for w in team.workers.values() if w.mode is WorkerMode.OVER and w.digest != result.digest]
        if unlike:
            where = ", ".join(team.name(worker.device) for worker in unlike)
            team.fail(f"the workers on {where} ended with other weights than the first one: a bug of carpool")
    for worker in list(team.workers.values()):
        if worker.mode is WorkerMode.LEAVING:
            continue
        if team.failure and worker.mode in AT_WORK:
            team.actions.append(Kill(worker.id))
            worker.mode, worker.left_at = WorkerMode.LEAVING, at
        else:
            team.dismiss(at, worker)
    if not team.workers:
        _conclude(team)


def _conclude(team: JobState) -> None:
    """The last worker is gone: say how it ended."""
    wish, answers, result = team.wish, team.answers, team.result
    team.is_over = True
    team.actions += team.seclusion.end()
    team.actions += team.safe.empty()
    is_unheard = answers.is_open(wish) and not answers.is_assigned
    if is_unheard and wish.seats and not team.failure:  # the scheduler hears first that it ran
        team.actions.append(answers.assigned(wish.generation, team.losses.high))
    generation = answers.last_generation(wish)
    if team.failure or result is None:
        team.actions.append(Ended(team.failure, team.losses.high, memory_bytes=team.memory_bytes))
        team.actions.append(Emit(JobFailed(team.job, generation, team.failure)))
        return
    batch = team.cutter.batch_size(wish, 1)
    steps = result.step - (team.first_step or 0)
    rate = steps * batch / team.ran_s if team.ran_s > 0 else 0.0
    figures = (result.step, result.epoch, result.loss, dict(result.metrics), result.digest, rate)
    team.actions.append(Ended(result.reason, *figures, memory_bytes=team.memory_bytes))
    team.actions.append(Emit(JobFinished(team.job, generation)))


# wish        seats that the newest order asks for; workers are started on them aside, while the others work
#     formation   workers that make steps together; it is dissolved at a boundary when something is to change
#     at rest     workers between formations; the newest state among them (or the mirror, or the checkpoint) is handed
#                 to those that lack it, then all proceed in a new formation
#
# In default mode a formation waits for every seat, so that a lost worker is replaced and the step is made again with the
# same parts. In exact mode the survivors go on at once: who owns which shard does not change the result.
#
# There is no plan that could be interrupted: every time it looks at what is there.


_RESERVE_S = 30.0  # for which the worker on a lane that was left stands by: longer than another one is tried


def reconcile(team: JobState, at: float) -> list[Action]:
    """What is to be done, after every step towards the wish that can be taken now."""
    if not team.is_over:
        _settle(team, at)
    actions, team.actions = team.actions, []
    return actions


def wants_change(team: JobState, formation: ProcessGroupEpoch) -> bool:
    """Whether the formation should stop at the next boundary."""
    if team.is_held or team.waits or team.wants_nothing or team.seclusion.is_awaited:
        return True
    seated = team.seated()
    if len(seated) < len(team.wish.seats):
        return False  # newcomers are not there yet; meanwhile it goes on as it is
    if seated != list(formation.members):
        return True
    following = formation.step + 1  # the present step is being made as it was cut
    return _shape(team, team.wish.seats, following, formation) != formation.shape


def _settle(team: JobState, at: float) -> None:
    formation = team.formation
    if formation is not None and all(team.workers[m].mode in AT_REST for m in formation.members):
        team.dissolve(at)
    if team.failure or (team.result is not None and not team.is_at_work):
        finish(team, at)
        return
    _staff(team, at)
    if team.seated():
        team.actions += team.seclusion.ask_for_probe(team.wish)
    if team.formation is not None:
        _steer(team, team.formation)
    elif not team.is_at_work:
        _move_on(team, at)
    _answer(team)


def _staff(team: JobState, at: float) -> None:
    """Start workers on wished seats that have none, send away newcomers that are no longer wished."""
    seats = () if team.stopping is not None else team.wish.seats
    wished = {team.berth(seat) for seat in seats}
    for worker in list(team.workers.values()):
        is_member = team.formation is None or worker.id in team.formation.members
        is_needed = worker.writes or (worker.holds and is_member) or _is_in_reserve(team, at, worker)
        if not is_needed and worker.berth not in wished and worker.mode is not WorkerMode.LEAVING:
            team.dismiss(at, worker)
    taken = {worker.berth for worker in team.workers.values()}
    for seat in seats:
        if team.berth(seat) not in taken:
            team.start(seat)


def _steer(team: JobState, formation: ProcessGroupEpoch) -> None:
    """While a formation works: begin to halt it when something is to change."""
    if formation.halting:
        return
    _rehearse(team)
    if not wants_change(team, formation):
        return
    formation.halting = True
    if formation.is_solo:  # in company the next Apply says it, so that no pass is wasted
        team.send(formation.members[0], Halt())
        team.workers[formation.members[0]].mode = WorkerMode.HALTING


def _rehearse(team: JobState) -> None:
    """Let newcomers take over the last mirror aside: with memory and code in place the real one goes quicker.

    On a GPU where nobody takes turns they make steps with it too, which are undone: kernels are loaded and chosen, and
    recordings made and proven, while the training goes on where it is.
    """
    newest = team.safe.newest
    for worker in team.workers.values():
        if worker.mode is WorkerMode.STANDING and not worker.holds and newest is not None and newest.mirror is not None:
            is_alone = len(team.wish.seats) == 1 and not team.by_token and not team.splits.limits
            on_gpu = team.devices[worker.device].cuda is not None
            team.load(worker, team.memory_bytes if is_alone and on_gpu else 0)


def _move_on(team: JobState, at: float) -> None:
    """While nobody works: leave, stand still, or work again."""
    if team.wants_nothing:
        release_workers(team, at)
    elif team.waits:
        _keep_waiting(team, at)
    elif team.is_held:
        if team.clears:
            _make_room(team)
    else:
        _gather(team, at)


def _keep_waiting(team: JobState, at: float) -> None:
    """While nobody is there to decide: let the newest state be on disk, in case nobody comes any more."""
    newest = max(team.holders, key=lambda worker: worker.step, default=None)
    if newest is None or newest.step <= team.safe.saved_step or team.safe.is_busy or team.was_waiting_saved:
        return
    team.was_waiting_saved = True
    team.actions.append(team.safe.save(at, newest.id))


def _make_room(team: JobState) -> None:
    """While it stands still for a neighbour: let the workers give back memory that is only kept for later."""
    for worker in team.workers.values():
        if worker.mode is WorkerMode.STANDING and worker.id not in team.sparing:
            team.sparing[worker.id] = False
            team.send(worker.id, ReleaseMemory())


def _gather(team: JobState, at: float) -> None:
    """Bring everybody on the wished seats to the newest state and let them proceed."""
    seated = [team.workers[worker] for worker in team.seated()]
    holders = team.holders
    if not seated or team.seclusion.is_awaited or team.safe.is_publishing:
        return
    if any(worker.mode is WorkerMode.LOADING for worker in team.workers.values()):
        return
    if len(seated) < len(team.wish.seats):
        some_go_on = team.rules.exact or all(worker.mode is WorkerMode.OVER for worker in holders)
        if not some_go_on or not any(worker.holds for worker in seated):
            return
        if not team.rules.exact:
            seated = [worker for worker in seated if worker.mode is WorkerMode.OVER]
    step = team.newest_step
    behind = [worker for worker in seated if not worker.is_at(step)]
    if not behind:
        _proceed(team, at, seated, step)
    elif team.safe.step == step:
        for worker in behind:
            team.load(worker)
    else:
        team.actions.append(team.safe.publish(max(holders, key=lambda worker: worker.step).id))


def _proceed(team: JobState, at: float, seated: list[WorkerState], step: int) -> None:
    """Let workers that stand at the same step work together from there."""
    seats = tuple(seat for seat in team.wish.seats if any(w.berth == team.berth(seat) for w in seated))
    shape = _shape(team, seats, step, None)
    team.sparing.clear()
    team.number += 1
    team.formation = formation = ProcessGroupEpoch(team.number, tuple(w.id for w in seated), shape, step, at)
    if (cut := team.cutter.record(step, shape)) is not None:
        team.actions.append(Write(cut))
    _tell_dealing(team, shape)
    _tell_division(team, shape)
    _send_off(team, formation, seated)
    wished = team.wished
    _part_with(team, at, [w for w in team.workers.values() if w.berth not in wished and w.mode in AT_REST])
    team.first_step = step if team.first_step is None else team.first_step
    team.safe.begin(at)


def _part_with(team: JobState, at: float, leaving: Sequence[WorkerState]) -> None:
    """Send workers away, but for the one that just left a lane of a GPU for another: it stands by.

    Whoever looks for the right share goes back to the best one in the end, and finds it as it was measured.
    """
    newest = [worker for worker in leaving if not worker.reserve_until]
    for worker in newest:
        worker.reserve_until = at + _RESERVE_S if worker.has_joined and worker.mode is WorkerMode.STANDING else 0.0
    for worker in leaving:
        if (newest and worker not in newest) or not _is_in_reserve(team, at, worker):
            team.dismiss(at, worker)


def _is_in_reserve(team: JobState, at: float, worker: WorkerState) -> bool:
    """Whether a worker stands by, and may go on doing so: not for long, and not where memory is short."""
    is_short = team.by_token or bool(team.splits.limits) or team.seclusion.is_second_try
    seats = [seat.device for seat in team.wish.seats]
    return at < worker.reserve_until and worker.device in seats and team.stopping is None and not is_short


def _send_off(team: JobState, formation: ProcessGroupEpoch, seated: list[WorkerState]) -> None:
    """Tell every member of a new formation what is its own."""
    shape, cutter = formation.shape, team.cutter
    owners = owners_of(shape, exact=team.rules.exact)
    segment = _segment(team, owners) if owners else None
    for rank, (worker, seat) in enumerate(zip(seated, shape.seats, strict=True)):
        proceed = Proceed(
            formation.number,
            rank,
            len(seated),
            owners,
            parts=() if team.rules.exact else shape.counts,
            updates=shape.updates,
            reducer=team.rules.reducer,
            by_token=shape.by_token,
            batch_size=shape.batch_size,
            gain=cutter.gain(team.wish, len(seated)),
            threads=cutter.threads(seat),
            update_threads=min(cutter.threads(seat) for seat in shape.seats),
            limits=team.splits.limits,
            probe=team.seclusion.probe_of(team.wish),
        )
        team.send(worker.id, proceed, segment)
        worker.mode, worker.holds, worker.has_joined, worker.reserve_until = WorkerMode.WORKING, True, True, 0.0
        team.losses.joined(worker.device)


def _segment(team: JobState, owners: tuple[tuple[int, int], ...]) -> Segment:
    """The memory that ranks share: the last one where it is large enough.

    It holds all contributions, or with a process group only its store, a file that grows by itself.
    """
    assert team.ready is not None
    size = 0 if team.rules.reducer == "group" else segment_bytes(owners, team.ready.segment_bytes)
    if team.segment is None or team.segment.size_bytes < size:
        team.segment = Segment(team.number, size)
    return team.segment


def _shape(team: JobState, seats: tuple[WorkerSlot, ...], step: int, now: ProcessGroupEpoch | None) -> StepLayout:
    is_new = step >= team.losses.high
    return team.cutter.shape(team.wish, seats, step, by_token=team.by_token, now=now, is_new=is_new)


def _tell_dealing(team: JobState, shape: StepLayout) -> None:
    """How many shards unlike devices have, when that has changed."""
    if not team.rules.exact or len({team.cutter.trait(seat) for seat in shape.seats}) < 2 or shape.counts == team.dealt:
        return
    team.dealt = shape.counts
    named = [f"{team.name(seat.device)} {count}" for seat, count in zip(shape.seats, shape.counts, strict=True)]
    team.tell(f"shards of a step on each device: {', '.join(named)}")


def _tell_division(team: JobState, shape: StepLayout) -> None:
    """Who updates the parameters, when that has changed."""
    if shape.updates == team.divided:
        return
    team.divided = shape.updates
    if not shape.updates:
        team.tell("every device updates all parameters itself")
        return
    assert team.ready is not None
    parts = [sum(team.ready.sizes[first:stop]) / sum(team.ready.sizes) for first, stop in shape.updates]
    named = [f"{team.name(seat.device)} {part:.0%}" for seat, part in zip(shape.seats, parts, strict=True)]
    team.tell(f"each device updates a part of the parameters for all: {', '.join(named)}")


def _answer(team: JobState) -> None:
    """Tell the scheduler, once, when things are as ordered and nobody is left elsewhere."""
    wish, formation = team.wish, team.formation
    if not team.answers.is_open(wish) or team.stopping is not None:
        return
    wished = team.wished
    if any(worker.berth not in wished and not worker.reserve_until for worker in team.workers.values()):
        return
    if not wish.seats:
        team.actions.append(team.answers.released(wish.generation, team.done))
    elif formation is not None and formation.shape.seats == wish.seats and not formation.halting:
        team.actions.append(team.answers.assigned(wish.generation, formation.step))
