"""HACPO's functions refuse what cannot be meant, and name it."""

import math

import pytest
import torch

from hacrl_fed.algorithms.hacpo import (
    CapabilityTracker,
    HacpoConfig,
    capability_ratio,
    hacpo_loss,
    joint_advantages,
    k3_kl,
)

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: CapabilityTracker(window=2.5), "window"),
        (lambda: CapabilityTracker().update({"a": None}), "mean_rewards"),
        (lambda: CapabilityTracker().load_state_dict(None), "state"),
        (lambda: CapabilityTracker().load_state_dict({"history": {"a": 5}}), "state"),
        (lambda: capability_ratio("x", 1.0), "source"),
        (lambda: joint_advantages([1.0], [0], ["a"], "a", None, HacpoConfig()), "capabilities"),
        (lambda: joint_advantages([1.0], [0], ["a"], "a", {"a": "x"}, HacpoConfig()), "capabilities"),
        (lambda: joint_advantages(torch.tensor([1j]), [0], ["a"], "a", {"a": 1.0}, HacpoConfig()), "rewards"),
        (lambda: hacpo_loss([[-1.0]], [[1]], [-1.0], [1.0], [1], [1.0], 0, HacpoConfig()), "target_logps"),
        (lambda: HacpoConfig(alpha="1"), "alpha"),
        (lambda: HacpoConfig(window=2.5), "window"),
        (lambda: HacpoConfig(positive_floor=2.0), "positive_floor"),
        (lambda: HacpoConfig(alpha=9.0), "max_abs_log_ratio"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("name", ["m_scale", "source_floor", "alpha", "token_eps_low", "token_eps_high"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_configuration_refuses_what_is_no_size(name, value):
    with pytest.raises(ValueError, match=name):
        HacpoConfig(**{name: value})


def test_a_bad_update_or_state_is_refused_and_changes_nothing():
    tracker = CapabilityTracker()
    tracker.update({"a": 0.5})
    with pytest.raises(ValueError, match="mean_rewards"):
        tracker.update({"a": 0.9, "b": math.nan})
    for state in ({}, {"history": {"a": []}}, {"history": {"a": [0.5, -1.0]}}, {"history": {"a": ["0.5"]}}):
        with pytest.raises(ValueError, match="state"):
            tracker.load_state_dict(state)
    assert tracker.capabilities() == {"a": 0.5}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CapabilityTracker(window=0), "window"),
        (lambda: CapabilityTracker(floor=0.0), "floor"),
        (lambda: capability_ratio(0.0, 1.0), "source"),
        (lambda: capability_ratio(1.0, math.nan), "learner"),
        (lambda: capability_ratio(1.0, 1.0, lo=2.0, hi=1.0), "lo and hi"),
    ],
)
def test_capabilities_refuse_bad_input(make, named):
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rewards": [1.0, math.nan, 0.0]}, "rewards"),
        ({"rewards": [1.0, None, 0.0]}, "rewards"),
        ({"rewards": [[1.0, 0.0, 0.0]]}, "rewards"),
        ({"rewards": [], "prompt_index": [], "sources": []}, "rewards"),
        ({"prompt_index": [0, 0]}, "prompt_index"),
        ({"prompt_index": [0.0, 0.0, 0.0]}, "prompt_index"),
        ({"prompt_index": ["x", "y", "z"]}, "prompt_index"),
        ({"sources": ["a", "b"]}, "sources"),
        ({"sources": ["a", "b", "stranger"]}, "sources.*stranger"),
        ({"learner": "stranger"}, "learner.*stranger"),
        ({"capabilities": {"a": 0.5, "b": 0.0}}, "capabilities"),
        ({"capabilities": {"a": math.inf, "b": 0.5}}, "capabilities"),
    ],
)
def test_advantages_refuse_bad_input(change, named):
    arguments = {
        "rewards": [1.0, 0.0, 0.0],
        "prompt_index": [0, 0, 0],
        "sources": ["a", "a", "b"],
        "learner": "a",
        "capabilities": {"a": 0.5, "b": 0.4},
        "config": HacpoConfig(),
    }
    joint_advantages(**arguments)
    with pytest.raises(ValueError, match=named):
        joint_advantages(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target_logps": torch.zeros(2)}, "target_logps"),
        ({"target_logps": torch.zeros(0, 3)}, "target_logps"),
        ({"target_logps": torch.zeros(2, 3, dtype=torch.bfloat16)}, "target_logps"),
        ({"target_logps": torch.tensor([[-1.0, math.nan, -1.0], [-1.0, -1.0, -1.0]])}, "target_logps"),
        ({"mask": torch.ones(2, 2)}, "mask"),
        ({"mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "mask"),
        ({"mask": torch.full((2, 3), 0.5)}, "mask"),
        ({"source_mean_logp": torch.tensor([-1.0, -math.inf])}, "source_mean_logp"),
        ({"source_mean_logp": torch.tensor([[-1.0, -1.0]])}, "source_mean_logp"),
        ({"advantages": torch.tensor([1.0, math.nan])}, "advantages"),
        ({"advantages": torch.tensor([1.0])}, "advantages"),
        ({"is_self": torch.tensor([True])}, "is_self"),
        ({"is_self": torch.tensor([0, 2])}, "is_self"),
        ({"omega": torch.tensor([1.0, 0.0])}, "omega"),
        ({"omega": torch.tensor([1.0, math.nan])}, "omega"),
        ({"omega": torch.tensor([1.0, 1.0, 1.0])}, "omega"),
        ({"update_index": -1}, "update_index"),
        ({"update_index": math.nan}, "update_index"),
    ],
)
def test_the_loss_refuses_bad_input(change, named):
    arguments = {
        "target_logps": torch.full((2, 3), -1.0),
        "mask": torch.ones(2, 3),
        "source_mean_logp": torch.tensor([-1.0, -1.0]),
        "advantages": torch.tensor([1.0, -1.0]),
        "is_self": torch.tensor([True, False]),
        "omega": torch.tensor([1.0, 0.5]),
        "update_index": 0,
        "config": HacpoConfig(),
    }
    hacpo_loss(**arguments)
    with pytest.raises(ValueError, match=named):
        hacpo_loss(**{**arguments, **change})


@pytest.mark.parametrize(
    ("reference", "named"), [(torch.zeros(2, 2), "reference_logps"), (torch.full((2, 3), math.nan), "reference_logps")]
)
def test_k3_kl_refuses_bad_input(reference, named):
    with pytest.raises(ValueError, match=named):
        k3_kl(torch.zeros(2, 3), reference, torch.ones(2, 3))
