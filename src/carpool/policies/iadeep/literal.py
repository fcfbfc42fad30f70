"""IADeep as published: the device with the least added degradation, and the newest job's batch size tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Allocation, DeviceId, Job
from carpool.policies.iadeep.batch_tuning import BatchTuning
from carpool.policies.iadeep.policy import CompletionForecast, ExpectedEnds, IADeep, device_use
from carpool.policies.registry import register
from carpool.policies.sharing.shareable_devices import ShareableDevices, residents_of

_LEAST = 1e-9


@register("iadeep-literal")
@dataclass(frozen=True, slots=True)
class IADeepLiteral(IADeep):
    """Jobs in order of submission go where the sum of PD grows least, and stay; the newest one's batch is tuned.

    "Find the device with minimal performance degradation to place the task"; "evaluate the performance gain of
    co-location: a trade-off between waiting time and interference"; "regulate the average resource utilization";
    GP-LCB over batch sizes, within 17 rounds (Chen et al., SC 2023). Jobs have no caps. Kept for comparison with
    `iadeep`, which minimises completion times, caps and moves jobs, and tunes all jobs of a device.
    """

    evaluations: int = 17  # settings measured per mix
    virtual: float = 16.0  # no caps
    patience: float = 0.0  # in order of submission

    def _join(
        self, draft: Draft, flow: CompletionForecast, rooms: ShareableDevices, queue: ExpectedEnds, job: Job
    ) -> Allocation | None:
        """Join the device where the sum of PD grows least, unless the job itself would end earlier on an empty one."""
        offers = [d for d in rooms.open_to(job, 1.0) if all(r.spec.devices == 1 for r in residents_of(draft, d))]
        if not offers:
            return None
        held = list(draft.occupancy.shared_devices())
        usual = sum([device_use(draft, flow, device) for device in held]) / len(held)
        added = [self._added(draft, flow, job, device, usual) for device in offers]
        _, degradation, device = min((*each, device) for each, device in zip(added, offers, strict=True))
        end_s = degradation * flow.left_s(job, draft.view.cluster.kind_of(device))
        if queue.is_cheaper(job, job.spec.weight * end_s):
            return None
        allocation = Allocation.of(device)
        draft.assign(job, allocation)
        return allocation

    def _added(
        self, draft: Draft, flow: CompletionForecast, job: Job, device: DeviceId, usual: float
    ) -> tuple[float, float]:
        """By how much the sum of PD grows with the job on a device, weighted by the device's use; and the job's own."""
        kind, residents = draft.view.cluster.kind_of(device), residents_of(draft, device)
        before = flow.speeds(kind, flow.colocated(device, residents))
        after = flow.speeds(kind, flow.colocated(device, [*residents, job]))
        growth = sum([1.0 / max(speed, _LEAST) for speed in after]) - sum([1.0 / max(s, _LEAST) for s in before])
        use = device_use(draft, flow, device) + flow.use(device, job) - usual
        return growth * (1.0 + self.balance * use), 1.0 / max(after[-1], _LEAST)

    def _spread(self, draft: Draft, flow: CompletionForecast) -> Iterator[str]:
        """Move no job."""
        return iter(())

    def _tuning(self, draft: Draft, device: DeviceId, residents: Sequence[Job]) -> BatchTuning:
        bank = draft.view.cluster.bank_of(device)
        newest = max(residents, key=lambda job: job.seq)
        return BatchTuning(draft.view.estimates, bank.kind, residents, 1.0, bank.memory_bytes, only=newest.id)
