"""What moves cost: the contract, known laws, and moves read from a scheduler's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from pathlib import Path
from random import Random
from typing import Any

import pytest

from carpool.core.errors import InputError
from carpool.core.messages import Change, JobSubmitted
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.predictors.move_cost import Move, MoveCost, MoveCostObserver, MoveKind
from carpool.testing import PredictorContract
from carpool.testing.rig import Rig


def seconds(move: Move) -> float:
    """Starts take 8 s, or 2 s when warm; other moves half a second; both longer the larger the state."""
    base = (2.0 if move.is_warm else 8.0) if move.kind is MoveKind.START else 0.5
    return base * (1.0 + log1p(move.state_bytes / 1e8))


def made_up(count: int, seed: int) -> tuple[list[Move], list[float]]:
    rng = Random(seed)
    moves = [
        Move(
            rng.choice((MoveKind.START, MoveKind.GROW, MoveKind.SHRINK)),
            rng.choice(("a", "b")),
            rng.choice((0.0, 1e8, 1e9)),
            rng.randint(0, 4),
            rng.randint(1, 4),
            rng.random() < 0.5,
        )
        for _ in range(count)
    ]
    return moves, [seconds(move) * rng.lognormvariate(0.0, 0.1) for move in moves]


class TestContract(PredictorContract):
    def make_predictor(self) -> MoveCost:
        return MoveCost()

    def load(self, path: Path) -> MoveCost:
        return MoveCost.load(path)

    def samples(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return made_up(12, seed=1)


def test_learns_kind_warmth_and_state() -> None:
    cost = MoveCost().fit(*made_up(80, seed=2))
    asked, truth = made_up(40, seed=3)
    answers = cost.predict(asked)
    errors = [abs(answer.mean / value - 1.0) for answer, value in zip(answers, truth, strict=True)]
    assert sum(errors) / len(errors) < 0.3
    within = [abs(answer.mean - value) <= 2.0 * answer.std for answer, value in zip(answers, truth, strict=True)]
    assert sum(within) >= 0.8 * len(within)


def test_is_unsure_before_it_has_seen_moves() -> None:
    cost = MoveCost(prior_s=3.0)
    move = Move(MoveKind.GROW, "a", 1e8, 1, 2, is_warm=True)
    before = cost.predict([move])[0]
    assert before == (3.0, 3.0)
    cost.update([move] * 10, [0.25] * 10)
    after = cost.predict([move])[0]
    assert after.mean == pytest.approx(0.25, rel=0.2)
    assert after.std / after.mean < before.std / before.mean
    stranger = cost.predict([move._replace(model="other")])[0]
    assert stranger.std / stranger.mean > after.std / after.mean


def test_free_moves_cost_next_to_nothing() -> None:
    cost = MoveCost().fit([Move(MoveKind.PLACE)] * 20, [0.0] * 20)
    assert cost.predict([Move(MoveKind.PLACE)])[0].mean < 0.001


def test_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 moves come with"):
        MoveCost().fit([Move(MoveKind.GROW)], [-1.0])
    (tmp_path / "no").write_text("[]")
    with pytest.raises(InputError, match="not a saved"):
        MoveCost.load(tmp_path / "no")


# ------------------------------------------------------------------------------------------------- from records
@dataclass(frozen=True, slots=True)
class Wider(Policy):
    """Gives the one job a device more at every arrival."""

    def plan(self, view: Snapshot) -> Plan:
        width = len(view.jobs)
        return Plan((Change(JobId("a"), Allocation.of(*range(width))),), "wider")


def submitted(name: str) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), 1, 1000.0, model="m", min_devices=1, max_devices=4))


def watched(rig: Rig) -> MoveCostObserver:
    seen = MoveCostObserver()
    for record in rig.records:
        seen.record(record)
    return seen


def test_a_start_takes_from_the_order_to_its_effect() -> None:
    rig = Rig(Wider())
    rig.say(10.0, submitted("a"))
    rig.answered(17.5)
    cost = watched(rig).cost
    assert (cost.moves_, cost.seconds_) == ([Move(MoveKind.START, "m", 0.0, 0, 1)], [7.5])


def test_work_done_on_the_way_is_no_standstill() -> None:
    """It reports 20 of work at 30 s and 2 a second; new devices are in effect at 40 s with 36: two seconds are lost."""
    rig = Rig(Wider())
    rig.say(10.0, submitted("a"))
    rig.answered(20.0)
    rig.say(30.0, rig.backend.progress("a", 20.0, 2.0))
    rig.say(32.0, submitted("b"))
    rig.backend.done[JobId("a")] = 36.0
    rig.answered(40.0)
    cost = watched(rig).cost
    assert cost.moves_[1] == Move(MoveKind.GROW, "m", 0.0, 1, 2, is_warm=True)
    assert cost.seconds_[1] == pytest.approx(2.0)


def test_two_orders_at_once_teach_nothing() -> None:
    rig = Rig(Wider())
    rig.say(10.0, submitted("a"))
    rig.say(11.0, submitted("b"))
    rig.answered(20.0)
    assert watched(rig).cost.num_moves == 0
    assert watched(rig).move_s(rig.job("a").spec) is None


def test_the_price_of_a_move_is_what_moves_took() -> None:
    rig = Rig(Wider())
    rig.say(0.0, submitted("a"))
    rig.answered(5.0)
    for at, name in ((100.0, "b"), (200.0, "c"), (300.0, "d")):
        rig.say(at, rig.backend.progress("a", at, 1.0), submitted(name))
        rig.answered(at + 5.0)
    price = watched(rig).move_s(rig.job("a").spec)
    assert price is not None
    assert price == pytest.approx(5.0, rel=0.3)
