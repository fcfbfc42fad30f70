"""The retention model: prior, updates from measured groups, and bounds that hold for any mix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.predictors.sharing.retention import (
    CorePrior,
    Observed,
    Prior,
    RetentionModel,
    Sharer,
    Traits,
    shipped_prior,
)

LIGHT, HEAVY = Traits(0.003, 150 << 20), Traits(0.02, 8 << 30)
PRIORS: list[Prior] = [shipped_prior(), CorePrior(1), CorePrior(2), CorePrior(8)]
traits = st.builds(
    Traits,
    st.none() | st.floats(1e-5, 10.0),
    st.sampled_from([0, 1 << 20, 1 << 30, 1 << 36]),
    st.none() | st.floats(0.0, 1.0),
)
mixes = st.lists(st.tuples(st.floats(0.05, 1.0), traits), min_size=1, max_size=8)


def mix(*members: tuple[float, Traits]) -> list[Sharer]:
    return [Sharer(f"j{place}", f"m{place}", share, own) for place, (share, own) in enumerate(members)]


@given(st.sampled_from(PRIORS), mixes)
def test_a_job_keeps_a_part_of_its_speed_with_an_honest_spread(
    prior: Prior, members: list[tuple[float, Traits]]
) -> None:
    (found,) = RetentionModel(prior).predict([mix(*members)])
    assert len(found) == len(members)
    assert all(0.0 < each.mean <= 1.0 and 0.0 < each.std < np.inf for each in found)


@given(st.sampled_from(PRIORS), mixes, st.data())
def test_slopes_are_the_derivatives_of_speeds(
    prior: Prior, members: list[tuple[float, Traits]], data: st.DataObject
) -> None:
    shares = np.array([[share for share, _ in members]])
    latents = np.array([[prior.latents(own)[0] for _, own in members]])
    member, latent = data.draw(st.integers(0, len(members) - 1)), data.draw(st.integers(0, 2))
    if not -5.9 < latents[0, member, latent] < -0.01:
        return  # clipped there
    moved = latents.copy()
    moved[0, member, latent] += 1e-5
    before, after = prior.speeds(latents, shares), prior.speeds(moved, shares)
    change = (after.log_speeds - before.log_speeds)[0] / 1e-5
    assert change == pytest.approx(before.slopes[0, :, member, latent], abs=1e-3)


def test_light_jobs_keep_more_beside_each_other_than_heavy_ones() -> None:
    model = RetentionModel(shipped_prior())
    light, heavy = model.predict([mix((0.6, LIGHT), (0.6, LIGHT)), mix((0.6, HEAVY), (0.6, HEAVY))])
    assert sum(each.mean for each in light) > 1.4
    assert sum(each.mean for each in heavy) < 1.2


def test_unknown_traits_make_a_prediction_less_certain() -> None:
    mixes = [mix((0.5, HEAVY), (0.5, LIGHT)), mix((0.5, Traits()), (0.5, Traits()))]
    known, unknown = RetentionModel(shipped_prior()).predict(mixes)
    assert all(a.std / a.mean < b.std / b.mean for a, b in zip(known, unknown, strict=True))


def test_cores_to_spare_are_shared_for_free_and_one_core_is_divided() -> None:
    (one,) = RetentionModel(CorePrior(1)).predict([mix((0.5, Traits()), (0.5, Traits()))])
    assert sum(each.mean for each in one) == pytest.approx(1.0, abs=0.05)
    sleeps = Traits(busy=0.05)
    (idle,) = RetentionModel(CorePrior(1)).predict([mix((0.5, Traits(busy=0.95)), (0.5, sleeps))])
    assert min(each.mean for each in idle) > 0.85
    (two,) = RetentionModel(CorePrior(2)).predict([mix((0.5, Traits(busy=0.5)), (0.5, Traits(busy=0.5)))])
    assert min(each.mean for each in two) > 0.9


@pytest.mark.parametrize("prior", [shipped_prior(), CorePrior(2)])
def test_a_measured_group_moves_predictions_of_its_jobs_and_of_their_models(prior: Prior) -> None:
    model = RetentionModel(prior)
    group = mix((0.6, Traits()), (0.6, Traits()))
    before = model.predict([group])[0]
    model.learn(group, Observed((0.4, 0.4), (1.0, 1.0)))
    after = model.predict([group])[0]
    assert after[0].mean < before[0].mean
    assert abs(after[0].mean - 0.4) < 0.5 * abs(before[0].mean - 0.4)
    alike = [Sharer("new", "m0", 0.6), Sharer("other", "m1", 0.6)]
    stranger = [Sharer("x", "y", 0.6), Sharer("z", "w", 0.6)]
    (relative,), (unknown,) = model.predict([alike])[0][:1], model.predict([stranger])[0][:1]
    assert after[0].mean < relative.mean < unknown.mean


def test_reports_that_repeat_a_group_count_once() -> None:
    model, again = RetentionModel(shipped_prior()), RetentionModel(shipped_prior())
    group, seen = mix((0.6, LIGHT), (0.6, HEAVY)), Observed((0.5, None), (1.0, 1.0))
    model.learn(group, seen)
    for _ in range(10):
        again.learn(group, seen)
    assert again.predict([group]) == model.predict([group])


def test_a_speed_measured_relative_to_alone_under_the_cap_says_nothing_of_the_cap() -> None:
    model = RetentionModel(shipped_prior())
    alone = [Sharer("a", "m", 0.25)]
    (before,) = model.predict([alone])[0]
    model.learn([Sharer("a", "m", 0.25), Sharer("b", "n", 0.25)], Observed((1.0, None), (0.25, 0.25)))
    (after,) = model.predict([alone])[0]
    assert after.mean == pytest.approx(before.mean, rel=0.02)
    model.learn(alone, Observed((0.9,), (1.0,)))
    (measured,) = model.predict([alone])[0]
    assert measured.mean > 1.3 * before.mean
