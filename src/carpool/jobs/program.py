"""Program of a job: an entry that returns a Training, or a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from carpool.core.typed_fields import Range, Uncut, decode_fields

Seed = Annotated[int, Range(-(1 << 64), 1 << 64)]


@dataclass(frozen=True, slots=True)
class Program:
    """What a job runs and how, as plain JSON values; where it runs is not part of it."""

    entry: Uncut = ""  # file.py:function or package.module:function; empty for a command
    args: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[Uncut, ...] = ()  # any program: placed, not elastic
    folder: Uncut = ""  # working folder; entries and relative paths are looked up from here
    environment: Mapping[str, Uncut] = field(default_factory=dict)
    metrics: tuple[Uncut, ...] = ()  # TensorBoard event files of a command, as patterns relative to `folder`
    resumable: bool = False  # a command that continues from its own files when it is started again
    progress: Uncut = ""  # regular expression that finds step, total, loss and epoch in a command's output
    fork_start: bool = True  # a Python command may run in a fork of the fork server, with torch imported
    python: Uncut = ""  # interpreter for `command` entries that begin with "python"; empty: this one
    memory_bytes: int = 0  # most that may be allocated on a GPU; 0: no limit
    ram_bytes: int = 0  # declared per device; 0: unknown
    cpus: int = 0  # cores of each worker on a GPU; 0: any of them
    seed: Seed = 0
    exact: bool = False
    shards: int = 8  # logical shards of an exact job, a power of two
    batch_size: int = 0  # 0: the training's own
    tune: bool = False  # its batch size may be changed; its gradient noise is measured
    batch_per_device: bool = False  # keep the batch per device when the number of devices changes
    sync_batchnorm: bool = False
    deterministic: bool = True  # equal bits from run to run; if false, a GPU may use faster kernels
    graph: bool = True  # on a GPU, capture steps as CUDA graphs where possible
    precision: str = ""  # of matrix products on a GPU: "float32", "tf32" or "bf16"; empty: the training's own
    channels_last: bool = False  # even if the training does not ask for it
    checkpoint_s: float = 60.0  # seconds between checkpoints on disk
    keep: int = 2  # checkpoints kept, beside the best
    time_limit_s: float = 0.0  # 0: none
    retries: int = 2  # further attempts after a loss or crash without a completed step
    notify: tuple[Uncut, ...] = ()  # what the daemon does when the job is over: run a command, or POST to a URL

    def as_json(self) -> dict[str, Any]:
        """The values that differ from the defaults: a daemon stores thousands of programs."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Program:
        """The inverse of `as_json`, and of `asdict`, after JSON has made lists of tuples."""
        return decode_fields(cls, value)


_DEFAULTS = asdict(Program())
