"""The parametric world: contention, scaling, prices, learning curves, files and seeds."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.sim.worlds import parse_world
from carpool.sim.worlds.contention import Contender, Contention
from carpool.sim.worlds.parametric import ParametricEstimator, ParametricWorld
from carpool.sim.worlds.traits import MIXES, ChangeCosts, KindTraits, ModelTraits
from carpool.sim.worlds.world_file import TopLevelKeys

V100, K80 = Kind("V100"), Kind("K80")
ALONE = Placement(((V100, 1),))
H200 = Path(__file__).resolve().parents[3] / "docs" / "worlds" / "h200.toml"
GIB = 1 << 30


def job(model: str = "m", **rest: object) -> JobSpec:
    return replace(JobSpec(JobId("a"), work=100.0, model=model), **rest)  # type: ignore[arg-type]


def on(kind: Kind = V100, count: int = 1, **rest: object) -> Placement:
    return replace(Placement(((kind, count),)), **rest)  # type: ignore[arg-type]


def world(**traits: object) -> ParametricWorld:
    model = replace(ModelTraits(), **traits)  # type: ignore[arg-type]
    kinds = {"V100": KindTraits(memory=16 * GIB), "K80": KindTraits(4.0, 12 * GIB)}
    return ParametricWorld({"m": model}, kinds)


# ----------------------------------------------------------------------------------------------------- contention
ONE_TURN, THREE_TURNS = st.just(0), st.integers(0, 2)


def contenders(turns: st.SearchStrategy[int] = ONE_TURN) -> st.SearchStrategy[Contender]:
    use = st.floats(0.01, 1.0)
    return st.builds(Contender, use, st.floats(0.0, 1.0), st.floats(0.05, 1.0), turns)


def speeds(group: list[Contender], rule: Contention) -> list[float]:
    return [rule.speed(own, group[:place] + group[place + 1 :]) for place, own in enumerate(group)]


rules = st.builds(Contention, pressure=st.floats(0.0, 4.0), filler=st.floats(0.0, 1.0))


@given(contenders(), rules)
def test_a_job_alone_with_the_whole_device_is_not_slowed(own: Contender, rule: Contention) -> None:
    assert rule.speed(own._replace(fraction=1.0), []) == 1.0


@given(contenders(), rules)
def test_a_cap_alone_binds_only_below_what_the_job_uses(own: Contender, rule: Contention) -> None:
    assert rule.speed(own, []) == pytest.approx(min(1.0, own.fraction / own.sm))


@given(contenders(), st.lists(contenders(THREE_TURNS), max_size=4), contenders(THREE_TURNS), rules)
def test_another_neighbour_never_helps(
    own: Contender, others: list[Contender], more: Contender, rule: Contention
) -> None:
    assert rule.speed(own, [*others, more]) <= rule.speed(own, others) + 1e-12


@given(contenders(), st.lists(contenders(), min_size=1, max_size=4), st.floats(0.0, 1.0), rules)
def test_a_larger_cap_helps_its_owner_and_nobody_else(
    own: Contender, others: list[Contender], extra: float, rule: Contention
) -> None:
    larger = own._replace(fraction=min(1.0, own.fraction + extra))
    assert rule.speed(larger, others) >= rule.speed(own, others) - 1e-12
    assert rule.speed(others[0], [larger, *others[1:]]) <= rule.speed(others[0], [own, *others[1:]]) + 1e-12


@given(st.lists(contenders(), min_size=1, max_size=6), rules)
def test_nobody_gets_more_than_there_is(group: list[Contender], rule: Contention) -> None:
    got = speeds(group, rule)
    assert all(0.0 < speed <= 1.0 for speed in got)
    assert sum(speed * own.sm for speed, own in zip(got, group, strict=True)) <= 1.0 + 1e-9
    assert sum(speed * own.memory_bw for speed, own in zip(got, group, strict=True)) <= 1.0 + 1e-9
    least = max(min(own.sm for own in group), min(own.memory_bw for own in group))
    assert sum(got) <= 1.0 / least + 1e-9


@given(st.lists(contenders(st.integers(0, 3)), min_size=1, max_size=6), rules)
def test_turns_share_one_device_too(group: list[Contender], rule: Contention) -> None:
    got = speeds(group, rule)
    assert sum(speed * own.sm for speed, own in zip(got, group, strict=True)) <= 1.0 + 1e-9


@given(contenders(), st.lists(contenders(st.integers(1, 3)), max_size=4), rules)
def test_higher_turns_do_not_disturb_lower_ones(own: Contender, others: list[Contender], rule: Contention) -> None:
    assert rule.speed(own, others) == rule.speed(own, [])


def test_a_higher_turn_fills_idle_cycles() -> None:
    guaranteed, filler = Contender(0.4, 0.9), Contender(0.9, 0.9, turn=1)
    assert Contention().speed(filler, [guaranteed]) == pytest.approx(0.9 * (1.0 - 0.4))
    third = Contender(0.5, 0.1, turn=5)
    assert Contention().speed(third, [filler, guaranteed]) == pytest.approx(0.9 * (0.6 - 0.9 * 0.6 * 0.9))
    assert Contention().speed(filler, [Contender(1.0, 0.1)]) == 0.0


@pytest.mark.parametrize(
    ("fractions", "measured"),  # images/s of vgg16, resnet18, mobilenetv3 side by side under MPS
    [
        ((0.4, 0.4, 0.4), (12_921, 41_088, 21_666)),
        ((0.5, 0.5, 0.5), (15_158, 39_905, 20_709)),
        ((0.5, 0.6, 0.6), (14_566, 40_514, 21_074)),
        ((1.0, 1.0, 1.0), (19_473, 28_925, 13_155)),
    ],
)
def test_three_networks_share_an_h200_as_measured(fractions: tuple[float, ...], measured: tuple[float, ...]) -> None:
    truth = ParametricWorld.load(H200)
    solo = {"vgg16": 27_057, "resnet18": 75_401, "mobilenetv3": 40_726}
    beside = [Neighbour(job(name), fraction) for name, fraction in zip(solo, fractions, strict=True)]
    for own, rate in zip(beside, measured, strict=True):
        others = tuple(other for other in beside if other is not own)
        placement = on(Kind("H200"), fraction=own.fraction, neighbours=others)
        assert truth.pace(own.spec, 0.0, placement).rate == pytest.approx(rate / solo[own.spec.model], rel=0.1)


@pytest.mark.parametrize(("fraction", "measured"), [(0.25, 199_794), (0.4, 197_551), (1.0, 153_843)])
def test_eight_networks_share_an_h200_as_measured(fraction: float, measured: float) -> None:
    placement = on(Kind("H200"), fraction=fraction, neighbours=(Neighbour(job("resnet18"), fraction),) * 7)
    rate = ParametricWorld.load(H200).pace(job("resnet18"), 0.0, placement).rate
    assert 8 * rate == pytest.approx(measured / 75_401, rel=0.05)


# --------------------------------------------------------------------------------------------------- rate, memory
@given(st.integers(0, 50), st.integers(1, 24), st.sampled_from(["vgg16", "resnet50", "never heard of"]))
def test_work_is_counted_on_the_reference(seed: int, devices: int, model: str) -> None:
    truth = ParametricWorld.generate(seed, kinds=("V100", "K80"))
    nodes = ((V100, 8),) * (devices // 8) + (((V100, devices % 8),) if devices % 8 else ())
    assert truth.pace(job(model, devices=devices), 0.0, Placement(nodes)).rate == pytest.approx(1.0)


def test_spreading_over_nodes_costs_the_more_the_more_nodes() -> None:
    truth = world(network_s=0.02)
    rates = [truth.pace(job(devices=4), 0.0, Placement(((V100, 4 // q),) * q)).rate for q in (1, 2, 4)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3


def test_scaling_need_not_be_concave() -> None:
    truth = world(fixed_s=0.0, per_sample_s=0.001, sync_s=0.04, overlap=1.0)
    one, two, four = [truth.pace(job(batch_size=64), 0.0, on(count=n)).rate for n in (1, 2, 4)]
    assert two < one, "communication may cost more than a second device brings"
    assert four > one


def test_kinds_slow_models_unlike() -> None:
    truth = ParametricWorld.generate(3, models=("a", "b"), kinds=("V100", "K80"))
    rates = [truth.pace(job(model), 0.0, on(K80)).rate for model in ("a", "b")]
    assert rates[0] != rates[1]
    assert all(1 / 2.5 <= rate <= 1 / 1.2 for rate in rates)
    assert world().pace(job("m"), 0.0, on(K80)).rate == pytest.approx(0.25)


def test_unlike_devices_end_together() -> None:
    truth = world(sync_s=0.0, sync_more_s=0.0, network_s=0.0, fixed_s=0.0)
    assert truth.pace(job(), 0.0, Placement(((K80, 1), (V100, 1)))).rate == pytest.approx(1.0 + 0.25)


@given(st.floats(0.001, 1.0), st.floats(1e-5, 0.01), st.floats(16.0, 1e5))
def test_the_best_batch_is_where_theory_says(fixed: float, per_sample: float, noise: float) -> None:
    best = sqrt(fixed * noise / per_sample)
    if not 16 <= best <= 1e6:
        return
    truth = world(fixed_s=fixed, per_sample_s=per_sample, memory_per_sample=0)
    rates = [truth.rate(job(batch_size=64), on(batch_size=round(best * scale)), noise) for scale in (0.7, 1.0, 1.4)]
    assert max(rates) == rates[1]


def test_a_tuned_batch_changes_its_pace_with_the_noise_scale() -> None:
    truth = world(noise_scale=(100.0, 10_000.0), memory_per_sample=0)
    placement = on(batch_size=512)
    assert truth.pace(job(), 0.0, on()).until == inf
    early, late = truth.pace(job(), 0.0, placement), truth.pace(job(), 99.0, placement)
    assert early.until == pytest.approx(5.0)
    assert late.until == inf
    assert early.rate < late.rate
    edge = truth.pace(job(), early.until, placement)
    assert edge.until == pytest.approx(10.0)
    assert edge.rate > early.rate


def test_small_batches_leave_the_device_idle() -> None:
    truth = world()
    small, own = truth.use(job(batch_size=8), V100), truth.use(job(), V100)
    assert small.sm < own.sm == 0.5
    assert truth.use(job(), K80).sm == 1.0, "a slower kind is fuller"


def test_memory_that_does_not_fit_costs_speed() -> None:
    truth = world(sm=0.1, memory_bw=0.0, memory=9 * GIB, memory_per_sample=0)
    beside = on(neighbours=(Neighbour(job()),))
    assert truth.pace(job(), 0.0, beside).rate == pytest.approx(0.5 * 16 / 18)
    assert truth.memory(job(memory_bytes=5), 0) == 5
    assert world().memory(job(), 128) == GIB + 128 * (16 << 20)


def test_memory_is_written_into_specs_and_cluster() -> None:
    truth = world()
    cluster = truth.furnished(Cluster.build([(1, 2, "V100"), (1, 1, "K80")]))
    assert [bank.memory_bytes for node in cluster.nodes for bank in node.banks] == [16 * GIB, 12 * GIB]
    with pytest.raises(InputError, match=r"unknown device type 'V10'\. Did you mean V100"):
        truth.furnished(Cluster.build([(1, 1, "V10")]))
    assert truth.declared(job()).memory_bytes == 2 * GIB
    assert truth.declared(job(memory_bytes=7)).memory_bytes == 7


# --------------------------------------------------------------------------------------- prices, signs, checkpoints
@pytest.mark.parametrize(
    ("before", "after", "price"),
    [
        (None, on(), 8.0),
        (on(), on(count=2), 1.0),
        (on(), on(), 1.0),  # other devices of the same shape
        (on(), on(fraction=0.5), 0.5),
        (on(), on(batch_size=128), 0.25),
        (on(), on(turn=1), 0.125),
        (on(), on(turn=1, fraction=0.5), 0.5),
    ],
)
def test_prices(before: Placement | None, after: Placement, price: float) -> None:
    truth = replace(world(), prices=ChangeCosts(batch_s=0.25, switch_s=0.125))
    assert truth.change_s(job(), before, after) == price


def test_a_model_may_have_a_cold_start_of_its_own() -> None:
    assert world(start_s=0.0).change_s(job(), None, on()) == 0.0


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_loss_falls_and_noise_grows(one: float, other: float) -> None:
    truth = world()
    early, late = truth.signals(job(), min(one, other), ALONE), truth.signals(job(), max(one, other), ALONE)
    assert (early.loss or 0.0) >= (late.loss or 0.0) > 0.02
    assert 0.0 < (early.noise or 0.0) <= (late.noise or 0.0)


def test_loss_goes_from_start_to_end() -> None:
    truth = world(loss=(2.3, 0.1, 0.02))
    assert truth.signals(job(), 0.0, ALONE).loss == pytest.approx(2.3)
    assert truth.signals(job(), 100.0, ALONE).loss == pytest.approx(0.1)
    middle = 1.0 / ((1 / 0.08 - 1 / 2.28) * 0.5 + 1 / 2.28) + 0.02
    assert truth.signals(job(), 50.0, ALONE).loss == pytest.approx(middle)


def test_checkpoints_keep_what_was_saved() -> None:
    truth = replace(world(), setting=TopLevelKeys(checkpoint_every=30.0))
    assert truth.checkpointed(job(), 89.0) == 60.0
    assert world().checkpointed(job(), 89.0) == 89.0


def test_a_job_without_length_gets_its_models() -> None:
    assert world(work=77.0).work(job(work=None)) == 77.0
    assert world().work(job()) == 100.0


# ------------------------------------------------------------------------------------------------ estimator, seeds
def test_the_estimator_is_an_oracle_and_knows_use_and_memory() -> None:
    truth = ParametricWorld.generate(1, kinds=("V100", "K80"))
    oracle = truth.estimator()
    placement = on(K80, fraction=0.5, neighbours=(Neighbour(job("resnet18")),))
    assert oracle.rate(job("vgg16"), placement) == (truth.pace(job("vgg16"), 0.0, placement).rate, 0.0)
    assert oracle.use(job("vgg16"), K80) == truth.use(job("vgg16"), K80)
    assert oracle.memory(job("vgg16")) == truth.memory(job("vgg16"))


def test_the_estimator_learns_the_noise_scale() -> None:
    truth = world(memory_per_sample=0)
    oracle = truth.estimator()
    spec = job(batch_range=(64, 512))
    running = Job(spec, 0, 0.0, Phase.RUNNING, done=60.0)
    before = oracle.rate(spec, on(batch_size=512)).mean
    assert before == truth.pace(spec, 0.0, on(batch_size=512)).rate
    oracle.learn(5.0, running, ProgressReported(spec.id, 1, 60.0, 1.0, noise=truth.signals(spec, 60.0, ALONE).noise))
    assert oracle.version == 1
    assert oracle.rate(spec, on(batch_size=512)).mean == truth.pace(spec, 60.0, on(batch_size=512)).rate > before
    assert oracle.remaining(running, 0.0).mean == 40.0


@pytest.mark.parametrize(("seed", "found"), [(None, 7), (0, 0), (3, 3)])
def test_a_seed_that_is_given_takes_the_place_of_the_files(seed: int | None, found: int, tmp_path: Path) -> None:
    path = tmp_path / "world.toml"
    path.write_text("seed = 7\n" + H200.read_text(encoding="utf-8"), encoding="utf-8")
    world = parse_world(str(path), seed)
    assert isinstance(world, ParametricWorld)
    assert world.setting.seed == found


def test_estimation_noise_is_seeded_and_lasting() -> None:
    spec = job("vgg16")

    def told(seed: int, noise: float = 0.2) -> list[float]:
        noisy = ParametricEstimator(replace(world(), setting=TopLevelKeys(noise=noise, seed=seed)))
        return [noisy.rate(spec, on(count=count)).mean for count in (1, 1, 2)]

    assert told(1) == told(1) != told(2)
    assert told(1)[0] == told(1)[1]
    assert told(1, 0.0) == told(2, 0.0)
    noisy = ParametricEstimator(replace(world(), setting=TopLevelKeys(noise=0.2)))
    assert noisy.rate(spec, on()).std == pytest.approx(0.2 * noisy.rate(spec, on()).mean)


@given(st.integers(0, 1000), st.sampled_from(sorted(MIXES)))
def test_generation_is_seeded_and_each_model_is_drawn_apart(seed: int, mix: str) -> None:
    truth = ParametricWorld.generate(seed, models=mix, kinds=("V100", "K80"))
    assert truth == ParametricWorld.generate(seed, models=mix, kinds=("V100", "K80"))
    assert truth.models != ParametricWorld.generate(seed + 1, models=mix, kinds=("V100", "K80")).models
    names = MIXES[mix].models
    assert ParametricWorld.generate(seed, models=names[:1]).models == {
        names[0]: ParametricWorld.generate(seed, models=names).models[names[0]]
    }
    assert all(16 * GIB > truth.memory(job(name)) > 0 for name in truth.models)


# ----------------------------------------------------------------------------------------------------------- files
def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "world.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        reference = "V100"
        checkpoint_every = 300
        [prices]
        start_s = 1
        [contention]
        pressure = 1.0
        [kind.V100]
        memory = "16GiB"
        [kind.K80]
        slowdown = 3.5
        [model.default]
        sm = 0.25
        [model.bert]
        batch_size = 16
        memory = "4GiB"
        noise_scale = [10, 20]
        slowdown = { K80 = 6.0 }
        """,
    )
    truth = ParametricWorld.load(path)
    assert truth.setting == TopLevelKeys("V100", checkpoint_every=300.0)
    assert ParametricWorld.load(path, seed=5).setting == replace(truth.setting, seed=5)
    assert truth.prices == ChangeCosts(start_s=1.0)
    assert truth.contention == Contention(pressure=1.0)
    assert truth.kinds == {"V100": KindTraits(memory=16 * GIB), "K80": KindTraits(3.5)}
    assert truth.traits(job("bert")) == ModelTraits(
        batch_size=16, sm=0.25, memory=4 * GIB, noise_scale=(10.0, 20.0), slowdown={"K80": 6.0}
    )
    assert truth.traits(job("not listed")) == ModelTraits(sm=0.25)
    assert truth.slowdown(job("not listed"), K80) == 3.5


def test_an_empty_file_is_a_world_of_defaults(tmp_path: Path) -> None:
    truth = ParametricWorld.load(written(tmp_path, ""))
    assert truth.pace(job("anything"), 0.0, on(Kind("any"))).rate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model.a]\nsm = 1.5", "[model.a]: sm is 1.5. Give a number above 0 and at most 1."),
        ("[model.a]\nsm = 'half'", "[model.a]: sm is 'half'. Give a number above 0 and at most 1."),
        ("[model.a]\nbatch_size = 1.5", "[model.a]: batch_size is 1.5. Give a whole number at least 1."),
        ("[model.a]\nmemory = 'much'", "[model.a]: memory: 'much' is not an amount of memory. Write bytes, or"),
        ("[model.a]\nloss = [1.0, 2.0, 0.0]", "[model.a]: loss is [1.0, 2.0, 0.0]. Give start, end and floor"),
        ("[model.a]\nloss = 1.0", "[model.a]: loss is 1.0. Give a list of numbers"),
        ("[model.a]\nnoise_scale = [1.0]", "[model.a]: noise_scale is [1.0]. Give the first and the last value"),
        ("[model.a]\nslowdown = { K80 = 0 }", "[model.a]: slowdown.K80 is 0. Give a number above 0."),
        ("[model.a]\nsmm = 0.5", "[model.a]: unknown key 'smm'. Did you mean sm?"),
        ("[kind.K80]\nspeed = 2", "[kind.K80]: unknown key 'speed'. Known: memory, slowdown."),
        ("[prices]\nstart_s = -1", "[prices]: start_s is -1. Give a number at least 0."),
        ("prices = 3", "[prices]: is 3, not a table."),
        ("model = 3", "[model]: is 3, not a table."),
        ("reference = 'V10'\n[kind.V100]", "reference: unknown kind 'V10'. Did you mean V100?"),
        ("reference = 3", "reference is 3. Give text in quotes."),
        ("= 3", "is not TOML"),
    ],
)
def test_mistakes_are_told_with_file_key_value_and_way_out(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        ParametricWorld.load(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read"):
        ParametricWorld.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"unknown mix 'smal'. Did you mean small"):
        ParametricWorld.generate(0, models="smal")
