"""Auth middleware: checks Host, token or socket peer, Origin and request rate of every request."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.core.errors import InputError
from carpool.service.auth import AccessTokens, Principal
from carpool.service.http.limits import Limits, LoginThrottle, TokenBuckets
from carpool.service.http.problems import RequestRejected, problem_of_error

_USUAL = {"http": 80, "https": 443}  # ports that browsers leave out


def origin_of(address: str) -> str:
    """An address as browsers write it into ``Origin`` (RFC 6454): scheme, name, and port where it is not the usual."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = -1
    rest = (parts.path.strip("/"), parts.query, parts.fragment, parts.username)
    if parts.scheme not in _USUAL or not parts.hostname or any(rest) or port in (-1, 0):
        raise InputError(f"public is {address!r}", way_out="Give what people see, such as https://carpool.lab:8443.")
    return f"{parts.scheme}://{_bracketed(parts.hostname)}{'' if port in (None, _USUAL[parts.scheme]) else f':{port}'}"


def host_of(origin: str) -> str:
    """The name in an origin, as a ``LoopHooks`` header has it."""
    return _bracketed(urlsplit(origin).hostname or "")


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


# - A Host header that is not one of ours is turned away: a page elsewhere cannot make a browser talk to us under its own
#   name (DNS rebinding).
# - Somebody on the daemon's Unix socket with the daemon's user id is that user, and governs. Everybody else needs a
#   token, in an Authorization header or, for pages, in a cookie.
# - A request that changes something and is signed by the cookie must come from a page of ours (its Origin): of the
#   address that was asked for, or of one that the proxy before us is known by.


COOKIE = "carpool_token"
PEER = "peer_uid"  # in a scope's state: the user id at the other end of a Unix socket
_VISITOR = "visitor"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_OPEN = frozenset({"/sign-in"})  # where one who is not signed in may send something

# All that a page needs: nothing is written inside it, and nothing comes from elsewhere.
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


class AuthMethod(Enum):
    """What somebody came in by."""

    SOCKET = "the daemon's own socket"
    TOKEN = "a token"
    COOKIE = "a cookie"


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who came in."""

    person: Principal
    by: AuthMethod
    is_known: Callable[[], bool] = lambda: True  # whether they still would be let in as this person


class AuthMiddleware:
    """Lets requests in to an app, or turns them away."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: AccessTokens,
        owner: Principal,
        uid: int,
        hosts: Collection[str],
        origins: Collection[str],
        limits: Limits,
        strangers: LoginThrottle,
        now: Callable[[], float],
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._owner = owner
        self._uid = uid
        self._hosts = frozenset(host.lower() for host in (*hosts, *map(host_of, origins)))
        self._origins = frozenset(origins)
        self._asked = TokenBuckets(limits.requests_per_s, limits.burst)
        self._strangers = strangers
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            visitor = self._let_in(scope, Headers(scope=scope))
        except RequestRejected as turned:
            await problem_of_error(turned)(scope, receive, guarded)
            return
        scope.setdefault("state", {})[_VISITOR] = visitor
        await self._app(scope, receive, guarded)

    def _let_in(self, scope: Scope, headers: Headers) -> Caller | None:
        peer = scope.get("state", {}).get(PEER)
        if peer is None:
            self._check_host(headers.get("host", ""))
        visitor = self._visitor(scope, headers, peer)
        if scope["method"] not in _SAFE:
            self._check_unsafe(scope, headers, visitor)
        if visitor is not None and visitor.by is not AuthMethod.SOCKET:
            wait_s = self._asked.take(visitor.person.name, self._now())
            if wait_s:
                raise _too_often(f"{visitor.person.name!r} asks too often", wait_s)
        return visitor

    def _visitor(self, scope: Scope, headers: Headers, peer: int | None) -> Caller | None:
        scheme, _, text = headers.get("authorization", "").partition(" ")
        if scheme:
            person = self._tokens.who(text.strip()) if scheme.lower() == "bearer" else None
            if person is None:
                record_failed_login(self._strangers, scope, self._now())
                text = "nobody has this token. Make one with: carpool token add NAME"
                raise RequestRejected(401, text, headers=CHALLENGE)
            return self._known_by(text.strip(), person, AuthMethod.TOKEN)
        if peer == self._uid:
            return Caller(self._owner, AuthMethod.SOCKET)
        person = self._tokens.who(token := _cookie(headers))
        return None if person is None else self._known_by(token, person, AuthMethod.COOKIE)

    def _known_by(self, token: str, person: Principal, by: AuthMethod) -> Caller:
        return Caller(person, by, lambda: self._tokens.who(token) == person)

    def _check_host(self, given: str) -> None:
        name = given.rpartition(":")[0] if given.rpartition(":")[2].isdigit() and not given.endswith("]") else given
        if name.lower() not in self._hosts:
            raise RequestRejected(
                421, f"this is not {name!r}. Ask for {' or '.join(sorted(self._hosts))}, or name it in 'hosts'."
            )

    def _check_unsafe(self, scope: Scope, headers: Headers, visitor: Caller | None) -> None:
        if visitor is None and scope["path"] not in _OPEN:
            raise unauthenticated()
        if visitor is not None and visitor.by is not AuthMethod.COOKIE and scope["path"] not in _OPEN:
            return
        origin = headers.get("origin")
        if origin not in self._origins and origin != f"{scope.get('scheme', 'http')}://{headers.get('host', '')}":
            text = f"this came from a page of {origin or 'unknown origin'}, which may not act for you."
            raise RequestRejected(403, f"{text} The setting 'public' names addresses of a proxy before the daemon.")


def record_failed_login(strangers: LoginThrottle, scope: Scope, at: float) -> None:
    """One more wrong token from there; turned away where it is too many."""
    if wait_s := strangers.wait_s(scope, at):
        raise _too_often("too many wrong tokens from there", wait_s)


CHALLENGE = {"WWW-Authenticate": 'Bearer realm="carpool"'}


def unauthenticated() -> RequestRejected:
    """What somebody without a token is told."""
    text = "this takes a token: set CARPOOL_TOKEN to yours, or send it as 'Authorization: Bearer TOKEN'."
    return RequestRejected(401, text, headers=CHALLENGE)


def caller_of(request: Request) -> Caller:
    """Who came in with a request; turned away where nobody did."""
    visitor = caller_in(request.scope)
    if visitor is None:
        raise unauthenticated()
    return visitor


def caller_in(scope: Scope) -> Caller | None:
    """Who came in with a request; None where nobody did, or where there is no door."""
    visitor = scope.get("state", {}).get(_VISITOR)
    assert visitor is None or isinstance(visitor, Caller)
    return visitor


def principal_of(request: Request) -> Principal:
    """Who asks."""
    return caller_of(request).person


def _cookie(headers: Headers) -> str:
    cookie: SimpleCookie = SimpleCookie()
    try:
        cookie.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    found: Any = cookie.get(COOKIE)
    return "" if found is None else str(found.value)


def _too_often(words: str, wait_s: float) -> RequestRejected:
    return RequestRejected(429, f"{words}. Try again in {wait_s:.1f} s.", headers={"Retry-After": str(int(wait_s) + 1)})
