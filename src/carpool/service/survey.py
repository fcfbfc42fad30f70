"""The machines of a daemon as people see them: devices and who holds them, nodes and what is left of their supplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from carpool.core.messages import OutsidersSeen
from carpool.core.model import DeviceId
from carpool.core.occupancy import Occupancy
from carpool.core.scheduler import Scheduler
from carpool.service.views import DeviceView, NodeView, OutsiderView, ResidentView, SuppliesView


def devices_of(scheduler: Scheduler, names: Mapping[int, str], may_see: Callable[[str], bool]) -> list[DeviceView]:
    """Every device and who holds it; jobs of people who may not be seen have no name."""
    residents: dict[int, list[ResidentView]] = {}
    for job in scheduler.jobs.values():
        name = job.id if may_see(job.spec.user) else ""
        for share in () if job.desired is None else job.desired.shares:
            for device in share.devices:
                resident = ResidentView(name, share.fraction, share.turn, job.spec.memory_bytes)
                residents.setdefault(device, []).append(resident)
    lost = scheduler.snapshot().occupancy.lost
    return [
        DeviceView(
            device,
            names.get(device, str(device)),
            node.name,
            bank.kind,
            bank.memory_bytes,
            node.id in lost,
            tuple(residents.get(device, ())),
            _outsiders(scheduler.outsiders.get(DeviceId(device)), names),
        )
        for node in scheduler.cluster.nodes
        for bank in node.banks
        for device in bank.devices
    ]


def _outsiders(seen: OutsidersSeen | None, names: Mapping[int, str]) -> tuple[OutsiderView, ...]:
    if seen is None:
        return ()
    device = names.get(seen.device, str(seen.device))
    return tuple(OutsiderView(device, *each, seen.keeps_free) for each in seen.processes)


def nodes_of(occupancy: Occupancy, devices: Iterable[DeviceView]) -> list[NodeView]:
    """The machines that devices are on, in their order."""
    by_node: dict[str, list[DeviceView]] = {}
    for device in devices:
        by_node.setdefault(device.node, []).append(device)
    return [
        NodeView(
            node.name,
            node.id in occupancy.lost,
            len(node.devices),
            dict(Counter(device.kind for device in by_node[node.name])),
            sum(min(1.0, sum(each.fraction for each in device.residents)) for device in by_node[node.name]),
            SuppliesView(*node.supplies),
            SuppliesView(*occupancy.hosting.taken(node.id)),
            tuple(each for device in by_node[node.name] for each in device.outsiders),
        )
        for node in occupancy.cluster.nodes
    ]
