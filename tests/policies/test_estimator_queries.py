"""What a step with another batch is worth, for estimators that count steps and for those that count progress."""

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.policies.estimator_queries import worth_of_step
from carpool.policies.sharing.share_search import Setting, ShareSearch, Tenant, speeds

SPEC = JobSpec(JobId("a"), batch_size=32, batch_range=(8, 128))
KIND = Kind("cpu1")


class Steps(DeclaredEstimator):
    """Steps per second that hardly depend on the batch, and a clear gradient: more samples teach little."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(100.0 if (placement.batch_size or 32) > 8 else 150.0)

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        return batch_size / 32


def test_only_rates_that_count_steps_have_to_be_weighed() -> None:
    assert worth_of_step(DeclaredEstimator(), SPEC, 64) == 1.0
    assert worth_of_step(Steps(), SPEC, 64) == 2.0
    assert worth_of_step(Steps(), SPEC, 0) == worth_of_step(Steps(), SPEC, 32) == 1.0


def test_small_batches_do_not_win_by_taking_more_steps() -> None:
    tenants = [Tenant(SPEC)]
    small, own, large = ((Setting(1.0, size),) for size in (8, 32, 128))
    assert speeds(Steps(), KIND, tenants, [small, own, large]) == [[0.375], [1.0], [4.0]]
    best, _ = ShareSearch(Steps(), KIND, tenants, (1.0,)).best()
    assert best == large


def test_while_the_noise_is_unknown_no_batch_beats_the_jobs_own() -> None:
    live = OnlineEstimator(Cluster.build([(1, 1, "cpu1")]))
    best, _ = ShareSearch(live, KIND, [Tenant(SPEC)], (1.0,)).best()
    assert best in ((Setting(1.0),), (Setting(1.0, 32),))
