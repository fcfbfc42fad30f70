"""What must hold of a scheduler between any two calls, checked from its public side against plain sets."""

from __future__ import annotations

from carpool.core.model import JobId, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.scheduler import Scheduler
from carpool.core.supplies import Supplies


def check_books(scheduler: Scheduler) -> None:
    """Assert that queue, roster and device map say the same as the jobs themselves, device by device."""
    scheduler.check()
    view = scheduler.snapshot()
    holders: dict[int, dict[JobId, float]] = {}
    for job in scheduler.jobs.values():
        assert (job.phase is Phase.RUNNING) == (job.desired is not None), f"{job.id} is {job.phase}: {job.desired}"
        assert job.applied <= job.generation, f"{job.id}: a generation was applied that was never ordered"
        if job.desired is None:
            continue
        assert job.spec.narrowest <= job.desired.num_devices <= job.spec.widest, f"{job.id} holds {job.desired}"
        for share in job.desired.shares:
            for device in share.devices:
                held = holders.setdefault(device, {})
                assert job.id not in held, f"{job.id} holds device {device} twice"
                held[job.id] = share.fraction
    check_map(view.occupancy, holders, scheduler.policy.max_virtual)
    check_supplies(scheduler)


def check_supplies(scheduler: Scheduler) -> None:
    """Assert that on no node jobs hold more cores, RAM or disk than it has, counted from the jobs alone."""
    for node in scheduler.cluster.nodes:
        total = Supplies()
        for job in scheduler.jobs.values():
            here = 0 if job.desired is None else len(set(job.desired.devices()) & set(node.devices))
            total = total.plus(job.spec.supplies_for(here)) if here else total
        for has, taken in zip(node.supplies, total, strict=True):
            assert not has or taken <= has, f"node {node.name} has {node.supplies}, jobs hold {total}"
        assert scheduler.snapshot().occupancy.hosting.taken(node.id) == total, f"what node {node.name} believes is held"


def check_map(occupancy: Occupancy, holders: dict[int, dict[JobId, float]], max_virtual: float = 1.0) -> None:
    """Assert that a device map agrees with who holds what, on every device, node and kind."""
    cluster = occupancy.cluster
    free_devices = dict.fromkeys(cluster.kinds, 0)
    by_free: dict[str, dict[int, int]] = {kind: {} for kind in cluster.kinds}
    for node in cluster.nodes:
        lost = node.id in occupancy.lost
        mask = 0
        free_here: dict[str, int] = {}
        for bank in node.banks:
            for device in bank.devices:
                held = holders.get(device, {})
                there = {resident.job: resident.fraction for resident in occupancy.residents(device)}
                assert there == held, f"device {device} has residents {there}, the jobs say {held}"
                assert not (lost and held), f"device {device} is lost and held by {held}"
                assert sum(held.values()) <= max_virtual + 1e-9, f"device {device} is overbooked: {held}"
                if not held and not lost and device not in occupancy.yielded:
                    mask |= 1 << (device - node.devices.start)
                    free_here[bank.kind] = free_here.get(bank.kind, 0) + 1
                    free_devices[bank.kind] += 1
        assert occupancy.free_mask(node.id) == mask, f"free devices of node {node.name}"
        for kind, count in free_here.items():
            by_free[kind][count] = by_free[kind].get(count, 0) | 1 << node.id
    assert occupancy.free_devices == free_devices, "free devices of each kind"
    for kind in cluster.kinds:
        assert occupancy.nodes_by_free(kind) == by_free[kind], f"nodes by free devices of kind {kind}"
    assert occupancy.is_shared == any(len(held) > 1 for held in holders.values()), "whether any device is shared"
