"""Live runs under one executor after another, with jobs that are submitted at given times and equal knowledge."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trials.late import LateRun

from carpool.backends.run_folder import RunFolder
from carpool.core.model import Allocation, JobId, Phase
from carpool.core.policy import Policy
from carpool.jobs.devices import LocalDevice
from carpool.jobs.job_file import parse_jobs
from carpool.policies.registry import parse_policy
from carpool.predictors.profiles.profile import Measurement, Profile
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.service.daemon.batch_run import RunRequest
from tests.support.shared_executor import SharedExecutor

TRIALS = Path(__file__).resolve().parent.parent / "trials"
_LAST = 5  # reports that show a training's rate and loss at its end
_CLOSE_S = 15.0


@dataclass(frozen=True, slots=True)
class Model:
    """A training without its length."""

    name: str
    entry: str
    args: Mapping[str, Any]
    probe: int  # steps that show its rate


@dataclass(frozen=True, slots=True)
class Planned:
    """A job of a scene."""

    name: str
    model: Model
    seconds: float = 0.0  # on the fastest device type; 0: to a loss
    target: float = 0.0
    weight: float = 1.0
    at_s: float = 0.0
    keys: Mapping[str, Any] = field(default_factory=dict)  # of its job table


@dataclass(frozen=True, slots=True)
class Ended:
    """What one run showed."""

    jct_s: dict[str, float]
    weighted_s: float
    makespan_s: float
    changes: int  # of devices or shares, starts included
    in_gaps: int  # jobs that ran in the gaps of others
    rates: dict[str, float]  # steps per second at the end of each job
    losses: dict[str, float]
    stories: dict[str, list[str]]

    @property
    def mean_s(self) -> float:
        """Mean completion time."""
        return sum(self.jct_s.values()) / len(self.jct_s)


class OutOfTime(Exception):
    """No time is left for a run."""


class Stage:
    """Devices, the executor on them, and the time that is left."""

    def __init__(self, devices: Sequence[LocalDevice], root: Path, until: float, warm: int) -> None:
        self.devices, self.root, self._until, self._warm = list(devices), root, until, warm
        self.speeds: dict[str, dict[str, float]] = {}  # steps per second by model and device type
        self._number = 0
        self._lender: SharedExecutor | None = None

    @property
    def kinds(self) -> list[str]:
        """Device types, in the order of the devices."""
        return list(dict.fromkeys(device.kind for device in self.devices))

    @property
    def left_s(self) -> float:
        """Seconds until nothing more may run."""
        return self._until - time.monotonic()

    async def close(self) -> None:
        """End the executor; one that hangs ends with this process."""
        lender, self._lender = self._lender, None
        if lender is not None:
            await asyncio.wait_for(lender.close(), _CLOSE_S)

    async def run(self, policy: str | Policy, jobs: Sequence[Planned], limit_s: float = 120.0) -> Ended:
        """Run jobs under a policy that knows their speeds, as far as they were measured."""
        self._number += 1
        if self.left_s < 1.0:
            raise OutOfTime
        names = {f"{job.name}-{self._number}".replace("@", "."): job for job in jobs}
        rows = [self._table(name, job) for name, job in names.items()]
        listed = parse_jobs({"job": rows}, TRIALS, "benchmark")
        beliefs = {JobId(name): self._belief(job, row) for (name, job), row in zip(names.items(), rows, strict=True)}
        known = {name: belief for name, belief in beliefs.items() if belief is not None}
        chosen = parse_policy(policy) if isinstance(policy, str) else policy
        request = RunRequest(
            "seeds",
            listed,
            tuple(self.devices),
            str(policy),
            "benchmark",
            find_policy=lambda text: chosen,
            profiles=known,
        )
        folder = RunFolder(self.root / "runs" / str(self._number))
        late = {name: job.at_s for name, job in names.items()}
        run = LateRun.prepare(request, folder, late, (await self._executor()).lend)
        try:
            await asyncio.wait_for(run.run(), min(limit_s, self.left_s))
        except TimeoutError:
            await self.close()  # its jobs still run: the next run gets another executor
            raise
        return _ended(run, names, folder)

    async def measure(self, models: Sequence[Model], counts: Sequence[int] = (1,)) -> None:
        """Measure each model on each device type, all types at the same time, and on several devices of one type."""
        places = {
            f"{model.name}-{kind}-{count}": (model, kind, count)
            for count in counts
            for model in models
            for kind in self.kinds
            if sum(device.kind == kind for device in self.devices) >= count
        }
        jobs = [Planned(name, model, keys=_only(kind, count)) for name, (model, kind, count) in places.items()]
        found = await self.run("fifo:bypass=true", jobs)
        for name, (model, kind, count) in places.items():
            self.speeds.setdefault(model.name, {})[kind if count == 1 else f"{count} x {kind}"] = found.rates[name]

    def _table(self, name: str, job: Planned) -> dict[str, Any]:
        args = dict(job.model.args)
        if job.target:
            args["target"] = job.target
        else:
            fastest = max((rate for kind, rate in self._alone(job).items()), default=0.0)
            args["steps"] = max(job.model.probe, round(job.seconds * fastest))
        return {
            "name": name,
            "entry": f"seeded.py:{job.model.entry}",
            "args": args,
            "weight": job.weight,
            "deterministic": False,
            **job.keys,
        }

    def _alone(self, job: Planned) -> dict[str, float]:
        return {kind: rate for kind, rate in self.speeds.get(job.model.name, {}).items() if " x " not in kind}

    def _belief(self, job: Planned, row: Mapping[str, Any]) -> ProfileRateModel | None:
        speeds = self.speeds.get(job.model.name)
        if not speeds:
            return None
        batch = int(job.model.args.get("batch", 64))
        measurements = []
        for where, rate in speeds.items():
            count, _, kind = where.rpartition(" x ")
            measurements.append(Measurement(kind, int(count or 1), batch, steps=job.model.probe, step_s=1.0 / rate))
        steps = row["args"].get("steps")
        samples = int(job.model.args.get("samples", 4096))
        return ProfileRateModel.of(
            Profile(row["entry"], row["args"], "", batch, samples, steps, measurements=tuple(measurements))
        )

    async def _executor(self) -> SharedExecutor:
        if self._lender is None:
            options = ExecutorOptions(warm=self._warm)
            client = await ExecutorClient.start(self.devices, self.root / "state" / str(self._number), options=options)
            self._lender = SharedExecutor(client)
        return self._lender


def _only(kind: str, count: int) -> dict[str, Any]:
    return {"kinds": [kind], "devices": count}


def _ended(run: LateRun, names: Mapping[str, Planned], folder: RunFolder) -> Ended:
    accounts = run.accounting.accounts
    failed = [f"{account.spec.id}: {account.error}" for account in accounts.values() if account.phase != Phase.FINISHED]
    if failed:
        raise RuntimeError("; ".join(failed))
    by_name = {name: accounts[JobId(name)] for name in names}
    jct_s = {job.name: by_name[name].jct_s or 0.0 for name, job in names.items()}
    ends = {job.name: _at_the_end(folder, name) for name, job in names.items()}
    weights = {job.name: job.weight for job in names.values()}
    return Ended(
        jct_s,
        sum(weights[name] * taken for name, taken in jct_s.items()) / sum(weights.values()),
        max(account.ended_at or 0.0 for account in accounts.values()),
        sum(len(account.decisions) for account in accounts.values()),
        sum(any(_has_later_turn(entry.allocation) for entry in account.decisions) for account in accounts.values()),
        {name: rate for name, (rate, _) in ends.items()},
        {name: loss for name, (_, loss) in ends.items()},
        {job.name: [words for _, words in by_name[name].story] for name, job in names.items()},
    )


def _has_later_turn(allocation: Allocation | None) -> bool:
    return allocation is not None and any(share.turn for share in allocation.shares)


def _at_the_end(folder: RunFolder, job: str) -> tuple[float, float]:
    """Medians of the last few rates and losses that a job has reported."""
    lines = (folder.job(JobId(job)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("loss") is not None][-_LAST:]
    rates = [row["steps_per_s"] for row in rows if row.get("steps_per_s")]
    return median(rates) if rates else 0.0, median(row["loss"] for row in rows)
