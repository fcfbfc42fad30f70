"""Comparison of several policies on one trace, each simulated in its own process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from carpool import __version__
from carpool.core.errors import CarpoolError, InputError
from carpool.core.journal import Header, JournalWriter
from carpool.core.messages import Observer
from carpool.core.metrics import Summary
from carpool.policies.registry import attribute_errors, parse_policy
from carpool.sim.cluster_spec import parse_cluster
from carpool.sim.engine import simulate
from carpool.sim.failures import parse_failures
from carpool.sim.report.recorder import RunRecorder
from carpool.sim.report.recording import Recording
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import DroppedRow, WorkUnit, check_capacity
from carpool.sim.traces.writer import atomic_writer
from carpool.sim.worlds import parse_world

Progress = Callable[[str, float], None]  # policy, part of the jobs that have arrived


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """One run, described by values that another process can use."""

    trace: str
    cluster: str
    policy: str
    world: str = "plain"
    format: str | None = None
    round_s: float = 0.0
    seed: int = 0
    failures: str = ""
    skip_invalid: bool = False
    max_jobs: int | None = None
    journal: str = ""
    record: bool = False  # keep what a report needs


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run."""

    policy: str
    summary: Summary
    wall_s: float
    cpu_s: float  # of that policy's process, start-up and parsing included
    dropped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    dropped_rows: tuple[DroppedRow, ...] = ()
    recording: Recording | None = None

    def as_json(self) -> dict[str, Any]:
        """The keys of ``simulate --json``; null if there is no value."""
        figures: dict[str, Any] = {"policy": self.policy, **asdict(self.summary)}
        figures |= {"wall_s": round(self.wall_s, 3), "cpu_s": round(self.cpu_s, 3)}
        figures["jobs_per_cpu_s"] = round(self.summary.jobs / self.cpu_s, 1) if self.cpu_s else None
        return {
            key: value if not isinstance(value, float) or isfinite(value) else None for key, value in figures.items()
        }


def run_simulation(request: SimulationRequest, progress: Callable[[float], None] | None = None) -> SimulationResult:
    """Perform one request in this process."""
    started = time.perf_counter()
    policy = parse_policy(request.policy)
    cluster = parse_cluster(request.cluster)
    world = parse_world(request.world, request.seed)
    failures = parse_failures(request.failures, cluster, request.seed)
    trace = read_trace(request.trace, request.format, skip_invalid=request.skip_invalid, max_jobs=request.max_jobs)
    if trace.work_unit is WorkUnit.STEPS and not request.world.startswith("gavel:"):
        raise InputError(
            f"counts work in steps, and world {request.world!r} has no step times",
            where=request.trace,
            way_out="Give --world gavel:THROUGHPUTS.json.",
        )
    one_kind = max(cluster.capacity.values())  # a gang sits on devices of one kind
    trace = check_capacity(trace, one_kind, cluster.capacity, skip_invalid=request.skip_invalid)
    arrivals, cluster = world.prepare(trace.arrivals, cluster)
    recorder = RunRecorder(cluster) if request.record else None
    observers: list[Observer] = [recorder] if recorder else []
    header = Header(__version__, request.policy, cluster, request.seed)

    def run() -> Summary:
        report = _per_mille(progress, len(trace)) if progress else None
        return simulate(
            arrivals,
            cluster,
            policy,
            world,
            round_s=request.round_s,
            failures=failures,
            observers=observers,
            progress=report,
        ).summary()

    with attribute_errors(request.policy):
        summary = _journalled(request.journal, header, observers, run)
    end_s = summary.makespan_s if isfinite(summary.makespan_s) else 0.0
    return SimulationResult(
        request.policy,
        summary,
        time.perf_counter() - started,
        time.process_time(),
        dict(trace.dropped),
        dict(trace.notes),
        tuple(trace.dropped_rows),
        recorder.close(end_s + trace.arrivals[0].submit_s) if recorder else None,
    )


def weighted_jct_bound_s(request: SimulationRequest) -> float | None:
    """A lower bound for the request's jobs and devices, if its world knows one."""
    world = parse_world(request.world, request.seed)
    if not world.bounds_jct:
        return None
    trace = read_trace(request.trace, request.format, skip_invalid=request.skip_invalid, max_jobs=request.max_jobs)
    return world.weighted_jct_bound_s(*world.prepare(trace.arrivals, parse_cluster(request.cluster)))


def _journalled(path: str, header: Header, observers: list[Observer], run: Callable[[], Summary]) -> Summary:
    """Run with a journal if requested; the file appears only when the run is complete."""
    if not path:
        return run()
    with atomic_writer(Path(path)) as stream:
        observers.append(JournalWriter(stream, header))
        return run()


def _per_mille(progress: Callable[[float], None], num_jobs: int) -> Callable[[float], None]:
    every = max(1, num_jobs // 1000)
    arrived = 0

    def tell(_: float) -> None:
        nonlocal arrived
        arrived += 1
        if arrived % every == 0:
            progress(arrived / num_jobs)

    return tell


def compare(requests: Sequence[SimulationRequest], progress: Progress | None = None) -> list[SimulationResult]:
    """Perform requests in parallel, one process per core; results in the order of requests."""
    if len(requests) == 1:
        request = requests[0]
        return [run_simulation(request, (lambda part: progress(request.policy, part)) if progress else None)]
    results: dict[int, SimulationResult] = {}
    waiting = list(enumerate(requests))
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                index, request = waiting.pop(0)
                theirs, process = _start(request)
                running[theirs] = (index, process)
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                index, process = running[pipe]
                message = _receive(pipe, process, requests[index])
                if isinstance(message, SimulationResult):
                    results[index] = message
                    process.join()
                    del running[pipe]
                elif progress is not None:
                    progress(requests[index].policy, message)
    finally:
        for _, process in running.values():
            process.terminate()
    return [results[index] for index in range(len(requests))]


def _start(request: SimulationRequest) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")  # a fresh process: its CPU time is that policy's alone
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(request, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _receive(pipe: Connection, process: Any, request: SimulationRequest) -> float | SimulationResult:
    """Progress or the result; raises the error of the other process."""
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        died = f"the simulation process of policy {request.policy!r} exited with code {process.exitcode}"
        raise CarpoolError(f"{died}; it may be out of memory") from None
    if isinstance(message, BaseException):
        raise message
    assert isinstance(message, float | SimulationResult)
    return message


def _child(request: SimulationRequest, pipe: Connection) -> None:
    sys.stdout = sys.stderr  # output of a policy file must not mix with the figures
    try:
        pipe.send(run_simulation(request, pipe.send))
    except InputError as error:
        pipe.send(InputError(error.problem, where=error.where, way_out=error.way_out))  # subclasses may not pickle
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001  # goes to the parent, which reports it
        pipe.send(CarpoolError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
