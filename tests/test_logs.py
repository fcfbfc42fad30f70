"""Log lines carry their fields, bounded and without secrets, as text or JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from carpool.core.errors import InputError
from carpool.logs import configure_logging, export_settings, log_event

LOG = logging.getLogger("carpool.tests")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger("carpool")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def logged(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_text_lines_quote_only_what_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text", {})
    log_event(LOG, "order", job="a", devices=[0, 1], reason="two words")
    line = logged(capsys)
    assert line.endswith('INFO carpool.tests order job=a devices=[0,1] reason="two words"\n')


def test_json_lines_are_objects_with_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json", {})
    log_event(LOG, "fault", level=logging.ERROR, job="a", error="gone")
    line = json.loads(logged(capsys))
    assert (line["schema"], line["level"], line["event"], line["job"]) == (1, "error", "fault", "a")


def test_a_line_break_in_a_value_stays_inside_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text", {})
    log_event(LOG, "fault", error="one\ntwo")
    assert logged(capsys).count("\n") == 1


@pytest.mark.parametrize("name", ["token", "api_key", "password", "environment", "Authorization"])
@pytest.mark.parametrize("fmt", ["text", "json"])
def test_secrets_are_masked(capsys: pytest.CaptureFixture[str], name: str, fmt: str) -> None:
    configure_logging("info", fmt, {})
    fields: dict[str, Any] = {name: "hunter2"}
    log_event(LOG, "login", **fields)
    assert "hunter2" not in logged(capsys)


def test_long_values_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text", {})
    log_event(LOG, "fault", error="x" * 10**6)
    assert len(logged(capsys)) < 3000


def test_levels_come_from_the_argument_then_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    environment: dict[str, str] = {}
    export_settings("error", "json", environment)
    configure_logging(environment=environment)
    log_event(LOG, "order", job="a")
    assert logged(capsys) == ""
    configure_logging("info", environment=environment)
    log_event(LOG, "order", job="a")
    assert json.loads(logged(capsys))["job"] == "a"


@pytest.mark.parametrize(("level", "fmt"), [("loud", "text"), ("info", "xml")])
def test_unknown_settings_name_the_choices(level: str, fmt: str) -> None:
    with pytest.raises(InputError, match=r"(?s)debug|text"):
        configure_logging(level, fmt, {})


def test_a_traceback_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json", {})
    try:
        io.StringIO().fileno()
    except OSError:
        LOG.exception("fault")
    assert "UnsupportedOperation" in json.loads(logged(capsys))["traceback"]
