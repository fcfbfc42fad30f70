"""What jobs show of their batches: samples beyond the own ones, noise, memory that grows at most in proportion."""

import pytest

from carpool.backends.batch_stats import BatchStats
from carpool.core.messages import ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase

SPEC = JobSpec(JobId("a"), batch_size=32)


def reported(done: float, batch_size: int = 0, spec: JobSpec = SPEC, memory: int = 0) -> tuple[Job, ProgressReported]:
    held = Allocation.of(0, batch_size=batch_size)
    job = Job(spec, 0, 0.0, Phase.RUNNING, held, 1, held, 1)
    return job, ProgressReported(spec.id, 1, done, 1.0, memory_bytes=memory)


def test_larger_batches_bring_a_job_further_than_its_steps_count() -> None:
    seen = BatchStats()
    seen.learn(*reported(10.0))
    assert seen.ahead(SPEC.id) == 0.0
    seen.learn(*reported(20.0, 128))
    assert seen.ahead(SPEC.id) == 30.0
    seen.learn(*reported(24.0, 8))
    assert seen.ahead(SPEC.id) == 27.0
    seen.learn(*reported(20.0, 8))  # a crash took four steps back
    assert seen.ahead(SPEC.id) == 30.0


def test_a_training_says_its_own_batch_where_its_job_does_not() -> None:
    seen, unnamed = BatchStats(), JobSpec(JobId("b"))
    assert seen.own(unnamed) == 0
    seen.loaded(unnamed.id, 16)
    seen.loaded(SPEC.id, 16)
    assert (seen.own(unnamed), seen.own(SPEC)) == (16, 32)


@pytest.mark.parametrize(("batch_size", "needed"), [(8, 1000), (64, 1000), (128, 2000)])
def test_memory_is_what_was_held_and_grows_at_most_in_proportion(batch_size: int, needed: int) -> None:
    seen = BatchStats()
    assert seen.memory(SPEC.id, batch_size) == 0
    seen.learn(*reported(5.0, memory=600))
    seen.learn(*reported(9.0, 64, memory=1000))
    seen.learn(*reported(12.0, 8, memory=1000))
    assert seen.memory(SPEC.id, batch_size) == needed
