"""What a user may change of a job that was submitted: its weight, and how many devices it may have."""

from __future__ import annotations

from dataclasses import replace

from carpool.core.messages import LimitsChanged, WeightChanged
from carpool.core.model import Allocation, JobSpec

Amendment = WeightChanged | LimitsChanged


def amended(spec: JobSpec, change: Amendment) -> JobSpec:
    """The spec after a change; the width it asked for moves into the new range."""
    if isinstance(change, WeightChanged):
        return replace(spec, weight=change.weight)
    least, most = change.min_devices, change.max_devices
    return replace(spec, devices=min(max(spec.devices, least), most), min_devices=least, max_devices=most)


def takes_off(change: Amendment, held: Allocation | None) -> bool:
    """Whether a job holds more or fewer devices than it may from now on, and so has to leave them."""
    if held is None or isinstance(change, WeightChanged):
        return False
    return not change.min_devices <= held.num_devices <= change.max_devices


def told(change: Amendment) -> str:
    """The change in words, as part of a job's story."""
    if isinstance(change, WeightChanged):
        return f"was given weight {change.weight:g} by its user"
    if change.min_devices == change.max_devices:
        return (
            f"may have {change.max_devices} device{'s' if change.max_devices != 1 else ''} from now on, says its user"
        )
    return f"may have {change.min_devices} to {change.max_devices} devices from now on, says its user"
