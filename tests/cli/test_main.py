"""``carpool`` itself: help, version, usage errors, and what starting it imports."""

import subprocess
import sys
from ast import literal_eval

import pytest

from carpool import __version__
from carpool.cli.main import VERBS, run


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert [verb for verb in VERBS if f"  {verb} " not in text] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert f"carpool {verb}" in capsys.readouterr().out.partition("Example")[2]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "--foo"], ["'--foo'", "See: carpool run --help"]),
        (["demo", "--jobs", "5"], ["'--jobs'", "x>=10", "See: carpool demo --help"]),
        (["token", "add"], ["'NAME'", "See: carpool token add --help"]),
    ],
)
def test_a_usage_error_is_one_line(args: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in expected), line


def test_a_group_without_a_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace"]) == 2
    assert capsys.readouterr().err.startswith("Usage: carpool trace")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_verb_gets_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulat"]) == 2
    assert "Did you mean simulate" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["submit", "policy", "profile", "explain", "ps"])
def test_help_of_a_verb_imports_only_the_command_line(verb: str) -> None:
    """Each verb starts in the time that click takes: what it works with is imported when it runs."""
    code = (
        f"import sys, carpool.cli.main as m; m.run(['{verb}', '--help']);"
        "print([name for name in sys.modules if name.startswith('carpool.')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    imported = literal_eval(done.stderr.splitlines()[-1])
    allowed = ("carpool.cli", "carpool.core.errors", "carpool.core.units")
    assert [name for name in imported if not name.startswith(allowed) and name != "carpool.core"] == []


def test_help_and_policies_import_nothing_heavy() -> None:
    code = (
        "import sys, carpool.cli.main as m; m.run(['--help']); m.run(['policies']);"
        "heavy = [name for name in ('numpy', 'scipy', 'torch', 'rich', 'sklearn') if name in sys.modules];"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip().endswith("[]")
