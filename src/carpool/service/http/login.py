"""Login page of the dashboard: takes an access token and stores it in a cookie."""

from __future__ import annotations

from html import escape
from time import monotonic
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from carpool.service.http.auth_middleware import COOKIE, record_failed_login
from carpool.service.http.deps import ContextDep
from carpool.service.http.limits import LoginThrottle

_MONTH_S = 30 * 24 * 3600
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Sign in – carpool</title>
<link rel="stylesheet" href="/dashboard/dashboard.css"></head>
<body><main>
<h1>carpool</h1>
<p>{words}</p>
<form method="post" action="/sign-in">
<input type="hidden" name="next" value="{next}">
<label>Token <input type="password" name="token" autocomplete="current-password" autofocus required></label>
<button>Sign in</button>
</form>
<p>Whoever runs the daemon makes tokens: <code>carpool token add NAME</code></p>
</main></body>
</html>
"""
_WELCOME = "These pages show jobs and can stop them, so they want to know who you are."

router = APIRouter(include_in_schema=False)


@router.get("/sign-in")
async def form(next: str = "/") -> Response:  # noqa: A002  # the name is part of the address
    """The form."""
    return _page(_WELCOME, next)


@router.post("/sign-in")
async def sign_in(request: Request, desk: ContextDep) -> Response:
    """Take a token."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"))
    token, following = fields.get("token", [""])[0].strip(), fields.get("next", ["/"])[0]
    if desk.tokens.who(token) is None:
        strangers = request.app.state.strangers
        assert isinstance(strangers, LoginThrottle)
        record_failed_login(strangers, request.scope, monotonic())
        return _page("Nobody has this token.", following, 401)
    answer = RedirectResponse(_inside(following), 303)
    is_secure = request.headers.get("origin", "").startswith("https://")  # one of ours: the door has seen to that
    answer.set_cookie(COOKIE, token, _MONTH_S, httponly=True, samesite="strict", secure=is_secure)
    return answer


@router.post("/sign-out")
async def sign_out() -> Response:
    """Forget the token."""
    answer = RedirectResponse("/sign-in", 303)
    answer.delete_cookie(COOKIE)
    return answer


def _page(words: str, following: str, status: int = 200) -> Response:
    return HTMLResponse(_PAGE.format(words=escape(words), next=escape(_inside(following))), status)


def _inside(address: str) -> str:
    """An address of ours; nobody is sent elsewhere by us."""
    is_ours = address.startswith("/") and not address.startswith(("//", "/\\")) and address.isprintable()
    return address if is_ours else "/"
