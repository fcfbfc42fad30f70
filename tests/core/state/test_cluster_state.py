"""A plan's changes on the device map: jobs swap places, and what has no room changes nothing."""

import pytest

from carpool.core.errors import Overbooked
from carpool.core.messages import Change
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.state.cluster_state import apply_changes
from carpool.core.topology import Cluster

A, B, C = JobId("a"), JobId("b"), JobId("c")


def standing(**held: Allocation | None) -> tuple[Occupancy, dict[JobId, Job]]:
    """A node of three devices, and who holds what."""
    occupancy = Occupancy(Cluster.build([(1, 3, "V100")]))
    jobs: dict[JobId, Job] = {}
    for name, allocation in held.items():
        spec = JobSpec(JobId(name), 1)
        phase = Phase.WAITING if allocation is None else Phase.RUNNING
        jobs[spec.id] = Job(spec, len(jobs), 0.0, phase)._replace(desired=allocation)
        if allocation is not None:
            occupancy.take(spec, allocation, 1.0)
    return occupancy, jobs


def residents(occupancy: Occupancy) -> list[list[JobId]]:
    return [[resident.job for resident in occupancy.residents(device)] for device in range(3)]


def test_jobs_swap_places() -> None:
    occupancy, jobs = standing(a=Allocation.of(0), b=Allocation.of(1))
    apply_changes(occupancy, jobs, [Change(A, Allocation.of(1)), Change(B, Allocation.of(0))], 1.0)
    assert residents(occupancy) == [[B], [A], []]


def test_what_has_no_room_changes_nothing() -> None:
    occupancy, jobs = standing(a=Allocation.of(0), b=Allocation.of(1), c=None)
    with pytest.raises(Overbooked):
        apply_changes(occupancy, jobs, [Change(A, Allocation.of(2)), Change(B, None), Change(C, Allocation.of(2))], 1.0)
    assert residents(occupancy) == [[A], [B], []]
    assert sum(occupancy.free_devices.values()) == 1
