"""Pages that are followed: what they show is what is printed, but for what is measured."""

import os
from pathlib import Path

import pytest

from tests.support.console_transcript import Differs, PageFile, Reader, Typed, matches, read_page

PAGE = """
```toml file=jobs.toml
name = 1
```
```console
$ cat jobs.toml
name = 1
$ echo b; echo c
b
…
```
```python file=wait.py
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("ready", flush=True)
signal.sigwait([signal.SIGINT])
print("bye")
```
```console terminal=2
$ python3 wait.py
ready
```
"""


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (("took 1.5 s",), "took 12.25 s\n"),
        (("a   1", "b  22"), "a 1\nb    22"),
        (("job …/400 done",), "job 17/400 done\n"),
        (("mlp … paused",), "mlp paused\n"),
        (("mlp paused …",), "mlp paused\n"),
        (("first", "…", "last"), "first\nx\ny\nlast\n"),
        (("first", "…"), "first\n"),
        ((), ""),
    ],
)
def test_what_is_measured_may_differ(shown: tuple[str, ...], printed: str) -> None:
    assert matches(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (("2 of 2 jobs",), "1 of 2 jobs\n"),
        (("took 1.5 s",), "took 2 s\n"),
        (("took … s",), "took 1\nin all 3 s\n"),
        (("first",), "first\nsecond\n"),
        (("first", "second"), "first\n"),
        (("a.b",), "axb\n"),
    ],
)
def test_everything_else_may_not(shown: tuple[str, ...], printed: str) -> None:
    assert not matches(shown, printed)


def test_a_page_is_files_and_commands_in_their_order() -> None:
    steps = list(read_page(PAGE))
    assert steps[:3] == [
        PageFile("jobs.toml", "name = 1\n"),
        Typed("cat jobs.toml", ("name = 1",)),
        Typed("echo b; echo c", ("b", "…")),
    ]
    assert steps[4] == Typed("python3 wait.py", ("ready",), "2")


@pytest.fixture
def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


def test_a_page_is_followed(tmp_path: Path, environment: dict[str, str]) -> None:
    page = PAGE + "```console terminal=2\n^C\nbye\n```\n"
    session = Reader(tmp_path, environment)
    try:
        assert session.follow(page) == 4
    finally:
        session.close()


def test_what_differs_is_shown_beside_what_was_printed(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(Differs, match=r"\$ echo b; echo c\n--- the page shows\nb\n--- it printed\nb\nc"):
        Reader(tmp_path, environment).follow("```console\n$ echo b; echo c\nb\n```\n")
