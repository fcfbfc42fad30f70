"""AntMan, equal MPS slots and kernel estimation: their orders, their safety, and what sharing gains."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.messages import Assign, Fact, JobFinished, JobSubmitted, Order, Release
from carpool.core.metrics import Metrics, Summary
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, Kind, NodeId
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Bank, Cluster, Node, Placement
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.registry import parse_policy
from carpool.policies.sharing.antman import AntMan
from carpool.policies.sharing.shareable_devices import ShareableDevices, pick_devices, turns_on
from carpool.policies.sharing.static_admission import KernelEst, MpsEqual
from carpool.sim.backend import SimulatedBackend
from carpool.sim.engine import Engine
from carpool.sim.event_queue import EventQueue
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.contention import Contender, Contention
from carpool.sim.worlds.parametric import ParametricWorld
from carpool.sim.worlds.traits import ChangeCosts, KindTraits, ModelTraits

V100 = Kind("V100")
THIRD = 1.0 / 3.0
SHARERS = ("antman", "antman:guarantee=weight", "antman:guarantee=quota:quota=2", "mps-equal", "kernel-est")


def world() -> ParametricWorld:
    """Light, middling and heavy models; what they use of a device is what the tests count on."""
    models = {
        "light": ModelTraits(sm=0.2, memory_bw=0.1),
        "half": ModelTraits(sm=0.5, memory_bw=0.25),
        "heavy": ModelTraits(sm=0.95, memory_bw=0.9),
    }
    return ParametricWorld(models, {"V100": KindTraits()}, ChangeCosts(start_s=0.0, resize_s=0.0))


def cluster(devices: int = 1, memory_bytes: int = 0) -> Cluster:
    return Cluster((Node(NodeId(0), "n0", (Bank(V100, range(devices), memory_bytes),)),))


def asked(name: str, model: str = "light", devices: int = 1, memory: int = 0, weight: float = 1.0) -> JobSubmitted:
    spec = JobSpec(JobId(name), devices, 100.0, model, weight=weight, memory_bytes=memory, user=name[0])
    return JobSubmitted(spec)


def scheduler(policy: Policy, devices: int = 1, memory_bytes: int = 0) -> Scheduler:
    return Scheduler(cluster(devices, memory_bytes), policy, estimator=world().estimator())


def assign(name: str, *devices: int, fraction: float = 1.0, turn: int = 0, generation: int = 1) -> Assign:
    return Assign(JobId(name), Allocation.of(*devices, fraction=fraction, turn=turn), generation)


# ------------------------------------------------------------------------------------------------------ mps-equal
def test_equal_slots_on_empty_devices_first() -> None:
    orders = scheduler(MpsEqual(), 2).handle(0.0, [asked(name) for name in "abcdefg"])
    assert orders == [
        assign("a", 0, fraction=THIRD),
        assign("b", 1, fraction=THIRD),
        assign("c", 0, fraction=THIRD),
        assign("d", 1, fraction=THIRD),
        assign("e", 0, fraction=THIRD),
        assign("f", 1, fraction=THIRD),
    ]


def test_packed_fills_a_device_before_the_next_and_nobody_is_moved() -> None:
    brain = scheduler(MpsEqual(slots=2, fit="packed"), 2)
    orders = brain.handle(0.0, [asked(name) for name in "abc"])
    assert orders == [assign("a", 0, fraction=0.5), assign("b", 0, fraction=0.5), assign("c", 1, fraction=0.5)]
    assert brain.handle(1.0, [JobFinished(JobId("a"), 1)]) == []
    assert brain.handle(2.0, [asked("d")]) == [assign("d", 0, fraction=0.5)]


def test_slots_open_only_where_memory_is() -> None:
    brain = scheduler(MpsEqual(), 2, memory_bytes=10)
    orders = brain.handle(0.0, [asked("a", memory=8), asked("b", memory=6), asked("c", memory=5), asked("d", memory=4)])
    assert orders == [assign("a", 0, fraction=THIRD), assign("b", 1, fraction=THIRD), assign("d", 1, fraction=THIRD)]


def test_a_gang_takes_a_slot_on_each_device() -> None:
    brain = scheduler(MpsEqual(slots=2), 4)
    orders = brain.handle(0.0, [asked("a", devices=4), asked("b", devices=2), asked("c", devices=3)])
    assert orders == [assign("a", 0, 1, 2, 3, fraction=0.5), assign("b", 0, 1, fraction=0.5)]


# --------------------------------------------------------------------------------------------------------- antman
def test_opportunists_go_where_most_is_idle_behind_the_guaranteed() -> None:
    brain = scheduler(AntMan(), 2)
    orders = brain.handle(0.0, [asked("a", "half"), asked("b", "light"), asked("c", "half"), asked("d", "light")])
    assert orders == [assign("a", 0), assign("b", 1), assign("c", 1, turn=1), assign("d", 0, turn=1)]


def test_nobody_joins_where_nothing_is_idle_or_memory_is_short() -> None:
    assert scheduler(AntMan()).handle(0.0, [asked("a", "heavy"), asked("b")]) == [assign("a", 0)]
    brain = scheduler(AntMan(), memory_bytes=10)
    orders = brain.handle(0.0, [asked("a", memory=8), asked("b", memory=3), asked("c", memory=2)])
    assert orders == [assign("a", 0), assign("c", 0, turn=1)]


def test_an_opportunist_moves_up_in_place_and_onto_free_devices() -> None:
    brain = scheduler(AntMan(), 2)
    brain.handle(0.0, [asked("a"), asked("b", "heavy"), asked("c"), asked("d")])
    assert brain.handle(1.0, [JobFinished(JobId("a"), 1)]) == [], "c leads the device it is on without an order"
    assert brain.handle(2.0, [JobFinished(JobId("b"), 1)]) == [assign("d", 1, turn=2, generation=2)]


def test_moving_must_save_more_than_it_costs() -> None:
    brain = scheduler(AntMan(move_s=1000.0), 2)
    brain.handle(0.0, [asked("a"), asked("b", "heavy"), asked("c")])
    assert brain.handle(1.0, [JobFinished(JobId("b"), 1)]) == []


def test_weight_goes_ahead_of_opportunists_and_evicts_for_memory() -> None:
    brain = scheduler(AntMan(guarantee="weight"), memory_bytes=10)
    assert brain.handle(0.0, [asked("a", memory=4), asked("b", memory=4)]) == [
        assign("a", 0, turn=1),
        assign("b", 0, turn=2),
    ]
    assert brain.handle(1.0, [asked("c", memory=5, weight=2.0)]) == [
        Release(JobId("b"), 2),
        assign("c", 0),
    ]
    assert brain.handle(2.0, [asked("d", memory=11, weight=9.0)]) == [], "what can never fit evicts nobody"


def test_quota_guarantees_each_user_a_number_of_devices() -> None:
    brain = scheduler(AntMan(guarantee="quota", quota=1), 2)
    orders = brain.handle(0.0, [asked("a1"), asked("a2"), asked("b1")])
    assert orders == [assign("a1", 0), assign("b1", 1), assign("a2", 0, turn=1)]


def test_without_knowledge_of_use_nothing_is_shared() -> None:
    brain = Scheduler(cluster(), AntMan(), estimator=DeclaredEstimator())
    assert brain.handle(0.0, [asked("a"), asked("b")]) == [assign("a", 0)]


# ----------------------------------------------------------------------------------------------------- kernel-est
def test_sharing_where_the_prediction_bears_it() -> None:
    brain = scheduler(KernelEst(), 2)
    orders = brain.handle(0.0, [asked("a", "heavy"), asked("b", "light"), asked("c", "heavy"), asked("d", "light")])
    assert orders == [assign("a", 0), assign("b", 1), assign("d", 1)]


def test_a_limit_of_one_never_shares() -> None:
    orders = scheduler(KernelEst(max_slowdown=1.0)).handle(0.0, [asked("a"), asked("b")])
    assert orders == [assign("a", 0)]


def test_without_knowledge_of_use_pairs_of_rates_decide() -> None:
    class Rates(DeclaredEstimator):
        def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
            harsh = any(neighbour.spec.model == "heavy" for neighbour in placement.neighbours)
            return Estimate(0.1 if harsh else 0.8 if placement.neighbours else 1.0)

    brain = Scheduler(cluster(2), KernelEst(), estimator=Rates())
    orders = brain.handle(0.0, [asked("a", "heavy"), asked("b", "light"), asked("c", "light"), asked("d", "heavy")])
    assert orders == [assign("a", 0), assign("b", 1), assign("c", 1)]


def test_the_default_coefficients_predict_the_parametric_world() -> None:
    rng, policy, truth = Random(7), KernelEst(), Contention()
    errors = []
    for _ in range(300):
        group = [Contender(rng.uniform(0.1, 0.95), rng.uniform(0.02, 0.8)) for _ in range(rng.choice((2, 3)))]
        models = {f"{place}": ModelTraits(sm=one.sm, memory_bw=one.memory_bw) for place, one in enumerate(group)}
        estimates = ParametricWorld(models).estimator()
        specs = [JobSpec(JobId(name), model=name) for name in models]
        told = policy.slowdowns(estimates, specs, V100)
        errors += [
            abs(predicted * truth.speed(own, group[:place] + group[place + 1 :]) - 1.0)
            for place, (own, predicted) in enumerate(zip(group, told, strict=True))
        ]
    assert sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize(
    "text", ["mps-equal:slots=0", "mps-equal:fit=loose", "antman:guarantee=luck", "antman:most=99", "kernel-est:most=0"]
)
def test_bad_parameters_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_policy(text)


# ----------------------------------------------------------------------------------------------------- the pieces
def test_rooms_look_only_at_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    looked = Occupancy.residents

    def residents(self: Occupancy, device: int) -> object:
        seen.append(device)
        return looked(self, device)

    brain = scheduler(MpsEqual(), 1000)
    brain.handle(0.0, [asked("a"), asked("b")])
    monkeypatch.setattr(Occupancy, "residents", residents)
    draft = Draft(brain.snapshot())
    assert list(ShareableDevices(draft, 3).open_to(brain.jobs[JobId("a")], THIRD)) == [0, 1]
    assert set(seen) == {0, 1}
    assert not ShareableDevices(draft, 1), "with one resident allowed, held devices are full"


def test_a_gang_is_gathered_on_one_node_if_one_has_room() -> None:
    nodes = Cluster.build([(3, 2, "V100")])
    brain = Scheduler(nodes, MpsEqual(slots=1))
    brain.handle(0.0, [asked("x", devices=2)])
    draft, gang = Draft(brain.snapshot()), brain.jobs[JobId("x")]
    offered = [DeviceId(device) for device in (1, 2, 4, 3, 5)]
    assert pick_devices(draft, gang, offered) == (2, 3)
    assert pick_devices(draft, gang, offered[:3]) == (1, 2)
    assert pick_devices(draft, gang, offered[:1]) is None


def test_turns_are_read_from_the_draft() -> None:
    brain = scheduler(AntMan())
    brain.handle(0.0, [asked("a"), asked("b")])
    assert turns_on(Draft(brain.snapshot()), DeviceId(0)) == [0, 1]
    assert turns_on(Draft(brain.snapshot()), DeviceId(0), JobId("a")) == [1]


# -------------------------------------------------------------------------------------------------- in simulation
class Checked(Scheduler):
    """Asserts the invariants after every step."""

    def handle(self, at: float, facts: Sequence[Fact]) -> list[Order]:
        orders = super().handle(at, facts)
        self.check()
        return orders


def run(policy: Policy, truth: ParametricWorld, machines: Cluster, arrivals: list[Arrival]) -> Summary:
    timeline, metrics = EventQueue(), Metrics(machines)
    brain = Checked(machines, policy, estimator=truth.estimator(), observers=(metrics,))
    backend = SimulatedBackend(machines, truth, timeline, sharing=policy.shares_devices)
    Engine(brain, backend, timeline, arrivals).run()
    return metrics.summary()


def jobs(truth: ParametricWorld, rng: Random, count: int, gap_s: float, widths: Sequence[int] = (1,)) -> list[Arrival]:
    at, arrivals = 0.0, []
    for number in range(count):
        spec = JobSpec(
            JobId(f"j{number}"),
            rng.choice(widths),
            rng.lognormvariate(4.5, 1.0),
            rng.choice(sorted(truth.models)),
            weight=float(rng.choice((1, 2))),
            user=rng.choice("ab"),
        )
        arrivals.append(Arrival(at, truth.declared(spec)))
        at += rng.expovariate(1.0 / gap_s)
    return arrivals


@settings(max_examples=15)
@given(st.sampled_from(SHARERS), st.integers(0, 10_000), st.sampled_from(["small", "vision", "unlike"]))
def test_nothing_is_overbooked_and_every_job_ends(name: str, seed: int, mix: str) -> None:
    truth = ParametricWorld.generate(seed, models=mix, kinds=("V100", "K80"), noise=0.3)
    machines = truth.furnished(Cluster.build([(1, 4, "V100"), (1, 2, "K80")]))
    arrivals = jobs(truth, Random(seed), 25, 10.0, (1, 1, 2))
    summary = run(parse_policy(name), truth, machines, arrivals)
    assert summary.finished == 25
    assert summary == run(parse_policy(name), truth, machines, arrivals)


@pytest.mark.parametrize("name", SHARERS)
def test_small_jobs_finish_sooner_together_than_one_after_another(name: str) -> None:
    truth = ParametricWorld.generate(0, models="small")
    machines = truth.furnished(Cluster.build([(1, 2, "V100")]))
    arrivals = jobs(truth, Random(0), 60, 20.0)
    one_by_one = run(Fifo(), truth, machines, arrivals)
    shared = run(parse_policy(name), truth, machines, arrivals)
    assert shared.finished == one_by_one.finished == 60
    assert shared.avg_jct_s < 0.7 * one_by_one.avg_jct_s
    assert shared.makespan_s < 0.9 * one_by_one.makespan_s


def test_guaranteed_jobs_run_as_if_alone() -> None:
    truth = world()
    arrivals = [Arrival(0.0, asked("a", "half").spec), Arrival(1.0, asked("b", "half").spec)]
    summary = run(AntMan(), truth, cluster(), arrivals)
    # a ends at 100 s; until then b gets 0.9·(1 − 0.5) of the device, afterwards all of it
    assert summary.p50_jct_s == pytest.approx(100.0)
    assert summary.makespan_s == pytest.approx(100.0 + (100.0 - 99.0 * 0.45))
