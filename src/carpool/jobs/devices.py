"""Devices of this machine: core sets and GPUs, discovered without initializing CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.model import Kind, NodeId
from carpool.core.topology import Bank, Cluster, Node
from carpool.jobs.nvml import Nvml

_BRAND = re.compile(r"^(NVIDIA|Tesla|GeForce|Quadro)\s+")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as CUDA will number it in a process of ours."""

    index: int
    model: str  # without the maker's name: H200, V100-SXM2-16GB
    memory_bytes: int = 0
    uuid: str = ""
    outsiders: tuple[int, ...] = ()  # processes that compute on it and are not ours
    taken_bytes: int = 0  # memory they hold

    @property
    def left_bytes(self) -> int:
        """Memory that is left for us; 0: unknown."""
        return max(1, self.memory_bytes - self.taken_bytes) if self.memory_bytes else 0


IsOurs = Callable[[int], bool]  # whether a process is one of ours


def use_pci_bus_order() -> None:
    """Let CUDA number GPUs as the driver lists them, here and in processes to come; by itself it puts fast ones first.

    Before CUDA starts.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def list_gpus(is_ours: IsOurs = lambda pid: False) -> list[Gpu]:
    """What the driver lists and CUDA_VISIBLE_DEVICES lets through; nothing where there is no driver."""
    use_pci_bus_order()
    nvml = Nvml.open()
    if nvml is None:
        return []
    with nvml.closing():
        gpus = [_describe(nvml, index, is_ours) for index in range(nvml.count())]
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The GPUs that CUDA will see, numbered as it will: it stops at the first name it does not know."""
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in filter(None, (part.strip() for part in setting.split(","))):
        found = next((gpu for gpu in gpus if _is_named(gpu, name)), None)
        if found is None:
            break
        chosen.append(replace(found, index=len(chosen)))
    return chosen


def cuda_visible_names(places: Iterable[int], setting: str | None) -> list[str]:
    """What GPUs that this process numbers so are called in a process of its own: by the names they were given to us."""
    names = None if setting is None else [part.strip() for part in setting.split(",") if part.strip()]
    return [str(place) if names is None else names[place] for place in places]


def short_model(name: str) -> str:
    """A model's name as one word without its maker: ``NVIDIA H200`` is ``H200``."""
    while (shorter := _BRAND.sub("", name)) != name:
        name = shorter
    return re.sub(r"[^\w.\-]+", "-", name.strip())


def _is_named(gpu: Gpu, name: str) -> bool:
    return gpu.index == int(name) if name.isdecimal() else bool(gpu.uuid) and gpu.uuid.startswith(name)


def _describe(nvml: Nvml, index: int, is_ours: IsOurs) -> Gpu:
    others = [process for process in nvml.processes(index) or () if not is_ours(process.pid)]
    return Gpu(
        index=index,
        model=short_model(nvml.name(index)),
        memory_bytes=nvml.memory_bytes(index),
        uuid=nvml.uuid(index),
        outsiders=tuple(process.pid for process in others),
        taken_bytes=sum(process.memory_bytes for process in others),
    )


NODE_NAME = "local"
_GRAMMAR = "Write cpu:4 (four devices), cpu:2x1,1x2 (two of one core, one of two), cuda, or cuda:0,1."
_GROUP = re.compile(r"(\d+)x(\d+)")
_MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One device: a set of cores, or a GPU with the cores that feed it."""

    id: int  # as in the cluster
    name: str  # cpu:0, cuda:0
    kind: str  # cpu1 (one core), cpu2, or the GPU's model
    cores: tuple[int, ...] = ()
    cuda: int | None = None  # index of the GPU
    memory_bytes: int = 0  # 0: unknown, not checked


def parse_devices(
    text: str = "",
    *,
    oversubscribe: bool = False,
    cores: Sequence[int] | None = None,
    gpus: Sequence[Gpu] | None = None,
    is_ours: IsOurs = lambda pid: False,
) -> list[LocalDevice]:
    """The devices that ``cpu:N``, ``cpu:CxK,…``, ``cuda`` or ``cuda:I,…`` name; empty: GPUs if any, else every core.

    ``cores`` and ``gpus`` are those of this machine that this process may use, unless given. A GPU on which only
    processes of ours compute is free.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    kind, _, rest = text.strip().partition(":")
    if not kind:
        found = list_gpus(is_ours) if gpus is None else gpus
        return _cuda(found, "", text) if found else _round_robin(len(cores), cores)
    if kind == "cuda":
        return _cuda(list_gpus(is_ours) if gpus is None else gpus, rest, text)
    if kind != "cpu":
        raise InputError(f"devices {text!r} are of no known kind", way_out=_GRAMMAR)
    if not rest:
        return _round_robin(len(cores), cores)
    if rest.isdecimal():
        return _round_robin(_count(rest, text), cores)
    return _grouped(rest, text, cores, oversubscribe=oversubscribe)


def foreign_process_note(gpus: Sequence[Gpu]) -> str:
    """What to tell people when programs that are not ours compute on GPUs; empty when there are none."""
    told = [f"cuda:{gpu.index} (process {', '.join(map(str, gpu.outsiders))})" for gpu in gpus if gpu.outsiders]
    if not told:
        return ""
    use = "used all the same, less the memory they hold" if len(told) == len(gpus) else "left out unless named"
    return f"other programs compute on {'; '.join(told)}: {use}"


def overlap_note(devices: Sequence[LocalDevice]) -> str:
    """What to tell people when devices have cores in common; empty when they have none."""
    owners: dict[int, int] = {}
    for device in devices:
        for core in device.cores:
            owners[core] = owners.get(core, 0) + 1
    most = max(owners.values(), default=1)
    if most == 1:
        return ""
    return f"{len(devices)} devices on {len(owners)} cores: up to {most} devices take turns on one core"


def as_cluster(devices: Sequence[LocalDevice], supplies: HostResources = UNKNOWN) -> Cluster:
    """One node with a bank for every run of like devices."""
    banks = []
    for (kind, memory_bytes), run in groupby(devices, key=lambda device: (device.kind, device.memory_bytes)):
        ids = [device.id for device in run]
        banks.append(Bank(Kind(kind), range(ids[0], ids[-1] + 1), memory_bytes))
    return Cluster((Node(NodeId(0), NODE_NAME, tuple(banks), supplies),))


def _count(digits: str, text: str) -> int:
    count = int(digits)
    if not 1 <= count <= _MOST_DEVICES:
        raise InputError(
            f"devices {text!r} are {count}", way_out=f"Give at least 1 and at most {_MOST_DEVICES} devices."
        )
    return count


def _round_robin(count: int, cores: Sequence[int]) -> list[LocalDevice]:
    """Cores dealt round-robin over `count` devices; where there are too few, devices share them."""
    hands = [tuple(cores[place % len(cores) :: count]) for place in range(count)]
    return [_of_cores(place, hand) for place, hand in enumerate(hands)]


def _grouped(rest: str, text: str, cores: Sequence[int], *, oversubscribe: bool) -> list[LocalDevice]:
    sizes: list[int] = []
    for part in rest.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise InputError(f"{part!r} in devices {text!r} is not understood", way_out=_GRAMMAR)
        size = int(match[2])
        if not 1 <= size <= len(cores):
            raise InputError(
                f"{part!r} in devices {text!r} asks {size} cores for one device; there are {len(cores)}",
                way_out=f"Give every device 1 to {len(cores)} cores.",
            )
        sizes += [size] * _count(match[1], text)
    if sum(sizes) > len(cores) and not oversubscribe:
        raise InputError(
            f"devices {text!r} ask {sum(sizes)} cores; there are {len(cores)}",
            way_out="Ask for fewer, or let devices share cores with --oversubscribe.",
        )
    devices, first = [], 0
    for place, size in enumerate(sizes):
        hand = tuple(sorted(cores[(first + offset) % len(cores)] for offset in range(size)))
        devices.append(_of_cores(place, hand))
        first += size
    return devices


def _of_cores(place: int, cores: tuple[int, ...]) -> LocalDevice:
    return LocalDevice(place, f"cpu:{place}", f"cpu{len(cores)}", cores)


def _cuda(gpus: Sequence[Gpu], rest: str, text: str) -> list[LocalDevice]:
    if not gpus:
        raise InputError(
            f"devices {text!r} are GPUs; none is visible here",
            way_out="Check the driver and CUDA_VISIBLE_DEVICES, or use --devices cpu:N.",
        )
    named = {gpu.index: gpu for gpu in gpus}
    alone = [index for index, gpu in named.items() if not gpu.outsiders]
    wanted = alone or list(named)  # others were there first: only whoever names such a GPU gets it
    if rest:
        parts = [part.strip() for part in rest.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise InputError(f"devices {text!r} are not understood", way_out=_GRAMMAR)
        wanted = [int(part) for part in parts]
    for index in wanted:
        if index not in named:
            raise InputError(
                f"devices {text!r} name GPU {index}; there are {', '.join(map(str, named))}",
                way_out="Name those that are there.",
            )
    if len(set(wanted)) < len(wanted):
        raise InputError(f"devices {text!r} name a GPU twice", way_out="Name each GPU once.")
    # Like ones side by side, so that each kind is one bank.
    wanted.sort(key=lambda index: list(dict.fromkeys(gpu.model for gpu in gpus)).index(named[index].model))
    return [
        LocalDevice(place, f"cuda:{index}", named[index].model, (), index, named[index].left_bytes)
        for place, index in enumerate(wanted)
    ]
