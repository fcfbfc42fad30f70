"""Successive halving: verdicts at rungs, and whole sweeps in any order of arrival."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import HalvingRule, JobId
from carpool.policies.halving import Action, Trial, TrialState, decide, rung_at, rung_steps

RULE = HalvingRule("acc", True, 3, 10)


def trial(name: str, *values: float, state: TrialState = TrialState.ACTIVE, passed: int = -1, **more: bool) -> Trial:
    return Trial(JobId(name), state, dict(enumerate(values)), passed, **more)


def verdicts(*trials: Trial, rule: HalvingRule = RULE) -> dict[str, str]:
    return {verdict.job: str(verdict.action) for verdict in decide(rule, trials)}


@pytest.mark.parametrize(("step", "rung"), [(9, -1), (10, 0), (29, 0), (30, 1), (90, 2), (100, 2)])
def test_rungs_are_spaced_by_eta(step: int, rung: int) -> None:
    assert rung_at(RULE, step) == rung


def test_the_end_of_a_training_is_no_rung() -> None:
    assert rung_at(RULE, 90, total=90) == 1
    assert rung_at(RULE, 90, total=91) == 2


def test_the_first_to_arrive_waits() -> None:
    assert verdicts(trial("a", 0.5), trial("b"), trial("c")) == {"a": "hold"}
    assert verdicts(trial("a", 0.5, state=TrialState.HELD), trial("b"), trial("c")) == {}


def test_the_best_third_of_those_that_arrived_continues() -> None:
    held = [trial("a", 0.5, state=TrialState.HELD), trial("b", 0.9, state=TrialState.HELD)]
    assert verdicts(*held, trial("c", 0.7), trial("d")) == {"b": "continue", "c": "hold"}
    assert verdicts(*held, trial("c", 1.0), trial("d")) == {"c": "continue"}
    smaller = HalvingRule("loss", False, 3, 10)
    assert verdicts(*held, trial("c", 0.7), trial("d"), rule=smaller) == {"a": "continue", "c": "hold"}


def test_no_more_than_a_third_continues_before_the_rung_is_complete() -> None:
    passed = [trial("a", 0.5, passed=0), trial("b", 0.4, state=TrialState.HELD), trial("c", 0.3, state=TrialState.HELD)]
    assert verdicts(*passed, trial("d", 0.9), trial("e")) == {"d": "hold"}
    held = trial("d", 0.9, state=TrialState.HELD)
    assert verdicts(*passed, held, trial("e", 0.1)) == {"b": "stop", "c": "stop", "d": "continue", "e": "stop"}


def test_losers_stop_once_no_other_can_arrive() -> None:
    held = [trial("a", 0.5, state=TrialState.HELD), trial("b", 0.9, 0.9, passed=0)]
    assert verdicts(*held, trial("c", 0.7)) == {"a": "stop", "c": "stop", "b": "continue"}


def test_of_too_few_one_continues() -> None:
    assert verdicts(trial("a", 0.5), trial("b", 0.4, state=TrialState.HELD)) == {"a": "continue", "b": "stop"}
    assert verdicts(trial("a", 0.5), trial("b", state=TrialState.OVER)) == {"a": "continue"}


def test_values_that_are_not_finite_never_continue() -> None:
    nan = float("nan")
    assert verdicts(trial("a", nan), trial("b", 0.1), trial("c", float("inf"))) == {
        "a": "stop",
        "b": "continue",
        "c": "stop",
    }
    assert verdicts(trial("a", nan)) == {"a": "stop"}


def test_a_trial_that_cannot_wait_goes_on_or_stops() -> None:
    others = [trial(name, can_hold=False) for name in "xyz"]
    first, second = trial("a", 0.5, can_hold=False), trial("b", 0.4, can_hold=False)
    assert verdicts(first, *others) == {"a": "continue"}
    passed = [replace(first, passed=0), replace(second, passed=0)]
    assert verdicts(*passed, trial("c", 0.3, can_hold=False), *others) == {"c": "stop"}
    assert verdicts(*passed, trial("c", 0.6, can_hold=False), *others) == {"c": "continue"}


def test_what_was_decided_is_not_decided_again() -> None:
    assert verdicts(trial("a", 0.1, passed=0), trial("b", 0.9), trial("c", 0.8)) == {"b": "continue", "c": "stop"}


def play(qualities: list[float], total: int, random: Random, *, can_hold: bool) -> tuple[dict[str, int], int]:
    """Run trials whose metric is their quality, a random one at a time; steps of those that end, and of all."""
    trials = {f"t{place}": trial(f"t{place}", can_hold=can_hold) for place in range(len(qualities))}
    finished: dict[str, int] = {}
    steps = dict.fromkeys(trials, 0)
    while active := [name for name, each in trials.items() if each.state is TrialState.ACTIVE]:
        name = random.choice(active)
        rung = trials[name].rung + 1
        if rung_steps(RULE, rung) >= total:
            steps[name] = finished[name] = total
            trials[name] = replace(trials[name], state=TrialState.OVER)
        else:
            steps[name] = rung_steps(RULE, rung)
            value = qualities[int(name[1:])]
            trials[name] = replace(trials[name], values={**trials[name].values, rung: value})
        for verdict in decide(RULE, list(trials.values())):
            known = trials[verdict.job]
            changes = {
                Action.CONTINUE: {"state": TrialState.ACTIVE, "passed": verdict.rung},
                Action.HOLD: {"state": TrialState.HELD},
                Action.STOP: {"state": TrialState.OVER},
            }
            trials[verdict.job] = replace(known, **changes[verdict.action])  # type: ignore[arg-type]
    assert all(each.state is TrialState.OVER for each in trials.values()), "no trial waits for ever"
    return finished, sum(steps.values())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30, unique=True), st.integers(0, 10**6), st.booleans())
def test_the_best_trial_finishes_in_any_order(qualities: list[float], seed: int, can_hold: bool) -> None:
    finished, steps = play(qualities, 300, Random(seed), can_hold=can_hold)
    assert f"t{qualities.index(max(qualities))}" in finished
    assert steps <= 300 * len(qualities)


@given(st.lists(st.floats(0, 1), min_size=27, max_size=27), st.integers(0, 10**6), st.booleans())
def test_trials_take_a_fraction_of_the_steps_of_the_grid(qualities: list[float], seed: int, in_order: bool) -> None:
    _, steps = play(sorted(qualities) if in_order else qualities, 270, Random(seed), can_hold=True)
    assert steps <= 0.4 * 27 * 270
