"""The co-location table: what is read from it, and profiles between measured batch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.core.errors import InputError, UnknownName
from carpool.predictors.sharing.colocation import ColocationTable, Solo, interpolated

SMALL = Solo(32, step_s=0.01, kernel_s=1e-5, fill=0.4, memory_bytes=1000, scaling=((0.25, 0.6), (1.0, 1.0)))
LARGE = Solo(128, step_s=0.022, kernel_s=2e-5, fill=0.8, memory_bytes=3000, scaling=((0.25, 0.3), (1.0, 1.0)))


def test_measured_sizes_are_given_as_they_are() -> None:
    assert interpolated((SMALL, LARGE), 32) is SMALL


def test_between_two_sizes_the_step_is_linear() -> None:
    middle = interpolated((SMALL, LARGE), 64)
    assert middle.step_s == pytest.approx(0.014)
    assert middle.memory_bytes == pytest.approx(1666, abs=1)
    assert middle.fill == pytest.approx(0.6)
    assert middle.alone(0.25) == pytest.approx(0.45)


def test_beyond_the_largest_the_step_goes_on_and_traits_do_not() -> None:
    beyond = interpolated((SMALL, LARGE), 256)
    assert beyond.step_s == pytest.approx(0.038)
    assert beyond.fill == LARGE.fill


def test_a_step_takes_time_at_any_size() -> None:
    assert interpolated((SMALL, LARGE), 1).step_s > 0.0


@pytest.mark.parametrize(("share", "speed"), [(1.0, 1.0), (0.25, 0.6), (0.625, 0.8), (0.125, 0.3)])
def test_speed_alone_under_a_cap(share: float, speed: float) -> None:
    assert SMALL.alone(share) == pytest.approx(speed)


def test_the_shipped_table(colocation: ColocationTable) -> None:
    assert colocation.device == "H200"
    assert [profile.batch_size for profile in colocation.profiles["vgg16"]] == [64, 128, 512]
    assert colocation.profile("resnet18-imagenet", 128).host_bw > 0.05
    members, kept = colocation.samples()
    assert len(members) == len(colocation.groups) == len(kept)
    assert all(0.0 < value < 1.1 for row in kept for value in row)


def test_an_unknown_model_is_named(colocation: ColocationTable) -> None:
    with pytest.raises(UnknownName, match="Did you mean vgg16"):
        colocation.profile("vgg17")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="not a co-location table"):
        ColocationTable.load(tmp_path / "other.json")
