"""What a run has learned of a job, as a profile for later runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path

from carpool.backends.stopwatch import Circumstances, Timed
from carpool.predictors.profile import Costs, Measurement, Profile, merged, setting, short_entry
from carpool.runtime.entryfile import source_digest
from carpool.runtime.program import Program
from carpool.runtime.reports import Sized


def learned(
    before: Profile | None, program: Program, sized: Sized, timed: Mapping[Circumstances, Timed], costs: Costs
) -> Profile:
    """The profile there was, or a new one, with what a run has seen on devices of one kind, alone or beside one job."""
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
    known = {setting(each): each for each in before.measurements}
    seen = [
        _joined(known.get(setting(each)), each)
        for where, times in timed.items()
        if (each := _measurement(program, sized, where, times)) is not None
    ]
    costs = costs.over(before.costs)
    return replace(before, measurements=merged(before.measurements, seen), **costs._asdict())


def _measurement(program: Program, sized: Sized, where: Circumstances, times: Timed) -> Measurement | None:
    placement = where.placement
    if len(placement.groups) > 1 or len(where.beside) > 1:
        return None  # a profile has no words for it
    return Measurement(
        placement.groups[0][0],
        placement.num_devices,
        placement.batch_size or sized.batch_size,
        share=placement.fraction,
        exact=program.exact,
        beside=short_entry(where.beside[0]) if where.beside else "",
        steps=int(times.steps),
        step_s=times.step_s,
        step_spread_s=times.spread_s,
    )


def _joined(old: Measurement | None, new: Measurement) -> Measurement:
    """Both times, weighed by their steps, beside what only a profiler can measure."""
    if old is None or old.step_s is None or new.step_s is None:
        return new if old is None else replace(old, steps=new.steps, step_s=new.step_s, step_spread_s=new.step_spread_s)
    steps = max(1, old.steps) + new.steps
    portion = new.steps / steps
    spread = sqrt((1.0 - portion) * (old.step_spread_s or 0.0) ** 2 + portion * (new.step_spread_s or 0.0) ** 2)
    step_s = (1.0 - portion) * old.step_s + portion * new.step_s
    return replace(old, steps=steps, step_s=step_s, step_spread_s=spread)
