"""Federation file (TOML): the tasks, their programs and data partitions, and the devices."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from carpool.core.errors import InputError
from carpool.core.typed_fields import InvalidField, decode_fields, shown
from carpool.core.units import parse_bytes
from carpool.federated.federation import DeviceName, Federation, Limits, Target, Task, TaskName
from carpool.federated.partition import Partition
from carpool.jobs.entry_file import check_entry
from carpool.jobs.program import Program
from carpool.jobs.toml_table import Table, read_toml

_T = TypeVar("_T")

_FEDERATION_KEYS = tuple(field.name for field in fields(Federation) if field.name != "tasks")
_TASK_KEYS = tuple(
    field.name for field in fields(Task) if field.name not in ("limits", "target", "name", "whole_epochs")
)
_LIMIT_KEYS = ("max_update", "max_norm")
_PROGRAM_KEYS = ("entry", "args", "memory", "partition", "client_app", "client_config")
_DEVICE_KEYS = ("name", "device", "slowdown", "count", "cores")
_MAX_DEVICES = 1024
_MAX_CORES = 1024
_MAX_TASKS = 64  # the weights of all travel in one message


@dataclass(frozen=True, slots=True)
class FederatedProgram:
    """What devices run for a task, and how its data is spread over them."""

    program: Program
    partition: Partition
    client_app: str = ""  # a Flower ClientApp that trains; the program then only makes the model
    client_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FederatedDevice:
    """A device of an embedded federation: cores of this machine, or a GPU, optionally slowed down."""

    name: DeviceName
    device: str = "cpu"
    slowdown: float = 0.0  # factor; 0: not slowed down
    cores: int = 1  # how many of its tasks run side by side


@dataclass(frozen=True, slots=True)
class FederationFile:
    """The content of a federation file."""

    federation: Federation
    programs: Mapping[TaskName, FederatedProgram]
    devices: tuple[FederatedDevice, ...]
    has_batch_size: frozenset[TaskName] = frozenset()  # tasks whose batch size the file gives

    @property
    def is_emulated(self) -> bool:
        return any(device.slowdown for device in self.devices)

    def hosted_tasks(self) -> dict[str, Any]:
        """What each device needs to know about the tasks, as plain JSON values."""
        return {
            task.name: {
                "program": self.programs[task.name].program.as_json(),
                "partition": asdict(self.programs[task.name].partition),
                "proximal": task.proximal if task.algorithm == "fedprox" else 0.0,
                "client_app": self.programs[task.name].client_app,
                "client_config": dict(self.programs[task.name].client_config),
            }
            for task in self.federation.tasks
        }

    @property
    def fingerprint(self) -> str:
        """Equal for files that let devices do the same work, in whatever folder they are."""
        tasks = self.hosted_tasks()
        for task in tasks.values():
            task["program"] = {key: value for key, value in task["program"].items() if key != "folder"}
        text = json.dumps([tasks, [device.name for device in self.devices]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_federation(path: Path) -> FederationFile:
    """Read and check a federation file, without importing any entry."""
    data = read_toml(path)
    return parse_federation(data, path.parent, str(path))


def parse_federation(data: Mapping[str, Any], folder: Path, where: str) -> FederationFile:
    """Parse the content of a federation file; entries are relative to `folder`."""
    Table(data, where).only([*_FEDERATION_KEYS, "rounds", "task", "device"])
    shared = {key: data[key] for key in ("rounds",) if key in data}
    tables = data.get("task", [])
    if not isinstance(tables, list) or not tables:
        raise InputError(
            "has no [[task]] table", where=where, way_out='Add one: [[task]] name = "a" entry = "train.py:main".'
        )
    if len(tables) > _MAX_TASKS:
        raise InputError(
            f"has {len(tables)} tasks; at most {_MAX_TASKS}", where=where, way_out="Divide them over several files."
        )
    seed = Table(data, where).whole("seed", 0, least=0)
    tasks, programs, sized = [], {}, set()
    for place, given in enumerate(tables, 1):
        table = Table({**shared, **given} if isinstance(given, dict) else given, f"{where}: task {place}")
        task = _task(table)
        tasks.append(task)
        programs[task.name] = _federated_program(table, folder, seed)
        if "batch_size" in given or task.whole_epochs:
            sized.add(task.name)
    values = {key: data[key] for key in _FEDERATION_KEYS if key in data}
    federation, devices = _decoded(Federation, {**values, "tasks": tuple(tasks)}, where), _devices(data, where)
    file = FederationFile(federation, programs, devices, frozenset(sized))
    _check_counts(file, where)
    return file


def _check_counts(file: FederationFile, where: str) -> None:
    """InputError for numbers that these devices can never satisfy."""
    count, federation = len(file.devices), file.federation
    wanted = {"min_devices": federation.min_devices}
    wanted |= {f"task {task.name!r}: min_updates": task.min_updates for task in federation.tasks}
    for key, value in wanted.items():
        if value > count:
            raise InputError(f"{key} is {value}, and there are {count} devices", where=where, way_out="Lower it.")
    for name, program in file.programs.items():
        if program.partition.sizes and len(program.partition.sizes) != count:
            problem = f"task {name!r}: sizes has {len(program.partition.sizes)} values for {count} devices"
            raise InputError(problem, where=where, way_out="Give one per device.")


def _task(table: Table) -> Task:
    table.only([*_PROGRAM_KEYS, "name", "target", *_TASK_KEYS, *_LIMIT_KEYS])
    name = table.text("name")
    if not name or "/" in name:
        raise InputError(f"name is {name!r}", where=table.where, way_out="Give it a name without '/'.")
    values = {key: table.values[key] for key in _TASK_KEYS if key in table.values}
    if isinstance(sizes := values.get("batch_range"), list) and sizes:
        values = {"batch_size": sizes[0], **values}  # until the training reports its own
    target = table.text("target")
    limits = Limits(
        parse_bytes(table.values.get("max_update", 0), f"{table.where}: max_update"),
        table.number("max_norm", 1.0) if "max_norm" in table.values else 0.0,
    )
    parsed = Target.parse(target, f"{table.where}: target") if target else None
    values |= {"name": name, "target": parsed, "limits": limits, "whole_epochs": "client_app" in table.values}
    return _decoded(Task, values, table.where)


def _federated_program(table: Table, folder: Path, seed: int) -> FederatedProgram:
    app = table.text("client_app")
    if app:
        check_entry(app, (), folder, f"{table.where}: client_app")
        ways = {
            "partition": "Remove it: a ClientApp takes its part by partition-id and num-partitions of its context.",
            "batch_range": "Remove it: a ClientApp has a batch size of its own.",
        }
        for key in ways.keys() & table.values.keys():
            raise InputError(f"{key} is given with client_app", where=table.where, way_out=ways[key])
    config = table.mapping("client_config")
    return FederatedProgram(_program(table, folder, seed), _partition(table, seed), app, config)


def _program(table: Table, folder: Path, seed: int) -> Program:
    entry, args = table.text("entry"), table.mapping("args")
    check_entry(entry, args, folder, table.where)
    return Program(
        entry,
        args,
        folder=str(folder.resolve()),
        seed=seed,
        batch_size=table.whole("batch_size", 0, least=1),
        memory_bytes=parse_bytes(table.values.get("memory", 0), f"{table.where}: memory"),
    )


def _partition(table: Table, seed: int) -> Partition:
    given = table.mapping("partition")
    Table(given, f"{table.where}: partition").only([field.name for field in fields(Partition)])
    return _decoded(Partition, {"seed": seed, **given}, f"{table.where}: partition")


def _devices(data: Mapping[str, Any], where: str) -> tuple[FederatedDevice, ...]:
    found: list[FederatedDevice] = []
    tables = data.get("device", [{"name": "device", "count": 2}])
    if not isinstance(tables, list) or not tables:
        raise InputError(
            f"device is {shown(tables)}", where=where, way_out="Write [[device]] tables, or none for two CPU devices."
        )
    for place, given in enumerate(tables, 1):
        table = Table(given, f"{where}: device {place}")
        table.only(_DEVICE_KEYS)
        count, base = table.whole("count", 1, most=_MAX_DEVICES), table.text("name") or f"device-{place}"
        names = [base] if "count" not in table.values else [f"{base}-{number}" for number in range(count)]
        slowdown = table.number("slowdown", 1.0) if "slowdown" in table.values else 0.0
        kind, cores = _device_type(table), table.whole("cores", 1, least=1, most=_MAX_CORES)
        if cores > 1 and kind != "cpu":
            raise InputError(f"cores is {cores} for {kind}", where=table.where, way_out="Only give it with 'cpu'.")
        found += [FederatedDevice(DeviceName(name), kind, slowdown, cores) for name in names]
    names = [device.name for device in found]
    if len(set(names)) < len(names):
        raise InputError(f"device names are {names}", where=where, way_out="Give each device a name of its own.")
    if any(device.slowdown for device in found) and not all(device.slowdown for device in found):
        raise InputError(
            "some devices have a slowdown", where=where, way_out="Set it on every device or on none; 1: real speed."
        )
    return tuple(found)


def _device_type(table: Table) -> str:
    """``cpu``, or a GPU with its index, which torch needs in many places."""
    given = table.text("device") or "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise InputError(f"device is {given!r}", where=table.where, way_out="Write 'cpu', 'cuda' or 'cuda:0'.")
    return "cuda:0" if given == "cuda" else given


def _decoded(kind: type[_T], values: Mapping[str, Any], where: str) -> _T:
    try:
        return decode_fields(kind, values)
    except InvalidField as error:
        raise InputError(str(error).removeprefix(f"{kind.__name__}."), where=where) from None
    except InputError as error:
        raise InputError(error.problem, where=where, way_out=error.way_out) from None
