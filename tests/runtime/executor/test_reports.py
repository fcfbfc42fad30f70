"""Whatever crashes whenever: what was reported is kept once, in order, and nothing of it is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import CarpoolError
from carpool.core.model import JobId
from carpool.runtime.executor.reports import NumberedReport, Outbox, Receipts, Told


def told(number: int) -> Told:
    return Told(JobId("a"), str(number))


class Two:
    """An executor that never dies, and a hearer that does; the line between them is cut with it."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.reported: list[Told] = []
        self.kept: list[NumberedReport] = []  # on the hearer's disk, with the number of the last
        self.claim()

    def claim(self) -> None:
        """The next hearer says what is on its disk, and is sent the rest."""
        last = self.kept[-1].number if self.kept else 0
        self.receipts = Receipts(last)
        self.taken: list[NumberedReport] = []  # heard, and not on the disk yet
        self.answers: list[int] = []  # acknowledgements on their way
        self.outbox.acknowledge(last)
        self.line: list[NumberedReport] = list(self.outbox)

    def do(self, what: str) -> None:
        match what:
            case "report":
                self.reported.append(told(len(self.reported)))
                self.line.append(self.outbox.put(self.reported[-1]))
            case "hear" if self.line:
                heard = self.line.pop(0)
                if self.receipts.is_new(heard.number):
                    self.taken.append(heard)
            case "commit" if self.taken:
                self.kept += self.taken
                self.taken = []
                self.answers.append(self.kept[-1].number)
            case "acknowledge" if self.answers:
                self.outbox.acknowledge(self.answers.pop(0))
            case "again" if len(self.outbox):
                self.line += list(self.outbox)  # a resend that was not needed
            case "crash":
                self.claim()


@given(st.lists(st.sampled_from(["report", "hear", "commit", "acknowledge", "again", "crash"]), max_size=80))
def test_nothing_is_lost_and_nothing_counts_twice(happenings: list[str]) -> None:
    two = Two()
    for what in happenings:
        two.do(what)
        assert [report for _, report in two.kept] == two.reported[: len(two.kept)]
        assert len(two.outbox) >= len(two.reported) - len(two.kept), "what is not on a disk is still here"
    two.claim()
    while two.line:
        two.do("hear")
    two.do("commit")
    two.do("acknowledge")
    assert [report for _, report in two.kept] == two.reported
    assert len(two.outbox) == 0


def test_a_gap_is_a_fault_of_ours() -> None:
    receipts = Receipts(3)
    assert not receipts.is_new(3)
    assert receipts.is_new(4)
    with pytest.raises(CarpoolError, match="report 6 came after report 4"):
        receipts.is_new(6)
