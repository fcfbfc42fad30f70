"""Twins of a worker: copies of its process that pass shards beside it, one on each further core of its device.

A shard of an exact job is passed on one thread, because the number of threads changes the bits. So a device with
several cores passes several shards at once, each in a process of its own: generators are global to a process. Twins are
forked, which makes them equal in everything. Afterwards they follow: before each step they are shown the model as it is
then, and told learning rates, schedule and scale (`PassFigures`). `Beside` has none where a pass follows from more.
A state that is loaded, and a new formation, end them, and new ones are forked when they are wanted.

Shards are dealt one by one to whoever is free, so that a core that loses time to others passes fewer of them. Every
shard's contribution lies in memory that all share; who made it does not show. A twin that fails, dies or hangs is
ended, and what it owes is passed here, where an error of the user's code shows as it is.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from carpool.runtime.child import Child, Serve
from carpool.runtime.flat import Contribution, Layout
from carpool.runtime.framing import receive, write
from carpool.runtime.pass_figures import PassFigures
from carpool.runtime.passes import Passes, Step
from carpool.runtime.rows import put
from carpool.runtime.slots import padded

MOST_SHARDS = 4096  # whose tickets fit into a pipe
_TICKET = struct.Struct("<i")
_NO_MORE = -1  # what a twin says when it found no ticket
PATIENCE_S = 10.0  # and some times what the longest pass here took
_TIMES = 20.0


class Twins:
    """Some copies of this process, and the memory that they share with it."""

    def __init__(self, passes: Passes, layout: Layout, shards: int, count: int, figures: PassFigures) -> None:
        self._passes = passes
        self._figures = figures
        self._shown = _Shown(layout)
        self._slots = _slots(layout, shards)
        self._tickets = _Tickets()
        self._step: Step | None = None  # that is being made
        self._made: set[int] = set()  # its pieces that have been passed
        self._longest_s = 0.0
        cores = _cores(1 + count)
        self._core = cores[0]
        self._twins = self._forked(cores[1:])
        self._busy: list[_Twin] = []  # may still take tickets

    def __len__(self) -> int:
        """How many there are."""
        return len(self._twins)

    def begin(self, step: Step, pieces: range) -> None:
        """Pass some pieces of a step, all side by side; returns when nobody has to begin with one any more."""
        self._settle()  # who was late for the step before may still look for a ticket, and at what was shown then
        self._step, self._made = step, set()
        self._passes.begin()
        asked = pickle.dumps((step, self._figures.told()))
        self._shown.put()
        self._tickets.give_out([piece for piece in pieces if not step.is_empty(piece)])
        for twin in list(self._twins):
            if twin.tell(asked):
                self._busy.append(twin)
            else:
                self._part_with(twin)
        with _keeping_to(self._core):
            for piece in self._pass_on(step):
                self._made.add(piece)

    def get(self, piece: int) -> Contribution | None:
        """What a piece of the step contributes, once that is there; nothing, where it has no samples."""
        assert self._step is not None, "pieces are asked for in a step"
        if self._step.is_empty(piece):
            return None
        while piece not in self._made and self._busy:
            self._hear()
        if piece not in self._made:  # who had it is gone
            self._passes.piece(self._step, piece, self._slots[piece])
            self._made.add(piece)
        return self._slots[piece]

    def close(self) -> None:
        """End them."""
        while self._twins:
            self._twins.pop().close()
        self._busy.clear()
        self._tickets.close()

    def _settle(self) -> None:
        """Wait until nobody is busy."""
        while self._busy:
            self._hear()

    def _hear(self) -> None:
        """Wait for news of those that are busy; who takes too long is given up."""
        ready = _readable(self._busy, PATIENCE_S + _TIMES * self._longest_s)
        for twin in ready or list(self._busy):
            said = twin.answer() if ready else None
            if said is None:
                self._part_with(twin)
            elif said == _NO_MORE:
                self._busy.remove(twin)
            else:
                self._made.add(said)

    def _part_with(self, twin: _Twin) -> None:
        twin.close()
        self._twins.remove(twin)
        if twin in self._busy:
            self._busy.remove(twin)

    def _pass_on(self, step: Step) -> Iterator[int]:
        """Pass one piece after another as long as there are any."""
        for piece in self._tickets.left():
            began = time.monotonic()
            self._passes.piece(step, piece, self._slots[piece])
            self._longest_s = max(self._longest_s, time.monotonic() - began)
            yield piece

    def _forked(self, cores: Sequence[int | None]) -> list[_Twin]:
        """A twin for each core, or as many as the system allows."""
        made: list[_Twin] = []
        for core in cores:
            try:
                made.append(_Twin(functools.partial(self._serve, core)))
            except OSError:
                break
        return made

    def _serve(self, core: int | None, end: socket.socket) -> None:
        """In a twin: follow, and pass what there is, until nobody asks any more."""
        torch.set_num_threads(1)
        self._figures.forget_state()
        with _keeping_to(core):
            while (raw := receive(end)) is not None:
                step, figures = pickle.loads(raw)
                self._shown.take()
                self._figures.take(figures)
                self._passes.begin()
                for piece in self._pass_on(step):
                    end.sendall(_TICKET.pack(piece))
                end.sendall(_TICKET.pack(_NO_MORE))


class _Shown:
    """Parameters and buffers of a model where its twins find them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        tensors = self._tensors()
        memory = mmap.mmap(-1, max(1, sum(padded(tensor.nbytes) for tensor in tensors)))
        self._places, at = [], 0
        for tensor in tensors:
            flat = torch.empty(0, dtype=tensor.dtype)
            if tensor.numel():
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            self._places.append(flat.view(tensor.shape))
            at += padded(tensor.nbytes)

    def put(self) -> None:
        """Show them as they are."""
        put(self._places, self._tensors())

    def take(self) -> None:
        """Make them as shown."""
        put(self._tensors(), self._places)

    def _tensors(self) -> list[Tensor]:
        return [*(parameter.detach() for parameter in self._layout.model.parameters()), *self._layout.buffers()]


class _Tickets:
    """Numbers of pieces in a pipe: whoever takes one passes that piece, and nobody else does."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def give_out(self, pieces: list[int]) -> None:
        """Let these be taken, in this order."""
        os.write(self._writing, b"".join(map(_TICKET.pack, pieces)))

    def left(self) -> Iterator[int]:
        """Take one after another until there is none."""
        while True:
            try:
                raw = os.read(self._reading, _TICKET.size)
            except BlockingIOError:
                return
            yield _TICKET.unpack(raw)[0]

    def close(self) -> None:
        """Take no more."""
        for fd in (self._reading, self._writing):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._reading = self._writing = -1


class _Twin:
    """One of them, as the worker sees it."""

    def __init__(self, serve: Serve) -> None:
        self._process = Child("carpool-twin", serve)
        self._socket = self._process.socket
        self._socket.settimeout(PATIENCE_S)  # of one that is stopped: it does not empty its end

    def tell(self, content: bytes) -> bool:
        """Send it something; whether that was possible."""
        try:
            write(self._socket, content)
        except OSError:
            return False
        return True

    def answer(self) -> int | None:
        """The next piece that it has passed, or `_NO_MORE`; ``None`` if it is gone."""
        try:
            raw = self._socket.recv(_TICKET.size, socket.MSG_WAITALL)
        except OSError:
            return None
        return int(_TICKET.unpack(raw)[0]) if len(raw) == _TICKET.size else None

    def fileno(self) -> int:
        """For those who wait."""
        return self._socket.fileno()

    def close(self) -> None:
        """End it."""
        self._process.close()


def _cores(count: int) -> list[int] | list[None]:
    """A core for each of so many processes, where there is just one for each: left to themselves, two may share one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if len(cores) == count else [None] * count


@contextlib.contextmanager
def _keeping_to(core: int | None) -> Iterator[None]:
    """Let this thread, no others, run on one core meanwhile."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # somebody has taken it from this process meanwhile
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _readable(twins: Sequence[_Twin], patience_s: float) -> list[_Twin]:
    """Those that have something to say, as soon as there is one; none, if that takes too long."""
    by_file = {twin.fileno(): twin for twin in twins}
    waiting = select.poll()
    for file in by_file:
        waiting.register(file, select.POLLIN)
    return [by_file[file] for file, _ in waiting.poll(1e3 * patience_s)]


def slots_bytes(layout: Layout, shards: int) -> int:
    """What the contributions of all shards take."""
    model = layout.new()
    return shards * (padded(model.values.nbytes) + padded(model.integers.nbytes))


def _slots(layout: Layout, shards: int) -> list[Contribution]:
    """A place for the contribution of every shard; what is never used takes no memory."""
    model = layout.new()
    values, integers = padded(model.values.nbytes), padded(model.integers.nbytes)
    memory = mmap.mmap(-1, max(1, shards * (values + integers)))

    def slot(at: int) -> Contribution:
        made = torch.frombuffer(memory, dtype=layout.dtype, count=layout.size, offset=at)
        count = model.integers.numel()
        whole = torch.frombuffer(memory, dtype=torch.int64, count=count, offset=at + values) if count else None
        return Contribution(made, model.integers if whole is None else whole)

    return [slot(shard * (values + integers)) for shard in range(shards)]
