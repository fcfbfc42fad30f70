"""Drafts: what they refuse, what they keep, what they pass over."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from carpool.core.draft import Draft
from carpool.core.errors import Overbooked
from carpool.core.estimates import Estimator
from carpool.core.messages import RUN, Change, JobSubmitted, Probe
from carpool.core.model import Allocation, DeviceId, Job, JobId, JobSpec, Kind, NodeId
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Bank, Cluster, Node, Placement
from carpool.testing import FakeBackend
from carpool.testing.rig import check_state
from carpool.testing.strategies import GIB

FOUR = Cluster.build([(1, 4, "V100")])


@dataclass
class Told(Policy):
    """Makes the plans a test gives it."""

    plans: list[Plan]
    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 1.5
    keeps_running_order: ClassVar[bool] = True

    def plan(self, view: Snapshot) -> Plan:
        return self.plans.pop(0) if self.plans else Plan.NOTHING

    def waiting_key(self, job: Job, estimates: Estimator) -> float:
        return -job.spec.weight

    def running_key(self, job: Job, estimates: Estimator) -> float:
        return -job.spec.weight


def spec(name: str, devices: int = 1, **more: object) -> JobSpec:
    return JobSpec(JobId(name), devices, 100.0, **more)  # type: ignore[arg-type]


def given(
    jobs: Iterable[JobSpec], holding: dict[str, Allocation] | None = None, cluster: Cluster = FOUR
) -> tuple[Scheduler, Snapshot]:
    """A scheduler with these jobs, some of which hold something."""
    changes = [Change(JobId(name), allocation) for name, allocation in (holding or {}).items()]
    scheduler = Scheduler(cluster, Told([Plan(tuple(changes), "as the test says")]))
    backend = FakeBackend()
    orders = scheduler.handle(0.0, [JobSubmitted(each) for each in jobs])
    scheduler.handle(0.0, backend.apply(0.0, orders))
    check_state(scheduler)
    return scheduler, scheduler.snapshot()


def test_nothing_done_is_an_empty_plan() -> None:
    _, view = given([spec("a")])
    draft = Draft(view)
    assert draft.occupancy is view.occupancy, "a draft that changes nothing copies nothing"
    assert draft.finish("there is nothing to do") == Plan((), "there is nothing to do")


def test_place_and_release() -> None:
    _, view = given([spec("a", 2), spec("b", 3)], {"a": Allocation.of(0, 1)})
    draft = Draft(view)
    a, b = view.jobs[JobId("a")], view.jobs[JobId("b")]
    assert not draft.place(b)
    draft.release(a)
    assert draft.place(b)
    assert (draft.num_free, view.occupancy.num_free) == (1, 2), "the view is left alone"
    assert draft.holding(a) is None
    plan = draft.finish("b is more urgent", wake_at=5.0, note=["a"])
    assert plan.changes == (Change(JobId("a"), None), Change(JobId("b"), Allocation.of(0, 1, 2)))
    assert (plan.reason, plan.wake_at, plan.note) == ("b is more urgent", 5.0, ["a"])


def test_releases_come_first_in_a_plan() -> None:
    _, view = given([spec("a", 2), spec("b", 2)], {"a": Allocation.of(0, 1)})
    draft = Draft(view)
    draft.assign(view.jobs[JobId("b")], Allocation.of(2, 3))
    draft.release(view.jobs[JobId("a")])
    assert [change.job for change in draft.finish("x").changes] == ["a", "b"]


def test_what_changes_nothing_is_no_change() -> None:
    _, view = given([spec("a", 2), spec("b")], {"a": Allocation.of(0, 1)})
    a, b = view.jobs[JobId("a")], view.jobs[JobId("b")]
    draft = Draft(view)
    draft.assign(a, Allocation.of(0, 1))  # where it is
    draft.release(b)  # holds nothing
    draft.release(a)
    draft.assign(a, Allocation.of(2, 3))
    draft.assign(a, Allocation.of(0, 1))  # and back again
    draft.assign(b, Allocation.of(3))
    draft.release(b)
    assert draft.finish("x").changes == ()
    assert draft.num_free == view.occupancy.num_free


def test_a_probe_is_a_change_even_in_place() -> None:
    _, view = given([spec("a")], {"a": Allocation.of(0)})
    draft = Draft(view)
    draft.assign(view.jobs[JobId("a")], Allocation.of(0), Probe(5))
    assert draft.finish("x").changes == (Change(JobId("a"), Allocation.of(0), Probe(5)),)


def test_overbooking_is_refused_and_changes_nothing() -> None:
    _, view = given([spec("a", 2), spec("b", 2)], {"a": Allocation.of(0, 1)})
    a, b = view.jobs[JobId("a")], view.jobs[JobId("b")]
    draft = Draft(view)
    draft.assign(b, Allocation.of(2, 3))
    for wanted in (Allocation.of(1, 2), Allocation.of(0), Allocation.of(0, 1, 2)):
        with pytest.raises(Overbooked):
            draft.assign(a, wanted)
        assert draft.holding(a) == Allocation.of(0, 1)
    with pytest.raises(Overbooked):
        draft.assign(b, Allocation.of(0, 1))
    assert draft.finish("x").changes == (Change(JobId("b"), Allocation.of(2, 3)),)
    assert [resident.job for resident in draft.occupancy.residents(1)] == ["a"]


def test_virtual_shares_up_to_the_policys_limit() -> None:
    _, view = given([spec("a"), spec("b"), spec("c")], {"a": Allocation.of(0)})
    draft = Draft(view)
    draft.assign(view.jobs[JobId("b")], Allocation.of(0, fraction=0.5))
    with pytest.raises(Overbooked, match=r"sum to 1\.75 .* limit 1\.5"):
        draft.assign(view.jobs[JobId("c")], Allocation.of(0, fraction=0.25))


def test_a_refusal_leaves_what_an_earlier_policy_allowed() -> None:
    """Two jobs at 0.75 each: more than this policy would let a device carry."""
    crowd = {name: Allocation.of(0, fraction=0.75) for name in "ab"}
    scheduler, _ = given([spec(name) for name in "abc"], {**crowd, "c": Allocation.of(1)})

    class Strict(Told):
        max_virtual = 1.0

    view = Snapshot(
        Strict([]),
        scheduler.snapshot().occupancy,
        scheduler.jobs,
        scheduler.snapshot().waiting,
        scheduler.snapshot().running_jobs,
        scheduler.snapshot().estimates,
    )
    draft = Draft(view)
    with pytest.raises(Overbooked):
        draft.assign(view.jobs[JobId("a")], Allocation.of(1))
    assert [resident.job for resident in draft.occupancy.residents(DeviceId(0))] == ["b", "a"]


def test_the_share_of_an_exact_job_is_fixed_for_life() -> None:
    half = Allocation.of(0, fraction=0.5)
    scheduler, view = given([spec("a", exact=True)], {"a": half})
    draft = Draft(view)
    with pytest.raises(Overbooked, match=r"job 'a' is exact.*0\.5, not 0\.25"):
        draft.assign(view.jobs[JobId("a")], Allocation.of(1, fraction=0.25))
    draft.assign(view.jobs[JobId("a")], Allocation.of(1))
    assert draft.holding(view.jobs[JobId("a")]) == Allocation.of(1, fraction=0.5), "a whole device, at its share"
    assert isinstance(scheduler.policy, Told)
    scheduler.policy.plans.append(Plan((Change(JobId("a"), None),), "make room for b"))
    backend = FakeBackend()
    scheduler.handle(2.0, backend.apply(2.0, scheduler.handle(1.0, [JobSubmitted(spec("b"))])))
    draft = Draft(scheduler.snapshot())  # it holds nothing now, and still:
    with pytest.raises(Overbooked, match="is exact"):
        draft.assign(scheduler.jobs[JobId("a")], Allocation.of(1, fraction=0.25))
    assert draft.place(scheduler.jobs[JobId("a")])
    held = draft.holding(scheduler.jobs[JobId("a")])
    assert held is not None
    assert held.fractions == (0.5,)


def test_like_demands_are_refused_once() -> None:
    _, view = given([spec("a", 3), spec("w1", 2), spec("w2", 2), spec("s", 1)], {"a": Allocation.of(0, 1, 2)})
    draft = Draft(view)
    tried = []
    for job in draft.waiting():
        tried.append(job.id)
        draft.place(job)
    assert tried == ["w1", "s"]


def test_shrinking_a_job_gives_refused_demands_another_chance() -> None:
    _, view = given([spec("a", 3, min_devices=1, max_devices=4), spec("w", 2)], {"a": Allocation.of(0, 1, 2)})
    draft = Draft(view)
    assert not draft.place(view.jobs[JobId("w")])
    assert [job.id for job in draft.waiting()] == []
    draft.assign(view.jobs[JobId("a")], Allocation.of(0))
    assert [job.id for job in draft.waiting()] == ["w"]


def test_a_try_with_conditions_refuses_nobody_else() -> None:
    _, view = given([spec("a", 4), spec("b", 4)], {})
    draft = Draft(view)
    assert not draft.place(view.jobs[JobId("a")], kinds=[Kind("K80")])
    assert not draft.place(view.jobs[JobId("a")], 5)
    assert [job.id for job in draft.waiting()] == ["a", "b"]


def test_restore() -> None:
    _, view = given([spec("a", 2), spec("b", 2)], {"a": Allocation.of(0, 1)})
    a, b = view.jobs[JobId("a")], view.jobs[JobId("b")]
    draft = Draft(view)
    draft.release(a)
    assert draft.restore(a)
    draft.assign(b, Allocation.of(2, 3))
    assert draft.restore(b), "what it really holds is nothing"
    assert draft.finish("x").changes == ()
    draft.release(a)
    draft.assign(b, Allocation.of(1, 2))
    assert not draft.restore(a)
    assert draft.holding(a) is None


def test_waiting_and_running_in_one_order() -> None:
    _, view = given(
        [spec(name, weight=weight) for name, weight in zip("abcd", (1.0, 4.0, 2.0, 3.0), strict=True)],
        {"c": Allocation.of(0), "b": Allocation.of(1)},
    )
    assert [job.id for job in Draft(view).in_order()] == ["b", "d", "c", "a"]
    assert [job.id for job in view.running()] == ["b", "c"]
    assert [job.id for job in view.running(last_first=True)] == ["c", "b"]
    assert [job.id for job in view.active()] == ["d", "a", "b", "c"]


# ------------------------------------------------------------------------------------------------------------ fill
def test_fill_in_order() -> None:
    _, view = given([spec("a", 2), spec("b", 3), spec("c", 2), spec("d", 3)])
    blocked, passed = Draft(view), Draft(view)
    assert (blocked.fill(bypass=False), passed.fill()) == (1, 2)
    assert [change.job for change in blocked.finish("x").changes] == ["a"]
    assert [change.job for change in passed.finish("x").changes] == ["a", "c"]
    assert passed.fill() == 0, "those that were given devices are not given them again"


# ---------------------------------------------------------------------------------------------------------- memory
SMALL_FIRST = Cluster(
    (
        Node(NodeId(0), "s", (Bank(Kind("K80"), range(2), 8 * GIB),)),
        Node(NodeId(1), "l", (Bank(Kind("V100"), range(2, 4), 16 * GIB),)),
    )
)


@pytest.mark.parametrize("filled", [True, False])
def test_memory_decides_on_the_kind(filled: bool) -> None:
    jobs = [spec("huge", memory_bytes=99 * GIB), spec("big", memory_bytes=12 * GIB), spec("any")]
    _, view = given(jobs, cluster=SMALL_FIRST)
    draft = Draft(view)
    if filled:
        assert draft.fill() == 2
    else:
        assert [draft.place(job) for job in list(draft.waiting())] == [False, True, True]
    held = {change.job: change.allocation for change in draft.finish("x").changes}
    assert held == {"big": Allocation.of(2), "any": Allocation.of(0)}, "one that never fits stands in nobody's way"


def test_memory_holds_for_kinds_that_are_named() -> None:
    _, view = given([spec("big", memory_bytes=12 * GIB)], cluster=SMALL_FIRST)
    big = view.jobs[JobId("big")]
    assert Draft(view).kinds_for(big) == [Kind("V100")]
    assert Draft(view).find(big, kinds=[Kind("K80")]) is None
    assert Draft(view).find(big, kinds=[Kind("K80"), Kind("V100")]) == Allocation.of(2)


# ------------------------------------------------------------------------------------------------------- snapshots
def test_a_candidate_is_described_with_those_who_are_there() -> None:
    _, view = given([spec("a"), spec("b")], {"a": Allocation.of(0, fraction=0.75, batch_size=32)})
    placement = view.placement(view.jobs[JobId("b")], Allocation.of(0, fraction=0.5))
    assert [(each.spec.id, each.fraction, each.batch_size) for each in placement.neighbours] == [("a", 0.75, 32)]
    assert placement.load == 1.25
    assert view.placement(view.jobs[JobId("a")], Allocation.of(0)) == Placement(((Kind("V100"), 1),))


def test_rates_and_service() -> None:
    scheduler, view = given([spec("a", 2)], {"a": Allocation.of(0, 1)})
    a = view.jobs[JobId("a")]
    assert view.rate(a, Allocation.of(0, 1)) == 1.0
    scheduler.handle(3.0, [])
    assert scheduler.snapshot().service(a) == ((Kind("V100"), 6.0),)
    assert scheduler.snapshot().attained_s(a) == 6.0


def test_changes_have_the_purpose_of_running_by_default() -> None:
    assert Change(JobId("a"), None).purpose == RUN
