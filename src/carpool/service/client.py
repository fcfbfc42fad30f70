"""HTTP client of a daemon (``carpool.Client``) over a Unix socket or a URL; standard library only."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import ssl
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from carpool.core.errors import CarpoolError, InputError, cause
from carpool.service.config import read_settings


def submission_body(jobs: Path | str | Mapping[str, Any], folder: Path | str = "") -> dict[str, Any]:
    """Request body for a job file or its tables; relative paths are relative to the file, or to `folder`."""
    if isinstance(jobs, Mapping):
        return {**jobs, "folder": str(Path(folder).absolute())}
    path = Path(jobs)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        data = json.loads(json.dumps(tables, allow_nan=False, default=_encode_datetime))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Give a job file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not valid TOML: {error}", where=str(path), way_out="Fix that line.") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"has a value that JSON cannot represent: {error}", where=str(path)) from None
    return {**data, "folder": str(Path(folder or path.parent).absolute())}


def _encode_datetime(value: object) -> str:
    """Encode a TOML date-time for JSON; one without an offset is in local time."""
    if isinstance(value, datetime):
        return value.astimezone().isoformat()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


Json = dict[str, Any]  # see /v1/openapi.json for the fields
_KEY = "Idempotency-Key"
_UNIX = "unix:"
_SUBMISSION = "submission"  # the daemon's name for the file in error messages
_RECONNECT_DELAY_S = 0.5


class Unreachable(InputError):
    """No daemon answers at the address."""


class RequestDenied(InputError):
    """The daemon denied the request; `status` is the HTTP status (4xx)."""

    def __init__(self, status: int, problem: str, *, where: str = "", way_out: str = "") -> None:
        super().__init__(problem, where=where, way_out=way_out)
        self.status = status


class DaemonError(CarpoolError):
    """The daemon failed to handle the request (HTTP 5xx)."""


class Client:
    """Client of a daemon's HTTP API. Not thread-safe.

    `server` is a URL or ``unix:PATH``, `ca` a PEM file with trusted certificates. Arguments that are not given come
    from the settings (see `carpool config show`).

    Methods raise RequestDenied, Unreachable or DaemonError. The replies are described by `/v1/openapi.json`.
    """

    def __init__(self, server: str = "", token: str = "", *, ca: str = "", timeout_s: float = 60.0) -> None:
        settings = read_settings(os.environ)
        self.server = server or settings["server"] or f"{_UNIX}{settings.socket}"
        self._token = token or settings["token"]
        self._authority = Path(ca) if ca else settings.path("ca")
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def submit(self, jobs: Path | str | Mapping[str, Any], *, folder: Path | str = "", key: str = "") -> list[str]:
        """Submit the jobs of a job file, or of its tables; returns their names once they are on the daemon's disk."""
        body, headers = submission_body(jobs, folder), {_KEY: key} if key else {}
        with _named_errors(jobs):
            names: list[str] = self.request("POST", "/v1/jobs", body=body, headers=headers)["jobs"]
        return names

    def plan(self, jobs: Path | str | Mapping[str, Any], *, folder: Path | str = "") -> Json:
        """Forecast start and end of jobs if they were submitted now."""
        with _named_errors(jobs):
            return self._object("POST", "/v1/plan", body=submission_body(jobs, folder))

    def cancel(self, job: str) -> Json:
        """Cancel a job; returns its new state, as the other commands on one job do."""
        return self._object("POST", f"{_job_path(job)}/cancel")

    def pause(self, job: str) -> Json:
        """Preempt a job until `resume`."""
        return self._object("POST", f"{_job_path(job)}/pause")

    def resume(self, job: str) -> Json:
        """Put a paused job back into the queue."""
        return self._object("POST", f"{_job_path(job)}/resume")

    def apply_to_array(self, array: str, action: str) -> list[str]:
        """Cancel, pause or resume all jobs of a sweep that allow it; returns their names."""
        names: list[str] = self._object("POST", f"/v1/arrays/{quote(array, safe='')}/{action}")["jobs"]
        return names

    def reweigh(self, job: str, weight: float) -> Json:
        """Change a job's weight."""
        return self._object("PUT", f"{_job_path(job)}/weight", body={"weight": weight})

    def limit(self, job: str, min_devices: int, max_devices: int) -> Json:
        """Change how many devices a job may use."""
        body = {"min_devices": min_devices, "max_devices": max_devices}
        return self._object("PUT", f"{_job_path(job)}/limits", body=body)

    def policy(self) -> str:
        """Name and parameters of the scheduling policy."""
        return str(self.policy_state()["policy"])

    def policy_state(self) -> Json:
        """The scheduling policy, and the error of the previous one if the daemon fell back."""
        return self._object("GET", "/v1/policy")

    def change_policy(self, policy: str) -> str:
        """Schedule with another policy from now on, given by name and parameters."""
        return str(self._object("PUT", "/v1/policy", body={"policy": policy})["policy"])

    def jobs(self, **filters: Any) -> Json:
        """One page of jobs; filters: `phase` (may be a list), `user`, `contains`, `newest_first`, `offset`, `limit`."""
        return self._object("GET", "/v1/jobs", **filters)

    def all_jobs(self, **filters: Any) -> Iterator[Json]:
        """All jobs that match, fetched page by page."""
        offset = 0
        while page := self.jobs(**filters, offset=offset, limit=500)["jobs"]:
            yield from page
            offset += len(page)

    def job(self, job: str) -> Json:
        """One job: phase, devices, progress, request and error."""
        return self._object("GET", _job_path(job))

    def story(self, job: str) -> list[Json]:
        """What happened to a job, oldest first."""
        return self._list("GET", f"{_job_path(job)}/story")

    def why(self, job: str, *, verbose: bool = False) -> str:
        """Why a job waits, or why it has its devices; `verbose` adds the policy's figures."""
        return str(self._object("GET", f"{_job_path(job)}/why", **({"verbose": "true"} if verbose else {}))["why"])

    def sweeps(self) -> list[Json]:
        """The sweeps that the caller may see."""
        return self._list("GET", "/v1/sweeps")

    def results(self, sweep: str, metric: str = "", mode: str = "") -> Json:
        """Hyper-parameters and metrics of a sweep, best first."""
        return self._object("GET", f"/v1/sweeps/{quote(sweep, safe='')}/results", metric=metric, mode=mode)

    def measurements(self, job: str, most: int = 2000) -> list[Json]:
        """Loss, rate and metrics of a job over time, thinned to at most `most` points."""
        return self._list("GET", f"{_job_path(job)}/measurements", most=most)

    def log(self, job: str, start: int = 0) -> Json:
        """Part of a job's log from byte `start`: text, start, next, is_over."""
        return self._object("GET", f"{_job_path(job)}/log", start=start)

    def follow(self, job: str, start: int = 0) -> Iterator[bytes]:
        """Stream a job's log until the job ends, over a separate connection; reconnects if it breaks."""
        start = self.log(job, start)["start"]
        while True:
            with _retry_broken_stream(), self._stream(f"{_job_path(job)}/log/follow", start=start) as response:
                while chunk := response.read1(1 << 16):
                    start += len(chunk)
                    yield chunk
            last = self.log(job, start)  # the server also ends streams after a time limit
            if last["is_over"] and not last["text"]:
                return

    def me(self) -> Json:
        """Name and role of the caller."""
        return self._object("GET", "/v1/me")

    def summary(self) -> Json:
        """Version, policy, and counts of devices and jobs."""
        return self._object("GET", "/v1/summary")

    def devices(self) -> list[Json]:
        """The devices, with the jobs on them."""
        return self._list("GET", "/v1/devices")

    def drain(self, node: str) -> list[Json]:
        """Release a node's jobs and schedule none on it until `undrain`; returns all nodes."""
        return self._list("POST", f"/v1/nodes/{quote(node, safe='')}/drain")

    def undrain(self, node: str) -> list[Json]:
        """Schedule jobs on a drained node again."""
        return self._list("POST", f"/v1/nodes/{quote(node, safe='')}/undrain")

    def nodes(self) -> list[Json]:
        """The machines, their devices, and which are drained or lost."""
        return self._list("GET", "/v1/nodes")

    def decisions(self, **filters: Any) -> list[Json]:
        """The newest plans; filters: `before`, `limit`."""
        return self._list("GET", "/v1/decisions", **filters)

    def timeline(self, since: float, until: float) -> list[Json]:
        """Allocations of devices between two instants, in Unix time."""
        return self._list("GET", "/v1/timeline", since=since, until=until)

    def events(self, after: int | None = None) -> Iterator[Json]:
        """Stream the daemon's events; if the connection breaks, reconnects and continues after the last event."""
        while True:
            query = {} if after is None else {"after": after}
            with _retry_broken_stream(), self._stream("/v1/events", **query) as response:
                for number, event in _parse_events(response):
                    after = after if number is None else number
                    yield event

    def request(
        self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str] | None = None, **query: Any
    ) -> Any:
        """Send a request to any route of the API and decode the reply."""
        try:
            response = self._send(method, path, body, headers, query)
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._fail(error)
        if response.status >= 400:
            raise _error(response.status, text)
        return json.loads(text)

    ask, wish_array = request, apply_to_array  # former names, for existing scripts

    def _object(self, method: str, path: str, **given: Any) -> Json:
        reply: Json = self.request(method, path, **given)
        return reply

    def _list(self, method: str, path: str, **given: Any) -> list[Json]:
        reply: list[Json] = self.request(method, path, **given)
        return reply

    @contextmanager
    def _stream(self, path: str, **query: Any) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect(None)
        try:
            try:
                connection.request("GET", _url(path, query), headers=self._headers({}))
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._fail(error)
            if response.status >= 400:
                raise _error(response.status, response.read())
            yield response
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None, query: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        """Send on the open connection, or on a new one if the daemon has closed it.

        If the connection breaks during the request, the daemon may have received it: only idempotent requests on a
        connection that was already open are retried, once.
        """
        content = None if body is None else json.dumps(body).encode()
        sent = self._headers(headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        if self._connection is not None and _is_closed_by_peer(self._connection):
            self.close()
        may_retry = self._connection is not None and (method != "POST" or _KEY in sent)
        try:
            return self._try(method, _url(path, query), content, sent)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not may_retry:
                raise
            self.close()
            return self._try(method, _url(path, query), content, sent)

    def _try(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._connect(self._timeout_s)
        self._connection.request(method, url, content, headers)
        return self._connection.getresponse()

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        if self.server.startswith(_UNIX):
            return _UnixConnection(self.server[len(_UNIX) :], timeout_s)
        parts = urlsplit(self.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"server is {self.server!r}", way_out="Give http://HOST:PORT, https://HOST, or unix:PATH.")
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        from carpool.service.transport import client_context  # imports ssl setup only where TLS is used

        context = client_context(self._authority)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**({"Authorization": f"Bearer {self._token}"} if self._token else {}), **more}

    def _fail(self, error: Exception) -> NoReturn:
        self.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Unreachable(
                f"the certificate of {self.server} is not trusted: {error.verify_message}",
                way_out="Set 'ca' (CARPOOL_CA=FILE) to the certificate, or to that of its issuer.",
            ) from error
        if isinstance(error, TimeoutError):
            raise Unreachable(
                f"{self.server} has not answered within {self._timeout_s:g} s; it may still do what was asked",
                way_out="See carpool ps; the daemon's disk may be full, or the machine busy.",
            ) from error
        raise Unreachable(
            f"no daemon answers at {self.server}: {cause(error)}", way_out="Start one with: carpool serve"
        ) from error


@contextmanager
def _retry_broken_stream() -> Iterator[None]:
    """Suppress the error of a broken stream and wait, so that the caller reconnects."""
    try:
        yield
    except (OSError, http.client.HTTPException):
        time.sleep(_RECONNECT_DELAY_S)


def _parse_events(response: http.client.HTTPResponse) -> Iterator[tuple[int | None, Json]]:
    """Events of a server-sent stream, each with the latest id."""
    number, data = None, ""
    while line := response.readline().decode():
        name, _, value = line.rstrip("\n").partition(": ")
        if name == "id":
            number = int(value)
        elif name == "data":
            data = value
        elif not name and data:
            yield number, json.loads(data)
            data = ""


def _is_closed_by_peer(connection: http.client.HTTPConnection) -> bool:
    """Whether the peer has closed an idle connection: only then is it readable."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextmanager
def _named_errors(jobs: Path | str | Mapping[str, Any]) -> Iterator[None]:
    """Put the name of the job file, which the daemon does not know, into its error messages."""
    try:
        yield
    except RequestDenied as denied:
        if isinstance(jobs, Mapping) or not denied.where.startswith(_SUBMISSION):
            raise
        where = f"{jobs}{denied.where.removeprefix(_SUBMISSION)}"
        raise RequestDenied(denied.status, denied.problem, where=where, way_out=denied.way_out) from None


def _job_path(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}"


def _url(path: str, query: Mapping[str, Any]) -> str:
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()}
    return f"{path}?{urlencode(values, doseq=True)}" if values else path


def _error(status: int, text: bytes) -> CarpoolError:
    try:
        reply = json.loads(text)
        detail, where, way_out = str(reply["detail"]), str(reply.get("where", "")), str(reply.get("way_out", ""))
    except (ValueError, KeyError, TypeError):
        detail, where, way_out = text.decode("utf-8", "replace")[:500] or f"HTTP status {status}", "", ""
    if status >= 500:
        return DaemonError(detail)
    if way_out and detail.endswith(way_out):  # InputError appends it again
        detail = detail[: -len(way_out)].rstrip()
    if where and detail.startswith(f"{where}: "):
        detail = detail[len(where) + 2 :]
    return RequestDenied(status, detail, where=where, way_out=way_out)
