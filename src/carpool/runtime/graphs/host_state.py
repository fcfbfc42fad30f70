"""Host state: everything that a step function can reach, to tell whether a CUDA graph may replace calls of it.

A graph repeats what ran on the device and nothing that ran in Python. So a function may be captured only if no Python
value that it can reach differs from call to call, and the tensors that it can reach must be known to compare a replay
with a call. Reachable are its closure and defaults, the globals that it names, what these hold, and so on into the
user's functions and classes. Functions of libraries are taken to have no state of their own; their objects are searched
like others. `UnknownState` names what cannot be searched: iterators, files, random generators, arrays, most modules of
the standard library.
"""

from __future__ import annotations

import builtins
import enum
import functools
import io
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carpool.core.errors import CarpoolError
from carpool.runtime.compat.torch_api import versions

_MOST = 50_000  # values that are looked at
_WITHOUT_STATE = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "transformers", "einops", "numpy", "carpool", "builtins"),
        *("math", "cmath", "operator", "functools", "itertools", "collections", "contextlib", "copy"),
        *("typing", "types", "abc", "enum", "dataclasses", "weakref", "argparse", "pathlib", "__future__"),
    }
)
_EFFECTS = frozenset({"print", "open", "input", "exec", "eval", "globals", "setattr"})  # built-in functions
_CLOCKS = frozenset({"random", "time", "datetime"})  # modules that a function may import itself
_EQUAL_BY_VALUE = (bool, int, str, bytes, type(None), range, slice, type(...), enum.Enum, torch.Size)
_EQUAL_BY_TEXT = (float, complex, np.generic, torch.dtype, torch.device, torch.layout, torch.memory_format)


class UnknownState(CarpoolError):
    """Something reachable may have a state that cannot be compared."""


class HostState(NamedTuple):
    """What a function can reach; the plain part is equal for as long as nothing has changed in Python."""

    plain: list[object]
    tensors: list[Tensor]  # on the device; whatever changes them in place may be captured

    def is_same_as(self, other: HostState) -> bool:
        """Whether Python values are equal and tensors are the same objects."""
        mine, theirs = self.tensors, other.tensors
        return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)) and self.plain == other.plain


def host_state(roots: Iterable[object], device: torch.device) -> HostState:
    """Search everything that is reachable from some values."""
    search = _Search(device)
    for root in roots:
        search.visit(root)
    return HostState(search.plain, search.tensors)


class _Search:
    """Lists values in the order in which they are found, each object once."""

    def __init__(self, device: torch.device) -> None:
        self.plain: list[object] = []
        self.tensors: list[Tensor] = []
        self._device = device
        self._places: dict[int, int] = {}
        self._objects: list[object] = []  # kept, so that no other object gets the same id

    def visit(self, value: Any) -> None:
        if isinstance(value, _EQUAL_BY_VALUE):
            self.plain.append(value)
        elif isinstance(value, _EQUAL_BY_TEXT):
            self.plain.append(repr(value))
        elif (place := self._places.get(id(value))) is not None:
            self.plain.append((place,))
        elif len(self._objects) >= _MOST:
            raise UnknownState(f"the step function reaches more than {_MOST} values")
        else:
            self._places[id(value)] = len(self._objects)
            self._objects.append(value)
            self.plain.append(type(value))
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        for kinds, visit in _VISITS:
            if isinstance(value, kinds):
                visit(self, value)
                return
        self._instance(value)

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self.visit(value)

    def _sequence(self, values: Any) -> None:
        self.plain.append(len(values))
        self._each(values)
        self._each(getattr(values, "__dict__", {}).values())

    def _set(self, values: Set[Any]) -> None:
        if not all(isinstance(value, _EQUAL_BY_VALUE) for value in values):
            raise UnknownState("the step function reaches a set of objects")
        self.plain.append(frozenset(values))

    def _mapping(self, values: Mapping[Any, Any]) -> None:
        self.plain.append(len(values))
        for key, value in values.items():
            self.visit(key)
            self.visit(value)
        self._each(getattr(values, "__dict__", {}).values())

    def _tensor(self, tensor: Tensor) -> None:
        is_expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.device.type != self._device.type or is_expanded:
            if tensor.is_inference():
                raise UnknownState("the step function reaches a tensor made in inference mode")
            self.plain.append((tensor.data_ptr(), *versions([tensor])))
            return
        self.plain.append((tensor.requires_grad, tensor.dtype, tensor.shape, tensor.stride()))
        self.tensors.append(tensor)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.visit(optimizer.param_groups)
        self._each(optimizer.state.values())
        if not _is_library(type(optimizer)):
            self._instance(optimizer)

    def _function(self, function: types.FunctionType) -> None:
        if _is_library(function):
            return
        names = dict.fromkeys(_names(function.__code__))
        for cell in function.__closure__ or ():
            try:
                self._global(cell.cell_contents, names)
            except ValueError:  # it is empty
                self.plain.append(None)
        self._each([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        self._each(vars(function).values())
        for name in names:
            if name in function.__globals__:
                self._global(function.__globals__[name], names)
            elif (name in _EFFECTS and hasattr(builtins, name)) or name in _CLOCKS:
                raise UnknownState(f"the step function uses {name}")

    def _global(self, value: Any, names: Mapping[str, None]) -> None:
        """A variable of a function, which may use the attributes of modules that it names."""
        if not isinstance(value, types.ModuleType):
            self.visit(value)
            return
        root = value.__name__.partition(".")[0]
        if root in _WITHOUT_STATE:
            return
        if root in sys.stdlib_module_names:
            raise UnknownState(f"the step function uses the module {value.__name__}")
        for name in names:
            if name in vars(value) and vars(value)[name] is not value:
                self._global(vars(value)[name], names)

    def _module(self, module: types.ModuleType) -> None:
        if module.__name__.partition(".")[0] not in _WITHOUT_STATE:
            raise UnknownState(f"the step function reaches the module {module.__name__}")

    def _method(self, method: types.MethodType) -> None:
        self.visit(method.__self__)
        self.visit(method.__func__)

    def _builtin(self, function: types.BuiltinFunctionType) -> None:
        if not isinstance(function.__self__, types.ModuleType | type(None) | type):
            self.visit(function.__self__)

    def _partial(self, function: functools.partial[Any]) -> None:
        self._each([function.func, *function.args, *function.keywords.values()])

    def _reference(self, reference: weakref.ref[Any]) -> None:
        self.visit(reference())

    def _class(self, cls: type) -> None:
        if _is_library(cls):
            return
        if cls.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
            raise UnknownState(f"the step function reaches a {cls.__module__}.{cls.__qualname__}")
        self._each(cls.__bases__)
        for name, value in vars(cls).items():
            if isinstance(value, property):
                self._each([value.fget, value.fset])
            elif isinstance(value, staticmethod | classmethod | functools.cached_property):
                self.visit(getattr(value, "__func__", None) or getattr(value, "func", None))
            elif not name.startswith("__") or isinstance(value, types.FunctionType):
                self._attribute(name, value)

    def _attribute(self, name: str, value: Any) -> None:
        """An attribute of a class, unless Python itself has put it there."""
        is_own = name == "_abc_impl" or isinstance(
            value, types.GetSetDescriptorType | types.MemberDescriptorType | types.WrapperDescriptorType
        )
        if not is_own:
            self.visit(value)

    def _instance(self, value: Any) -> None:
        """Any other object: its class and its attributes."""
        slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
        if isinstance(value, io.IOBase) or (not hasattr(value, "__dict__") and not slots):
            raise UnknownState(f"the step function reaches a {type(value).__module__}.{type(value).__qualname__}")
        self.visit(type(value))
        self._mapping({name: getattr(value, name) for name in slots if hasattr(value, name)})
        self._mapping(getattr(value, "__dict__", {}))


_VISITS: tuple[tuple[Any, Callable[[_Search, Any], None]], ...] = (
    (Tensor, _Search._tensor),
    (torch.optim.Optimizer, _Search._optimizer),
    ((torch.Generator, np.ndarray), _Search._instance),
    (types.ModuleType, _Search._module),
    (types.FunctionType, _Search._function),
    (types.MethodType, _Search._method),
    (types.BuiltinFunctionType, _Search._builtin),
    (functools.partial, _Search._partial),
    (weakref.ref, _Search._reference),
    (type, _Search._class),
    ((list, tuple, deque), _Search._sequence),
    ((set, frozenset), _Search._set),
    (Mapping, _Search._mapping),
)


def _is_library(thing: Any) -> bool:
    """Whether a function or class belongs to a library whose functions are taken to have no state."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _WITHOUT_STATE


def _slots(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _names(code: types.CodeType) -> Iterable[str]:
    """The names of globals and attributes in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
