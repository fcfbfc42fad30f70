"""Predictor contract: learns from samples, keeps its state separate, and survives a save and load."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Protocol

from carpool.core.estimates import Estimate

Answer = Estimate | Sequence[Estimate]


class Predictor(Protocol):
    """The predictor interface: scikit-learn's conventions, with `Estimate` answers."""

    def fit(self, samples: Sequence[Any], targets: Sequence[Any], /) -> Any: ...

    def update(self, samples: Sequence[Any], targets: Sequence[Any], /) -> Any: ...

    def predict(self, samples: Sequence[Any], /) -> Sequence[Answer]: ...

    def save(self, path: Path, /) -> None: ...


class PredictorContract:
    """The contract of every predictor. Inherit, override `make_predictor`, `load` and `samples`."""

    tolerance: ClassVar[float] = 1e-9  # between answers that should be equal

    def make_predictor(self) -> Predictor:
        raise NotImplementedError(f"{type(self).__name__} overrides make_predictor")

    def load(self, path: Path) -> Predictor:
        raise NotImplementedError(f"{type(self).__name__} overrides load")

    def samples(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """At least eight inputs and their measured values."""
        raise NotImplementedError(f"{type(self).__name__} overrides samples")

    def test_fit_returns_the_predictor(self) -> None:
        """`fit` returns the predictor, so that it can be made and fitted in one line."""
        predictor = self.make_predictor()
        assert predictor.fit(*self.samples()) is predictor

    def test_what_is_learned_is_marked(self) -> None:
        """The constructor stores settings only; attributes added by fitting end in an underscore."""
        predictor = self.make_predictor()
        before = {name for name in vars(predictor) if not name.startswith("_")}
        assert not [name for name in before if name.endswith("_")], "learned attributes exist before the first fit"
        predictor.fit(*self.samples())
        self._ask(predictor)
        added = {name for name in vars(predictor) if not name.startswith("_")} - before
        assert added, "no attribute shows that it has been fitted"
        assert not [name for name in added if not name.endswith("_")], f"learned attributes end in '_': {sorted(added)}"

    def test_answers_are_valid(self) -> None:
        for answer in self._ask(self._fitted()):
            assert isfinite(answer.mean), answer
            assert isfinite(answer.std), answer
            assert answer.std >= 0.0, answer

    def test_queries_change_nothing(self) -> None:
        predictor = self._fitted()
        assert self._ask(predictor) == self._ask(predictor)

    def test_equal_samples_give_equal_answers(self) -> None:
        """Predictions do not depend on time, process or earlier fits."""
        again = self._fitted()
        again.fit(*self.samples())
        self._same(self._fitted(), again)

    def test_updates_equal_one_fit(self) -> None:
        samples, targets = self.samples()
        half = len(samples) // 2
        bit_by_bit = self.make_predictor()
        bit_by_bit.fit(samples[:half], targets[:half])
        self._ask(bit_by_bit)
        bit_by_bit.update(samples[half:], targets[half:])
        self._same(self._fitted(), bit_by_bit)

    def test_survives_the_disk(self, tmp_path: Path) -> None:
        samples, targets = self.samples()
        kept = self._fitted()
        kept.save(tmp_path / "kept")
        loaded = self.load(tmp_path / "kept")
        self._same(kept, loaded)
        for predictor in (kept, loaded):
            predictor.update(samples[:2], targets[:2])
        self._same(kept, loaded)

    def _fitted(self) -> Predictor:
        predictor = self.make_predictor()
        predictor.fit(*self.samples())
        return predictor

    def _ask(self, predictor: Predictor) -> list[Estimate]:
        flat: list[Estimate] = []
        for answer in predictor.predict(self.samples()[0]):
            if isinstance(answer, Estimate):
                flat.append(answer)
            else:
                flat.extend(answer)
        return flat

    def _same(self, one: Predictor, other: Predictor) -> None:
        for a, b in zip(self._ask(one), self._ask(other), strict=True):
            assert abs(a.mean - b.mean) <= self.tolerance, (a, b)
            assert abs(a.std - b.std) <= self.tolerance, (a, b)
