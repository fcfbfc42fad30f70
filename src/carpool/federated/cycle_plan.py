"""Plan of a cycle: how many samples of each task every device processes, with which batch size and share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple, TypeVar

from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.federated.federation import DeviceName, Federation, Task, TaskName
from carpool.federated.lane_plan import LaneSpeeds, LaneTask, choose_lanes
from carpool.federated.messages import StartWork, TaskResult, Work
from carpool.policies.sharing.share_search import Setting, ShareSearch, Tenant

_LEAST_S = 1e-9
_NEW_PART = 0.5  # of a measurement in the running mean
_BIN = log(1.1)  # shares are searched for ratios of seconds in steps of 10 %, so that few searches serve many devices

_Key = TypeVar("_Key")
ActiveTasks = Mapping[TaskName, tuple[Task, int]]  # tasks that are not over, with their rounds


@dataclass(slots=True)
class DeviceState:
    """What the coordinator knows about a device."""

    name: DeviceName
    kind: Kind
    volumes: dict[TaskName, int]  # samples it holds of each task
    cores: int = 1  # how many of its tasks run side by side
    is_present: bool = True
    done: dict[TaskName, int] = field(default_factory=dict)  # samples of accepted updates
    sample_s: dict[TaskName, float] = field(default_factory=dict)  # measured seconds per sample alone
    pace: float = 1.0  # measured over planned seconds of its cycles
    num_paced: int = 0
    load_s: dict[TaskName, float] = field(default_factory=dict)  # to give a task another lane; empty: it has none
    shares: dict[TaskName, float] = field(default_factory=dict)  # lanes that differ from the whole GPU
    lanes: LaneSpeeds = field(default_factory=LaneSpeeds)

    def come_back(self, load_s: Mapping[str, float]) -> None:
        """Note that its processes were started, on lanes of the whole GPU if it has lanes."""
        if bool(load_s) != bool(self.load_s):
            self.pace, self.num_paced = 1.0, 0
        self.is_present, self.shares = True, {}
        self.load_s = {TaskName(task): seconds for task, seconds in load_s.items()}

    def share(self, task: TaskName) -> float:
        """The lane that the task's process has, or will have after the last order."""
        return self.shares.get(task, 1.0)

    def must_start(self, tasks: Sequence[TaskName], settings: Sequence[Setting]) -> bool:
        """Whether a process must restart to get these lanes; planned times do not include restarts."""
        pairs = zip(tasks, settings, strict=True)
        return bool(self.load_s) and any(self.share(task) != setting.fraction for task, setting in pairs)

    def adopt(self, work: Sequence[Work]) -> None:
        """Note the lanes that an order assigns."""
        if self.load_s:
            self.shares |= {each.task: each.share for each in work}

    def learn(self, results: Sequence[TaskResult], seconds: float, order: StartWork, *, is_whole: bool) -> None:
        """Learn from the measured times of a cycle; `is_whole` if all ordered work was done."""
        is_first = not self.sample_s
        planned_s = order.planned_s if is_whole else 0.0
        # A device cannot be busy for longer than the cycle.
        found = {
            result.task: min(result.busy_s, seconds) / result.samples
            for result in results
            if result.samples and result.busy_s > 0.0
        }
        if not self.load_s:
            self._learn_alone(found)
        elif order.in_turn:
            self._learn_alone({task: each for task, each in found.items() if self.share(task) == 1.0})
        elif planned_s > 0.0 and len(order.work) > 1:
            self.lanes.learn(order.work, self.sample_s, found)
        if planned_s > 0.0 and seconds > 0.0 and not is_first:  # the first plan was made without measured rates
            part = _NEW_PART if self.num_paced else 1.0
            self.pace += part * (seconds / planned_s - self.pace)
            self.num_paced += 1

    def _learn_alone(self, found: Mapping[TaskName, float]) -> None:
        for task, value in found.items():
            old = self.sample_s.get(task, value)
            self.sample_s[task] = old + _NEW_PART * (value - old)


class Mix(NamedTuple):
    """Shares of tasks that share a device, and their speeds relative to alone."""

    settings: tuple[Setting, ...]
    speeds: tuple[float, ...] = ()
    in_turn: bool = False  # although they have lanes


class DevicePlan(NamedTuple):
    """A device's work in a cycle and the seconds it should take, before `pace` corrects them; 0: unknown."""

    work: tuple[Work, ...]
    seconds: float = 0.0
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class CoreEstimator(DeclaredEstimator):
    """Rates of tasks that use one core each, on a device of several; shares are parts of all cores."""

    cores: int = 1

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(min(1.0, self.cores * placement.fraction / max(1.0, placement.load)))


class CyclePlanner:
    """Plans cycles of a federation. Its answers depend on its arguments only; searches are kept to save time."""

    def __init__(self, federation: Federation, estimates: Estimator) -> None:
        self._federation = federation
        self._estimates = estimates
        self._mixes: dict[tuple[object, ...], Mix] = {}

    def plan(self, tasks: ActiveTasks, devices: Sequence[DeviceState]) -> dict[DeviceName, DevicePlan]:
        """The work of each device; devices without data of any task are left out."""
        held = {device.name: [task for task in tasks if device.volumes.get(task, 0) > 0] for device in devices}
        used = [device for device in devices if held[device.name]]
        if self._federation.plan not in ("balanced", "shortest"):
            return {device.name: _equal(self._federation, tasks, used, device, held[device.name]) for device in used}
        mixes, epoch_s = {}, {}
        for device in used:
            on_device = {name: tasks[name] for name in held[device.name]}
            mixes[device.name], epoch_s[device.name] = self._mix(device, on_device)
        volumes = {device.name: _volume(tasks, device) for device in used}
        paced = {device.name: epoch_s[device.name] * device.pace for device in used}
        epochs = _epochs(self._federation, volumes, paced)
        return {
            name: DevicePlan(
                _balanced(self._federation, tasks, device, held[name], mixes[name], epochs[name]),
                0.0 if device.must_start(held[name], mixes[name].settings) else epochs[name] * epoch_s[name],
                mixes[name].in_turn,
            )
            for device in used
            for name in (device.name,)
        }

    def _mix(self, device: DeviceState, active: ActiveTasks) -> tuple[Mix, float]:
        """The mix of a device, and the seconds of an epoch over all its data: max D/P."""
        tasks = [task for task, _ in active.values()]
        alone = [_alone_s(self._estimates, device, task) for task in tasks]
        if device.load_s:
            return self._on_lanes(device, active, alone)
        longest = max(alone)
        bins = tuple([max(round(log(seconds / longest) / _BIN), -60) for seconds in alone])
        key = (self._estimates.version, device.kind, device.cores, bins, *[task.name for task in tasks])
        mix = self._mixes.get(key)
        if mix is None:
            mix = self._mixes[key] = self._search(device, tasks, [exp(each * _BIN) for each in bins])
        seconds = [each / max(speed, _LEAST_S) for each, speed in zip(alone, mix.speeds, strict=True)]
        if device.cores == 1:
            return mix, max(seconds)
        by_core = dealt(dict(enumerate(alone)), device.cores)
        return mix, max([sum([alone[place] for place in core]) for core in by_core])

    def _on_lanes(self, device: DeviceState, active: ActiveTasks, alone: Sequence[float]) -> tuple[Mix, float]:
        sizes = matched_batches([task for task, _ in active.values()], [device.volumes[name] for name in active])
        samples = [task.weight * device.volumes[name] for name, (task, _) in active.items()]
        tasks = [
            LaneTask(name, size, each / count, each, device.share(name), device.load_s.get(name, 0.0))
            for name, size, each, count in zip(active, sizes, alone, samples, strict=True)
        ]
        left = max([task.rounds - done for task, done in active.values()])
        choice = choose_lanes(device.lanes, device.kind, tasks, self._federation.levels, self._federation.epochs * left)
        return Mix(tuple(map(Setting, choice.shares)), in_turn=choice.in_turn), choice.seconds

    def _search(self, device: DeviceState, tasks: Sequence[Task], seconds: Sequence[float]) -> Mix:
        """Search from proportional shares for those that minimise the time until a device's last task is done."""
        tenants = [Tenant(_as_job(task, each)) for task, each in zip(tasks, seconds, strict=True)]
        levels = self._federation.levels
        estimates = self._estimates if device.cores == 1 else CoreEstimator(cores=device.cores)
        search = ShareSearch(estimates, device.kind, tenants, levels, objective="barrier")
        start = tuple([Setting(_nearest(levels, each / sum(seconds))) for each in seconds])
        settings, speeds = search.best(start)
        return Mix(settings, tuple(speeds))


def dealt(seconds: Mapping[_Key, float], cores: int) -> list[list[_Key]]:
    """Work dealt to cores: the longest first, each to the core that would finish it first."""
    found: list[list[_Key]] = [[] for _ in range(min(cores, len(seconds)))]
    ends = [0.0] * len(found)
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        core = ends.index(min(ends))
        found[core].append(name)
        ends[core] += max(seconds[name], _LEAST_S)
    return found


def _as_job(task: Task, alone_s: float) -> JobSpec:
    """The task as a job whose weight is its seconds of work, as the objective ``barrier`` takes it."""
    return JobSpec(JobId(task.name), model=task.name, batch_size=task.batch_size, weight=alone_s)


def _alone_s(estimates: Estimator, device: DeviceState, task: Task) -> float:
    """Seconds of one epoch of a task on a device that it has to itself, measured if it ever was."""
    samples = task.weight * device.volumes[task.name]
    measured = device.sample_s.get(task.name)
    if measured is None:
        steps_per_s = estimates.rate(_as_job(task, 1.0), Placement(((device.kind, 1),))).mean
        measured = 1.0 / max(steps_per_s * task.batch_size, _LEAST_S)
    return max(samples * measured, _LEAST_S)


def _nearest(levels: Sequence[float], share: float) -> float:
    return min(levels, key=lambda level: abs(level - share))


def _epochs(
    federation: Federation, volumes: Mapping[DeviceName, float], epoch_s: Mapping[DeviceName, float]
) -> dict[DeviceName, float]:
    """Epochs of each device in a cycle."""
    if federation.plan == "shortest" or not epoch_s:
        return epochs_to_meet(federation, volumes, epoch_s)
    most, slowest_s = federation.epochs * federation.epochs_range[1], max(epoch_s.values())
    return {name: min(federation.epochs * slowest_s / each, most) for name, each in epoch_s.items()}


def epochs_to_meet(
    federation: Federation, volumes: Mapping[DeviceName, float], epoch_s: Mapping[DeviceName, float]
) -> dict[DeviceName, float]:
    """Epochs of each device in a cycle so that all end together and together process `epochs` of all data.

    T = E · Σ D_d / Σ (D_d / t_d) with t_d the seconds of an epoch on device d, which makes T / t_d epochs in a cycle. A
    device at an end of `epochs_range` stays there, and the others make up for it.
    """
    low, high = [federation.epochs * bound for bound in federation.epochs_range]
    wanted = federation.epochs * sum(volumes.values())
    found: dict[DeviceName, float] = {}
    free = dict(epoch_s)
    while free:
        left = wanted - sum([volumes[name] * epochs for name, epochs in found.items()])
        cycle_s = left / sum([volumes[name] / each for name, each in free.items()])
        # One bound at a time: devices limited to fewer epochs leave more to the others, and vice versa.
        outside = {name: high for name, each in free.items() if cycle_s / each > high}
        outside = outside or {name: low for name, each in free.items() if cycle_s / each < low}
        if not outside:
            return found | {name: cycle_s / each for name, each in free.items()}
        found |= outside
        free = {name: each for name, each in free.items() if name not in outside}
    return found


def _volume(tasks: ActiveTasks, device: DeviceState) -> float:
    return sum([task.weight * device.volumes.get(name, 0) for name, (task, _) in tasks.items()])


def _balanced(
    federation: Federation,
    tasks: ActiveTasks,
    device: DeviceState,
    held: Sequence[TaskName],
    mix: Mix,
    epochs: float,
) -> tuple[Work, ...]:
    work = []
    sizes = matched_batches([tasks[name][0] for name in held], [device.volumes[name] for name in held])
    for name, setting, batch_size in zip(held, mix.settings, sizes, strict=True):
        task, round_ = tasks[name]
        samples = _whole(task, device.volumes[name], epochs * task.weight * device.volumes[name])
        runs = _runs(federation, task, device.volumes[name], samples)
        work.append(Work(name, round_, device.done.get(name, 0), samples, batch_size, setting.fraction, runs))
    return tuple(work)


def matched_batches(tasks: Sequence[Task], volumes: Sequence[int]) -> list[int]:
    """Batch sizes in proportion to the tasks' data, so that all tasks make the same number of steps, where allowed.

    That number is the geometric mean of the steps of an epoch with their own batch sizes. Tasks without `batch_range`
    keep their batch size.
    """
    steps = [log(task.weight * volume / task.batch_size) for task, volume in zip(tasks, volumes, strict=True)]
    free = [each for task, each in zip(tasks, steps, strict=True) if task.batch_range is not None]
    mean = sum(free) / max(len(free), 1)
    found = []
    for task, each in zip(tasks, steps, strict=True):
        low, high = task.batch_range or (task.batch_size, task.batch_size)
        found.append(min(max(round(task.batch_size * exp(each - mean)), low), high))
    return found


def _runs(federation: Federation, task: Task, volume: int, samples: int) -> int:
    """The largest number of runs in which each does at least the task's local epochs, and so less than twice that."""
    epochs = task.local_epochs or federation.epochs * task.weight
    least = max(epochs * volume, volume if task.whole_epochs else 1)
    return max(1, int(samples / least + _LEAST_S))


def _whole(task: Task, volume: int, samples: float) -> int:
    """The number of samples to order: at least one, or whole epochs where a task allows nothing else."""
    if task.whole_epochs:
        return volume * max(1, round(samples / volume))
    return max(1, round(samples))


def _equal(
    federation: Federation,
    tasks: ActiveTasks,
    devices: Sequence[DeviceState],
    device: DeviceState,
    held: Sequence[TaskName],
) -> DevicePlan:
    """Equal shares and own batch sizes; the same number of epochs, or of steps with the same total of samples."""
    steps = 0
    if federation.plan == "equal-steps":
        batches = sum([tasks[name][0].batch_size for each in devices for name in tasks if each.volumes.get(name, 0)])
        steps = max(1, round(federation.epochs * sum([_volume(tasks, each) for each in devices]) / batches))
    work = []
    for name in held:
        task, round_ = tasks[name]
        wanted = steps * task.batch_size or federation.epochs * task.weight * device.volumes[name]
        samples = _whole(task, device.volumes[name], wanted)
        work.append(Work(name, round_, device.done.get(name, 0), samples, task.batch_size, 1.0 / len(held)))
    return DevicePlan(tuple(work))


def mismatch(volumes: Sequence[float], samples: Sequence[float]) -> float:
    """How far a device is from processing its tasks in proportion to its data: Σ_ij |log(D_i/D_j) − log(o_i/o_j)|."""
    skews = [log(data) - log(max(done, 0.5)) for data, done in zip(volumes, samples, strict=True)]
    return sum([abs(a - b) for a in skews for b in skews])
