"""Measures a daemon under load on loopback: durable submissions per second, list latency, memory over minutes.

For each policy a real `carpool serve` with its executor on two devices, `--queued` jobs in its queue and 50 event
listeners. Each submission is one job, acknowledged when it is on disk. For comparison: SQLite alone on the same disk,
one row per transaction, WAL, synchronous FULL. Exits with 1 below 300 submissions per second with 8 clients or more,
or when lists take more than 100 ms in the 99th percentile.

    python benchmarks/service_load.py                          about three minutes
    python benchmarks/service_load.py --minutes 10             and memory over ten minutes, under the last policy
    python benchmarks/service_load.py --policies fifo          under one policy
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measured
from service.wire import Target, quantile

from carpool.service.auth import TOKEN_FILE, AccessTokens, Principal, Role
from carpool.service.client import Client

LISTENERS = 50
CLIENTS = (1, 8, 32)  # that submit at the same time
MANY, PER_S = 8, 300  # so many clients must get so many submissions acknowledged per second
LIST_MS = 100
Save = Callable[[], Path]

_ENTRY = "import time\n\n\ndef main():\n    time.sleep(1e6)\n"


def main() -> int:
    """Measure and print as it goes; 1 when something that must be reached is not."""
    options = _options()
    results: dict[str, Any] = {"queued": options.queued, "listeners": LISTENERS, "policies": {}}
    with _folder(options) as folder:
        results["sqlite_rows_per_s"] = _sqlite_alone(folder / "alone.sqlite", options.seconds)
    print(f"SQLite alone, a row per commit: {results['sqlite_rows_per_s']:.0f} rows/s", flush=True)

    def save() -> Path:
        return measured.save("service_load", results)

    for policy in options.policies:
        print(f"\npolicy {policy}")
        rows = results["policies"][policy] = {"submissions": [], "memory": []}
        minutes = options.minutes if policy == options.policies[-1] else 0.0
        with _folder(options) as folder:
            _run(policy, folder, rows, minutes, save, options)
    print(f"\n{save()}")
    missed = _missed(results["policies"])
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def _missed(policies: dict[str, Any]) -> list[str]:
    """What must be reached and was not, in words."""
    told = []
    for policy, rows in policies.items():
        for row in rows["submissions"]:
            who = f"{policy}, {row['clients']} clients"
            if row["clients"] >= MANY and row["per_s"] < PER_S:
                told.append(f"{who}: {row['per_s']:.0f} submissions/s, {PER_S} due")
            if row["list_p99_ms"] > LIST_MS:
                told.append(f"{who}: GET /v1/jobs p99 {row['list_p99_ms']:.0f} ms, at most {LIST_MS} due")
    return told


@contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="carpool-load-", dir=options.disk or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    policy: str, folder: Path, rows: dict[str, Any], minutes: float, save: Save, options: argparse.Namespace
) -> None:
    """One daemon from start to end; what it said is shown where something went wrong."""
    token = AccessTokens(folder / "state" / TOKEN_FILE).add(Principal("load", Role.ADMIN), time.time())
    daemon, port = _start(folder, policy)
    target, client = Target(port, token), Client(f"http://127.0.0.1:{port}", token)
    try:
        asyncio.run(_measure(target, client, daemon, folder, rows, minutes, save, options))
    except BaseException:
        print((folder / "daemon.log").read_text(), file=sys.stderr)
        raise
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["fifo", "carpool"])
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long to watch the memory")
    parser.add_argument("--disk", default="", help="a folder on the disk to use")
    return parser.parse_args()


def _sqlite_alone(path: Path, seconds: float) -> float:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE lines (number INTEGER PRIMARY KEY, body TEXT)")
    until, count, body = time.perf_counter() + min(5.0, seconds), 0, "x" * 400
    began = time.perf_counter()
    while time.perf_counter() < until:
        connection.execute("INSERT INTO lines (body) VALUES (?)", (body,))
        count += 1
    took = time.perf_counter() - began
    connection.close()
    return count / took


def _start(folder: Path, policy: str) -> tuple[subprocess.Popen[str], int]:
    """A daemon, and the port it listens at."""
    (folder / "train.py").write_text(_ENTRY, encoding="utf-8")
    environment = {
        **os.environ,
        "CARPOOL_REQUESTS_PER_S": "1000000",
        "CARPOOL_BURST": "1000000",
        "CARPOOL_STREAMS": "1000",
        "CARPOOL_ROOTS": str(folder),
    }
    with (folder / "daemon.log").open("w") as log:
        port = _free_port()
        words = ["--state", str(folder / "state"), "--devices", "cpu:2", "--policy", policy, "--port", str(port)]
        daemon = subprocess.Popen(
            [sys.executable, "-m", "carpool", "serve", *words], env=environment, stdout=log, stderr=log, text=True
        )
    until = time.monotonic() + 120.0
    while "listening at" not in (folder / "daemon.log").read_text():
        if daemon.poll() is not None or time.monotonic() > until:
            daemon.kill()
            raise SystemExit((folder / "daemon.log").read_text())
        time.sleep(0.1)
    return daemon, port


def _free_port() -> int:
    import socket

    with socket.socket() as trying:
        trying.bind(("127.0.0.1", 0))
        return int(trying.getsockname()[1])


async def _measure(
    target: Target,
    client: Client,
    daemon: subprocess.Popen[str],
    folder: Path,
    rows: dict[str, Any],
    minutes: float,
    save: Save,
    options: argparse.Namespace,
) -> None:
    jobs = [{"name": f"q{number}", "command": ["sleep", "1000000"]} for number in range(500)]
    began = time.perf_counter()
    for _ in range(0, options.queued, 500):
        await asyncio.to_thread(client.submit, {"job": jobs}, folder=folder)
    rows["fill_s"] = time.perf_counter() - began
    print(f"{options.queued} jobs queued in {rows['fill_s']:.1f} s", flush=True)
    heard: list[int] = []
    listening = [asyncio.create_task(target.listen(heard)) for _ in range(LISTENERS)]
    one = target.request("POST /v1/jobs", {"folder": str(folder), "job": [{"name": "load", "entry": "train.py:main"}]})
    page = target.request("GET /v1/jobs")
    for clients in CLIENTS:
        await _submissions(target, one, page, clients, options.seconds, daemon.pid, rows)
        save()
    await _memory(target, one, page, daemon.pid, minutes, rows, save)
    rows["heard_bytes_per_listener"] = min(heard)
    for task in listening:
        task.cancel()


async def _submissions(
    target: Target, one: bytes, page: bytes, clients: int, seconds: float, pid: int, rows: dict[str, Any]
) -> None:
    """So many clients submit at the same time, as fast as they are answered, while another lists jobs."""
    until = time.perf_counter() + seconds
    submitted: list[float] = []
    listed: list[float] = []
    began, before_s = time.perf_counter(), _cpu_s(pid)

    def goes_on() -> bool:
        return time.perf_counter() < until

    await asyncio.gather(
        *(target.ask(one, goes_on, submitted) for _ in range(clients)), target.ask(page, goes_on, listed, 0.05)
    )
    row = {
        "clients": clients,
        "per_s": len(submitted) / (time.perf_counter() - began),
        "daemon_cpu_ms": 1e3 * (_cpu_s(pid) - before_s) / max(1, len(submitted)),  # lists and listeners included
        "p50_ms": 1e3 * quantile(submitted, 0.5),
        "p99_ms": 1e3 * quantile(submitted, 0.99),
        "lists": len(listed),
        "list_p50_ms": 1e3 * quantile(listed, 0.5),
        "list_p99_ms": 1e3 * quantile(listed, 0.99),
    }
    rows["submissions"].append(row)
    print(
        f"{clients:3} clients: {row['per_s']:6.0f} submissions/s, p99 {row['p99_ms']:6.1f} ms, "
        f"{row['daemon_cpu_ms']:.1f} ms of CPU each; "
        f"GET /v1/jobs p50 {row['list_p50_ms']:5.1f} ms, p99 {row['list_p99_ms']:6.1f} ms",
        flush=True,
    )


async def _memory(
    target: Target, one: bytes, page: bytes, pid: int, minutes: float, rows: dict[str, Any], save: Save
) -> None:
    """Lists and listeners go on, and a submission every second; what the daemon holds, twice a minute."""
    until = time.perf_counter() + 60.0 * minutes

    def goes_on() -> bool:
        return time.perf_counter() < until

    async def watch() -> None:
        while goes_on():
            rows["memory"].append({"s": 60.0 * minutes - (until - time.perf_counter()), "bytes": _resident(pid)})
            print(f"{rows['memory'][-1]['s']:6.0f} s: {rows['memory'][-1]['bytes'] / 2**20:.1f} MiB", flush=True)
            save()
            await asyncio.sleep(30.0)

    if minutes:
        took: list[float] = []
        await asyncio.gather(watch(), target.ask(page, goes_on, took, 0.1), target.ask(one, goes_on, [], 1.0))
        rows["list_p99_ms_over_minutes"] = 1e3 * quantile(took, 0.99)


def _cpu_s(pid: int) -> float:
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
