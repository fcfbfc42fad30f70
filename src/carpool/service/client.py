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
    """What is sent to submit a job file, or tables; relative paths are seen from the file, or from `folder`."""
    if isinstance(jobs, Mapping):
        return {**jobs, "folder": str(Path(folder).absolute())}
    path = Path(jobs)
    try:
        data = json.loads(
            json.dumps(tomllib.loads(path.read_text(encoding="utf-8")), allow_nan=False, default=_as_text)
        )
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {cause(error)}", where=str(path), way_out="Name a job file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", where=str(path), way_out="Mend that line.") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"has values that cannot be sent: {error}", where=str(path)) from None
    return {**data, "folder": str(Path(folder or path.parent).absolute())}


def _as_text(value: object) -> str:
    """A moment as JSON can have it; one that does not say where is here."""
    if isinstance(value, datetime):
        return value.astimezone().isoformat()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


Json = dict[str, Any]  # as the API's description has it
_KEY = "Idempotency-Key"
_UNIX = "unix:"
_SENT = "submission"  # what a daemon calls a job file that was sent to it
_BREATH_S = 0.5


class Unreachable(InputError):
    """Nobody answers where the daemon should be."""


class RequestDenied(InputError):
    """The daemon refused what was asked; `status` is that of HTTP."""

    def __init__(self, status: int, problem: str, *, where: str = "", way_out: str = "") -> None:
        super().__init__(problem, where=where, way_out=way_out)
        self.status = status


class DaemonError(CarpoolError):
    """The daemon could not do what was asked, through no fault of whoever asked."""


class Client:
    """Asks a daemon. Not to be used from two threads at a time.

    `server` is a URL or ``unix:PATH``, `ca` a file with the certificates to believe; where these and `token` are not
    given the settings say (see `carpool config show`).
    """

    def __init__(self, server: str = "", token: str = "", *, ca: str = "", timeout_s: float = 60.0) -> None:
        settings = read_settings(os.environ)
        self.server = server or settings["server"] or f"{_UNIX}{settings.socket}"
        self._token = token or settings["token"]
        self._authority = Path(ca) if ca else settings.path("ca")
        self._timeout_s = timeout_s
        self._line: http.client.HTTPConnection | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        if self._line is not None:
            self._line.close()
            self._line = None

    # --------------------------------------------------------------------------------------------------------- wishes
    def submit(self, jobs: Path | str | Mapping[str, Any], *, folder: Path | str = "", key: str = "") -> list[str]:
        """Submit the jobs of a job file, or tables as in one; their names, once they can no longer be lost."""
        headers = {_KEY: key} if key else {}
        with _by_its_name(jobs):
            names: list[str] = self.ask("POST", "/v1/jobs", body=submission_body(jobs, folder), headers=headers)["jobs"]
        return names

    def plan(self, jobs: Path | str | Mapping[str, Any], *, folder: Path | str = "") -> Json:
        """What would become of jobs if they were submitted now."""
        with _by_its_name(jobs):
            return self._object("POST", "/v1/plan", body=submission_body(jobs, folder))

    def cancel(self, job: str) -> Json:
        """Withdraw a job; how it stands then."""
        return self._object("POST", f"{_at(job)}/cancel")

    def pause(self, job: str) -> Json:
        """Take a job off its devices until `resume`."""
        return self._object("POST", f"{_at(job)}/pause")

    def resume(self, job: str) -> Json:
        """Put a paused job back into the queue."""
        return self._object("POST", f"{_at(job)}/resume")

    def wish_array(self, array: str, word: str) -> list[str]:
        """Cancel, pause or resume all jobs of a sweep that can be; their names."""
        names: list[str] = self._object("POST", f"/v1/arrays/{quote(array, safe='')}/{word}")["jobs"]
        return names

    def reweigh(self, job: str, weight: float) -> Json:
        """Let a job count more or less from now on."""
        return self._object("PUT", f"{_at(job)}/weight", body={"weight": weight})

    def limit(self, job: str, min_devices: int, max_devices: int) -> Json:
        """Let a job hold another number of devices from now on."""
        return self._object("PUT", f"{_at(job)}/limits", body={"min_devices": min_devices, "max_devices": max_devices})

    def policy(self) -> str:
        """The policy that decides."""
        return str(self.policy_state()["policy"])

    def policy_state(self) -> Json:
        """The policy that decides, and the fault of the one before where that is why."""
        return self._object("GET", "/v1/policy")

    def change_policy(self, policy: str) -> str:
        """Let another policy decide from now on."""
        return str(self._object("PUT", "/v1/policy", body={"policy": policy})["policy"])

    # ----------------------------------------------------------------------------------------------------------- jobs
    def jobs(self, **filters: Any) -> Json:
        """A page of jobs: `phase` (one or several), `user`, `contains`, `newest_first`, `offset`, `limit`."""
        return self._object("GET", "/v1/jobs", **filters)

    def all_jobs(self, **filters: Any) -> Iterator[Json]:
        """Every job that matches, page by page."""
        offset = 0
        while page := self.jobs(**filters, offset=offset, limit=500)["jobs"]:
            yield from page
            offset += len(page)

    def job(self, job: str) -> Json:
        """One job."""
        return self._object("GET", _at(job))

    def story(self, job: str) -> list[Json]:
        """What happened to a job, in words."""
        return self._list("GET", f"{_at(job)}/story")

    def why(self, job: str) -> str:
        """Why a job waits, or holds what it holds."""
        return str(self._object("GET", f"{_at(job)}/why")["why"])

    def measurements(self, job: str, most: int = 2000) -> list[Json]:
        """A job's curve."""
        return self._list("GET", f"{_at(job)}/measurements", most=most)

    def log(self, job: str, start: int = 0) -> Json:
        """A stretch of a job's log: text, start, next, is_over."""
        return self._object("GET", f"{_at(job)}/log", start=start)

    def follow(self, job: str, start: int = 0) -> Iterator[bytes]:
        """A job's log as it is written, until the job is over; on a line of its own."""
        start = self.log(job, start)["start"]
        while True:
            with _whatever_breaks(), self._stream(f"{_at(job)}/log/follow", start=start) as answer:
                while piece := answer.read1(1 << 16):
                    start += len(piece)
                    yield piece
            last = self.log(job, start)  # a stream also ends because it has gone on for long
            if last["is_over"] and not last["text"]:
                return

    # ------------------------------------------------------------------------------------------------------- the rest
    def me(self) -> Json:
        """Who asks, as the daemon sees it."""
        return self._object("GET", "/v1/me")

    def summary(self) -> Json:
        """The whole in a few figures."""
        return self._object("GET", "/v1/summary")

    def devices(self) -> list[Json]:
        """Every device and who holds it."""
        return self._list("GET", "/v1/devices")

    def nodes(self) -> list[Json]:
        """Every machine with its devices."""
        return self._list("GET", "/v1/nodes")

    def decisions(self, **filters: Any) -> list[Json]:
        """The newest plans: `before`, `limit`."""
        return self._list("GET", "/v1/decisions", **filters)

    def timeline(self, since: float, until: float) -> list[Json]:
        """Who held which device between two instants, in Unix time."""
        return self._list("GET", "/v1/timeline", since=since, until=until)

    def events(self, after: int | None = None) -> Iterator[Json]:
        """What happens, as it happens; a line that breaks is taken up again where it was."""
        while True:
            given = {} if after is None else {"after": after}
            with _whatever_breaks(), self._stream("/v1/events", **given) as answer:
                for number, event in _server_sent(answer):
                    after = after if number is None else number
                    yield event

    # --------------------------------------------------------------------------------------------------------- inside
    def ask(
        self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str] | None = None, **query: Any
    ) -> Any:
        """The answer to any question of the API; Denied, Unreachable or Faulty where there is none."""
        try:
            answer = self._send(method, path, body, headers, query)
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._fail(error)
        if answer.status >= 400:
            raise _error(answer.status, text)
        return json.loads(text)

    def _object(self, method: str, path: str, **given: Any) -> Json:
        found: Json = self.ask(method, path, **given)
        return found

    def _list(self, method: str, path: str, **given: Any) -> list[Json]:
        found: list[Json] = self.ask(method, path, **given)
        return found

    @contextmanager
    def _stream(self, path: str, **query: Any) -> Iterator[http.client.HTTPResponse]:
        """An answer that goes on, on a line of its own."""
        line = self._connect(None)
        try:
            try:
                line.request("GET", _address(path, query), headers=self._headers({}))
                answer = line.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._fail(error)
            if answer.status >= 400:
                raise _error(answer.status, answer.read())
            yield answer
        finally:
            line.close()

    def _send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str] | None, query: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        """Ask on the line that stands, or on a new one where the daemon has hung up.

        One that breaks while it is asked may have brought the wish there: it is repeated only if that changes nothing.
        """
        content = None if body is None else json.dumps(body).encode()
        given = self._headers(headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        if self._line is not None and _has_hung_up(self._line):
            self.close()
        may_repeat = self._line is not None and (method != "POST" or _KEY in given)
        try:
            return self._try(method, _address(path, query), content, given)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not may_repeat:
                raise
            self.close()
            return self._try(method, _address(path, query), content, given)

    def _try(
        self, method: str, address: str, content: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        if self._line is None:
            self._line = self._connect(self._timeout_s)
        self._line.request(method, address, content, headers)
        return self._line.getresponse()

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        if self.server.startswith(_UNIX):
            return _UnixConnection(self.server[len(_UNIX) :], timeout_s)
        parts = urlsplit(self.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"server is {self.server!r}", way_out="Give http://HOST:PORT, https://HOST, or unix:PATH.")
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        from carpool.service.transport import client_context  # only here: others need not wait for it

        context = client_context(self._authority)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        return {**({"Authorization": f"Bearer {self._token}"} if self._token else {}), **more}

    def _fail(self, error: Exception) -> NoReturn:
        self.close()
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Unreachable(
                f"who answers at {self.server} cannot be believed: {error.verify_message}",
                way_out="Name the certificate, or its issuer's, in the setting 'ca' (CARPOOL_CA=FILE).",
            ) from error
        raise Unreachable(
            f"no daemon answers at {self.server}: {cause(error)}", way_out="Start one with: carpool serve"
        ) from error


@contextmanager
def _whatever_breaks() -> Iterator[None]:
    """A line that breaks in the middle is taken up again, after a breath; one that cannot be is told."""
    try:
        yield
    except (OSError, http.client.HTTPException):
        time.sleep(_BREATH_S)


def _server_sent(answer: http.client.HTTPResponse) -> Iterator[tuple[int | None, Json]]:
    """The events of a stream, each with the number that was told last."""
    number, data = None, ""
    while line := answer.readline().decode():
        name, _, value = line.rstrip("\n").partition(": ")
        if name == "id":
            number = int(value)
        elif name == "data":
            data = value
        elif not name and data:
            yield number, json.loads(data)
            data = ""


def _has_hung_up(line: http.client.HTTPConnection) -> bool:
    """Whether the other end has closed a line on which nothing is due: only then is there something to read."""
    if line.sock is None:
        return False
    looked = select.poll()
    looked.register(line.sock, select.POLLIN)
    return bool(looked.poll(0))


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
def _by_its_name(jobs: Path | str | Mapping[str, Any]) -> Iterator[None]:
    """What is wrong in a file is told with its name, which the daemon does not know."""
    try:
        yield
    except RequestDenied as denied:
        if isinstance(jobs, Mapping) or not denied.where.startswith(_SENT):
            raise
        where = f"{jobs}{denied.where.removeprefix(_SENT)}"
        raise RequestDenied(denied.status, denied.problem, where=where, way_out=denied.way_out) from None


def _at(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}"


def _address(path: str, query: Mapping[str, Any]) -> str:
    given = {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def _error(status: int, text: bytes) -> CarpoolError:
    try:
        said = json.loads(text)
        detail, where, way_out = str(said["detail"]), str(said.get("where", "")), str(said.get("way_out", ""))
    except (ValueError, KeyError, TypeError):
        detail, where, way_out = text.decode("utf-8", "replace")[:500] or f"answered {status}", "", ""
    if status >= 500:
        return DaemonError(detail)
    if way_out and detail.endswith(way_out):  # the sentence is put together again by whoever raises it
        detail = detail[: -len(way_out)].rstrip()
    if where and detail.startswith(f"{where}: "):
        detail = detail[len(where) + 2 :]
    return RequestDenied(status, detail, where=where, way_out=way_out)
