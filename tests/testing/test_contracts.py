"""The shipped contracts, applied to what the project itself ships."""

from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.worlds.base import PlainWorld
from carpool.testing import BackendContract, Bench, EstimatorContract, MachinesBench, PolicyContract


class TestFifo(PolicyContract):
    policy = Fifo()


class TestFifoBypass(PolicyContract):
    policy = Fifo(bypass=True)
    examples = 15


class TestFifoSpread(PolicyContract):
    policy = Fifo(bypass=True, placement="emptiest")
    examples = 10


class TestFifoPooled(PolicyContract):
    policy = Fifo(placement="pooled")
    examples = 10


class TestMachines(BackendContract):
    def make_bench(self) -> Bench:
        return MachinesBench()


class TestSharingMachines(BackendContract):
    def make_bench(self) -> Bench:
        return MachinesBench(sharing=True)


class TestCostlyMachines(BackendContract):
    """Starting and moving take time, so answers come later."""

    def make_bench(self) -> Bench:
        return MachinesBench(PlainWorld(start_s=3.0, resize_s=2.0, checkpoint_every=1.0))


class TestDeclared(EstimatorContract):
    def make_estimator(self) -> Estimator:
        return DeclaredEstimator()
