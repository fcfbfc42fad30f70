"""Hostile bodies and jobs, each with its outcome: nothing breaks, nothing leaks, nothing is granted."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")


from carpool.service.http.limits import json_depth
from tests.support.http_rig import BASE, GENEROUS, HttpRig, withstand

JSON = {"Content-Type": "application/json"}


# -------------------------------------------------------------------------------------------------------------- bodies
def test_a_large_body_is_not_read_to_its_end(tmp_path: Path) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    async def scene(at: HttpRig) -> None:
        announced = await at["ada"].post("/v1/jobs", content=b" " * ((1 << 20) + 1))
        chunked = await at["ada"].post("/v1/jobs", content=endless())
        assert [announced.status_code, chunked.status_code] == [413, 413]
        assert "larger than 1048576 bytes" in chunked.json()["detail"]
        assert sent <= 2 << 20

    withstand(tmp_path, scene)


def test_a_slow_body_is_given_up(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    async def scene(at: HttpRig) -> None:
        answer = await at["ada"].post("/v1/jobs", content=slow())
        assert (answer.status_code, answer.headers["connection"]) == (408, "close")

    withstand(tmp_path, scene, limits=replace(GENEROUS, body_s=0.05))


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 50_000, b'{"job": [{"args": ' + b"[" * 40 + b"]" * 40 + b"}]}"]
)
def test_deep_json_is_turned_away(tmp_path: Path, body: bytes) -> None:
    async def scene(at: HttpRig) -> None:
        answer = await at["ada"].post("/v1/jobs", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["detail"]) == (
            400,
            "the body nests deeper than 32 levels. Send it flatter.",
        )

    withstand(tmp_path, scene)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_depth_cannot_be_hidden_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    async def scene(at: HttpRig) -> None:
        text = json.dumps(at.body("\u2200", args={"lr": "DEEP"}), ensure_ascii=False)  # a byte of it is a quote
        body = text.replace('"DEEP"', "[" * 40 + "]" * 40).encode(encoding)
        answer = await at["ada"].post("/v1/jobs", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["detail"]) == (400, "the body holds zero bytes. Send it as UTF-8.")

    withstand(tmp_path, scene)


@given(st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_depth_is_that_of_the_value(value: object) -> None:
    def deep(each: object) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else None
        return 0 if inner is None else 1 + max(map(deep, inner), default=0)

    assert json_depth(json.dumps(value).encode()) == deep(value)


@pytest.mark.parametrize("body", [b'"' + b'\\"' * (1 << 19), b'"\\' * (1 << 19), b'"' * (1 << 20), b"\\" * (1 << 20)])
def test_texts_that_do_not_end_hold_nobody_up(tmp_path: Path, body: bytes) -> None:
    async def scene(at: HttpRig) -> None:
        answer = await at["nobody"].post("/sign-in", content=body[: 1 << 20], headers={"Origin": BASE})
        assert answer.status_code == 401

    with within_cpu_s(20):  # it takes hundredths of one; where every quote begins a new search, an hour
        withstand(tmp_path, scene)


@contextmanager
def within_cpu_s(seconds: int) -> Iterator[None]:
    """Fail what would go on for ever."""

    def ring(*_: object) -> None:
        raise AssertionError(f"{seconds} s of work, and no end to it")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@given(st.text(alphabet='"\\[]{}a\n'))
def test_depth_is_told_of_anything(text: str) -> None:
    """As a reader of one character after the other would tell it."""
    depth = deepest = 0
    is_text = is_escaped = False
    for each in text:
        if is_text:
            is_text = is_escaped or each != '"'
            is_escaped = each == "\\" and not is_escaped
        elif each == '"':
            is_text = True
        else:
            depth += (each in "[{") - (each in "]}")
            deepest = max(deepest, depth)
    assert json_depth(text.encode()) == deepest


IMPOSSIBLE: list[dict[str, Any]] = [
    {"seed": 10**400},
    {"memory": "9" * 400 + "GiB"},
    {"memory": 10**30},
    {"time_limit": float("inf")},
    {"time_limit": "9" * 400 + "h"},
    {"checkpoint_every": 10**400},
    {"batch": {"tune": True, "min": 1, "max": 10**40}},
    {"weight": float("nan")},
    {"weight": 1e308},
    {"weight": -1},
    {"devices": -5},
    {"name": "a\x1b[2J"},
    {"name": "../../etc/passwd"},
    {"name": "a; DROP TABLE lines; --"},
    {"name": "\ud800"},
    {"name": "a" + "é" * 60},  # three hundred characters as a file's name
    {"name": "a" * 101},
    {"args": {"lr": "\ud800"}},
    {"entry": "train.py\x00:main"},
    {"command": ["python\x00", "x"], "entry": ""},
    {"environment": {"A=B": "1"}},
    {"environment": {"A": "\x00"}},
    {"environment": {"": "1"}},
    {"notify": ["mail\x00"]},
    {"sweep": {name: list(range(100)) for name in "abcd"}},
    {"after": ["a"]},
]
NO_NUMBERS: tuple[Any, ...] = (10**400, [], None)
NO_DEFAULTS: list[dict[str, Any]] = [
    *({key: value} for key in ("seed", "devices", "memory", "weight", "time_limit") for value in NO_NUMBERS),
    *({key: 5} for key in ("command", "environment", "notify", "args", "folder", "kinds", "python", "user", "after")),
    {"environment": {"A": "\x00"}},
    {"weight": -1.0},
    {"nothing": "known"},
]


def test_no_job_gets_by_default_what_it_could_not_have_itself(tmp_path: Path) -> None:
    async def scene(at: HttpRig) -> None:
        for defaults in NO_DEFAULTS:
            answer = await at["ada"].post("/v1/jobs", json=at.body("a") | {"defaults": defaults})
            assert answer.status_code == 422, defaults

    withstand(tmp_path, scene)


def test_what_no_job_can_be_is_refused(tmp_path: Path) -> None:
    async def scene(at: HttpRig) -> None:
        for change in IMPOSSIBLE:
            body = json.dumps(at.body("a") | {"job": [{"name": "a", "entry": "train.py:main", **change}]})
            answer = await at["ada"].post("/v1/jobs", content=body, headers=JSON)
            assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), change
            assert "valid dictionary" not in answer.text, "it was not read at all"
            assert "\x1b" not in answer.text

    withstand(tmp_path, scene)


def test_a_small_body_does_not_become_a_large_record(tmp_path: Path) -> None:
    long = {"A": "é" * 20_000}  # 120 KB as JSON has it
    many = [{"name": f"j{number}", "entry": "train.py:main"} for number in range(200)]
    swept = {"name": "j", "entry": "train.py:main", "sweep": {"lr": list(range(200))}}

    async def scene(at: HttpRig) -> None:
        for change in (
            {"job": many, "defaults": {"environment": long}},
            {"job": [swept], "defaults": {"args": long}},
            {"job": [swept | {"environment": long}]},
            {"job": [swept | {"sweep": {"lr": list(range(199)), "b": ["é" * 100_000]}}]},
        ):
            answer = await at["ada"].post("/v1/jobs", json=at.body("a") | change)
            assert answer.status_code == 422
            assert "the limit is 16777216" in answer.json()["detail"]

    withstand(tmp_path, scene)


# --------------------------------------------------------------------------------------------------------------- paths
OUTSIDE: list[dict[str, Any]] = [
    {"entry": "../secret.py:main"},
    {"entry": "link.py:main"},
    {"entry": "os:system"},
    {"entry": "sys:exit"},
    {"folder": ".."},
    {"folder": "/"},
    {"folder": "out"},
    {"entry": "", "command": ["/bin/sh", "-c", "true"]},
    {"entry": "", "command": ["../run.sh"]},
    {"notify": ["/bin/mail", "ada"]},
    {"entry": "", "command": ["python", "../secret.py"]},
    {"entry": "", "command": ["python", "train.py"], "python": "/usr/bin/python3"},
]


def test_nothing_outside_the_roots_is_run_or_looked_at(tmp_path: Path) -> None:
    async def scene(at: HttpRig) -> None:
        (tmp_path / "secret.py").write_text("def main(): ...\nPASSWORD = 1\n", encoding="utf-8")
        (at.folder / "link.py").symlink_to(tmp_path / "secret.py")
        (at.folder / "out").symlink_to(tmp_path)
        for who, table in product(("ada", "root"), OUTSIDE):
            answer = await at[who].post("/v1/jobs", json=at.body("a", **table))
            assert answer.status_code == 422, table
            assert "outside the folders" in answer.json()["detail"] or "in no file" in answer.json()["detail"]
            assert "roots" in answer.json()["way_out"] or "Name a file" in answer.json()["way_out"]

    withstand(tmp_path, scene)


def test_the_base_folder_must_be_a_root_too(tmp_path: Path) -> None:
    async def scene(at: HttpRig) -> None:
        for folder in ["/etc", "/", "relative", "", "/\x00", "/nowhere"]:
            answer = await at["ada"].post("/v1/jobs", json=at.body("a") | {"folder": folder})
            assert answer.status_code == 422, folder

    withstand(tmp_path, scene)
