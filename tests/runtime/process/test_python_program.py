"""Scripts in a fork of the fork server behave as in a plain start: output, exit code, files and weights."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from carpool.runtime.commands.command_start import ForkedCommand
from carpool.runtime.process.protocol import Message, RunProgram
from carpool.runtime.process.python_program import (
    PythonProgram,
    is_same_interpreter,
    parse_program,
    problem_with_environment,
    uses_torch,
)
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class End(NamedTuple):
    """What a program left: exit code, output, and files it wrote."""

    code: int
    output: str
    files: dict[str, bytes]


class Listener:
    """Ignores workers, of which there are none."""

    def on_message(self, key: WorkerKey, message: Message) -> None: ...

    def on_exit(self, key: WorkerKey, why: str) -> None: ...


class Forks:
    """A fork server, and programs in its forks."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pool = self.loop.run_until_complete(self._open())

    async def _open(self) -> WorkerPool:
        pool = WorkerPool(Listener(), self.loop.time)
        await pool.start()
        return pool

    def close(self) -> None:
        self.loop.run_until_complete(self.pool.stop())
        self.loop.close()

    def run(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> int:
        return self.loop.run_until_complete(self._run(command, folder, environment))

    async def _run(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> int:
        theirs, lifeline = os.pipe()
        session, end = os.pipe()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        request = RunProgram((sys.executable, *command), str(folder), environment)
        try:
            channel, answer = await self.pool.run_program(request, log, theirs, session)
            if answer.error:
                channel.close()
            assert not answer.error, answer.error
            async with asyncio.timeout(120.0):
                return await ForkedCommand(channel, answer.pid).wait()
        finally:
            for fd in (theirs, lifeline, session, end, log):
                os.close(fd)


def _default_interrupt() -> None:
    """Handle SIGINT as a program of a terminal does: these tests may run where it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


Compare = Callable[..., End]


@pytest.fixture
def compare(forks: Forks, tmp_path: Path) -> Compare:
    """Run a program plainly and in a fork, in equal folders; the equal ends.

    A program that only imports torch gets an empty module of that name where it runs plainly, which starts a second
    sooner; ``torch=True`` gives it torch there, too.
    """

    def run(
        command: list[str], files: Mapping[str, str], threads: int = 1, *, torch: bool = False, **variables: str
    ) -> End:
        ends = []
        for kind in ("plain", "fork"):
            folder = tmp_path / kind / "work"
            stub = {} if torch or kind == "fork" else {"torch.py": ""}
            for name, text in {**files, **stub}.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            environment = {**os.environ, **dict.fromkeys(THREADS, str(threads)), **variables}
            if kind == "fork":
                code = forks.run(command, folder, environment)
                output = (folder / "log").read_text(encoding="utf-8")
                (folder / "log").unlink()
            else:
                done = subprocess.run(
                    [sys.executable, *command],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=120,
                    check=False,
                    preexec_fn=_default_interrupt,
                )
                code, output = done.returncode, done.stdout.decode()
            written = {
                str(path.relative_to(folder)): path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file() and "__pycache__" not in path.parts and path.name not in stub
            }
            ends.append(End(code, output.replace(str(folder.parent), "HERE"), written))
        assert ends[1] == ends[0]
        return ends[1]

    return run


ARGPARSE = """
import argparse, os, sys
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
print(parser.parse_args(), __file__, __name__, __spec__, sys.argv, sys.path[0], sys.orig_argv[1:], os.getcwd())
print(sorted(globals()), sys.modules["__main__"].__file__, torch.get_num_threads())
print(sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdin.read(), sys.executable)
"""


def test_arguments_names_and_paths(compare: Compare) -> None:
    assert compare(["train.py", "--lr", "0.1"], {"train.py": ARGPARSE}, torch=True).code == 0
    end = compare(["sub/train.py", "--none"], {"sub/train.py": ARGPARSE}, torch=True)
    assert end.code == 2
    assert "unrecognized" in end.output


TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 3, 16, 16), torch.randint(0, 10, (256,)))
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 128),
                      nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if __name__ == "__main__":
    for epoch in range(2):
        for images, labels in DataLoader(data, batch_size=32, shuffle=True, num_workers=int(sys.argv[1])):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    big = torch.randn(700, 900) @ torch.randn(900, 500)
    import numpy
    generator = numpy.random.default_rng(0)
    other = torch.from_numpy(generator.normal(size=(300, 400)) @ generator.normal(size=(400, 200)))
    with open("weights", "wb") as file:
        for tensor in [*model.state_dict().values(), big, other]:
            file.write(tensor.numpy().tobytes())
    print(torch.get_num_threads(), torch.get_num_interop_threads(), loss.item())
"""


@pytest.mark.parametrize(("workers", "threads"), [("0", 2), ("2", 1)])
def test_weights_are_bit_identical(compare: Compare, threads: int, workers: str) -> None:
    end = compare(["train.py", workers], {"train.py": TRAIN}, threads, torch=True)
    assert (end.code, len(end.files["weights"]) > 1000) == (0, True), end.output


SPAWN = """
import multiprocessing, os, torch
def square(x):
    return int(torch.tensor(x).square()), __name__
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, range(4)))
"""


def test_multiprocessing(compare: Compare) -> None:
    assert "spawn [(0, '__mp_main__')" in compare(["many.py"], {"many.py": SPAWN}, torch=True).output


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('a message')", 1),
        ("raise SystemExit(True)", 1),
        ("def f():\n  try:\n    1 / 0\n  except ZeroDivisionError as e:\n    raise KeyError('x') from e\nf()", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -2),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15),
        ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)", -9),
        ("os._exit(5)", 5),
        ("sys.excepthook = lambda *_: print('mine'); raise ValueError", 1),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()", 0),
        ("threading.Thread(target=lambda: 1 / 0).start()", 0),
        ("import nothing_here", 1),
        ("def broken(:", 1),
        ("raise Exception('é' * 3)", 1),
        ("logging.basicConfig(level='INFO'); logging.info('hello')", 0),
        ("warnings.warn('old', DeprecationWarning)", 0),
        ("print(*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)))", 0),
        ("sys.stdout.write('no newline'); sys.stderr.write('first')", 0),
        ("open('unflushed', 'w').write('kept'); kept = open('later', 'w'); kept.write('too')", 0),
        ("os.chdir('..'); pathlib.Path('work/moved').write_text('here'); import beside", 0),
        ("import pickle; print(pickle.loads(pickle.dumps(sys.modules['__main__'].Plain)))", 0),
        (
            "print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.flags)'], capture_output=True).stdout)",
            0,
        ),
        ("print(sorted(fd for fd in os.listdir('/proc/self/fd') if int(fd) < 3), os.getpgrp() == os.getpid())", 0),
    ],
)
def test_ends(compare: Compare, end: str, code: int) -> None:
    begin = "import atexit, logging, os, pathlib, signal, subprocess, sys, threading, time, torch, warnings\n"
    begin += "class Plain: pass\natexit.register(lambda: print('goodbye'))\nprint('begun')\n"
    if "getpgrp" in end:
        end = end.replace("os.getpgrp() == os.getpid()", "True")
    assert compare(["script.py"], {"script.py": begin + end + "\n", "beside.py": "print('beside')"}).code == code


def test_modules_with_relative_imports(compare: Compare) -> None:
    files = {
        "lab/__init__.py": "",
        "lab/__main__.py": "from . import net\nimport sys\nprint(sys.argv, __package__, __spec__.name, sys.path[0])",
        "lab/net.py": "import torch\nprint(__name__)",
        "lab/fails.py": "from .net import torch\nraise ValueError(torch.__name__)",
    }
    assert compare(["-m", "lab", "x"], files).code == 0
    end = compare(["-m", "lab.fails"], files)
    assert (end.code, "runpy" in end.output) == (1, True)
    assert compare(["-m", "lab.none"], files).code == 1


def test_output_without_buffering(compare: Compare) -> None:
    script = "import sys, torch, os\nprint('a', end='')\nos.write(1, b'b')\nsys.stdout.flush()\nos._exit(0)"
    assert compare(["script.py"], {"script.py": script}, PYTHONUNBUFFERED="").output == "ba"
    assert compare(["script.py"], {"script.py": script}, PYTHONUNBUFFERED="1").output == "ab"


def test_unseeded_numbers_differ_between_forks(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(
        "import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(1).item())"
    )
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    for _ in range(2):
        assert forks.run(["draw.py"], tmp_path, environment) == 0
    first, second = (tmp_path / "log").read_text().splitlines()
    assert not set(first.split()) & set(second.split())


def test_what_cannot_be_emulated_is_refused(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch")
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    with pytest.raises(AssertionError, match="PYTHONHASHSEED"):
        forks.run(["script.py"], tmp_path, {**environment, "PYTHONHASHSEED": "0"})
    (tmp_path / "random.py").touch()
    with pytest.raises(AssertionError, match=r"random\.py"):
        forks.run(["script.py"], tmp_path, environment)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python a.py --x -m", PythonProgram("a.py", False, ("--x", "-m"))),
        ("python -m a.b c", PythonProgram("a.b", True, ("c",))),
        *[(f"python {rest}", None) for rest in ("", "-u a.py", "-c pass", "-O -m a", "-", "folder", "-m", "-m -x")],
    ],
)
def test_programs(command: str, program: PythonProgram | None) -> None:
    assert parse_program(command.split()) == program


@pytest.mark.parametrize(
    ("wanted", "own", "is_same"),
    [
        ({"HOME": "/a", "CARPOOL_JOB": "x"}, {"HOME": "/b"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "PYTHONUNBUFFERED": "1"}, {}, True),
        ({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", **dict.fromkeys(THREADS, "2")}, {}, True),
        ({**dict.fromkeys(THREADS, "2"), "MKL_NUM_THREADS": "4"}, {}, False),
        (dict.fromkeys(THREADS, "2,1"), {}, False),
        ({"PYTHONPATH": "x"}, {}, False),
        ({}, {"PYTHONPATH": "x"}, False),
        ({"LD_PRELOAD": "x"}, {"LD_PRELOAD": "y"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, {}, False),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, {}, False),
        ({"A=B": "1"}, {}, False),
    ],
)
def test_environments(wanted: dict[str, str], own: dict[str, str], is_same: bool) -> None:
    assert (not problem_with_environment(wanted, own)) == is_same


def test_only_programs_with_torch_wait_for_the_fork_server(tmp_path: Path) -> None:
    script = PythonProgram("a.py", False)
    assert not uses_torch(script, tmp_path)
    (tmp_path / "a.py").write_text("import net")
    assert not uses_torch(script, tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn")
    assert uses_torch(script, tmp_path)
    assert not uses_torch(PythonProgram("b.c", True), tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.py").write_text("import lightning as L")
    assert uses_torch(PythonProgram("b.c", True), tmp_path)


def test_only_this_interpreter_is_the_same(tmp_path: Path) -> None:
    assert is_same_interpreter(sys.executable)
    (tmp_path / "python").symlink_to(sys.executable)
    assert not is_same_interpreter(str(tmp_path / "python"))
    assert not is_same_interpreter("python-of-nobody")
