"""Simulation of a recorded run: same jobs, arrivals, devices and policy, with rates from profiles.

Arrivals and numbers of steps come from the recording; rates, alone and beside one other job, and the costs of starts,
moves and ends come from the profiles. A command has no profile: it takes as long as in the recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator, initial_speeds
from carpool.backends.run_folder import RunFolder
from carpool.core.errors import InputError
from carpool.core.messages import AssignApplied, JobSubmitted, NodeLost, Record
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.policy import Policy
from carpool.core.topology import Placement
from carpool.predictors.profiles.profile import read_profile
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.service.queries.forecast import DEFAULT_COSTS
from carpool.service.store.journal_file import read_run_journal
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace
from carpool.sim.worlds.estimated import FREE, EstimatorWorld

_REPORTS_S = 0.5  # between progress reports of simulated jobs


@dataclass(frozen=True, slots=True)
class ReplayedJob:
    """One job, recorded and simulated."""

    spec: JobSpec
    submitted_at: float
    recorded_at: float  # when it ended
    simulated_at: float | None  # None: never

    @property
    def error(self) -> float | None:
        """Relative error of the simulated completion time."""
        if self.simulated_at is None:
            return None
        return (self.simulated_at - self.recorded_at) / max(self.recorded_at - self.submitted_at, 1e-9)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All finished jobs of a run."""

    jobs: tuple[ReplayedJob, ...]

    @property
    def recorded_s(self) -> float:
        """When the last job ended."""
        return max(job.recorded_at for job in self.jobs)

    @property
    def simulated_s(self) -> float | None:
        """When the last job ends in the simulator; None if one never does."""
        ends = [job.simulated_at for job in self.jobs if job.simulated_at is not None]
        return max(ends) if len(ends) == len(self.jobs) else None

    @property
    def error(self) -> float | None:
        """Relative error of the simulated makespan."""
        return None if self.simulated_s is None else self.simulated_s / self.recorded_s - 1.0

    @property
    def worst(self) -> float | None:
        errors = [abs(job.error) for job in self.jobs if job.error is not None]
        return max(errors) if len(errors) == len(self.jobs) else None


def kept_profiles(folder: RunFolder, name: str) -> dict[JobId, ProfileRateModel]:
    """The profiles of one file name in the folders of a run's jobs."""
    found: dict[JobId, ProfileRateModel] = {}
    for spec, program in folder.settings().jobs:
        path = folder.job(spec.id) / name
        if path.is_file():
            found[spec.id] = ProfileRateModel.of(read_profile(path), exact=program.exact)
    return found


def simulate_run(
    folder: RunFolder,
    policy: Policy,
    truth: Mapping[JobId, ProfileRateModel],
    believed: Mapping[JobId, ProfileRateModel],
) -> ReplayResult:
    """Simulate a recorded run with the rates of `truth`, for a policy that starts with the profiles `believed`."""
    settings = folder.settings()
    header, records = read_run_journal(folder)
    recorded = JobAccounting(header.cluster)
    for record in records:
        recorded.record(record)
    if any(isinstance(fact, NodeLost) for record in records for fact in record.facts):
        raise InputError(
            "was interrupted and resumed", where=str(folder.path), way_out="Name a run without interruption."
        )
    arrivals = [
        Arrival(record.at, fact.spec) for record in records for fact in record.facts if isinstance(fact, JobSubmitted)
    ]
    commands = frozenset(spec.id for spec, program in settings.jobs if program.command)
    lengths = _lengths(folder, recorded, truth, commands)
    arrivals = [arrival for arrival in arrivals if arrival.spec.id in lengths]
    speeds = initial_speeds(settings.devices)
    estimator = OnlineEstimator(header.cluster, speeds, believed)
    for _, spec in arrivals:
        if spec.id in believed and (total := believed[spec.id].total_steps(spec)) is not None:
            estimator.expect(spec.id, total)
    costs = {job: belief.profile.costs for job, belief in truth.items()} | dict.fromkeys(commands, FREE)
    world = _RecordedWorld(
        OnlineEstimator(header.cluster, speeds, truth), {}, costs, DEFAULT_COSTS, lengths, commands=commands
    )
    simulated = JobAccounting(header.cluster)
    simulate(
        arrivals,
        header.cluster,
        policy,
        world,
        estimator=estimator,
        report_every_s=_REPORTS_S,
        observers=(
            simulated,
            _LengthObserver(estimator, {job: steps for job, steps in lengths.items() if job not in commands}),
        ),
    )
    return ReplayResult(tuple(_replayed_job(arrival, recorded, simulated) for arrival in arrivals))


@dataclass(frozen=True, slots=True)
class _RecordedWorld(EstimatorWorld):
    """Trainings at their estimated rates; commands that take the recorded time anywhere."""

    commands: frozenset[JobId] = frozenset()

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(1.0) if spec.id in self.commands else EstimatorWorld.pace(self, spec, done, placement)


class _LengthObserver:
    """Gives an estimator a training's length once it is loaded, as a live run does."""

    def __init__(self, estimator: OnlineEstimator, lengths: Mapping[JobId, float]) -> None:
        self._estimator, self._lengths = estimator, lengths

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, AssignApplied) and fact.job in self._lengths:
                self._estimator.expect(fact.job, self._lengths[fact.job])


def _lengths(
    folder: RunFolder, recorded: JobAccounting, truth: Mapping[JobId, ProfileRateModel], commands: frozenset[JobId]
) -> dict[JobId, float]:
    """Steps of every finished training, seconds of every finished command; InputError where a profile is missing."""
    steps: dict[JobId, float] = {}
    for job, account in recorded.accounts.items():
        outcome = folder.outcome(job)
        if account.phase is not Phase.FINISHED or outcome is None:
            continue
        if job in commands:
            steps[job] = account.held_s
            continue
        if job not in truth:
            raise InputError(
                f"job {job!r} has no profile",
                where=str(folder.path),
                way_out="Only trainings that ran some steps leave one.",
            )
        steps[job] = float(outcome.steps)
    if not steps:
        raise InputError("no job of this run finished", where=str(folder.path), way_out="Name another run.")
    return steps


def _replayed_job(arrival: Arrival, recorded: JobAccounting, simulated: JobAccounting) -> ReplayedJob:
    spec = arrival.spec
    ended = recorded.accounts[spec.id].ended_at
    assert ended is not None, "only finished jobs are simulated"
    return ReplayedJob(spec, arrival.submit_s, ended, simulated.accounts[spec.id].ended_at)
