"""Profiles: what is read is what was written, and what is believed has its grounds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Neighbour, Placement
from carpool.predictors.profiles.profile import (
    Measurement,
    NoiseSeen,
    Profile,
    merge_measurements,
    profile_key,
    read_profile,
    write_profile,
)
from carpool.predictors.profiles.rate_model import ProfileRateModel

MIB = 1 << 20


def alone(batch: int, **more: object) -> Measurement:
    """T = 10 ms + 1 ms a sample, 50 MiB + 1 MiB a sample."""
    size = (50 + batch) * MIB
    made = Measurement("cpu1", 1, batch, steps=20, step_s=0.01 + 0.001 * batch, peak_bytes=size, held_bytes=size)
    return replace(made, **more)  # type: ignore[arg-type]


PROFILE = Profile(
    "net.py:net",
    {"lr": 0.1},
    "abc",
    batch_size=32,
    num_samples=1000,
    stop_epochs=3,
    measurements=(
        *[alone(batch) for batch in (8, 16, 32, 64)],
        alone(128, step_s=None, peak_bytes=None, out_of_memory=True, error="no memory"),
        Measurement("cpu1", 2, 32, step_s=0.042 * 0.75),
        Measurement("cpu1", 1, 32, share=0.5, step_s=0.042 / 0.6),
        Measurement("cpu1", 1, 32, share=0.5, beside="other.py:net", step_s=0.042 / 0.6 / 0.8),
        Measurement("cpu1", 1, 32, exact=True, step_s=0.084),
    ),
    noise=NoiseSeen(100.0, 5.0, 8, 20),
)
BELIEF = ProfileRateModel.of(PROFILE)


def on(count: int = 1, fraction: float = 1.0, batch: int = 0, kind: str = "cpu1", beside: str = "") -> Placement:
    others = (Neighbour(JobSpec(JobId("o"), model=beside), 0.5),) if beside else ()
    return Placement(((Kind(kind), count),), fraction, batch, others)


def rate(placement: Placement) -> tuple[float, str]:
    found = BELIEF.rate(placement)
    assert found is not None
    return round(found.rate.mean, 6), found.basis


def per_s(rate: float) -> float:
    return round(rate, 6)


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "p.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert data["models"]["cpu1"]["step_time"]["fixed_s"] == pytest.approx(0.01)
    assert data["models"]["cpu1"]["memory"]["coefficients"][:2] == pytest.approx([50 * MIB, MIB])
    assert data["models"]["cpu1"]["memory_limit_batch"] == 128
    assert data["models"]["cpu1"]["exact_price"] == pytest.approx(2.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "noise": 3}', "\x00"])
def test_a_damaged_profile_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")


def test_what_was_measured_is_believed_first() -> None:
    assert rate(on()) == (per_s(1 / 0.042), "measured")
    assert rate(on(2)) == (per_s(1 / 0.0315), "measured")
    assert rate(on(fraction=0.5)) == (per_s(0.6 / 0.042), "measured")


def test_other_batches_are_fitted() -> None:
    assert rate(on(batch=100)) == (per_s(1 / 0.11), "fitted")


def test_more_devices_and_other_shares_are_scaled_from_what_was_seen() -> None:
    serial = 2 * 0.75 - 1.0  # 1 / 0.75 = 2 / (1 + s)
    assert rate(on(4)) == (per_s(4 / 0.042 / (1 + 3 * serial)), "scaled")
    assert rate(on(fraction=0.25)) == (per_s(0.3 / 0.042), "scaled")
    assert rate(on(fraction=0.75)) == (per_s(0.8 / 0.042), "scaled")


def test_a_neighbour_slows_as_it_did_when_it_was_measured() -> None:
    assert rate(on(fraction=0.5, beside="sub/other.py:net"))[0] == pytest.approx(0.6 / 0.042 * 0.8)
    assert rate(on(fraction=0.5, beside="stranger.py:net"))[0] == pytest.approx(0.6 / 0.042 * 0.8)  # as others did
    assert rate(on(beside="stranger.py:net"))[0] == pytest.approx(1 / 0.042 / 1.5)


def test_an_exact_job_pays_its_price() -> None:
    exact = ProfileRateModel.of(PROFILE, exact=True)
    own, other = exact.rate(on()), exact.rate(on(batch=100))
    assert own is not None
    assert other is not None
    assert own.rate.mean == pytest.approx(1 / 0.084)
    assert other.rate.mean == pytest.approx(1 / 0.22)


@pytest.mark.parametrize("only", [{"exact": True}, {"devices": 2}, {"share": 0.5}])
def test_something_is_believed_whatever_was_measured(only: dict[str, object]) -> None:
    single = replace(PROFILE, measurements=(replace(alone(32), **only),))  # type: ignore[arg-type]
    found = ProfileRateModel.of(single).rate(on(batch=64))
    assert found is not None
    assert 0.0 < found.rate.mean < 50.0


def test_a_kind_that_was_never_measured_is_not_answered() -> None:
    assert BELIEF.rate(on(kind="H200")) is None


def test_an_unmeasured_lane_is_a_share_of_its_gpu() -> None:
    measurements = tuple(replace(each, kind="H200") for each in PROFILE.measurements)
    own = Measurement("H200@25", 1, 32, step_s=0.2)
    belief = ProfileRateModel.of(replace(PROFILE, measurements=(*measurements, own)))
    half = belief.rate(on(kind="H200@50"))
    assert half == belief.rate(on(fraction=0.5, kind="H200"))
    quarter = belief.rate(on(kind="H200@25"))
    assert quarter is not None
    assert quarter.basis == "measured"
    assert quarter.rate.mean == pytest.approx(5.0)
    both = belief.rate(Placement(((Kind("H200@25"), 1), (Kind("H200@50"), 1))))
    twice = belief.rate(on(count=2, kind="H200@50"))
    assert half is not None
    assert both is not None
    assert twice is not None
    assert both.rate.mean / twice.rate.mean == pytest.approx((5.0 + half.rate.mean) / (2.0 * half.rate.mean), rel=0.01)
    assert belief.rate(on(kind="V100@50")) is None


def test_doubt_widens_the_spread_and_takes_the_length() -> None:
    found = ProfileRateModel.of(PROFILE, doubt="of an older file").rate(on())
    assert found is not None
    assert found.rate.std >= 0.5 * found.rate.mean
    assert found.basis == "measured, of an older file"
    spec = JobSpec(JobId("a"))
    assert BELIEF.total_steps(spec) == 3 * 32
    assert ProfileRateModel.of(PROFILE, doubt="of an older file").total_steps(spec) is None


def test_folders_do_not_change_the_key_and_arguments_do() -> None:
    assert profile_key("a/b/net.py:net", {"lr": 0.1}) == PROFILE.key
    assert profile_key("net.py:net", {"lr": 0.2}) != PROFILE.key


def test_newer_measurements_replace_older_ones_of_the_same_setting() -> None:
    joined = merge_measurements(PROFILE.measurements, [alone(8, step_s=1.0), alone(9)])
    assert len(joined) == len(PROFILE.measurements) + 1
    assert joined[0].step_s == 1.0


def test_what_was_only_seen_beside_another_is_the_least_of_what_is_had_alone() -> None:
    whole, beside = (
        Measurement("cpu1", 1, 32, step_s=0.1),
        Measurement("cpu1", 1, 32, 0.5, beside="o.py:o", step_s=0.125),
    )
    belief = ProfileRateModel.of(Profile("a.py:a", {}, "", 32, 320, measurements=(whole, beside)))

    def mean(placement: Placement) -> float:
        found = belief.rate(placement)
        assert found is not None
        return found.rate.mean

    assert mean(on(fraction=0.5)) == pytest.approx(8.0)
    assert mean(on(fraction=0.5, beside="o.py:o")) == pytest.approx(8.0)
    only = ProfileRateModel.of(Profile("a.py:a", {}, "", 32, 320, measurements=(beside,)))
    assert only.kinds == ("cpu1",)


def test_what_was_measured_in_a_pair_is_answered_as_it_was() -> None:
    pair = Measurement("cpu1", 1, 32, 0.5, beside="o.py:o", steps=9, step_s=0.05)
    belief = ProfileRateModel.of(
        Profile("a.py:a", {}, "", 32, 320, measurements=(Measurement("cpu1", 1, 32, step_s=0.2), pair))
    )
    found = belief.rate(on(fraction=0.5, beside="o.py:o"))
    assert found is not None
    assert (found.rate.mean, found.basis) == (20.0, "measured")
