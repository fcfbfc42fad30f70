"""What comparing places takes: questions grow with the places, not with the jobs that are compared there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from carpool.core.estimates import Estimate
from carpool.core.model import JobId, Kind
from carpool.core.topology import Cluster
from carpool.predictors.layout import Group
from carpool.predictors.places import Place, Places
from carpool.predictors.throughput import Throughput

CLUSTER, KIND = Cluster.build([(2, 8, "V100")]), Kind("V100")


def on(width: int, batch_size: int = 0) -> Place:
    return Place(((KIND, width),), batch_size)


def measured(jobs: int) -> list[tuple[JobId, Place, float]]:
    """Each on one device and on two, with a batch of its own."""
    return [(JobId(f"j{job}"), on(width, 64 + job), width**0.8) for job in range(jobs) for width in (1, 2)]


class Counted:
    """Stands in for a throughput and counts what it is asked."""

    def __init__(self, throughput: Throughput) -> None:
        self._throughput = throughput
        self.questions = 0
        self.steps = 0

    def predict(self, groups: Sequence[Group]) -> list[list[Estimate]]:
        self.questions += 1
        self.steps += len(groups)
        return self._throughput.predict(groups)


def asked(jobs: int) -> Counted:
    """By a plan that compares all jobs on one, two and four devices."""
    places = Places(CLUSTER).fit(measured(jobs))
    counted = Counted(places._throughput)
    places._throughput = counted  # type: ignore[assignment]
    for job in range(jobs):
        for width in (1, 2, 4):
            assert places.ratio(JobId(f"j{job}"), on(1, 64 + job), on(width, 64 + job)) is not None
    return counted


def test_one_question_for_each_place_however_many_jobs_there_are() -> None:
    assert asked(3).questions == asked(12).questions == 3


def test_every_step_is_found_once() -> None:
    assert asked(12).steps == 12 * 3


def test_answers_are_those_of_a_question_about_one_job() -> None:
    job, before, after = JobId("j4"), on(1, 68), on(4, 68)
    first = Places(CLUSTER).fit(measured(6)).ratio(job, before, after)
    places = Places(CLUSTER).fit(measured(6))
    places.ratio(JobId("j0"), on(4, 64), on(1, 64))
    later = places.ratio(job, before, after)
    assert first is not None
    assert later == pytest.approx(first, rel=1e-12)


def test_batches_that_were_never_measured_are_asked_for_alone() -> None:
    places = Places(CLUSTER).fit(measured(6))
    counted = Counted(places._throughput)
    places._throughput = counted  # type: ignore[assignment]
    places.ratio(JobId("j0"), on(1, 64), on(2, 64))
    before = counted.steps
    places.ratio(JobId("j0"), on(1, 64), on(2, 128))
    assert counted.steps == before + 1


def test_what_only_those_were_measured_in_who_ask_is_not_asked_of_others() -> None:
    apart = Place(((KIND, 1), (KIND, 2)), 64)
    places = Places(CLUSTER).fit([*measured(6), (JobId("j0"), apart, 2.0)])
    counted = Counted(places._throughput)
    places._throughput = counted  # type: ignore[assignment]
    places.ratio(JobId("j0"), apart, apart)
    assert counted.steps == 1
    places.ratio(JobId("j1"), Place(apart.groups, 65), Place(apart.groups, 65))
    assert counted.steps == 6
