"""What a summary says about a trace."""

from __future__ import annotations

import json

import pytest

from carpool.core.model import JobId, JobSpec
from carpool.sim.traces.summary import lines, summarise
from carpool.sim.traces.trace import Arrival, DroppedRow, Trace, WorkUnit

TRACE = Trace(
    "t.csv",
    "canonical",
    (
        Arrival(100.0, JobSpec(JobId("a"), 1, 10.0, "bert", user="ann")),
        Arrival(150.0, JobSpec(JobId("b"), 4, 0.0, "bert")),
        Arrival(200.0, JobSpec(JobId("c"), 4, 20.0, "gpt", user="bob")),
    ),
    dropped={"no GPU": 2},
    dropped_rows=(DroppedRow(3, "no GPU"), DroppedRow(5, "no GPU")),
    notes={"a note": 1},
)


def test_a_summary_counts() -> None:
    info = summarise(TRACE, devices=3)

    assert (info.jobs, info.first_submit_s, info.span_s) == (3, 100.0, 100.0)
    assert info.gpus == {1: 1, 4: 2}
    assert (info.work_mean, info.work_percentiles[50], info.work_percentiles[99]) == (10.0, 10.0, 20.0)
    assert (info.gpu_seconds, info.mean_gpus_busy) == (90.0, 0.9)
    assert info.load == pytest.approx(0.3)
    assert list(info.models.items()) == [("bert", 2), ("gpt", 1)]
    assert info.users == {"ann": 1, "bob": 1}


def test_a_summary_as_json() -> None:
    found = json.loads(json.dumps(summarise(TRACE, devices=3).as_json(), allow_nan=False))

    assert found["schema"] == 1
    assert found["gpus"] == {"1": 1, "4": 2}
    assert found["work"]["p50"] == 10.0
    assert found["dropped"] == {"no GPU": 2}
    assert found["dropped_rows"][0] == {"row": 3, "reason": "no GPU", "job": ""}
    assert found["notes"] == {"a note": 1}


def test_a_summary_as_text() -> None:
    assert lines(summarise(TRACE, devices=3), listed=1) == [
        "t.csv: 3 jobs, format canonical",
        "submitted over 100 s (0.0 days) from 100 s on",
        "GPUs: 1: 1, 4: 2",
        "length in s: mean 10, p0 0, p10 0, p25 0, p50 10, p75 20, p90 20, p99 20, p100 20",
        "GPU time: 90 s (0 GPU-hours), 0.9 GPUs busy on average",
        "offered load on 3 devices: 0.300",
        "models (2): bert: 2 and 1 more",
        "users (2): ann: 1 and 1 more",
        "dropped 2: no GPU",
        "note (1): a note",
    ]


def test_what_a_trace_does_not_say_stays_unknown() -> None:
    steps = summarise(Trace("t", "gavel", TRACE.arrivals, WorkUnit.STEPS), devices=3)
    assert (steps.gpu_seconds, steps.load, steps.work_mean) == (None, None, 10.0)

    unknown = summarise(Trace("t", "pollux", (Arrival(0.0, JobSpec(JobId("a"))),), WorkUnit.UNKNOWN))
    assert (unknown.work_mean, unknown.work_percentiles, unknown.gpu_seconds) == (None, {}, None)
    assert "length: unknown (a world knows it)" in lines(unknown)


def test_jobs_that_come_at_once_offer_no_finite_load() -> None:
    info = summarise(Trace("t", "canonical", (Arrival(0.0, JobSpec(JobId("a"), 1, 5.0)),)), devices=1)

    assert (info.gpu_seconds, info.mean_gpus_busy, info.load) == (5.0, None, None)
