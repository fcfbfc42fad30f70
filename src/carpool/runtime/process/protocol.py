"""Messages between an executor, its workers and the fork server.

The life of a worker:

0. It may be forked ahead of any job: then `Prewarm` comes first, answered by `Prewarmed`, and the rest when a job does.
1. It is forked, gets `Begin`, loads the entry, answers `Ready`. If it joins a running job it gets `Load` with the state
   in a memory file and answers `Loaded`.
2. `Proceed` puts it into a *formation*: who takes which pieces of every step. Alone (size 1) it makes steps freely and
   looks at its socket between them. In company every step is: contribute into the shared segment, say `Contributed`,
   wait for `Apply`, add all contributions in tree order, update, go on.
3. A new formation (`Proceed` with a higher number) ends the old one at once: a step not yet applied is begun again.
   `Halt` ends it at the next step boundary, answered by `Halted`.
4. `Publish` (state into a memory file: the mirror) and `Save` (a checkpoint on disk) are carried out at a boundary.
5. The training's end is `Done` from every member, with the digest; anything else that ends it is `WorkerFailed`.

Facts about steps are numbered by steps done. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """Anything that is said."""


# ------------------------------------------------------------------------------------------------ executor to worker
@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Become the worker of a job on a device. Beside it: descriptors of its log, step counter, and device's baton."""

    job: str
    program: dict[str, Any]  # fields of a Program
    device: str  # "cpu", "cuda:0"
    cores: tuple[int, ...] = ()  # the device's own; empty: all
    threads: int = 1  # intra-op threads that the share allows
    checkpoints: str = ""  # folder for checkpoints and final weights
    heartbeat_s: float = 0.5
    environment: Mapping[str, str] = field(default_factory=dict)  # of its lane; set before CUDA starts
    memory_cap: int = 0  # bytes of the device for all that take turns there: its memory comes and goes; 0: it stays


@dataclass(frozen=True, slots=True)
class Prewarm(Message):
    """Be ready on a device for a job that is not known yet: its `Begin` may come any time later."""

    device: str
    cores: tuple[int, ...] = ()
    heartbeat_s: float = 0.5
    environment: Mapping[str, str] = field(default_factory=dict)  # of its lane


@dataclass(frozen=True, slots=True)
class Load(Message):
    """Take over a state. Beside it: a memory file that a `Publish` filled, or none to read `path`."""

    path: str = ""  # a checkpoint on disk
    rehearses: int = 0  # bytes that steps have taken so far: where they are free, some are made and undone; 0: none


@dataclass(frozen=True, slots=True)
class Proceed(Message):
    """Work in this formation from the present step on. Beside it, for size above 1: a memory file for all ranks."""

    formation: int
    rank: int = 0  # 0 reports, evaluates, publishes and saves for all
    size: int = 1
    owners: tuple[tuple[int, int], ...] = ()  # pieces [first, stop) of every rank; empty: rank 0 has all
    parts: tuple[int, ...] = ()  # default mode: samples per rank; empty: equal
    updates: tuple[tuple[int, int], ...] = ()  # parameters [first, stop) that each rank updates; empty: all do all
    reducer: str = "shared"  # or "group": what is beside it is the store of a process group
    by_token: bool = False  # ask for a `Grant` before each step
    batch_size: int = 0  # samples per step from here on; 0: as before
    gain: float = (
        1.0  # what such a step counts for, in steps with the own batch: scales the learning rate; 0: as before
    )
    threads: int = 0  # intra-op threads from here on; 0: as before
    update_threads: int = 0  # for adding up and updating, the same in every rank; 0: as for the rest
    probe: int = 0  # rank 0 reports on so many steps together, after as many that warm up
    limits: tuple[tuple[int, int], ...] = ()  # (step, most samples in a pass from it on): more ran out of memory


@dataclass(frozen=True, slots=True)
class Apply(Message):
    """All contributions to a step are there."""

    formation: int
    step: int  # steps done before it
    halt: bool = False  # stop after it, at the boundary


@dataclass(frozen=True, slots=True)
class Gather(Message):
    """All ranks have updated their parameters (only where `Proceed.updates` divides them): take those of the others."""

    formation: int
    step: int  # steps done before it


@dataclass(frozen=True, slots=True)
class Halt(Message):
    """Stop at the next boundary and say where."""


@dataclass(frozen=True, slots=True)
class ReleaseMemory(Message):
    """A neighbour needs memory: give back at rest what is only kept for later, answered by `MemoryReleased`."""


@dataclass(frozen=True, slots=True)
class Publish(Message):
    """Write the state into the memory file beside this, at the next boundary, and go on."""


@dataclass(frozen=True, slots=True)
class Save(Message):
    """Write a checkpoint to disk at the next boundary, and go on."""


@dataclass(frozen=True, slots=True)
class MetricsMeasured(Message):
    """The metrics that rank 0 measured: every rank records the same."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """Make so many steps, once the grant that this one comes after has ended; then ask again."""

    steps: int = 1
    number: int = 0
    after: int = 0
    room: int = 0  # bytes of the device, for a worker that has just arrived under a cap


@dataclass(frozen=True, slots=True)
class SwapOut(Message):
    """Give memory of the device back once it has no turn: scratch, or wholly the state too; answered by `SwappedOut`."""

    wholly: bool = True


@dataclass(frozen=True, slots=True)
class SwapIn(Message):
    """There is room on the device for the state, or wholly for scratch too: bring it in, the turn comes soon."""

    wholly: bool = True


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Exit now, politely."""


# ------------------------------------------------------------------------------------------------ worker to executor
@dataclass(frozen=True, slots=True)
class Prewarmed(Message):
    """All that can be done before a job is known is done."""

    seconds: float  # that took
    memory_bytes: int = 0  # of the GPU that this takes up; 0: not known
    left_out: tuple[str, ...] = ()  # what could not be done, and why


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The entry is loaded; every worker of a job must give the same fingerprint."""

    fingerprint: str  # of the initial weights
    segment_bytes: int  # of one contribution in the shared segment
    batch_size: int
    total_steps: int | None  # None: only a target ends it
    num_samples: int
    sizes: tuple[int, ...] = ()  # elements of each parameter, in the layout's order
    has_batch_norm: bool = False
    may_split: bool = False  # ranks may update a range of the parameters each
    notes: tuple[str, ...] = ()  # for the job's story
    target_loss: float | None = None  # it ends when the mean loss of `window` steps gets here
    window: int = 10


@dataclass(frozen=True, slots=True)
class Joined(Message):
    """A program with a loop of its own is about to make steps (`carpool.session`); answered by `Proceed`."""

    step: int  # so many are done
    total_steps: int


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """The state was taken over; so many steps are done."""

    step: int


@dataclass(frozen=True, slots=True)
class Contributed(Message):
    """This rank's pieces of a step lie in the segment."""

    formation: int
    step: int
    seconds: float  # the pass took, for balancing
    samples: int
    update_s: float = 0.0  # per element, of the last update; 0: not known
    copy_s: float = 0.0  # per element, to hand an updated parameter over; 0: not known


@dataclass(frozen=True, slots=True)
class Updated(Message):
    """The parameters that this rank updates lie in the segment; until `Gather` its state is no step's.

    A worker that is told to halt or to proceed in between has nothing to go on with, and ends.
    """

    formation: int
    step: int


@dataclass(frozen=True, slots=True)
class Stepped(Message):
    """A report, a few times a second at most, from rank 0."""

    step: int
    epoch: int
    loss: float
    samples_per_s: float
    steps_per_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    noise: float | None = None
    memory_bytes: int = 0  # that the worker held at most
    probed: bool = False  # this is what a probe measured


@dataclass(frozen=True, slots=True)
class Noted(Message):
    """Something for the job's story."""

    words: str


@dataclass(frozen=True, slots=True)
class Evaluated(Message):
    """Rank 0 evaluated after this step; the executor passes it on as `MetricsMeasured`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Halted(Message):
    """At a boundary, waiting."""

    step: int


@dataclass(frozen=True, slots=True)
class MemoryReleased(Message):
    """No memory is held but what the state needs."""


@dataclass(frozen=True, slots=True)
class Published(Message):
    """The memory file holds the state after so many steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """A checkpoint was written."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class TurnRequested(Message):
    """Asks for leave to make a step."""

    step: int


@dataclass(frozen=True, slots=True)
class AdmissionRequested(Message):
    """The entry is loaded on the host; with the `Grant` that answers it, it goes on the device and settles there."""


@dataclass(frozen=True, slots=True)
class MemoryMeasured(Message):
    """What the worker's training takes on its device, in bytes."""

    state: int
    scratch: int
    fixed: int


@dataclass(frozen=True, slots=True)
class SwappedOut(Message):
    """The memory is back."""

    wholly: bool


@dataclass(frozen=True, slots=True)
class TurnEnding(Message):
    """At the last step of a grant, and asks for another: whoever is next can make itself ready."""

    number: int


@dataclass(frozen=True, slots=True)
class TurnEnded(Message):
    """A grant has come to its end; who comes after it has been told so already, by the baton."""

    number: int
    is_last: bool = False  # no other is asked for: the training is over, and only has to be saved


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The training is over and its final weights are saved (by rank 0)."""

    step: int
    epoch: int
    loss: float
    digest: str
    reason: str  # in words
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    memory_bytes: int = 0  # that the worker held at most


@dataclass(frozen=True, slots=True)
class WorkerFailed(Message):
    """Something went wrong in this worker."""

    # user, diverged, memory (can be tried again), disk (training goes on), device (process lost), lane (not the one it
    # was started with), input
    kind: str
    error: str
    step: int = 0
    samples: int = 0  # of the step in this worker, where its pass ran out of memory


@dataclass(frozen=True, slots=True)
class Alive(Message):
    """From a thread of its own, so that a long step is not taken for a stopped process."""


# ------------------------------------------------------------------------------------------- executor and forkserver
@dataclass(frozen=True, slots=True)
class Fork(Message):
    """Make a worker. Beside it: the worker's end of its channel, and its log's descriptor if there is one."""


@dataclass(frozen=True, slots=True)
class Forked(Message):
    """The worker asked for is there; requests are answered in their order."""

    pid: int
    error: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class SendSignal(Message):
    """Send a worker a signal; one that has ended already is not confused with whoever has its number now."""

    pid: int
    signal: int


@dataclass(frozen=True, slots=True)
class Exited(Message):
    """A worker has ended and is reaped; what it had started itself is killed."""

    pid: int
    code: int  # as in subprocess: an exit code, or the negative number of the signal that ended it
