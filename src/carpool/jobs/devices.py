"""Devices of this machine: core sets and GPUs, discovered without initializing CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby

from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.model import WHOLE, JobSpec, Kind, NodeId, lane_type
from carpool.core.topology import Bank, Cluster, Node
from carpool.jobs.nvml import Nvml

NODE_NAME = "local"
_BRAND = re.compile(r"^(NVIDIA|Tesla|GeForce|Quadro)\s+")
_SYNTAX = (
    "Write cpu:4 (4 devices), cpu:2x1,1x2 (2 devices of 1 core, 1 of 2 cores), cuda, cuda:0,1, "
    "or cuda:0@50,cuda:0@25 (lanes of 50 and 25 % of GPU 0)."
)
_GROUP = re.compile(r"(\d+)x(\d+)")
_GPU = re.compile(r"(?:cuda:)?(\d+)(?:@(\d+))?")
_MAX_DEVICES = 1024

IsOurs = Callable[[int], bool]  # whether a process, by its id, belongs to this carpool


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, with the index that CUDA gives it in our processes."""

    index: int
    model: str  # without the vendor's name: H200, V100-SXM2-16GB
    memory_bytes: int = 0
    uuid: str = ""
    foreign_pids: tuple[int, ...] = ()  # processes of others that compute on it
    foreign_bytes: int = 0  # memory that they hold

    @property
    def free_bytes(self) -> int:
        """Memory that other processes leave; 0: unknown."""
        return max(1, self.memory_bytes - self.foreign_bytes) if self.memory_bytes else 0


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One device: a set of cores, a GPU, or a lane of a GPU."""

    id: int  # as in the cluster
    name: str  # cpu:0, cuda:0, cuda:0@50
    kind: str  # cpu1 (one core), cpu2, the GPU's model, or of a lane: H200@50
    cores: tuple[int, ...] = ()
    cuda: int | None = None  # index of the GPU
    memory_bytes: int = 0  # 0: unknown, not checked
    lane_percent: int = 0  # of the GPU's multiprocessors, enforced by MPS; 0: the whole GPU

    @property
    def is_lane(self) -> bool:
        """Whether it is a lane of a GPU, which may have others."""
        return self.lane_percent > 0


@dataclass(frozen=True, slots=True)
class RemoteDevice(LocalDevice):
    """A device of another machine."""

    host: str = ""


def use_pci_bus_order() -> None:
    """Make CUDA number GPUs as the driver lists them, here and in child processes; call it before CUDA starts.

    By default CUDA numbers the fastest GPU first.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def list_gpus(is_ours: IsOurs = lambda pid: False) -> list[Gpu]:
    """List the GPUs that CUDA_VISIBLE_DEVICES allows; none where NVML is unavailable."""
    use_pci_bus_order()
    nvml = Nvml.open()
    if nvml is None:
        return []
    with closing(nvml):
        gpus = [_describe(nvml, index, is_ours) for index in range(nvml.count())]
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _describe(nvml: Nvml, index: int, is_ours: IsOurs) -> Gpu:
    foreign = [process for process in nvml.processes(index) or () if not is_ours(process.pid)]
    return Gpu(
        index=index,
        model=short_model(nvml.name(index)),
        memory_bytes=nvml.memory_bytes(index),
        uuid=nvml.uuid(index),
        foreign_pids=tuple(process.pid for process in foreign),
        foreign_bytes=sum(process.memory_bytes for process in foreign),
    )


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Select and number GPUs as CUDA does for a CUDA_VISIBLE_DEVICES: up to the first name that it does not know."""
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in filter(None, (part.strip() for part in setting.split(","))):
        found = next((gpu for gpu in gpus if _has_name(gpu, name)), None)
        if found is None:
            break
        chosen.append(replace(found, index=len(chosen)))
    return chosen


def _has_name(gpu: Gpu, name: str) -> bool:
    return gpu.index == int(name) if name.isdecimal() else bool(gpu.uuid) and gpu.uuid.startswith(name)


def cuda_visible_names(indices: Iterable[int], setting: str | None) -> list[str]:
    """Name GPUs of this process for the CUDA_VISIBLE_DEVICES of a child, given our own `setting`."""
    names = None if setting is None else [part.strip() for part in setting.split(",") if part.strip()]
    return [str(index) if names is None else names[index] for index in indices]


def short_model(name: str) -> str:
    """Shorten a GPU's name to one word without the vendor: ``NVIDIA H200`` becomes ``H200``."""
    while (shorter := _BRAND.sub("", name)) != name:
        name = shorter
    return re.sub(r"[^\w.\-]+", "-", name.strip())


def parse_devices(
    text: str = "",
    *,
    oversubscribe: bool = False,
    cores: Sequence[int] | None = None,
    gpus: Sequence[Gpu] | None = None,
    is_ours: IsOurs = lambda pid: False,
    most_on_cpu: int = 0,
) -> list[LocalDevice]:
    """Parse ``cpu:N``, ``cpu:CxK,…``, ``cuda`` or ``cuda:I,…``; empty: all GPUs, or one device per core without GPUs.

    ``cuda:I@P`` is a lane of P percent of a GPU's multiprocessors, with a device type of its own. Lanes share the
    GPU's memory in proportion; together they may have more than 100 %.

    ``cores`` and ``gpus`` default to those of this machine that this process may use. With ``most_on_cpu``, an empty
    text deals all cores to at most that many devices.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    device_type, _, rest = text.strip().partition(":")
    if not device_type:
        found = list_gpus(is_ours) if gpus is None else gpus
        return (
            _cuda_devices(found, "", text) if found else _round_robin(min(len(cores), most_on_cpu or len(cores)), cores)
        )
    if device_type == "cuda":
        return _cuda_devices(list_gpus(is_ours) if gpus is None else gpus, rest, text)
    if device_type != "cpu":
        raise _invalid(text, f"unknown device type {device_type!r}", _SYNTAX)
    if not rest:
        return _round_robin(len(cores), cores)
    if rest.isdecimal():
        return _round_robin(_count(rest, text), cores)
    return _grouped(rest, text, cores, oversubscribe=oversubscribe)


def usable_devices(specs: Iterable[JobSpec]) -> int:
    """How many devices jobs can use at once; 0: any number, because one is exact or names a device type.

    With fewer of them than cores, a job gets several cores, as its plain script would. Exact jobs compute on one core.
    """
    found = list(specs)
    if any(spec.exact or spec.kinds for spec in found):
        return 0
    widths: dict[str, list[int]] = {}
    for spec in found:
        widths.setdefault(spec.array if spec.at_most else f"/{spec.id}", []).append(spec.widest)
    limits = {spec.array: spec.at_most for spec in found if spec.at_most}
    return sum(sum(sorted(each, reverse=True)[: limits.get(array, 1)]) for array, each in widths.items())


def foreign_process_note(gpus: Sequence[Gpu]) -> str:
    """Describe processes of others on the GPUs, for the user; empty when there are none."""
    busy = [f"cuda:{gpu.index} (pid {', '.join(map(str, gpu.foreign_pids))})" for gpu in gpus if gpu.foreign_pids]
    if not busy:
        return ""
    use = "used anyway, minus the memory they hold" if len(busy) == len(gpus) else "not used unless named in --devices"
    return f"other processes compute on {'; '.join(busy)}: {use}"


def overlap_note(devices: Sequence[LocalDevice]) -> str:
    """Describe devices that share cores, or more of a GPU than it has, for the user; empty when none do."""
    owners: dict[int, int] = {}
    for device in devices:
        for core in device.cores:
            owners[core] = owners.get(core, 0) + 1
    most = max(owners.values(), default=1)
    if most > 1:
        return f"{len(devices)} devices on {len(owners)} cores: up to {most} devices take turns on one core"
    crowded = {gpu: percent for gpu, percent in _lane_sums(devices).items() if percent > WHOLE}
    named = ", ".join(f"cuda:{gpu} have {percent} %" for gpu, percent in crowded.items())
    return f"the lanes of {named} in all: their jobs compete for its multiprocessors" if crowded else ""


def _lane_sums(devices: Sequence[LocalDevice]) -> dict[int, int]:
    """Percent of each GPU that its lanes have in all."""
    sums: dict[int, int] = {}
    for device in devices:
        if device.cuda is not None and device.is_lane:
            sums[device.cuda] = sums.get(device.cuda, 0) + device.lane_percent
    return sums


def devices_of_gpu(devices: Iterable[LocalDevice], device: LocalDevice) -> list[int]:
    """The devices on the same GPU, that one included: several where they are lanes. Without a GPU, that one."""
    if device.cuda is None:
        return [device.id]
    return [other.id for other in devices if other.cuda == device.cuda]


def as_cluster(devices: Sequence[LocalDevice], supplies: HostResources = UNKNOWN) -> Cluster:
    """Build a cluster of one node, with a bank for every run of equal devices."""
    banks = []
    for (kind, memory_bytes), run in groupby(devices, key=lambda device: (device.kind, device.memory_bytes)):
        ids = [device.id for device in run]
        banks.append(Bank(Kind(kind), range(ids[0], ids[-1] + 1), memory_bytes))
    return Cluster((Node(NodeId(0), NODE_NAME, tuple(banks), supplies),))


def _invalid(text: str, problem: str, way_out: str) -> InputError:
    return InputError(problem, where=f"devices {text!r}", way_out=way_out)


def _count(digits: str, text: str) -> int:
    count = int(digits)
    if not 1 <= count <= _MAX_DEVICES:
        raise _invalid(text, f"{count} devices", f"Give at least 1 and at most {_MAX_DEVICES} devices.")
    return count


def _round_robin(count: int, cores: Sequence[int]) -> list[LocalDevice]:
    """Deal cores round-robin to `count` devices; devices share cores where there are fewer."""
    return [_core_device(number, tuple(cores[number % len(cores) :: count])) for number in range(count)]


def _grouped(rest: str, text: str, cores: Sequence[int], *, oversubscribe: bool) -> list[LocalDevice]:
    sizes = [size for part in rest.split(",") for size in _group_sizes(part, text, len(cores))]
    if sum(sizes) > len(cores) and not oversubscribe:
        way_out = "Ask for fewer, or let devices share cores with --oversubscribe."
        raise _invalid(text, f"needs {sum(sizes)} cores; {len(cores)} are usable", way_out)
    devices, first = [], 0
    for number, size in enumerate(sizes):
        chosen = tuple(sorted(cores[(first + offset) % len(cores)] for offset in range(size)))
        devices.append(_core_device(number, chosen))
        first += size
    return devices


def _group_sizes(part: str, text: str, num_cores: int) -> list[int]:
    """Parse ``CxK``: C devices of K cores."""
    match = _GROUP.fullmatch(part.strip())
    if match is None:
        raise _invalid(text, f"{part!r} is not COUNTxCORES", _SYNTAX)
    size = int(match[2])
    if not 1 <= size <= num_cores:
        problem = f"{part!r} needs {size} cores for one device; {num_cores} are usable"
        raise _invalid(text, problem, f"Give every device 1 to {num_cores} cores.")
    return [size] * _count(match[1], text)


def _core_device(number: int, cores: tuple[int, ...]) -> LocalDevice:
    return LocalDevice(number, f"cpu:{number}", f"cpu{len(cores)}", cores)


def _cuda_devices(gpus: Sequence[Gpu], rest: str, text: str) -> list[LocalDevice]:
    if not gpus:
        way_out = "Check the driver and CUDA_VISIBLE_DEVICES (carpool doctor), or use --devices cpu:N."
        raise _invalid(text, "no GPU is visible", way_out)
    by_index = {gpu.index: gpu for gpu in gpus}
    chosen = _named_gpus(rest, text, by_index) if rest else [(index, 0) for index in _unoccupied(gpus)]
    # Equal types next to each other, so that each type is one bank.
    models = list(dict.fromkeys(gpu.model for gpu in gpus))
    chosen.sort(key=lambda each: (models.index(by_index[each[0]].model), -each[1]))
    devices: list[LocalDevice] = []
    for number, (index, percent) in enumerate(chosen):
        gpu = by_index[index]
        if not percent:
            devices.append(LocalDevice(number, f"cuda:{index}", gpu.model, (), index, gpu.free_bytes))
            continue
        in_all = sum(other for place, other in chosen if place == index)
        memory_bytes = gpu.free_bytes * percent // max(WHOLE, in_all)
        name, twins = f"cuda:{index}@{percent}", chosen[:number].count((index, percent))
        name = f"{name}/{twins + 1}" if twins else name
        devices.append(LocalDevice(number, name, lane_type(gpu.model, percent), (), index, memory_bytes, percent))
    return devices


def _unoccupied(gpus: Sequence[Gpu]) -> list[int]:
    """The GPUs without processes of others; all, where there is no such GPU."""
    return [gpu.index for gpu in gpus if not gpu.foreign_pids] or [gpu.index for gpu in gpus]


def _named_gpus(rest: str, text: str, by_index: dict[int, Gpu]) -> list[tuple[int, int]]:
    """Index and lane of each device; lane 0: the whole GPU."""
    chosen: list[tuple[int, int]] = []
    for part in rest.split(","):
        match = _GPU.fullmatch(part.strip())
        if match is None:
            raise _invalid(text, f"{part.strip()!r} is not a GPU index, or INDEX@PERCENT", _SYNTAX)
        index, percent = int(match[1]), int(match[2] or 0)
        if index not in by_index:
            raise _invalid(text, f"no GPU {index}", f"Visible GPUs: {', '.join(map(str, by_index))}.")
        if match[2] and not 1 <= percent <= WHOLE:
            raise _invalid(text, f"a lane of {percent} %", f"Give every lane 1 to {WHOLE} percent of its GPU.")
        chosen.append((index, percent))
    whole = [index for index, percent in chosen if not percent]
    if len(set(whole)) < len(whole):
        raise _invalid(text, "names a GPU twice", "Name each GPU once, or lanes of it: cuda:0@50,cuda:0@50.")
    if mixed := [index for index, percent in chosen if percent and index in whole]:
        way_out = f"Name it once, or only lanes of it: cuda:{mixed[0]}@50,cuda:{mixed[0]}@50."
        raise _invalid(text, f"names GPU {mixed[0]} as a whole and a lane of it", way_out)
    return chosen
