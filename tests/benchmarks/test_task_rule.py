"""Hare's rule per task: parts go to the device that is available first, steps wait for their parts."""

import pytest
from seeds.task_rule import TaskJob, ends, weighted_jct_s


def test_a_part_goes_to_the_device_that_is_available_first_however_slow() -> None:
    job = TaskJob(1.0, 0.0, steps=2, parts=2, part_s=(1.0, 3.0))
    assert ends([job], [0, 1]) == [6.0]
    assert ends([job], [0]) == [4.0]  # alone the fast device would be done earlier


def test_parts_of_a_step_need_not_run_at_the_same_instant() -> None:
    wide = TaskJob(9.0, 0.0, steps=1, parts=3, part_s=(1.0,))
    other = TaskJob(1.0, 0.0, steps=1, parts=1, part_s=(1.0,))
    assert ends([other, wide], [0, 0]) == [2.0, 2.0]  # the fourth task fills the second wave


def test_jobs_go_in_the_order_of_the_relaxation_and_from_their_submission() -> None:
    light, heavy = TaskJob(1.0, 0.0, 4, 1, (1.0,)), TaskJob(5.0, 0.0, 4, 1, (1.0,))
    assert ends([light, heavy], [0]) == [8.0, 4.0]
    assert ends([light, heavy._replace(at_s=100.0)], [0]) == [4.0, 104.0]
    assert weighted_jct_s([light, heavy._replace(at_s=100.0)], [4.0, 104.0]) == 4.0


def test_a_switch_costs_time_between_jobs_only() -> None:
    one = TaskJob(1.0, 0.0, 3, 1, (1.0,))
    assert ends([one], [0], switch_s=0.5) == [pytest.approx(3.5)]
