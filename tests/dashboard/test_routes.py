"""Dashboard over HTTP: pages, panels, permissions, actions, escaping and uploads."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from carpool.core.messages import NodeDrained, PolicyChanged
from carpool.core.model import JobId, JobSpec, NodeId, Phase
from carpool.core.topology import Cluster
from carpool.dashboard.actions import token_for
from carpool.dashboard.pages import MAX_NODES, PAGES
from carpool.service.auth import Principal, Role
from carpool.service.http.auth_middleware import HEADERS
from carpool.sim.traces.trace import Arrival

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
ROOT = Principal("root", Role.ADMIN)
WHOLE = ("/cluster", "/jobs", "/jobs/a", "/decisions", "/compare")


def job(name: str, at: float = 0.0, work: float = 1000.0, **fields: Any) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), work=work, **{"user": "ada", **fields}))


def play(open_dashboard: Any, act: Callable[[Any], Awaitable[None]], *jobs: Arrival, **options: Any) -> None:
    async def run() -> None:
        async with open_dashboard(jobs, **options) as dashboard:
            await act(dashboard)

    asyncio.run(run())


async def names(dashboard: Any, path: str) -> list[str]:
    """Jobs on a page of the list."""
    return re.findall(r'data-id="([^"]+)"', (await dashboard.client.get(path)).text)


def form(who: Principal = ROOT, **fields: str) -> dict[str, str]:
    return {"token": token_for(who, b"for tests"), **fields}


def test_every_page_and_panel_responds(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        for page in PAGES:
            path = page.path.replace("{job}", "a")
            whole = await dashboard.client.get(path)
            assert whole.status_code == 200, whole.text
            assert {name: whole.headers[name] for name in HEADERS} == HEADERS
            for panel in page.panels:
                assert f'data-panel="{panel}"' in whole.text
                response = await dashboard.client.get(path, params={"panel": panel})
                assert response.status_code == 200, response.text
                assert "<html" not in response.text
        home = await dashboard.client.get("/")
        assert home.headers["location"] == "/cluster"
        for name in ("dashboard.css", "dashboard.js", "icon.svg"):
            assert (await dashboard.client.get(f"/dashboard/{name}")).status_code == 200
        assert (await dashboard.client.get("/dashboard/routes.py")).status_code == 404
        assert (await dashboard.client.get("/cluster?panel=nonsense")).status_code == 404

    play(open_dashboard, act, job("a", array="a"), job("b", devices=2), job("c", after=(JobId("a"),)))


def test_the_cluster_page_lists_nodes_those_out_of_service_first(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        await dashboard.service._model.loop.apply(NodeDrained(NodeId(MAX_NODES)))
        panel = (await dashboard.client.get("/cluster", params={"panel": "nodes"})).text
        states = re.findall(r'data-id="node [^"]+".*?(drained|idle)</td></tr>', panel)
        assert states == ["drained", *["idle"] * (MAX_NODES - 1)]
        assert "1 more" in panel

    play(open_dashboard, act, cluster=Cluster.build([(MAX_NODES + 1, 2, "V100")]))


def test_pages_of_a_daemon_without_jobs(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        assert "carpool submit" in (await dashboard.client.get("/jobs")).text
        assert "No decisions yet" in (await dashboard.client.get("/decisions")).text
        assert "No sweeps yet" in (await dashboard.client.get("/results")).text
        assert (await dashboard.client.get("/results/none")).status_code == 404
        assert "Nothing to compare yet" in (await dashboard.client.get("/compare")).text
        assert (await dashboard.client.get("/cluster")).status_code == 200

    play(open_dashboard, act)


def test_user_input_is_escaped(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        listed = (await dashboard.client.get("/jobs")).text
        address = re.search(r'data-href="(/jobs/[^"]+)"', listed)
        assert address is not None
        pages = [
            "/cluster",
            "/decisions",
            "/jobs",
            address[1],
            f"/jobs?q={HOSTILE}&user={HOSTILE}",
            f"/cluster?node={HOSTILE}",
            "/results",
            f"/results/{quote(HOSTILE, safe='')}",
        ]
        for path in pages:
            response = await dashboard.client.get(path)
            assert response.status_code == 200, path
            assert "<img" not in response.text
            assert "&lt;img" in response.text or "node=" in path
        assert "<img" not in (await dashboard.client.get(f"/jobs/{HOSTILE}x")).text

    play(open_dashboard, act, job(HOSTILE, user=HOSTILE, model=HOSTILE, array=HOSTILE, params=((HOSTILE, HOSTILE),)))


def test_jobs_of_other_users_are_hidden(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        as_ben = {"x-user": "ben"}
        for path in ("/cluster", "/jobs", "/decisions"):
            response = await dashboard.client.get(path, headers=as_ben)
            assert response.status_code == 200
            assert "secret-plan" not in response.text
        assert "another user" in (await dashboard.client.get("/cluster", headers=as_ben)).text
        for path in ("/jobs/secret-plan", "/jobs/secret-plan?panel=log", "/jobs/nothing"):
            assert (await dashboard.client.get(path, headers=as_ben)).status_code == 404
        assert "secret-plan" in (await dashboard.client.get("/jobs", headers={"x-user": "screen"})).text

    play(open_dashboard, act, job("secret-plan"))


def test_actions_require_permission(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        post, ada = dashboard.client.post, Principal("ada")
        response = await post("/actions/pause", data=form(ada, job="a"), headers={"x-user": "ada"})
        assert (response.status_code, response.headers["location"]) == (303, "/jobs/a")
        assert dashboard.service.job(ada, "a").phase is Phase.PAUSED
        assert "Resume" in (await dashboard.client.get("/jobs/a")).text
        again = await post("/actions/pause", data=form(ada, job="a"), headers={"x-user": "ada"})
        assert again.status_code == 409
        assert (await post("/actions/resume", data=form(job="a"))).status_code == 303
        ben = await post("/actions/cancel", data=form(Principal("ben"), job="a"), headers={"x-user": "ben"})
        assert ben.status_code == 404
        screen = form(Principal("screen", Role.READER), job="a")
        assert (await post("/actions/cancel", data=screen, headers={"x-user": "screen"})).status_code == 403
        assert (await post("/actions/cancel", data=form(job="a"))).status_code == 303
        assert dashboard.service.job(ada, "a").phase is Phase.CANCELLED
        assert "cancelled" in (await dashboard.client.get("/jobs/a?panel=story")).text
        assert (await post("/actions/explode", data=form(job="a"))).status_code == 404

    play(open_dashboard, act, job("a"))


def test_change_a_weight(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        assert 'name="weight"' in (await dashboard.client.get("/jobs/a")).text
        assert (await dashboard.client.post("/actions/weight", data=form(job="a", weight="2.5"))).status_code == 303
        assert (await dashboard.client.post("/actions/weight", data=form(job="a", weight="heavy"))).status_code == 422
        assert dashboard.service.job(ROOT, "a").weight == 2.5

    play(open_dashboard, act, job("a"))


def test_change_device_limits(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        assert 'name="max_devices"' in (await dashboard.client.get("/jobs/a")).text
        fields = form(job="a", min_devices="1", max_devices="2")
        assert (await dashboard.client.post("/actions/limit", data=fields)).status_code == 303
        assert (dashboard.service.job(ROOT, "a").min_devices, dashboard.service.job(ROOT, "a").max_devices) == (1, 2)
        for min_devices, max_devices in (("1", "0"), ("many", "2"), ("2", "1"), ("99", "99")):
            wrong = fields | {"min_devices": min_devices, "max_devices": max_devices}
            assert (await dashboard.client.post("/actions/limit", data=wrong)).status_code == 422, wrong
        forged = {"job": "a", "min_devices": "1", "max_devices": "1"}
        assert (await dashboard.client.post("/actions/limit", data=forged)).status_code == 403
        assert dashboard.service.job(ROOT, "a").max_devices == 2

    play(open_dashboard, act, job("a"))


def test_only_admins_change_the_policy(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        post, ada = dashboard.client.post, {"x-user": "ada"}
        assert "Change policy" in (await dashboard.client.get("/decisions")).text
        assert "Change policy" not in (await dashboard.client.get("/decisions", headers=ada)).text
        response = await post("/actions/policy", data=form(policy="las"))
        assert (response.status_code, response.headers["location"]) == (303, "/decisions")
        assert dashboard.service.policy == "las"
        rejected = await post("/actions/policy", data=form(Principal("ada"), policy="fifo"), headers=ada)
        assert rejected.status_code == 403
        assert (await post("/actions/policy", data={"policy": "fifo"})).status_code == 403
        wrong = await post("/actions/policy", data=form(policy="lass"))
        assert (wrong.status_code, "Did you mean las" in wrong.text) == (422, True)
        assert dashboard.service.policy == "las"

    play(open_dashboard, act, job("a"))


def test_the_error_of_a_replaced_policy_is_shown(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        await dashboard.service._model.loop.apply(PolicyChanged("las", "policy Mine failed: KeyError: <a>"))
        for page in ("/cluster", "/decisions"):
            assert "policy Mine failed: KeyError: &lt;a&gt;" in (await dashboard.client.get(page)).text
        await dashboard.service.change_policy(Principal("root", Role.ADMIN), "las")
        assert "policy Mine failed" not in (await dashboard.client.get("/decisions")).text

    play(open_dashboard, act, job("a"))


def test_the_page_of_a_job_shows_only_its_devices(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        assert {span.job for span in dashboard.service.timeline(ROOT, 0.0, 9e9)} == {"a", "b"}
        assert {span.job for span in dashboard.service.timeline(ROOT, 0.0, 9e9, "b")} == {"b"}
        assert 'data-tip="b"' in (await dashboard.client.get("/jobs/b?panel=curves")).text

    play(open_dashboard, act, job("a"), job("b"))


@pytest.mark.parametrize("token", ["", "0" * 64, token_for(Principal("ben"), b"for tests")])
def test_a_form_without_a_valid_token_is_rejected(open_dashboard: Any, token: str) -> None:
    async def act(dashboard: Any) -> None:
        response = await dashboard.client.post("/actions/cancel", data={"job": "a", "token": token})
        assert response.status_code == 403
        assert dashboard.service.job(ROOT, "a").phase is Phase.RUNNING
        assert (await dashboard.client.get("/actions/cancel?job=a")).status_code == 405

    play(open_dashboard, act, job("a"))


def test_upload_a_report(open_dashboard: Any, tmp_path: Path) -> None:
    result = {"policy": HOSTILE, "jobs": 3, "finished": 3, "avg_jct_s": 7.0}
    document = json.dumps({"results": [result, {**result, "policy": "other", "avg_jct_s": 9.0}]})

    async def act(dashboard: Any) -> None:
        response = await dashboard.client.post("/compare", data=form(report=document, name="week.json"))
        assert response.status_code == 303
        shown = await dashboard.client.get(response.headers["location"])
        assert "week.json" in shown.text
        assert "&lt;img" in shown.text
        assert "<img" not in shown.text
        rejected = await dashboard.client.post("/compare", data=form(report="nonsense"))
        assert rejected.status_code == 422
        assert "carpool simulate" in rejected.text
        assert (await dashboard.client.post("/compare", data={"report": document})).status_code == 403
        assert (await dashboard.client.get("/compare?report=../../etc/passwd")).status_code == 404

    play(open_dashboard, act)


def test_pagination_of_a_thousand_jobs(open_dashboard: Any) -> None:
    jobs = [job(f"job-{number}", at=number / 100, user=f"u{number % 3}") for number in range(1000)]

    async def act(dashboard: Any) -> None:
        first = await dashboard.client.get("/jobs")
        assert first.text.count("data-href") == 50
        assert "1–50 of 1,000" in first.text
        assert "running" in first.text.split("<tbody>")[1].split("</tr>")[0]
        last = await dashboard.client.get("/jobs?page=20")
        assert "951–1,000 of 1,000" in last.text
        for query, number in (("", 1000), ("&user=u1", 333), ("&phase=waiting&q=7", 0)):
            seen: list[str] = []
            while found := await names(dashboard, f"/jobs?page={len(seen) // 50 + 1}{query}"):
                seen += found
                if len(found) < 50:
                    break
            assert len(seen) == len(set(seen))
            assert len(seen) == number or not number
        assert (await names(dashboard, "/jobs?q=job-77&sort=name&down=1"))[:3] == ["job-779", "job-778", "job-777"]
        assert "No matching jobs" in (await dashboard.client.get("/jobs?q=zzz")).text
        assert (await dashboard.client.get("/jobs?page=9999")).status_code == 200

    play(open_dashboard, act, *jobs, now=20.0, cluster=Cluster.build([(63, 8, "V100")]))


def test_the_jobs_of_a_sweep_are_compared(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        page = (await dashboard.client.get("/results/fit")).text
        assert {"fit-1", "fit-2"} <= set(re.findall(r'data-id="([^"]+)"', page))
        assert 'data-name="fit-1 lr=0.1"' in page, "its curve"
        assert "fit" in await names(dashboard, "/results")
        assert "lr=0.2" in (await dashboard.client.get("/jobs")).text
        head = (await dashboard.client.get("/jobs/fit-2")).text
        assert "lr=0.2" in head
        assert 'href="/results/fit"' in head
        assert (await dashboard.client.get("/results/fit?metric=none")).status_code == 422
        hidden = await dashboard.client.get("/results/fit", headers={"x-user": "ben"})
        assert hidden.status_code == 404

    trials = [job(f"fit-{n}", work=10_000.0, array="fit", params=(("lr", n / 10),)) for n in (1, 2)]
    play(open_dashboard, act, *trials, now=100.5)


def test_the_page_of_a_job_has_curves(open_dashboard: Any) -> None:
    async def act(dashboard: Any) -> None:
        page = (await dashboard.client.get("/jobs/a")).text
        assert 'data-name="loss"' in page
        assert "steps/s" in page

    play(open_dashboard, act, job("a", work=10_000.0), job("b", at=30.0), now=100.5)
