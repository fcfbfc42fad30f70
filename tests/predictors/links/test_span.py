"""Synchronisation across nodes: from bytes and links at first, then as measured."""

import pytest

from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Path, Placement
from carpool.predictors.links.span import SpanModel, on_one_node

A, B = JobSpec(JobId("a")), JobSpec(JobId("b"))
FAST, SLOW = Path(1e9), Path(1e8)
CPU = Kind("cpu1")


def over(path: Path | None, *counts: int) -> Placement:
    return Placement(tuple((CPU, count) for count in counts), path=path)


def loaded(*specs: JobSpec) -> SpanModel:
    model = SpanModel()
    for spec in specs:
        model.loaded(spec.id, 1e8)
    return model


def seconds(model: SpanModel, spec: JobSpec, placement: Placement) -> float:
    found = model.sync_s(spec, placement)
    assert found is not None
    return found.mean


def test_a_ring_sends_each_byte_nearly_twice_over_the_slowest_link() -> None:
    model = loaded(A)
    assert seconds(model, A, over(FAST, 1, 1)) == pytest.approx(0.1)
    assert seconds(model, A, over(SLOW, 1, 1)) == pytest.approx(1.0)
    assert seconds(model, A, over(SLOW, 2, 2)) == pytest.approx(1.5)
    assert seconds(model, A, over(Path(1e9, 0.01), 1, 1)) == pytest.approx(0.12)


def test_nothing_is_predicted_without_links_or_bytes() -> None:
    model = loaded(A)
    assert model.sync_s(A, over(None, 1, 1)) is None
    assert model.sync_s(B, over(FAST, 1, 1)) is None


def test_a_job_that_needs_twice_as_long_does_so_on_other_links_too() -> None:
    model = loaded(A, B)
    before = seconds(model, B, over(FAST, 1, 1))
    for _ in range(20):
        model.learn(A, over(SLOW, 1, 1), 2.0)
    assert seconds(model, A, over(SLOW, 1, 1)) == pytest.approx(2.0, rel=0.1)
    assert seconds(model, A, over(FAST, 1, 1)) == pytest.approx(0.2, rel=0.25), "most is due to the job"
    assert seconds(model, B, over(FAST, 1, 1)) == before, "another job over another link"


def test_a_link_that_is_slow_for_all_jobs_is_slow_for_the_next() -> None:
    specs = [JobSpec(JobId(f"j{number}")) for number in range(8)]
    model = loaded(*specs, A)
    for _ in range(10):
        for spec in specs:
            model.learn(spec, over(SLOW, 1, 1), 2.0)
            model.learn(spec, over(FAST, 1, 1), 0.1)
    assert seconds(model, A, over(SLOW, 1, 1)) > 1.5
    assert seconds(model, A, over(FAST, 1, 1)) < 0.12


def test_what_every_step_waits_besides_is_not_multiplied_by_a_slower_link() -> None:
    model = loaded(A)
    for _ in range(20):
        model.learn(A, over(FAST, 1, 1), 0.13)
    assert seconds(model, A, over(FAST, 1, 1)) == pytest.approx(0.13, rel=0.05)
    assert 1.0 < seconds(model, A, over(SLOW, 1, 1)) < 1.25
    for _ in range(20):
        model.learn(A, over(SLOW, 1, 1), 1.03)
        model.learn(A, over(FAST, 1, 1), 0.13)
    middle = seconds(model, A, over(Path(3e8), 1, 1))
    assert middle == pytest.approx(0.03 + 1 / 3, rel=0.1)


def test_absurd_measurements_leave_a_finite_prediction() -> None:
    model = loaded(A)
    for sync_s in (1e9, 1e-9, 1e9, 5.0):
        model.learn(A, over(FAST, 1, 1), sync_s)
        assert 0.0 <= seconds(model, A, over(SLOW, 1, 1)) < 1e12


def test_devices_of_several_nodes_are_merged_by_type() -> None:
    assert on_one_node(over(FAST, 1, 2)) == Placement(((CPU, 3),))
