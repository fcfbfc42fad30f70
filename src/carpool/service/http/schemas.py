"""Pydantic schemas of request bodies, and of responses that are not views."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, create_model

from carpool.jobs.job_keys import KEYS, JobKey
from carpool.service.auth import Role

_Name = Annotated[StrictStr, Field(min_length=1, max_length=100)]
_Text = Annotated[StrictStr, Field(max_length=4096)]
_Count = Annotated[StrictInt, Field(ge=0, le=1_000_000)]
_Seconds = Annotated[StrictInt, Field(ge=0)] | Annotated[float, Field(ge=0)] | _Text
Weight = Annotated[float, Field(gt=0, ge=KEYS["weight"].least, le=KEYS["weight"].most, strict=True)]


_TYPES: dict[str, Any] = {  # by the names in `jobs.job_file.KEYS`
    "name": _Name,
    "text": _Text,
    "texts": list[_Text],
    "text or texts": list[_Text] | _Text,
    "name or names": list[_Name] | _Name,
    "table": dict[str, Any],
    "variables": dict[str, StrictStr | StrictInt | float],
    "bytes": Annotated[StrictInt, Field(ge=0)] | _Text,
    "seconds": _Seconds,
    "seconds or none": _Seconds | None,
    "switch": StrictBool,
    "priority": Literal["low", "normal", "high", "urgent"],
    "batch": _Count | dict[str, Any],
    "precision": Literal["", "float32", "tf32", "bf16"],
}


_NUMBERS: dict[str, Any] = {"integer": StrictInt, "number": Annotated[float, Field(strict=True)]}


def _field(key: JobKey) -> tuple[Any, Any]:
    default: dict[str, Any] = {"default": key.default}
    if isinstance(key.default, dict | list):
        default = {"default_factory": type(key.default)}
    limits: dict[str, Any] = {"ge": key.least, "le": key.most} if key.type in _NUMBERS else {}
    return _NUMBERS.get(key.type) or _TYPES[key.type], Field(**default, **limits, description=key.help or None)


_JobKeys: Any = create_model("JobTable", **{name: _field(key) for name, key in KEYS.items()})  # type: ignore[call-overload]


class JobTable(_JobKeys):  # type: ignore[misc]  # mypy does not follow create_model
    """A job, with the keys and defaults of a ``[[job]]`` table of a job file."""

    model_config = ConfigDict(
        extra="allow",  # the job-file reader rejects unknown keys and suggests similar ones
        json_schema_extra={"example": {"name": "mlp", "entry": "digits.py:mlp", "args": {"lr": 0.1}, "max_devices": 4}},
    )


class Submission(BaseModel):
    """Jobs that are accepted all or none."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "folder": "/home/ada/digits",
                "job": [{"name": "mlp", "entry": "digits.py:mlp", "args": {"lr": 0.1}}],
            }
        },
    )

    folder: Annotated[StrictStr, Field(max_length=4096, pattern="^/")] = Field(
        description="Folder on the daemon's machine to which relative paths refer."
    )
    job: list[JobTable] = Field(min_length=1)
    defaults: dict[str, Any] = Field(default_factory=dict, description="Keys for all jobs that do not set them.")


class Accepted(BaseModel):
    """Jobs that the daemon has accepted durably, or changed."""

    jobs: list[str] = Field(
        description="Names of the jobs; a name that was taken has a number appended.", examples=[["mlp"]]
    )


class WeightUpdate(BaseModel):
    """A job's new weight."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"weight": 2.0}})

    weight: Weight


class DeviceLimits(BaseModel):
    """A job's new device limits."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"min_devices": 1, "max_devices": 4}})

    min_devices: Annotated[StrictInt, Field(ge=1, le=1_000_000)]
    max_devices: Annotated[StrictInt, Field(ge=1, le=1_000_000)]


class PolicyRequest(BaseModel):
    """A policy, in the form NAME[:key=value…] or FILE.py:Class[:key=value…]."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"policy": "carpool:objective=makespan"}})

    policy: Annotated[StrictStr, Field(min_length=1, max_length=1000)]


class PolicyState(PolicyRequest):
    """The active policy."""

    fault: str = Field("", description="Why this fallback replaced the previous policy; empty: it did not.")


class CallerInfo(BaseModel):
    """The caller's name and role."""

    name: str
    role: Role


class Explanation(BaseModel):
    """Why a job waits, or why it holds its devices."""

    job: str
    why: str


class Health(BaseModel):
    """Health of the daemon."""

    status: Literal["ok", "starting", "disk full"]
