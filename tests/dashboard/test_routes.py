"""Pages show everybody what is theirs, wishes need a form of ours, and nothing that people write becomes markup."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from carpool.core.messages import PolicyChanged
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.topology import Cluster
from carpool.dashboard.actions import token_for
from carpool.dashboard.pages import PAGES
from carpool.service.auth import Principal, Role
from carpool.service.http.auth_middleware import HEADERS
from carpool.sim.traces.trace import Arrival

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
ROOT = Principal("root", Role.ADMIN)
WHOLE = ("/cluster", "/jobs", "/jobs/a", "/decisions", "/compare")


def job(name: str, at: float = 0.0, work: float = 1000.0, **fields: Any) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), work=work, **{"user": "ada", **fields}))


def play(open_room: Any, act: Callable[[Any], Awaitable[None]], *jobs: Arrival, **options: Any) -> None:
    async def run() -> None:
        async with open_room(jobs, **options) as room:
            await act(room)

    asyncio.run(run())


async def names(room: Any, path: str) -> list[str]:
    """The jobs that a list shows."""
    return re.findall(r'data-id="([^"]+)"', (await room.client.get(path)).text)


def form(who: Principal = ROOT, **fields: str) -> dict[str, str]:
    return {"token": token_for(who, b"for tests"), **fields}


def test_every_page_and_every_panel_of_it_answers(open_room: Any) -> None:
    async def act(room: Any) -> None:
        for page in PAGES:
            path = page.path.replace("{job}", "a")
            whole = await room.client.get(path)
            assert whole.status_code == 200, whole.text
            assert {name: whole.headers[name] for name in HEADERS} == HEADERS
            for panel in page.panels:
                assert f'data-panel="{panel}"' in whole.text
                answer = await room.client.get(path, params={"panel": panel})
                assert answer.status_code == 200, answer.text
                assert "<html" not in answer.text
        home = await room.client.get("/")
        assert home.headers["location"] == "/cluster"
        for name in ("dashboard.css", "dashboard.js", "icon.svg"):
            assert (await room.client.get(f"/dashboard/{name}")).status_code == 200
        assert (await room.client.get("/dashboard/routes.py")).status_code == 404
        assert (await room.client.get("/cluster?panel=nonsense")).status_code == 404

    play(open_room, act, job("a"), job("b", devices=2), job("c", after=(JobId("a"),)))


def test_an_empty_daemon_says_what_to_do(open_room: Any) -> None:
    async def act(room: Any) -> None:
        assert "carpool submit" in (await room.client.get("/jobs")).text
        assert "No decisions yet" in (await room.client.get("/decisions")).text
        assert "Nothing to compare yet" in (await room.client.get("/compare")).text
        assert (await room.client.get("/cluster")).status_code == 200

    play(open_room, act)


def test_what_people_write_is_never_markup(open_room: Any) -> None:
    async def act(room: Any) -> None:
        listed = (await room.client.get("/jobs")).text
        address = re.search(r'data-href="(/jobs/[^"]+)"', listed)
        assert address is not None
        pages = [
            "/cluster",
            "/decisions",
            "/jobs",
            address[1],
            f"/jobs?q={HOSTILE}&user={HOSTILE}",
            f"/cluster?node={HOSTILE}",
        ]
        for path in pages:
            answer = await room.client.get(path)
            assert answer.status_code == 200, path
            assert "<img" not in answer.text
            assert "&lt;img" in answer.text or "node=" in path
        assert "<img" not in (await room.client.get(f"/jobs/{HOSTILE}x")).text

    play(open_room, act, job(HOSTILE, user=HOSTILE, model=HOSTILE))


def test_others_see_that_a_device_is_held_but_not_by_whom(open_room: Any) -> None:
    async def act(room: Any) -> None:
        as_ben = {"x-person": "ben"}
        for path in ("/cluster", "/jobs", "/decisions"):
            answer = await room.client.get(path, headers=as_ben)
            assert answer.status_code == 200
            assert "secret-plan" not in answer.text
        assert "somebody else" in (await room.client.get("/cluster", headers=as_ben)).text
        for path in ("/jobs/secret-plan", "/jobs/secret-plan?panel=log", "/jobs/nothing"):
            assert (await room.client.get(path, headers=as_ben)).status_code == 404
        assert "secret-plan" in (await room.client.get("/jobs", headers={"x-person": "screen"})).text

    play(open_room, act, job("secret-plan"))


def test_wishes_are_granted_to_who_may_wish(open_room: Any) -> None:
    async def act(room: Any) -> None:
        post, ada = room.client.post, Principal("ada")
        answer = await post("/wish/pause", data=form(ada, job="a"), headers={"x-person": "ada"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/a")
        assert room.clerk.job(ada, "a").phase is Phase.PAUSED
        assert "Resume" in (await room.client.get("/jobs/a")).text
        again = await post("/wish/pause", data=form(ada, job="a"), headers={"x-person": "ada"})
        assert again.status_code == 409
        assert (await post("/wish/resume", data=form(job="a"))).status_code == 303
        ben = await post("/wish/cancel", data=form(Principal("ben"), job="a"), headers={"x-person": "ben"})
        assert ben.status_code == 404
        screen = form(Principal("screen", Role.READER), job="a")
        assert (await post("/wish/cancel", data=screen, headers={"x-person": "screen"})).status_code == 403
        assert (await post("/wish/cancel", data=form(job="a"))).status_code == 303
        assert room.clerk.job(ada, "a").phase is Phase.CANCELLED
        assert "cancelled by its user" in (await room.client.get("/jobs/a?panel=story")).text
        assert (await post("/wish/explode", data=form(job="a"))).status_code == 404

    play(open_room, act, job("a"))


def test_a_weight_is_changed_from_a_jobs_page(open_room: Any) -> None:
    async def act(room: Any) -> None:
        assert 'name="weight"' in (await room.client.get("/jobs/a")).text
        assert (await room.client.post("/wish/weigh", data=form(job="a", weight="2.5"))).status_code == 303
        assert (await room.client.post("/wish/weigh", data=form(job="a", weight="heavy"))).status_code == 422
        assert room.clerk.job(ROOT, "a").weight == 2.5

    play(open_room, act, job("a"))


def test_limits_of_devices_are_changed_from_a_jobs_page(open_room: Any) -> None:
    async def act(room: Any) -> None:
        assert 'name="max_devices"' in (await room.client.get("/jobs/a")).text
        wish = form(job="a", min_devices="1", max_devices="2")
        assert (await room.client.post("/wish/limit", data=wish)).status_code == 303
        assert (room.clerk.job(ROOT, "a").min_devices, room.clerk.job(ROOT, "a").max_devices) == (1, 2)
        for least, most in (("1", "0"), ("many", "2"), ("2", "1"), ("99", "99")):
            wrong = wish | {"min_devices": least, "max_devices": most}
            assert (await room.client.post("/wish/limit", data=wrong)).status_code == 422, wrong
        forged = {"job": "a", "min_devices": "1", "max_devices": "1"}
        assert (await room.client.post("/wish/limit", data=forged)).status_code == 403
        assert room.clerk.job(ROOT, "a").max_devices == 2

    play(open_room, act, job("a"))


def test_the_policy_is_changed_by_admins(open_room: Any) -> None:
    async def act(room: Any) -> None:
        post, ada = room.client.post, {"x-person": "ada"}
        assert "Change policy" in (await room.client.get("/decisions")).text
        assert "Change policy" not in (await room.client.get("/decisions", headers=ada)).text
        answer = await post("/wish/policy", data=form(policy="las"))
        assert (answer.status_code, answer.headers["location"]) == (303, "/decisions")
        assert room.clerk.policy == "las"
        refused = await post("/wish/policy", data=form(Principal("ada"), policy="fifo"), headers=ada)
        assert refused.status_code == 403
        assert (await post("/wish/policy", data={"policy": "fifo"})).status_code == 403
        wrong = await post("/wish/policy", data=form(policy="lass"))
        assert (wrong.status_code, "Did you mean las" in wrong.text) == (422, True)
        assert room.clerk.policy == "las"

    play(open_room, act, job("a"))


def test_the_fault_of_the_policy_before_is_shown(open_room: Any) -> None:
    async def act(room: Any) -> None:
        await room.clerk._in.loop.apply(PolicyChanged("las", "policy Mine failed: KeyError: <a>"))
        for page in ("/cluster", "/decisions"):
            assert "policy Mine failed: KeyError: &lt;a&gt;" in (await room.client.get(page)).text
        await room.clerk.change_policy(Principal("root", Role.ADMIN), "las")
        assert "policy Mine failed" not in (await room.client.get("/decisions")).text

    play(open_room, act, job("a"))


def test_a_job_is_shown_on_its_own_devices_only(open_room: Any) -> None:
    async def act(room: Any) -> None:
        assert {span.job for span in room.clerk.timeline(ROOT, 0.0, 9e9)} == {"a", "b"}
        assert {span.job for span in room.clerk.timeline(ROOT, 0.0, 9e9, "b")} == {"b"}
        assert 'data-tip="b"' in (await room.client.get("/jobs/b?panel=curves")).text

    play(open_room, act, job("a"), job("b"))


@pytest.mark.parametrize("token", ["", "0" * 64, token_for(Principal("ben"), b"for tests")])
def test_a_form_of_somebody_else_is_refused(open_room: Any, token: str) -> None:
    async def act(room: Any) -> None:
        answer = await room.client.post("/wish/cancel", data={"job": "a", "token": token})
        assert answer.status_code == 403
        assert room.clerk.job(ROOT, "a").phase is Phase.RUNNING
        assert (await room.client.get("/wish/cancel?job=a")).status_code == 405

    play(open_room, act, job("a"))


def test_a_report_is_handed_in_and_shown(open_room: Any, tmp_path: Path) -> None:
    result = {"policy": HOSTILE, "jobs": 3, "finished": 3, "avg_jct_s": 7.0}
    document = json.dumps({"results": [result, {**result, "policy": "other", "avg_jct_s": 9.0}]})

    async def act(room: Any) -> None:
        answer = await room.client.post("/compare", data=form(report=document, name="week.json"))
        assert answer.status_code == 303
        shown = await room.client.get(answer.headers["location"])
        assert "week.json" in shown.text
        assert "&lt;img" in shown.text
        assert "<img" not in shown.text
        refused = await room.client.post("/compare", data=form(report="nonsense"))
        assert refused.status_code == 422
        assert "carpool simulate" in refused.text
        assert (await room.client.post("/compare", data={"report": document})).status_code == 403
        assert (await room.client.get("/compare?report=../../etc/passwd")).status_code == 404

    play(open_room, act)


def test_a_thousand_jobs_come_in_pages(open_room: Any) -> None:
    jobs = [job(f"job-{number}", at=number / 100, user=f"u{number % 3}") for number in range(1000)]

    async def act(room: Any) -> None:
        first = await room.client.get("/jobs")
        assert first.text.count("data-href") == 50
        assert "1–50 of 1,000" in first.text
        assert "running" in first.text.split("<tbody>")[1].split("</tr>")[0]
        last = await room.client.get("/jobs?page=20")
        assert "951–1,000 of 1,000" in last.text
        for query, number in (("", 1000), ("&user=u1", 333), ("&phase=waiting&q=7", 0)):
            seen: list[str] = []
            while found := await names(room, f"/jobs?page={len(seen) // 50 + 1}{query}"):
                seen += found
                if len(found) < 50:
                    break
            assert len(seen) == len(set(seen))
            assert len(seen) == number or not number
        assert (await names(room, "/jobs?q=job-77&sort=name&down=1"))[:3] == ["job-779", "job-778", "job-777"]
        assert "Nothing matches" in (await room.client.get("/jobs?q=zzz")).text
        assert (await room.client.get("/jobs?page=9999")).status_code == 200

    play(open_room, act, *jobs, now=20.0, cluster=Cluster.build([(63, 8, "V100")]))


def test_curves_and_log_are_of_the_job(open_room: Any) -> None:
    async def act(room: Any) -> None:
        page = (await room.client.get("/jobs/a")).text
        assert 'data-name="loss"' in page
        assert "steps/s" in page

    play(open_room, act, job("a", work=10_000.0), job("b", at=30.0), now=100.5)
