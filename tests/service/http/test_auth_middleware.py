"""AuthMiddleware against hostile requests: tokens, hosts, origins, rates and security headers."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")


from carpool.core.errors import InputError
from carpool.service.auth import AccessTokens
from carpool.service.http.auth_middleware import COOKIE, origin_of
from tests.support.http_rig import BASE, LAX_LIMITS, HttpRig, by_socket, client_of, open_http, run_hostile


def test_a_wrong_token_is_rejected(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        nobody = rig["nobody"]
        for header in ["Bearer", "Bearer wrong", "Bearer carpool_", "Basic YTpi", "bearer \xff", "x"]:
            wrong = {b"Authorization": header.encode("latin-1")}
            answers = [
                await nobody.get(path, headers=wrong) for path in ("/v1/jobs", "/v1/me", "/v1/events", "/metrics")
            ]
            answers.append(await nobody.post("/v1/jobs", json=rig.body("a"), headers=wrong))
            assert {each.status_code for each in answers} == {401}, header

    run_hostile(tmp_path, scenario)


def test_many_wrong_tokens_are_throttled(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        answers = [await rig["nobody"].get("/v1/me", headers={"Authorization": f"Bearer {n}"}) for n in range(6)]
        assert [each.status_code for each in answers] == [401, 401, 401, 429, 429, 429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert (await rig["ada"].get("/v1/me")).status_code == 200

    run_hostile(tmp_path, scenario, limits=replace(LAX_LIMITS, failed_logins_per_s=0.001, failed_logins_burst=3))


def test_behind_a_proxy_throttling_is_by_client_address(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        async def attempt(forwarded: str) -> int:
            wrong = {"Authorization": "Bearer wrong", "X-Forwarded-For": forwarded}
            return (await rig["nobody"].get("/v1/me", headers=wrong)).status_code

        assert [await attempt("9.9.9.9") for _ in range(3)] == [401, 401, 429]
        assert [await attempt(f"{n}.0.0.1, 9.9.9.9") for n in range(2)] == [429, 429], "a forged address must not count"
        assert await attempt("8.8.8.8") == 401

    run_hostile(
        tmp_path,
        scenario,
        limits=replace(LAX_LIMITS, failed_logins_per_s=0.001, failed_logins_burst=2),
        proxies=("127.0.0.1",),
    )


def test_the_request_rate_is_limited_per_user(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        answers = [(await rig["ada"].get("/v1/me")).status_code for _ in range(5)]
        assert answers == [200, 200, 200, 429, 429]
        assert (await rig["ben"].get("/v1/me")).status_code == 200

    run_hostile(tmp_path, scenario, limits=replace(LAX_LIMITS, requests_per_s=0.001, burst=3))


def test_a_removed_token_is_rejected(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        assert (await rig["ada"].get("/v1/me")).status_code == 200
        AccessTokens(tmp_path / "tokens.json").remove("ada-1")
        assert (await rig["ada"].get("/v1/me")).status_code == 401

    run_hostile(tmp_path, scenario)


def test_an_unknown_host_is_rejected(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        for host in ["evil.example", "localhost.evil.example", "evil.example:7637", "", "127.0.0.1.", "[::2]:7637"]:
            assert (await rig["ada"].get("/v1/jobs", headers={"Host": host})).status_code == 421, host
        for ours in ("localhost", "LOCALHOST:7637", "127.0.0.1:80", "[::1]:7637", "[::1]"):
            assert (await rig["ada"].get("/v1/me", headers={"Host": ours})).status_code == 200

    run_hostile(tmp_path, scenario)


def test_a_cross_site_request_with_a_cookie_is_rejected(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        token = rig["ada"].headers["Authorization"].removeprefix("Bearer ")
        signed = {"Cookie": f"{COOKIE}={token}"}
        for origin in [None, "null", "http://evil.example", "https://localhost:7637", "http://localhost:1"]:
            headers = signed | ({"Origin": origin} if origin else {})
            forged = await rig["nobody"].post("/v1/jobs", json=rig.body("a"), headers=headers)
            assert forged.status_code == 403, origin
        assert (await rig["nobody"].get("/v1/me", headers=signed)).json()["name"] == "ada"
        own = await rig["nobody"].post("/v1/jobs/none/cancel", headers=signed | {"Origin": BASE})
        assert own.status_code == 404  # authenticated; there is no such job

    run_hostile(tmp_path, scenario)


def test_only_pages_of_a_known_proxy_may_send_forms(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        token = rig["ada"].headers["Authorization"].removeprefix("Bearer ")
        for host, origin, status in [
            ("carpool.lab", "https://carpool.lab", 303),
            ("localhost:7637", "https://carpool.lab", 303),  # a proxy that does not forward the Host header
            ("carpool.lab", "http://evil.example", 403),
            ("carpool.lab", "https://carpool.lab:8443", 403),
            ("localhost:7637", "https://localhost:7637", 403),
        ]:
            asked = {"Host": host, "Origin": origin}
            answer = await rig["nobody"].post("/sign-in", data={"token": token}, headers=asked)
            rig["nobody"].cookies.clear()
            assert answer.status_code == status, origin
            assert ("Secure" in answer.headers.get("set-cookie", "")) == (status == 303)
            signed = asked | {"Cookie": f"{COOKIE}={token}"}
            acted = await rig["nobody"].post("/v1/jobs/none/cancel", headers=signed)
            assert acted.status_code == (404 if status == 303 else 403)

    run_hostile(tmp_path, scenario, origins=("https://carpool.lab",))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("https://Carpool.lab/", "https://carpool.lab"),
        ("https://carpool.lab:443", "https://carpool.lab"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("carpool.lab", ""),
        ("https://carpool.lab/jobs", ""),
        ("https://ada@carpool.lab", ""),
        ("ftp://carpool.lab", ""),
        ("https://carpool.lab:x", ""),
    ],
)
def test_addresses_are_normalised_to_origins(given: str, meant: str) -> None:
    if meant:
        assert origin_of(given) == meant
    else:
        with pytest.raises(InputError, match="public"):
            origin_of(given)


def test_another_user_on_the_socket_needs_a_token(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        async with client_of(by_socket(rig.app, 4712)) as other:
            assert (await other.get("/v1/me")).status_code == 401
            assert (await other.post("/v1/jobs", json=rig.body("a"))).status_code == 401

    run_hostile(tmp_path, scenario)


def test_jobs_of_other_users_look_nonexistent(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_http(tmp_path) as rig:
            await rig["ada"].post("/v1/jobs", json=rig.body("a", environment={"KEY": "swordfish"}))
            paths = ["", "/story", "/why", "/measurements", "/log", "/log/follow"]
            missing = [await rig["ben"].get(f"/v1/jobs/a{path}") for path in paths]
            missing += [await rig["ben"].post(f"/v1/jobs/a/{action}") for action in ("cancel", "pause", "resume")]
            assert {each.status_code for each in missing} == {404}
            unknown = await rig["ben"].get("/v1/jobs/b")
            assert missing[0].json()["detail"] == unknown.json()["detail"].replace("'b'", "'a'")
            seen = [
                await rig["ben"].get(f"/v1/{path}") for path in ("devices", "decisions", "timeline?since=0&until=1e9")
            ]
            assert not any('"a"' in each.text for each in seen)
            everything = [await rig["root"].get(f"/v1/jobs{path}") for path in ("", "/a", "/a/story", "/a/why")]
            assert not any("swordfish" in each.text for each in everything)

    asyncio.run(run())


def test_every_response_has_security_headers(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        for answer in [
            await rig["ada"].get("/v1/jobs"),
            await rig["nobody"].get("/v1/jobs"),
            await rig["ada"].get("/nowhere"),
            await rig["ada"].get("/v1/me", headers={"Host": "evil.example"}),
            await rig["ada"].post("/v1/jobs", content=b"[" * 99),
        ]:
            policy = answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in policy
            assert "unsafe-inline" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"

    run_hostile(tmp_path, scenario)


def test_the_number_of_streams_is_limited_per_user(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(rig["ada"].get("/v1/events")) for _ in range(4)]
        assert sorted(task.result().status_code for task in asked) == [200, 200, 429, 429]
        assert (await rig["ada"].get("/v1/events")).status_code == 200

    run_hostile(tmp_path, scenario, limits=replace(LAX_LIMITS, streams=2))
