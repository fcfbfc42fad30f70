"""A scheduler on a test rig: facts go in one by one, orders are noted, the books are checked after each step."""

from __future__ import annotations

from collections.abc import Iterable

from carpool.core.estimates import Estimator
from carpool.core.messages import Fact, Order, Record
from carpool.core.model import Job, JobId
from carpool.core.policy import Cadence, Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.fifo import Fifo
from carpool.testing.fakes import FakeBackend
from carpool.testing.invariants import check_books


class Rig:
    """One scheduler, its records, and a backend that answers when it is asked to."""

    def __init__(
        self,
        policy: Policy | None = None,
        groups: Iterable[tuple[int, int, str]] = ((1, 4, "V100"),),
        *,
        cluster: Cluster | None = None,
        cadence: Cadence | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        self.records: list[Record] = []
        self.backend = FakeBackend(answers_at_once=False)
        self.scheduler = Scheduler(
            cluster or Cluster.build(groups),
            policy or Fifo(),
            cadence=cadence,
            estimator=estimator,
            observers=(self,),
        )

    def record(self, record: Record) -> None:
        """Keep a record; the rig observes its own scheduler."""
        self.records.append(record)

    def say(self, at: float, *facts: Fact) -> list[Order]:
        """Facts in, orders out, books checked."""
        orders = self.scheduler.handle(at, facts)
        self.backend.apply(at, orders)
        check_books(self.scheduler)
        return orders

    def answered(self, at: float) -> list[Order]:
        """Let the backend answer everything that is open."""
        return self.say(at, *self.backend.answer())

    def wakes(self) -> float | None:
        """When the scheduler wants to be called even if nothing happens."""
        return self.scheduler.wake_at

    def job(self, name: str) -> Job:
        """How a job stands."""
        return self.scheduler.jobs[JobId(name)]
