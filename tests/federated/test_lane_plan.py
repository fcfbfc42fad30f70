from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from carpool.core.model import Kind
from carpool.federated.coordinator import Coordinator
from carpool.federated.federation import DeviceName, Federation, Task, TaskName
from carpool.federated.lane_plan import LaneSpeeds, LaneTask, choose_lanes
from carpool.federated.messages import DeviceJoined, DeviceLost, Record, StartWork, TaskResult, Work, WorkReported

A, B, C = TaskName("a"), TaskName("b"), TaskName("c")
GPU, KIND = DeviceName("gpu"), Kind("cuda:0")
ALONE_S = {A: 0.004, B: 0.002, C: 0.001}  # per sample
LEVELS = (0.2, 0.33, 0.5, 0.8, 1.0)

Speeds = Callable[[Mapping[TaskName, float]], float]  # of each task side by side, by shares


def lane_tasks(shares: Sequence[float] = (1.0, 1.0, 1.0), load_s: float = 2.0) -> list[LaneTask]:
    given = zip(ALONE_S.items(), shares, strict=True)
    return [LaneTask(name, 32, sample_s, 1000 * sample_s, share, load_s) for (name, sample_s), share in given]


def order(shares: Sequence[float] = (1.0, 1.0, 1.0), samples: int = 1000) -> tuple[Work, ...]:
    return tuple(Work(name, 0, 0, samples, 32, share) for name, share in zip(ALONE_S, shares, strict=True))


def together(speeds: Sequence[float]) -> dict[TaskName, float]:
    return {name: each / speed for (name, each), speed in zip(ALONE_S.items(), speeds, strict=True)}


def test_a_share_changes_only_if_the_rest_of_the_federation_gains_more_than_the_start_of_a_process_takes() -> None:
    lanes = LaneSpeeds()
    lanes.learn(order(), ALONE_S, together((0.4, 0.4, 0.4)))
    lanes.learn(order((0.8, 0.5, 0.2)), ALONE_S, together((0.6, 0.5, 0.4)))
    now = choose_lanes(lanes, KIND, lane_tasks(load_s=1e6), LEVELS, 10.0)
    assert (now.shares, now.in_turn) == ((1.0, 1.0, 1.0), True)  # 7 s in turn, 10 s side by side
    gain_s = now.seconds - choose_lanes(lanes, KIND, lane_tasks(load_s=0.0), LEVELS, 10.0).seconds
    assert gain_s > 0.0
    assert choose_lanes(lanes, KIND, lane_tasks(load_s=9.9 * gain_s), LEVELS, 10.0).shares != now.shares
    assert choose_lanes(lanes, KIND, lane_tasks(load_s=10.1 * gain_s), LEVELS, 10.0).shares == now.shares


def test_a_small_gain_is_no_reason_to_start_a_process() -> None:
    """The search finds nothing that is a twentieth faster than what is measured here."""
    lanes = LaneSpeeds()
    shares = choose_lanes(lanes, KIND, lane_tasks(load_s=0.0), LEVELS, 1e9).shares
    predicted = choose_lanes(lanes, KIND, lane_tasks(shares, 0.0), LEVELS, 1e9)
    near = (0.8, *shares[1:]) if shares[0] != 0.8 else (1.0, *shares[1:])
    longest = 1000 * ALONE_S[A] / predicted.seconds
    lanes.measured[tuple(zip(ALONE_S, near, strict=True))] = dict.fromkeys(ALONE_S, longest * 0.97)
    assert choose_lanes(lanes, KIND, lane_tasks(near, 0.0), LEVELS, 1e9).shares == near


def test_a_mix_measured_slower_than_turns_goes_back_to_turns() -> None:
    lanes, shares = LaneSpeeds(), (0.8, 0.5, 0.33)
    assert not choose_lanes(lanes, KIND, lane_tasks(shares), LEVELS, 1.0).in_turn
    lanes.learn(order(shares), ALONE_S, together((0.3, 0.2, 0.1)))  # 13 s; in turn it takes 7 s on the whole GPU
    back = choose_lanes(lanes, KIND, lane_tasks(shares), LEVELS, 1.0)
    assert back.in_turn
    assert back.seconds < 13.0


def test_what_was_measured_at_these_shares_counts() -> None:
    lanes = LaneSpeeds()
    before = lanes.speeds(lane_tasks(), [(0.5, 0.5, 0.5), (0.5, 0.5, 0.33)])
    lanes.learn(order((0.5, 0.5, 0.5)), ALONE_S, together((0.3, 0.3, 0.3)))
    assert lanes.speeds(lane_tasks(), [(0.5, 0.5, 0.5)])[0] == pytest.approx([0.3] * 3)
    after = lanes.speeds(lane_tasks(), [(0.5, 0.5, 0.33)])[0]
    assert all(now < then for now, then in zip(after[:2], before[1][:2], strict=True)), (
        "others are predicted slower too"
    )
    lanes.learn(order((0.5, 0.5, 0.5)), ALONE_S, together((0.4, 0.3, 0.3)))
    assert lanes.speeds(lane_tasks(), [(0.5, 0.5, 0.5)])[0] == pytest.approx([0.35, 0.3, 0.3])


def test_the_model_learns_only_from_tasks_that_were_in_company() -> None:
    """The first goes on for most of its time when the others are done: that says little about the mix."""
    lanes, other = LaneSpeeds(), LaneSpeeds()
    lanes.learn(order(), ALONE_S, together((0.9, 0.5, 0.25)))  # busy for 4.4, 4 and 4 s
    other.learn((*order()[:1], *order(samples=100)[1:]), ALONE_S, together((0.9, 0.5, 0.25)))  # 4.4, 0.4 and 0.4 s
    for each in (lanes, other):
        each.measured.clear()
    shares = (1.0, 1.0, 1.0)
    assert lanes.speeds(lane_tasks(), [shares])[0][0] > other.speeds(lane_tasks(), [shares])[0][0]


class Emulated:
    """A coordinator with one GPU device whose cycles take what the speeds say; starting a process takes 2 s."""

    def __init__(self, speed: Speeds, rounds: int) -> None:
        tasks = tuple(Task(name, rounds=rounds, batch_size=32) for name in ALONE_S)
        self.records: list[Record] = []
        self.federation = Federation(tasks, levels=LEVELS)
        self.coordinator = Coordinator(self.federation, observers=[self.records.append])
        self.speed = speed
        self.shares = dict.fromkeys(ALONE_S, 1.0)
        self.orders: list[StartWork] = []
        self.restarts: list[int] = []  # processes started in each cycle

    def joined(self, load_s: float = 2.0) -> DeviceJoined:
        alone_s = {str(name): sample_s for name, sample_s in ALONE_S.items()}
        loads = dict.fromkeys(alone_s, load_s) if load_s else {}
        return DeviceJoined(GPU, KIND, dict.fromkeys(alone_s, 1000), alone_s, load_s=loads)

    def run(self) -> None:
        given = self.coordinator.handle(0.0, [self.joined()])
        while orders := [each for each in given if isinstance(each, StartWork)]:
            given = self.coordinator.handle(*self.report(orders[0]))

    def report(self, ordered: StartWork) -> tuple[float, list[WorkReported]]:
        self.orders.append(ordered)
        new = {work.task: work.share for work in ordered.work}
        changed = sum(self.shares[task] != share for task, share in new.items())
        self.restarts.append(changed)
        self.shares |= new
        speed = 1.0 if ordered.in_turn else self.speed(new)
        busy = [work.samples * ALONE_S[work.task] / speed for work in ordered.work]
        seconds = (sum(busy) if ordered.in_turn else max(busy)) + 2.0 * bool(changed)
        results = [
            TaskResult(work.task, work.round, work.samples, -(-work.samples // 32), each)
            for work, each in zip(ordered.work, busy, strict=True)
        ]
        return self.coordinator.at + seconds, [WorkReported(GPU, ordered.cycle, tuple(results))]


def test_lanes_change_early_in_a_long_federation_and_never_in_a_short_one() -> None:
    """Side by side at whole lanes is slow here, at smaller ones fast."""

    def crowded(shares: Mapping[TaskName, float]) -> float:
        return 0.9 if sum(shares.values()) < 2.0 else 0.6

    long, short = Emulated(crowded, 40), Emulated(crowded, 1)
    long.run()
    short.run()
    assert sum(long.restarts[:8]) > 0
    assert sum(long.restarts[8:]) == 0
    assert not long.orders[-1].in_turn
    assert short.restarts == [0]


def test_a_cycle_in_which_processes_start_teaches_nothing() -> None:
    device = Emulated(lambda shares: 0.9 if sum(shares.values()) < 2.0 else 0.6, 40)
    device.run()
    pairs = list(zip(device.orders, device.restarts, strict=True))
    assert [not order.planned_s for order, _ in pairs] == [bool(changed) for _, changed in pairs]
    assert device.coordinator.devices[GPU].pace == pytest.approx(1.0, abs=0.1)


def test_a_device_whose_mixes_are_all_slow_takes_turns_on_whole_lanes() -> None:
    device = Emulated(lambda shares: 0.1, 40)
    device.run()
    assert all(each.in_turn for each in device.orders[10:])
    assert {work.share for work in device.orders[-1].work} == {1.0}
    assert device.orders[-1].planned_s == pytest.approx(7.0, rel=0.01)


def test_turns_on_whole_lanes_are_measured_as_alone() -> None:
    device = Emulated(lambda shares: 0.1, 1)
    (first,) = device.coordinator.handle(0.0, [device.joined()])
    assert isinstance(first, StartWork)
    state = device.coordinator.devices[GPU]
    for share, expected in ((0.5, 0.004), (1.0, 0.006)):
        state.adopt([work._replace(share=share) for work in first.work])
        state.learn([TaskResult(A, 0, 100, 4, 0.8)], 2.0, replace(first, in_turn=True), is_whole=True)
        assert state.sample_s[A] == pytest.approx(expected)


def test_a_device_that_comes_back_has_whole_lanes_or_none() -> None:
    device = Emulated(lambda shares: 0.9, 40)
    (first,) = device.coordinator.handle(0.0, [device.joined()])
    state = device.coordinator.devices[GPU]
    state.adopt([work._replace(share=0.5) for work in order()])
    again = device.coordinator.handle(1.0, [DeviceLost(GPU), device.joined()])
    assert isinstance(first, StartWork)
    assert [replace(first, deadline_s=0.0)] == again, "the same work, on the lanes that were ordered"
    assert {task: state.share(task) for task in ALONE_S} == {work.task: work.share for work in first.work}
    state.come_back({})
    assert not state.load_s
    assert state.shares == {}


def test_recovery_gives_the_orders_of_an_uninterrupted_run() -> None:
    device = Emulated(lambda shares: 0.9 if sum(shares.values()) < 2.0 else 0.6, 12)
    device.run()
    half = len(device.records) // 2
    again = Coordinator(device.federation)
    again.recover(device.records[:half])
    for record in device.records[half:]:
        assert again.handle(record.at, record.facts) == list(record.orders)
