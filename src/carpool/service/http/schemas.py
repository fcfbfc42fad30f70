"""Pydantic schemas of request bodies, and of responses that are not views."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from carpool.service.auth import Role

_Name = Annotated[StrictStr, Field(min_length=1, max_length=100)]
_Text = Annotated[StrictStr, Field(max_length=4096)]
_Count = Annotated[StrictInt, Field(ge=0, le=1_000_000)]
_Seconds = Annotated[StrictInt, Field(ge=0)] | Annotated[float, Field(ge=0)] | _Text
Weight = Annotated[float, Field(gt=0, ge=1e-6, le=1e6, strict=True)]


class JobTable(BaseModel):
    """A job, with the keys and defaults of a ``[[job]]`` table of a job file."""

    model_config = ConfigDict(
        extra="allow",  # the job-file reader rejects unknown keys and suggests similar ones
        json_schema_extra={"example": {"name": "mlp", "entry": "digits.py:mlp", "args": {"lr": 0.1}, "max_devices": 4}},
    )

    name: _Name
    entry: _Text = Field("", description="Training to run: file.py:function, or package.module:function.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the entry.")
    sweep: dict[str, list[Any]] = Field(default_factory=dict, description="Lists of values; one job per combination.")
    at_most: _Count = Field(0, description="How many jobs of the sweep may wait or run at once; 0: all.")
    command: list[_Text] = Field(default_factory=list, description="Program and arguments to run instead of an entry.")
    python: _Text = Field("", description="Interpreter of a command that begins with python.")
    folder: _Text = Field("", description="Working folder, relative to the submission's.")
    environment: dict[str, StrictStr | StrictInt | float] = Field(
        default_factory=dict, description="Environment variables; stored by the daemon, never returned."
    )
    devices: _Count = Field(0, description="Devices requested.")
    min_devices: _Count = Field(0, description="Fewest devices it can run on.")
    max_devices: _Count = Field(0, description="Most devices it may use.")
    kinds: list[_Text] | _Text = Field(default_factory=list, description="Allowed device types; empty: all.")
    memory: Annotated[StrictInt, Field(ge=0)] | _Text = Field(0, description="Memory per device: bytes, or 6GiB.")
    cpus: _Count = Field(0, description="CPU cores per device.")
    ram: Annotated[StrictInt, Field(ge=0)] | _Text = Field(0, description="RAM per device: bytes, or 16GiB.")
    disk: Annotated[StrictInt, Field(ge=0)] | _Text = Field(0, description="Disk space per node: bytes, or 90GiB.")
    weight: Weight = 1.0
    priority: Literal["low", "normal", "high", "urgent"] = "normal"
    deadline: _Seconds | None = Field(None, description="When it should finish: a duration such as 8h, or a time.")
    user: _Text = Field("", description="Ignored: the owner is the caller.")
    after: list[_Name] | _Name = Field(default_factory=list, description="Jobs of this submission to wait for.")
    batch: _Count | dict[str, Any] = Field(default_factory=dict)
    exact: StrictBool = False
    shards: Annotated[StrictInt, Field(ge=1, le=1 << 16)] = 8
    sync_batchnorm: StrictBool = False
    deterministic: StrictBool = True
    graph: StrictBool = True
    seed: Annotated[StrictInt, Field(ge=0, le=1 << 53)] = 0
    precision: Literal["", "float32", "tf32", "bf16"] = ""
    channels_last: StrictBool = False
    checkpoint_every: _Seconds = 60.0
    keep: Annotated[StrictInt, Field(ge=1, le=1000)] = 2
    time_limit: _Seconds = 0.0
    retries: Annotated[StrictInt, Field(ge=0, le=1000)] = 3
    notify: list[_Text] | _Text = Field(default_factory=list, description="Command or URL to notify when the job ends.")


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

    fault: str = Field("", description="Why the previous policy was replaced by this fallback; empty: it was not.")


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

    status: Literal["ok", "starting"]
