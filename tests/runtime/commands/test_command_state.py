"""State machine of a command job."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import (
    AssignApplied,
    JobFailed,
    JobFinished,
    ProgressReported,
    ReleaseApplied,
    ResumabilityChanged,
)
from carpool.core.model import JobId
from carpool.runtime.commands.command_state import (
    PARKING_TIMEOUT_S,
    Beside,
    CommandAction,
    CommandPhase,
    CommandState,
    Launch,
    Move,
    Park,
    Restore,
    Terminate,
)
from carpool.runtime.job_state.actions import Emit, Ended, Note, Stopped
from carpool.runtime.job_state.types import Target, WorkerSlot
from carpool.runtime.process.protocol import Done, Joined, ProgressFound, Stepped

JOB = JobId("legacy")
HERE, THERE = (WorkerSlot(0),), (WorkerSlot(1),)


def launched(
    time_limit_s: float = 0.0, retries: int = 3, *, resumable: bool = False, cpu_devices: tuple[int, ...] = ()
) -> CommandState:
    command = CommandState(
        JOB, time_limit_s=time_limit_s, retries=retries, resumable=resumable, cpu_devices=cpu_devices
    )
    assert command.order(0.0, Target(1, HERE)) == [Launch(HERE), Emit(AssignApplied(JOB, 1, 0.0))]
    return command


def test_a_command_runs_and_finishes() -> None:
    end = Ended("the command ended with exit code 0")
    assert launched().exited(1.0, 0) == [end, Emit(JobFinished(JOB, 1))]


def test_a_bad_exit_is_a_failure() -> None:
    for code, error in ((3, "exit code 3"), (-9, "signal 9")):
        _, fact = launched().exited(1.0, code)
        assert isinstance(fact, Emit)
        assert isinstance(fact.fact, JobFailed)
        assert error in fact.fact.error


def test_a_failure_quotes_what_the_command_printed_last_and_where_the_rest_is() -> None:
    error = failure(launched().exited(1.0, 1, "", "ValueError: lr is -1"))
    assert error == f"the command ended with exit code 1 after it printed: ValueError: lr is -1 (carpool logs {JOB})"


def parked(cpu_devices: tuple[int, ...] = (), time_limit_s: float = 0.0) -> CommandState:
    command = launched(time_limit_s, cpu_devices=cpu_devices)
    assert command.order(1.0, Target(2)) == [Park()]
    assert command.parked(2.0, "stopped") == [Note("parked: stopped"), Emit(ReleaseApplied(JOB, 2, 0.0))]
    assert not command.slots
    return command


def failure(actions: list[CommandAction]) -> str:
    (error,) = [
        action.fact.error for action in actions if isinstance(action, Emit) and isinstance(action.fact, JobFailed)
    ]
    return error


def test_a_released_command_is_parked_and_continues_on_the_same_devices() -> None:
    command = parked()
    assert command.order(3.0, Target(3, HERE)) == [Restore(HERE)]
    assert not command.slots
    note, applied = command.restored(4.0)
    assert isinstance(note, Note)
    assert applied == Emit(AssignApplied(JOB, 3, 0.0))
    assert command.slots == HERE
    assert command.exited(5.0, 0)[-1] == Emit(JobFinished(JOB, 3))


def test_a_resumable_command_is_terminated_and_started_again_later() -> None:
    command = launched(resumable=True)
    assert command.order(1.0, Target(2)) == [Terminate()]
    assert command.tick(1.5) == []
    assert command.exited(2.0, -15) == [Emit(ReleaseApplied(JOB, 2, 0.0))]
    assert command.order(3.0, Target(3, THERE)) == [Launch(THERE), Emit(AssignApplied(JOB, 3, 0.0))]


def test_a_session_is_terminated_since_it_keeps_checkpoints() -> None:
    command = launched()
    command.message(0.5, Joined(0, 30))
    assert command.order(1.0, Target(2)) == [Terminate()]


def test_on_a_cpu_a_parked_command_continues_on_other_devices() -> None:
    assert parked(cpu_devices=(0, 1)).order(3.0, Target(3, THERE)) == [Restore(THERE)]


def test_on_a_cpu_a_running_command_moves() -> None:
    command = launched(cpu_devices=(0, 1))
    assert command.order(1.0, Target(2, THERE)) == [Move(THERE), Emit(AssignApplied(JOB, 2, 0.0))]
    assert command.slots == THERE


def test_a_command_that_cannot_continue_on_another_gpu_starts_again() -> None:
    command = parked()
    note, terminate = command.order(3.0, Target(3, THERE))
    assert isinstance(note, Note)
    assert terminate == Terminate()
    assert command.exited(4.0, -15) == [Launch(THERE), Emit(AssignApplied(JOB, 3, 0.0))]


def test_a_moved_command_on_a_gpu_starts_again_on_the_other_device() -> None:
    command = launched()
    assert command.order(1.0, Target(2, THERE)) == [Terminate()]
    assert command.exited(2.0, -15) == [Launch(THERE), Emit(AssignApplied(JOB, 2, 0.0))]


def test_orders_during_parking_and_restoring_are_followed_afterwards() -> None:
    command = launched()
    assert command.order(1.0, Target(2)) == [Park()]
    assert command.order(1.1, Target(3, HERE)) == []
    assert command.parked(2.0, "stopped") == [Note("parked: stopped"), Restore(HERE)]
    assert command.order(2.1, Target(4)) == []
    assert Park() in command.restored(3.0)


def test_a_command_that_cannot_be_parked_is_terminated() -> None:
    command = launched()
    command.order(1.0, Target(2))
    note, terminate = command.parking_failed(2.0, "no RAM")
    assert isinstance(note, Note)
    assert "no RAM" in note.text
    assert terminate == Terminate()
    assert command.exited(3.0, -15) == [Emit(ReleaseApplied(JOB, 2, 0.0))]


def test_a_command_that_cannot_be_restored_fails_with_the_reason() -> None:
    command = parked()
    command.order(3.0, Target(3, HERE))
    assert command.restoring_failed(4.0, "code 2") == [Terminate()]
    assert "code 2" in failure(command.exited(5.0, -15))


def test_a_parked_command_that_does_not_fit_beside_other_jobs_continues_when_they_are_gone() -> None:
    command = parked()
    command.beside = Beside(is_occupied=True)
    assert command.order(3.0, Target(3, HERE)) == [Restore(HERE)]
    note, applied = command.restoring_failed(4.0, "code 2")
    assert isinstance(note, Note)
    assert "code 2" in note.text
    assert applied == Emit(AssignApplied(JOB, 3, 0.0))
    assert command.tick(5.0) == []
    assert not command.uses_devices
    command.beside = Beside()
    assert command.tick(6.0) == [Restore(HERE)]
    assert command.restoring_failed(7.0, "code 2") == [Terminate()], "alone it lacks nothing that others hold"


def test_a_parked_command_does_not_continue_beside_one_that_has_to_run_alone() -> None:
    command = parked()
    command.beside = Beside(is_occupied=True, is_reserved=True)
    assert command.order(3.0, Target(3, HERE)) == [Emit(AssignApplied(JOB, 3, 0.0))]
    command.beside = Beside(is_occupied=True)
    assert command.tick(4.0) == [Restore(HERE)]


@pytest.mark.parametrize("is_restoring", [False, True])
def test_the_processes_of_a_command_that_fails_while_parked_are_ended(is_restoring: bool) -> None:
    command = parked()
    if is_restoring:
        command.order(3.0, Target(3, HERE))
    assert command.fail(4.0, "no lane") == [Terminate()]
    assert failure(command.exited(5.0, -15)) == "no lane"


def test_a_command_that_is_killed_while_parked_fails_with_the_reason() -> None:
    error = failure(parked().exited(3.0, -9))
    assert "signal 9" in error
    assert "parked" in error


def test_parking_and_restoring_have_a_timeout() -> None:
    command = launched()
    command.order(1.0, Target(2))
    assert Terminate() in command.tick(2.0 + PARKING_TIMEOUT_S)
    command = parked()
    command.order(3.0, Target(3, HERE))
    assert command.tick(4.0 + PARKING_TIMEOUT_S) == [Terminate()]


def test_parked_time_does_not_count_towards_the_time_limit() -> None:
    command = parked(time_limit_s=5.0)  # ran for a second
    assert command.tick(100.0) == []
    command.order(100.0, Target(3, HERE))
    command.restored(100.0)
    assert command.tick(103.0) == []
    assert command.tick(105.0) == [Terminate()]


@pytest.mark.parametrize("is_restoring", [False, True])
def test_a_stopped_command_is_terminated_while_parked_or_restoring(is_restoring: bool) -> None:
    command = parked()
    if is_restoring:
        command.order(3.0, Target(3, HERE))
    assert command.stop(4.0) == [Terminate()]
    assert command.restored(4.5) == []
    assert command.exited(5.0, -15) == [Stopped(0)]


@given(st.lists(st.integers(0, 8), max_size=60), st.booleans())
def test_a_command_always_reaches_its_last_target(events: list[int], on_cpu: bool) -> None:
    """Whatever happened, answered actions lead to the newest target, and each order is acknowledged at most once."""
    command = CommandState(JOB, cpu_devices=(0, 1) if on_cpu else ())
    at, generation = 0.0, 0
    applied: list[int] = []

    def take(actions: list[CommandAction]) -> None:
        facts = [action.fact for action in actions if isinstance(action, Emit)]
        applied.extend(fact.generation for fact in facts if isinstance(fact, AssignApplied | ReleaseApplied))

    def answer() -> None:
        match command.phase:
            case CommandPhase.PARKING:
                take(command.parked(at, "stopped"))
            case CommandPhase.RESTORING:
                take(command.restored(at))
            case CommandPhase.TERMINATING:
                take(command.exited(at, -15))
            case _:
                take(command.tick(at))

    for event in events:
        at += 1.0
        if event < 4:
            generation += 1
            take(command.order(at, Target(generation, ((), HERE, THERE, HERE)[event])))
        else:
            answer()
    for _ in range(6):
        answer()
    assert command.slots == command.target.slots
    assert applied == sorted(set(applied))
    assert applied[-1:] == ([generation] if generation else [])


def test_another_share_of_the_same_device_changes_nothing() -> None:
    assert launched().order(1.0, Target(2, (WorkerSlot(0, 0.5),))) == [Emit(AssignApplied(JOB, 2, 0.0))]


def test_old_orders_are_ignored() -> None:
    assert launched().order(1.0, Target(1, THERE)) == []


def test_a_time_limit_ends_a_command() -> None:
    command = launched(time_limit_s=5.0)
    assert command.tick(4.0) == []
    assert command.tick(6.0) == [Terminate()]
    _, fact = command.exited(7.0, -15)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)
    assert "5 s" in fact.fact.error


def test_a_stopped_command_can_be_resumed() -> None:
    command = launched()
    assert command.stop(1.0) == [Terminate()]
    assert command.exited(2.0, -15) == [Stopped(0)]
    assert CommandState(JOB).stop(0.0) == [Stopped(0)]


def stepped(step: int, loss: float = 0.5) -> Stepped:
    return Stepped(step, 0, loss, 100.0, 10.0)


def test_a_session_reports_progress() -> None:
    command = launched()
    command.message(1.0, Joined(0, 30))
    assert command.has_session
    assert command.message(2.0, stepped(8)) == [Emit(ProgressReported(JOB, 1, 8.0, 10.0, 0.5))]
    assert command.message(2.0, stepped(9, math.nan)) == [Emit(ProgressReported(JOB, 1, 9.0, 10.0, None))]
    assert command.message(3.0, Done(30, 2, 0.25, "abc", "its loop ended")) == []
    end = Ended("its loop ended", 30, 2, 0.25, {}, "abc", 100.0)
    assert command.exited(4.0, 0) == [end, Emit(JobFinished(JOB, 1))]


def test_a_killed_session_is_restarted_until_it_makes_no_progress() -> None:
    command = launched(retries=1)
    for step in (3, 4):
        command.message(1.0, Joined(0, 30))
        command.message(1.0, stepped(step))
        note, launch, _ = command.exited(2.0, -9)
        assert isinstance(note, Note)
        assert launch == Launch(HERE)
    assert command.message(3.0, Joined(2, 30))[0] == Note("resumes from its checkpoint of step 2")
    _, fact = command.exited(3.0, -9)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)


def test_a_command_that_was_killed_for_memory_fails_with_that_reason() -> None:
    _, fact = launched().exited(2.0, -9, "out of memory: the machine has no RAM left", "step 3")
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)
    assert fact.fact.error.endswith("printed: step 3 (carpool logs legacy): out of memory: the machine has no RAM left")


def test_a_session_that_fails_by_itself_is_not_restarted() -> None:
    command = launched()
    command.message(1.0, Joined(0, 30))
    _, fact = command.exited(2.0, 1)
    assert isinstance(fact, Emit)
    assert isinstance(fact.fact, JobFailed)


def test_a_session_that_ends_during_termination_has_finished() -> None:
    command = launched()
    command.message(1.0, Joined(0, 30))
    assert command.order(1.0, Target(2)) == [Terminate()]
    command.message(1.0, Done(30, 2, math.nan, "", "its loop ended"))
    assert command.exited(2.0, 0) == [Ended("its loop ended", 30, 2), Emit(JobFinished(JOB, 1))]


def test_a_command_is_reported_resumable_once_it_can_be_parked_or_has_a_session() -> None:
    changed = Emit(ResumabilityChanged(JOB, resumable=True))
    assert CommandState(JOB, can_park=True).order(0.0, Target(1, HERE))[-1] == changed
    assert changed not in CommandState(JOB, resumable=True, can_park=True).order(0.0, Target(1, HERE))
    command = launched()
    assert command.message(1.0, Joined(0, 30)) == [changed]
    assert command.message(2.0, stepped(1)) == [Emit(ProgressReported(JOB, 1, 1.0, 10.0, 0.5))]
    assert command.exited(3.0, -9)[-1] == Emit(ResumabilityChanged(JOB, resumable=False))


def test_progress_of_the_output_is_reported_once_its_rate_is_known_and_not_beside_a_session() -> None:
    command = launched()
    assert command.message(1.0, ProgressFound(3.0, 9.0)) == []
    assert command.steps == 3
    assert command.message(2.0, ProgressFound(5.0, 9.0, 2.0, 0.5)) == [Emit(ProgressReported(JOB, 1, 5.0, 2.0, 0.5))]
    command.message(3.0, Joined(0, 30))
    assert command.message(4.0, ProgressFound(6.0, 9.0, 2.0)) == []


def test_a_command_ends_with_the_last_loss_of_its_output() -> None:
    command = launched()
    command.message(1.0, ProgressFound(9.0, 9.0, 2.0, 0.5))
    end, _ = command.exited(2.0, 0)
    assert isinstance(end, Ended)
    assert (end.steps, end.loss) == (9, 0.5)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize("said", [OOM, "RuntimeError: CUDA error: the MPS client has been terminated"])
def test_a_command_that_failed_through_others_starts_again_once_it_is_alone(said: str) -> None:
    command = launched()
    command.look(1.0, Beside(is_occupied=True))
    (note,) = command.exited(1.0, 1, last_line=said)
    assert isinstance(note, Note)
    assert command.tick(2.0) == []
    command.look(3.0, Beside())
    assert command.tick(3.0) == [Launch(HERE)]
    command.look(4.0, Beside(is_occupied=True))
    assert any(isinstance(action, Ended) for action in command.exited(4.0, 1, last_line=OOM)), "not a second time"


def test_of_commands_that_fail_at_the_same_time_the_last_one_starts_again_too() -> None:
    command = launched()
    command.look(1.0, Beside(is_occupied=True))
    command.look(3.0, Beside())
    (note, launch) = command.exited(3.0, 1, last_line=OOM)
    assert isinstance(note, Note)
    assert launch == Launch(HERE)
    command = launched()
    command.look(1.0, Beside(is_occupied=True))
    command.look(30.0, Beside())
    assert any(isinstance(action, Ended) for action in command.exited(30.0, 1, last_line=OOM)), "long after it"


@pytest.mark.parametrize(
    ("code", "said", "beside"),
    [(1, OOM, Beside()), (1, "ValueError: glimpses", Beside(is_occupied=True)), (-9, OOM, Beside(is_occupied=True))],
)
def test_other_failures_are_final(code: int, said: str, beside: Beside) -> None:
    command = launched()
    command.look(1.0, beside)
    assert any(isinstance(action, Ended) for action in command.exited(1.0, code, last_line=said))


def test_no_command_starts_beside_one_that_has_to_run_alone() -> None:
    command = CommandState(JOB)
    command.beside = Beside(is_occupied=True, is_reserved=True)
    assert command.order(0.0, Target(1, HERE)) == [Emit(AssignApplied(JOB, 1, 0.0))]
    assert command.tick(1.0) == []
    command.beside = Beside(is_occupied=True)
    assert command.tick(2.0) == [Launch(HERE)]
