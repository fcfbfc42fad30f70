"""Facts of one instant go together, and facts follow every outcome."""

from __future__ import annotations

from carpool.core.messages import AssignApplied, JobFinished
from carpool.core.model import JobId
from carpool.runtime.executor.reports import Facts, Outcome, Report, ReportBatcher, Told

JOB = JobId("a")
STARTED, FINISHED = AssignApplied(JOB, 1, 0.0), JobFinished(JOB, 1)
OUTCOME = Outcome(JOB, 3, 1, 0.5, {}, "digest", "all steps are done", 10.0)


def test_words_go_at_once_and_facts_together() -> None:
    said: list[Report] = []
    reporting = ReportBatcher(said.append)
    reporting.emit(STARTED)
    reporting.report(Told(JOB, "something"))
    reporting.emit(FINISHED)
    assert said == [Told(JOB, "something")]
    reporting.flush()
    assert said[1:] == [Facts((STARTED, FINISHED))]
    reporting.flush()
    assert len(said) == 2, "nothing happened since"


def test_an_outcome_is_followed_by_facts_even_where_there_are_none() -> None:
    said: list[Report] = []
    reporting = ReportBatcher(said.append)
    reporting.report(OUTCOME)
    reporting.flush()
    reporting.flush()
    assert said == [OUTCOME, Facts(())]
