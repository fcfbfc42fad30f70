"""Secrets of a daemon do not reach its jobs."""

from carpool.jobs.environment import daemon_environment, shell_environment

GIVEN = {
    "PATH": "/bin",
    "HOME": "/root",
    "LC_ALL": "C",
    "CUDA_VISIBLE_DEVICES": "0",
    "CARPOOL_FAULTS": "[]",
    "AWS_SECRET_ACCESS_KEY": "1",
    "HF_TOKEN": "2",
    "WANDB_API_KEY": "3",
    "CONDA_TOKEN": "4",
    "CARPOOL_TOKEN": "5",
    "SLACK_URL": "6",
}


def test_jobs_of_a_daemon_get_what_programs_need_and_no_secret() -> None:
    assert daemon_environment(GIVEN).keys() == {"PATH", "HOME", "LC_ALL", "CUDA_VISIBLE_DEVICES", "CARPOOL_FAULTS"}


def test_the_operator_names_what_else_they_get_but_never_the_token_of_the_daemon() -> None:
    passed = daemon_environment(GIVEN, ["HF_*", "WANDB_API_KEY", "CARPOOL_*"])
    assert passed.keys() - daemon_environment(GIVEN).keys() == {"HF_TOKEN", "WANDB_API_KEY"}


def test_jobs_of_a_shell_get_all_but_the_token_of_the_daemon() -> None:
    assert shell_environment(GIVEN) == {name: value for name, value in GIVEN.items() if name != "CARPOOL_TOKEN"}
