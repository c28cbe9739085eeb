import math
from statistics import mean, stdev

import pytest
import torch

from hacrl_fed.algorithms import hacpo
from hacrl_fed.algorithms.baselines import gspo_advantages, gspo_live_mask, gspo_loss, naive_advantages
from hacrl_fed.algorithms.hacpo import HacpoConfig, hacpo_loss
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import METHOD_NAMES

torch.set_num_threads(1)

# Far apart, so that a capability that entered would show.
CAPABILITIES = {"a": 0.9, "b": 0.1}


def loss_arguments(is_self: list[bool]) -> tuple[torch.Tensor, ...]:
    """Four rows of two tokens with the ratios 1, 0.9, 1.1, 0.9."""
    source = torch.full((4,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([1.0, 0.9, 1.1, 0.9], dtype=torch.float64)
    target = (source + ratios.log())[:, None].repeat(1, 2).requires_grad_()
    advantages = torch.tensor([1.0, 2.0, 1.0, -3.0], dtype=torch.float64)
    omega = torch.tensor([1.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    return target, torch.ones(4, 2), source, advantages, torch.tensor(is_self), omega


def test_methods_are_those_that_a_configuration_can_name():
    assert tuple(METHODS) == METHOD_NAMES
    assert all(method.name == name for name, method in METHODS.items())


def test_which_methods_share_and_how_large_their_groups_are():
    assert {name: (method.shares, method.group_multiplier) for name, method in METHODS.items()} == {
        "hacpo": (True, 1),
        "gspo": (False, 1),
        "gspo_x2": (False, 2),
        "naive": (True, 1),
    }


@pytest.mark.parametrize("advantages", [naive_advantages, METHODS["naive"].advantages])
def test_naive_advantages_pool_the_group_without_capabilities(advantages):
    rewards = [1.0, 0.0, 1.0, 1.0, 3.0, 9.0]
    found, baselines = advantages(rewards, [0] * 4 + [1] * 2, list("aabbab"), "a", CAPABILITIES, HacpoConfig())
    first, second = rewards[:4], rewards[4:]
    wanted = [(r - mean(group)) / (stdev(group) + 1e-6) for group in (first, second) for r in group]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    assert baselines.tolist() == pytest.approx([mean(first)] * 4 + [mean(second)] * 2)


@pytest.mark.parametrize("name", ["gspo", "gspo_x2"])
def test_gspo_advantages_are_the_own_groups_statistics(name):
    rewards = [1.0, 0.0, 0.0, 0.5]
    found, _ = METHODS[name].advantages(rewards, [5] * 4, ["a"] * 4, "a", {}, HacpoConfig())
    assert found.tolist() == pytest.approx([(r - mean(rewards)) / (stdev(rewards) + 1e-6) for r in rewards], abs=1e-12)


def test_gspo_refuses_rollouts_of_others():
    with pytest.raises(ValueError, match=r"sources.*'b'"):
        gspo_advantages([1.0, 0.0], [0, 0], ["a", "b"], "a", CAPABILITIES, HacpoConfig())


def test_all_methods_refuse_a_reward_that_is_no_number():
    for method in METHODS.values():
        with pytest.raises(ValueError, match="rewards"):
            method.advantages([1.0, math.nan], [0, 0], ["a", "a"], "a", CAPABILITIES, HacpoConfig())


@pytest.mark.parametrize("name", ["gspo", "gspo_x2", "naive"])
def test_the_loss_takes_own_and_cross_rows_alike(name):
    arguments = loss_arguments([True, False, False, False])
    config = HacpoConfig()
    loss, metrics = METHODS[name].loss(*arguments, 3, config)
    low, high = 1 - config.eps_low, 1 + config.eps_high
    assert loss.item() == pytest.approx(-(1.0 + 0.9 * 2 + high * 1 + low * -3) / 4)
    (gradient,) = torch.autograd.grad(loss, arguments[0])
    assert gradient[:, 0].tolist() == pytest.approx([-1.0 / 4 / 2, -0.9 * 2 / 4 / 2, 0.0, 0.0])
    assert METHODS[name].live(*arguments, 3, config).tolist() == [True, True, False, False]
    assert metrics[hacpo.SELF_SEQUENCES] == 1
    assert (metrics[hacpo.CROSS_POSITIVE], metrics[hacpo.CROSS_POSITIVE_LIVE]) == (2, 1)
    assert (metrics[hacpo.CROSS_NEGATIVE], metrics[hacpo.CROSS_NEGATIVE_LIVE]) == (1, 0)


def test_hacpo_without_peers_is_gspo():
    arguments = loss_arguments([True] * 4)
    for config in (HacpoConfig(), HacpoConfig(cross_band="signed")):
        own, shared = gspo_loss(*arguments, 3, config), hacpo_loss(*arguments, 3, config)
        assert own[0].item() == shared[0].item()
        assert own[1] == shared[1]
        assert torch.equal(gspo_live_mask(*arguments, 3, config), METHODS["hacpo"].live(*arguments, 3, config))
    step = ([1.0, 0.0, 0.5], [0, 0, 0], ["a"] * 3, "a", CAPABILITIES, HacpoConfig())
    assert METHODS["gspo"].advantages(*step)[0].tolist() == METHODS["hacpo"].advantages(*step)[0].tolist()
