"""Messages between an executor, its workers and the fork server; JSON lines, nothing is pickled.

Lifecycle of a worker:

0. A process may be started ahead of any job: `Prewarm`, answered by `Prewarmed`. Or it calls a job's entry before any
   job starts: `CheckEntry`, answered by `EntryChecked`.
1. `Begin` names the job; the worker loads the entry and answers `Ready`. If the job already has a state, `Load` passes
   it in a memory file or names a checkpoint; the answer is `Loaded`.
2. `Proceed` starts an *epoch* of the process group: a fixed set of ranks and a fixed split of every step. A single rank
   makes steps on its own and polls its socket between them. With several ranks, each step is: contribute to the shared
   segment, send `Contributed`, wait for `Apply`, add all contributions in tree order, update. Across nodes, where the
   process group itself waits for all ranks, `Contributed` is sent ahead of the step and `Apply` covers several steps.
3. `Proceed` with a higher epoch ends the current one at once; a step that was not applied is repeated. `Halt` ends it
   at the next step boundary, answered by `Halted`.
4. At a step boundary `Publish` writes the state into a memory file (the mirror) and `Save` writes a checkpoint.
5. Training ends with `Done` from every rank, carrying the digest of the weights; any other end is `WorkerFailed`.

"Step n" in a message means: n steps are done.

The annotations are also the limits of what is accepted (`core.typed_fields`): a job can write anything to its channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from carpool.core.typed_fields import Amount, Measured, Range, Uncut

Seconds = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True, slots=True)
class Message:
    """Base class of all messages."""


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Become a worker of this job. Descriptors: its log, its step counter, and the handoff of its device."""

    job: str
    program: dict[str, Any]  # fields of a Program
    device: str  # "cpu", "cuda:0"
    cores: tuple[int, ...] = ()  # CPU affinity; empty: all cores
    threads: int = 1  # intra-op threads
    checkpoints: str = ""  # folder for checkpoints and final weights
    heartbeat_s: float = 0.5
    environment: Mapping[str, str] = field(default_factory=dict)  # of its lane; set before CUDA starts
    memory_cap: int = 0  # bytes of the device for all time-sliced jobs on it; 0: no cap, the job is never swapped out
    lane_bytes: int = 0  # memory of its lane of a GPU; 0: all of the device


@dataclass(frozen=True, slots=True)
class Prewarm(Message):
    """Initialize the device for a job that is not known yet; `Begin` may come any time later."""

    device: str
    cores: tuple[int, ...] = ()
    heartbeat_s: float = 0.5
    environment: Mapping[str, str] = field(default_factory=dict)  # of its lane


@dataclass(frozen=True, slots=True)
class CheckEntry(Message):
    """Call the entry of a job as its worker will do; `Begin` of the same job may follow."""

    job: str
    program: dict[str, Any]  # fields of a Program
    threads: int = 1  # intra-op threads


@dataclass(frozen=True, slots=True)
class EntryChecked(Message):
    """The entry returned a valid training, or not."""

    error: str = ""
    can_begin: bool = False  # the process may become the job's worker
    total_steps: int | None = None  # of the training; None: unknown
    batch_size: int = 0
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class Load(Message):
    """Load a state. Descriptor: the memory file that a `Publish` filled; without one, read `path`.

    With both, the memory file is a copy of the checkpoint, which is on another node.
    """

    path: str = ""  # a checkpoint on disk
    warmup_bytes: int = 0  # run warm-up steps, undone afterwards, if this much device memory is free; 0: none


@dataclass(frozen=True, slots=True)
class Proceed(Message):
    """Make steps in this epoch from the current step on. Descriptor, with several ranks: their shared memory."""

    epoch: int
    rank: int = 0  # rank 0 reports, evaluates, publishes and saves
    size: int = 1
    owners: tuple[tuple[int, int], ...] = ()  # pieces [first, stop) of every rank; empty: rank 0 has all
    parts: tuple[int, ...] = ()  # default mode: samples per rank; empty: equal
    update_ranges: tuple[tuple[int, int], ...] = ()  # parameters [first, stop) each rank updates; empty: all update all
    reducer: str = "shared"  # or "group": the descriptor is the store of a process group on this node
    store: str = ""  # HOST:PORT of a process group across nodes; the descriptor of rank 0 is its listening socket
    address: str = ""  # of this node, for the process group
    time_sliced: bool = False  # request a `Grant` before each step
    batch_size: int = 0  # samples per step; 0: unchanged
    lr_gain: float = 1.0  # learning-rate factor of this batch size; 0: unchanged
    threads: int = 0  # intra-op threads; 0: unchanged
    update_threads: int = 0  # for reduction and update, equal in all ranks; 0: as `threads`
    probe: int = 0  # measure this many steps after as many warm-up steps and report them together
    limits: tuple[tuple[int, int], ...] = ()  # (step, most samples of a micro-batch from it on)


@dataclass(frozen=True, slots=True)
class Apply(Message):
    """All contributions to the step have arrived, or all ranks will contribute to it."""

    epoch: int
    step: int
    halt: bool = False  # stop after this step
    steps: int = 1  # this many steps from this one on may be applied


@dataclass(frozen=True, slots=True)
class Gather(Message):
    """All ranks have updated their range of parameters: read those of the others."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Halt(Message):
    """Stop at the next step boundary."""


@dataclass(frozen=True, slots=True)
class ReleaseMemory(Message):
    """Free cached memory for a neighbour while idle; answered by `MemoryReleased`."""


@dataclass(frozen=True, slots=True)
class Publish(Message):
    """Write the state at the next step boundary into a memory file (the descriptor) and continue."""


@dataclass(frozen=True, slots=True)
class Save(Message):
    """Write a checkpoint at the next step boundary and continue."""


@dataclass(frozen=True, slots=True)
class MetricsMeasured(Message):
    """Metrics from rank 0, recorded by every rank."""

    step: int
    metrics: Mapping[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """Permission to make some steps once the grant `after` has ended."""

    steps: int = 1
    number: int = 0
    after: int = 0
    free_bytes: int = 0  # of the device, for a worker that has just been admitted under a memory cap


@dataclass(frozen=True, slots=True)
class SwapOut(Message):
    """Free device memory after the current turn: scratch, or `wholly` the state too; answered by `SwappedOut`."""

    wholly: bool = True


@dataclass(frozen=True, slots=True)
class SwapIn(Message):
    """Bring the state back to the device before the next turn, and `wholly` the scratch too."""

    wholly: bool = True


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Exit."""


@dataclass(frozen=True, slots=True)
class Prewarmed(Message):
    """The process is ready for any job."""

    seconds: Seconds  # warm-up time
    memory_bytes: int = 0  # GPU memory held; 0: unknown
    skipped: tuple[str, ...] = ()  # kernels that failed to warm up, and why


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The entry is loaded; all workers of a job must report the same fingerprint."""

    fingerprint: str  # of the initial weights
    contribution_bytes: int  # of one contribution in the shared segment
    batch_size: int
    total_steps: int | None  # None: only a target ends the training
    num_samples: int
    sizes: tuple[int, ...] = ()  # elements of each parameter
    has_batch_norm: bool = False
    can_shard_update: bool = False  # each rank may update a range of the parameters
    notes: tuple[str, ...] = ()  # for the job's story
    target_loss: Measured | None = None  # training ends when the mean loss of `window` steps reaches it
    window: int = 10


@dataclass(frozen=True, slots=True)
class Joined(Message):
    """A program with its own loop (`carpool.session`) is about to make steps; answered by `Proceed`."""

    step: int
    total_steps: int


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """The state was loaded."""

    step: int


@dataclass(frozen=True, slots=True)
class Contributed(Message):
    """This rank's pieces of the step are in the shared segment, or will be in the process group."""

    epoch: int
    step: int
    seconds: Seconds  # of the forward and backward pass
    samples: int
    update_s: Seconds = 0.0  # per element, of the last update; 0: unknown
    copy_s: Seconds = 0.0  # per element, to exchange an updated parameter; 0: unknown
    done: int | None = None  # steps done, in a message ahead of the step, whose seconds are of earlier passes


@dataclass(frozen=True, slots=True)
class Updated(Message):
    """This rank's range of parameters is in the shared segment.

    Until `Gather` the worker's state belongs to no step: after a `Halt` or `Proceed` in between, it exits.
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Stepped(Message):
    """Progress from rank 0, a few times a second at most."""

    step: int
    epoch: int  # of the training data
    loss: Measured
    samples_per_s: Amount
    steps_per_s: Amount
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    noise: Measured | None = None  # gradient noise scale
    memory_bytes: int = 0  # peak
    probed: bool = False  # the result of a probe


@dataclass(frozen=True, slots=True)
class Noted(Message):
    """A line for the job's story."""

    text: str


@dataclass(frozen=True, slots=True)
class Evaluated(Message):
    """Rank 0 evaluated; the executor forwards it as `MetricsMeasured`."""

    step: int
    metrics: Mapping[str, Measured]


@dataclass(frozen=True, slots=True)
class Halted(Message):
    """Stopped at a step boundary."""

    step: int


@dataclass(frozen=True, slots=True)
class MemoryReleased(Message):
    """Only the memory of the state is still held."""


@dataclass(frozen=True, slots=True)
class Published(Message):
    """The memory file holds the state."""

    step: int


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """A checkpoint was written."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class TurnRequested(Message):
    """Request for a `Grant`."""

    step: int


@dataclass(frozen=True, slots=True)
class AdmissionRequested(Message):
    """The entry is loaded on the host; the worker moves to the device, under its memory cap, with the next `Grant`."""


@dataclass(frozen=True, slots=True)
class MemoryMeasured(Message):
    """Device memory of the worker's training, in bytes."""

    state: int
    scratch: int
    fixed: int


@dataclass(frozen=True, slots=True)
class SwappedOut(Message):
    """The memory is free."""

    wholly: bool


@dataclass(frozen=True, slots=True)
class TurnEnding(Message):
    """The last step of a grant has begun; requests another and lets the next worker prepare."""

    number: int


@dataclass(frozen=True, slots=True)
class TurnEnded(Message):
    """A grant has ended; its successor already learned that from the device handoff."""

    number: int
    is_last: bool = False  # no further grant is requested


@dataclass(frozen=True, slots=True)
class Done(Message):
    """Training ended; rank 0 has saved the final weights."""

    step: int
    epoch: int  # of the training data
    loss: Measured
    digest: str
    reason: str
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    memory_bytes: int = 0  # peak


@dataclass(frozen=True, slots=True)
class WorkerFailed(Message):
    """An error in this worker."""

    # user, diverged, input, protocol: the job fails; memory: retried; disk: training continues; device: the process is
    # lost; lane: the process did not get its GPU share
    kind: str
    error: str
    step: int = 0
    samples: int = 0  # of this worker's part of the step, when it ran out of memory
    growth: str = ""  # how memory grew over good steps before it ran out; empty: it did not
    limit: str = ""  # what limits its memory below that of the device; the executor fills it in if unknown


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """Heartbeat, from a thread of its own so that long steps do not look like a hang."""


@dataclass(frozen=True, slots=True)
class Fork(Message):
    """Fork a worker. Descriptors: the worker's end of its channel and, optionally, its log."""


@dataclass(frozen=True, slots=True)
class Forked(Message):
    """The worker was forked; requests are answered in order."""

    pid: int
    error: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class RunProgram(Message):
    """Run a Python program instead of a worker. Descriptors: its log, its lifeline, and the socket of its session.

    Answered by `Forked` with the pid of its reaper, or with why it needs a plain start; later by `Exited`.
    """

    command: tuple[Uncut, ...]
    folder: Uncut
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    grace_s: Seconds = 5.0  # between SIGTERM and a kill


@dataclass(frozen=True, slots=True)
class ProgressFound(Message):
    """Progress that a command's output reports."""

    done: Amount
    total: Amount | None = None
    steps_per_s: Amount = 0.0
    loss: Measured | None = None


@dataclass(frozen=True, slots=True)
class SendSignal(Message):
    """Signal a worker; ignored once it has exited, so that a reused pid is never hit."""

    pid: int
    signal: Annotated[int, Range(0, 64)]


@dataclass(frozen=True, slots=True)
class Exited(Message):
    """A worker has exited and was reaped; processes it started were killed."""

    pid: int
    code: Annotated[int, Range(-64, 255)]  # as in subprocess: negative for a signal


@dataclass(frozen=True, slots=True)
class HostTasks(Message):
    """Become a device of a federation, or its server, and load its tasks. Answered by `TasksReady`."""

    name: str
    tasks: dict[str, Any]  # by name: program, partition, proximal
    part: int | None = None  # number of the device's part of the data; None: the server, which only evaluates
    num_parts: int = 1
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    threads: int = 1
    heartbeat_s: float = 0.5
    slowdown: Seconds = 0.0  # emulate a device so many times slower, by CPU seconds; 0: real time
    lane: Mapping[str, str] = field(default_factory=dict)  # makes each task a client of MPS; empty: they take turns


@dataclass(frozen=True, slots=True)
class TasksReady(Message):
    """The tasks are loaded. Descriptors, of the server only: the initial weights of each task."""

    tasks: dict[str, Any] = field(default_factory=dict)  # by name: volume, batch_size, sample_s, trained; load_s
    error: str = ""  # why there are none
    no_lanes: str = ""  # why they cannot run side by side on the GPU; the process exits, and may be started without


@dataclass(frozen=True, slots=True)
class RunTasks(Message):
    """Work on tasks from given weights. Descriptors: the weights of each. Answered by `TasksDone`; `Halt` ends it."""

    cycle: int
    work: tuple[tuple[str, int, int, int, int, float, int], ...]  # fields of a Work
    deadline_s: Seconds = 0.0
    in_turn: bool = False  # one task after the other, where they could run side by side on a GPU


@dataclass(frozen=True, slots=True)
class TasksDone(Message):
    """The results of `RunTasks`. Descriptors: the new weights of each task that did not fail."""

    cycle: int
    results: tuple[dict[str, Any], ...]  # fields of a TaskResult
    seconds: Seconds = 0.0  # that the cycle took on the device, emulated or real


@dataclass(frozen=True, slots=True)
class EvaluateTask(Message):
    """Evaluate weights (the descriptor). Answered by `TaskEvaluated`."""

    task: str
    rounds: int


@dataclass(frozen=True, slots=True)
class TaskEvaluated(Message):
    """The metrics of a task; none if its training does not evaluate."""

    task: str
    rounds: int
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class DescribeDevice(Message):
    """Ask a device for its name. Answered by `DeviceDescribed`."""


@dataclass(frozen=True, slots=True)
class DeviceDescribed(Message):
    """A device of a federation over Flower, and the tasks it has loaded."""

    name: str
    tasks: dict[str, Any] = field(default_factory=dict)  # by name: volume, sample_s
    fingerprint: str = ""  # of the federation file that the device has


@dataclass(frozen=True, slots=True)
class SendToNode(Message):
    """Send a Flower node a message, with the descriptors. Answered by `NodeAnswered`."""

    node: str
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NodeAnswered(Message):
    """The answer of a Flower node, with its descriptors; or why there is none."""

    node: str
    message: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    stamps: Mapping[str, Measured] = field(default_factory=dict)  # wall-clock times on the way


@dataclass(frozen=True, slots=True)
class NodesListed(Message):
    """The Flower nodes that are connected; one that was killed stays listed for a while."""

    nodes: tuple[str, ...] = ()
