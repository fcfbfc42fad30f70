"""Whatever is sent to any route, there is no 5xx, and every answer is as the API's description says."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema

from carpool.backends.job_accounting import Json
from carpool.jobs.job_file import ListedJob
from carpool.service.auth import Principal
from tests.support.http_rig import GENEROUS, Served, open_http, serve_http


class Seer:
    async def foresee(self, who: Principal, jobs: Sequence[ListedJob]) -> Json:
        return {"schema": 1, "jobs": [str(spec.id) for spec, _ in jobs]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_http(
        tmp_path_factory.mktemp("served"), planner=Seer(), limits=replace(GENEROUS, stream_s=0.02)
    ) as served:
        ada = served.reception["ada"]
        served.do(ada.post("/v1/jobs", json=served.reception.body("mlp", "b", "c")))
        yield served


def failures(served: Served, who: str) -> list[str]:
    """What schemathesis finds: examples, the edges of every schema, a few drawn ones, and chains of requests.

    A chain takes what one answer holds, such as the name of a job, to the next request.
    """
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "headers": {"Authorization": f"Bearer {served.tokens[who]}"},
            "generation": {"max-examples": 4, "database": "none"},
            "phases": {"stateful": {"max-steps": 4, "generation": {"max-examples": 12}}},
            # Whether a job's files are there is not for a schema to say.
            "checks": {"positive_data_acceptance": {"enabled": False}},
        }
    )
    found, tried, chained = [], 0, 0
    for event in from_schema(schemathesis.openapi.from_url(f"{served.url}/v1/openapi.json", config=config)).execute():
        if isinstance(event, events.ScenarioFinished):
            chained += event.phase.value == "stateful" and len(event.recorder.checks) > 1
            for case, checks in event.recorder.checks.items():
                tried += 1
                for check in checks:
                    if check.status is Status.FAILURE:
                        assert check.failure_info is not None
                        found.append(f"{event.label}: {check.name}: {check.failure_info.failure} ({case})")
        elif isinstance(event, events.NonFatalError | events.FatalError):
            found.append(str(event))
    assert tried > 300
    assert chained > 3
    return found


def test_no_route_breaks_or_answers_otherwise_than_it_says(served: Served) -> None:
    assert failures(served, "ada") == []


def described(folder: Path) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with open_http(folder) as reception:
            found: dict[str, Any] = (await reception["nobody"].get("/v1/openapi.json")).json()
            return found

    return asyncio.run(ask())


def test_every_route_says_what_it_is_for_and_what_it_takes(tmp_path: Path) -> None:
    for path, methods in described(tmp_path)["paths"].items():
        for method, about in methods.items():
            assert about["description"], (method, path)
            if "/health/" not in path:
                assert "401" in about["responses"], (method, path)
                assert about["security"] == [{"HTTPBearer": []}], (method, path)
