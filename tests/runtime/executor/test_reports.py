"""Reports: batched by instant, and delivered exactly once across crashes of the client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import CarpoolError
from carpool.core.messages import AssignApplied, JobFinished
from carpool.core.model import JobId
from carpool.runtime.executor.reports import (
    Facts,
    NumberedReport,
    Outbox,
    Outcome,
    Receipts,
    Report,
    ReportBatcher,
    Told,
)


def note(number: int) -> Told:
    return Told(JobId("a"), str(number))


class Delivery:
    """An executor, and a client that crashes with its connection."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.reported: list[Told] = []
        self.kept: list[NumberedReport] = []  # on the client's disk
        self.claim()

    def claim(self) -> None:
        """Connect a client that knows what is on its disk."""
        last = self.kept[-1].number if self.kept else 0
        self.receipts = Receipts(last)
        self.taken: list[NumberedReport] = []  # received, and not on the disk yet
        self.acks: list[int] = []  # on their way
        self.outbox.acknowledge(last)
        self.sent: list[NumberedReport] = list(self.outbox)

    def handle(self, event: str) -> None:
        match event:
            case "report":
                self.reported.append(note(len(self.reported)))
                self.sent.append(self.outbox.put(self.reported[-1]))
            case "receive" if self.sent:
                received = self.sent.pop(0)
                if self.receipts.is_new(received.number):
                    self.taken.append(received)
            case "commit" if self.taken:
                self.kept += self.taken
                self.taken = []
                self.acks.append(self.kept[-1].number)
            case "acknowledge" if self.acks:
                self.outbox.acknowledge(self.acks.pop(0))
            case "again" if len(self.outbox):
                self.sent += list(self.outbox)  # a resend that was not needed
            case "crash":
                self.claim()


@given(st.lists(st.sampled_from(["report", "receive", "commit", "acknowledge", "again", "crash"]), max_size=80))
def test_no_report_is_lost_or_counted_twice(events: list[str]) -> None:
    delivery = Delivery()
    for event in events:
        delivery.handle(event)
        assert [report for _, report in delivery.kept] == delivery.reported[: len(delivery.kept)]
        assert len(delivery.outbox) >= len(delivery.reported) - len(delivery.kept), "unstored ones are kept"
    delivery.claim()
    while delivery.sent:
        delivery.handle("receive")
    delivery.handle("commit")
    delivery.handle("acknowledge")
    assert [report for _, report in delivery.kept] == delivery.reported
    assert len(delivery.outbox) == 0


def test_a_gap_in_the_numbers_is_an_error() -> None:
    receipts = Receipts(3)
    assert not receipts.is_new(3)
    assert receipts.is_new(4)
    with pytest.raises(CarpoolError, match="report 6 followed report 4"):
        receipts.is_new(6)


JOB = JobId("a")
STARTED, FINISHED = AssignApplied(JOB, 1, 0.0), JobFinished(JOB, 1)
OUTCOME = Outcome(JOB, 3, 1, 0.5, {}, "digest", "all steps are done", 10.0)


def test_reports_are_delivered_at_once_and_facts_together() -> None:
    delivered: list[Report] = []
    batcher = ReportBatcher(delivered.append)
    batcher.emit(STARTED)
    batcher.report(Told(JOB, "something"))
    batcher.emit(FINISHED)
    assert delivered == [Told(JOB, "something")]
    batcher.flush()
    assert delivered[1:] == [Facts((STARTED, FINISHED))]
    batcher.flush()
    assert len(delivered) == 2, "no facts since"


def test_an_outcome_is_followed_by_facts_even_if_there_are_none() -> None:
    delivered: list[Report] = []
    batcher = ReportBatcher(delivered.append)
    batcher.report(OUTCOME)
    batcher.flush()
    batcher.flush()
    assert delivered == [OUTCOME, Facts(())]
