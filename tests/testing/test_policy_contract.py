"""The contract notices what it is there to notice: each bad policy breaks it, with words that help."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from carpool.core.draft import Draft
from carpool.core.errors import CarpoolError
from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.messages import Change, Fact, Order, ProgressReported
from carpool.core.model import Allocation, Job, JobSpec
from carpool.core.placement import place
from carpool.core.policy import Cadence, Plan, Policy, Snapshot
from carpool.core.topology import Placement
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing import BackendContract, Bench, EstimatorContract, MachinesBench, PolicyContract
from carpool.testing.scenarios import CALM, TROUBLE


class Eager(Policy):
    """A good policy to spoil: whoever fits runs."""

    reason: ClassVar[str] = "whoever fits may run"

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        return draft.finish(self.reason) if draft.fill() else Plan.NOTHING


class Wordless(Eager):
    reason = "ok"


class TwoLines(Eager):
    reason = "whoever fits\nmay run"


@dataclass
class Counting(Eager):
    """Remembers how often it was asked."""

    asked: int = 0

    def plan(self, view: Snapshot) -> Plan:
        self.asked += 1
        return super().plan(view) if self.asked != 3 else Plan.NOTHING


@dataclass
class Meddling(Eager):
    """Changes what it looks at."""

    def plan(self, view: Snapshot) -> Plan:
        for name in list(view.waiting)[1:]:
            view.waiting.discard(name)
        return super().plan(view)


class Overbooking(Policy):
    """Gives everybody device 0, without a draft."""

    def plan(self, view: Snapshot) -> Plan:
        wanted = [Change(name, Allocation.of(*range(view.jobs[name].spec.devices))) for name in view.waiting]
        return Plan(tuple(wanted), "device 0 is the best one")


class Starving(Policy):
    """Has no patience with gangs."""

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        for job in draft.waiting():
            if job.spec.devices == 1:
                draft.place(job)
        return draft.finish("one device is enough for anybody")


class Slow(Eager):
    """Lets a long time pass before it does anything."""

    def plan(self, view: Snapshot) -> Plan:
        if view.at < 5000.0:
            return Plan((), "there is no hurry at all", wake_at=5000.0)
        return super().plan(view)


class Restless(Policy):
    """Takes everybody off again each second, and moves cost more than that."""

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        if view.running_jobs:
            for job in list(view.running()):
                draft.release(job)
        else:
            draft.fill()
        return draft.finish("a change is as good as a rest", wake_at=view.at + 0.25)


class TupleNote(Eager):
    """Its note comes back from JSON as something else."""

    def plan(self, view: Snapshot) -> Plan:
        return Plan((), "nothing to see here", note=(1, 2))


class Anywhere(Policy):
    """Does not ask on which kinds a job may run."""

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        for job in draft.waiting():
            runs = place(draft.occupancy, view.cluster.kinds, job.spec.devices)
            if runs is not None:
                draft.assign(job, Allocation.exclusive(runs))
        return draft.finish("all devices are equal")


class Tickling(Eager):
    """Gives a job what it holds already."""

    def plan(self, view: Snapshot) -> Plan:
        held = [Change(job.id, job.desired) for job in view.running()]
        return Plan(tuple(held), "stay where you are") if held else super().plan(view)


class Insomniac(Eager):
    def plan(self, view: Snapshot) -> Plan:
        return Plan((), "ask me again at once", wake_at=view.at)


@dataclass
class Moody(Eager):
    """Its key is another one each time."""

    mood: list[int] = field(default_factory=lambda: [0])

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        self.mood[0] += 1
        return -self.mood[0]


def contract(made: Policy) -> PolicyContract:
    class Contract(PolicyContract):
        policy = made
        shrinks = False

    return Contract()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Wordless(), "a reason is a readable sentence"),
        (TwoLines(), "a reason is one line of plain text"),
        (Counting(), "the same view must give the same plan"),
        (Meddling(), "a policy must not change what it looks at"),
        (Starving(), "never ended; it is waiting"),
        (Slow(), "the last job ended at"),
        (TupleNote(), "a note must come back from JSON as it went in"),
        (Tickling(), "is given what it holds already"),
        (Insomniac(), "is not after"),
        (Moody(), "must stay the same while its record does"),
    ],
)
def test_a_bad_policy_is_noticed(policy: Policy, words: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=words):
        contract(policy).run(CALM["all at once"])


def test_overbooking_is_noticed() -> None:
    with pytest.raises(CarpoolError, match=r"device 0 .* 2 .* limit 1"):
        contract(Overbooking()).run(CALM["all at once"])


def test_wrong_kinds_are_noticed() -> None:
    with pytest.raises(AssertionError, match=r"'v' does not run on \['K80'\]"):
        contract(Anywhere()).run(CALM["several device types"])


def test_running_in_circles_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no end after"):
        contract(Restless()).test_survives_costs_and_reports("all at once")


def test_random_runs_find_it_too() -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match="never ended"):
        contract(Starving()).test_random_runs()


def test_a_good_policy_is_asked_and_passes() -> None:
    for ground in (*CALM.values(), *TROUBLE.values()):
        contract(Eager()).run(ground)


def test_a_contract_without_a_policy_says_so() -> None:
    with pytest.raises(AssertionError, match="sets `policy` or overrides `make_policy`"):
        PolicyContract().make_policy()


def test_rounds_are_allowed_for() -> None:
    class InRounds(Fifo):
        cadence: ClassVar[Cadence] = Cadence(round_s=360.0)

    contract(InRounds(bypass=True)).run(CALM["all at once"])


def test_wide_jobs_are_made_narrower_for_those_who_serve_one_device() -> None:
    class Narrow(PolicyContract):
        policy = Starving()
        widest = 1

    for name in CALM:
        Narrow().test_finishes_every_job(name)


# -------------------------------------------------------------------------------------------------- other contracts
class Forgetful(MachinesBench):
    """Does every order again, however old."""

    def give(self, *orders: Order) -> None:
        for order in orders:
            self._backend._released.pop(order.job, None)
            super().give(order)


class ForgetfulContract(BackendContract):
    def make_bench(self) -> Bench:
        return Forgetful()


class Silent(MachinesBench):
    """Says nothing."""

    def run(self, seconds: float) -> list[Fact]:
        super().run(seconds)
        return []


class SilentContract(BackendContract):
    def make_bench(self) -> Bench:
        return Silent()


def test_bad_backends_are_noticed() -> None:
    with pytest.raises(AssertionError):
        ForgetfulContract().test_a_stale_assign_is_ignored()
    with pytest.raises(AssertionError):
        ForgetfulContract().test_work_is_kept_over_a_release()
    with pytest.raises(AssertionError):
        SilentContract().test_assign_is_answered()


class Lying(DeclaredEstimator):
    """Learns without saying so, and is never sober."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "_learned", [])

    _learned: list[float]
    __slots__ = ("_learned",)

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(sum(self._learned, -1.0))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        self._learned.append(report.rate)


class LyingContract(EstimatorContract):
    shrinks = False

    def make_estimator(self) -> Estimator:
        return Lying()


def test_bad_estimators_are_noticed() -> None:
    with pytest.raises(AssertionError):
        LyingContract().test_rates_are_valid()
    with pytest.raises(AssertionError, match="answers changed under one version"):
        LyingContract().test_version_grows_when_answers_change()
