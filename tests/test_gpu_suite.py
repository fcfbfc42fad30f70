"""The runner for GPU machines: counts, names of failures, and what the limit cuts off."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import gpu_suite

FILES = {
    "test_mixed.py": "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'unequal'\n",
    "test_none.py": "import pytest\n@pytest.mark.skip\ndef test_c(): pass\n",
    "test_broken.py": "import missing_module\n",
    "test_hangs.py": "import time\ndef test_d(): time.sleep(600)\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  slow\n", encoding="utf-8")
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each process starts a second sooner
    return tmp_path


def run(folder: Path, *names: str, limit_s: float) -> gpu_suite.Summary:
    return gpu_suite.Suite([folder / name for name in names], 2, limit_s).run()


def test_results_are_counted_and_failures_named(folder: Path) -> None:
    summary = run(folder, "test_mixed.py", "test_none.py", "test_broken.py", limit_s=300.0)
    assert (summary.passed, summary.failed, summary.skipped, summary.unfinished) == (1, 2, 1, [])
    assert any("test_b" in name and "unequal" in message for name, message in summary.failures.items())
    assert any("test_broken" in name for name in summary.failures)


def test_what_takes_too_long_is_killed_and_listed(folder: Path) -> None:
    summary = run(folder, "test_hangs.py", limit_s=3.0)
    assert summary.unfinished == ["test_hangs.py (not gpu)"]
    assert (summary.passed, summary.failed) == (0, 0)


def test_versions_of_what_is_needed_are_reported() -> None:
    found = gpu_suite.versions()
    assert {"python", "torch", "hypothesis"} <= {name for name, version in found.items() if version}
