"""Run the benchmarks behind docs/results.md, and write their figures into the pages.

    python tools/results.py list                     every benchmark with its kind, result files and minutes
    python tools/results.py run [--kind simulated,cpu] [--only policies,hare] [--data DIR]
    python tools/results.py update [--check]         only write the stored figures into the pages

A figure keeps its place, its digits and its sign; words around it are not changed, so read the diff afterwards.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.docs import federated_figures, live_figures, simulated_figures  # noqa: E402
from tests.docs.figures import NUMBER, Check, agrees  # noqa: E402

SOURCES = (*simulated_figures.SOURCES, *live_figures.SOURCES, *federated_figures.SOURCES)


class Benchmark(NamedTuple):
    """One command, the result files that it writes, and about how long it takes on the machine of its kind."""

    command: str
    results: str
    minutes: float
    needs_data: bool = False


KINDS: dict[str, tuple[Benchmark, ...]] = {
    "simulated": (
        Benchmark("replay_philly.py", "replay_philly", 4, needs_data=True),
        Benchmark("replay_gavel.py", "replay_gavel", 1, needs_data=True),
        Benchmark("replay_pollux.py", "replay_pollux", 2, needs_data=True),
        Benchmark("policies.py", "policies", 12, needs_data=True),
        Benchmark("scale.py", "scale", 3),
        Benchmark("oracles.py", "oracles", 1),
        Benchmark("decision_time.py", "decision_time", 5),
        Benchmark("lab_queue.py", "lab_queue", 6),
        Benchmark("sharing_prior.py", "sharing_prior", 2),
        Benchmark("sharing_mixes.py", "sharing_mixes sharing_mixes_10", 5),
        Benchmark("interference.py", "interference", 5),
        Benchmark("share_model.py", "share_model", 2),
        Benchmark("competitive.py", "competitive", 5),
        Benchmark("hare.py", "hare", 30),
        Benchmark("loss_phase.py", "loss_phase", 10),
        Benchmark("iadeep.py", "iadeep iadeep_bounds", 30, needs_data=True),
        Benchmark("throughput.py", "throughput", 10, needs_data=True),
        Benchmark("wired.py", "wired", 10),
    ),
    "cpu": (
        Benchmark("runtime_exact.py", "runtime_exact", 10),
        Benchmark("runtime_faults.py --faults 200 --jobs 20 --seed 0", "runtime_faults", 4),
        Benchmark("service_crashes.py --seconds 3", "service_crashes", 2),
        Benchmark("fleet_faults.py", "fleet_faults", 6),
        Benchmark("fleet_restarts.py", "fleet_restarts", 6),
        Benchmark("service_power_loss.py", "service_power_loss", 20),
        Benchmark("service_load.py", "service_load", 4),
        Benchmark("service_cold_start.py", "service_cold_start", 1),
        Benchmark("dashboard.py", "dashboard", 2),
        Benchmark("runtime_resize.py", "runtime_resize", 3),
        Benchmark("runtime_overhead.py", "runtime_overhead", 8),
        Benchmark("runtime_ddp.py", "runtime_ddp", 10),
        Benchmark("span_ddp.py --repeats 5", "span_ddp", 2),
        Benchmark("runtime_unlike.py", "runtime_unlike", 10),
        Benchmark("runtime_updates.py", "runtime_updates", 5),
        Benchmark("runtime_bits.py", "runtime_bits", 2),
        Benchmark("runtime_memory.py", "runtime_memory", 3),
        Benchmark("live_vs_simulated.py", "live_vs_simulated", 10),
        Benchmark("live_policies.py", "live_policies", 10),
        Benchmark("halving.py", "halving", 5),
        Benchmark("start_up.py", "start_up_cpu", 3),
        Benchmark("federated.py --save", "federated", 5),
        Benchmark("federated_transports.py --save", "federated_transports", 15),
        Benchmark("federated_flower.py --save", "federated_flower", 8),
        Benchmark("federated_scale.py --save", "federated_scale", 1),
    ),
    "h200": (
        Benchmark("gpu_runtime.py --at-once 5", "gpu_runtime", 5),
        Benchmark("gpu_faults.py --at-once --steps 150", "gpu_faults", 4),
        Benchmark("gpu_graphs.py --processes 6", "gpu_graphs", 6),
        Benchmark("gpu_sharing.py --stages mixes,live --seconds 0.5", "gpu_sharing", 9),
        Benchmark("gpu_switching.py", "gpu_switching", 6),
        Benchmark("gpu_memory.py --cases eight,two --reference", "gpu_memory", 6),
        Benchmark("gpu_warm.py", "gpu_warm", 4),
        Benchmark("gpu_colocation.py", "gpu_colocation", 30),
        Benchmark("federated_gpu.py --mixes R50", "federated_gpu", 9),
        Benchmark("runtime_overhead.py --device cuda --births 2 --rounds 4", "runtime_overhead_gpu", 6),
    ),
}


def main(arguments: list[str]) -> int:
    """Carry out one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    run = commands.add_parser("run")
    run.add_argument("--kind", default="simulated,cpu", help="of: " + ", ".join(KINDS))
    run.add_argument("--only", default="", help="result files, separated by commas")
    run.add_argument("--data", default="", help="folder with the public traces and tables")
    update = commands.add_parser("update")
    update.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a figure differs")
    given = parser.parse_args(arguments)
    if given.command == "list":
        return show_list()
    if given.command == "update":
        return update_pages(write=not given.check)
    if unknown := set(given.kind.split(",")) - set(KINDS):
        parser.error(f"--kind {', '.join(sorted(unknown))}: it is one of {', '.join(KINDS)}")
    failed = [each.command for each in chosen(given.kind, given.only) if not measure(each, given.data)]
    update_pages(write=True)
    print(
        f"failed: {', '.join(failed)}" if failed else "all done: read the changes with git diff docs benchmarks/results"
    )
    return 1 if failed else 0


def show_list() -> int:
    """Print every benchmark."""
    for kind, benchmarks in KINDS.items():
        for each in benchmarks:
            print(f"{kind:<10} {each.minutes:>4.0f} min  {each.command:<58} {each.results}")
    return 0


def chosen(kinds: str, only: str) -> Iterator[Benchmark]:
    """The benchmarks of these kinds, or those of them that write one of the given result files."""
    wanted = set(filter(None, only.split(",")))
    for kind in kinds.split(","):
        yield from (each for each in KINDS[kind] if not wanted or wanted & set(each.results.split()))


def measure(benchmark: Benchmark, data: str) -> bool:
    """Run one benchmark; whether it ended well. It writes its result files itself."""
    script, *options = benchmark.command.split()
    if benchmark.needs_data and data:
        options += ["--data", data]
    print(f"== {benchmark.command} (about {benchmark.minutes:.0f} min)", flush=True)
    started = time.monotonic()
    done = subprocess.run([sys.executable, f"benchmarks/{script}", *options], cwd=ROOT, check=False)
    print(f"== {benchmark.command}: exit code {done.returncode} after {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode == 0


def update_pages(*, write: bool) -> int:
    """Write the figures of all result files into the pages; 1 if one differs and nothing is written."""
    changed = 0
    for check in (each for source in SOURCES for each in source()):
        page = ROOT / check[0].partition("#")[0]
        text = page.read_text(encoding="utf-8")
        if (replaced := with_figures(text, check)) != text:
            changed += 1
            if write:
                page.write_text(replaced, encoding="utf-8")
            else:
                print(f"{check[0]}: {check[1]} is now {check[2]}")
    print(f"{changed} statements {'updated' if write else 'differ'}")
    return 1 if changed and not write else 0


def with_figures(text: str, check: Check) -> str:
    """The page with the numbers of one statement as measured; unchanged where they agree already."""
    name, template, values = check
    heading = name.partition("#")[2]
    start, end = section(text, heading) if heading else (0, len(text))
    pieces = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", piece)) for piece in template.split("{}")]
    found = re.search(f"(?:^|(?<=[^\\d.,])){NUMBER.join(pieces)}", text[start:end])
    if found is None:
        return text
    parts, last = [text[: start + found.start()]], start + found.start()
    for number, value in enumerate(values, start=1):
        shown = found[number]
        new = shown if value is None or agrees(shown, value) else like(shown, value)
        parts += [text[last : start + found.start(number)], new]
        last = start + found.end(number)
    return "".join(parts) + text[last:]


def section(text: str, heading: str) -> tuple[int, int]:
    """Where the section with this heading begins and ends."""
    found = re.search(rf"^#+ {re.escape(heading)}$.*?(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return found.span() if found else (0, 0)


def like(shown: str, value: float) -> str:
    """The value with the digits, thousands separators and sign of the number that was shown."""
    digits = len(shown.partition(".")[2])
    sign = "+" if shown.startswith("+") else ""
    comma = "," if "," in shown or (abs(value) >= 10_000 and not digits) else ""
    return format(value, f"{sign}{comma}.{digits}f").replace("-", "−")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
