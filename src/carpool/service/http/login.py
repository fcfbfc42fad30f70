"""Login page of the dashboard: takes an access token and stores it in a cookie."""

from __future__ import annotations

from html import escape
from time import monotonic
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from carpool.service.http.auth_middleware import COOKIE
from carpool.service.http.deps import ContextDep
from carpool.service.http.limits import LoginThrottle

_MONTH_S = 30 * 24 * 3600
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Sign in – carpool</title>
<link rel="stylesheet" href="/dashboard/dashboard.css"></head>
<body><main><div class="empty tall">
<h1>carpool</h1>
<p>{message}</p>
<form method="post" action="/sign-in">
<input type="hidden" name="next" value="{next}">
<label>Token <input type="password" name="token" autocomplete="current-password" autofocus required></label>
<button class="main">Sign in</button>
</form>
<p>An admin creates tokens with <code>carpool token add NAME</code>.</p>
</div></main></body>
</html>
"""
_WELCOME = "Sign in with an access token to see and control jobs."

router = APIRouter(include_in_schema=False)


@router.get("/sign-in")
async def form(next: str = "/") -> Response:  # noqa: A002  # the name is part of the address
    """Show the form."""
    return _page(_WELCOME, next)


@router.post("/sign-in")
async def sign_in(request: Request, context: ContextDep) -> Response:
    """Store a valid token in a cookie and redirect."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"))
    token, target = fields.get("token", [""])[0].strip(), fields.get("next", ["/"])[0]
    if context.tokens.authenticate(token) is None:
        throttle = request.app.state.login_throttle
        assert isinstance(throttle, LoginThrottle)
        throttle.record_failure(request.scope, monotonic())
        return _page("This token is not valid.", target, 401)
    response = RedirectResponse(_local(target), 303)
    is_secure = request.headers.get("origin", "").startswith("https://")  # the middleware has checked the origin
    response.set_cookie(COOKIE, token, _MONTH_S, httponly=True, samesite="strict", secure=is_secure)
    return response


@router.post("/sign-out")
async def sign_out() -> Response:
    """Delete the cookie."""
    response = RedirectResponse("/sign-in", 303)
    response.delete_cookie(COOKIE)
    return response


def _page(message: str, target: str, status: int = 200) -> Response:
    return HTMLResponse(_PAGE.format(message=escape(message), next=escape(_local(target))), status)


def _local(target: str) -> str:
    """Return the target, or / when it would redirect to another site."""
    is_local = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if is_local else "/"
