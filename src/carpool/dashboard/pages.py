"""Pages and panels: which panels a page has, and the query behind each panel.

A panel's loader runs on the daemon's event loop, where the service may be called, and returns a function that only
computes and runs in a thread. A browser requests a whole page, or one of its panels.
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
from carpool.dashboard.federation import Federations
from carpool.dashboard.job_detail import job_curves
from carpool.dashboard.job_list import PER_PAGE, JobFilter, JobList, sort_jobs
from carpool.dashboard.plan_changes import plan_summaries
from carpool.dashboard.results import MAX_CURVE_POINTS, draw_results, drawn_rows
from carpool.dashboard.time_window import TimeWindow
from carpool.dashboard.timeline import draw_timeline
from carpool.service.auth import Principal
from carpool.service.queries.views import JobView
from carpool.service.service import SchedulerService

LOG_TAIL_BYTES = 32_768
DECISIONS_PER_PAGE = 40
MAX_SWEEPS = 200
MAX_SOON, MAX_LATEST, MAX_NODES = 8, 6, 16  # rows below the timeline

_CHUNK = 1000  # jobs loaded before the event loop gets a turn
_GROUPS = ((Phase.RUNNING,), (Phase.WAITING,), (Phase.BLOCKED,), (Phase.PAUSED,), tuple(p for p in Phase if p.is_over))


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Request for a page: principal, query and the services that panels use."""

    service: SchedulerService
    principal: Principal
    query: Mapping[str, str]
    zone: tzinfo
    reports: Reports
    federations: Federations
    job: str = ""


Compute = Callable[[], Any]  # the variable of a panel's template
Panel = Callable[[PageRequest], Awaitable[Compute]]


class Page(NamedTuple):
    """A page of the dashboard; templates are named after the page and its panels."""

    name: str
    title: str
    path: str
    panels: Mapping[str, Panel]


async def _load_figures(request: PageRequest) -> Compute:
    summary = request.service.summary(request.principal)
    return lambda: summary


async def _load_timeline(request: PageRequest) -> Compute:
    now = request.service.now()
    window = TimeWindow.read(request.query, now)
    devices = request.service.devices(request.principal)
    spans = request.service.timeline(request.principal, window.since, window.until)
    node = request.query.get("node", "")
    if all(device.node != node for device in devices):
        node = ""
    return partial(draw_timeline, devices, spans, window, now, request.zone, node, request.service.began_at)


async def _load_nodes(request: PageRequest) -> Compute:
    nodes = request.service.nodes(request.principal)
    ordered = sorted(nodes, key=lambda node: not (node.is_lost or node.is_drained))
    return lambda: SimpleNamespace(shown=ordered[:MAX_NODES], more=max(0, len(ordered) - MAX_NODES))


async def _load_soon(request: PageRequest) -> Compute:
    running = await _all_jobs(request, JobFilter(phase=Phase.RUNNING, sort="ends"))
    return lambda: [job for job in sort_jobs(running, JobFilter(sort="ends")) if job.ends_in is not None][:MAX_SOON]


async def _load_latest(request: PageRequest) -> Compute:
    found, now = request.service.decisions(request.principal, limit=MAX_LATEST), request.service.now()
    return lambda: SimpleNamespace(decisions=found, now=now)


async def _load_jobs(request: PageRequest) -> Compute:
    filter_ = JobFilter.read(request.query)
    summary = request.service.summary(request.principal)
    make = partial(JobList.paginate, filter_, phases=summary.jobs, now=summary.at)
    if filter_.sort == "phase" and not filter_.is_descending:
        jobs, total = _by_phase(request, filter_, summary.jobs)
        return partial(make, jobs, total, is_page=True)
    found = await _all_jobs(request, filter_)
    return lambda: make(sort_jobs(found, filter_), len(found))


def _by_phase(request: PageRequest, filter_: JobFilter, phases: Mapping[Phase, int]) -> tuple[list[JobView], int]:
    """One page in the default order, running jobs first, without loading the other pages."""
    start, found, total = (filter_.page - 1) * PER_PAGE, list[JobView](), 0
    for group in _GROUPS:
        wanted = [phase for phase in group if phases[phase] and (not filter_.phase or phase == filter_.phase)]
        number = sum(phases[phase] for phase in wanted)
        is_on_other_page = total + number <= start or len(found) == PER_PAGE
        if wanted and not (is_on_other_page and filter_.is_by_phase_only):
            page = request.service.jobs(
                request.principal,
                phases=wanted,
                user=filter_.user,
                contains=filter_.contains,
                offset=max(0, start - total),
                limit=PER_PAGE - len(found),
            )
            found += page.jobs
            number = page.total
        total += number
    return found, total


async def _all_jobs(request: PageRequest, filter_: JobFilter) -> list[JobView]:
    """All matching jobs, loaded in chunks so that other requests are served in between."""
    found: list[JobView] = []
    while True:
        page = request.service.jobs(
            request.principal,
            phases=filter_.phases,
            user=filter_.user,
            contains=filter_.contains,
            offset=len(found),
            limit=_CHUNK,
        )
        found += page.jobs
        if not page.jobs or len(found) >= page.total:
            return found
        await asyncio.sleep(0)


async def _load_head(request: PageRequest) -> Compute:
    job, now = request.service.job(request.principal, request.job), request.service.now()
    why = request.service.why(request.principal, request.job)
    actions = job_actions(job, request.principal)
    return lambda: SimpleNamespace(job=job, why=why, now=now, actions=actions)


async def _load_curves(request: PageRequest) -> Compute:
    job, now = request.service.job(request.principal, request.job), request.service.now()
    measured = await request.service.measurements(request.principal, request.job)
    spans = request.service.timeline(request.principal, job.submitted_at, now, job.id)
    devices = request.service.devices(request.principal)
    return partial(job_curves, job, measured, spans, devices, now, request.zone)


async def _load_story(request: PageRequest) -> Compute:
    history, now = request.service.story(request.principal, request.job), request.service.now()
    return lambda: SimpleNamespace(events=history[::-1], now=now)


async def _load_log(request: PageRequest) -> Compute:
    """Tail of a job's log, from the first complete line."""
    chunk = request.service.log(request.principal, request.job, -LOG_TAIL_BYTES)
    text = chunk.text if chunk.start == 0 else chunk.text.partition("\n")[2]
    return lambda: SimpleNamespace(text=text, is_tail=chunk.start > 0, is_over=chunk.is_over)


async def _load_sweeps(request: PageRequest) -> Compute:
    found, now = request.service.sweeps(request.principal), request.service.now()
    return lambda: SimpleNamespace(sweeps=found[:MAX_SWEEPS], num_all=len(found), now=now)


async def _load_results(request: PageRequest) -> Compute:
    metric, mode = request.query.get("metric", "")[:100], request.query.get("mode", "")
    view = request.service.results(request.principal, request.job, metric, mode)
    measured = {
        row.job: await request.service.measurements(request.principal, row.job, most=MAX_CURVE_POINTS)
        for row in drawn_rows(view)
    }
    return partial(draw_results, view, measured)


async def _load_policy(request: PageRequest) -> Compute:
    policy = request.service.policy
    actions = policy_action(policy, request.principal)
    fault = request.service.policy_fault(request.principal)
    return lambda: SimpleNamespace(text=policy, fault=fault, actions=actions)


async def _load_decisions(request: PageRequest) -> Compute:
    text = request.query.get("before", "")
    before = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None
    found = request.service.decisions(request.principal, before=before, limit=3 * DECISIONS_PER_PAGE)
    now = request.service.now()
    has_more = len(found) > DECISIONS_PER_PAGE
    return lambda: SimpleNamespace(
        plans=plan_summaries(found, DECISIONS_PER_PAGE), before=before, has_more=has_more, now=now
    )


async def _load_compare(request: PageRequest) -> Compute:
    def compute() -> SimpleNamespace:
        listed = request.reports.listed(request.principal)
        key = request.query.get("report") or (listed[0].key if listed else "")
        name, found = request.reports.get(request.principal, key) if key else ("", None)
        return SimpleNamespace(listed=listed, key=key, name=name, found=found)

    return compute


async def _load_federations(request: PageRequest) -> Compute:
    def compute() -> SimpleNamespace:
        listed = request.federations.listed()
        name = request.query.get("name") or (listed[0] if listed else "")
        return SimpleNamespace(listed=listed, name=name, view=request.federations.get(name) if name else None)

    return compute


PAGES = (
    Page(
        "cluster",
        "Cluster",
        "/cluster",
        {
            "figures": _load_figures,
            "timeline": _load_timeline,
            "nodes": _load_nodes,
            "soon": _load_soon,
            "latest": _load_latest,
        },
    ),
    Page("jobs", "Jobs", "/jobs", {"jobs": _load_jobs}),
    Page(
        "job",
        "Job",
        "/jobs/{job}",
        {"head": _load_head, "curves": _load_curves, "story": _load_story, "log": _load_log},
    ),
    Page("sweeps", "Results", "/results", {"sweeps": _load_sweeps}),
    Page("results", "Results", "/results/{job}", {"results": _load_results}),
    Page("decisions", "Decisions", "/decisions", {"policy": _load_policy, "decisions": _load_decisions}),
    Page("compare", "Compare", "/compare", {"compare": _load_compare}),
    Page("federations", "Federations", "/federations", {"federations": _load_federations}),
)
