"""Static check of an entry: file, function and arguments, without importing it."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from carpool.core.errors import InputError, UnknownName, cause

# CPython 3.11 counts the depth of a tree for all threads together: parsing in two at once may raise a SystemError.
_PARSING = threading.Lock()


def check_entry(entry: str, args: Iterable[str], folder: Path, where: str) -> None:
    """InputError unless the entry's file exists and has the function, and the function takes the arguments.

    What only running the file can tell (a function made by an expression, a star import) is not checked.
    """
    source, colon, name = entry.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise InputError(
            f"entry {entry!r} does not name a function",
            where=where,
            way_out='Write file:function, for example "digits.py:mlp".',
        )
    path = folder / source if source.endswith(".py") else module_file(source, folder, where)
    if path is None:
        return
    _check_file("entry file", source, path, where)
    _check_function(path, name, args, where)


def check_command(command: Sequence[str], folder: Path, path: str | None, where: str) -> None:
    """InputError if a command's program is not on this search path, or its Python file does not exist."""
    program, is_python = command[0], Path(command[0]).name.startswith("python")
    if is_python and len(command) > 1 and command[1].endswith(".py"):
        _check_file("script", command[1], folder / command[1], where)
    if "/" in program:
        _check_program(folder / program, where)
    elif not is_python and shutil.which(program, path=path) is None:
        near = difflib.get_close_matches(program, sorted(set(_programs(path))), n=3, cutoff=0.7)
        raise InputError(
            f"program {program!r} is not on the PATH",
            where=where,
            way_out=f"Did you mean {' or '.join(near)}?" if near else "Install it, or write its path.",
        )


def _check_program(path: Path, where: str) -> None:
    if not path.is_file():
        raise InputError(f"program {str(path)!r} does not exist", where=where, way_out="Write the path of a program.")
    if not os.access(path, os.X_OK):
        raise InputError(
            f"program {str(path)!r} is not executable", where=where, way_out="Run chmod +x, or name its interpreter."
        )


def _programs(path: str | None) -> list[str]:
    """Names of the files on a search path."""
    found: list[str] = []
    for folder in (os.environ.get("PATH", os.defpath) if path is None else path).split(os.pathsep):
        with contextlib.suppress(OSError):
            found += os.listdir(folder or ".")  # noqa: PTH208 - names only
    return found


def _check_file(what: str, name: str, path: Path, where: str) -> None:
    if not path.is_file():
        near = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise UnknownName(what, name, near, where=f"{where}: {path.parent.resolve()}")


def source_digest(entry: str, folder: Path) -> str:
    """A digest of an entry's file; empty if only an import can find it."""
    source = entry.rpartition(":")[0]
    path = folder / source if source.endswith(".py") else module_file(source, folder, entry)
    return "" if path is None or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()


def module_file(name: str, folder: Path, where: str) -> Path | None:
    """The file of ``package.module``, found without importing it; None if only an import can find it."""
    top, *rest = name.split(".")
    for base in (folder / top, *_package_folders(top, where)):
        path = base.joinpath(*rest)
        for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _package_folders(top: str, where: str) -> list[Path]:
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise InputError(
            f"the entry's module {top!r} is not installed",
            where=where,
            way_out="Install it, or name a file: file.py:function.",
        )
    return [Path(place) for place in found.submodule_search_locations or ()]


def _check_function(path: Path, name: str, args: Iterable[str], where: str) -> None:
    try:
        source = path.read_bytes()
        with _PARSING:
            tree = ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise InputError(f"{path.name}, line {error.lineno}: {error.msg}", where=where) from None
    except (OSError, ValueError) as error:
        raise InputError(f"entry file {path} cannot be read: {cause(error)}", where=where) from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    function = functions.get(name)
    if function is not None:
        _check_args(function, args, f"{where}: args")
    elif name not in _other_names(tree) and not _imports_all(tree):
        public = [known for known in functions if not known.startswith("_")]
        raise UnknownName("function", name, public, where=f"{where}: {path.name}")


def _check_args(function: ast.FunctionDef | ast.AsyncFunctionDef, args: Iterable[str], where: str) -> None:
    if function.decorator_list or function.args.kwarg is not None:
        return
    takes = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
    for arg in args:
        if arg not in takes:
            raise UnknownName("argument", arg, takes, where=f"{where} of {function.name}")


def _other_names(tree: ast.Module) -> set[str]:
    """Names that a module may define other than by a top-level ``def``."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _imports_all(tree: ast.Module) -> bool:
    return any(alias.name == "*" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
