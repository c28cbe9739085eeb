import math
from statistics import mean, stdev

import pytest
import torch

from hacrl_fed.algorithms import hacpo
from hacrl_fed.algorithms.baselines import (
    grpo_loss,
    gspo_loss,
    naive_advantages,
    own_advantages,
    sapo_advantages,
    sapo_sample,
)
from hacrl_fed.algorithms.hacpo import HacpoConfig, hacpo_loss
from hacrl_fed.algorithms.methods import METHODS, Anchor
from hacrl_fed.config import METHOD_NAMES, SHARING_METHODS

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
    assert {name for name, method in METHODS.items() if method.shares} == SHARING_METHODS
    assert {name: method.group_multiplier for name, method in METHODS.items() if method.group_multiplier > 1} == {
        "gspo_x2": 2
    }


@pytest.mark.parametrize("advantages", [naive_advantages, METHODS["naive"].advantages, METHODS["naive_own"].advantages])
def test_naive_advantages_pool_the_group_without_capabilities(advantages):
    rewards = [1.0, 0.0, 1.0, 1.0, 3.0, 9.0]
    found, baselines = advantages(rewards, [0] * 4 + [1] * 2, list("aabbab"), "a", CAPABILITIES, HacpoConfig())
    first, second = rewards[:4], rewards[4:]
    wanted = [(r - mean(group)) / (stdev(group) + 1e-6) for group in (first, second) for r in group]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    assert baselines.tolist() == pytest.approx([mean(first)] * 4 + [mean(second)] * 2)


@pytest.mark.parametrize("name", ["gspo", "gspo_x2", "grpo"])
def test_gspo_advantages_are_the_own_groups_statistics(name):
    rewards = [1.0, 0.0, 0.0, 0.5]
    found, _ = METHODS[name].advantages(rewards, [5] * 4, ["a"] * 4, "a", {}, HacpoConfig())
    assert found.tolist() == pytest.approx([(r - mean(rewards)) / (stdev(rewards) + 1e-6) for r in rewards], abs=1e-12)


def test_learning_alone_refuses_rollouts_of_others():
    with pytest.raises(ValueError, match=r"sources.*'b'"):
        own_advantages([1.0, 0.0], [0, 0], ["a", "b"], "a", CAPABILITIES, HacpoConfig())


def test_all_methods_refuse_a_reward_that_is_no_number():
    for method in METHODS.values():
        with pytest.raises(ValueError, match="rewards"):
            method.advantages([1.0, math.nan], [0, 0], ["a", "a"], "a", CAPABILITIES, HacpoConfig())


@pytest.mark.parametrize("name", ["gspo", "gspo_x2", "naive", "naive_own"])
def test_the_loss_takes_own_and_cross_rows_alike(name):
    arguments = loss_arguments([True, False, False, False])
    config = HacpoConfig()
    loss, metrics = METHODS[name].loss(*arguments, 3, config)
    low, high = 1 - config.eps_low, 1 + config.eps_high
    assert loss.item() == pytest.approx(-(1.0 + 0.9 * 2 + high * 1 + low * -3) / 4)
    (gradient,) = torch.autograd.grad(loss, arguments[0])
    assert gradient[:, 0].tolist() == pytest.approx([-1.0 / 4 / 2, -0.9 * 2 / 4 / 2, 0.0, 0.0])
    assert metrics[hacpo.SELF_SEQUENCES] == 1
    assert (metrics[hacpo.CROSS_POSITIVE], metrics[hacpo.CROSS_POSITIVE_LIVE]) == (2, 1)
    assert (metrics[hacpo.CROSS_NEGATIVE], metrics[hacpo.CROSS_NEGATIVE_LIVE]) == (1, 0)


def test_hacpo_without_peers_is_gspo():
    arguments = loss_arguments([True] * 4)
    for config in (HacpoConfig(), HacpoConfig(cross_band="signed")):
        own, shared = gspo_loss(*arguments, 3, config), hacpo_loss(*arguments, 3, config)
        assert own[0].item() == shared[0].item()
        assert own[1] == shared[1]
    step = ([1.0, 0.0, 0.5], [0, 0, 0], ["a"] * 3, "a", CAPABILITIES, HacpoConfig())
    assert METHODS["gspo"].advantages(*step)[0].tolist() == METHODS["hacpo"].advantages(*step)[0].tolist()


# --- Token ratios ---


def slow_grpo(target, old, advantages, low, high):
    """The objective token by token, of rows without padding."""
    rows = []
    for logps, olds, A in zip(target, old, advantages, strict=True):
        ratios = [math.exp(new - was) for new, was in zip(logps, olds, strict=True)]
        rows.append(mean(min(r * A, min(max(r, 1 - low), 1 + high) * A) for r in ratios))
    return -mean(rows)


def test_grpo_clips_each_token_and_averages_by_sequence():
    target = [[-1.0, -0.5, -2.0], [-1.0]]
    old = [[-1.1, -1.0, -1.0], [-1.3]]
    advantages = [2.0, -1.0]
    config = HacpoConfig()
    leaf = torch.tensor([target[0], [*target[1], math.nan, math.nan]], dtype=torch.float64, requires_grad=True)
    olds = torch.tensor([old[0], [*old[1], math.nan, math.inf]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss, metrics = grpo_loss(
        leaf, mask, olds, torch.tensor(advantages), torch.tensor([1, 0]), torch.ones(2), 0, config
    )
    assert loss.item() == pytest.approx(slow_grpo(target, old, advantages, 0.2, 0.28))
    (gradient,) = torch.autograd.grad(loss, leaf)
    # exp(.1) and exp(-1) are on the side that A > 0 pushes from; exp(.5) is over 1.28. exp(.3) with A < 0 is live.
    wanted = [[-2 * math.exp(0.1) / 3 / 2, 0.0, -2 * math.exp(-1) / 3 / 2], [math.exp(0.3) / 2, 0.0, 0.0]]
    torch.testing.assert_close(gradient, torch.tensor(wanted, dtype=torch.float64))
    assert metrics[hacpo.SELF_ADVANTAGED] == 1 and metrics[hacpo.SELF_LIVE] == pytest.approx(2 / 3)
    assert metrics[hacpo.CROSS_NEGATIVE_LIVE] == 1


def test_grpo_refuses_log_probs_of_another_shape_or_that_are_no_numbers():
    arguments = torch.full((2, 3), -1.0), torch.ones(2, 3)
    rest = torch.ones(2), torch.tensor([1, 1]), torch.ones(2), 0, HacpoConfig()
    for bad in (torch.full((2,), -1.0), torch.full((2, 3), math.nan)):
        with pytest.raises(ValueError, match="old_logps"):
            grpo_loss(*arguments, bad, *rest)


# --- SAPO ---


def test_sapo_takes_statistics_of_each_source_by_itself():
    rewards, sources = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], list("aabbbb")
    prompts = [0, 0, 0, 0, 1, 1]
    found, baselines = sapo_advantages(rewards, prompts, sources, "a", {}, HacpoConfig())
    unit = 0.5 / (stdev([0.0, 1.0]) + 1e-6)
    assert found.tolist() == pytest.approx([unit, -unit, 0.0, 0.0, -unit, unit])
    assert baselines.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="sources"):
        sapo_advantages(rewards, prompts, sources[:3], "a", {}, HacpoConfig())


def sapo_groups(own: int, live: int, dead: int) -> tuple[torch.Tensor, list[int], list[str]]:
    """Groups of two rollouts: the learner's, and peers' with and without an advantage."""
    sources = ["me"] * own + ["b", "c"] * live + ["d"] * dead
    signs = [1.0] * own + [1.0] * (2 * live) + [0.0] * dead
    advantages = torch.tensor([sign * A for sign in signs for A in (1.0, -1.0)])
    return advantages, [i for i in range(len(sources)) for _ in (0, 1)], [s for s in sources for _ in (0, 1)]


def test_sapo_draws_as_many_live_groups_of_others_as_the_learner_has():
    advantages, prompts, sources = sapo_groups(own=3, live=5, dead=4)
    drawn = set()
    for seed in range(200):
        kept = sapo_sample(advantages, prompts, sources, "me", seed).tolist()
        assert kept == sapo_sample(advantages, prompts, sources, "me", seed).tolist()
        groups = {prompt for prompt, keep in zip(prompts, kept, strict=True) if keep}
        # Whole groups, all own ones, three of the ten live ones.
        assert sum(kept) == 2 * len(groups) and {0, 1, 2} < groups and len(groups) == 6
        assert all(prompt < 13 for prompt in groups)
        drawn |= groups
    assert drawn == set(range(13))


def test_sapo_takes_what_there_is():
    assert sapo_sample(*sapo_groups(own=8, live=1, dead=2), "me", 0).sum() == 16 + 4
    assert sapo_sample(*sapo_groups(own=0, live=2, dead=1), "me", 0).tolist() == [True] * 8 + [False] * 2


def test_which_log_probs_each_methods_ratio_is_to():
    assert {name: method.anchor for name, method in METHODS.items() if method.anchor is not Anchor.SOURCE} == {
        "gspo": Anchor.STEP_START,
        "gspo_x2": Anchor.STEP_START,
        "grpo": Anchor.STEP_START_TOKENS,
        "naive_own": Anchor.STEP_START,
        "sapo": Anchor.STEP_START_TOKENS,
    }
