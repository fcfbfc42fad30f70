"""HTTP API, version 1: routes that translate between JSON and the service facade."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi import Path as InPath
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter
from starlette.responses import Response

from carpool.core.model import Phase
from carpool.jobs.job_file import ListedJob
from carpool.service.auth import Forbidden
from carpool.service.http.auth_middleware import Caller
from carpool.service.http.deps import ApiContext, CallerDep, ContextDep, PrincipalDep, ServiceDep
from carpool.service.http.metrics import MEDIA_TYPE
from carpool.service.http.problems import RequestRejected, responses
from carpool.service.http.schemas import (
    Accepted,
    CallerInfo,
    DeviceLimits,
    Explanation,
    Health,
    PolicyRequest,
    PolicyState,
    Submission,
    WeightUpdate,
)
from carpool.service.http.submission import read_submission
from carpool.service.queries.views import (
    DecisionView,
    DeviceView,
    JobPage,
    JobView,
    LogChunk,
    MeasurementView,
    NodeView,
    SpanView,
    StoryEventView,
    SummaryView,
)

bearer = HTTPBearer(auto_error=False, description="A token, made with `carpool token add NAME`.")

open_router = APIRouter(prefix="/v1", tags=["health"])
COMMON_RESPONSES = responses(400, 401, 403, 421, 422, 429, 500)
router = APIRouter(prefix="/v1", dependencies=[Depends(bearer)], responses=COMMON_RESPONSES)
metrics_router = APIRouter(
    dependencies=[Depends(bearer)], responses=COMMON_RESPONSES
)  # where Prometheus looks by itself

JobName = Annotated[str, InPath(description="A job's name.", max_length=120, examples=["mlp"])]
_ONE = responses(404)
_CHANGE = responses(404, 409, 408, 413, 503)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def json_response(kind: Any, value: Any, status: int = 200) -> Response:
    """A view as JSON, written in one go."""
    return Response(_adapter(kind).dump_json(value), status, media_type="application/json")


async def _jobs_of(body: Submission, desk: ApiContext, visitor: Caller) -> tuple[ListedJob, ...]:
    """The jobs that were sent; in a thread, since files are looked at."""
    data = body.model_dump(exclude_unset=True, exclude={"folder"})
    return await asyncio.to_thread(read_submission, data, Path(body.folder), desk.roots_for(visitor), desk.limits)


# ------------------------------------------------------------------------------------------------------------- wishes
@router.post("/jobs", status_code=201, response_model=Accepted, responses=responses(408, 409, 413, 503), tags=["jobs"])
async def submit(
    body: Submission,
    desk: ContextDep,
    visitor: CallerDep,
    key: Annotated[
        str,
        Header(
            alias="Idempotency-Key", max_length=200, pattern=r"^[!-~]*$", description="The same key, the same wish."
        ),
    ] = "",
) -> Response:
    """Submit jobs, all or none; the answer comes when they can no longer be lost."""
    visitor.person.check_submits()
    jobs = await _jobs_of(body, desk, visitor)
    names = await desk.clerk.submit(visitor.person, jobs, key)
    return _named(names, 201)


@router.post("/plan", response_model=dict[str, Any], responses=responses(408, 413, 503), tags=["jobs"])
async def plan(body: Submission, desk: ContextDep, visitor: CallerDep) -> Response:
    """Say what would happen to jobs, and when, without submitting them."""
    visitor.person.check_submits()
    if desk.planner is None:
        raise RequestRejected(503, "this daemon cannot foresee")
    jobs = await _jobs_of(body, desk, visitor)
    return json_response(dict[str, Any], await desk.planner.foresee(visitor.person, jobs))


@router.post("/jobs/{job}/cancel", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def cancel(job: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Withdraw a job."""
    await clerk.cancel(who, job)
    return json_response(JobView, clerk.job(who, job))


@router.post("/jobs/{job}/pause", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def pause(job: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Take a job off its devices until it is resumed."""
    await clerk.pause(who, job)
    return json_response(JobView, clerk.job(who, job))


@router.post("/jobs/{job}/resume", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def resume(job: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Put a paused job back into the queue."""
    await clerk.resume(who, job)
    return json_response(JobView, clerk.job(who, job))


@router.post("/arrays/{array}/cancel", response_model=Accepted, responses=_CHANGE, tags=["jobs"])
async def cancel_array(array: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Withdraw all jobs of a sweep that are not over; their names."""
    return _named(await clerk.wish_array(who, array, "cancel"))


@router.post("/arrays/{array}/pause", response_model=Accepted, responses=_CHANGE, tags=["jobs"])
async def pause_array(array: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Take all jobs of a sweep off their devices; the names of those that waited or ran."""
    return _named(await clerk.wish_array(who, array, "pause"))


@router.post("/arrays/{array}/resume", response_model=Accepted, responses=_CHANGE, tags=["jobs"])
async def resume_array(array: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Put the paused jobs of a sweep back into the queue; their names."""
    return _named(await clerk.wish_array(who, array, "resume"))


def _named(jobs: Sequence[str], status: int = 200) -> Response:
    return json_response(Accepted, Accepted(jobs=[str(name) for name in jobs]), status)


@router.put("/jobs/{job}/weight", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def reweigh(job: JobName, body: WeightUpdate, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Let a job count more or less from now on."""
    await clerk.reweigh(who, job, body.weight)
    return json_response(JobView, clerk.job(who, job))


@router.put("/jobs/{job}/limits", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def limit(job: JobName, body: DeviceLimits, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Let a job hold another number of devices from now on."""
    await clerk.limit(who, job, body.min_devices, body.max_devices)
    return json_response(JobView, clerk.job(who, job))


@router.get("/policy", response_model=PolicyState, tags=["daemon"])
async def policy(clerk: ServiceDep, who: PrincipalDep) -> Response:
    """The policy that decides."""
    return json_response(PolicyState, PolicyState(policy=clerk.policy, fault=clerk.policy_fault(who)))


@router.put("/policy", response_model=PolicyState, responses=responses(408, 413, 503), tags=["daemon"])
async def change_policy(body: PolicyRequest, desk: ContextDep, visitor: CallerDep) -> Response:
    """Let another policy decide from now on; for admins."""
    visitor.person.check_governs()
    if (roots := desk.roots_for(visitor)) is not None:
        roots.check_policy(body.policy)
    await desk.clerk.change_policy(visitor.person, body.policy)
    return json_response(PolicyState, PolicyState(policy=desk.clerk.policy, fault=""))


# --------------------------------------------------------------------------------------------------------------- jobs
@router.get("/jobs", response_model=JobPage, tags=["jobs"])
async def jobs(
    clerk: ServiceDep,
    who: PrincipalDep,
    phase: Annotated[list[Phase] | None, Query(description="Only jobs in one of these.")] = None,
    user: Annotated[str, Query(max_length=100, description="Only this person's.")] = "",
    contains: Annotated[str, Query(max_length=100, description="Only names with this in them.")] = "",
    newest_first: Annotated[bool, Query(description="Or in order of submission.")] = True,
    offset: Annotated[int, Query(ge=0, le=1 << 31, description="How many to leave out.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many to tell.")] = 100,
) -> Response:
    """Jobs, as far as they are yours to see."""
    found = clerk.jobs(
        who,
        phases=frozenset(phase or ()),
        user=user,
        contains=contains,
        newest_first=newest_first,
        offset=offset,
        limit=limit,
    )
    return json_response(JobPage, found)


@router.get("/jobs/{job}", response_model=JobView, responses=_ONE, tags=["jobs"])
async def job(job: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """One job."""
    return json_response(JobView, clerk.job(who, job))


@router.get("/jobs/{job}/story", response_model=list[StoryEventView], responses=_ONE, tags=["jobs"])
async def story(job: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """What happened to a job, in words."""
    return json_response(list[StoryEventView], clerk.story(who, job))


@router.get("/jobs/{job}/why", response_model=Explanation, responses=_ONE, tags=["jobs"])
async def why(job: JobName, clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Why a job waits, or holds what it holds."""
    return json_response(Explanation, Explanation(job=job, why=clerk.why(who, job)))


@router.get("/jobs/{job}/measurements", response_model=list[MeasurementView], responses=_ONE, tags=["jobs"])
async def measurements(
    job: JobName,
    clerk: ServiceDep,
    who: PrincipalDep,
    most: Annotated[int, Query(ge=1, le=10_000, description="How many points at most.")] = 2000,
) -> Response:
    """A job's curve: loss, rate and what it measured of itself."""
    return json_response(list[MeasurementView], await clerk.measurements(who, job, most=most))


@router.get("/jobs/{job}/log", response_model=LogChunk, responses=_ONE, tags=["jobs"])
async def log(
    job: JobName,
    clerk: ServiceDep,
    who: PrincipalDep,
    start: Annotated[int, Query(ge=-(1 << 53), le=1 << 53, description="First byte; below 0 from the end.")] = 0,
    most: Annotated[int, Query(ge=1024, le=1 << 18, description="Bytes at most.")] = 1 << 18,
) -> Response:
    """A stretch of a job's log."""
    return json_response(LogChunk, clerk.log(who, job, start, most=most))


# ----------------------------------------------------------------------------------------------------------- the rest
@router.get("/me", response_model=CallerInfo, tags=["daemon"])
async def me(who: PrincipalDep) -> Response:
    """Who you are here, and what you may do."""
    return json_response(CallerInfo, CallerInfo(name=who.name, role=who.role))


@router.get("/summary", response_model=SummaryView, tags=["daemon"])
async def summary(clerk: ServiceDep, who: PrincipalDep) -> Response:
    """The whole in a few figures."""
    return json_response(SummaryView, clerk.summary(who))


@router.get("/nodes", response_model=list[NodeView], tags=["daemon"])
async def nodes(clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Every machine with its devices."""
    return json_response(list[NodeView], clerk.nodes(who))


@router.get("/devices", response_model=list[DeviceView], tags=["daemon"])
async def devices(clerk: ServiceDep, who: PrincipalDep) -> Response:
    """Every device and who holds it."""
    return json_response(list[DeviceView], clerk.devices(who))


@router.get("/timeline", response_model=list[SpanView], tags=["daemon"])
async def timeline(
    clerk: ServiceDep,
    who: PrincipalDep,
    since: Annotated[float, Query(description="Unix time.", ge=0, le=1e12, allow_inf_nan=False)],
    until: Annotated[float, Query(description="Unix time.", ge=0, le=1e12, allow_inf_nan=False)],
) -> Response:
    """Who held which device between two instants."""
    return json_response(list[SpanView], clerk.timeline(who, since, until))


@router.get("/decisions", response_model=list[DecisionView], tags=["daemon"])
async def decisions(
    clerk: ServiceDep,
    who: PrincipalDep,
    before: Annotated[int | None, Query(ge=0, le=1 << 53, description="Only older than this number.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The newest plans that changed something, newest first."""
    return json_response(list[DecisionView], clerk.decisions(who, before=before, limit=limit))


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Figures as Prometheus reads them.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
    tags=["daemon"],
)
async def metrics(desk: ContextDep, who: PrincipalDep) -> Response:
    """What the daemon counts and measures; for admins and readers."""
    if not who.may_see(""):
        raise Forbidden(f"{who.name!r} has the role {who.role}; figures of everybody take one that sees everything.")
    return Response(desk.meters.text(), media_type=MEDIA_TYPE)


# -------------------------------------------------------------------------------------------------------------- health
@open_router.get("/health/live", response_model=Health)
async def live() -> Response:
    """Whether the daemon answers at all."""
    return json_response(Health, Health(status="ok"))


@open_router.get("/health/ready", response_model=Health, responses={503: {"model": Health, "description": "Not yet"}})
async def ready(desk: ContextDep) -> Response:
    """Whether it takes jobs."""
    is_ready = desk.is_ready()
    return json_response(Health, Health(status="ok" if is_ready else "starting"), 200 if is_ready else 503)
