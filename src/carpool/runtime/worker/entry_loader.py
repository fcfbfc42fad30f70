"""Entry loader: imports ``file.py:function``, seeds the process and calls it to get a Training."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from carpool.core.errors import CarpoolError, InputError, UnknownName, place_of
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.training import Training


def load_training(
    entry: str, args: Mapping[str, Any] | None = None, *, seed: int = 0, folder: Path | None = None
) -> Training:
    """Call an entry, ``file.py:function`` or ``package.module:function``; files are relative to ``folder``.

    Generators are seeded before the import and again before the call, so that the result does not depend on whether the
    module was imported before.
    """
    args = args or {}
    seed_entry(seed)
    function = find_entry(entry, folder)
    _check_args(entry, function, args)
    seed_entry(seed)
    try:
        training = function(**args)
    except CarpoolError as error:
        raise InputError(str(error), where=entry) from error
    except Exception as error:
        raise InputError(f"raised {_describe(error, entry.rpartition(':')[0])}", where=entry) from error
    if not isinstance(training, Training):
        kind = "None" if training is None else f"a {type(training).__name__}"
        raise InputError(f"returned {kind}; it must return a carpool.Training", where=entry)
    return training


def find_entry(entry: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the function of an entry."""
    source, colon, name = entry.rpartition(":")
    if not colon or not source or not name:
        raise InputError(
            f"entry {entry!r} has no function", way_out="Write file.py:function, for example digits.py:mlp."
        )
    module = _import_file(entry, (folder or Path()) / source) if source.endswith(".py") else _import_name(entry, source)
    function = getattr(module, name, None)
    if function is None:
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UnknownName("function", name, own, where=source)
    if not callable(function):
        raise InputError(f"{name} is a {type(function).__name__}, not a function", where=source)
    found: Callable[..., Any] = function
    return found


def _import_file(entry: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        near = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise UnknownName("file", path.name, near, where=str(path.parent))
    # The name contains a hash of the path, because files in different folders may have equal names.
    name = f"carpool_entry_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(f"importing {path.name} raised {_describe(error, path.name)}", where=entry) from error
    return module


def _import_name(entry: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise InputError(f"importing {name} raised {_describe(error, name)}", where=entry) from error


def _check_args(entry: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}}
    for name in args:
        if name not in named and not takes_any:
            raise UnknownName("argument", name, named, where=entry)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in args:
            raise InputError(
                f"argument {name!r} is missing",
                where=entry,
                way_out=f"Set it in args, or give it a default in {entry}.",
            )


def _describe(error: BaseException, source: str) -> str:
    """Type and message of an error, and the last line of the user's file in its traceback."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    own = place_of(error, lambda file: Path(file).name == Path(source).name)
    return f"{type(error).__name__}: {error}{own or place_of(error)}"
