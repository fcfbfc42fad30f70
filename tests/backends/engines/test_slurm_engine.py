"""Jobs over two nodes of a real Slurm: the weights of one device, also when the time limit ends an allocation."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.backends.engines.slurm_engine import find_allocation, reachable_addresses, run_slurm
from carpool.core.errors import InputError
from carpool.jobs.job_file import ListedJob, read_jobs
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import outcomes, read
from tests.support.slurm_rig import SlurmCluster, missing_programs, slurm_cluster

EXAMPLES = Path(__file__).parents[3] / "examples"
SPAN = "exact = true\ndevices = 2\nmax_nodes = 2\n"

WAITING = """
import os
import time
from pathlib import Path

import torch
from torch import nn

import carpool
from carpool.runtime.data.datasets import TensorData


def dawdle(path):
    def after_update(model, step):
        os.write(1, f"step {step}\\n".encode())  # whole: both devices write to one log
        if not Path(path).exists():
            time.sleep(0.5)

    return after_update


def training(path):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        dataset=TensorData(torch.randn(64, 8), torch.randn(64, 1)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        batch_size=16,
        stop=carpool.Stop(steps=150),
        after_update=dawdle(path),
    )
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if missing := missing_programs():
        pytest.skip(f"no Slurm here: {', '.join(missing)} not installed")
    if os.geteuid() != 0:
        pytest.skip("slurmctld and slurmd run as root here, and this is not root")
    with slurm_cluster() as running:
        yield running


def submit(cluster: SlurmCluster, jobs: Path, *options: str) -> str:
    """Submit a job file to both nodes; the number of the batch job."""
    words = ("--nodes", "2", "--run=--devices", "--run=cpu:1", "--run=--policy", "--run=fifo", *options)
    printed = cluster.run(sys.executable, "-m", "carpool", "slurm", str(jobs), *words)
    return printed.split()[-1]


def state_of(jobs: Path) -> Path:
    return jobs.parent / ".carpool" / "slurm" / jobs.stem


def digest_of(folder: Path, job: ListedJob) -> str:
    training = load_training(job.program.entry, dict(job.program.args), folder=folder)
    return plain_loop(training, shards=job.program.shards).digest


def explain(cluster: SlurmCluster, jobs: Path) -> str:
    outputs = [*jobs.parent.glob("*.out"), *state_of(jobs).glob("*.log"), *cluster.folder.glob("*.log")]
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in outputs)


def check_outcomes(jobs: Path) -> None:
    found = outcomes(read(state_of(jobs)))
    listed = read_jobs(jobs).jobs
    assert {job.spec.id: found[job.spec.id].digest for job in listed} == {
        job.spec.id: digest_of(jobs.parent, job) for job in listed
    }


def test_examples_over_two_nodes_have_the_weights_of_one_device(cluster: SlurmCluster, tmp_path: Path) -> None:
    for name in ("digits.py", "ncf.py"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    jobs = tmp_path / "jobs.toml"
    tables = (("cnn", "digits.py:cnn", "epochs = 2"), ("ncf", "ncf.py:ncf", "epochs = 1"))
    text = [f'[[job]]\nname = "{n}"\nentry = "{entry}"\nargs = {{ {args} }}\n{SPAN}' for n, entry, args in tables]
    jobs.write_text("\n".join(text), encoding="utf-8")
    number = submit(cluster, jobs, "--time", "10", f"--sbatch=--output={tmp_path}/%j.out")
    cluster.wait_until(lambda: cluster.field(number, "JobState") in ("COMPLETED", "FAILED"))
    assert cluster.field(number, "JobState") == "COMPLETED", explain(cluster, jobs)
    check_outcomes(jobs)
    output = (tmp_path / f"{number}.out").read_text(encoding="utf-8")
    assert "node-0 is node1; node-1 is node2" in output
    assert not list(state_of(jobs).glob("agents-*")), "tokens are deleted with the run"


@pytest.mark.waits
def test_the_time_limit_ends_an_allocation_and_the_next_one_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING, encoding="utf-8")
    go = tmp_path / "go"
    jobs = tmp_path / "jobs.toml"
    table = f'[[job]]\nname = "wide"\nentry = "waiting.py:training"\nargs = {{ path = "{go}" }}\n{SPAN}'
    jobs.write_text(table, encoding="utf-8")
    log = state_of(jobs) / "jobs" / "wide" / "log"
    began = time.monotonic()
    number = submit(cluster, jobs, "--time", "30", "--stop-before", "120", f"--sbatch=--output={tmp_path}/%j.out")
    cluster.wait_until(lambda: log.is_file() and "step 3" in log.read_text(encoding="utf-8"))
    limit_minutes = 2 + int((time.monotonic() - began) // 60)  # within the two minutes in which Slurm signals
    cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={limit_minutes}")
    cluster.wait_until(lambda: cluster.field(number, "Restarts") == "1")
    before = set(log.read_text(encoding="utf-8").splitlines())
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    go.touch()
    cluster.wait_until(lambda: cluster.field(number, "JobState") in ("COMPLETED", "FAILED"))
    assert cluster.field(number, "JobState") == "COMPLETED", explain(cluster, jobs)
    check_outcomes(jobs)
    steps = log.read_text(encoding="utf-8").splitlines()
    assert {"step 3"} <= before < {f"step {step}" for step in range(1, 151)}, "the limit came between"
    assert Counter(steps) == {f"step {step}": 2 for step in range(1, 151)}, "each of two devices made each step once"


def test_outside_of_an_allocation_the_engine_says_so() -> None:
    with pytest.raises(InputError, match="outside of a Slurm allocation"):
        find_allocation({})


def test_addresses_are_those_that_other_nodes_can_reach() -> None:
    assert reachable_addresses(["127.0.0.1", "127.0.0.1"]) == ["127.0.0.1", "127.0.0.1"]
    with pytest.raises(InputError, match="cannot be resolved"):
        reachable_addresses(["no-such-node.invalid"])


def test_a_slurm_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with pytest.raises(InputError, match=r"scontrol show node did not answer within 0\.1 s"):
        run_slurm("scontrol", "show", "node", environment=environment, limit_s=0.1)


@pytest.mark.parametrize(
    ("script", "quoted"),
    [("echo bad partition >&2", "bad partition"), ("echo no such node", "no such node"), ("true", "exit code 1")],
)
def test_a_command_of_slurm_that_fails_is_quoted(script: str, quoted: str, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{script}; exit 1\n", encoding="ascii")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(InputError, match=f"sbatch job failed: {quoted}"):
        run_slurm("sbatch", "job", environment={"PATH": str(tmp_path)})
    with pytest.raises(InputError, match="squeue is not installed here"):
        run_slurm("squeue", environment={"PATH": str(tmp_path)})
