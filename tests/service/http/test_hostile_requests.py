"""Hostile bodies, job tables and paths: each is rejected with the right status, and nothing leaks."""

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
from tests.support.http_rig import BASE, LAX_LIMITS, HttpRig, run_hostile

JSON = {"Content-Type": "application/json"}


# -------------------------------------------------------------------------------------------------------------- bodies
def test_a_large_body_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    async def scenario(rig: HttpRig) -> None:
        announced = await rig["ada"].post("/v1/jobs", content=b" " * ((1 << 20) + 1))
        chunked = await rig["ada"].post("/v1/jobs", content=endless())
        assert [announced.status_code, chunked.status_code] == [413, 413]
        assert "1048576" in chunked.json()["detail"]
        assert sent <= 2 << 20

    run_hostile(tmp_path, scenario)


def test_a_slow_body_times_out(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    async def scenario(rig: HttpRig) -> None:
        answer = await rig["ada"].post("/v1/jobs", content=slow())
        assert (answer.status_code, answer.headers["connection"]) == (408, "close")

    run_hostile(tmp_path, scenario, limits=replace(LAX_LIMITS, body_s=0.05))


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 50_000, b'{"job": [{"args": ' + b"[" * 40 + b"]" * 40 + b"}]}"]
)
def test_deep_json_is_rejected(tmp_path: Path, body: bytes) -> None:
    async def scenario(rig: HttpRig) -> None:
        answer = await rig["ada"].post("/v1/jobs", content=body, headers=JSON)
        assert answer.status_code == 400
        assert "the limit is 32" in answer.json()["detail"]

    run_hostile(tmp_path, scenario)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
def test_depth_cannot_be_hidden_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    async def scenario(rig: HttpRig) -> None:
        text = json.dumps(
            rig.body("\u2200", args={"lr": "DEEP"}), ensure_ascii=False
        )  # one of its UTF-16 bytes is a quote
        body = text.replace('"DEEP"', "[" * 40 + "]" * 40).encode(encoding)
        answer = await rig["ada"].post("/v1/jobs", content=body, headers=JSON)
        assert answer.status_code == 400
        assert "UTF-8" in answer.json()["detail"]

    run_hostile(tmp_path, scenario)


@given(st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_depth_is_that_of_the_value(value: object) -> None:
    def deep(each: object) -> int:
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else None
        return 0 if inner is None else 1 + max(map(deep, inner), default=0)

    assert json_depth(json.dumps(value).encode()) == deep(value)


@pytest.mark.parametrize("body", [b'"' + b'\\"' * (1 << 19), b'"\\' * (1 << 19), b'"' * (1 << 20), b"\\" * (1 << 20)])
def test_unterminated_strings_are_scanned_in_linear_time(tmp_path: Path, body: bytes) -> None:
    async def scenario(rig: HttpRig) -> None:
        answer = await rig["nobody"].post("/sign-in", content=body[: 1 << 20], headers={"Origin": BASE})
        assert answer.status_code == 401

    with within_cpu_s(20):  # takes 0.01 s; a quadratic scan would take an hour
        run_hostile(tmp_path, scenario)


@contextmanager
def within_cpu_s(seconds: int) -> Iterator[None]:
    """Fail when the block takes more CPU time."""

    def fail(*_: object) -> None:
        raise AssertionError(f"more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@given(st.text(alphabet='"\\[]{}a\n'))
def test_json_depth_of_any_bytes_equals_a_character_by_character_scan(text: str) -> None:
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


INVALID_JOBS: list[dict[str, Any]] = [
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
    {"name": "a" + "é" * 60},  # 300 characters in a file name
    {"name": "a" * 101},
    {"args": {"lr": "\ud800"}},
    {"entry": "train.py\x00:main"},
    {"entry": "inspect.py\x00:main"},  # beside a module that the server can import
    {"command": ["python\x00", "x"], "entry": ""},
    {"environment": {"A=B": "1"}},
    {"environment": {"A": "\x00"}},
    {"environment": {"": "1"}},
    {"notify": ["mail\x00"]},
    {"sweep": {name: list(range(100)) for name in "abcd"}},
    {"sweep": {"lr": {"min": 0, "max": 1}, "samples": 10**9}},
    {"sweep": {"lr": [1], "halving": 5}},
    {"entry": "", "command": ["{x}", "a"], "sweep": {"x": ["/bin/sh"]}},  # outside the roots
    {"entry": "", "command": ["sh", "a"], "metrics": "/etc/*"},
    {"entry": "", "command": ["echo", "{x}" * 1000], "sweep": {"x": ["y" * 1000]}},
    {"after": ["a"]},
]
INVALID_NUMBERS: tuple[Any, ...] = (10**400, [], None)
INVALID_DEFAULTS: list[dict[str, Any]] = [
    *({key: value} for key in ("seed", "devices", "memory", "weight", "time_limit") for value in INVALID_NUMBERS),
    *({key: 5} for key in ("command", "environment", "notify", "args", "folder", "kinds", "python", "user", "after")),
    {"environment": {"A": "\x00"}},
    {"weight": -1.0},
    {"nothing": "known"},
]


def test_defaults_are_validated_like_job_keys(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        for defaults in INVALID_DEFAULTS:
            answer = await rig["ada"].post("/v1/jobs", json=rig.body("a") | {"defaults": defaults})
            assert answer.status_code == 422, defaults

    run_hostile(tmp_path, scenario)


def test_invalid_jobs_are_rejected(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        for change in INVALID_JOBS:
            body = json.dumps(rig.body("a") | {"job": [{"name": "a", "entry": "train.py:main", **change}]})
            answer = await rig["ada"].post("/v1/jobs", content=body, headers=JSON)
            assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), change
            assert "valid dictionary" not in answer.text, "the table was not parsed"
            assert "\x1b" not in answer.text

    run_hostile(tmp_path, scenario)


def test_the_expanded_size_is_limited(tmp_path: Path) -> None:
    long = {"A": "é" * 20_000}  # 120 KB as JSON
    many = [{"name": f"j{number}", "entry": "train.py:main"} for number in range(200)]
    swept = {"name": "j", "entry": "train.py:main", "sweep": {"lr": list(range(200))}}

    async def scenario(rig: HttpRig) -> None:
        for change in (
            {"job": many, "defaults": {"environment": long}},
            {"job": [swept], "defaults": {"args": long}},
            {"job": [swept | {"environment": long}]},
            {"job": [swept | {"sweep": {"lr": list(range(199)), "b": ["é" * 100_000]}}]},
        ):
            answer = await rig["ada"].post("/v1/jobs", json=rig.body("a") | change)
            assert answer.status_code == 422
            assert "16777216" in answer.json()["detail"]

    run_hostile(tmp_path, scenario)


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


def test_paths_outside_the_roots_are_rejected(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        (tmp_path / "secret.py").write_text("def main(): ...\nPASSWORD = 1\n", encoding="utf-8")
        (rig.folder / "link.py").symlink_to(tmp_path / "secret.py")
        (rig.folder / "out").symlink_to(tmp_path)
        for who, table in product(("ada", "root"), OUTSIDE):
            answer = await rig[who].post("/v1/jobs", json=rig.body("a", **table))
            assert answer.status_code == 422, table
            assert "roots" in answer.json()["way_out"] or "file.py:function" in answer.json()["way_out"]

    run_hostile(tmp_path, scenario)


def test_the_base_folder_must_be_inside_a_root(tmp_path: Path) -> None:
    async def scenario(rig: HttpRig) -> None:
        for folder in ["/etc", "/", "relative", "", "/\x00", "/nowhere"]:
            answer = await rig["ada"].post("/v1/jobs", json=rig.body("a") | {"folder": folder})
            assert answer.status_code == 422, folder

    run_hostile(tmp_path, scenario)
