"""The routes of the API that go on telling: events, and logs that are followed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import StreamingResponse

from carpool.service.api import USUAL, Name, bearer
from carpool.service.desk import Who
from carpool.service.problems import responses
from carpool.service.streams import Streams

router = APIRouter(prefix="/v1", dependencies=[Depends(bearer)], responses=USUAL)


async def _streams(request: Request) -> Streams:
    streams = request.app.state.streams
    assert isinstance(streams, Streams)
    return streams


TheStreams = Annotated[Streams, Depends(_streams)]
_EVENT = {
    "type": "object",
    "description": "One event: its number, its kind, and as data a JSON object with number, at, kind, job and data.",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["id", "event", "data"],
    "example": {
        "id": "7",
        "event": "phase",
        "data": '{"number": 7, "at": 1.7e9, "kind": "phase", "job": "mlp", "data": {"phase": "running"}}',
    },
}


@router.get(
    "/events",
    tags=["daemon"],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events: submitted, phase, progress, decision, told, evaluated, device, policy, "
            "late, missed. Comments keep a silent stream alive; it ends after an hour, and clients come back.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        }
    },
)
async def events(
    streams: TheStreams,
    who: Who,
    after: Annotated[int | None, Query(ge=0, le=1 << 53, description="The number of the last event known.")] = None,
    last: Annotated[
        str, Header(alias="Last-Event-ID", max_length=20, pattern=r"^[0-9]*$", description="The same; it counts more.")
    ] = "",
) -> StreamingResponse:
    """What happens, as it happens."""
    return streams.events(who, int(last) if last else after)


@router.get(
    "/jobs/{job}/log/follow",
    tags=["jobs"],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The log as text, until the job is over.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **responses(404),
    },
)
async def follow(
    job: Name,
    streams: TheStreams,
    who: Who,
    start: Annotated[int, Query(ge=-(1 << 53), le=1 << 53, description="First byte; below 0 from the end.")] = 0,
) -> StreamingResponse:
    """A job's log as it is written."""
    return streams.log(who, job, start)
