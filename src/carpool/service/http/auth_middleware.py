"""Auth middleware: checks Host, token or socket peer, Origin and request rate of every request.

- Host must be a name of this daemon: otherwise a page of another site could reach it under that site's name (DNS
  rebinding).
- A peer on the Unix socket with the daemon's user id is the owner, an admin. All other callers send a token, in an
  Authorization header or, from pages, in a cookie.
- A request with a cookie that changes something must come from a page of the daemon (Origin): under the requested
  address, or that of a known proxy.
"""

from __future__ import annotations

from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.core.errors import InputError
from carpool.service.auth import AuthMethod, Caller
from carpool.service.http.deps import CALLER, CHALLENGE, ApiContext, unauthenticated
from carpool.service.http.limits import LoginThrottle, TokenBuckets
from carpool.service.http.problems import RequestRejected, problem_of_error

COOKIE = "carpool_token"
PEER = "peer_uid"  # in a scope's state: the user id of a Unix socket's peer
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOGIN = "/sign-in"  # the one path that takes a POST without a token

# Pages have no inline scripts or styles and load nothing from elsewhere.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers then send "Origin: null" with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def origin_of(address: str) -> str:
    """Normalise an address to the form of an ``Origin`` header (RFC 6454): scheme, host, and a non-default port."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = -1
    rest = (parts.path.strip("/"), parts.query, parts.fragment, parts.username)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or any(rest) or port in (-1, 0):
        raise InputError(
            f"public is {address!r}", way_out="Give scheme, host and optional port, as in https://carpool.lab:8443."
        )
    suffix = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{_bracketed(parts.hostname)}{suffix}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class AuthMiddleware:
    """Authenticates requests, or rejects them."""

    def __init__(
        self, app: ASGIApp, context: ApiContext, throttle: LoginThrottle, now: Callable[[], float] = monotonic
    ) -> None:
        self._app = app
        self._context = context
        proxies = (_bracketed(urlsplit(origin).hostname or "") for origin in context.origins)
        self._hosts = frozenset(host.lower() for host in (*context.hosts, *proxies))
        self._rates = TokenBuckets(context.limits.requests_per_s, context.limits.burst)
        self._throttle = throttle
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            caller = self._authenticate(scope, Headers(scope=scope))
        except RequestRejected as rejected:
            await problem_of_error(rejected)(scope, receive, send_with_headers)
            return
        scope.setdefault("state", {})[CALLER] = caller
        await self._app(scope, receive, send_with_headers)

    def _authenticate(self, scope: Scope, headers: Headers) -> Caller | None:
        """Return the caller, None without credentials; RequestRejected when the request is not allowed."""
        peer = scope.get("state", {}).get(PEER)
        if peer is None:
            self._check_host(headers.get("host", ""))
        caller = self._identify(scope, headers, peer)
        if scope["method"] not in _SAFE_METHODS:
            self._check_unsafe(scope, headers, caller)
        if caller is not None and caller.method is not AuthMethod.SOCKET:
            name = caller.principal.name
            self._rates.check(name, self._now(), f"{name!r} sends too many requests")
        return caller

    def _identify(self, scope: Scope, headers: Headers, peer: int | None) -> Caller | None:
        scheme, _, text = headers.get("authorization", "").partition(" ")
        if scheme:
            caller = self._caller(text.strip(), AuthMethod.TOKEN) if scheme.lower() == "bearer" else None
            if caller is None:
                self._throttle.record_failure(scope, self._now())
                text = "the token is not valid. Create one with: carpool token add NAME"
                raise RequestRejected(401, text, headers=CHALLENGE)
            return caller
        if peer == self._context.uid:
            return Caller(self._context.owner, AuthMethod.SOCKET)
        return self._caller(_cookie(headers), AuthMethod.COOKIE)

    def _caller(self, token: str, method: AuthMethod) -> Caller | None:
        principal = self._context.tokens.authenticate(token)
        if principal is None:
            return None
        return Caller(principal, method, lambda: self._context.tokens.authenticate(token) == principal)

    def _check_host(self, given: str) -> None:
        name = given.rpartition(":")[0] if given.rpartition(":")[2].isdigit() and not given.endswith("]") else given
        if name.lower() not in self._hosts:
            raise RequestRejected(
                421,
                f"unknown host {name!r}. Use {' or '.join(sorted(self._hosts))}, "
                "or add the name to the daemon's setting 'hosts'.",
            )

    def _check_unsafe(self, scope: Scope, headers: Headers, caller: Caller | None) -> None:
        if scope["path"] != _LOGIN:
            if caller is None:
                raise unauthenticated()
            if caller.method is not AuthMethod.COOKIE:
                return
        origin = headers.get("origin")
        if (
            origin not in self._context.origins
            and origin != f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        ):
            raise RequestRejected(
                403,
                f"the request comes from a page of {origin or 'an unknown origin'}. If that is a proxy of the daemon, "
                "add its address to the daemon's setting 'public'.",
            )


def _cookie(headers: Headers) -> str:
    cookie: SimpleCookie = SimpleCookie()
    try:
        cookie.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    found: Any = cookie.get(COOKIE)
    return "" if found is None else str(found.value)
