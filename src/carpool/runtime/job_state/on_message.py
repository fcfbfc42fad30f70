"""Worker message handlers: update a job's state from what its workers report; pure."""

from __future__ import annotations

from carpool.core.messages import ProgressReported
from carpool.runtime.job_state.actions import Emit, Write
from carpool.runtime.job_state.batch_split import MemoryShortage, why_not_split
from carpool.runtime.job_state.reconcile import wants_change
from carpool.runtime.job_state.state import JobState
from carpool.runtime.job_state.types import AT_REST, AT_WORK, WorkerMode, WorkerState, entry_mismatch
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


def handle_message(team: JobState, at: float, who: WorkerState, message: Message) -> None:
    """A worker said something."""
    match message:
        case Ready():
            _on_ready(team, who, message)
        case Loaded():
            who.mode, who.holds, who.step = WorkerMode.STANDING, True, message.step
            who.loads, who.rehearses = "", False
        case Contributed():
            _on_contributed(team, at, who, message)
        case Updated():
            _on_updated(team, who, message)
        case Stepped():
            _on_stepped(team, who, message)
        case Noted(words):
            team.tell(words)
        case Evaluated():
            _on_evaluated(team, who, message)
        case Halted():
            _on_halted(team, who, message)
        case Published():
            team.actions += team.safe.published(at, who.id, message.step)
            team.progressed(message.step)
        case MemoryReleased():
            team.sparing[who.id] = True
        case Saved():
            team.safe.saved(who.id, message.step)
        case Done():
            _on_done(team, who, message)
        case WorkerFailed():
            _on_broke(team, at, who, message)
        case _:
            pass


def _on_ready(team: JobState, who: WorkerState, ready: Ready) -> None:
    who.mode, who.step = WorkerMode.STANDING, 0
    if team.ready is None:
        team.cutter.ready = ready
        for note in ready.notes:
            team.tell(note)
    elif problem := entry_mismatch(team.ready, ready):
        team.fail(problem)


def _on_contributed(team: JobState, at: float, who: WorkerState, said: Contributed) -> None:
    formation = team.formation
    if formation is None or said.formation != formation.number or said.step != formation.step:
        return
    seat = formation.shape.seats[formation.members.index(who.id)]
    team.cutter.measure(seat, said)
    formation.contributed[who.id] = said.seconds
    if len(formation.contributed) < len(formation.members):
        return
    if (between_s := formation.rhythm.barrier(at, max(formation.contributed.values()))) is not None:
        team.cutter.passed(formation.shape, between_s)
    formation.halting = formation.halting or wants_change(team, formation)
    for member in formation.members:
        team.send(member, Apply(formation.number, formation.step, formation.halting))
        if formation.halting:
            team.workers[member].mode = WorkerMode.HALTING
    formation.contributed.clear()
    formation.step += 1
    team.progressed(formation.step)


def _on_updated(team: JobState, who: WorkerState, said: Updated) -> None:
    formation = team.formation
    if formation is None or said.formation != formation.number or said.step != formation.step - 1:
        return
    formation.updated.add(who.id)
    if len(formation.updated) == len(formation.members):
        formation.updated.clear()
        for member in formation.members:
            team.send(member, Gather(formation.number, said.step))


def _on_stepped(team: JobState, who: WorkerState, said: Stepped) -> None:
    formation = team.formation
    team.memory_bytes = max(team.memory_bytes, said.memory_bytes)
    if formation is None or formation.members[0] != who.id:
        return
    if formation.is_solo:
        formation.step = max(formation.step, said.step)
        team.progressed(said.step)
    generation = team.answers.generation
    is_alone = said.probed and team.seclusion.is_probing(generation)
    if said.probed:
        team.actions += team.seclusion.measured(generation)
    if team.answers.is_assigned:
        step_s = 1.0 / said.steps_per_s if said.steps_per_s > 0.0 else None
        report = ProgressReported(
            team.job,
            generation,
            float(said.step),
            said.steps_per_s,
            said.loss,
            said.noise,
            step_s=formation.rhythm.step_s or step_s,
            sync_s=formation.rhythm.sync_s if formation.rhythm.step_s else None,
            alone=is_alone,
            memory_bytes=team.memory_bytes,
        )
        team.cutter.gains.hear(said.noise)
        team.actions.append(Emit(report))


def _on_evaluated(team: JobState, who: WorkerState, said: Evaluated) -> None:
    team.measured = MetricsMeasured(said.step, said.metrics)
    for other in team.workers.values():
        # Who is just taking a state over may get one from before this evaluation, and would wait for it for ever.
        is_there = other.mode is WorkerMode.LOADING or (other.holds and other.mode in AT_REST | AT_WORK)
        if other is not who and is_there:
            team.send(other.id, team.measured)


def _on_halted(team: JobState, who: WorkerState, said: Halted) -> None:
    if who.mode is WorkerMode.HALTING:  # else it answers a Halt that something else has overtaken
        who.mode, who.step = WorkerMode.STANDING, said.step
        team.progressed(said.step)


def _on_done(team: JobState, who: WorkerState, said: Done) -> None:
    is_first = team.formation is not None and team.formation.members[0] == who.id
    who.mode, who.step, who.digest = WorkerMode.OVER, said.step, said.digest
    team.memory_bytes = max(team.memory_bytes, said.memory_bytes)
    team.progressed(said.step)
    if is_first:
        team.result = said
        for note in said.notes:
            team.tell(note)


def _on_broke(team: JobState, at: float, who: WorkerState, said: WorkerFailed) -> None:
    where = team.name(who.device)
    if said.kind == "disk":
        team.tell(f"nothing was saved at step {said.step}: {said.error}. The training goes on.")
        was_publishing = team.safe.is_publishing
        team.actions += team.safe.given_up(who.id)
        if was_publishing and team.is_still:  # others wait for just this state
            team.fail(f"its state could not be handed on: {said.error}")
    elif said.kind == "lane":
        team.kill(at, who, f"was not put on its lane ({said.error})", counts=False)
    elif said.kind == "device":
        team.kill(at, who, f"lost its GPU ({said.error})")
    elif said.kind == "memory" and who.mode in AT_WORK:
        _ran_short(team, at, who, said)
    elif said.kind == "memory":
        team.kill(at, who, f"ran out of memory before it could work ({said.error})")
    elif who.loads:
        _try_older(team, who, said.error)
    else:
        team.fail(f"{said.error} (on {where}, step {said.step})")


def _ran_short(team: JobState, at: float, who: WorkerState, said: WorkerFailed) -> None:
    """A step ran out of memory: once more while the neighbours stand still, then in smaller passes."""
    who.mode, who.step = WorkerMode.STANDING, said.step
    team.progressed(said.step)  # a step that ran short before may have been made since
    if team.seclusion.is_second_try:
        _split(team, who, said)
    else:
        where = f"on {team.name(who.device)} at step {said.step + 1}"
        team.tell(f"ran out of memory {where}; tried again while the neighbours stand still")
        team.actions += team.seclusion.ask_for_memory(said.step, who.device)
    if team.formation is not None:
        team.dissolve(at)


def _split(team: JobState, who: WorkerState, said: WorkerFailed) -> None:
    """A step ran out of memory even alone: smaller passes from here on, or failure where they would matter."""
    short = MemoryShortage(said, team.devices[who.device], team.cutter.batch_size(team.wish, len(team.wish.seats)))
    if problem := why_not_split(short, team.rules, team.ready):
        team.fail(problem)
    elif (split := team.splits.halve(said.step, said.samples)) is None:
        team.fail(f"{short.words} Not even a single sample fits: choose a smaller model or a larger device.")
    else:
        passes = -(-said.samples // split.samples)
        where = f"on {team.name(who.device)} at step {said.step + 1}"
        into = f"{passes} micro-steps of {split.samples} samples"
        team.tell(f"ran out of memory {where} even alone: split into {into}; rounding differs")
        team.actions.append(Write(split))


def _try_older(team: JobState, who: WorkerState, error: str) -> None:
    """A checkpoint could not be read: the one before it, or failure if there is none."""
    team.tell(f"a checkpoint cannot be used: {error}")
    if not team.safe.is_damaged(who.loads):
        team.fail(f"no checkpoint can be used: {error}")
    who.mode, who.loads = WorkerMode.STANDING, ""
