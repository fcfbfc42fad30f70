"""HTTP API, version 1: routes that translate between JSON and the service facade."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query
from fastapi import Path as InPath
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter
from starlette.responses import Response

from carpool.core.model import Phase
from carpool.jobs.job_file import ListedJob
from carpool.service.auth import Caller, Forbidden
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
    ResultsView,
    SpanView,
    StoryEventView,
    SummaryView,
    SweepView,
)

bearer = HTTPBearer(auto_error=False, description="An access token, created with `carpool token add NAME`.")

COMMON_RESPONSES = responses(400, 401, 403, 421, 422, 429, 500)
open_router = APIRouter(prefix="/v1", tags=["health"])  # no token needed
router = APIRouter(prefix="/v1", dependencies=[Depends(bearer)], responses=COMMON_RESPONSES)
metrics_router = APIRouter(dependencies=[Depends(bearer)], responses=COMMON_RESPONSES)  # Prometheus' default path

JobName = Annotated[str, InPath(description="Name of the job.", max_length=120, examples=["mlp"])]
ArrayName = Annotated[str, InPath(description="Name of the array.", max_length=120, examples=["mlp"])]
NodeName = Annotated[str, InPath(description="Name of the node.", max_length=120, examples=["box1"])]
_QUERY = responses(404)
_CHANGE = responses(404, 409, 408, 413, 503)


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def json_response(schema: Any, value: Any, status: int = 200) -> Response:
    """Serialise a value to JSON without FastAPI's intermediate copy."""
    return Response(_adapter(schema).dump_json(value), status, media_type="application/json")


async def _read_jobs(body: Submission, context: ApiContext, caller: Caller) -> tuple[ListedJob, ...]:
    """Parse a submission in a thread, because it reads files."""
    data = body.model_dump(exclude_unset=True, exclude={"folder"})
    return await asyncio.to_thread(read_submission, data, Path(body.folder), context.roots_for(caller), context.limits)


def _accepted(jobs: Sequence[str], status: int = 200) -> Response:
    return json_response(Accepted, Accepted(jobs=[str(name) for name in jobs]), status)


_SUBMIT = responses(408, 409, 413, 503, 507)


@router.post("/jobs", status_code=201, response_model=Accepted, responses=_SUBMIT, tags=["jobs"])
async def submit(
    body: Submission,
    context: ContextDep,
    caller: CallerDep,
    key: Annotated[
        str,
        Header(
            alias="Idempotency-Key",
            max_length=200,
            pattern=r"^[!-~]*$",
            description="A repeated request with the same key submits nothing and returns the same names.",
        ),
    ] = "",
) -> Response:
    """Submit jobs, all or none; responds once they are durable."""
    caller.principal.check_may_submit()
    jobs = await _read_jobs(body, context, caller)
    return _accepted(await context.service.submit(caller.principal, jobs, key), 201)


@router.post("/plan", response_model=dict[str, Any], responses=responses(408, 413, 503), tags=["jobs"])
async def plan(body: Submission, context: ContextDep, caller: CallerDep) -> Response:
    """Forecast when jobs would start and end, without submitting them."""
    caller.principal.check_may_submit()
    if context.planner is None:
        raise RequestRejected(503, "this daemon cannot forecast jobs")
    jobs = await _read_jobs(body, context, caller)
    return json_response(dict[str, Any], await context.planner.plan(caller.principal, jobs))


@router.post("/jobs/{job}/cancel", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def cancel(job: JobName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Cancel a job."""
    await service.cancel(principal, job)
    return json_response(JobView, service.job(principal, job))


@router.post("/jobs/{job}/pause", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def pause(job: JobName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Preempt a job and keep it out of the queue until it is resumed."""
    await service.pause(principal, job)
    return json_response(JobView, service.job(principal, job))


@router.post("/jobs/{job}/resume", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def resume(job: JobName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Put a paused job back into the queue."""
    await service.resume(principal, job)
    return json_response(JobView, service.job(principal, job))


@router.post("/arrays/{array}/cancel", response_model=Accepted, responses=_CHANGE, tags=["jobs"])
async def cancel_array(array: ArrayName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Cancel all active jobs of an array; returns their names."""
    return _accepted(await service.change_array(principal, array, "cancel"))


@router.post("/arrays/{array}/pause", response_model=Accepted, responses=_CHANGE, tags=["jobs"])
async def pause_array(array: ArrayName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Pause all waiting and running jobs of an array; returns their names."""
    return _accepted(await service.change_array(principal, array, "pause"))


@router.post("/arrays/{array}/resume", response_model=Accepted, responses=_CHANGE, tags=["jobs"])
async def resume_array(array: ArrayName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Resume all paused jobs of an array; returns their names."""
    return _accepted(await service.change_array(principal, array, "resume"))


@router.put("/jobs/{job}/weight", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def set_weight(job: JobName, body: WeightUpdate, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Change a job's weight."""
    await service.set_weight(principal, job, body.weight)
    return json_response(JobView, service.job(principal, job))


@router.put("/jobs/{job}/limits", response_model=JobView, responses=_CHANGE, tags=["jobs"])
async def set_limits(job: JobName, body: DeviceLimits, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Change how many devices a job may hold."""
    await service.set_limits(principal, job, body.min_devices, body.max_devices)
    return json_response(JobView, service.job(principal, job))


@router.get("/policy", response_model=PolicyState, tags=["daemon"])
async def policy(service: ServiceDep, principal: PrincipalDep) -> Response:
    """Return the active policy."""
    return json_response(PolicyState, PolicyState(policy=service.policy, fault=service.policy_fault(principal)))


@router.put("/policy", response_model=PolicyState, responses=responses(408, 413, 503), tags=["daemon"])
async def change_policy(body: PolicyRequest, context: ContextDep, caller: CallerDep) -> Response:
    """Replace the policy; needs the role admin."""
    caller.principal.check_is_admin()
    if (roots := context.roots_for(caller)) is not None:
        roots.check_policy(body.policy)
    await context.service.change_policy(caller.principal, body.policy)
    return json_response(PolicyState, PolicyState(policy=context.service.policy, fault=""))


@router.get("/jobs", response_model=JobPage, tags=["jobs"])
async def jobs(
    service: ServiceDep,
    principal: PrincipalDep,
    phase: Annotated[list[Phase] | None, Query(description="Only jobs in one of these phases.")] = None,
    user: Annotated[str, Query(max_length=100, description="Only jobs of this user.")] = "",
    contains: Annotated[str, Query(max_length=100, description="Only jobs with this in their name.")] = "",
    newest_first: Annotated[bool, Query(description="False: oldest first.")] = True,
    offset: Annotated[int, Query(ge=0, le=1 << 31, description="How many jobs to skip.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many jobs to return.")] = 100,
) -> Response:
    """List the jobs you may see."""
    page = service.jobs(
        principal,
        phases=frozenset(phase or ()),
        user=user,
        contains=contains,
        newest_first=newest_first,
        offset=offset,
        limit=limit,
    )
    return json_response(JobPage, page)


@router.get("/jobs/{job}", response_model=JobView, responses=_QUERY, tags=["jobs"])
async def job(job: JobName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Return one job."""
    return json_response(JobView, service.job(principal, job))


@router.get("/jobs/{job}/story", response_model=list[StoryEventView], responses=_QUERY, tags=["jobs"])
async def story(job: JobName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Return a job's history as text."""
    return json_response(list[StoryEventView], service.story(principal, job))


@router.get("/jobs/{job}/why", response_model=Explanation, responses=_QUERY, tags=["jobs"])
async def why(
    job: JobName,
    service: ServiceDep,
    principal: PrincipalDep,
    verbose: Annotated[bool, Query(description="With the policy's figures, such as prices.")] = False,
) -> Response:
    """Explain why a job waits, or why it holds its devices, and what would change it."""
    return json_response(Explanation, Explanation(job=job, why=service.why(principal, job, verbose=verbose)))


@router.get("/jobs/{job}/measurements", response_model=list[MeasurementView], responses=_QUERY, tags=["jobs"])
async def measurements(
    job: JobName,
    service: ServiceDep,
    principal: PrincipalDep,
    most: Annotated[int, Query(ge=1, le=10_000, description="Maximum number of points.")] = 2000,
) -> Response:
    """Return a job's loss, rate and metrics over time."""
    return json_response(list[MeasurementView], await service.measurements(principal, job, most=most))


@router.get("/jobs/{job}/log", response_model=LogChunk, responses=_QUERY, tags=["jobs"])
async def log(
    job: JobName,
    service: ServiceDep,
    principal: PrincipalDep,
    start: Annotated[int, Query(ge=-(1 << 53), le=1 << 53, description="First byte; negative: from the end.")] = 0,
    most: Annotated[int, Query(ge=1024, le=1 << 18, description="Maximum number of bytes.")] = 1 << 18,
) -> Response:
    """Return a part of a job's log."""
    chunk = await asyncio.to_thread(service.log, principal, job, start, most=most)  # it reads a file
    return json_response(LogChunk, chunk)


@router.get("/sweeps", response_model=list[SweepView], tags=["jobs"])
async def sweeps(service: ServiceDep, principal: PrincipalDep) -> Response:
    """List the sweeps you may see, newest first."""
    return json_response(list[SweepView], service.sweeps(principal))


@router.get("/sweeps/{array}/results", response_model=ResultsView, responses=_QUERY, tags=["jobs"])
async def results(
    array: ArrayName,
    service: ServiceDep,
    principal: PrincipalDep,
    metric: Annotated[str, Query(max_length=100, description="Metric to order by; empty: the sweep's own.")] = "",
    mode: Annotated[Literal["", "max", "min"], Query(description="Whether more or less is better.")] = "",
) -> Response:
    """Return hyper-parameters, state, steps and metrics of a sweep's jobs, best first."""
    return json_response(ResultsView, service.results(principal, array, metric, mode))


@router.get("/me", response_model=CallerInfo, tags=["daemon"])
async def me(principal: PrincipalDep) -> Response:
    """Return your name and role."""
    return json_response(CallerInfo, CallerInfo(name=principal.name, role=principal.role))


@router.get("/summary", response_model=SummaryView, tags=["daemon"])
async def summary(service: ServiceDep, principal: PrincipalDep) -> Response:
    """Return an overview: jobs by phase, devices, policy."""
    return json_response(SummaryView, service.summary(principal))


@router.post("/nodes/{node}/drain", response_model=list[NodeView], responses=_CHANGE, tags=["daemon"])
async def drain(node: NodeName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Release all jobs of a node and schedule none on it until it is undrained."""
    await service.drain(principal, node)
    return json_response(list[NodeView], service.nodes(principal))


@router.post("/nodes/{node}/undrain", response_model=list[NodeView], responses=_CHANGE, tags=["daemon"])
async def undrain(node: NodeName, service: ServiceDep, principal: PrincipalDep) -> Response:
    """Schedule jobs on a drained node again."""
    await service.undrain(principal, node)
    return json_response(list[NodeView], service.nodes(principal))


@router.get("/nodes", response_model=list[NodeView], tags=["daemon"])
async def nodes(service: ServiceDep, principal: PrincipalDep) -> Response:
    """List the nodes with their devices and host resources."""
    return json_response(list[NodeView], service.nodes(principal))


@router.get("/devices", response_model=list[DeviceView], tags=["daemon"])
async def devices(service: ServiceDep, principal: PrincipalDep) -> Response:
    """List the devices with the jobs on them."""
    return json_response(list[DeviceView], service.devices(principal))


@router.get("/timeline", response_model=list[SpanView], tags=["daemon"])
async def timeline(
    service: ServiceDep,
    principal: PrincipalDep,
    since: Annotated[float, Query(description="Unix time.", ge=0, le=1e12, allow_inf_nan=False)],
    until: Annotated[float, Query(description="Unix time.", ge=0, le=1e12, allow_inf_nan=False)],
) -> Response:
    """List which job held which device between two times."""
    return json_response(list[SpanView], service.timeline(principal, since, until))


@router.get("/decisions", response_model=list[DecisionView], tags=["daemon"])
async def decisions(
    service: ServiceDep,
    principal: PrincipalDep,
    before: Annotated[int | None, Query(ge=0, le=1 << 53, description="Only decisions with a smaller number.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many decisions to return.")] = 100,
) -> Response:
    """List the plans that changed an allocation, newest first."""
    return json_response(list[DecisionView], service.decisions(principal, before=before, limit=limit))


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Metrics in Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
    tags=["daemon"],
)
async def metrics(context: ContextDep, principal: PrincipalDep) -> Response:
    """Return Prometheus metrics; needs the role admin or read-only."""
    if not principal.may_see(""):
        raise Forbidden(
            f"{principal.name!r} has the role {principal.role}. Use a token with the role admin or read-only."
        )
    return Response(context.metrics.text(), media_type=MEDIA_TYPE)


@open_router.get("/health/live", response_model=Health)
async def live() -> Response:
    """Liveness: the process responds."""
    return json_response(Health, Health(status="ok"))


@open_router.get("/health/ready", response_model=Health, responses={503: {"model": Health, "description": "Not yet"}})
async def ready(context: ContextDep) -> Response:
    """Readiness: the daemon accepts jobs."""
    if context.service.disk_full:
        return json_response(Health, Health(status="disk full"), 503)
    is_ready = context.is_ready()
    return json_response(Health, Health(status="ok" if is_ready else "starting"), 200 if is_ready else 503)
