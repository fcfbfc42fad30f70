"""Job order: queue and running set under the active policy's keys, with fallback when the policy fails."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.core.constraints.policy_handover import POLICY_EXCEPTIONS, describe_policy_failure
from carpool.core.estimates import Estimator
from carpool.core.model import Job, JobId, Phase
from carpool.core.policy import Policy
from carpool.core.queue import Queue, RunningJobs


class JobOrder:
    """The queue and the roster, which are filed by the policy's keys; `jobs` are all that are not over.

    Keys are asked for while facts are folded, which must not end halfway. Where the policy raises over one, or gives
    keys that do not compare, all jobs are filed anew as the `fallback` policy has it, and `fault` says why.
    """

    __slots__ = ("_estimator", "_fallback", "_jobs", "fault", "policy", "roster", "waiting")

    def __init__(
        self, jobs: Mapping[JobId, Job], policy: Policy, estimator: Estimator, fallback: Policy | None
    ) -> None:
        self.policy = policy
        self.fault = ""
        self.waiting = Queue()
        self.roster = RunningJobs(ordered=policy.keeps_running_order)
        self._jobs = jobs
        self._estimator = estimator
        self._fallback = fallback

    def put(self, job: Job) -> None:
        """File a job under its phase, or move it to a new place."""
        try:
            if job.desired is not None:
                if self.roster.is_ordered:
                    self.roster.put(job, self.policy.running_key(job, self._estimator))
                elif job.spec.id not in self.roster:
                    self.roster.put(job, 0)
            elif job.phase is Phase.WAITING:
                self.waiting.put(job, self.policy.waiting_key(job, self._estimator))
        except POLICY_EXCEPTIONS as error:
            if not self.give_up(error):
                raise
            self.put(job)

    def discard(self, job: JobId) -> None:
        """Take a job out of the queue and off the roster, where it is in."""
        self.dequeue(job)
        try:
            self.roster.discard(job)
        except POLICY_EXCEPTIONS as error:
            if not self.give_up(error):
                raise
            self.discard(job)

    def dequeue(self, job: JobId) -> None:
        """Take a job out of the queue, if it is in."""
        try:
            self.waiting.discard(job)
        except POLICY_EXCEPTIONS as error:  # keys that are not in order, such as NaN
            if not self.give_up(error):
                raise
            self.dequeue(job)

    def use(self, policy: Policy) -> None:
        """File all jobs in another policy's order; its keys need not compare with those before."""
        self.policy, self.fault = policy, ""
        starts = self.roster.by_start()
        self.roster, self.waiting = RunningJobs(ordered=policy.keeps_running_order), Queue()
        for name in starts:
            self.put(self._jobs[name])
        for job in self._jobs.values():
            if job.phase is Phase.WAITING:
                self.put(job)

    def give_up(self, error: BaseException) -> bool:
        """Let the fallback policy take the place of one that raised this; False where there is no other."""
        if self._fallback is None or self.policy == self._fallback:
            return False
        fault = describe_policy_failure(self.policy, error)
        self.use(self._fallback)
        self.fault = fault
        return True
