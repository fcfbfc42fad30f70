"""Pydantic schemas of request bodies and of the responses that are not views."""

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
    """A job, as a ``[[job]]`` table of a job file has it; what is left out is as there."""

    model_config = ConfigDict(
        extra="allow",  # an unknown key is told with the nearest ones by whoever reads job files
        json_schema_extra={"example": {"name": "mlp", "entry": "digits.py:mlp", "args": {"lr": 0.1}, "max_devices": 4}},
    )

    name: _Name
    entry: _Text = Field("", description="file.py:function, or package.module:function.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the entry.")
    sweep: dict[str, list[Any]] = Field(default_factory=dict, description="Lists of values to try, one job for each.")
    at_most: _Count = Field(0, description="Of a sweep's jobs, so many wait or run at once; 0: all.")
    command: list[_Text] = Field(default_factory=list, description="Any program, instead of an entry.")
    python: _Text = Field("", description="Interpreter of a command that begins with python.")
    folder: _Text = Field("", description="Where it runs, seen from the submission's folder.")
    environment: dict[str, StrictStr | StrictInt | float] = Field(
        default_factory=dict, description="Variables. They are kept in the daemon's store and never shown."
    )
    devices: _Count = 0
    min_devices: _Count = 0
    max_devices: _Count = 0
    kinds: list[_Text] | _Text = Field(default_factory=list)
    memory: Annotated[StrictInt, Field(ge=0)] | _Text = Field(0, description="On each device: bytes, or 6GiB.")
    cpus: _Count = Field(0, description="Cores for each device it holds.")
    ram: Annotated[StrictInt, Field(ge=0)] | _Text = Field(0, description="For each device it holds: bytes, or 16GiB.")
    disk: Annotated[StrictInt, Field(ge=0)] | _Text = Field(0, description="On each node it is on.")
    weight: Weight = 1.0
    priority: Literal["low", "normal", "high", "urgent"] = "normal"
    deadline: _Seconds | None = Field(None, description="By when it should finish: 8h from now, or a moment.")
    user: _Text = Field("", description="Ignored: a job belongs to whoever submits it.")
    after: list[_Name] | _Name = Field(default_factory=list, description="Jobs of the same submission.")
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
    notify: list[_Text] | _Text = Field(default_factory=list, description="What to do when it is over.")


class Submission(BaseModel):
    """Jobs that are accepted together or not at all."""

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
        description="The folder, on the daemon's machine, from which relative paths are looked up."
    )
    job: list[JobTable] = Field(min_length=1)
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="What all of them have unless they say otherwise."
    )


class Accepted(BaseModel):
    """Jobs that can no longer be lost."""

    jobs: list[str] = Field(
        description="Their names from now on: one that was taken has got a number.", examples=[["mlp"]]
    )


class WeightUpdate(BaseModel):
    """A job's new weight."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"weight": 2.0}})

    weight: Weight


class DeviceLimits(BaseModel):
    """How many devices a job may hold from now on."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"min_devices": 1, "max_devices": 4}})

    min_devices: Annotated[StrictInt, Field(ge=1, le=1_000_000)]
    max_devices: Annotated[StrictInt, Field(ge=1, le=1_000_000)]


class PolicyRequest(BaseModel):
    """A policy as the command line takes it."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"policy": "carpool:objective=makespan"}})

    policy: Annotated[StrictStr, Field(min_length=1, max_length=1000)]


class PolicyState(PolicyRequest):
    """The policy that decides."""

    fault: str = Field("", description="What the policy before did wrong, where that is why this one decides.")


class CallerInfo(BaseModel):
    """Who asks."""

    name: str
    role: Role


class Explanation(BaseModel):
    """Why a job waits, or holds what it holds."""

    job: str
    why: str


class Health(BaseModel):
    """Whether the daemon works."""

    status: Literal["ok", "starting"]
