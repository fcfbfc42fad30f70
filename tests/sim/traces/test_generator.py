"""Generated traces: the same recipe gives the same trace, and the numbers are the ones asked for."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError, UnknownName
from carpool.sim.traces.distributions import (
    ARRIVALS,
    LENGTHS,
    ArrivalProcess,
    AtOnce,
    Bursty,
    Diurnal,
    Exponential,
    Fixed,
    LengthDistribution,
    Lognormal,
    PhillyLike,
    Poisson,
    Uniform,
)
from carpool.sim.traces.generator import (
    PHILLY_SIZES,
    TraceGenerator,
    parse_arrivals,
    parse_lengths,
    parse_mix,
    parse_sizes,
    parse_weights,
)
from carpool.sim.traces.summary import summarise
from carpool.sim.traces.trace import Trace


def submits(trace: Trace) -> list[float]:
    return [arrival.submit_s for arrival in trace.arrivals]


def works(trace: Trace) -> list[float]:
    return [arrival.spec.work or 0.0 for arrival in trace.arrivals]


@given(
    st.integers(0, 2**40),
    st.integers(1, 60),
    st.sampled_from([cls() for cls in ARRIVALS.values()]),
    st.sampled_from([cls() for cls in LENGTHS.values()]),
)
def test_the_same_recipe_gives_the_same_valid_trace(
    seed: int, jobs: int, arrivals: ArrivalProcess, lengths: LengthDistribution
) -> None:
    recipe = TraceGenerator(jobs, seed, arrivals, lengths=lengths, models=[("m", 1), ("n", 2)], users=3)

    trace = recipe.generate()

    assert trace == recipe.generate()
    assert len({arrival.spec.id for arrival in trace.arrivals}) == jobs
    times = submits(trace)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert all(work >= 0 for work in works(trace))


def test_another_seed_gives_another_trace() -> None:
    assert TraceGenerator(20, seed=1).generate() != TraceGenerator(20, seed=2).generate()


def test_a_known_trace_never_changes() -> None:
    trace = TraceGenerator(3, seed=7, rate_per_s=0.1, lengths=Exponential(100.0), sizes=[(1, 1.0), (2, 1.0)]).generate()

    assert [(arrival.submit_s, arrival.spec.devices, arrival.spec.work) for arrival in trace.arrivals] == [
        (0.0, 1, 20.433),
        (40.757, 2, 316.859),
        (53.166, 2, 0.511),
    ]


def test_aspects_do_not_disturb_each_other() -> None:
    one = TraceGenerator(50, seed=3).generate()
    other = TraceGenerator(50, seed=3, models=[("m", 1.0)], weights=parse_weights("1-5"), users=4).generate()

    assert submits(one) == submits(other)
    assert works(one) == works(other)


@pytest.mark.parametrize("arrivals", [Poisson(), Uniform()])
def test_the_offered_load_is_the_one_asked_for(arrivals: ArrivalProcess) -> None:
    trace = TraceGenerator(2000, load=0.8, devices=100_000, arrivals=arrivals).generate()

    assert summarise(trace, 100_000).load == pytest.approx(0.8, rel=1e-4)


@pytest.mark.parametrize("arrivals", [Diurnal(period_s=3600.0), Bursty()])
def test_processes_with_a_scale_of_their_own_keep_to_the_load_on_average(arrivals: ArrivalProcess) -> None:
    trace = TraceGenerator(20_000, load=0.5, devices=64, arrivals=arrivals, lengths=Fixed(600.0)).generate()

    assert summarise(trace, 64).load == pytest.approx(0.5, rel=0.08)


def test_the_span_is_the_one_asked_for() -> None:
    assert submits(TraceGenerator(500, span_s=1000.0).generate())[-1] == pytest.approx(1000.0)


def test_all_at_once() -> None:
    assert set(submits(TraceGenerator(50, arrivals=AtOnce()).generate())) == {0.0}


def test_jobs_without_length_come_at_once() -> None:
    assert set(submits(TraceGenerator(5, lengths=Fixed(0.0001)).generate())) == {0.0}


def test_poisson_gaps_are_exponential() -> None:
    times = submits(TraceGenerator(20_000, rate_per_s=0.5).generate())
    gaps = [after - before for before, after in pairwise(times)]

    assert fmean(gaps) == pytest.approx(2.0, rel=0.03)
    assert pstdev(gaps) == pytest.approx(2.0, rel=0.05)


def test_the_day_is_busier_than_the_night() -> None:
    times = submits(TraceGenerator(20_000, rate_per_s=1.0, arrivals=Diurnal(swing=0.8, period_s=1000.0)).generate())
    by_day = sum(at % 1000.0 < 500.0 for at in times) / len(times)

    assert by_day == pytest.approx(0.5 + 0.8 / 3.14159, abs=0.02)  # 1/2 + swing/π


def test_bursts_vary_more_than_poisson() -> None:
    def spread(arrivals: ArrivalProcess) -> float:
        times = submits(TraceGenerator(20_000, rate_per_s=0.1, arrivals=arrivals).generate())
        counts = [0] * (int(times[-1] // 600) + 1)
        for at in times:
            counts[int(at // 600)] += 1
        return pstdev(counts) ** 2 / fmean(counts)

    assert spread(Poisson()) == pytest.approx(1.0, abs=0.15)
    assert spread(Bursty(burst=10.0, width_s=60.0)) > 5


def test_sizes_follow_their_shares() -> None:
    info = summarise(TraceGenerator(20_000, sizes=[(1, 7.0), (2, 2.0), (8, 1.0)]).generate())

    assert {size: jobs / 20_000 for size, jobs in info.gpus.items()} == pytest.approx(
        {1: 0.7, 2: 0.2, 8: 0.1}, abs=0.02
    )


def test_models_weights_and_users_follow_their_shares() -> None:
    trace = TraceGenerator(20_000, models=[("a", 3.0), ("b", 1.0)], weights=parse_weights("1-5"), users=2).generate()
    info = summarise(trace)

    assert info.models["a"] / 20_000 == pytest.approx(0.75, abs=0.02)
    assert info.users["user-1"] / 20_000 == pytest.approx(2 / 3, abs=0.02)
    assert {arrival.spec.weight for arrival in trace.arrivals} == {1.0, 2.0, 3.0, 4.0, 5.0}


def test_lognormal_lengths_have_their_median_and_limits() -> None:
    lengths = works(TraceGenerator(20_000, lengths=Lognormal(600.0, 2.0, 10.0, 50_000.0)).generate())

    assert median(lengths) == pytest.approx(600.0, rel=0.06)
    assert (min(lengths), max(lengths)) == (10.0, 50_000.0)


def test_exponential_lengths_have_their_mean() -> None:
    assert fmean(works(TraceGenerator(20_000, lengths=Exponential(300.0)).generate())) == pytest.approx(300.0, rel=0.03)


def test_philly_like_lengths_have_phillys_quantiles() -> None:
    lengths = sorted(works(TraceGenerator(50_000, lengths=PhillyLike()).generate()))

    assert lengths[25_000] == pytest.approx(1144.0, rel=0.06)
    assert lengths[45_000] == pytest.approx(11_266.0, rel=0.08)
    assert lengths[49_500] == pytest.approx(254_884.0, rel=0.15)
    assert max(works(TraceGenerator(5000, lengths=PhillyLike(max_s=86_400.0)).generate())) == 86_400.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"jobs": 0}, "jobs is 0. Give 1 or more."),
        ({"devices": 0}, "devices is 0. Give 1 or more."),
        ({"users": -1}, "users is -1. Give 0 or more."),
        ({"load": 0.0}, "load is 0.0. Give a finite number above 0."),
        ({"rate_per_s": float("nan")}, "rate_per_s is nan. Give a finite number above 0."),
        ({"load": 0.5, "span_s": 9.0}, "span_s and load both set the arrival rate. Give one of them."),
        ({"sizes": [(0, 1.0)]}, "a size is 0. Give 1 or more."),
        ({"sizes": []}, "no sizes are given. Give some, for example 1:0.7,2:0.2,4:0.1."),
        ({"sizes": [(1, -0.5)]}, "the share of 1 is -0.5. Give 0 or more."),
        ({"models": [("m", 0.0)]}, "all shares of a mix are 0. Give one of them a share above 0."),
        ({"weights": [(0.0, 1.0)]}, "a weight is 0.0. Give a finite number above 0."),
    ],
)
def test_a_recipe_that_makes_no_sense(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        TraceGenerator(**settings)  # type: ignore[arg-type]

    assert str(caught.value) == problem


def test_reading_recipes_from_the_command_line() -> None:
    assert parse_mix("resnet:3,bert") == [("resnet", 3.0), ("bert", 1.0)]
    assert parse_mix("LM (batch size: 5):2") == [("LM (batch size: 5)", 2.0)]
    assert parse_sizes("1:0.7,2:0.3") == [(1, 0.7), (2, 0.3)]
    assert parse_sizes("philly") == list(PHILLY_SIZES)
    assert parse_weights("1-3") == [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]
    assert parse_weights("1:0.9,2.5:0.1") == [(1.0, 0.9), (2.5, 0.1)]
    assert parse_arrivals("diurnal:swing=0.5") == Diurnal(swing=0.5)
    assert parse_arrivals("at-once") == AtOnce()
    assert parse_lengths("lognormal:median_s=600:sigma=2") == Lognormal(600.0, 2.0)


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (parse_mix, "a:much", "'much' in 'a:much' is not a share"),
        (parse_sizes, "two:1", "'two:1' has a size that is not a whole number"),
        (parse_weights, "1-many", "'1-many' is not a list of weights"),
        (parse_lengths, "lognormal:sigma=wide", "'sigma=wide' of lognormal is not a number"),
        (parse_lengths, "lognormal:sigma=-1", "sigma of lognormal is -1.0"),
    ],
)
def test_recipes_that_cannot_be_read(parse: object, text: str, problem: str) -> None:
    assert callable(parse)
    with pytest.raises(InputError, match=problem):
        parse(text)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(UnknownName, match=r"unknown arrivals 'poison'\. Did you mean poisson\?"):
        parse_arrivals("poison")
    with pytest.raises(UnknownName, match=r"unknown setting of lognormal 'sigm'\. Did you mean sigma\?"):
        parse_lengths("lognormal:sigm=1")
