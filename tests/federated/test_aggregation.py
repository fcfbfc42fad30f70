import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.federated.aggregation import Contribution, ServerModel, contribution_weights, next_model
from carpool.federated.federation import Task, TaskName
from carpool.federated.updates import weights_digest

NAME = TaskName("a")


def model(value: float, count: int = 0) -> ServerModel:
    weights = {"w": np.full(4, value, np.float32), "count": np.array(count)}
    return ServerModel(weights, frozenset({"w"}))


def test_updates_count_by_data() -> None:
    assert contribution_weights(Task(NAME), [Contribution(30, 30, 3), Contribution(10, 10, 3)]) == (0.75, 0.25)


def test_devices_with_fewer_steps_count_as_much() -> None:
    updates = [Contribution(10, 40, 4), Contribution(10, 10, 1)]
    assert contribution_weights(Task(NAME), updates) == (0.5, 0.5)
    one, two = contribution_weights(Task(NAME, weighting="normalized"), updates)
    assert two == 4 * one


def test_updates_count_by_samples() -> None:
    task = Task(NAME, weighting="samples")
    assert contribution_weights(task, [Contribution(10, 30, 4), Contribution(10, 10, 1)]) == (0.75, 0.25)


def test_the_mean_of_weights() -> None:
    updates = [model(1.0, 10).weights, model(3.0, 13).weights]
    after = next_model(Task(NAME), model(0.0), updates, (0.25, 0.75))
    assert after.weights["w"].tolist() == [2.5] * 4
    assert after.weights["count"] == 12
    assert after.weights["w"].dtype == np.float32
    assert after.rounds == 1


def test_a_single_update_is_taken_over_bit_by_bit() -> None:
    update = {"w": np.random.default_rng(0).normal(size=1000).astype(np.float32), "count": np.array(2**60 + 1)}
    before = ServerModel({"w": np.ones(1000, np.float32), "count": np.array(0)}, frozenset({"w"}))
    after = next_model(Task(NAME), before, [update], (1.0,))
    assert weights_digest(after.weights) == weights_digest(update)


@given(st.permutations(range(5)), st.integers(0, 2**32 - 1))
def test_weights_that_do_not_sum_to_one_keep_the_rest_of_the_old(order: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.normal(size=8)
    updates, weights = random.normal(size=(5, 8)), random.uniform(0, 1, 5)
    after = next_model(Task(NAME), ServerModel({"w": old}), [{"w": updates[i]} for i in order], list(weights[order]))
    expected = old + sum(weights[i] * (updates[i] - old) for i in range(5))
    assert np.allclose(after.weights["w"], expected)


def test_fedadam_follows_its_formula() -> None:
    task = Task(NAME, algorithm="fedadam", server_lr=0.1, betas=(0.9, 0.99), epsilon=1e-3)
    state, value, m, v = model(0.0), 0.0, 0.0, 1e-6
    for target in (1.0, 1.0, -1.0):
        change = target - value
        m, v = 0.9 * m + 0.1 * change, 0.99 * v + 0.01 * change**2
        value += 0.1 * m / (v**0.5 + 1e-3)
        state = next_model(task, state, [model(target, 5).weights], (1.0,))
        assert state.weights["w"].tolist() == pytest.approx([value] * 4, rel=1e-5)
        assert state.weights["count"] == 5  # not trained, so not stepped
