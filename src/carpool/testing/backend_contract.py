"""Backend contract: orders are desired states, each is acknowledged, stale ones are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobSubmitted,
    Order,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.sim.backend import SimulatedBackend
from carpool.sim.event_queue import EventQueue
from carpool.sim.worlds.base import PlainWorld, World


class Bench(Protocol):
    """A backend with at least two devices under test."""

    def submit(self, spec: JobSpec) -> None: ...

    def give(self, *orders: Order) -> None: ...

    def run(self, seconds: float) -> list[Fact]:
        """Let `seconds` pass; all facts since the last call. A live backend may return once every order is answered."""


class BackendContract:
    """Tests that every backend passes; inherit and override `make_bench`, and `spec` where a length is not enough."""

    long_s = 1000.0  # a job that does not end during a test
    short_s = 2.0  # a job that does
    answer_s = 10.0  # in which orders are answered

    def make_bench(self) -> Bench:
        raise NotImplementedError(f"{type(self).__name__} overrides make_bench")

    def spec(self, name: str, seconds: float) -> JobSpec:
        """A job of one or two devices that takes this long on one."""
        return JobSpec(JobId(name), 1, seconds, max_devices=2)

    def test_assign_is_answered(self) -> None:
        """An Assign is answered by AssignApplied of its generation before any other fact about the job."""
        bench = self._with("a")
        bench.give(_assign("a", 1, 0))
        facts = _of(bench.run(self.answer_s), "a")
        assert [type(fact) for fact in facts[:1]] == [AssignApplied]
        assert facts[0] == AssignApplied(JobId("a"), 1, 0.0)

    def test_release_is_answered(self) -> None:
        """A Release is answered by ReleaseApplied of its generation, the last fact about the job."""
        bench = self._running("a")
        bench.give(Release(JobId("a"), 2))
        facts = _of(bench.run(self.answer_s), "a")
        released = [fact for fact in facts if isinstance(fact, ReleaseApplied)]
        assert [fact.generation for fact in released] == [2]
        assert released[0].done >= 0.0
        assert facts[-1] == released[0], "nothing follows the answer to a release"
        assert _of(bench.run(self.answer_s), "a") == []

    def test_release_of_what_never_ran_is_answered(self) -> None:
        bench = self._with("a")
        bench.give(Release(JobId("a"), 1))
        assert _of(bench.run(self.answer_s), "a") == [ReleaseApplied(JobId("a"), 1, 0.0)]

    def test_work_is_kept_over_a_release(self) -> None:
        bench = self._running("a")
        bench.give(Release(JobId("a"), 2))
        kept = next(fact.done for fact in bench.run(self.answer_s) if isinstance(fact, ReleaseApplied))
        bench.give(_assign("a", 3, 1))
        again = next(fact for fact in bench.run(self.answer_s) if isinstance(fact, AssignApplied))
        assert (again.generation, again.done) == (3, kept)

    def test_a_newer_assign_replaces_the_older(self) -> None:
        """A resize: the job continues and reports under the new generation only."""
        bench = self._running("a")
        bench.give(_assign("a", 2, 0, 1))
        facts = _of(bench.run(self.answer_s), "a")
        generations = [fact.generation for fact in facts]
        assert generations == sorted(generations)
        assert [fact.generation for fact in facts if isinstance(fact, AssignApplied)] == [2]
        assert not [fact for fact in facts if isinstance(fact, ReleaseApplied)]

    def test_an_order_given_twice_does_no_harm(self) -> None:
        """A repeated order, as after a restart, neither restarts the job nor loses work."""
        once, twice = self._with("a", seconds=self.short_s), self._with("a", seconds=self.short_s)
        once.give(_assign("a", 1, 0))
        twice.give(_assign("a", 1, 0))
        twice.give(_assign("a", 1, 0))
        ends = [_ends(bench.run(self.answer_s + self.short_s), "a") for bench in (once, twice)]
        assert ends[0] == ends[1] == [JobFinished(JobId("a"), 1)]

    def test_a_release_given_twice_does_no_harm(self) -> None:
        """A repeated release is answered again, or not at all."""
        bench = self._running("a")
        bench.give(Release(JobId("a"), 2), Release(JobId("a"), 2))
        facts = _of(bench.run(self.answer_s), "a")
        assert {fact.generation for fact in facts if isinstance(fact, ReleaseApplied)} == {2}
        bench.give(_assign("a", 3, 0))
        assert [type(fact) for fact in _of(bench.run(self.answer_s), "a")][:1] == [AssignApplied]

    def test_a_stale_assign_is_ignored(self) -> None:
        bench = self._running("a")
        bench.give(Release(JobId("a"), 2))
        bench.run(self.answer_s)
        bench.give(_assign("a", 1, 0))
        assert _of(bench.run(self.answer_s), "a") == []

    def test_a_stale_release_is_ignored(self) -> None:
        bench = self._with("a")
        bench.give(_assign("a", 3, 0))
        bench.run(self.answer_s)
        bench.give(Release(JobId("a"), 2))
        facts = _of(bench.run(self.answer_s), "a")
        assert not [fact for fact in facts if isinstance(fact, ReleaseApplied)]

    def test_a_late_order_for_a_finished_job_does_no_harm(self) -> None:
        bench = self._with("a", "b", seconds=self.short_s)
        bench.give(_assign("a", 1, 0))
        assert _ends(bench.run(self.answer_s + self.short_s), "a") == [JobFinished(JobId("a"), 1)]
        bench.give(_assign("a", 2, 0), Release(JobId("a"), 3), _assign("b", 1, 0))
        facts = bench.run(self.answer_s + self.short_s)
        assert not [fact for fact in _of(facts, "a") if isinstance(fact, AssignApplied | JobFinished)]
        assert _ends(facts, "b") == [JobFinished(JobId("b"), 1)]

    def test_jobs_do_not_disturb_each_other(self) -> None:
        bench = self._with("a", "b", seconds=self.short_s)
        bench.give(_assign("a", 1, 0), _assign("b", 1, 1))
        bench.give(Release(JobId("a"), 2))
        facts = bench.run(self.answer_s + self.short_s)
        assert [fact.generation for fact in _of(facts, "a") if isinstance(fact, ReleaseApplied)] == [2]
        assert _ends(facts, "b") == [JobFinished(JobId("b"), 1)]

    def _with(self, *names: str, seconds: float | None = None) -> Bench:
        bench = self.make_bench()
        for name in names:
            bench.submit(self.spec(name, self.long_s if seconds is None else seconds))
        return bench

    def _running(self, name: str) -> Bench:
        bench = self._with(name)
        bench.give(_assign(name, 1, 0))
        assert AssignApplied(JobId(name), 1, 0.0) in bench.run(self.answer_s)
        return bench


class MachinesBench:
    """The simulated backend under test."""

    def __init__(self, world: World | None = None, *, sharing: bool = False) -> None:
        self._events = EventQueue()
        cluster = Cluster.build([(1, 2, "V100")])
        self._backend = SimulatedBackend(cluster, world or PlainWorld(), self._events, sharing=sharing)
        self._at = 0.0
        self._facts: list[Fact] = []

    def submit(self, spec: JobSpec) -> None:
        self._backend.introduce(spec)

    def give(self, *orders: Order) -> None:
        self._facts.extend(self._backend.apply(self._at, orders))

    def run(self, seconds: float) -> list[Fact]:
        end = self._at + seconds
        while (at := self._events.next_at) is not None and at <= end:
            self._facts.extend(self._events.happen(at))
        self._at = end
        facts, self._facts = self._facts, []
        return facts


_OfJob = AssignApplied | ReleaseApplied | ProgressReported | JobFinished | JobFailed | JobCrashed


def _assign(job: str, generation: int, *devices: int) -> Assign:
    return Assign(JobId(job), Allocation.of(*devices), generation)


def _of(facts: Sequence[Fact], job: str) -> list[_OfJob]:
    assert not [fact for fact in facts if isinstance(fact, JobSubmitted)], "a backend does not report submissions"
    return [fact for fact in facts if isinstance(fact, _OfJob) and fact.job == job]


def _ends(facts: Sequence[Fact], job: str) -> list[_OfJob]:
    return [fact for fact in _of(facts, job) if isinstance(fact, JobFinished | JobFailed | JobCrashed)]
