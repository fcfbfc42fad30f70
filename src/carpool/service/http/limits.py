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
    """Bounds that keep the daemon responsive under any load."""

    body_bytes: int = 1 << 20
    body_s: float = 20.0  # to receive a body
    json_depth: int = 32
    jobs_at_once: int = 1000  # of one submission, after sweeps are expanded
    jobs_bytes: int = 16 << 20  # of all jobs of one submission, each expanded with its defaults
    requests_per_s: float = 50.0  # of one user, sustained
    burst: float = 200.0
    failed_logins_per_s: float = 2.0  # of one address, sustained
    failed_logins_burst: float = 20.0
    streams: int = 20  # open event streams and followed logs of one user
    stream_s: float = 3600.0  # lifetime of a stream; clients reconnect (events: Last-Event-ID; logs: `start`)
    heartbeat_s: float = 15.0  # interval of comments in an idle stream
    batch_s: float = 0.25  # events of this interval are sent together
    headers_s: float = 10.0  # to receive the headers of a request
    stalled_s: float = 60.0  # until a client that reads nothing is disconnected
    connections: int = 512


class TokenBuckets:
    """One token bucket per name: allows `burst` requests at once and `per_s` sustained.

    The least recently used bucket is dropped when there are too many.
    """

    def __init__(self, per_s: float, burst: float, max_buckets: int = 10_000) -> None:
        self._per_s, self._burst, self._max_buckets = per_s, burst, max_buckets
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name: tokens at a time

    def check(self, name: str, at: float, problem: str) -> None:
        if wait_s := self.take(name, at):
            retry_after = {"Retry-After": str(int(wait_s) + 1)}
            raise RequestRejected(429, f"{problem}. Try again in {wait_s:.1f} s.", headers=retry_after)

    def take(self, name: str, at: float) -> float:
        """Take a token of `name` and return 0; or return the seconds until one is available."""
        level, since = self._buckets.pop(name, (self._burst, at))
        level = min(self._burst, level + max(0.0, at - since) * self._per_s)
        is_granted = level >= 1.0
        self._buckets[name] = (level - 1.0 if is_granted else level), max(since, at)
        if len(self._buckets) > self._max_buckets:
            self._buckets.popitem(last=False)
        return 0.0 if is_granted else (1.0 - level) / self._per_s


class LoginThrottle:
    """Limits failed logins by client address."""

    def __init__(self, limits: Limits, proxies: Collection[str] = ()) -> None:
        self._buckets = TokenBuckets(limits.failed_logins_per_s, limits.failed_logins_burst)
        self._proxies = frozenset(proxies)

    def record_failure(self, scope: Scope, at: float) -> None:
        self._buckets.check(client_address(scope, self._proxies), at, "too many invalid tokens from this address")


def client_address(scope: Scope, proxies: Collection[str]) -> str:
    """Return the address of the client, from ``X-Forwarded-For`` only when the request comes from a known proxy.

    Each proxy appends the address it was contacted from, so the header is read from its end, up to the first address
    that is not a known proxy; a client can forge everything before it.
    """
    address = str((scope.get("client") or ("", 0))[0])
    forwarded = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    while address in proxies and forwarded:
        address = forwarded.pop().strip() or address
    return address


# Possessive, and the closing quote is optional: each byte is scanned once, so the time is linear for any body.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1, +1, -1, -1
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def json_depth(body: bytes) -> int:
    """Return the nesting depth of brackets outside strings; works for any bytes."""
    steps = array("b", _STRINGS.sub(b"", body).translate(_BRACKETS, _OTHERS))
    return max(accumulate(steps, initial=0))


class BodyLimitMiddleware:
    """Reads every body before the app runs, and rejects one that is too large, too slow or too deeply nested."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _METHODS_WITH_BODY:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body is None:
                return
            self._check_content(body)
        except RequestRejected as rejected:
            await problem_of_error(rejected)(scope, receive, send)
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
        """Receive the whole body; None when the client disconnects."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit():
            self._check_size(int(announced[:20]))
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            text = f"the body did not arrive within {self._limits.body_s:g} s"
            raise RequestRejected(408, text, headers={"Connection": "close"}) from None

    def _check_size(self, size: int) -> None:
        limit = self._limits.body_bytes
        if size > limit:
            text = f"the body is larger than {limit} bytes. Send fewer jobs, or a report without charts (--json)."
            raise RequestRejected(413, text, headers={"Connection": "close"})

    def _check_content(self, body: bytes) -> None:
        if b"\x00" in body:  # UTF-16 would hide the nesting from json_depth
            raise RequestRejected(400, "the body contains zero bytes. Send it as UTF-8.")
        depth, limit = json_depth(body), self._limits.json_depth
        if depth > limit:
            raise RequestRejected(400, f"the body is nested {depth} levels deep; the limit is {limit}.")
