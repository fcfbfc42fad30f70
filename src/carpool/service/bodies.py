"""What may be sent: bodies are read whole before anybody looks at them, up to a size, a time and a depth."""

from __future__ import annotations

import asyncio
import re
from array import array
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.service.limits import Limits
from carpool.service.problems import Turned, of_error

# Possessive, and closed or not: whatever begins with a quote is passed over once, so that time is linear in any body.
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # up, up, down, down
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_WITH_BODIES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def json_depth(body: bytes) -> int:
    """How deep brackets are nested, texts left out; of any bytes at all."""
    steps = array("b", _TEXTS.sub(b"", body).translate(_BRACKETS, _OTHERS))
    return max(accumulate(steps, initial=0))


class Bodies:
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
        except Turned as turned:
            await of_error(turned)(scope, receive, send)
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
            raise Turned(408, text, headers={"Connection": "close"}) from None
        body = b"".join(pieces)
        if b"\x00" in body:  # UTF-16 could hide its depth from us, and not from whoever reads it
            raise Turned(400, "the body holds zero bytes. Send it as UTF-8.")
        if json_depth(body) > self._limits.json_depth:
            raise Turned(400, f"the body nests deeper than {self._limits.json_depth} levels. Send it flatter.")
        return body


def _too_large(most: int) -> Turned:
    text = f"the body is larger than {most} bytes. Send fewer jobs at once, or a report without its charts (--json)."
    return Turned(413, text, headers={"Connection": "close"})
