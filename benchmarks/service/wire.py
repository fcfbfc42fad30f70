"""Load client: prepared requests on persistent connections, timed one by one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any


class Target:
    """Where requests go: a port on loopback, with a token."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._token = token

    def request(self, line: str, body: Any = None) -> bytes:
        """A whole request."""
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content

    async def ask(self, request: bytes, goes_on: Callable[[], bool], took: list[float], pause_s: float = 0.0) -> None:
        """Send the same request again and again, one after the other; the seconds each took."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while goes_on():
                began = time.perf_counter()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(_length(head))
                if not head.startswith(b"HTTP/1.1 20"):
                    raise SystemExit(f"refused: {head.decode()}")
                took.append(time.perf_counter() - began)
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            writer.close()

    async def listen(self, heard: list[int]) -> None:
        """Follow the events for ever; bytes heard."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self.request("GET /v1/events"))
        place = len(heard)
        heard.append(0)
        while piece := await reader.read(1 << 16):
            heard[place] += len(piece)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    raise SystemExit(f"no length: {head.decode()}")


def quantile(values: list[float], part: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")
