"""Seconds that a job stands still when it starts, moves or is resized, learned from the moves that were seen.

    log seconds = w · (1, is a start, is a cold one, kind, log state, log devices before and after) + own(model) + noise

A Bayesian linear regression (Bishop, "Pattern Recognition and Machine Learning", section 3.3) with unit noise variance
scaled by what is left over: exact, closed, and sober while there are few moves. `own` is shrunk towards 0, so that a
model that was never moved is answered as the others were.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from math import exp, log, log1p, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate

Floats = NDArray[np.float64]

_SCHEMA = 1
_KEPT = 500  # moves that are remembered: machines and software change
_LEAST_S = 1e-4  # a move that takes less counts as so much
_STATE = 1e8  # bytes of state that make a difference
_LEVEL, _BY_START, _BY_KIND, _BY_TRAIT, _BY_MODEL = 4.0, 2.0, 0.5, 0.5, 0.5  # how far, in logarithms, these may matter
_NOISE = 0.5  # spread of the logarithm that is expected of one move, worth this many moves:
_NOISE_COUNT = 2.0


class MoveKind(StrEnum):
    """What changes."""

    START = "start"  # from nothing to devices
    GROW = "grow"
    SHRINK = "shrink"
    PLACE = "place"  # as many devices, but others
    SETTING = "setting"  # the same devices, in another share, turn or batch


_KINDS = tuple(MoveKind)


class Move(NamedTuple):
    """One change of what a job holds."""

    kind: MoveKind
    model: str = ""
    state_bytes: float = 0.0  # that each device has to be given; 0: unknown
    before: int = 0  # devices
    after: int = 1
    is_warm: bool = False  # whether it has run before, so that its state and its processes may still be at hand


class MoveCost:
    """Learns from moves and the seconds they took, and predicts those of any other."""

    def __init__(self, prior_s: float = 0.1) -> None:
        self.prior_s = prior_s  # what a move is expected to take before any was seen

    def fit(self, moves: Sequence[Move], seconds: Sequence[float]) -> MoveCost:
        """Learn from scratch."""
        self.moves_: list[Move] = []
        self.seconds_: list[float] = []
        return self.update(moves, seconds)

    def update(self, moves: Sequence[Move], seconds: Sequence[float]) -> MoveCost:
        """Learn from more moves: the same as having fitted them all at once."""
        if not hasattr(self, "moves_"):
            return self.fit(moves, seconds)
        if len(moves) != len(seconds) or min(seconds, default=0.0) < 0.0:
            raise InputError(f"{len(moves)} moves come with the seconds {list(seconds)}")
        self.moves_ = [*self.moves_, *moves][-_KEPT:]
        self.seconds_ = [*self.seconds_, *map(float, seconds)][-_KEPT:]
        self._learned: _Learned | None = None
        return self

    @property
    def num_moves(self) -> int:
        """How many moves it remembers."""
        return len(getattr(self, "moves_", ()))

    def predict(self, moves: Sequence[Move]) -> list[Estimate]:
        """Seconds of standstill: the median, and a spread of the first order."""
        if not self.num_moves:
            return [Estimate(self.prior_s, self.prior_s) for _ in moves]
        if self._learned is None:
            self._learned = _Learned(self.moves_, self.seconds_, log(max(self.prior_s, _LEAST_S)))
        return [self._learned.answer(move) for move in moves]

    # --------------------------------------------------------------------------------------------------------- files
    def save(self, path: str | Path) -> None:
        """Keep every move; what is loaded answers the same."""
        seen = {"moves": getattr(self, "moves_", []), "seconds": getattr(self, "seconds_", [])}
        Path(path).write_text(json.dumps({"schema": _SCHEMA, "prior_s": self.prior_s, **seen}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MoveCost:
        """What `save` kept."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            moves = [Move(MoveKind(kind), *others) for kind, *others in document["moves"]]
            model = cls(document["prior_s"])
            return model.fit(moves, document["seconds"]) if moves else model
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"is no saved model of moves: {error}", where=str(path)) from None


class _Learned:
    """The weights, and how sure they are."""

    def __init__(self, moves: Sequence[Move], seconds: Sequence[float], expected: float) -> None:
        self._expected = expected
        self._models = {model: place for place, model in enumerate(dict.fromkeys(move.model for move in moves))}
        rows = np.array([self._row(move) for move in moves])
        heard = np.log(np.maximum(seconds, _LEAST_S)) - expected
        prior = np.array([_LEVEL, _BY_START, _BY_START, *[_BY_KIND] * len(_KINDS), *[_BY_TRAIT] * 3])
        prior = np.concatenate([prior, np.full(len(self._models), _BY_MODEL)])
        self._variance = _NOISE**2
        for _ in range(3):  # the noise and the weights depend on each other
            precision = rows.T @ rows / self._variance + np.diag(prior**-2)
            self._covariance = np.linalg.inv(precision)
            self._weights = self._covariance @ rows.T @ heard / self._variance
            left = float(np.sum((heard - rows @ self._weights) ** 2))
            self._variance = (left + _NOISE_COUNT * _NOISE**2) / (len(moves) + _NOISE_COUNT)

    def answer(self, move: Move) -> Estimate:
        """Median and spread."""
        row = self._row(move)
        spread = sqrt(float(row @ self._covariance @ row) + self._variance)
        if move.model not in self._models:
            spread = sqrt(spread**2 + _BY_MODEL**2)
        median = exp(self._expected + float(row @ self._weights))
        return Estimate(median, median * min(spread, 3.0))

    def _row(self, move: Move) -> Floats:
        is_start = move.kind is MoveKind.START
        kinds = [float(move.kind is kind) for kind in _KINDS]
        traits = [log1p(move.state_bytes / _STATE), log1p(move.before), log1p(move.after)]
        own = [float(move.model == model) for model in self._models]
        return np.array([1.0, float(is_start), float(is_start and not move.is_warm), *kinds, *traits, *own])
