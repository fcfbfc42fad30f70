"""``carpool simulate``: results, JSON, report, journal and bad input."""

import json
import time
from pathlib import Path

import pytest

from carpool.cli.main import run
from carpool.cli.verbs.simulate import progress_lines

ROWS = ["job,submit_s,gpus,work_s", "a,0,1,10", "b,1,2,20", "c,2,1,5"]
KEYS = [
    "policy",
    "jobs",
    "finished",
    "avg_jct_s",
    "p50_jct_s",
    "p99_jct_s",
    "avg_wait_s",
    "makespan_s",
    "weighted_jct_s",
    "utilisation",
    "preemptions",
    "resizes",
    "wall_s",
    "cpu_s",
    "jobs_per_cpu_s",
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three jobs for two devices."""
    path = tmp_path / "jobs.csv"
    path.write_text("\n".join(ROWS) + "\n", encoding="utf-8")
    return path


def simulate(trace: Path, *args: str, cluster: str = "1x2xV100") -> int:
    """Run the verb; returns its exit code."""
    return run(["simulate", "--trace", str(trace), "--cluster", cluster, *args])


def test_stdout_is_json_with_the_documented_keys(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--policy", "fifo", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["schema", "version", "trace", "cluster", "seed", "dropped", "results"]
    assert document["schema"] == 1
    (result,) = document["results"]
    assert list(result) == KEYS
    # a runs 0-10, b needs both and runs 10-30, c waits behind it and runs 30-35: jct 10, 29, 33
    assert result["avg_jct_s"] == 24.0
    assert result["avg_wait_s"] == pytest.approx((0 + 9 + 28) / 3)
    assert result["makespan_s"] == 35.0
    assert result["p50_jct_s"] == 29.0
    assert result["utilisation"] == pytest.approx((10 + 40 + 5) / 70)


def test_a_lower_bound_is_reported_if_the_world_has_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job,submit_s,gpus,work_s,model,weight\na,0,2,10,bert,1\nb,0,2,10,bert,3\n", encoding="utf-8")
    page = tmp_path / "page.html"
    assert simulate(path, "--world", "parts", "--policy", "hare", "--json", "--report", str(page)) == 0
    document = json.loads(capsys.readouterr().out)
    bound_s = document["bounds"]["weighted_jct_s"]
    # b first, then a: (3 x 10 + 20) / 4
    assert 12.0 < bound_s <= 12.5 < document["results"][0]["weighted_jct_s"] < 12.6
    assert "lower bound of weighted JCT" in page.read_text(encoding="utf-8")


def test_results_are_in_the_order_of_the_policies(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--policy", "fifo:bypass=true", "--policy", "fifo", "--json") == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["policy"] for result in results] == ["fifo:bypass=true", "fifo"]
    assert [result["avg_jct_s"] for result in results] == [pytest.approx((10 + 29 + 5) / 3), 24.0]


def test_table_names_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--policy", "fifo") == 0
    printed = capsys.readouterr().out
    assert "fifo" in printed
    assert "3/3" in printed


def test_report_is_one_self_contained_page(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert simulate(trace, "--policy", "fifo", "--report", str(page)) == 0
    html = page.read_text(encoding="utf-8")
    assert "fifo" in html
    assert "<script src" not in html


def test_the_seed_comes_from_the_option_then_the_world_then_0(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, journal = tmp_path / "world.toml", tmp_path / "run.jsonl"
    world.write_text("seed = 7\nnoise = 0.3\n[kind.V100]\n", encoding="utf-8")
    for words, seed in ((["--world", str(world)], 7), (["--world", str(world), "--seed", "0"], 0), ([], 0)):
        assert simulate(trace, "--json", "--journal", str(journal), *words) == 0
        assert json.loads(capsys.readouterr().out)["seed"] == seed
        assert json.loads(journal.read_text(encoding="utf-8").splitlines()[0])["seed"] == seed


def test_same_trace_policy_and_seed_give_the_same_journal(trace: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    for path in (first, second):
        assert simulate(trace, "--policy", "fifo", "--journal", str(path), "--failures", "job_mtbf_s=20") in (0, 1)
    assert first.read_bytes() == second.read_bytes()


def test_explain_reads_the_journal(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "run.jsonl"
    simulate(trace, "--policy", "fifo", "--journal", str(journal))
    capsys.readouterr()
    assert run(["explain", "b", "--journal", str(journal), "--json"]) == 0
    story = json.loads(capsys.readouterr().out)["story"]
    assert [line["at_s"] for line in story] == [1.0, 10.0, 10.0, 30.0]
    assert "2 devices" in story[0]["what"]
    assert "0–1" in story[1]["what"]
    assert "finished" in story[-1]["what"]
    assert run(["explain", "nobody", "--journal", str(journal)]) == 2


def test_jobs_wait_for_the_next_round(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--policy", "fifo", "--rounds", "20", "--json") == 0
    # a starts at 0; b at the round of 20, until 40; c at 40
    assert json.loads(capsys.readouterr().out)["results"][0]["makespan_s"] == 45.0


def test_a_job_that_never_finishes_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job,submit_s,gpus,work_s\na,0,2,10\n", encoding="utf-8")
    lost = tmp_path / "failures.csv"
    lost.write_text("at_s,event,target\n5,node-lost,n0\n", encoding="utf-8")
    assert simulate(path, "--failures", str(lost)) == 1
    assert "1 jobs never finished" in capsys.readouterr().err


BAD = [
    (["--policy", "fifa"], ["'fifa'", "Did you mean fifo"]),
    (["--policy", "fifo:bypas=true"], ["'bypas'", "bypass"]),
    (["--policy", "fifo:bypass=maybe"], ["'maybe'"]),
    (["--policy", "fifo", "--policy", "fifo"], ["'fifo'", "twice"]),
    (["--policy", "./nowhere.py:Mine"], ["nowhere.py"]),
    (["--rounds", "-1"], ["--rounds is -1", "0.001"]),
    (["--world", "plane"], ["'plane'", "plain"]),
    (["--world", "gavel"], ["gavel"]),
    (["--failures", "node_mtbf=3"], ["'node_mtbf'", "node_mtbf_s"]),
    (["--failures", "nowhere.csv"], ["nowhere.csv"]),
    (["--format", "filly"], ["'filly'", "philly"]),
    (["--policy", "fifo", "--policy", "sjf", "--journal", "x"], ["--journal", "one --policy"]),
]


@pytest.mark.parametrize(("args", "expected"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_options_get_exit_code_2_and_no_traceback(
    trace: Path, args: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(trace, *args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert all(part in captured.err for part in expected), captured.err


BAD_CLUSTERS = [
    ("8xV100", "NODESxDEVICESxKIND"),
    ("0x8xV100", "0x8xV100"),
    ("", "NODESxDEVICESxKIND"),
    ("99999999x99999xV100", "99999999x99999xV100"),
    ("nowhere.toml", "nowhere.toml"),
]


@pytest.mark.parametrize(("cluster", "expected"), BAD_CLUSTERS)
def test_bad_clusters(trace: Path, cluster: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, cluster=cluster) == 2
    assert expected in capsys.readouterr().err


BAD_TRACES = [
    ("job,submit_s,gpus\na,0,1\n", ["work_s"]),
    ("job,submit_s,gpus,work_s\na,-1,1,5\n", ["row 2", "-1"]),
    ("job,submit_s,gpus,work_s\na,0,9,5\n", ["'a'", "9 devices", "2"]),
    ("job,submit_s,gpus,work_s\na,0,1,5\na,1,1,5\n", ["row 3", "'a'"]),
    ("job,submit_s,gpus,work_s\na,0,1,5\nb,1\n", ["row 3"]),
    ("job,submit_s,gpus,work_s\n", ["bad.csv"]),
    ("", ["empty"]),
    (b"job,submit_s,gpus,work_s\n\xff\xfe,0,1,5\n", ["UTF-8"]),
]


@pytest.mark.parametrize(("content", "expected"), BAD_TRACES, ids=range(len(BAD_TRACES)))
def test_bad_traces_name_file_row_and_value_and_leave_no_output(
    tmp_path: Path, content: str | bytes, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "bad.csv", tmp_path / "out.html"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert simulate(path, "--report", str(page)) == 2
    error = capsys.readouterr().err
    assert "bad.csv" in error
    assert "Traceback" not in error
    assert all(part in error for part in expected), error
    assert not page.exists()


def test_skip_invalid_counts_dropped_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("job,submit_s,gpus,work_s\na,0,1,5\nb,-1,1,5\nc,0,9,5\n", encoding="utf-8")
    assert simulate(path, "--skip-invalid", "--json") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err.count("carpool: dropped 1 row:") == 2, "stderr reports them beside the JSON"
    assert sum(document["dropped"].values()) == 2
    assert document["results"][0]["jobs"] == 1


def test_unwritable_report_is_an_input_error(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(trace, "--report", str(tmp_path / "no" / "such" / "out.html")) == 2
    assert "out.html" in capsys.readouterr().err


FAULTY_POLICY = """
from dataclasses import dataclass
from carpool.core.policy import Plan, Policy

@dataclass(frozen=True)
class Faulty(Policy):
    def plan(self, view):
        return 1 / 0
"""


@pytest.mark.parametrize("also", [[], ["--policy", "fifo"]])
def test_an_error_in_a_policy_file_names_its_line(
    trace: Path, tmp_path: Path, also: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FAULTY_POLICY, encoding="utf-8")
    assert simulate(trace, "--policy", f"{path}:Faulty", *also) == 2
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error
    assert "mine.py, line 8" in error
    assert run(["simulate", "--trace", str(trace), "--cluster", "1x2xV100", "--policy", f"{path}:Fault"]) == 2
    assert "Did you mean Faulty" in capsys.readouterr().err


def test_two_options_may_not_name_the_same_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_text(encoding="utf-8")
    assert simulate(trace, "--journal", str(trace)) == 2
    assert trace.read_text(encoding="utf-8") == before
    both = str(tmp_path / "x.html")
    assert simulate(trace, "--report", both, "--journal", both) == 2
    assert "--report" in capsys.readouterr().err


def test_a_trace_in_steps_needs_a_world_with_step_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.trace"
    path.write_text("ResNet-18 (batch size 16)\tpython x\t.\t-n\t1\t1000\t1\t1\t-1.0\t0\n", encoding="utf-8")
    assert simulate(path, "--format", "gavel") == 2
    assert "steps" in capsys.readouterr().err


def test_rounds_continue_while_a_node_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, failures = tmp_path / "one.csv", tmp_path / "f.csv"
    path.write_text("job,submit_s,gpus,work_s\na,0,2,10\n", encoding="utf-8")
    failures.write_text("at_s,event,target\n5,node-lost,n0\n20000,node-back,n0\n", encoding="utf-8")
    assert simulate(path, "--failures", str(failures), "--rounds", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["finished"] == 1


def test_rounds_terminate_at_large_times(tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    path.write_text("job,submit_s,gpus,work_s\na,10000000.05,1,0.31\n", encoding="utf-8")
    assert simulate(path, "--rounds", "0.1") == 0


PRINTING_POLICY = FAULTY_POLICY.replace("return 1 / 0", "print('noise'); return Plan.NOTHING")


@pytest.mark.parametrize("also", [[], ["--policy", "fifo"]])
def test_output_of_a_policy_stays_out_of_the_json(
    trace: Path, tmp_path: Path, also: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PRINTING_POLICY, encoding="utf-8")
    assert simulate(trace, "--json", "--policy", f"{path}:Faulty", *also) == 1
    json.loads(capfd.readouterr().out)


def test_progress_is_written_without_a_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_lines, "__defaults__", (time.monotonic, 0.0))
    assert simulate(trace, "--policy", "fifo", "--json") == 0
    assert "jobs submitted: fifo" in capsys.readouterr().err


def test_progress_without_a_terminal_is_a_line_every_few_seconds() -> None:
    now, lines = 0.0, list[str]()
    report = progress_lines(lines.append, clock=lambda: now, every_s=5.0)
    for second in range(12):
        now = float(second)
        report("carpool", second / 20)
        report("fifo", second / 12)
    assert lines == ["jobs submitted: carpool 25%, fifo 33%", "jobs submitted: carpool 50%, fifo 75%"]
