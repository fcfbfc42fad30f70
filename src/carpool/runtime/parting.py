"""How a team comes to an end: its workers go, its state stays, and the scheduler hears of it; pure."""

from __future__ import annotations

from carpool.core.messages import JobFailed, JobFinished
from carpool.runtime.actions import Emit, Ended, Kill, Stopped
from carpool.runtime.crew import AT_WORK, Mode, Seat
from carpool.runtime.team_state import TeamState


def withdraw(team: TeamState, at: float) -> None:
    """Keep the newest state outside of the workers, then send all of them away."""
    team.actions += team.seclusion.end()
    if team.safe.is_busy or _is_being_kept(team, at):
        return
    for worker in list(team.workers.values()):
        if worker.mode is not Mode.LEAVING:
            team.dismiss(at, worker)
    if not team.workers and team.stopping is not None:
        team.is_over = True
        team.actions.append(Stopped(team.safe.saved_step if team.stopping else team.done))


def _is_being_kept(team: TeamState, at: float) -> bool:
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
    scribes = [w for w in team.workers.values() if w.writes and w.mode is not Mode.LEAVING]
    if not scribes:  # the state lies in a mirror: a worker has to be started to write it
        team.start(Seat(min(team.devices)), writes=True)
    elif scribes[0].mode is Mode.STANDING:
        team.load(scribes[0])
    return True


def end(team: TeamState, at: float) -> None:
    """Finish or fail: all workers go, then the scheduler hears of it."""
    if team.formation is not None:
        team.ran_s += at - team.formation.since
        team.formation = None
    result = team.result
    if result is not None and not team.failure:
        unlike = [w for w in team.workers.values() if w.mode is Mode.OVER and w.digest != result.digest]
        if unlike:
            where = ", ".join(team.name(worker.device) for worker in unlike)
            team.fail(f"the workers on {where} ended with other weights than the first one: a bug of carpool")
    for worker in list(team.workers.values()):
        if worker.mode is Mode.LEAVING:
            continue
        if team.failure and worker.mode in AT_WORK:
            team.actions.append(Kill(worker.id))
            worker.mode, worker.left_at = Mode.LEAVING, at
        else:
            team.dismiss(at, worker)
    if not team.workers:
        _conclude(team)


def _conclude(team: TeamState) -> None:
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
