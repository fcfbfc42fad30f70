"""Lines of a plan: each job's new and previous allocation."""

from carpool.dashboard.plan_changes import MAX_LINES, plan_summaries
from carpool.service.queries.views import ChangeView, DecisionView, DeviceShareView


def change(job: str, *devices: int, fraction: float = 1.0, batch: int = 0) -> ChangeView:
    return ChangeView(job, tuple(DeviceShareView(number, f"g{number}", fraction) for number in devices), batch, 1.0)


def decision(number: int, *changes: ChangeView) -> DecisionView:
    return DecisionView(number, float(number), f"reason {number}", changes)


def test_lines_have_the_previous_allocation() -> None:
    newest_first = [
        decision(5, change("a")),
        decision(4, change("a", 2, 3, batch=64)),
        decision(3, change("a", 1, fraction=0.5), change("b", 1, fraction=0.5)),
        decision(2, change("a", 1)),
        decision(1, change("a", 1)),
    ]
    shown = plan_summaries(newest_first, 5)
    assert [plan.number for plan in shown] == [5, 4, 3, 2, 1]
    lines = [(plan.lines[0].text, plan.lines[0].previous) for plan in shown]
    assert lines == [
        ("preempted", "from g2–3"),
        ("gets g2–3, batch 64", "before: g1 at 50%"),
        ("gets g1 at 50%", "before: g1"),
        ("gets g1", "unchanged"),
        ("gets g1", ""),
    ]
    assert plan_summaries(newest_first, 2) == shown[:2]  # older plans still give the previous allocations


def test_jobs_of_other_users_have_no_previous_allocation() -> None:
    shown = plan_summaries([decision(2, change("", 1)), decision(1, change("", 0))], 2)
    assert [plan.lines[0].previous for plan in shown] == ["", ""]


def test_long_plans_are_truncated() -> None:
    (plan,) = plan_summaries([decision(1, *(change(f"j{n}", n) for n in range(20)))], 1)
    assert (len(plan.lines), plan.num_more) == (MAX_LINES, 20 - MAX_LINES)
