"""Fuzzing with schemathesis: no route fails with 5xx, and every response matches the OpenAPI document."""

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
from tests.support.http_rig import LAX_LIMITS, Served, open_http, serve_http


class EchoPlanner:
    async def plan(self, principal: Principal, jobs: Sequence[ListedJob]) -> Json:
        return {"schema": 1, "jobs": [str(spec.id) for spec, _ in jobs]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_http(
        tmp_path_factory.mktemp("served"), planner=EchoPlanner(), limits=replace(LAX_LIMITS, stream_s=0.02)
    ) as served:
        ada = served.rig["ada"]
        served.do(ada.post("/v1/jobs", json=served.rig.body("mlp", "b", "c")))
        yield served


def failures(served: Served, who: str) -> list[str]:
    """Run schemathesis: examples, edge cases, random requests, and chains that reuse values such as job names."""
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "headers": {"Authorization": f"Bearer {served.tokens[who]}"},
            "generation": {"max-examples": 4, "database": "none"},
            "phases": {"stateful": {"max-steps": 4, "generation": {"max-examples": 12}}},
            # A schema cannot tell whether a job's files exist.
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


def test_every_response_matches_the_schema(served: Served) -> None:
    assert failures(served, "ada") == []


def described(folder: Path) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with open_http(folder) as rig:
            found: dict[str, Any] = (await rig["nobody"].get("/v1/openapi.json")).json()
            return found

    return asyncio.run(ask())


def test_every_route_has_a_description_and_security(tmp_path: Path) -> None:
    for path, methods in described(tmp_path)["paths"].items():
        for method, about in methods.items():
            assert about["description"], (method, path)
            if "/health/" not in path:
                assert "401" in about["responses"], (method, path)
                assert about["security"] == [{"HTTPBearer": []}], (method, path)
