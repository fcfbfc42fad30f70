"""The bytecode cache: used where Python keeps none, and nowhere else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from carpool.runtime.process.bytecode import source_of, use_bytecode_cache

CACHE = "carpool/bytecode"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed module without bytecode, where Python writes none."""
    source = tmp_path / "site" / "an_installed_module.py"
    source.parent.mkdir()
    source.write_text("value = 1\n")
    monkeypatch.syspath_prepend(source.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, source.stem, raising=False)
    return source


def cached(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*.pyc")]


def test_modules_are_compiled_once_per_user_where_python_stores_none(module: Path, tmp_path: Path) -> None:
    use_bytecode_cache(source_of(module.stem))
    importlib.import_module(module.stem)
    assert cached(tmp_path) == [f"{module.stem}.{sys.implementation.cache_tag}.pyc"]
    assert not (module.parent / "__pycache__").exists()


def test_the_cache_belongs_to_its_user_alone(module: Path, tmp_path: Path) -> None:
    use_bytecode_cache(str(module))
    assert (tmp_path / "cache" / CACHE).stat().st_mode & 0o777 == 0o700


def test_a_changed_module_is_compiled_again(module: Path) -> None:
    use_bytecode_cache(str(module))
    importlib.import_module(module.stem)
    module.write_text("value = 22\n")
    sys.modules.pop(module.stem)
    assert importlib.import_module(module.stem).value == 22


def test_bytecode_beside_the_source_is_used(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    importlib.import_module(module.stem)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    use_bytecode_cache(str(module))
    assert sys.pycache_prefix is None
    assert sys.dont_write_bytecode


def test_python_writes_bytecode_itself_where_it_can(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    use_bytecode_cache(str(module))
    assert sys.pycache_prefix is None


def test_a_prefix_that_the_user_has_set_stays(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    use_bytecode_cache(str(module))
    assert sys.pycache_prefix == "/elsewhere"
    assert sys.dont_write_bytecode


def test_without_a_folder_for_it_nothing_changes(module: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    use_bytecode_cache(str(module))
    assert sys.pycache_prefix is None
    assert sys.dont_write_bytecode


def test_a_package_that_is_not_installed_has_no_source() -> None:
    assert source_of("no_such_package") is None
    use_bytecode_cache(None)
