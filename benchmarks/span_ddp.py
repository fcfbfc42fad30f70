"""Compares a job across two machines with hand-written DistributedDataParallel on the same link.

    python benchmarks/span_ddp.py [--steps 60] [--repeats 3] [--width 512] [--rate 1gbit] [--realtime] [--exact]
        [--idle 0.8]

Needs root: two network namespaces, joined by a veth pair (limited by `tc tbf` with --rate), stand for two machines of
one core each. Carpool runs an agent in each and the job with `max_nodes = 2` in default mode; DDP runs one process in
each with gloo. Both train the same multilayer perceptron with the same batch and one thread, by turns. The step time is
the median from step 10 on. With --realtime the training processes of both have real-time priority: other load on the
machine then disturbs neither. --exact measures carpool's exact mode. --idle lets each run start only when so much of
all cores was idle for two seconds: on a busy machine the two are slowed down unequally. Exits with 1 if carpool's is
more than 1.15 times DDP's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import save

NAMES = ("carpool-a", "carpool-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOKEN = "0123456789abcdef0123456789abcdef"
WARM, MOST = 10, 1.15
PATIENCE_S = 400.0

TRAINING = """
import os
import time

import torch
from torch import nn

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training

if os.environ.get("SPAN_REALTIME"):
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def network(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def data(width):
    chance = torch.Generator().manual_seed(1)
    return torch.randn(1024, width, generator=chance), torch.randint(0, 10, (1024,), generator=chance)


def tell(model, step):
    print("at", os.getpid(), step, time.monotonic(), flush=True)


def training(width, steps, batch):
    model = network(width)
    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        dataset=TensorData(*data(width)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch,
        stop=Stop(steps=steps),
        after_update=tell,
    )
"""

DDP = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spanned import data, network, tell

rank, width, steps, batch = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29500", rank=rank, world_size=2)
model = DistributedDataParallel(network(width))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = data(width)
for step in range(1, steps + 1):
    chosen = torch.randint(0, 1024, (batch // 2,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
    optimizer.step()
    tell(model, step)
dist.destroy_process_group()
"""


def run(*words: object) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(rate: str) -> Iterator[None]:
    """Two network namespaces with a link between them."""
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "cp0", "netns", NAMES[0], "type", "veth", "peer", "name", "cp1", "netns", NAMES[1])
        for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"cp{number}")
            run("ip", "-n", name, "link", "set", f"cp{number}", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            if rate:
                limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
                run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", f"cp{number}", "root", "tbf", *limit)
        yield
    finally:
        remove_namespaces()


def remove_namespaces() -> None:
    """Kill what still runs in the namespaces, and delete them."""
    for name in NAMES:
        listed = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True).stdout
        for pid in map(int, listed.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def there(number: int) -> list[str]:
    """The beginning of a command on one of the machines: a namespace and a core."""
    cores = sorted(os.sched_getaffinity(0))
    return ["ip", "netns", "exec", NAMES[number], "taskset", "-c", str(cores[number % len(cores)])]


def step_s(log: str) -> float:
    """The median time of a step of the first process that printed its times."""
    lines = [
        words for line in log.splitlines() if len(words := line.split()) == 4 and words[0] == "at"
    ]  # some are mixed
    own = {int(step): float(at) for _, process, step, at in lines if process == lines[0][1]}
    times = [own[step] for step in sorted(own) if step >= WARM]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def busy_s() -> float:
    """CPU time that all cores have spent in processes since the machine started."""
    words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return sum(map(int, words[1:4])) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(share: float) -> None:
    """Wait until so much of all cores was idle for a while."""
    while share:
        began, before = time.monotonic(), busy_s()
        time.sleep(2.0)
        if busy_s() - before <= (1.0 - share) * (time.monotonic() - began) * (os.cpu_count() or 1):
            return


class Contest:
    """Both ways in a folder that holds the training."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._sizes = {"width": options.width, "steps": options.steps, "batch": options.batch}
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "SPAN_REALTIME": "1" if options.realtime else ""}
        self._runs = 0
        (folder / "spanned.py").write_text(TRAINING, encoding="utf-8")
        (folder / "ddp.py").write_text(DDP, encoding="utf-8")
        args = ", ".join(f"{name} = {value}" for name, value in self._sizes.items())
        job = (
            f'[[job]]\nname = "wide"\nentry = "spanned.py:training"\nargs = {{ {args} }}\ndevices = 2\nmax_nodes = 2\n'
        )
        job += f'environment = {{ SPAN_REALTIME = "{self._environment["SPAN_REALTIME"]}" }}\n'
        job += "exact = true\n" if options.exact else ""
        (folder / "jobs.toml").write_text(job, encoding="utf-8")

    @contextlib.contextmanager
    def agents(self) -> Iterator[None]:
        """An agent on each machine, and a hosts file that names them."""
        token = self._folder.parent / "fleet.token"
        token.touch(mode=0o600)
        token.write_text(TOKEN, encoding="ascii")
        tables, started = [], []
        try:
            for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
                words = ["--listen", f"{address}:7638", "--token-file", str(token), "--devices", "cpu:1x1"]
                state = ["--state", str(self._folder.parent / name)]
                command = [*there(number), sys.executable, "-m", "carpool", "agent", *words, *state]
                agent = subprocess.Popen(command, env=self._environment, stderr=subprocess.PIPE, text=True)
                started.append(agent)
                assert agent.stderr is not None and "listening" in agent.stderr.readline()  # noqa: PT018
                tables.append(f'[[host]]\nname = "{name}"\naddress = "{address}"\ntoken_file = "{token}"\n')
            (self._folder.parent / "lab.toml").write_text("\n".join(tables), encoding="utf-8")
            yield
        finally:
            for agent in started:
                agent.terminate()
                agent.wait()

    def carpool(self) -> float:
        self._runs += 1
        state = self._folder.parent / f"run-{self._runs}"
        words = ["--engine", "hosts", "--hosts", str(self._folder.parent / "lab.toml"), "--policy", "fifo"]
        command = [*there(0), sys.executable, "-m", "carpool", "run", str(self._folder / "jobs.toml"), *words]
        command += ["--state", str(state)]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        found = list(state.rglob("jobs/wide/log"))
        if done.returncode or not found:
            raise RuntimeError(done.stderr[-2000:])
        return step_s(found[0].read_text(encoding="utf-8"))

    def ddp(self) -> float:
        sizes = [str(value) for value in self._sizes.values()]
        started = []
        for rank in (0, 1):
            environment = {**self._environment, "GLOO_SOCKET_IFNAME": f"cp{rank}"}
            command = [*there(rank), sys.executable, "ddp.py", str(rank), *sizes]
            started.append(
                subprocess.Popen(command, cwd=self._folder, env=environment, stdout=subprocess.PIPE, text=True)
            )
        first, _ = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
        return step_s(first)


def main() -> int:
    """Measure both ways and save the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", default="", help="of the link, for tc tbf; default: no limit")
    parser.add_argument("--realtime", action="store_true", help="real-time priority for both")
    parser.add_argument("--idle", type=float, default=0.0, help="share of the cores that has to be idle before a run")
    parser.add_argument("--exact", action="store_true", help="carpool's exact mode")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are deleted
    results: dict[str, Any] = {"asked": MOST, **vars(options), "carpool_step_s": [], "ddp_step_s": []}
    with tempfile.TemporaryDirectory() as parent, namespaces(options.rate):
        (Path(parent) / "code").mkdir()
        contest = Contest(Path(parent) / "code", options)
        with contest.agents():
            for _ in range(options.repeats):
                wait_until_idle(options.idle)
                print("DDP", flush=True)
                results["ddp_step_s"].append(contest.ddp())
                wait_until_idle(options.idle)
                print("carpool", flush=True)
                results["carpool_step_s"].append(contest.carpool())
                pairs = zip(results["carpool_step_s"], results["ddp_step_s"], strict=True)
                results["ratio"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
                save("span_ddp", results)
                print(f"ratio {results['ratio']}: {results['carpool_step_s']} {results['ddp_step_s']}", flush=True)
    return 0 if results["ratio"] <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
