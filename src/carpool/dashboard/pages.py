"""Pages and panels: which panels a page has, and the query behind each panel.

A panel is asked for on the daemon's loop, where the clerk may be spoken to, and shown in a thread: what it returns is a
function that only calculates. A page can be asked for as a whole, or for one of its panels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from carpool.core.model import Phase
from carpool.dashboard.actions import job_actions, policy_action
from carpool.dashboard.comparison import Reports
from carpool.dashboard.job_detail import job_curves
from carpool.dashboard.job_list import PER_PAGE, JobFilter, JobList, sort_jobs
from carpool.dashboard.plan_changes import plan_summaries
from carpool.dashboard.time_window import TimeWindow
from carpool.dashboard.timeline import draw_timeline
from carpool.service.auth import Principal
from carpool.service.queries.views import JobView
from carpool.service.service import SchedulerService

LOG_TAIL_BYTES = 32_768
DECISIONS = 40  # on a page
SOON, LATEST = 8, 6  # rows below the timeline

_CHUNK = 1000  # jobs that are looked up before others have their turn on the loop
_GROUPS = ((Phase.RUNNING,), (Phase.WAITING,), (Phase.BLOCKED,), (Phase.PAUSED,), tuple(p for p in Phase if p.is_over))


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A page that somebody wants to see."""

    clerk: SchedulerService
    who: Principal
    query: Mapping[str, str]
    zone: tzinfo
    reports: Reports
    job: str = ""


Show = Callable[[], Any]
Panel = Callable[[PageRequest], Awaitable[Show]]


class Page(NamedTuple):
    """A page of the dashboard; its template and those of its panels bear their names."""

    name: str
    title: str
    path: str
    panels: Mapping[str, Panel]


# ---------------------------------------------------------------------------------------------------------- cluster
async def ask_figures(asked: PageRequest) -> Show:
    """The whole in a few figures."""
    summary = asked.clerk.summary(asked.who)
    return lambda: summary


async def ask_timeline(asked: PageRequest) -> Show:
    """Who ran when, with which share."""
    now = asked.clerk.now()
    window = TimeWindow.read(asked.query, now)
    devices = asked.clerk.devices(asked.who)
    spans = asked.clerk.timeline(asked.who, window.since, window.until)
    node = asked.query.get("node", "")
    if all(device.node != node for device in devices):
        node = ""
    return partial(draw_timeline, devices, spans, window, now, asked.zone, node)


async def ask_soon(asked: PageRequest) -> Show:
    """Which jobs will end next."""
    running = await _everything(asked, JobFilter(phase=Phase.RUNNING, sort="ends"))
    return lambda: [job for job in sort_jobs(running, JobFilter(sort="ends")) if job.ends_in is not None][:SOON]


async def ask_latest(asked: PageRequest) -> Show:
    """The newest few plans."""
    found, now = asked.clerk.decisions(asked.who, limit=LATEST), asked.clerk.now()
    return lambda: SimpleNamespace(decisions=found, now=now)


# ------------------------------------------------------------------------------------------------------------- jobs
async def ask_jobs(asked: PageRequest) -> Show:
    """One page of the list of jobs."""
    choice = JobFilter.read(asked.query)
    summary = asked.clerk.summary(asked.who)
    make = partial(JobList.cut, choice, phases=summary.jobs, now=summary.at)
    if choice.sort == "phase" and not choice.is_down:
        jobs, total = _by_phase(asked, choice, summary.jobs)
        return partial(make, jobs, total, is_cut=True)
    found = await _everything(asked, choice)
    return lambda: make(sort_jobs(found, choice), len(found))


def _by_phase(asked: PageRequest, choice: JobFilter, phases: Mapping[Phase, int]) -> tuple[list[JobView], int]:
    """One page in the usual order, without a look at other pages: what runs comes first, what is over last."""
    start, found, total = (choice.page - 1) * PER_PAGE, list[JobView](), 0
    for group in _GROUPS:
        wanted = [phase for phase in group if phases[phase] and (not choice.phase or phase == choice.phase)]
        number = sum(phases[phase] for phase in wanted)
        is_elsewhere = total + number <= start or len(found) == PER_PAGE
        if wanted and not (is_elsewhere and choice.is_of_all):
            page = asked.clerk.jobs(
                asked.who,
                phases=wanted,
                user=choice.user,
                contains=choice.contains,
                offset=max(0, start - total),
                limit=PER_PAGE - len(found),
            )
            found += page.jobs
            number = page.total
        total += number
    return found, total


async def _everything(asked: PageRequest, choice: JobFilter) -> list[JobView]:
    """All jobs that match, in pieces, so that nobody else has to wait long."""
    found: list[JobView] = []
    while True:
        page = asked.clerk.jobs(
            asked.who, phases=choice.phases, user=choice.user, contains=choice.contains, offset=len(found), limit=_CHUNK
        )
        found += page.jobs
        if not page.jobs or len(found) >= page.total:
            return found
        await asyncio.sleep(0)


# -------------------------------------------------------------------------------------------------------------- job
async def ask_head(asked: PageRequest) -> Show:
    """How a job stands, why, and what may be done about it."""
    job, now = asked.clerk.job(asked.who, asked.job), asked.clerk.now()
    why = asked.clerk.why(asked.who, asked.job)
    offered = job_actions(job, asked.who)
    return lambda: SimpleNamespace(job=job, why=why, now=now, actions=offered)


async def ask_curves(asked: PageRequest) -> Show:
    """What a job reported, and what it held."""
    job, now = asked.clerk.job(asked.who, asked.job), asked.clerk.now()
    measured = await asked.clerk.measurements(asked.who, asked.job)
    spans = asked.clerk.timeline(asked.who, job.submitted_at, now, job.id)
    devices = asked.clerk.devices(asked.who)
    return partial(job_curves, job, measured, spans, devices, now, asked.zone)


async def ask_story(asked: PageRequest) -> Show:
    """What happened to a job, newest first."""
    told, now = asked.clerk.story(asked.who, asked.job), asked.clerk.now()
    return lambda: SimpleNamespace(moments=told[::-1], now=now)


async def ask_log(asked: PageRequest) -> Show:
    """The end of a job's log, from the first whole line on."""
    piece = asked.clerk.log(asked.who, asked.job, -LOG_TAIL_BYTES)
    text = piece.text if piece.start == 0 else piece.text.partition("\n")[2]
    return lambda: SimpleNamespace(text=text, is_cut=piece.start > 0, is_over=piece.is_over)


# -------------------------------------------------------------------------------------------------------- decisions
async def ask_policy(asked: PageRequest) -> Show:
    """Which policy decides, and for admins a change of it."""
    policy = asked.clerk.policy
    offered = policy_action(policy, asked.who)
    fault = asked.clerk.policy_fault(asked.who)
    return lambda: SimpleNamespace(text=policy, fault=fault, actions=offered)


async def ask_decisions(asked: PageRequest) -> Show:
    """The newest plans, or those before a number."""
    said = asked.query.get("before", "")
    before = int(said) if said.isascii() and said.isdigit() and len(said) < 12 else None
    found = asked.clerk.decisions(asked.who, before=before, limit=3 * DECISIONS)
    now = asked.clerk.now()
    has_more = len(found) > DECISIONS
    return lambda: SimpleNamespace(plans=plan_summaries(found, DECISIONS), before=before, has_more=has_more, now=now)


# ---------------------------------------------------------------------------------------------------------- compare
async def ask_compare(asked: PageRequest) -> Show:
    """Reports to choose from, and the one that was chosen, else the newest."""

    def show() -> SimpleNamespace:
        listed = asked.reports.listed(asked.who)
        key = asked.query.get("report") or (listed[0].key if listed else "")
        name, found = asked.reports.get(asked.who, key) if key else ("", None)
        return SimpleNamespace(listed=listed, key=key, name=name, found=found)

    return show


PAGES = (
    Page(
        "cluster",
        "Cluster",
        "/cluster",
        {"figures": ask_figures, "timeline": ask_timeline, "soon": ask_soon, "latest": ask_latest},
    ),
    Page("jobs", "Jobs", "/jobs", {"jobs": ask_jobs}),
    Page("job", "Job", "/jobs/{job}", {"head": ask_head, "curves": ask_curves, "story": ask_story, "log": ask_log}),
    Page("decisions", "Decisions", "/decisions", {"policy": ask_policy, "decisions": ask_decisions}),
    Page("compare", "Compare", "/compare", {"compare": ask_compare}),
)
