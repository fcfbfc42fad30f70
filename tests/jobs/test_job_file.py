"""Job files: every key is read, and errors name file, job, key, value and way out."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.errors import InputError
from carpool.core.host_resources import HostResources
from carpool.core.model import JobSpec
from carpool.core.topology import Cluster
from carpool.jobs.devices import as_cluster, parse_devices
from carpool.jobs.feasibility import check_fit
from carpool.jobs.job_file import JobFile, parse_deadline, read_jobs
from carpool.jobs.job_keys import KEYS
from carpool.jobs.program import Program

ENTRY = "def mlp(lr=0.1, *, width=8):\n    pass\n\n\ndef cnn(**more):\n    pass\n\n\nmade = mlp\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with an entry file."""
    (tmp_path / "train.py").write_text(ENTRY, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    return tmp_path


def read(home: Path, text: str) -> JobFile:
    path = home / "jobs.toml"
    path.write_text(text, encoding="utf-8")
    return read_jobs(path)


def one(home: Path, *lines: str) -> tuple[JobSpec, Program]:
    """The only job of a file that has these lines."""
    ((spec, program),) = read(home, "\n".join(["[[job]]", 'name = "a"', 'entry = "train.py:mlp"', *lines])).jobs
    return spec, program


def test_a_minimal_job(home: Path) -> None:
    spec, program = one(home)
    assert (spec.id, spec.devices, spec.narrowest, spec.widest, spec.work) == ("a", 1, 1, 1, None)
    assert program == Program(entry="train.py:mlp", folder=str(home))


def test_every_key_is_read(home: Path) -> None:
    spec, program = one(
        home,
        "args = { lr = 0.5 }",
        "weight = 2",
        "devices = 2",
        "min_devices = 1",
        "max_devices = 4",
        'kinds = ["cpu1"]',
        'memory = "6GiB"',
        'user = "ann"',
        "batch = { size = 64, tune = true, min = 32, max = 512, per = 'device' }",
        "sync_batchnorm = true",
        "seed = 7",
        'folder = "."',
        "environment = { THREADS = 2 }",
        'python = "python3"',
        'time_limit = "2h"',
        "retries = 0",
        'checkpoint_every = "5min"',
        "keep = 3",
    )
    assert (spec.weight, spec.devices, spec.narrowest, spec.widest) == (2.0, 2, 1, 4)
    assert (spec.kinds, spec.memory_bytes, spec.user, spec.retries) == (("cpu1",), 6 << 30, "ann", 0)
    assert (spec.batch_range, spec.batch_size) == ((32, 512), 64)
    assert program == Program(
        entry="train.py:mlp",
        args={"lr": 0.5},
        folder=str(home),
        environment={"THREADS": "2"},
        python="python3",
        memory_bytes=6 << 30,
        seed=7,
        batch_size=64,
        tune=True,
        batch_per_device=True,
        sync_batchnorm=True,
        checkpoint_s=300.0,
        keep=3,
        time_limit_s=7200.0,
        retries=0,
    )


def test_exact_jobs_have_shards(home: Path) -> None:
    spec, program = one(home, "exact = true", "max_devices = 4")
    assert (spec.exact, program.exact, program.shards) == (True, True, 8)
    assert one(home, "exact = true")[1].shards == 1  # one device for life
    assert one(home, "exact = true", "shards = 4")[1].shards == 4


@pytest.mark.parametrize(
    ("lines", "widths"),
    [
        ([], (1, 1, 1)),
        (["max_devices = 4"], (1, 1, 4)),
        (["devices = 2"], (2, 2, 2)),
        (["min_devices = 2", "max_devices = 4"], (2, 2, 4)),
        (["devices = 2", "max_devices = 4"], (1, 2, 4)),
    ],
)
def test_the_elastic_range(home: Path, lines: list[str], widths: tuple[int, int, int]) -> None:
    spec, _ = one(home, *lines)
    assert (spec.narrowest, spec.devices, spec.widest) == widths


def test_a_command(home: Path) -> None:
    (home / "x.py").touch()
    file = read(home, '[[job]]\nname = "old"\ncommand = ["python", "x.py"]\ndevices = 2\nmemory = 100\n')
    ((spec, program),) = file.jobs
    assert (program.command, program.entry, spec.narrowest, spec.widest) == (("python", "x.py"), "", 2, 2)


def test_defaults_apply_to_jobs_that_do_not_override_them(home: Path) -> None:
    file = read(
        home,
        "[defaults]\nweight = 3\nmax_devices = 2\n"
        '[[job]]\nname = "a"\nentry = "train.py:mlp"\n[[job]]\nname = "b"\nentry = "train.py:cnn"\nweight = 1\n',
    )
    assert [(spec.weight, spec.widest) for spec, _ in file.jobs] == [(3.0, 2), (1.0, 2)]


def test_a_sweep_is_one_job_per_combination(home: Path) -> None:
    file = read(
        home,
        '[[job]]\nname = "a"\nentry = "train.py:mlp"\nargs = { lr = 1.0 }\n'
        "sweep = { lr = [0.1, 0.2], width = [4, 8] }\n"
        '[[job]]\nname = "b"\nentry = "train.py:cnn"\nafter = "a"\n',
    )
    assert [spec.id for spec, _ in file.jobs] == ["a-1", "a-2", "a-3", "a-4", "b"]
    assert [dict(program.args) for _, program in file.jobs[:2]] == [{"lr": 0.1, "width": 4}, {"lr": 0.1, "width": 8}]
    assert file.jobs[4].spec.after == ("a-1", "a-2", "a-3", "a-4")


def test_relative_paths_start_at_the_job_file(home: Path) -> None:
    (home / "sub" / "other.py").write_text(ENTRY, encoding="utf-8")
    file = read(home, '[[job]]\nname = "a"\nentry = "other.py:mlp"\nfolder = "sub"\n')
    assert file.jobs[0].program.folder == str(home / "sub")


@pytest.mark.parametrize("entry", ["train.py:made", "carpool.core.scheduler:Scheduler"])
def test_entries_that_are_not_plain_functions_are_accepted(home: Path, entry: str) -> None:
    assert read(home, f'[[job]]\nname = "a"\nentry = "{entry}"\n').jobs[0].program.entry == entry


HEAD = '[[job]]\nname = "a"\nentry = "train.py:mlp"\n'
BAD = [
    ("", ["no [[job]]"]),
    ("[[jobs]]\n", ["unknown table 'jobs'", "Did you mean job"]),
    ("x = [", ["is not TOML"]),
    ("job = 3", ["no [[job]]"]),
    ("job = [3]", ["job 1 is 3", "[[job]]"]),
    ('[[job]]\nentry = "train.py:mlp"', ["job 1 has no name"]),
    ('[[job]]\nname = "../a"\nentry = "train.py:mlp"', ["'../a'", "letters"]),
    (HEAD + HEAD, ["two jobs have the name 'a'"]),
    (HEAD + "wieght = 1", ["job 'a'", "unknown key 'wieght'", "weight"]),
    ("[defaults]\nname = 'x'\n" + HEAD, ["defaults", "unknown key 'name'"]),
    ("[defaults]\nfoo = 'x'\n" + HEAD, ["defaults", "unknown key 'foo'"]),
    (HEAD + 'command = ["x"]', ["both entry and command"]),
    ('[[job]]\nname = "a"', ["neither entry nor command", "digits.py:mlp"]),
    ('[[job]]\nname = "a"\ncommand = "python x.py"', ["command is 'python x.py'", "list"]),
    ('[[job]]\nname = "a"\ncommand = ["x"]\nmax_devices = 2', ["max_devices 2", "cannot be resized"]),
    ('[[job]]\nname = "a"\ncommand = ["python3", "digitz.py"]', ["script 'digitz.py'", "Known: train.py"]),
    ('[[job]]\nname = "a"\ncommand = ["x"]\nexact = true', ["exact is not allowed for a command"]),
    ('[[job]]\nname = "a"\nentry = "trian.py:mlp"', ["unknown entry file 'trian.py'", "Did you mean train.py"]),
    ('[[job]]\nname = "a"\nentry = "train.py:mpl"', ["unknown function 'mpl'", "Did you mean mlp"]),
    ('[[job]]\nname = "a"\nentry = "train.py"', ["'train.py'", "file:function"]),
    ('[[job]]\nname = "a"\nentry = "no_such_package.x:f"', ["'no_such_package'", "not installed"]),
    (HEAD + "args = { rl = 1 }", ["args of mlp", "'rl'", "Did you mean lr"]),
    (HEAD + "args = 3", ["args is 3", "table"]),
    (HEAD + "args = { lr = 2020-01-01 }", ["args", "finite numbers"]),
    (HEAD + "weight = 0", ["weight is 0", "from 1e-06"]),
    (HEAD + "weight = nan", ["weight is nan"]),
    (HEAD + "devices = 0.5", ["devices is 0.5", "integer"]),
    (HEAD + "devices = true", ["devices is True"]),
    (HEAD + "devices = 0", ["devices is 0", "at least 1"]),
    (HEAD + f"devices = {10**400}", ["devices is about 2**1329", "at most"]),
    (HEAD + "min_devices = 4\nmax_devices = 2", ["min_devices is 4", "max_devices 2"]),
    (HEAD + 'memory = "6 gigs"', ["job 'a': memory", "'6 gigs'", "16GiB"]),
    (HEAD + 'time_limit = "soon"', ["time_limit", "'soon'", "90min"]),
    (HEAD + "exact = true\nshards = 6", ["shards is 6", "power of two"]),
    (HEAD + "shards = 4", ["shards needs exact = true"]),
    (HEAD + "exact = true\nshards = 2\nmax_devices = 4", ["max_devices is 4, shards is 2"]),
    (HEAD + "exact = 1", ["exact is 1", "true or false"]),
    (HEAD + "exact = true\nsync_batchnorm = true", ["sync_batchnorm = true", "exact = true", "Remove one"]),
    (HEAD + "sync_batchnorm = true\nmax_nodes = 2", ["max_nodes is 2", "sync_batchnorm"]),
    ('[[job]]\nname = "a"\ncommand = ["true"]\nmax_nodes = 2', ["max_nodes is 2", "command"]),
    (HEAD + "batch = { tune = true }", ["tune = true needs min and max"]),
    (HEAD + "batch = { tune = true, min = 9, max = 3 }", ["min is 9, max is 3"]),
    (HEAD + "batch = { per = 'node' }", ["per is 'node'", "'device'"]),
    (HEAD + "batch = { szie = 1 }", ["batch", "unknown key 'szie'", "size"]),
    (HEAD + "exact = true\nbatch = { tune = true, min = 1, max = 2 }", ["tune = true", "exact = true"]),
    (HEAD + "sweep = { lr = 0.1 }", ["sweep.lr is 0.1", "list"]),
    (HEAD + 'folder = "nowhere"', ["nowhere", "does not exist"]),
    (HEAD + 'after = "b"', ["unknown job 'b'"]),
    (HEAD + 'after = ["a"]', ["cycle: a after a"]),
    (HEAD + 'after = "b"\n[[job]]\nname="b"\nentry="train.py:cnn"\nafter="a"', ["cycle: a after b after a"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD, ids=[parts[0] for _, parts in BAD])
def test_mistakes_are_reported(home: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        read(home, text)
    message = str(caught.value)
    assert "jobs.toml" in message
    assert all(part in message for part in parts), message


def test_a_syntax_error_of_an_entry_is_reported_with_its_line(home: Path) -> None:
    (home / "broken.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"broken\.py, line 2"):
        read(home, '[[job]]\nname = "a"\nentry = "broken.py:f"')


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_jobs(tmp_path / "none.toml")


TWO = Cluster.build([(1, 2, "cpu1")])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["devices = 3"], ["job 'a' needs 3 devices; there are 2", "Lower devices"]),
        (["min_devices = 3", "max_devices = 9"], ["needs 3 devices"]),
        (['kinds = ["H200"]'], ["unknown device type 'H200'", "cpu1"]),
    ],
)
def test_jobs_that_can_never_run_here_are_refused(home: Path, lines: list[str], words: list[str]) -> None:
    file = read(home, HEAD + "\n".join(lines))
    with pytest.raises(InputError) as caught:
        check_fit(file.jobs, TWO)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_memory_beyond_the_ram_of_a_cpu_machine_is_refused(home: Path) -> None:
    file = read(home, HEAD + 'memory = "6000GiB"')
    check_fit(file.jobs, TWO)  # its RAM is unknown
    node = replace(TWO.nodes[0], resources=HostResources(2, 1 << 34))
    with pytest.raises(InputError, match=r"6000 GiB.* 16 GiB"):
        check_fit(file.jobs, Cluster((node,)))


def test_at_most_limits_a_sweep(home: Path) -> None:
    jobs = read(home, HEAD + "sweep = { lr = [1, 2, 3] }\nat_most = 2").jobs
    assert [(spec.id, spec.array, spec.at_most) for spec, _ in jobs] == [(f"a-{n}", "a", 2) for n in (1, 2, 3)]
    with pytest.raises(InputError, match="at_most"):
        read(home, HEAD + "at_most = 2")


def test_priorities_and_deadlines_are_read(home: Path) -> None:
    ((spec, _),) = read(home, HEAD + 'priority = "high"\nweight = 2.0\ndeadline = "8h"').jobs
    assert (spec.priority, spec.weight, spec.deadline_s) == (1, 16.0, 28800.0)
    ((spec, _),) = read(home, HEAD + "deadline = 2999-01-01T00:00:00Z").jobs
    assert spec.deadline_s > 86400.0 * 365
    ((spec, _),) = read(home, HEAD).jobs
    assert not spec.is_ranked


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("90min", 5400.0), (30, 30.0), ("1970-01-01T00:10:00+00:00", 100.0), ("1970-01-01 00:10Z", 100.0)],
)
def test_deadlines_are_durations_or_dates(value: object, seconds: float) -> None:
    assert parse_deadline(value, "here", now=500.0) == seconds


@pytest.mark.parametrize("value", ["1970-01-01T00:10:00+00:00", "soon", 0, "8 fortnights", -3, "", True])
def test_invalid_deadlines_are_refused(value: object) -> None:
    with pytest.raises(InputError):
        parse_deadline(value, "here", now=600.0)


SUPPLIED = Cluster(tuple(replace(node, resources=HostResources(4, 8 << 30, 1 << 30)) for node in TWO.nodes))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["cpus = 5"], ["5 cores", "4 cores", "Lower cpus"]),
        (['ram = "9GiB"'], ["9 GiB RAM", "8 GiB RAM"]),
        (['disk = "2GiB"'], ["2 GiB disk", "1 GiB disk"]),
        (["cpus = 3", "devices = 2"], ["2 devices", "3 cores", "enough for 1"]),
    ],
)
def test_resources_that_no_node_has_are_refused(home: Path, lines: list[str], words: list[str]) -> None:
    file = read(home, HEAD + "\n".join(lines))
    with pytest.raises(InputError) as caught:
        check_fit(file.jobs, SUPPLIED)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert check_fit(file.jobs, TWO) == [], "unknown resources are not checked"


def test_resources_that_a_node_has_are_accepted(home: Path) -> None:
    file = read(home, HEAD + 'cpus = 2\nram = "4GiB"\ndisk = "1GiB"\ndevices = 2')
    assert check_fit(file.jobs, SUPPLIED) == []
    ((spec, program),) = file.jobs
    assert (spec.cpus, spec.ram_bytes, spec.disk_bytes, program.cpus) == (2, 4 << 30, 1 << 30, 2)


def test_jobs_that_could_use_more_devices_get_a_note(home: Path) -> None:
    assert check_fit(read(home, HEAD + "max_devices = 4").jobs, TWO) == ["job 'a' could use 4 devices; there are 2"]
    assert check_fit(read(home, HEAD).jobs, TWO) == []
    mixed = as_cluster(parse_devices("cpu:1x1,1x2", cores=(0, 1, 2), gpus=()))
    (note,) = check_fit(read(home, HEAD + "devices = 2").jobs, mixed)
    assert "job 'a' needs 2 devices" in note


def test_every_key_is_described_in_the_how_to() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "run-jobs.md"
    text = page.read_text(encoding="utf-8")
    assert [key for key in KEYS if f"`{key}`" not in text] == []


def test_reading_needs_no_torch() -> None:
    program = "import sys, carpool.jobs.job_file, carpool.jobs.devices; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told == "False\n"
