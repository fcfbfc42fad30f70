"""Function graph: captures, verifies and replays a training's own step function, update included.

1. The first calls with a batch signature run eagerly, so that the optimizers create their states.
2. Then one runs eagerly on the capture stream; the function is captured, and the graph is replayed from the same state.
   Both must give bitwise equal losses, metrics, gradients and tensors: all that the function can reach (host_state.py).
   One more call, with another batch and other random numbers, is checked in the same way. Checked calls keep the eager
   result. From then on the graph is replayed.
3. A function that changes a Python value, draws random numbers on the host, waits for the device, adds to the gradients
   of the call before, or reaches something whose state is unknown, runs eagerly for good; the job's story says why.
   Where other code of the user may have changed a value since (`expect_changes`), the values are compared again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carpool.core.errors import CarpoolError
from carpool.runtime.engine.custom_step import read_step_result
from carpool.runtime.engine.determinism import NondeterministicOps
from carpool.runtime.engine.flat_buffers import copy_tensors
from carpool.runtime.engine.training import Training
from carpool.runtime.graphs.capture import CapturedGraph, GraphCapture, capture_failure
from carpool.runtime.graphs.captured_step import (
    BatchSignature,
    NonStaticBatch,
    batch_signature,
    fill_static,
    static_copy,
)
from carpool.runtime.graphs.host_state import HostState, UnknownState, host_state
from carpool.runtime.graphs.verification import copies, host_rng_state, tensors_equal

_EAGER = 2  # calls with a batch signature before it is captured
_CHECKS = 2  # calls made both ways before the graph replaces the function
_MAX_SIGNATURES = 4
_MAX_RESETS, _PAYS = 4, 50  # captures for changed values; further ones only after so many replays each
_FEW, _MANY = 16, 20_000  # comparisons, and values of each: more take longer than calling the function in each step


class _Unfit(CarpoolError):
    """The function cannot be replaced by a graph."""


class _Results(NamedTuple):
    """What a call leaves behind."""

    tensors: list[Tensor]  # all that the function can reach
    metrics: list[Tensor]  # the loss first
    gradients: list[Tensor | None]

    def difference(self, other: _Results, *, tolerant: bool) -> str:
        """The first difference between a call and a replay; empty if there is none."""
        if [each is None for each in self.gradients] != [each is None for each in other.gradients]:
            return "other parameters have gradients after replay"
        for name in self._fields:
            mine, theirs = ([each for each in getattr(results, name) if each is not None] for results in (self, other))
            if not tensors_equal(mine, theirs, tolerant=tolerant):
                return f"{name} differ after replay"
        return ""


@dataclass(slots=True, eq=False)
class _CapturedCall:
    """The graph for batches of one signature, and every tensor that it touches."""

    batch: Any
    state: HostState
    graph: CapturedGraph | None = None
    gradients: list[Tensor | None] = field(default_factory=list)  # that the graph writes
    result: Any = None  # likewise
    checks_passed: int = 0
    addresses: list[int] = field(init=False)
    leaves: list[Tensor] = field(init=False)  # that may have a gradient

    def __post_init__(self) -> None:
        self.addresses = self.current_addresses()
        self.leaves = [tensor for tensor in self.state.tensors if tensor.is_leaf and tensor.requires_grad]

    def current_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.state.tensors]

    @torch.no_grad()
    def load(self, contents: list[Tensor]) -> None:
        """Overwrite all tensors."""
        copy_tensors([tensor.detach() for tensor in self.state.tensors], contents)

    def set_gradients(self, gradients: list[Tensor | None]) -> None:
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.grad = gradient

    def results(self, result: Any) -> _Results:
        loss, metrics = read_step_result(result)
        returned = [each for each in (loss, *metrics.values()) if isinstance(each, Tensor)]
        if len(returned) < 1 + len(metrics):
            raise _Unfit("the step function returns a number, which a graph does not update: return a tensor")
        return _Results(copies(self.state.tensors), copies(returned), [leaf.grad for leaf in self.leaves])


class FunctionGraph:
    """The CUDA graphs of one training's step function."""

    def __init__(
        self,
        training: Training,
        seed: Callable[[int], object],  # all generators, for a step
        operations: NondeterministicOps,
        capture: GraphCapture,
        device: torch.device,
        *,
        tolerant: bool = False,  # verify within a tolerance instead of bitwise
    ) -> None:
        self._training = training
        self._seed = seed
        self._operations = operations
        self._capture = capture
        self._device = device
        self._always_tolerant = tolerant
        self._calls: dict[BatchSignature, int] = {}
        self._captured: dict[BatchSignature, _CapturedCall] = {}
        self._must_compare = False
        self._resets = self._replays = self._compared = 0
        self._all_notes: set[str] = set()
        self.eager_reason = ""  # why the function is called in every step
        self.notes: list[str] = []  # for the job's story

    def reset(self) -> None:
        """Drop all graphs; new ones are captured."""
        self._captured.clear()
        self._capture.reset()

    def expect_changes(self) -> None:
        """Compare Python values before the next replay: other code of the user has run."""
        self._must_compare = True

    def disable(self, reason: str) -> None:
        """Call the function in every step from now on."""
        self.eager_reason = reason
        self.reset()
        self._note(f"steps run without CUDA graphs: {reason}")

    @property
    def is_warmed_up(self) -> bool:
        """Whether capture and checks are over."""
        return bool(self.eager_reason) or any(each.checks_passed >= _CHECKS for each in self._captured.values())

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def run(self, batch: Any, number: int) -> Any:
        """Make a step. Returns what the function returns; a graph overwrites it in the next step."""
        captured = None
        if not self.eager_reason:
            try:
                captured = self._captured_for(batch)
                if captured is not None and captured.checks_passed < _CHECKS:
                    return self._verified_call(captured, batch, number)
            except (NonStaticBatch, UnknownState, _Unfit) as error:
                self.disable(str(error))
        if captured is None or self.eager_reason:
            self._seed(number)
            self._must_compare = True
            return self._call(batch)
        self._replays += 1
        return self._replay(captured, batch, number)

    def _call(self, batch: Any) -> Any:
        assert self._training.step is not None
        return self._training.step(self._training.model, batch, self._training.optimizer)

    def _captured_for(self, batch: Any) -> _CapturedCall | None:
        """What replaces the call with such a batch, or is about to be verified for it; None: call the function."""
        key = batch_signature(batch)
        captured = self._captured.get(key)
        if captured is not None and self._is_valid(captured):
            return captured
        if self._calls.setdefault(key, 0) < _EAGER or len(self._captured) >= _MAX_SIGNATURES:
            self._calls[key] += 1
            return None
        state = self._state()
        if not all(each.state.is_same_as(state) for each in self._captured.values()):
            self.reset()
        captured = self._captured[key] = _CapturedCall(static_copy(batch), state)
        return captured

    def _is_valid(self, captured: _CapturedCall) -> bool:
        """Whether the graph still stands for the function; if not, all graphs are dropped."""
        is_same = captured.addresses == captured.current_addresses()
        if is_same and self._must_compare:
            is_same = captured.state.is_same_as(self._state())
            self._compared += 1
            if self._compared > max(_FEW, self._replays / 2) and len(captured.state.plain) > _MANY:
                raise _Unfit(f"{len(captured.state.plain)} values would have to be compared in each step")
        self._must_compare = False
        if is_same:
            return True
        self.reset()
        self._resets += 1
        if self._resets > _MAX_RESETS and self._replays < self._resets * _PAYS:
            raise _Unfit("values that the step function can read change between steps")
        return False

    def _state(self) -> HostState:
        training = self._training
        return host_state((training.step, training.model, training.optimizer, training.state), self._device)

    def _replay(self, captured: _CapturedCall, batch: Any, number: int) -> Any:
        assert captured.graph is not None
        fill_static(captured.batch, batch)
        self._seed(number)
        captured.graph()
        captured.set_gradients(captured.gradients)
        return captured.result

    def _verified_call(self, captured: _CapturedCall, batch: Any, number: int) -> Any:
        """Call the function and compare a replay with it; the call's own results stay."""
        try:
            before = copies(captured.state.tensors)
        except torch.OutOfMemoryError:
            raise _Unfit("not enough memory to verify a graph") from None
        self._seed(number)
        random = host_rng_state(self._device)
        with self._capture.side_stream():
            result = self._call(batch)
        problem = "" if host_rng_state(self._device) == random else "the step function draws random numbers on the host"
        try:
            problem = problem or self._difference(captured, batch, number, before, result)
        except (UnknownState, _Unfit) as error:
            problem = str(error)
        if problem:
            self.disable(problem)
        elif captured.checks_passed == _CHECKS:
            how = "within tolerance" if self._is_tolerant else "bit for bit"
            self._note(f"steps are replayed as CUDA graphs, verified {how} against eager steps")
        return result

    def _difference(self, captured: _CapturedCall, batch: Any, number: int, before: list[Tensor], result: Any) -> str:
        """How a replay from the same state differs from a call; empty if it does not. The call's results are kept."""
        if not captured.state.is_same_as(self._state()):
            return "the step function changes values in Python, or replaces tensors that it can reach"
        eager = captured.results(result)
        if not bool(torch.isfinite(eager.metrics[0]).all()):
            return ""  # which ends the training
        try:
            if captured.graph is None:
                self._capture_call(captured)
            captured.load(before)
            replayed = captured.results(self._replay(captured, batch, number))
        except Exception as error:  # noqa: BLE001 - user code may raise anything during capture
            return capture_failure(error)
        finally:
            captured.load(eager.tensors)
            captured.set_gradients(eager.gradients)
        captured.checks_passed += 1
        difference = eager.difference(replayed, tolerant=self._is_tolerant)
        return difference and f"check failed: {difference}"

    def _capture_call(self, captured: _CapturedCall) -> None:
        def work() -> None:
            # It is detached: autograd's nodes belong to a stream, and keep others from being captured.
            captured.result = read_step_result(self._call(captured.batch))

        captured.set_gradients([None] * len(captured.leaves))
        captured.graph = self._capture.capture(work)
        captured.gradients = [leaf.grad for leaf in captured.leaves]

    def _note(self, note: str) -> None:
        if note not in self._all_notes:
            self._all_notes.add(note)
            self.notes.append(note)

    @property
    def _is_tolerant(self) -> bool:
        return self._always_tolerant or bool(self._operations.operations)
