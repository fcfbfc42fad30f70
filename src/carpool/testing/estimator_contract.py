"""Estimator contract: finite, deterministic answers, and a version that changes when answers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite, isnan
from typing import ClassVar

from hypothesis import strategies as st

from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Neighbour, Placement
from carpool.testing.strategies import random_runs

Answers = list[Estimate]

_FLAGS = {
    "predicts_mixes": "mixed",
    "tunes_batches": "goodputs",
    "predicts_goodput": "goodput",
    "counts_steps": "progress",
    "follows_losses": "learning",
}


class EstimatorContract:
    """The contract of every estimator. Inherit, override `make_estimator`, and list known models and types."""

    examples: ClassVar[int] = 25
    models: ClassVar[Sequence[str]] = ("",)
    kinds: ClassVar[Sequence[str]] = ("V100", "K80")
    shares: ClassVar[bool] = True  # whether it answers for shared devices
    shrinks: ClassVar[bool] = True  # whether failing examples are shrunk, which takes a while

    def make_estimator(self) -> Estimator:
        raise NotImplementedError(f"{type(self).__name__} overrides make_estimator")

    def test_rates_are_valid(self) -> None:
        def check(data: st.DataObject) -> None:
            estimator = self.make_estimator()
            spec, placement = data.draw(self.specs()), data.draw(self.placements())
            _check_estimate(estimator.rate(spec, placement))

        self._try(check)

    def test_remaining_work_is_valid(self) -> None:
        """Remaining work is not negative, and infinite only for jobs without a length."""

        def check(data: st.DataObject) -> None:
            estimator = self.make_estimator()
            job, at = data.draw(self.jobs()), data.draw(st.floats(0, 1e6))
            answer = estimator.remaining(job, at)
            if job.spec.work is not None:
                _check_estimate(answer)
            assert answer.mean >= 0.0

        self._try(check)

    def test_queries_change_nothing(self) -> None:
        def check(data: st.DataObject) -> None:
            estimator = self.make_estimator()
            self._teach(estimator, data.draw(self.lessons()))
            version = estimator.version
            questions = data.draw(self.questions())
            assert self._ask(estimator, questions) == self._ask(estimator, questions)
            assert estimator.version == version

        self._try(check)

    def test_version_grows_when_answers_change(self) -> None:
        def check(data: st.DataObject) -> None:
            estimator = self.make_estimator()
            questions = data.draw(self.questions())
            before, answers = estimator.version, self._ask(estimator, questions)
            for lesson in data.draw(self.lessons()):
                self._teach(estimator, [lesson])
                version, now = estimator.version, self._ask(estimator, questions)
                assert version >= before, f"the version went from {before} to {version}"
                assert version > before or now == answers, "answers changed under one version"
                before, answers = version, now

        self._try(check)

    def test_jobs_with_equal_keys_are_equally_fast(self) -> None:
        """Rates of jobs with one similarity key are equal, and stay so until the key changes."""

        def check(data: st.DataObject) -> None:
            estimator = self.make_estimator()
            specs = data.draw(st.lists(self.specs(), min_size=1, max_size=6, unique_by=lambda spec: spec.id))
            alone = replace(data.draw(self.placements()), neighbours=())
            known: dict[tuple[object, int], Estimate] = {}
            for lesson in (None, *data.draw(self.lessons())):
                if lesson is not None:
                    self._teach(estimator, [lesson])
                for spec in specs:
                    rate = estimator.rate(spec, alone)
                    like = estimator.similarity_key(spec), spec.devices
                    assert known.setdefault(like, rate) == rate, (
                        f"{spec.id} has the key of another job and another rate"
                    )

        self._try(check)

    def test_flags_match_overridden_methods(self) -> None:
        kind = type(self.make_estimator())
        for flag, method in _FLAGS.items():
            is_overridden = getattr(kind, method) is not getattr(Estimator, method)
            assert getattr(kind, flag) == is_overridden, f"{flag} and {method} of {kind.__name__} disagree"

    def test_equal_reports_give_equal_answers(self) -> None:
        """Two estimators with the same reports agree: replay depends on it."""

        def check(data: st.DataObject) -> None:
            lessons, questions = data.draw(self.lessons()), data.draw(self.questions())
            one, other = self.make_estimator(), self.make_estimator()
            self._teach(one, lessons)
            self._teach(other, lessons)
            assert (one.version, self._ask(one, questions)) == (other.version, self._ask(other, questions))

        self._try(check)

    def specs(self) -> st.SearchStrategy[JobSpec]:
        return st.builds(
            JobSpec,
            st.sampled_from(("a", "b", "c")).map(JobId),
            st.integers(1, 4),
            work=st.one_of(st.none(), st.integers(0, 1000).map(float)),
            model=st.sampled_from(self.models),
            min_devices=st.just(1),
            max_devices=st.just(8),
        )

    def placements(self) -> st.SearchStrategy[Placement]:
        group = st.tuples(st.sampled_from(self.kinds).map(Kind), st.integers(1, 4))
        groups = st.lists(group, min_size=1, max_size=2).map(lambda found: tuple(sorted(found)))
        if not self.shares:
            return st.builds(Placement, groups)
        fraction = st.sampled_from((0.25, 0.5, 1.0))
        neighbours = st.lists(st.builds(Neighbour, self.specs(), fraction), max_size=2).map(tuple)
        return st.builds(Placement, groups, fraction, neighbours=neighbours)

    @st.composite
    @staticmethod
    def _jobs(draw: st.DrawFn, specs: st.SearchStrategy[JobSpec]) -> Job:
        spec = draw(specs)
        held = Allocation.of(*range(spec.devices))
        done = draw(st.floats(0.0, 1.0)) * (spec.work or 100.0)
        return Job(spec, 0, 0.0, Phase.RUNNING, held, 1, held, 1, done, draw(st.floats(0.0, 4.0)))

    def jobs(self) -> st.SearchStrategy[Job]:
        return self._jobs(self.specs())

    def lessons(self) -> st.SearchStrategy[list[tuple[Job, float]]]:
        return st.lists(st.tuples(self.jobs(), st.floats(0.01, 10.0)), max_size=5)

    def questions(self) -> st.SearchStrategy[list[tuple[JobSpec, Placement]]]:
        return st.lists(st.tuples(self.specs(), self.placements()), min_size=1, max_size=4)

    def _try(self, check: Callable[[st.DataObject], None]) -> None:
        random_runs(st.data(), check, self.examples, shrinks=self.shrinks)

    def _teach(self, estimator: Estimator, lessons: Sequence[tuple[Job, float]]) -> None:
        for index, (job, rate) in enumerate(lessons):
            estimator.learn(float(index), job, ProgressReported(job.id, job.applied, job.done, rate))

    def _ask(self, estimator: Estimator, questions: Sequence[tuple[JobSpec, Placement]]) -> Answers:
        return [estimator.rate(spec, placement) for spec, placement in questions]


def _check_estimate(answer: Estimate) -> None:
    assert isfinite(answer.mean), answer
    assert answer.mean >= 0.0, answer
    assert not isnan(answer.std), answer
    assert answer.std >= 0.0, answer
