import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import CarpoolError, InputError, JournalError, UnknownName
from carpool.core.model import Kind
from carpool.federated.coordinator import Coordinator
from carpool.federated.cycle_plan import dealt, matched_batches, mismatch
from carpool.federated.federation import PLANS, DeviceName, Federation, Target, Task, TaskName
from carpool.federated.figures import FederationFigures
from carpool.federated.journal import JournalWriter, read_journal
from carpool.federated.messages import (
    Aggregate,
    CloseCycle,
    DeviceJoined,
    DeviceLost,
    EndTask,
    Evaluated,
    Order,
    Outcome,
    Record,
    RepeatRound,
    StartWork,
    TaskResult,
    WorkReported,
)

A, B = TaskName("a"), TaskName("b")
ONE, TWO, THREE = DeviceName("one"), DeviceName("two"), DeviceName("three")
DATA = {"a": 100, "b": 40}


OF_CONTENT = (
    Outcome.NOT_FINITE,
    Outcome.OVERSIZED,
    Outcome.WRONG_SHAPE,
    Outcome.WRONG_DTYPE,
    Outcome.NORM_EXCEEDED,
    Outcome.UNREADABLE,
    Outcome.FAILED,
)


def federation(**more: Any) -> Federation:
    tasks = (Task(A, rounds=3, batch_size=10), Task(B, rounds=3, batch_size=10))
    return replace(Federation(tasks), **more)


def joined(*names: DeviceName) -> list[DeviceJoined]:
    return [DeviceJoined(name, Kind("cpu1"), DATA) for name in names]


def measured(speeds: Mapping[DeviceName, float]) -> list[DeviceJoined]:
    return [DeviceJoined(name, Kind("cpu1"), DATA, dict.fromkeys(DATA, sample_s)) for name, sample_s in speeds.items()]


def report(order: StartWork, sample_s: float = 0.01, **changed: Any) -> WorkReported:
    results = [
        TaskResult(
            work.task, work.round, work.samples, -(-work.samples // work.batch_size), work.samples * sample_s, 8
        )._replace(**changed)
        for work in order.work
    ]
    return WorkReported(order.device, order.cycle, tuple(results))


def works(orders: Iterable[Order]) -> dict[DeviceName, StartWork]:
    return {order.device: order for order in orders if isinstance(order, StartWork)}


def of_type(kind: type, orders: Iterable[Order]) -> list[Order]:
    return [order for order in orders if isinstance(order, kind)]


class Journal:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self.records.append(record)

    @property
    def outcomes(self) -> list[str]:
        return [refusal.outcome for record in self.records for refusal in record.refused]


def start(spec: Federation, *names: DeviceName) -> tuple[Coordinator, Journal, dict[DeviceName, StartWork]]:
    journal = Journal()
    coordinator = Coordinator(spec, observers=[journal])
    return coordinator, journal, works(coordinator.handle(0.0, joined(*names)))


def run(coordinator: Coordinator, orders: Sequence[Order], speeds: dict[DeviceName, float]) -> None:
    """Let devices with these seconds per sample work to the end."""
    at = coordinator.at
    while not coordinator.is_over:
        found = works(orders)
        ends = sorted((sum(w.samples for w in order.work) * speeds[name], name) for name, order in found.items())
        for seconds, name in ends:
            orders = coordinator.handle(at + seconds, [report(found[name], speeds[name])])
        at = coordinator.at


def test_a_cycle_ends_with_one_aggregation_per_task() -> None:
    coordinator, _, first = start(federation(), ONE, TWO)
    assert {work.task for work in first[ONE].work} == {A, B}
    assert coordinator.handle(1.0, [report(first[ONE])]) == []
    orders = coordinator.handle(1.0, [report(first[TWO])])
    assert orders[0] == CloseCycle(1)
    assert of_type(Aggregate, orders) == [Aggregate(t, 0, (ONE, TWO), (0.5, 0.5)) for t in (A, B)]
    assert {order.cycle for order in works(orders).values()} == {2}
    assert {work.round for order in works(orders).values() for work in order.work} == {1}


def test_work_is_in_proportion_to_data() -> None:
    _, _, orders = start(federation(), ONE)
    assert {work.task: work.samples for work in orders[ONE].work} == {A: 100, B: 40}


def test_a_task_ends_after_its_rounds() -> None:
    coordinator, journal, orders = start(federation(), ONE)
    run(coordinator, list(orders.values()), {ONE: 0.01})
    ends = [order for record in journal.records for order in of_type(EndTask, record.orders)]
    assert {order.task for order in ends if isinstance(order, EndTask) and not order.failed} == {A, B}
    assert coordinator.num_cycles == 3


@pytest.mark.parametrize("plan", ["balanced", "shortest"])
def test_fast_and_slow_devices_end_together(plan: str) -> None:
    spec = federation(tasks=(Task(A, rounds=8, batch_size=10), Task(B, rounds=8, batch_size=10)))
    figures, plain = FederationFigures(spec), FederationFigures(spec)
    speeds = {ONE: 0.01, TWO: 0.02, THREE: 0.08}
    for each, fold in ((plan, figures), ("equal-steps", plain)):
        coordinator = Coordinator(replace(spec, plan=each), observers=[fold])
        run(coordinator, coordinator.handle(0.0, measured(speeds)), speeds)
    last = figures.cycles[-1]
    assert sum(last.idle.values()) < 0.05 * last.seconds
    if plan == "shortest":
        assert last.samples == pytest.approx(plain.cycles[-1].samples, rel=0.05)
    assert figures.mean_mismatch < 0.1 * plain.mean_mismatch
    assert figures.idle_part < plain.idle_part / 3


def test_balanced_devices_never_make_fewer_epochs_than_ordered() -> None:
    """So that a round learns from no less data than training the task alone."""
    speeds = {ONE: 0.01, TWO: 0.02, THREE: 0.08}
    orders = works(Coordinator(federation()).handle(0.0, measured(speeds)))
    samples = {name: {work.task: work.samples for work in order.work} for name, order in orders.items()}
    assert samples == {ONE: {A: 800, B: 320}, TWO: {A: 400, B: 160}, THREE: {A: 100, B: 40}}
    capped = works(Coordinator(federation(epochs_range=(0.1, 3.0))).handle(0.0, measured(speeds)))
    assert {work.task: work.samples for work in capped[ONE].work} == {A: 300, B: 120}


@pytest.mark.parametrize(
    ("task", "runs"),
    [(Task(A), 8), (Task(A, weight=2.0), 8), (Task(A, local_epochs=3.0), 2), (Task(A, local_epochs=0.5), 16)],
)
def test_epochs_beyond_those_of_a_round_are_runs_of_their_own(task: Task, runs: int) -> None:
    """A device eight times as fast as the slowest works as long, with no more epochs in a row than were ordered."""
    orders = works(Coordinator(federation(tasks=(task,))).handle(0.0, measured({ONE: 0.01, TWO: 0.08})))
    assert {name: order.work[0].runs for name, order in orders.items()} == {ONE: runs, TWO: max(1, runs // 8)}


def test_a_client_app_makes_whole_epochs_in_each_run() -> None:
    task = Task(A, local_epochs=0.25, whole_epochs=True)
    (order,) = works(Coordinator(federation(tasks=(task,))).handle(0.0, measured({ONE: 0.01}))).values()
    assert (order.work[0].samples, order.work[0].runs) == (100, 1)


def test_normalized_updates_count_by_the_steps_in_a_row() -> None:
    """Eight runs of ten steps are as long as one of ten steps, so equal data count the same."""
    spec = federation(tasks=(Task(A, batch_size=10, weighting="normalized"),))
    coordinator = Coordinator(spec)
    orders = works(coordinator.handle(0.0, measured({ONE: 0.01, TWO: 0.08})))
    coordinator.handle(8.0, [report(orders[ONE], 0.01)])
    (done,) = of_type(Aggregate, coordinator.handle(8.1, [report(orders[TWO], 0.08)]))
    assert isinstance(done, Aggregate)
    assert done.weights == pytest.approx((0.5, 0.5))


def test_the_slowest_device_keeps_its_least_work() -> None:
    spec = federation(plan="shortest", epochs_range=(0.5, 4.0))
    coordinator, _, orders = start(spec, ONE, TWO)
    speeds = {ONE: 0.01, TWO: 1.0}
    coordinator.handle(1.4, [report(orders[ONE], speeds[ONE])])
    then = works(coordinator.handle(140.0, [report(orders[TWO], speeds[TWO])]))
    assert sum(work.samples for work in then[TWO].work) == 70
    assert sum(work.samples for work in then[ONE].work) == 210


def test_tasks_that_need_more_time_get_a_larger_share() -> None:
    _, _, orders = start(federation(), ONE)
    shares = {work.task: work.share for work in orders[ONE].work}
    assert shares[A] > shares[B]


def test_work_is_dealt_to_cores_longest_first() -> None:
    seconds = {"a": 1.0, "b": 4.0, "c": 2.0, "d": 3.0}
    assert dealt(seconds, 2) == [["b", "a"], ["d", "c"]]
    assert dealt(seconds, 9) == [["b"], ["d"], ["c"], ["a"]]
    assert dealt(dict.fromkeys("abc", 0.0), 2) == [["a", "c"], ["b"]]  # nothing is known yet


def test_a_device_of_several_cores_does_its_tasks_side_by_side() -> None:
    """An epoch takes 1.4 s in turn and as long as the longest task, 1 s, on two cores."""
    one, two = measured({ONE: 0.01, TWO: 0.01})
    orders = works(Coordinator(federation()).handle(0.0, [one, replace(two, cores=2)]))
    assert sum(work.samples for work in orders[ONE].work) == 140
    assert {work.task: work.samples for work in orders[TWO].work} == {A: 141, B: 56}  # shares come in levels
    assert [order.planned_s for order in orders.values()] == pytest.approx([1.4, 1.4], rel=0.01)


def test_a_heavier_task_makes_more_epochs() -> None:
    spec = federation(tasks=(Task(A, weight=2.0), Task(B)))
    _, _, orders = start(spec, ONE)
    samples = {work.task: work.samples for work in orders[ONE].work}
    assert samples[A] / samples[B] == pytest.approx(5.0, rel=0.05)


def test_batch_sizes_change_only_where_allowed() -> None:
    _, _, orders = start(federation(), ONE)
    assert {work.batch_size for work in orders[ONE].work} == {10}


def test_matched_batches_give_equally_many_steps() -> None:
    """On each device in proportion to its data."""
    tasks = tuple(Task(name, batch_size=10, batch_range=(2, 40)) for name in (A, B))
    coordinator = Coordinator(federation(tasks=tasks))
    facts = [DeviceJoined(ONE, Kind("cpu1"), {"a": 160, "b": 40}), DeviceJoined(TWO, Kind("cpu1"), {"a": 50, "b": 50})]
    sizes = {
        name: [(work.batch_size, work.samples / work.batch_size) for work in order.work]
        for name, order in works(coordinator.handle(0.0, facts)).items()
    }
    assert sizes[ONE] == [(20, 8.0), (5, 8.0)]
    assert {size for size, _ in sizes[TWO]} == {10}


def test_a_batch_size_stays_in_its_range_and_one_without_a_range_stays() -> None:
    tasks = [Task(A, batch_size=10, batch_range=(8, 12)), Task(B, batch_size=10, batch_range=(8, 12))]
    assert matched_batches(tasks, [10_000, 1]) == [12, 8]
    assert matched_batches([replace(tasks[0], batch_range=None), tasks[1]], [10_000, 1]) == [10, 10]


@pytest.mark.parametrize("plan", ["equal-steps", "equal-epochs"])
def test_equal_plans(plan: str) -> None:
    _, _, orders = start(federation(plan=plan), ONE)
    work = {each.task: each for each in orders[ONE].work}
    assert {each.share for each in work.values()} == {0.5}
    assert [work[A].samples, work[B].samples] == ([70, 70] if plan == "equal-steps" else [100, 40])


def test_a_device_without_data_of_a_task_does_not_get_it() -> None:
    coordinator = Coordinator(federation())
    facts = [DeviceJoined(ONE, Kind("cpu1"), {"a": 10, "b": 0}), DeviceJoined(TWO, Kind("cpu1"), {"b": 5})]
    orders = works(coordinator.handle(0.0, facts))
    assert {name: [work.task for work in order.work] for name, order in orders.items()} == {ONE: [A], TWO: [B]}


def test_a_task_without_data_anywhere_waits() -> None:
    coordinator = Coordinator(federation())
    orders = works(coordinator.handle(0.0, [DeviceJoined(ONE, Kind("cpu1"), {"a": 10})]))
    orders = works(coordinator.handle(1.0, [report(orders[ONE]), DeviceJoined(TWO, Kind("cpu1"), {"b": 5})]))
    assert {work.task for work in orders[TWO].work} == {B}
    assert coordinator.tasks[B].rounds == 0


def test_part_of_the_devices_takes_part() -> None:
    names = [DeviceName(f"d{i:02}") for i in range(20)]
    _, _, first = start(federation(participation=0.25), *names)
    coordinator, _, again = start(federation(participation=0.25), *names)
    _, _, other = start(federation(participation=0.25, seed=1), *names)
    assert len(first) == 5
    assert first.keys() == again.keys() != other.keys()
    orders: list[Order] = []
    for order in again.values():
        orders = coordinator.handle(1.0, [report(order)])
    assert works(orders).keys() != again.keys()


def test_a_cycle_waits_for_enough_devices() -> None:
    coordinator, _, orders = start(federation(min_devices=2), ONE)
    assert not orders
    assert works(coordinator.handle(5.0, joined(TWO))).keys() == {ONE, TWO}


def test_a_round_closes_at_its_deadline_with_partial_work() -> None:
    coordinator, journal, orders = start(federation(deadline_s=10.0, grace_s=2.0), ONE, TWO)
    assert orders[ONE].deadline_s == 10.0
    assert coordinator.wake_at == 12.0
    coordinator.handle(10.0, [report(orders[ONE], samples=10, steps=1)])
    assert coordinator.handle(11.9, []) == []
    closed = coordinator.handle(12.0, [])
    assert closed[0] == CloseCycle(1, (TWO,))
    assert Aggregate(A, 0, (ONE,), (1.0,)) in closed
    assert coordinator.handle(12.5, [report(orders[TWO])]) == []
    assert journal.outcomes == [Outcome.STALE, Outcome.STALE]


def test_a_lost_device_does_not_hold_up_a_cycle() -> None:
    coordinator, _, orders = start(federation(), ONE, TWO)
    coordinator.handle(1.0, [report(orders[ONE])])
    after = coordinator.handle(2.0, [DeviceLost(TWO)])
    assert after[0] == CloseCycle(1, (TWO,))
    assert works(after).keys() == {ONE}
    assert works(coordinator.handle(3.0, joined(TWO))) == {}  # not in this cycle
    assert works(coordinator.handle(4.0, [report(works(after)[ONE])])).keys() == {ONE, TWO}


def test_a_device_back_in_mid_round_gets_its_work_again() -> None:
    coordinator, _, orders = start(federation(deadline_s=10.0), ONE, TWO)
    coordinator.handle(1.0, [DeviceLost(TWO)])
    again = coordinator.handle(4.0, joined(TWO))
    assert again == [replace(orders[TWO], deadline_s=6.0)]
    coordinator.handle(5.0, [report(orders[TWO])])
    assert coordinator.handle(6.0, [report(orders[ONE])])[0] == CloseCycle(1)


def test_all_devices_lost_repeats_the_round() -> None:
    coordinator, _, _ = start(federation(), ONE)
    orders = coordinator.handle(1.0, [DeviceLost(ONE)])
    assert [type(order) for order in orders] == [CloseCycle, RepeatRound, RepeatRound]
    back = works(coordinator.handle(2.0, joined(ONE)))
    assert {work.round for work in back[ONE].work} == {0}


def test_too_few_updates_fail_a_task_after_some_rounds() -> None:
    spec = federation(tasks=(Task(A, min_updates=2, max_failed_rounds=2),))
    coordinator, _, orders = start(spec, ONE)
    then = coordinator.handle(1.0, [report(orders[ONE])])
    assert of_type(RepeatRound, then)
    last = coordinator.handle(2.0, [report(works(then)[ONE])])
    (end,) = of_type(EndTask, last)
    assert isinstance(end, EndTask)
    assert end.failed
    assert coordinator.is_over


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"round": 7}, Outcome.NOT_ORDERED),
        ({"task": TaskName("c")}, Outcome.NOT_ORDERED),
        ({"samples": 1000}, Outcome.INFLATED),
        ({"samples": 0, "steps": 0}, Outcome.NO_WORK),
        *[({"outcome": outcome}, outcome) for outcome in OF_CONTENT],
    ],
)
def test_refused_results(changed: dict[str, Any], outcome: Outcome) -> None:
    coordinator, journal, orders = start(federation(), ONE, TWO)
    coordinator.handle(1.0, [report(orders[ONE], **changed)])
    closed = coordinator.handle(2.0, [report(orders[TWO])])
    assert journal.outcomes == [outcome, outcome]
    assert of_type(Aggregate, closed) == [Aggregate(t, 0, (TWO,), (1.0,)) for t in (A, B)]
    assert works(closed)[ONE].work[0].start == 0


def test_a_duplicate_counts_once() -> None:
    coordinator, journal, orders = start(federation(), ONE, TWO)
    coordinator.handle(1.0, [report(orders[ONE])])
    coordinator.handle(1.1, [report(orders[ONE])])
    assert journal.outcomes == [Outcome.DUPLICATE] * 2
    doubled = replace(report(orders[TWO]), results=report(orders[TWO]).results * 2)
    closed = coordinator.handle(2.0, [doubled])
    assert journal.outcomes[2:] == [Outcome.DUPLICATE] * 2
    assert Aggregate(A, 0, (ONE, TWO), (0.5, 0.5)) in closed


def test_a_task_that_fails_says_which_update_was_refused_last() -> None:
    spec = federation(tasks=(Task(A, max_failed_rounds=1),))
    coordinator, journal, orders = start(spec, ONE)
    bad = report(orders[ONE], outcome=Outcome.NORM_EXCEEDED, detail="norm 9, at most 1")
    (end,) = of_type(EndTask, coordinator.handle(1.0, [bad]))
    assert isinstance(end, EndTask)
    assert end.reason.endswith("the last refused, of one: norm exceeded (norm 9, at most 1)")
    again = Coordinator(spec)
    again.recover(journal.records[:1])
    assert of_type(EndTask, again.handle(1.0, [bad])) == [end]


def test_an_unknown_device_is_refused() -> None:
    coordinator, journal, orders = start(federation(), ONE)
    coordinator.handle(1.0, [replace(report(orders[ONE]), device=THREE)])
    assert journal.outcomes == [Outcome.NOT_ORDERED] * 2


def test_a_target_ends_a_task_before_its_rounds() -> None:
    spec = federation(tasks=(Task(A, target=Target.parse("accuracy >= 0.9")), Task(B, rounds=5)))
    coordinator, _, orders = start(spec, ONE)
    assert works(coordinator.handle(1.0, [report(orders[ONE])])) == {}  # waits for the evaluation
    second = works(coordinator.handle(1.0, [Evaluated(A, 1, {"accuracy": 0.5})]))
    coordinator.handle(2.0, [report(second[ONE])])
    last = coordinator.handle(2.0, [Evaluated(A, 2, {"accuracy": 0.9})])
    assert [order.task for order in last if isinstance(order, EndTask)] == [A]
    assert {work.task for work in works(last)[ONE].work} == {B}


def test_the_next_cycle_continues_in_the_data() -> None:
    coordinator, _, orders = start(federation(), ONE)
    then = works(coordinator.handle(1.0, [report(orders[ONE], samples=30, steps=3)]))
    assert {work.start for work in then[ONE].work} == {30}


def test_time_must_not_decrease() -> None:
    coordinator, _, _ = start(federation(), ONE)
    coordinator.handle(5.0, [])
    with pytest.raises(CarpoolError):
        coordinator.handle(4.0, [])


def test_bad_descriptions_are_refused() -> None:
    with pytest.raises(UnknownName):
        Task(A, algorithm="fedsgd")
    with pytest.raises(UnknownName):
        federation(plan="random")
    with pytest.raises(InputError):
        federation(tasks=(Task(A), Task(A)))
    with pytest.raises(InputError):
        Task(A, batch_size=8, batch_range=(16, 32))
    with pytest.raises(InputError):
        Target.parse("accuracy > high")


def simulated(spec: Federation, speeds: dict[DeviceName, float]) -> tuple[list[Record], str]:
    stream, journal = io.StringIO(), Journal()
    coordinator = Coordinator(spec, observers=[JournalWriter(stream, spec), journal])
    run(coordinator, coordinator.handle(0.0, joined(*speeds)), speeds)
    return journal.records, stream.getvalue()


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=3),
    st.sampled_from(PLANS),
    st.data(),
)
def test_a_recovered_coordinator_gives_the_same_orders(times: list[float], plan: str, data: st.DataObject) -> None:
    spec = federation(plan=plan)
    records, text = simulated(spec, dict(zip((ONE, TWO, THREE), times, strict=False)))
    read, stored = read_journal(text.splitlines(keepends=True))
    assert read == spec
    assert list(stored) == records
    cut = data.draw(st.integers(0, len(records) - 1))
    coordinator = Coordinator(spec)
    coordinator.recover(records[:cut])
    for record in records[cut:]:
        assert tuple(coordinator.handle(record.at, record.facts)) == record.orders
    assert coordinator.is_over


def test_a_cut_last_line_is_left_out_and_a_broken_one_is_not() -> None:
    records, text = simulated(federation(), {ONE: 0.01})
    assert len(list(read_journal(text[:-5].splitlines(keepends=True))[1])) == len(records) - 1
    lines = text.splitlines(keepends=True)
    lines[1] = lines[1].replace("DeviceJoined", "DeviceJumped")
    with pytest.raises(JournalError):
        list(read_journal(lines)[1])
    with pytest.raises(JournalError):
        read_journal(['{"schema": 99}\n'])


def test_a_resumed_run_repeats_work_that_was_not_reported() -> None:
    coordinator, journal, orders = start(federation(), ONE, TWO)
    coordinator.handle(1.0, [report(orders[ONE])])
    resumed = Coordinator(federation())
    resumed.recover(journal.records)
    lost = [DeviceLost(name) for name in (ONE, TWO)]
    assert resumed.handle(9.0, [*lost, *joined(ONE, TWO)]) == [orders[TWO]]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.integers(1, 100))
def test_no_mismatch_where_work_is_proportional(data: list[int], epochs: int) -> None:
    assert mismatch(data, [each * epochs for each in data]) == pytest.approx(0.0, abs=1e-6)
    assert mismatch([1, 10], [5, 5]) == pytest.approx(2 * log(10))
