"""HTTP API: routes, problem responses, streams, metrics and the login page."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.jobs.job_keys import KEYS
from carpool.runtime.executor.job_folder import JobFolder
from carpool.service.daemon.group_commit import ReadOnly
from carpool.service.http.problems import problem_of_error
from carpool.service.http.schemas import JobTable
from tests.support.http_rig import BASE, HttpRig, open_http


def run_scenario(folder: Path, scenario: Callable[[HttpRig], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with open_http(folder, **options) as rig:
            await scenario(rig)

    asyncio.run(run())


def test_submit_show_pause_resume_and_cancel_a_job(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        ada = rig["ada"]
        made = await ada.post("/v1/jobs", json=rig.body("a", "b"))
        assert (made.status_code, made.json()) == (201, {"jobs": ["a", "b"]})
        shown = (await ada.get("/v1/jobs/a")).json()
        assert (shown["user"], shown["phase"], shown["what"]) == ("ada", "running", "train.py:main")
        assert [each["name"] for each in shown["holds"]] == ["cpu:0"]
        for action, phase in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
            changed = await ada.post(f"/v1/jobs/a/{action}")
            assert (changed.status_code, changed.json()["phase"]) == (200, phase)
        again = await ada.post("/v1/jobs/a/cancel")
        assert again.status_code == 409
        assert "is cancelled" in again.json()["detail"]

    run_scenario(tmp_path, scenario)


def test_change_weight_limits_and_policy(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        ada = rig["ada"]
        await ada.post("/v1/jobs", json=rig.body("a", max_devices=2))
        assert (await ada.put("/v1/jobs/a/weight", json={"weight": 2.5})).json()["weight"] == 2.5
        limited = (await ada.put("/v1/jobs/a/limits", json={"min_devices": 1, "max_devices": 1})).json()
        assert (limited["min_devices"], limited["max_devices"]) == (1, 1)
        refused = [
            await ada.put("/v1/jobs/a/weight", json={"weight": 0}),
            await ada.put("/v1/jobs/a/limits", json={"min_devices": 3, "max_devices": 9}),
            await ada.put("/v1/jobs/a/limits", json={"min_devices": 2, "max_devices": 1}),
            await rig["root"].put("/v1/policy", json={"policy": "las:speed=2"}),
            await rig["root"].put("/v1/policy", json={"policy": "/etc/mine.py:Policy"}),
        ]
        assert [each.status_code for each in refused] == [422] * 5
        assert (await rig["ben"].put("/v1/jobs/a/weight", json={"weight": 2})).status_code == 404
        assert (await ada.put("/v1/policy", json={"policy": "las"})).status_code == 403
        assert (await rig["root"].put("/v1/policy", json={"policy": "las"})).json() == {"policy": "las", "fault": ""}
        assert (await ada.get("/v1/policy")).json() == {"policy": "las", "fault": ""}
        await ada.post("/v1/jobs/a/cancel")
        assert (await ada.put("/v1/jobs/a/weight", json={"weight": 2})).status_code == 409

    run_scenario(tmp_path, scenario)


MINE = """
from dataclasses import dataclass
from carpool.policies.baselines.nonpreemptive import Fifo


@dataclass(frozen=True)
class Mine(Fifo):
    bearable: int = 0

    def plan(self, view):
        if len(view.jobs) > self.bearable:
            raise LookupError(f"too many, such as {list(view.jobs)[-1]}")
        return super().plan(view)


@dataclass(frozen=True)
class Hasty(Fifo):
    cadence = 60.0
"""


def test_a_failing_policy_is_refused_at_first_and_replaced_later(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        ada, root = rig["ada"], rig["root"]
        mine = rig.folder / "mine.py"
        mine.write_text(MINE, encoding="utf-8")
        await ada.post("/v1/jobs", json=rig.body("a"))
        for name, problem in (("Mine", "too many, such as a (mine.py, line 12)"), ("Hasty", "cadence is 60.0")):
            refused = await root.put("/v1/policy", json={"policy": f"{mine}:{name}"})
            assert refused.status_code == 422
            assert problem in refused.json()["detail"]
        assert (await ada.get("/v1/policy")).json() == {"policy": "fifo", "fault": ""}
        before = (await ada.get("/v1/jobs/a")).json()
        await root.put("/v1/policy", json={"policy": f"{mine}:Mine:bearable=1"})
        made = await rig["ben"].post("/v1/jobs", json=rig.body("secret"))
        assert (made.status_code, made.json()) == (201, {"jobs": ["secret"]})
        now = (await root.get("/v1/policy")).json()
        fault = now["fault"]
        assert now["policy"] == "fifo:bypass=true"
        assert "LookupError: too many, such as secret (mine.py, line 12)" in fault
        assert (await root.get("/v1/summary")).json()["policy_fault"] == fault
        assert (await root.get("/v1/jobs/a/why")).json()["why"].endswith(fault)
        redacted = (await ada.get("/v1/policy")).json()["fault"]
        assert redacted
        assert "secret" not in redacted
        assert (await ada.get("/v1/jobs/a")).json()["holds"] == before["holds"]
        assert (await rig["ben"].get("/v1/jobs/secret")).json()["phase"] == "running"

    run_scenario(tmp_path, scenario)


def test_lists_are_filtered_and_paged(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        await rig["ada"].post("/v1/jobs", json=rig.body(*"abcd"))
        await rig["ben"].post("/v1/jobs", json=rig.body("e"))

        async def names(who: str, query: str) -> tuple[list[str], int]:
            page = (await rig[who].get(f"/v1/jobs?{query}")).json()
            return [job["id"] for job in page["jobs"]], page["total"]

        assert await names("ada", "") == (["d", "c", "b", "a"], 4)
        assert await names("screen", "newest_first=false&limit=2&offset=3") == (["d", "e"], 5)
        assert await names("screen", "user=ben") == (["e"], 1)
        assert await names("screen", "contains=c") == (["c"], 1)
        assert await names("screen", "phase=running&phase=paused&newest_first=false") == (["a", "b"], 2)

    run_scenario(tmp_path, scenario)


def test_queries(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        ada = rig["ada"]
        await ada.post("/v1/jobs", json=rig.body("a", "b", "c"))
        folder = JobFolder(tmp_path / "state", "a").path
        folder.mkdir(parents=True)
        (folder / "log").write_text("one\ntwo\n", encoding="utf-8")
        (folder / "metrics.jsonl").write_text('{"at_s": 1.0, "step": 1, "loss": NaN}\n', encoding="utf-8")
        got = {path: (await ada.get(f"/v1/{path}")).json() for path in (
            "me", "summary", "nodes", "devices", "decisions", "timeline?since=0&until=2000000", "jobs/a/story",
            "jobs/c/why", "jobs/a/measurements", "jobs/a/log?start=-4&most=1024", "health/live", "health/ready",
        )}  # fmt: skip
        assert got["me"] == {"name": "ada", "role": "user"}
        assert got["summary"]["jobs"]["running"] == 2
        (node,) = got["nodes"]
        assert (node["name"], node["is_lost"], node["devices"], node["held"]) == ("n0", False, 2, 2.0)
        assert (node["kinds"], node["outsiders"]) == ({"cpu": 2}, [])
        assert node["supplies"] == node["taken"] == {"cpus": 0, "ram_bytes": 0, "disk_bytes": 0}
        assert [each["residents"][0]["job"] for each in got["devices"]] == ["a", "b"]
        assert got["decisions"][0]["changes"][0]["job"] == "a"
        assert [span["job"] for span in got["timeline?since=0&until=2000000"]] == ["a", "b"]
        assert "submitted" in got["jobs/a/story"][0]["words"]
        assert got["jobs/c/why"]["why"]
        assert got["jobs/a/measurements"] == [
            {"at": 1_000_001.0, "step": 1, "loss": None, "steps_per_s": None, "metrics": {}}
        ]
        assert got["jobs/a/log?start=-4&most=1024"] == {"text": "two\n", "start": 4, "next": 8, "is_over": False}
        assert got["health/live"] == got["health/ready"] == {"status": "ok"}

    run_scenario(tmp_path, scenario)


def test_requests_with_the_same_idempotency_key_submit_once(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        key = {"Idempotency-Key": "k1"}
        answers = [await rig["ada"].post("/v1/jobs", json=rig.body("a"), headers=key) for _ in range(2)]
        assert [each.json() for each in answers] == [{"jobs": ["a"]}] * 2
        other = await rig["ada"].post("/v1/jobs", json=rig.body("b"), headers=key)
        assert other.status_code == 422
        assert "'k1'" in other.json()["detail"]

    run_scenario(tmp_path, scenario)


def test_errors_are_problem_responses(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        ada = rig["ada"]
        unknown_key = await ada.post("/v1/jobs", json=rig.body("a", wieght=2.0))
        wrong_type = await ada.post("/v1/jobs", json=rig.body("a", weight="heavy", environment={"KEY": ["secret"]}))
        too_wide = await ada.post("/v1/jobs", json=rig.body("a", devices=9))
        answers = {
            422: [unknown_key, wrong_type, too_wide, await ada.post("/v1/jobs", content=b"{")],
            404: [await ada.get("/v1/jobs/none"), await ada.get("/v2/none")],
            405: [await ada.delete("/v1/jobs")],
            403: [await rig["screen"].post("/v1/jobs", json=rig.body("a"))],
            401: [await rig["nobody"].get("/v1/jobs")],
        }
        for status, got in answers.items():
            for each in got:
                assert (each.status_code, each.headers["content-type"]) == (status, "application/problem+json")
                assert each.json()["status"] == status
        assert "weight" in unknown_key.json()["way_out"]
        assert "secret" not in wrong_type.text
        assert next(each["where"] for each in wrong_type.json()["errors"]) == "body.job.0.environment.KEY.str"
        assert "9 devices" in too_wide.json()["detail"]
        assert answers[405][0].headers["allow"]
        assert answers[401][0].headers["www-authenticate"].startswith("Bearer")
        assert (await ada.get("/v1/jobs")).json()["total"] == 0

    run_scenario(tmp_path, scenario)


def events_of(text: str) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((int(lines["id"]), json.loads(lines["data"])))
    return found


def test_events_are_streamed_and_resumed(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        await rig["ada"].post("/v1/jobs", json=rig.body("a"))
        await rig["ben"].post("/v1/jobs", json=rig.body("b"))
        first = await rig["ada"].get("/v1/events?after=0")
        assert first.headers["content-type"].startswith("text/event-stream")
        received = events_of(first.text)
        assert [(event["kind"], event["job"]) for _, event in received[:3]] == [
            ("submitted", "a"),
            ("decision", ""),
            ("phase", "a"),
        ]
        assert all(event["job"] in ("", "a") for _, event in received)
        again = await rig["ada"].get("/v1/events?after=99", headers={"Last-Event-ID": str(received[1][0])})
        assert events_of(again.text) == received[2:]

    run_scenario(tmp_path, scenario)


def test_a_log_is_followed_until_the_job_ends(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        await rig["ada"].post("/v1/jobs", json=rig.body("a"))
        folder = JobFolder(tmp_path / "state", "a").path
        folder.mkdir(parents=True)
        (folder / "log").write_text("one\ntwo\n", encoding="utf-8")
        await rig.backend.settle(1000.0)
        followed = await rig["ada"].get("/v1/jobs/a/log/follow?start=4")
        assert followed.text == "two\n"
        assert (await rig["ben"].get("/v1/jobs/a/log/follow")).status_code == 404

    run_scenario(tmp_path, scenario)


def test_the_owner_needs_no_token_on_the_socket(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        assert (await rig["owner"].get("/v1/me")).json() == {"name": "owner", "role": "admin"}
        made = await rig["owner"].post("/v1/jobs", json={**rig.body("a"), "folder": str(tmp_path)})
        assert made.status_code == 422  # train.py is missing there, but the folder is allowed
        assert "train.py" in made.json()["detail"]

    run_scenario(tmp_path, scenario)


def test_job_tables_have_the_keys_of_job_files() -> None:
    assert list(JobTable.model_fields) == list(KEYS)


def test_metrics_need_a_role_that_sees_all_jobs(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        await rig["ada"].post("/v1/jobs", json=rig.body("a", "b", "c"))
        await rig["ada"].get("/v1/jobs/a")
        text = (await rig["screen"].get("/metrics")).text
        for line in (
            'carpool_jobs{phase="running"} 2.0',
            'carpool_jobs{phase="waiting"} 1.0',
            "carpool_devices_held 2.0",
            "carpool_disk_full 0.0",
            "carpool_decisions_total 1.0",
            'carpool_http_seconds_count{method="POST",route="/v1/jobs",status="201"} 1.0',
            'carpool_http_seconds_count{method="GET",route="/v1/jobs/{job}",status="200"} 1.0',
        ):
            assert line in text.splitlines(), line
        assert (await rig["ada"].get("/metrics")).status_code == 403

    run_scenario(tmp_path, scenario)


def test_on_a_full_disk_nothing_is_accepted_and_the_daemon_is_not_ready(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        rig.backend.loop._commits.disk_full = "the disk is full"
        with pytest.raises(ReadOnly):
            await rig.backend.loop.submit([])
        ready = await rig["ada"].get("/v1/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "disk full")
        assert problem_of_error(ReadOnly("full")).status_code == 507
        rig.backend.loop._commits.disk_full = ""
        assert (await rig["ada"].get("/v1/health/ready")).status_code == 200

    run_scenario(tmp_path, scenario)


def test_an_unknown_page_is_answered_with_a_page_and_the_api_with_a_problem(
    tmp_path: Path,
) -> None:
    async def scenario(rig: HttpRig) -> None:
        accept = {"Accept": "text/html"}
        page = await rig["ada"].get("/nowhere<", headers=accept)
        problem = await rig["ada"].get("/v1/nowhere", headers=accept)
        assert [found.status_code for found in (page, problem)] == [404, 404]
        assert "<h1>Not found</h1>" in page.text
        assert "nowhere<" not in page.text
        assert problem.json()["status"] == 404

    run_scenario(tmp_path, scenario)


def test_sign_in_and_out_with_a_token(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        nobody, ours = rig["nobody"], {"Origin": BASE}
        token = rig["ada"].headers["Authorization"].removeprefix("Bearer ")
        form = await nobody.get("/sign-in?next=/jobs%22%3E")
        assert '<link rel="stylesheet" href="/dashboard/dashboard.css">' in form.text
        assert 'value="/jobs&quot;&gt;"' in form.text
        wrong = await nobody.post("/sign-in", data={"token": "wrong"}, headers=ours)
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        forged = await nobody.post("/sign-in", data={"token": token}, headers={"Origin": "http://evil.example"})
        assert (forged.status_code, "set-cookie" in forged.headers) == (403, False)
        elsewhere = await nobody.post("/sign-in", data={"token": token, "next": "//evil.example"}, headers=ours)
        assert elsewhere.headers["location"] == "/"
        right = await nobody.post("/sign-in", data={"token": token, "next": "/jobs"}, headers=ours)
        assert (right.status_code, right.headers["location"]) == (303, "/jobs")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(right.headers["set-cookie"].split("; "))
        assert (await nobody.get("/v1/me")).json()["name"] == "ada"  # the client keeps cookies
        left = await nobody.post("/sign-out", headers=ours)
        assert (left.status_code, (await nobody.get("/v1/me")).status_code) == (303, 401)

    run_scenario(tmp_path, scenario)
