"""What holds whenever gangs displace gangs: nobody leaves for a less important job, and nothing that fits waits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.draft import Draft
from carpool.core.lifecycle import submitted
from carpool.core.messages import Change, JobSubmitted
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.placement import consolidated, pooled
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import Entry
from carpool.core.topology import Cluster
from carpool.policies.baselines.preemption import PreemptionResult, among, arrange, preempt
from carpool.testing import Rig, check_state, drive
from carpool.testing.strategies import Scenario, random_scenarios


class Ranked(Policy):
    """Ranks jobs by a number drawn for each and checks every outcome."""

    def __init__(self, rank: dict[str, int], *, whole_nodes: bool, anew: bool) -> None:
        self.rank = rank
        self.rule = consolidated if whole_nodes else pooled
        self.anew = anew

    def entries(self, view: Snapshot, *, waiting: bool) -> list[Entry]:
        jobs = (job for job in view.active() if (job.desired is None) == waiting)
        return sorted((self.rank.get(job.id, 0), job.seq, job.id) for job in jobs)

    def plan(self, view: Snapshot) -> Plan:
        waiting, running = self.entries(view, waiting=True), self.entries(view, waiting=False)
        draft = Draft(view)
        if self.anew:
            ordered = [view.jobs[job] for _, _, job in sorted(waiting + running)]
            outcome = arrange(draft, ordered, draft.kinds_for, rule=self.rule)
        else:
            outcome = preempt(draft, among(waiting, view.jobs), lambda entry: running, rule=self.rule)
            self.check(view, waiting, outcome)
        for _, _, name in waiting:  # whoever still waits has no room
            job = view.jobs[name]
            assert draft.holding(job) is not None or draft.find(job, rule=self.rule) is None
        plan = draft.finish("ranked")
        assert {change.job for change in plan.changes} == {*outcome.started, *outcome.released}
        return plan

    def check(self, view: Snapshot, waiting: list[Entry], outcome: PreemptionResult) -> None:
        started = [entry for entry in waiting if entry[2] in outcome.started]
        for victim in outcome.released.values():
            assert view.jobs[victim[2]].desired is not None
            assert started[:1] < [victim], f"{victim} left for nobody before it"
            assert started


@settings(max_examples=80)
@given(
    random_scenarios(12, elastic=False),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_nobody_leaves_for_less_and_nothing_that_fits_waits(
    ground: Scenario, ranks: list[int], whole_nodes: bool, anew: bool
) -> None:
    policy = Ranked({f"j{i}": rank for i, rank in enumerate(ranks)}, whole_nodes=whole_nodes, anew=anew)
    drive(policy, ground.cluster, ground.arrivals, check=check_state)


def snapshot(cluster: Cluster, *held: tuple[str, Allocation]) -> Snapshot:
    """A view in which jobs hold what is said, and "new" waits."""

    class Fixed(Policy):
        def plan(self, view: Snapshot) -> Plan:
            return Plan(
                tuple(Change(JobId(name), what) for name, what in held if view.jobs[JobId(name)].desired is None)
            )

    rig = Rig(Fixed(), cluster=cluster)
    rig.say(0.0, *[JobSubmitted(JobSpec(JobId(name), what.num_devices, 10.0)) for name, what in held])
    return rig.scheduler.snapshot()


def test_whole_nodes_for_a_gang_wider_than_a_node() -> None:

    cluster = Cluster.build([(3, 2, "V100")])
    view = snapshot(
        cluster, ("a", Allocation.of(0)), ("b", Allocation.of(1)), ("c", Allocation.of(2, 3)), ("d", Allocation.of(4))
    )
    new = submitted(JobSpec(JobId("new"), 4, 1.0), 9, 0.0, blocked=False)
    view.jobs = {**view.jobs, new.id: new}
    running: list[Entry] = [(rank, rank, JobId(name)) for rank, name in enumerate("abcd", start=1)]
    draft = Draft(view)
    outcome = preempt(draft, among([(0, 9, new.id)], view.jobs), lambda entry: running)
    # d and c are the least important, and the free device beside d makes two whole nodes with them
    assert set(outcome.released) == {"c", "d"}
    assert draft.holding(new) == Allocation.of(2, 3, 4, 5)
    # ranked behind b there is nobody left to displace but c and d: the same; behind c there is too little
    behind = preempt(Draft(view), among([(3, 9, new.id)], view.jobs), lambda entry: running)
    assert not behind
    assert behind.refused == {(4, (), 0): ((3, 9, new.id), 2)}


def test_a_victim_of_another_kind_is_of_no_use() -> None:

    cluster = Cluster.build([(1, 1, "K80"), (1, 1, "V100")])
    view = snapshot(cluster, ("slow", Allocation.of(0)), ("fast", Allocation.of(1)))
    new = submitted(JobSpec(JobId("new"), 1, 1.0, kinds=(Kind("V100"),)), 9, 0.0, blocked=False)
    view.jobs = {**view.jobs, new.id: new}
    running: list[Entry] = [(1, 1, JobId("fast")), (2, 2, JobId("slow"))]
    outcome = preempt(Draft(view), among([(0, 9, new.id)], view.jobs), lambda entry: running)
    assert set(outcome.released) == {"fast"}
