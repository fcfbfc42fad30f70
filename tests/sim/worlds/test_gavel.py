"""Gavel's throughput table as a world."""

import json
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.gavel import GavelWorld

TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "v100": {
        "('big (batch size 8)', 1)": {
            "null": 10.0,
            "('big (batch size 8)', 1)": [6.0, 6.0],
            "('small (batch size 1)', 1)": [8.0, 5.0],
        },
        "('big (batch size 8)', 4)": {"null": 34.0},
        "('small (batch size 1)', 1)": {"null": 20.0, "('big (batch size 8)', 1)": [5.0, 8.0]},
    },
    "k80": {
        "('big (batch size 8)', 1)": {"null": 0.0},
        "('small (batch size 1)', 1)": {"null": 4.0},
    },
    "v100_unconsolidated": {"('big (batch size 8)', 4)": {"null": 1.0}},
}
BIG = JobSpec(JobId("big"), model="big (batch size 8)", work=100.0)
WIDE = JobSpec(JobId("wide"), devices=4, model="big (batch size 8)", work=100.0)
SMALL = JobSpec(JobId("small"), model="small (batch size 1)", work=100.0)
LONE = JobSpec(JobId("lone"), devices=2, model="small (batch size 1)", work=100.0)
CLUSTER = Cluster.build([(1, 4, "V100"), (1, 4, "K80")])


@pytest.fixture
def world() -> GavelWorld:
    return GavelWorld.of_table(TABLE)


def on(kind: str, count: int = 1, fraction: float = 1.0, beside: tuple[Neighbour, ...] = ()) -> Placement:
    return Placement(((Kind(kind), count),), fraction, 0, beside)


@pytest.mark.parametrize("kind", ["V100", "v100"])
def test_kinds_match_in_any_case(world: GavelWorld, kind: str) -> None:
    assert world.pace(BIG, 0.0, on(kind)).rate == 10.0


def test_width_counts_and_the_spread_over_nodes_does_not(world: GavelWorld) -> None:
    assert world.rate(WIDE, on("V100", 4)) == 34.0
    assert world.rate(WIDE, Placement(((Kind("V100"), 2), (Kind("V100"), 2)))) == 34.0


@pytest.mark.parametrize(("width", "rate"), [(2, 18.0), (3, 26.0), (8, 34.0)])
def test_widths_that_were_not_measured(world: GavelWorld, width: int, rate: float) -> None:
    assert world.rate(WIDE, on("V100", width)) == rate


def test_below_the_smallest_measured_width_the_rate_is_in_proportion() -> None:
    world = GavelWorld.of_table({"v100": {"('m', 4)": {"null": 8.0}}})
    assert world.rate(JobSpec(JobId("j"), model="m"), on("V100", 1)) == 2.0


def test_a_gang_over_unlike_kinds_goes_at_the_slowest_pace(world: GavelWorld) -> None:
    mixed = Placement(((Kind("K80"), 1), (Kind("V100"), 1)))
    assert world.rate(LONE, mixed) == min(world.rate(LONE, on("K80", 2)), world.rate(LONE, on("V100", 2)))


def test_one_neighbour_reads_the_pair(world: GavelWorld) -> None:
    assert world.rate(BIG, on("V100", 1, 0.5, (Neighbour(SMALL, 0.5),))) == 8.0
    assert world.rate(SMALL, on("V100", 1, 0.5, (Neighbour(BIG, 0.5),))) == 5.0


def test_slowdowns_of_several_neighbours_multiply(world: GavelWorld) -> None:
    beside = (Neighbour(SMALL), Neighbour(BIG))
    assert world.rate(BIG, on("V100", 1, 1.0, beside)) == pytest.approx(10.0 * 0.8 * 0.6)


def test_neighbours_without_a_measured_pair_take_turns(world: GavelWorld) -> None:
    assert world.rate(SMALL, on("V100", 1, 1.0, (Neighbour(SMALL),))) == 10.0
    assert world.rate(SMALL, on("V100", 1, 0.25, (Neighbour(SMALL, 0.25),))) == 5.0


def test_alone_a_fraction_scales_the_rate(world: GavelWorld) -> None:
    assert world.rate(BIG, on("V100", 1, 0.5)) == 5.0


def test_the_estimator_is_the_table(world: GavelWorld) -> None:
    estimator = world.estimator()
    assert estimator.rate(BIG, on("V100")).mean == 10.0
    assert estimator.rate(BIG, on("K80")).mean == 0.0


def test_check_accepts_what_can_run(world: GavelWorld) -> None:
    world.check([BIG, WIDE, SMALL], CLUSTER)


def test_check_refuses_an_unknown_job_type(world: GavelWorld) -> None:
    typo = JobSpec(JobId("x"), model="bigg (batch size 8)")
    with pytest.raises(UnknownName, match=r"job 'x': unknown job type .* Did you mean big \(batch size 8\)"):
        world.check([typo], CLUSTER)


def test_check_refuses_an_unknown_kind(world: GavelWorld) -> None:
    with pytest.raises(UnknownName, match=r"unknown device type 'V10'.* Did you mean v100"):
        world.check([BIG], Cluster.build([(1, 4, "V10")]))


def test_check_refuses_a_job_that_would_never_end(world: GavelWorld) -> None:
    with pytest.raises(InputError, match=r"job 'big' .* makes no progress on K80"):
        world.check([SMALL, BIG], Cluster.build([(1, 4, "K80")]))


@pytest.mark.parametrize("text", ["{", "[]", '{"v100": {"oops": {"null": 1}}}', '{"v100": 3}', "{}"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"table\.json"):
        GavelWorld.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        GavelWorld.load(tmp_path / "none.json")


def test_a_run_takes_steps_over_rate(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    metrics = simulate(
        [Arrival(0.0, BIG), Arrival(0.0, SMALL)], Cluster.build([(1, 1, "V100")]), Fifo(), GavelWorld.load(path)
    )
    assert list(metrics.jct_s) == [10.0, 15.0]


def test_the_published_table_covers_its_traces(shared_data: Path) -> None:
    from carpool.sim.traces.reader import read_trace

    world = GavelWorld.load(shared_data / "gavel" / "simulation_throughputs.json")
    cluster = Cluster.build([(2, 4, "V100"), (4, 4, "P100"), (3, 8, "K80")])
    for trace in ("max_min_fairness.trace", "gen1000_l360_m_s0.trace"):
        world.check([arrival.spec for arrival in read_trace(shared_data / "gavel" / trace).arrivals], cluster)
    assert sum(map(len, world.solo.values())) == 3 * 83
    assert {len(pairs) for pairs in world.pairs.values()} == {1759}
