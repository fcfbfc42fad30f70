"""Loss curves of many jobs: aims, what remains, how fast they learn, and what is kept."""

from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.predictors.loss.curve import LossCurves, LossTarget

A, B = JobId("a"), JobId("b")


def heard(curves: LossCurves, job: JobId, until: int) -> None:
    for step in range(10, until + 1, 10):
        curves.learn(job, float(step), 1.0 / (0.001 * step + 0.5) + 0.2)


def test_what_remains_needs_an_aim_and_a_curve() -> None:
    curves = LossCurves()
    heard(curves, A, 500)
    assert curves.remaining(A, 500.0) is None
    curves.aim(A, LossTarget(0.5))
    curves.aim(B, LossTarget(0.5))
    assert curves.remaining(B, 0.0) is None
    found = curves.remaining(A, 500.0)
    assert found is not None
    assert found.mean == pytest.approx(2833.3 - 500.0, rel=0.05)
    later = curves.remaining(A, 600.0)  # it went on since it last reported
    assert later is not None
    assert later.mean == pytest.approx(found.mean - 100.0)


def test_the_version_grows_with_every_lesson_and_no_question() -> None:
    curves = LossCurves()
    seen = [curves.version]
    curves.aim(A, LossTarget(0.5))
    seen.append(curves.version)
    curves.aim(A, LossTarget(0.5))
    assert curves.version == seen[-1]
    curves.learn(A, 10.0, None)
    assert curves.version == seen[-1]
    heard(curves, A, 200)
    seen.append(curves.version)
    curves.remaining(A, 200.0)
    curves.learning(A, 100.0)
    assert curves.version == seen[-1]
    assert seen == sorted(set(seen))


def test_a_younger_training_learns_faster() -> None:
    curves = LossCurves()
    heard(curves, A, 3000)
    heard(curves, B, 150)
    older, younger = curves.learning(A, 100.0), curves.learning(B, 100.0)
    assert older is not None
    assert younger is not None
    assert younger[0] > 5.0 * older[0]
    assert curves.learning(JobId("c"), 100.0) is None


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    curves = LossCurves()
    curves.aim(A, LossTarget(0.5, 5))
    heard(curves, A, 700)
    curves.save(tmp_path / "curves.json")
    again = LossCurves.load(tmp_path / "curves.json")
    assert again.remaining(A, 700.0) == curves.remaining(A, 700.0)
    assert again.totals() == curves.totals()


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "curves.json").write_text('{"schema": 99}')
    with pytest.raises(InputError, match="schema 99"):
        LossCurves.load(tmp_path / "curves.json")
