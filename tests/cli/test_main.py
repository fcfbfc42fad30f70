"""The command itself: help, version, unknown verbs, and that starting it stays light."""

import json
import subprocess
import sys

import pytest

from carpool import __version__
from carpool.cli.main import VERBS, run


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    for verb in VERBS:
        assert verb in printed


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert "Example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--foo"], "no such option '--foo'. See: carpool run --help"),
        (["demo", "--jobs", "5"], "invalid value for '--jobs': 5 is not in the range x>=10. See: carpool demo --help"),
        (["token", "add"], "missing argument 'NAME'. See: carpool token add --help"),
    ],
)
def test_wrong_options_are_told_in_a_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert capsys.readouterr().err == f"carpool: {told}\n"


def test_a_group_without_a_verb_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace"]) == 2
    assert capsys.readouterr().err.startswith("Usage: carpool trace")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_unknown_verb_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulat"]) == 2
    assert "Did you mean simulate" in capsys.readouterr().err


def test_help_and_policies_import_nothing_heavy() -> None:
    code = (
        "import sys, carpool.cli.main as m; m.run(['--help']); m.run(['policies']);"
        "heavy = [name for name in ('numpy', 'scipy', 'torch', 'rich', 'sklearn') if name in sys.modules];"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip().endswith("[]")


def test_policies_lists_all_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["policies"]]
    assert names == sorted(names)
    assert "fifo" in names
    assert run(["policies", "fifo"]) == 0
    assert "bypass=false" in capsys.readouterr().out
    assert run(["policies", "las"]) == 0
    assert "\n\nA job is in queue q when" in capsys.readouterr().out, "a docstring's indentation is not the reader's"
    assert run(["policies", "fifa"]) == 2
