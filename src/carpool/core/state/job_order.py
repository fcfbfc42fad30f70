"""Job order: queue and running set under the active policy's keys, with fallback when the policy fails."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.core.constraints.policy_handover import POLICY_EXCEPTIONS, describe_policy_failure
from carpool.core.estimates import Estimator
from carpool.core.model import Job, JobId, Phase
from carpool.core.policy import Policy
from carpool.core.queue import Queue, RunningJobs


class JobOrder:
    """The queue and the running jobs, sorted by the policy's keys; `jobs` are all that are not over.

    Keys are computed while facts are folded, which must not be interrupted. If the policy raises, or its keys do not
    compare, all jobs are sorted again by the `fallback` policy, and `fault` holds the reason.
    """

    __slots__ = ("_estimator", "_fallback", "_jobs", "fault", "policy", "running_jobs", "waiting")

    def __init__(
        self, jobs: Mapping[JobId, Job], policy: Policy, estimator: Estimator, fallback: Policy | None
    ) -> None:
        self.policy = policy
        self.fault = ""
        self.waiting = Queue()
        self.running_jobs = RunningJobs(ordered=policy.keeps_running_order)
        self._jobs = jobs
        self._estimator = estimator
        self._fallback = fallback

    def put(self, job: Job) -> None:
        try:
            if job.desired is not None:
                if self.running_jobs.is_ordered:
                    self.running_jobs.put(job, self.policy.running_key(job, self._estimator))
                elif job.spec.id not in self.running_jobs:
                    self.running_jobs.put(job, 0)
            elif job.phase is Phase.WAITING:
                self.waiting.put(job, self.policy.waiting_key(job, self._estimator))
        except POLICY_EXCEPTIONS as error:
            if not self.give_up(error):
                raise
            self.put(job)

    def discard(self, job: JobId) -> None:
        self.dequeue(job)
        try:
            self.running_jobs.discard(job)
        except POLICY_EXCEPTIONS as error:
            if not self.give_up(error):
                raise
            self.discard(job)

    def dequeue(self, job: JobId) -> None:
        try:
            self.waiting.discard(job)
        except POLICY_EXCEPTIONS as error:  # keys that are not in order, such as NaN
            if not self.give_up(error):
                raise
            self.dequeue(job)

    def use(self, policy: Policy) -> None:
        self.policy, self.fault = policy, ""
        starts = self.running_jobs.by_start()
        self.running_jobs, self.waiting = RunningJobs(ordered=policy.keeps_running_order), Queue()
        for name in starts:
            self.put(self._jobs[name])
        for job in self._jobs.values():
            if job.phase is Phase.WAITING:
                self.put(job)

    def give_up(self, error: BaseException) -> bool:
        """Replace a policy that raised by the fallback policy; False if there is none."""
        if self._fallback is None or self.policy == self._fallback:
            return False
        fault = describe_policy_failure(self.policy, error)
        self.use(self._fallback)
        self.fault = fault
        return True
