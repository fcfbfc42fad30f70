"""Request limits: body size and depth, token-bucket request rates, and a throttle for failed logins."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.service.http.problems import RequestRejected, problem_of_error


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep a daemon answering whatever is thrown at it."""

    body_bytes: int = 1 << 20
    body_s: float = 20.0  # seconds in which a body has to be there
    json_depth: int = 32
    jobs_at_once: int = 1000  # in one submission, sweeps counted out
    jobs_bytes: int = 16 << 20  # of all jobs of one submission, each written out with what it has from defaults
    requests_per_s: float = 50.0  # of one person in the long run
    burst: float = 200.0
    strangers_per_s: float = 2.0  # wrong tokens from one address in the long run
    strangers_burst: float = 20.0
    streams: int = 20  # event streams and followed logs of one person at a time
    stream_s: float = 3600.0  # a stream ends after so long; whoever listens comes back with Last-Event-ID
    beat_s: float = 15.0  # a comment is sent into a silent stream so often
    gather_s: float = 0.25  # events of so long go out together
    headers_s: float = 10.0  # seconds in which a request's headers have to be there
    stalled_s: float = 60.0  # a client that takes nothing for so long is let go
    connections: int = 512


@dataclass(slots=True)
class TokenBucket:
    """Lets `burst` through at once and `per_s` in the long run."""

    per_s: float
    burst: float
    level: float
    at: float

    def take(self, at: float) -> float:
        """Take one if there is one; else the seconds until there is."""
        self.level = min(self.burst, self.level + max(0.0, at - self.at) * self.per_s)
        self.at = max(self.at, at)
        if self.level >= 1.0:
            self.level -= 1.0
            return 0.0
        return (1.0 - self.level) / self.per_s


class TokenBuckets:
    """A bucket for everybody who asks; those who have not asked for longest are forgotten first."""

    def __init__(self, per_s: float, burst: float, most: int = 10_000) -> None:
        self._per_s, self._burst, self._most = per_s, burst, most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, name: str, at: float) -> float:
        """Seconds that somebody has to wait; 0 where they need not."""
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = TokenBucket(self._per_s, self._burst, self._burst, at)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        return bucket.take(at)


class LoginThrottle:
    """Who comes with wrong tokens, by address: after some they have to wait."""

    def __init__(self, limits: Limits, proxies: Collection[str] = ()) -> None:
        self._buckets = TokenBuckets(limits.strangers_per_s, limits.strangers_burst)
        self._proxies = frozenset(proxies)

    def wait_s(self, scope: Scope, at: float) -> float:
        """One more from there: how long they have to wait for the next; 0 where they need not."""
        return self._buckets.take(client_address(scope, self._proxies), at)


def client_address(scope: Scope, proxies: Collection[str]) -> str:
    """Where a request is from: behind a proxy, what that says; what anybody else says of it counts for nothing.

    Each proxy adds to ``X-Forwarded-For`` whom it heard, so that only its end can be believed, up to the first address
    that is no proxy of ours.
    """
    address = str((scope.get("client") or ("", 0))[0])
    said = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    while address in proxies and said:
        address = said.pop().strip() or address
    return address


# Possessive, and closed or not: whatever begins with a quote is passed over once, so that time is linear in any body.
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # up, up, down, down
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_WITH_BODIES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def json_depth(body: bytes) -> int:
    """How deep brackets are nested, texts left out; of any bytes at all."""
    steps = array("b", _TEXTS.sub(b"", body).translate(_BRACKETS, _OTHERS))
    return max(accumulate(steps, initial=0))


class BodyLimitMiddleware:
    """Reads every body before the app runs; one that is too large, too slow or too deep is turned away."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] not in _WITH_BODIES:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except RequestRejected as turned:
            await problem_of_error(turned)(scope, receive, send)
            return
        if body is None:
            return
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal first
            if first is None:
                return await receive()
            message, first = first, None
            return message

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None where its sender has gone."""
        most = self._limits.body_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > most:
            raise _too_large(most)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > most:
                        raise _too_large(most)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the body was not there within {self._limits.body_s:g} s"
            raise RequestRejected(408, text, headers={"Connection": "close"}) from None
        body = b"".join(pieces)
        if b"\x00" in body:  # UTF-16 could hide its depth from us, and not from whoever reads it
            raise RequestRejected(400, "the body holds zero bytes. Send it as UTF-8.")
        if json_depth(body) > self._limits.json_depth:
            raise RequestRejected(400, f"the body nests deeper than {self._limits.json_depth} levels. Send it flatter.")
        return body


def _too_large(most: int) -> RequestRejected:
    text = f"the body is larger than {most} bytes. Send fewer jobs at once, or a report without its charts (--json)."
    return RequestRejected(413, text, headers={"Connection": "close"})
