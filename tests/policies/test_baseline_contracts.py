"""The classic queue policies keep what every policy promises."""

from carpool.core.policy import Policy
from carpool.policies.registry import parse_policy
from carpool.sim.worlds.base import World
from carpool.testing import PolicyContract
from tests.support.scaling_world import ScalingWorld


class Classic(PolicyContract):
    """In a world of unlike speeds, so that estimates are asked and not only declared lengths believed."""

    examples = 8
    text = ""

    def make_policy(self) -> Policy:
        return parse_policy(self.text)


class Scaled(Classic):
    def make_world(self) -> World:
        return ScalingWorld(exponent=0.7, speeds={"V100": 3.0, "P100": 1.5, "K80": 0.5})


class TestSjf(Classic):
    text = "sjf:bypass=true"


class TestSrtf(Classic):
    text = "srtf"


class TestSrtfScaled(Scaled):
    text = "srtf:placement=pooled"


class TestWsrtf(Classic):
    text = "wsrtf:stay=1.2"


class TestLas(Classic):
    text = "las:thresholds=4/10:promote=2"


class TestLasTwoQueues(Classic):
    text = "las:thresholds=8:promote=0:placement=emptiest"


class TestAfs(Scaled):
    text = "afs"


class TestAfsOptimistic(Classic):
    text = "afs:optimism=0.25"


class TestAllox(Scaled):
    text = "allox:preempt=false"
    widest = 1


class TestAlloxGang(Scaled):
    text = "allox:gang=true"


class TestAlloxGangWithoutPreemption(Classic):
    text = "allox:gang=true:preempt=false"


class TestSchedHomo(Scaled):
    text = "sched-homo:mixed=true"


class TestThemis(Scaled):
    text = "themis:lease_s=3"
