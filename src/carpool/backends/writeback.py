"""What a run has learned of a job, as a profile for later runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from carpool.backends.live import Measured
from carpool.core.topology import Placement
from carpool.predictors.profile import Measurement, Profile, merged, short_entry
from carpool.runtime.entryfile import source_digest
from carpool.runtime.program import Program
from carpool.runtime.reports import Sized


def with_rates(before: Profile | None, program: Program, sized: Sized, rates: Mapping[Placement, Measured]) -> Profile:
    """The profile there was, or a new one, with the rates of a run on whole devices of one kind."""
    source = source_digest(program.entry, Path(program.folder))
    if before is None or before.source != source or before.machine != platform.node():
        before = Profile(
            short_entry(program.entry),
            program.args,
            source,
            sized.batch_size,
            sized.num_samples,
            stop_steps=sized.total_steps,
            machine=platform.node(),
        )
    seen = [
        Measurement(
            placement.groups[0][0],
            placement.num_devices,
            placement.batch_size or sized.batch_size,
            exact=program.exact,
            steps=measured.count,
            step_s=1.0 / measured.mean,
            step_spread_s=measured.spread / measured.mean**2,
        )
        for placement, measured in rates.items()
        if len(placement.groups) == 1 and placement.fraction == 1.0 and measured.mean > 0.0
    ]
    known = {
        (each.kind, each.devices, each.batch_size, each.exact): each for each in before.measurements if _plain(each)
    }
    seen = [_joined(known.get((each.kind, each.devices, each.batch_size, each.exact)), each) for each in seen]
    return replace(before, measurements=merged(before.measurements, seen))


def _plain(each: Measurement) -> bool:
    return each.share == 1.0 and not each.beside


def _joined(old: Measurement | None, new: Measurement) -> Measurement:
    """The new times beside what only a profiler can measure."""
    if old is None:
        return new
    return replace(old, steps=new.steps, step_s=new.step_s, step_spread_s=new.step_spread_s)
