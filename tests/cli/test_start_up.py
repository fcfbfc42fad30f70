"""Where a run imports torch: once, in the fork server, whatever else its processes do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Python imports it at every start: notes which processes begin to import a package.
SITE = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "scipy", "pydantic", "sqlite3"):
            with open(os.environ["NOTED_IMPORTS"], "a") as noted:
                noted.write(name + " " + " ".join(sys.orig_argv) + "\\n")

sys.meta_path.insert(0, Finder())
"""
ENTRIES = """
import json, os
import torch
from carpool import Stop, Training

def parents(pid):
    status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    parent = int(status["PPid"])
    here = {"name": status["Name"].strip(), "torch": "libtorch" in open(f"/proc/{pid}/maps").read()}
    return [here] + (parents(parent) if here["torch"] or here["name"].startswith("carpool") else [])

def fine():
    open("calls", "a").write("called ")
    json.dump(parents(os.getpid()), open("parents.json", "w"))
    model = torch.nn.Linear(8, 2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    return Training(
        model=model, dataset=data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=32,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]), stop=Stop(steps=3),
    )

def raises():
    raise ValueError("no such thing")
"""


class Folder:
    """A folder with a job file, in which commands are run and their imports noted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "site").mkdir()
        (path / "site" / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        (path / "train.py").write_text(ENTRIES, encoding="utf-8")

    def run(self, *jobs: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        (self.path / "jobs.toml").write_text("\n".join(f"[[job]]\n{job}" for job in jobs), encoding="utf-8")
        (self.path / "noted").write_text("", encoding="utf-8")
        paths = f"{self.path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "NOTED_IMPORTS": str(self.path / "noted"), "PYTHONPATH": paths}
        command = [sys.executable, "-m", "carpool", "run", "jobs.toml", "--devices", "cpu:2", *options]
        return subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    def imports(self, package: str) -> list[str]:
        """The processes that imported a package, as their command lines."""
        lines = (self.path / "noted").read_text(encoding="utf-8").splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{package} ")]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_run_with_checked_entries_imports_torch_once_and_only_in_the_fork_server(folder: Folder) -> None:
    jobs = [f'name = "{name}"\nentry = "train.py:fine"' for name in ("a", "b", "c")]
    done = folder.run(*jobs)
    assert done.returncode == 0, done.stderr
    assert [" -m carpool.runtime.process.forkserver" in each for each in folder.imports("torch")] == [True]
    assert folder.imports("scipy") == folder.imports("pydantic") == []
    worker, forkserver, executor, *_ = json.loads((folder.path / "parents.json").read_text(encoding="utf-8"))
    assert (worker["torch"], forkserver["torch"]) == (True, True)
    assert (executor["name"], executor["torch"]) == ("carpool-exec", False)


def test_a_job_that_starts_at_once_calls_its_entry_once_and_learns_the_same(folder: Folder) -> None:
    digests = []
    for option in ("--check", "--no-check"):
        done = folder.run('name = "a"\nentry = "train.py:fine"', options=("--json", option))
        digests += [job["digest"] for job in json.loads(done.stdout)["jobs"]]
    assert digests == [digests[0]] * 2
    assert (folder.path / "calls").read_text(encoding="ascii") == "called called "


def test_a_failed_check_leaves_no_process_and_no_folder(folder: Folder) -> None:
    done = folder.run('name = "a"\nentry = "train.py:fine"', 'name = "b"\nentry = "train.py:raises"')
    assert done.returncode == 2
    assert "job 'b'" in done.stderr
    assert "no such thing" in done.stderr
    assert len(folder.imports("torch")) == 1
    assert not list((folder.path / ".carpool").glob("runs/*/*"))
    assert _processes(folder.path) == []


def test_a_run_that_ends_while_torch_is_imported_leaves_no_process(folder: Folder) -> None:
    done = folder.run('name = "a"\ncommand = ["true"]')
    assert done.returncode == 0, done.stderr
    assert _processes(folder.path) == []


def _processes(folder: Path) -> list[str]:
    """Processes that were started by a command in the folder and still run."""
    mark, found = f"NOTED_IMPORTS={folder / 'noted'}".encode(), []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "comm").read_text())
        except OSError:
            continue
    return found
