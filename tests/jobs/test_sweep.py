"""Sweeps: grids, random draws, command templates and the --sweep option."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.journal import spec_from_json, spec_to_json
from carpool.core.model import HalvingRule
from carpool.core.units import format_params
from carpool.jobs.job_file import ListedJob, parse_jobs
from carpool.jobs.program import Program
from carpool.jobs.sweep import MAX_TRIALS, Sweep, parse_sweep_options


def trials(given: dict[str, Any]) -> list[dict[str, Any]]:
    return list(Sweep.read(given, "sweep").trials())


def jobs(tmp_path: Path, **table: Any) -> tuple[ListedJob, ...]:
    return parse_jobs({"job": [{"name": "a", **table}]}, tmp_path, "jobs.toml")


def test_a_grid_has_every_combination_in_order() -> None:
    assert trials({"lr": [1, 2], "width": [4, 8]}) == [
        {"lr": 1, "width": 4},
        {"lr": 1, "width": 8},
        {"lr": 2, "width": 4},
        {"lr": 2, "width": 8},
    ]


def test_samples_of_a_grid_do_not_repeat_and_depend_on_the_seed() -> None:
    grid = {"a": list(range(10)), "b": list(range(10)), "samples": 30}
    drawn = trials({**grid, "seed": 1})
    assert len({(each["a"], each["b"]) for each in drawn}) == 30
    assert drawn == trials({**grid, "seed": 1})
    assert drawn != trials({**grid, "seed": 2})
    assert len(trials({"a": [1, 2], "samples": 9})) == 2


@given(st.integers(0, 1000), st.booleans())
def test_drawn_numbers_stay_in_their_range(seed: int, is_log: bool) -> None:
    ranges = {"x": {"min": 1e-4, "max": 0.1, "log": is_log}, "n": {"min": 1, "max": 5, "log": is_log}}
    for values in trials({**ranges, "c": ["u", "v"], "samples": 5, "seed": seed}):
        assert 1e-4 <= values["x"] <= 0.1
        assert values["n"] in {1, 2, 3, 4, 5}
        assert values["c"] in {"u", "v"}


def test_a_logarithmic_range_draws_every_decade() -> None:
    drawn = [values["lr"] for values in trials({"lr": {"min": 1e-4, "max": 0.1, "log": True}, "samples": 300})]
    assert all(sum(low <= lr < 10 * low for lr in drawn) > 60 for low in (1e-4, 1e-3, 1e-2))


def test_a_parameter_may_have_the_name_of_an_option() -> None:
    assert trials({"seed": [1, 2], "samples": [8]}) == [{"seed": 1, "samples": 8}, {"seed": 2, "samples": 8}]
    assert trials({"halving": {"min": 1, "max": 2}, "samples": 1})[0].keys() == {"halving"}


@pytest.mark.parametrize(
    ("sweep", "parts"),
    [
        ({"lr": {"min": 0.1, "max": 0.2}}, ["lr", "range", "samples"]),
        ({"lr": {"min": 0.2, "max": 0.1}, "samples": 2}, ["min is 0.2", "max is 0.1"]),
        ({"lr": {"min": 0, "max": 0.1, "log": True}, "samples": 2}, ["min is 0", "log"]),
        ({"lr": {"min": 0.1, "max": 0.2, "steps": 3}, "samples": 2}, ["unknown key 'steps'"]),
        ({"lr": []}, ["sweep.lr is []"]),
        ({"samples": 3}, ["no parameter"]),
        ({"lr": [1], "samples": 0}, ["samples is 0"]),
        ({"a": list(range(200)), "b": list(range(200))}, ["40000", str(MAX_TRIALS)]),
        ({"lr": [1], "halving": {"metric": "acc"}}, ["min_steps"]),
        ({"lr": [1], "halving": {"min_steps": 5}}, ["metric"]),
        ({"lr": [1], "halving": {"metric": "acc", "min_steps": 5, "mode": "best"}}, ["mode is 'best'"]),
        ({"lr": [1], "halving": {"metric": "acc", "min_steps": 5, "eta": 1}}, ["eta is 1"]),
    ],
)
def test_mistakes_are_reported(sweep: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Sweep.read(sweep, "jobs.toml: job 'a': sweep")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_values_stand_in_the_command_and_its_environment(tmp_path: Path) -> None:
    made = jobs(
        tmp_path,
        command=["echo", "--lr", "{lr}", "--out=runs/{job}/{lr}", "{{literal}}", "x{net}"],
        environment={"DEEP": "{deep}"},
        metrics="runs/{job}/events*",
        sweep={"lr": [0.1, 1e-05], "net": ["cnn"], "deep": [True]},
    )
    assert [program.command for _, program in made] == [
        ("echo", "--lr", "0.1", "--out=runs/a-1/0.1", "{literal}", "xcnn"),
        ("echo", "--lr", "1e-05", "--out=runs/a-2/1e-05", "{literal}", "xcnn"),
    ]
    assert made[0].program.environment == {"DEEP": "true"}
    assert made[1].program.metrics == ("runs/a-2/events*",)
    assert made[1].spec.params == (("lr", 1e-05), ("net", "cnn"), ("deep", True))
    assert {spec.array for spec, _ in made} == {"a"}


def test_braces_of_a_command_without_a_sweep_stay(tmp_path: Path) -> None:
    ((spec, program),) = jobs(tmp_path, command=["echo", "{lr} {{x}}"])
    assert program.command == ("echo", "{lr} {{x}}")
    assert spec.params == ()


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (["echo", "{lr}", "{depth}"], ["{depth}", "Known: job, lr"]),
        (["echo", "fixed"], ["sweep.lr", "not used"]),
        (["echo", "{lr}", "a{b"], ["single '{'"]),
        (["echo", "{lr}", '{"a": 1}'], ["not a parameter", "{{"]),
    ],
)
def test_wrong_placeholders_are_reported(tmp_path: Path, command: list[str], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        jobs(tmp_path, command=command, sweep={"lr": [1]})
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_values_cannot_blow_up_a_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="65536"):
        jobs(tmp_path, command=["echo", "{x}" * 100], sweep={"x": ["y" * 1000]})


def test_params_and_halving_survive_the_journal(tmp_path: Path) -> None:
    rule = {"metric": "acc", "min_steps": 10}
    ((spec, program),) = jobs(tmp_path, command=["echo", "{x}"], sweep={"x": [[1, 2]], "halving": rule})
    assert spec.params == (("x", "[1, 2]"),)
    assert spec.halving == HalvingRule("acc", True, 3, 10)
    assert spec_from_json(spec_to_json(spec)) == spec
    assert Program.from_json(program.as_json()) == program


def test_the_sweep_option_parses_numbers_and_words() -> None:
    assert parse_sweep_options(["lr=0.1,1e-3", "net=cnn,mlp", "deep=true,2"]) == {
        "lr": [0.1, 0.001],
        "net": ["cnn", "mlp"],
        "deep": [True, 2],
    }
    for wrong in (["lr"], ["=1"], ["lr="], ["a=1", "a=2"]):
        with pytest.raises(InputError, match="--sweep"):
            parse_sweep_options(wrong)


def test_params_as_text() -> None:
    assert format_params([("lr", 0.1), ("net", "cnn"), ("x", "y" * 99)]) == f"lr=0.1 net=cnn x={'y' * 31}…"
