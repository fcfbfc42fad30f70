"""What comparing sites takes: questions grow with the sites, not with the jobs that are compared there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from carpool.core.estimates import Estimate
from carpool.core.model import JobId, Kind
from carpool.core.topology import Cluster
from carpool.predictors.links.estimator import Site, SiteRates
from carpool.predictors.links.fabric import Fabric
from carpool.predictors.links.layout import Group
from carpool.predictors.links.throughput import Throughput

CLUSTER, KIND = Cluster.build([(2, 8, "V100")]), Kind("V100")


def on(width: int, batch_size: int = 0) -> Site:
    return Site(((KIND, width),), batch_size)


def measured(jobs: int) -> list[tuple[JobId, Site, float]]:
    """Each on one device and on two, with a batch of its own."""
    return [(JobId(f"j{job}"), on(width, 64 + job), width**0.8) for job in range(jobs) for width in (1, 2)]


class Counted(Throughput):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(Fabric.of(CLUSTER))
        self.questions = 0
        self.steps = 0

    def predict(self, groups: Sequence[Group]) -> list[list[Estimate]]:
        self.questions += 1
        self.steps += len(groups)
        return super().predict(groups)


def asked(jobs: int) -> Counted:
    """By a plan that compares all jobs on one, two and four devices."""
    counted = Counted()
    sites = SiteRates(CLUSTER, counted).fit(measured(jobs))
    for job in range(jobs):
        for width in (1, 2, 4):
            assert sites.ratio(JobId(f"j{job}"), on(1, 64 + job), on(width, 64 + job)) is not None
    return counted


def test_one_question_for_each_site_however_many_jobs_there_are() -> None:
    assert asked(3).questions == asked(12).questions == 3


def test_every_step_is_found_once() -> None:
    assert asked(12).steps == 12 * 3


def test_answers_are_those_of_a_question_about_one_job() -> None:
    job, before, after = JobId("j4"), on(1, 68), on(4, 68)
    first = SiteRates(CLUSTER).fit(measured(6)).ratio(job, before, after)
    sites = SiteRates(CLUSTER).fit(measured(6))
    sites.ratio(JobId("j0"), on(4, 64), on(1, 64))
    later = sites.ratio(job, before, after)
    assert first is not None
    assert later == pytest.approx(first, rel=1e-12)


def test_batches_that_were_never_measured_are_asked_for_alone() -> None:
    counted = Counted()
    sites = SiteRates(CLUSTER, counted).fit(measured(6))
    sites.ratio(JobId("j0"), on(1, 64), on(2, 64))
    before = counted.steps
    sites.ratio(JobId("j0"), on(1, 64), on(2, 128))
    assert counted.steps == before + 1


def test_a_site_that_only_its_own_job_was_measured_at_is_not_asked_of_others() -> None:
    apart = Site(((KIND, 1), (KIND, 2)), 64)
    counted = Counted()
    sites = SiteRates(CLUSTER, counted).fit([*measured(6), (JobId("j0"), apart, 2.0)])
    sites.ratio(JobId("j0"), apart, apart)
    assert counted.steps == 1
    sites.ratio(JobId("j1"), Site(apart.groups, 65), Site(apart.groups, 65))
    assert counted.steps == 6
