"""Capacity, units, and specs made many at a time."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from carpool.core.errors import InputError
from carpool.core.model import JobId, JobSpec, Kind
from carpool.sim.traces.trace import (
    TOO_LARGE,
    Arrival,
    DroppedRow,
    Trace,
    WorkUnit,
    check_capacity,
    in_seconds,
    make_specs,
)

SMALL = JobSpec(JobId("small"), 1, 10.0)
LARGE = JobSpec(JobId("large"), 9, 10.0)
PICKY = JobSpec(JobId("picky"), 3, 10.0, kinds=(Kind("P100"), Kind("K80")))


def trace_of(*specs: JobSpec, work_unit: WorkUnit = WorkUnit.SECONDS) -> Trace:
    return Trace("t.csv", "canonical", tuple([Arrival(0.0, spec) for spec in specs]), work_unit)


def test_a_trace_that_fits_is_returned_as_it_is() -> None:
    trace = trace_of(SMALL, LARGE)

    assert check_capacity(trace, 9) is trace


def test_a_job_larger_than_the_cluster_is_an_error() -> None:
    with pytest.raises(InputError) as caught:
        check_capacity(trace_of(SMALL, LARGE, replace(LARGE, id=JobId("other"))), 8)

    assert str(caught.value) == (
        "t.csv: job 'large' needs 9 devices; the cluster has 8 (1 more jobs are too large). "
        "Use a larger --cluster, or pass --skip-invalid to drop such jobs."
    )


def test_where_there_are_several_kinds_the_limit_is_that_of_one() -> None:
    with pytest.raises(InputError, match="'large' needs 9 devices; the cluster has at most 8 of one type"):
        check_capacity(trace_of(SMALL, LARGE), 8, {Kind("V100"): 8, Kind("P100"): 8})


def test_jobs_larger_than_the_cluster_can_be_dropped() -> None:
    trace = replace(trace_of(SMALL, LARGE), dropped={TOO_LARGE: 1, "no GPU": 2})

    fitting = check_capacity(trace, 8, skip_invalid=True)

    assert [arrival.spec for arrival in fitting.arrivals] == [SMALL]
    assert fitting.dropped == {TOO_LARGE: 2, "no GPU": 2}
    assert fitting.dropped_rows == (DroppedRow(0, TOO_LARGE, "large"),)


def test_dropping_all_jobs_is_an_error() -> None:
    with pytest.raises(InputError, match="none of the 1 jobs fits on 8 devices"):
        check_capacity(trace_of(LARGE), 8, skip_invalid=True)


def test_an_elastic_job_needs_only_its_least() -> None:
    trace = trace_of(replace(LARGE, min_devices=8))

    assert check_capacity(trace, 8) is trace


def test_a_job_that_names_kinds_must_find_them() -> None:
    trace = trace_of(PICKY)

    assert check_capacity(trace, 64) is trace
    assert check_capacity(trace, 64, {Kind("P100"): 1, Kind("K80"): 2}) is trace
    with pytest.raises(InputError, match="job 'picky' needs 3 devices of type P100 or K80; the cluster has 2"):
        check_capacity(trace, 64, {Kind("V100"): 62, Kind("K80"): 2})


def test_steps_become_seconds_by_each_jobs_rate() -> None:
    trace = trace_of(SMALL, LARGE, work_unit=WorkUnit.STEPS)

    timed = in_seconds(trace, lambda spec: 2.0 if spec.devices == 1 else 20.0)

    assert [arrival.spec.work for arrival in timed.arrivals] == [5.0, 0.5]
    assert timed.work_unit is WorkUnit.SECONDS
    assert in_seconds(timed, lambda spec: 0.0) is timed


def test_no_rate_no_seconds() -> None:
    with pytest.raises(InputError, match=r"job 'small' \(, 1 devices\) has a rate of 0.0"):
        in_seconds(trace_of(SMALL, work_unit=WorkUnit.STEPS), lambda spec: 0.0)
    with pytest.raises(InputError, match="job 'small' has no length"):
        in_seconds(trace_of(replace(SMALL, work=None), work_unit=WorkUnit.UNKNOWN), lambda spec: 1.0)


def test_specs_made_at_once_equal_specs_made_one_by_one() -> None:
    made = make_specs(["a", "b"], [1, 2], [3.0, 4.0], ["m", "n"], [5, 6], [1.0, 2.0], ["u", "v"])

    assert made == [JobSpec(JobId("a"), 1, 3.0, "m", 5, 1.0, "u"), JobSpec(JobId("b"), 2, 4.0, "n", 6, 2.0, "v")]
    assert make_specs(["a", "b"]) == [JobSpec(JobId("a")), JobSpec(JobId("b"))]
    assert [hash(spec) for spec in made] == [hash(replace(spec)) for spec in made]


def test_a_spec_has_nothing_that_only_its_constructor_could_do() -> None:
    assert not hasattr(JobSpec, "__post_init__")
    assert [entry.name for entry in fields(JobSpec)][:7] == [
        "id",
        "devices",
        "work",
        "model",
        "batch_size",
        "weight",
        "user",
    ]
