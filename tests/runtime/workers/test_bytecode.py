"""The bytecode cache: used for modules of which Python stores no bytecode, and for no others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from carpool.runtime.process.bytecode import CachingLoader, source_of, use_bytecode_cache

CACHE, NAME = "carpool/bytecode", "an_installed_package"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed module without bytecode, where Python writes none."""
    source = tmp_path / "site" / "an_installed_package" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("value = 1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path_hooks", list(sys.path_hooks))
    monkeypatch.setattr(sys, "path_importer_cache", dict(sys.path_importer_cache))
    monkeypatch.setattr(CachingLoader, "folder", "")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.syspath_prepend(source.parents[1])
    return source


def cached(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*.pyc")]


def test_modules_are_compiled_once_per_user_where_python_stores_none(module: Path, tmp_path: Path) -> None:
    use_bytecode_cache(source_of(NAME))
    importlib.import_module(NAME)
    assert cached(tmp_path) == [f"__init__.{sys.implementation.cache_tag}.pyc"]
    assert not (module.parent / "__pycache__").exists()


def test_a_program_sees_its_own_settings(module: Path) -> None:
    module.write_text("import sys\nseen = sys.pycache_prefix, sys.dont_write_bytecode\n")
    use_bytecode_cache(source_of(NAME))
    assert importlib.import_module(NAME).seen == (None, True)


def test_the_cache_belongs_to_its_user_alone(module: Path, tmp_path: Path) -> None:
    use_bytecode_cache(str(module))
    assert (tmp_path / "cache" / CACHE).stat().st_mode & 0o777 == 0o700


def test_a_changed_module_is_compiled_again(module: Path) -> None:
    use_bytecode_cache(str(module))
    importlib.import_module(NAME)
    module.write_text("value = 22\n")
    sys.modules.pop(NAME)
    assert importlib.import_module(NAME).value == 22


def test_bytecode_beside_the_source_is_used(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = module.parents[1] / "another_module.py"
    other.write_text("value = 2\n")
    with monkeypatch.context() as writing:
        writing.setattr(sys, "dont_write_bytecode", False)
        importlib.import_module(other.stem)
    monkeypatch.delitem(sys.modules, other.stem)
    use_bytecode_cache(str(other))
    assert not CachingLoader.folder
    use_bytecode_cache(str(module))
    importlib.import_module(other.stem)
    assert cached(tmp_path) == []


def test_python_writes_bytecode_itself_where_it_can(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    use_bytecode_cache(str(module))
    assert not CachingLoader.folder


def test_a_prefix_that_the_user_has_set_stays(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    use_bytecode_cache(str(module))
    assert not CachingLoader.folder


def test_without_a_folder_for_it_nothing_changes(module: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    use_bytecode_cache(str(module))
    assert not CachingLoader.folder
    assert importlib.import_module(NAME).value == 1


def test_a_package_that_is_not_installed_has_no_source() -> None:
    assert source_of("no_such_package") is None
    use_bytecode_cache(None)
