"""Structured logging of the daemon and the executor: one line per decision, order, fault and recovery.

`log_event(logger, "order", job="a", devices=[0])` writes ``order job=a devices=[0]``, or one JSON object per line with
``--log-format json``. Only what a caller names is logged; fields whose name looks like a secret are masked.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

from carpool.core.errors import InputError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LEVEL_VARIABLE, FORMAT_VARIABLE = "CARPOOL_LOG_LEVEL", "CARPOOL_LOG_FORMAT"

_ROOT = "carpool"
logging.getLogger(_ROOT).addHandler(logging.NullHandler())  # silent until configured
_SECRET = re.compile(r"token|secret|password|credential|authorization|cookie|environment|api_?key", re.IGNORECASE)
_MAX_VALUE = 2000  # characters of one field: an exception text may have megabytes
_PLAIN = re.compile(r"[\w./:@%+,\-\[\]]+")


def configure_logging(level: str = "", fmt: str = "", environment: Mapping[str, str] = os.environ) -> None:
    """Send carpool's log to stderr; empty arguments are taken from the environment, then the defaults.

    Raises InputError for an unknown level or format.
    """
    level = (level or environment.get(LEVEL_VARIABLE, "") or "warning").lower()
    fmt = (fmt or environment.get(FORMAT_VARIABLE, "") or "text").lower()
    for value, allowed, name in ((level, LEVELS, "log level"), (fmt, FORMATS, "log format")):
        if value not in allowed:
            raise InputError(f"{name} {value!r} is unknown", way_out=f"Use one of: {', '.join(allowed)}.")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else TextFormatter())
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def export_settings(level: str, fmt: str, environment: MutableMapping[str, str]) -> None:
    """Export the settings to child processes of this one."""
    for name, value in ((LEVEL_VARIABLE, level), (FORMAT_VARIABLE, fmt)):
        if value:
            environment[name] = value


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event with named fields."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": {name: _shown(name, value) for name, value in fields.items()}})


class TextFormatter(logging.Formatter):
    """``2026-11-16T16:05:22.123Z INFO carpool.service.daemon.loop order job=a``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        return f"{_instant(record)} {record.levelname} {record.name} {record.getMessage()}{fields}{_traceback(record)}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "schema": 1,
            "time": _instant(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _traceback(record).strip()
        return json.dumps(line, separators=(",", ":"), default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _shown(name: str, value: Any) -> Any:
    if _SECRET.search(name):
        return "***"
    if isinstance(value, str) and len(value) > _MAX_VALUE:
        return f"{value[:_MAX_VALUE]}… ({len(value)} characters)"
    return value


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _instant(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(record: logging.LogRecord) -> str:
    return f"\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else ""
