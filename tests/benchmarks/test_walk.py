"""Equal shares held after the chosen ones, and what the journal of such a run tells of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimator
from carpool.core.journal import record_to_json
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.registry import parse_policy
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld
from carpool.testing import drive

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "sharing"
ALONE = 200.0  # steps per second


class Halved(PlainWorld):
    """Two jobs halve each other's speed, and a cap costs nothing but at a third."""

    beside: ClassVar[dict[JobId, tuple[Neighbour, ...]]] = {}

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        if placement.neighbours:  # not while a probe runs
            self.beside[spec.id] = placement.neighbours
        capped = 0.8 if placement.fraction < 0.4 else 1.0
        return Pace(ALONE * capped * (0.6 if placement.neighbours else 1.0))

    def estimator(self) -> Estimator:
        live = OnlineEstimator(Cluster.build([(1, 1, "H200")]))
        live.neighbours_of = lambda job: self.beside.get(job.id, ())
        return live


@pytest.fixture(scope="module")
def journal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sharing_journal", FOLDER / "journal.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a run that walks through two levels, with a last line that is half written."""
    policy = parse_policy(f"{FOLDER / 'walk.py'}:Compared:walk=0.33/0.5:hold_s=3")
    arrivals = [Arrival(0.0, JobSpec(JobId(f"j{place}"), 1, 6_000.0)) for place in range(2)]
    run = drive(policy, Cluster.build([(1, 1, "H200")]), arrivals, Halved(), report_every_s=0.2)
    path = tmp_path_factory.mktemp("run") / "journal"
    lines = ["{}", *[json.dumps(record_to_json(record)) for record in run.records], '{"at": 1']
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_equal_shares_are_held_once_shares_are_chosen(journal: ModuleType, written: Path) -> None:
    records = journal.read(written)
    held = journal.held(records)
    assert [each.share for each in held] == [33, 50]
    assert all(each.until - each.since == pytest.approx(3.0) for each in held)
    assert journal.is_walked(records)
    settled, left = journal.settled_at(records), journal.left_at(records)
    assert left - settled == pytest.approx(3.0)
    assert settled < left <= held[0].since
    assert not journal.is_walked([record for record in records if record["at"] < held[1].until])


def test_rates_are_those_of_the_shares_that_were_held(journal: ModuleType, written: Path) -> None:
    records = journal.read(written)
    third, half = journal.held(records)
    assert journal.rate(records, "j0", third.since, third.until) == pytest.approx(0.48 * ALONE)
    assert journal.rate(records, "j1", half.since, half.until) == pytest.approx(0.6 * ALONE)
    assert journal.shares(records, ["j0", "j1"], half.until) == [50, 50]
    assert journal.shares(records, ["j0", "j1"], journal.left_at(records))[0] >= 40
    assert journal.probed(records)["j0"] == pytest.approx(ALONE)
    assert 0.0 < journal.measuring_s(records) <= journal.settled_at(records)
