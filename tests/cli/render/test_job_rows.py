"""Rows and cells of job tables."""

import pytest

from carpool.cli.render.job_rows import age_column, job_row, short


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("mlp", 8, "mlp"),
        ("resnet-1", 8, "resnet-1"),
        ("resnet-50-warm-12", 8, "resn…-12"),
        ("resnet-50-warm-12", 9, "resn…m-12"),
    ],
)
def test_a_long_name_is_shortened_in_the_middle(name: str, limit: int, expected: str) -> None:
    assert short(name, limit) == expected
    assert len(expected) <= limit


@pytest.mark.parametrize(
    ("phase", "ends_in", "shown"),
    [("running", None, "?"), ("waiting", None, ""), ("running", {"mean_s": 30.0, "std_s": 4.0}, "30 s ± 4 s")],
)
def test_an_unknown_time_left_of_a_running_job_is_a_question_mark(
    phase: str, ends_in: dict[str, float] | None, shown: str
) -> None:
    job = {"id": "a", "user": "", "phase": phase, "holds": [], "steps": 3.0, "total_steps": None, "loss": None}
    assert job_row({**job, "steps_per_s": 1.0, "ends_in": ends_in})[-1] == shown


def test_the_age_of_a_job_is_the_time_since_its_submission() -> None:
    jobs = [{"submitted_at": at} for at in (3600.0, 9990.0, 10_001.0)]
    assert age_column(jobs, 10_000.0) == ["107 min", "10 s", "0 s"]
