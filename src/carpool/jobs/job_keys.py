"""Job keys: every key of a job table, the type and limits of its value, its default and its meaning."""

from __future__ import annotations

from typing import Any, NamedTuple


class JobKey(NamedTuple):
    """A key of a ``[[job]]`` table: the type of its value, its default, what it means, and the limits of a number."""

    type: str  # named in `service.http.schemas`, which checks it in requests
    default: Any
    help: str = ""
    least: float = 0
    most: float = 1_000_000


# The only declaration of job keys: the job-file reader accepts these, and the HTTP API's schema is made from them.
KEYS = {
    "name": JobKey("name", ...),
    "entry": JobKey("text", "", "Training to run: file.py:function, or package.module:function."),
    "args": JobKey("table", {}, "Arguments of the entry."),
    "sweep": JobKey("table", {}, "Lists or ranges of values, with samples, seed and halving; one job per trial."),
    "at_most": JobKey("integer", 0, "How many jobs of the sweep may wait or run at once; 0: all."),
    "command": JobKey("texts", [], "Program and arguments to run instead of an entry."),
    "metrics": JobKey("text or texts", [], "TensorBoard event files of a command, as patterns: runs/*/events*."),
    "resumable": JobKey(
        "switch", False, "The command saves its state on SIGTERM and continues from it when restarted."
    ),
    "progress": JobKey(
        "text", "", "Regular expression that finds the command's step in its output, such as (\\d+)/(\\d+); or tqdm."
    ),
    "fork_start": JobKey("switch", True, "Start a Python command with torch imported already, if it runs the same."),
    "python": JobKey("text", "", "Interpreter of a command that begins with python."),
    "folder": JobKey("text", "", "Working folder, relative to the submission's."),
    "environment": JobKey("variables", {}, "Environment variables; stored by the daemon, never returned."),
    "devices": JobKey("integer", 0, "Devices requested.", 1),
    "min_devices": JobKey("integer", 0, "Fewest devices it can run on.", 1),
    "max_devices": JobKey("integer", 0, "Most devices it may use.", 1),
    "kinds": JobKey("text or texts", [], "Allowed device types; empty: all."),
    "memory": JobKey("bytes", 0, "Memory per device: bytes, or 6GiB."),
    "cpus": JobKey("integer", 0, "CPU cores per device."),
    "ram": JobKey("bytes", 0, "RAM per device: bytes, or 16GiB."),
    "disk": JobKey("bytes", 0, "Disk space per node: bytes, or 90GiB."),
    "max_nodes": JobKey("integer", 0, "Maximum number of machines; 0: one (in a simulation: no limit)."),
    "weight": JobKey("number", 1.0, "Importance relative to other jobs.", 1e-6, 1e6),
    "priority": JobKey("priority", "normal"),
    "deadline": JobKey("seconds or none", None, "When it should finish: a duration such as 8h, or a time."),
    "user": JobKey("text", "", "Ignored: the owner is the caller."),
    "after": JobKey("name or names", [], "Jobs of this submission to wait for."),
    "batch": JobKey("batch", {}),
    "exact": JobKey("switch", False),
    "shards": JobKey("integer", 8, "Parts of an exact step, a power of two.", 1, 1 << 16),
    "sync_batchnorm": JobKey("switch", False),
    "deterministic": JobKey("switch", True),
    "graph": JobKey("switch", True),
    "seed": JobKey("integer", 0, "Determines everything random.", 0, 1 << 53),
    "precision": JobKey("precision", ""),
    "channels_last": JobKey("switch", False),
    "checkpoint_every": JobKey("seconds", 60.0),
    "keep": JobKey("integer", 2, "Checkpoints to keep.", 1, 1000),
    "time_limit": JobKey("seconds", 0.0),
    "retries": JobKey("integer", 2, "Further attempts after a loss or crash without progress.", 0, 1000),
    "notify": JobKey("text or texts", [], "Command or URL to notify when the job ends."),
}
