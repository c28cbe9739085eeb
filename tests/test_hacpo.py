import json
import math
import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hacrl_fed.algorithms import hacpo
from hacrl_fed.algorithms.hacpo import (
    CapabilityTracker,
    HacpoConfig,
    capability_ratio,
    hacpo_loss,
    joint_advantages,
    k3_kl,
    median_ratios,
    scaled_update_index,
    sequence_ratios,
)

torch.set_num_threads(1)

CASES = json.loads((Path(__file__).parent / "vectors" / "hacpo_v1.json").read_text(encoding="utf-8"))["cases"]
CASE_IDS = [
    f"{index}-{case['kind']}-{len(case['agents'])}-{case['config']['cross_band']}" for index, case in enumerate(CASES)
]
each_case = pytest.mark.parametrize("case", CASES, ids=CASE_IDS)


@dataclass(frozen=True)
class Rows:
    """The tensor arguments of a loss."""

    target_logps: Tensor
    mask: Tensor
    source_mean_logp: Tensor
    advantages: Tensor
    is_self: Tensor
    omega: Tensor

    def __getitem__(self, rows: object) -> "Rows":
        return Rows(*(value[rows] for value in self.arguments()))

    def __len__(self) -> int:
        return len(self.target_logps)

    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, item.name) for item in fields(self))


def loss_and_gradient(rows: Rows, update_index: int, config: HacpoConfig, loss=hacpo_loss):
    leaf = rows.target_logps.detach().clone().requires_grad_()
    value, metrics = loss(leaf, *rows.arguments()[1:], update_index, config)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient, metrics


def live_rows(rows: Rows, update_index: float = 0) -> list[bool]:
    return (loss_and_gradient(rows, update_index, HacpoConfig())[1] != 0).any(-1).tolist()


def padded(token_logps: list[list[float]], dtype: torch.dtype, filler: float = 0.0) -> tuple[Tensor, Tensor]:
    width = max(map(len, token_logps))
    values = torch.full((len(token_logps), width), filler, dtype=dtype)
    mask = torch.zeros(len(token_logps), width, dtype=torch.bool)
    for row, logps in enumerate(token_logps):
        values[row, : len(logps)] = torch.tensor(logps, dtype=dtype)
        mask[row, : len(logps)] = True
    return values, mask


def rows_at(
    ratios: list[float], advantages: list[float], *, own: bool = False, omega: float = 1.0, tokens: int = 3
) -> Rows:
    """Rows whose sequence ratios are as given."""
    count = len(ratios)
    source = torch.full((count,), -2.0, dtype=torch.float64)
    target = (source + torch.tensor(ratios, dtype=torch.float64).log())[:, None].repeat(1, tokens)
    return Rows(
        target,
        torch.ones(count, tokens, dtype=torch.bool),
        source,
        torch.tensor(advantages, dtype=torch.float64),
        torch.full((count,), own),
        torch.full((count,), omega, dtype=torch.float64),
    )


# --- Against the vectors ---


@each_case
def test_capabilities_of_the_vectors(case):
    tracker = CapabilityTracker(window=case["window"])
    for agent, history in case["reward_mean_history"].items():
        for mean_reward in history:
            tracker.update({agent: mean_reward})
    assert tracker.capabilities() == pytest.approx(case["capability"], abs=1e-12)


@each_case
def test_advantages_of_the_vectors(case):
    config = HacpoConfig(**case["config"])
    advantages, baselines = joint_advantages(
        case["reward"], case["prompt"], case["source"], case["learner"], case["capability"], config
    )
    assert advantages.dtype == baselines.dtype == torch.float64
    assert advantages.tolist() == pytest.approx(case["expected"]["advantage"], abs=1e-9)
    assert baselines.tolist() == pytest.approx(case["expected"]["baseline"], abs=1e-9)


@each_case
def test_capability_ratios_of_the_vectors(case):
    learner = case["capability"][case["learner"]]
    omega = [capability_ratio(case["capability"][agent], learner) for agent in case["source"]]
    assert omega == pytest.approx(case["expected"]["omega"], abs=1e-9)


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_loss_and_gradient_of_the_vectors(case, dtype, tolerance):
    expected = case["expected"]
    # What lies under the mask must not be read.
    target, mask = padded(case["target_token_logps"], dtype, filler=math.nan)
    rows = Rows(
        target,
        mask,
        torch.tensor(case["source_mean_logp"], dtype=dtype),
        torch.tensor(expected["advantage"], dtype=dtype),
        torch.tensor([agent == case["learner"] for agent in case["source"]]),
        torch.tensor(expected["omega"], dtype=dtype),
    )
    config = HacpoConfig(**case["config"])
    loss, gradient, _ = loss_and_gradient(rows, case["update_index"], config)
    wanted, _ = padded(expected["grad_target_token_logps"], torch.float64)
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(expected["loss"], abs=tolerance)
    torch.testing.assert_close(gradient.double(), wanted, rtol=0, atol=tolerance)
    metrics = loss_and_gradient(rows, case["update_index"], config)[2]
    live = (wanted != 0).any(-1) & ~rows.is_self
    assert metrics[hacpo.CROSS_POSITIVE_LIVE] + metrics[hacpo.CROSS_NEGATIVE_LIVE] == live.sum()


# --- Against a second, slow implementation, rollout by rollout ---


def slow_advantages(rewards, prompts, sources, learner, capabilities, config):
    advantages, baselines = [], []
    for reward, prompt in zip(rewards, prompts, strict=True):
        group = [(r, j) for r, p, j in zip(rewards, prompts, sources, strict=True) if p == prompt]
        raw = [r for r, _ in group]
        own = [r for r, j in group if j == learner]
        weighted = []
        for r, j in group:
            w = capabilities[j] / capabilities[learner]
            weighted.append(r / min(max(w, config.ratio_min), config.ratio_max))
        mu = mean(weighted)
        if len(set(raw)) == 1:
            mu = raw[0]
        elif config.baseline_guard and mu > 1 and own:
            mu = mean(own)
        sd = stdev(raw) if len(raw) > 1 else 0.0
        advantages.append((reward - mu) / (sd + 1e-6 if config.normalize_by_std else 1))
        baselines.append(mu)
    return advantages, baselines


def slow_loss(rows: Rows, update_index: int, config: HacpoConfig) -> Tensor:
    """By autograd through the clips and an explicit stop-gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for logps, kept, source, A, own, w in zip(*rows.arguments(), strict=True):
        mean_logp = logps[kept].mean()
        s = torch.exp(torch.clamp(mean_logp - source, -config.max_abs_log_ratio, config.max_abs_log_ratio))
        low = min(1.0, config.cross_clip_low + update_index * config.cross_clip_step)
        if own:
            objective = torch.min(s * A, torch.clamp(s, 1 - config.eps_low, 1 + config.eps_high) * A)
        elif config.cross_band == "signed" and A > 0:
            v = min(s.item(), 1.0) ** (1 + config.alpha)
            objective = v * A + v * A * (mean_logp - mean_logp.detach())
            if s < config.positive_floor:
                objective = torch.zeros((), dtype=torch.float64)
        else:
            c = torch.clamp(s, low, 1.0)
            weight = min(w.item(), 1.0) if config.cross_band == "signed" else w
            objective = c * c.detach() ** config.alpha * weight * A
        total = total + objective
    return -total / len(rows)


CONFIGS = st.builds(
    HacpoConfig,
    alpha=st.sampled_from([0.0, 1.0, 2.5]),
    cross_clip_low=st.sampled_from([0.5, 0.8]),
    cross_clip_step=st.sampled_from([0.0, 0.025, 0.1]),
    cross_band=st.sampled_from(["paper", "signed"]),
    eps_low=st.sampled_from([3e-4, 0.2]),
    eps_high=st.sampled_from([4e-4, 0.3]),
    ratio_min=st.sampled_from([0.1, 0.8]),
    ratio_max=st.sampled_from([10.0, 1.2]),
    baseline_guard=st.booleans(),
    normalize_by_std=st.booleans(),
)
SEEDS = st.integers(0, 2**32 - 1)


def random_rows(seed: int, count: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(*shape, dtype=torch.float64, generator=generator)

    mask = uniform(count, 5, low=0, high=1) < 0.6
    mask[:, 0] = True
    target = uniform(count, 5, low=-3, high=-0.1)
    # A third each: within the own rows' clip range, about the cross rows' band, and anywhere beyond the clamp.
    # None is exactly 0, the upper end of the band, where rounding alone decides whether a row is in.
    spread = torch.tensor([2e-4, 0.3, 12.0], dtype=torch.float64)[torch.randint(3, (count,), generator=generator)]
    log_ratio = spread * uniform(count, low=-1, high=1)
    source = (target * mask).sum(-1) / mask.sum(-1) - log_ratio
    advantages = uniform(count, low=-2, high=2)
    advantages[uniform(count, low=0, high=1) < 0.1] = 0
    is_self = uniform(count, low=0, high=1) < 0.4
    omega = torch.where(is_self, 1, uniform(count, low=0.1, high=10))
    return Rows(target, mask, source, advantages, is_self, omega)


@dataclass(frozen=True)
class Step:
    """Rollouts of a step, with two or more agents, groups of any size, and agents absent from some."""

    rewards: list[float]
    prompts: list[int]
    sources: list[str]
    capabilities: dict[str, float]


def random_step(seed: int, agents: int = 2) -> Step:
    draw = random.Random(seed)
    names = [f"agent-{index}" for index in range(agents)]
    levels = draw.choice([[0.0, 1.0], [0.0, 0.25, 0.5, 1.0], [0.1]])
    rewards, prompts, sources = [], [], []
    for prompt in draw.sample(range(-10, 1000), draw.randint(1, 4)):
        for name in names:
            for _ in range(draw.randint(0, 4)):
                rewards.append(draw.choice(levels))
                prompts.append(prompt)
                sources.append(name)
    if not rewards:
        return random_step(seed + 1, agents)
    return Step(rewards, prompts, sources, {name: draw.uniform(0.01, 1) for name in names})


def advantages_of(step: Step, config: HacpoConfig, learner: str = "agent-0") -> tuple[list[float], list[float]]:
    found = joint_advantages(step.rewards, step.prompts, step.sources, learner, step.capabilities, config)
    return found[0].tolist(), found[1].tolist()


@settings(deadline=None)
@given(SEEDS, st.integers(2, 4), CONFIGS)
def test_advantages_agree_with_the_equations_rollout_by_rollout(seed, agents, config):
    step = random_step(seed, agents)
    wanted = slow_advantages(step.rewards, step.prompts, step.sources, "agent-0", step.capabilities, config)
    advantages, baselines = advantages_of(step, config)
    assert advantages == pytest.approx(wanted[0], abs=1e-9)
    assert baselines == pytest.approx(wanted[1], abs=1e-9)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(0, 9), CONFIGS)
def test_loss_and_gradient_agree_with_the_equations_rollout_by_rollout(seed, count, update_index, config):
    rows = random_rows(seed, count)
    loss, gradient, _ = loss_and_gradient(rows, update_index, config)
    leaf = rows.target_logps.clone().requires_grad_()
    wanted = slow_loss(Rows(leaf, *rows.arguments()[1:]), update_index, config)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-9)
    wanted_gradient = torch.autograd.grad(wanted, leaf, allow_unused=True)[0] if wanted.requires_grad else None
    torch.testing.assert_close(
        gradient, torch.zeros_like(gradient) if wanted_gradient is None else wanted_gradient, rtol=1e-9, atol=1e-9
    )


# --- Properties of advantages ---


@settings(deadline=None)
@given(SEEDS, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_rollouts_or_on_names(seed, draw):
    step, config = random_step(seed, 3), HacpoConfig()
    order = list(range(len(step.rewards)))
    draw.shuffle(order)
    renamed = {"agent-0": "zebra", "agent-1": "aardvark", "agent-2": "mole"}
    other = Step(
        [step.rewards[i] for i in order],
        [3 * step.prompts[i] + 1 for i in order],
        [renamed[step.sources[i]] for i in order],
        {renamed[name]: value for name, value in reversed(step.capabilities.items())},
    )
    before, after = advantages_of(step, config), advantages_of(other, config, learner="zebra")
    assert after[0] == pytest.approx([before[0][i] for i in order], abs=1e-9)
    assert after[1] == pytest.approx([before[1][i] for i in order], abs=1e-9)


@settings(deadline=None)
@given(st.floats(-5, 5), st.integers(1, 6), st.floats(0.01, 1), CONFIGS)
def test_the_advantage_of_a_uniform_group_is_exactly_zero(reward, size, capability, config):
    sources = ["agent-0"] * (size // 2) + ["agent-1"] * (size - size // 2)
    step = Step([reward] * size, [7] * size, sources, {"agent-0": 0.5, "agent-1": capability})
    assert advantages_of(step, config) == ([0.0] * size, [reward] * size)


def test_rewards_that_differ_by_rounding_are_equal():
    advantages, _ = joint_advantages(
        [0.7, 0.7, 0.7 + 1e-9], [0] * 3, list("abb"), "a", {"a": 0.5, "b": 0.4}, HacpoConfig()
    )
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_lists_are_taken_but_for_the_log_probs():
    rows = rows_at([0.9, 0.9], [1.0, -1.0])
    lists = [value.tolist() for value in rows.arguments()[1:]]
    assert (
        hacpo_loss(rows.target_logps, *lists, 0, HacpoConfig())[0] == hacpo_loss(*rows.arguments(), 0, HacpoConfig())[0]
    )


@settings(deadline=None)
@given(SEEDS)
def test_an_agent_without_rollouts_changes_nothing(seed):
    step, config = random_step(seed), HacpoConfig()
    wider = replace(step, capabilities={**step.capabilities, "agent-9": 0.9})
    assert advantages_of(wider, config) == advantages_of(step, config)


@settings(deadline=None)
@given(SEEDS)
def test_a_group_does_not_depend_on_other_groups(seed):
    step, config = random_step(seed, 3), HacpoConfig()
    chosen = [i for i, prompt in enumerate(step.prompts) if prompt == step.prompts[0]]
    alone = Step(
        [step.rewards[i] for i in chosen], [0] * len(chosen), [step.sources[i] for i in chosen], step.capabilities
    )
    whole = advantages_of(step, config)[0]
    assert advantages_of(alone, config)[0] == pytest.approx([whole[i] for i in chosen], abs=1e-12)


def test_a_learner_without_own_rollouts_keeps_the_weighted_baseline():
    # mu = mean(1 / 0.5, 0) = 1: twice as many successes are expected of a learner twice as able. Then mu = 1.5 > 1,
    # and there is nothing of the learner's to put in its place.
    capabilities = {"learner": 0.8, "other": 0.4}
    for rewards, mu in (([1.0, 0.0], 1.0), ([1.0, 1.0, 1.0, 0.0], 1.5)):
        _, baselines = joint_advantages(
            rewards, [0] * len(rewards), ["other"] * len(rewards), "learner", capabilities, HacpoConfig()
        )
        assert baselines.tolist() == pytest.approx([mu] * len(rewards))


def test_the_guard_puts_the_learners_mean_for_a_baseline_above_one():
    arguments = ([1.0, 0.0, 1.0, 1.0], [0] * 4, ["a", "a", "b", "b"], "a", {"a": 0.8, "b": 0.2})
    assert joint_advantages(*arguments, HacpoConfig())[1].tolist() == pytest.approx([0.5] * 4)
    unguarded = joint_advantages(*arguments, HacpoConfig(baseline_guard=False))[1]
    assert unguarded.tolist() == pytest.approx([(1 + 4 + 4) / 4] * 4)


def test_tensors_and_sequences_give_the_same():
    arguments = (["a", "b", "b"], "a", {"a": 0.3, "b": 0.6}, HacpoConfig())
    plain = joint_advantages([0.1, 0.0, 1.0], [4, 4, 4], *arguments)
    tensors = joint_advantages(torch.tensor([0.1, 0.0, 1.0], dtype=torch.float64), torch.tensor([4, 4, 4]), *arguments)
    assert [value.tolist() for value in plain] == [value.tolist() for value in tensors]


# --- Properties of the loss ---


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(1, 5), min_size=1, max_size=5), CONFIGS, st.randoms(use_true_random=False))
def test_micro_batches_weighed_by_their_share_give_the_mini_batch(seed, sizes, config, draw):
    rows = random_rows(seed, sum(sizes))
    loss, gradient, metrics = loss_and_gradient(rows, 2, config)
    order = list(range(len(rows)))
    draw.shuffle(order)
    total, gradients, sums = torch.zeros(()), torch.zeros_like(gradient), dict.fromkeys(metrics, 0.0)
    for size in sizes:
        chosen, order = order[:size], order[size:]
        part, part_gradient, part_metrics = loss_and_gradient(rows[chosen], 2, config)
        total = total + part * size / len(rows)
        gradients[chosen] += part_gradient * size / len(rows)
        sums = {key: sums[key] + value for key, value in part_metrics.items()}
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12, check_dtype=False)
    torch.testing.assert_close(gradients, gradient, rtol=1e-12, atol=1e-12)
    assert sums == pytest.approx(metrics)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(0, 12), CONFIGS)
def test_the_metrics_count_the_rows_with_a_gradient(seed, count, update_index, config):
    rows = random_rows(seed, count)
    _, gradient, metrics = loss_and_gradient(rows, update_index, config)
    live = (gradient != 0).any(-1)
    cross, A = ~rows.is_self, rows.advantages
    assert metrics[hacpo.SELF_SEQUENCES] == rows.is_self.sum()
    assert metrics[hacpo.SELF_ADVANTAGED] == (rows.is_self & (A != 0)).sum()
    assert metrics[hacpo.SELF_LIVE] == (rows.is_self & live).sum()
    assert metrics[hacpo.CROSS_SEQUENCES] == cross.sum()
    assert metrics[hacpo.CROSS_POSITIVE] == (cross & (A > 0)).sum()
    assert metrics[hacpo.CROSS_POSITIVE_LIVE] == (cross & (A > 0) & live).sum()
    assert metrics[hacpo.CROSS_NEGATIVE] == (cross & (A < 0)).sum()
    assert metrics[hacpo.CROSS_NEGATIVE_LIVE] == (cross & (A < 0) & live).sum()


def test_sequence_ratios_are_clamped_and_read_nothing_under_the_mask():
    rows = rows_at([0.5, 0.9, 1e9], [1.0, 1.0, 1.0])
    target = torch.cat([rows.target_logps, torch.full((3, 1), math.nan)], -1)
    mask = torch.cat([rows.mask, torch.zeros(3, 1, dtype=torch.bool)], -1)
    ratios = sequence_ratios(target, mask, rows.source_mean_logp, HacpoConfig(max_abs_log_ratio=3.0))
    assert ratios.tolist() == pytest.approx([0.5, 0.9, math.exp(3)])
    with pytest.raises(ValueError, match="source_mean_logp"):
        sequence_ratios(target, mask, rows.source_mean_logp[:2], HacpoConfig())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_gradient_outside_the_paper_band(advantage):
    ratios = [0.5, 0.79, 0.81, 0.99, 1.01, 2.0]
    _, gradient, _ = loss_and_gradient(rows_at(ratios, [advantage] * 6, omega=2.0), 0, HacpoConfig())
    wanted = [0, 0, 0.81, 0.99, 0, 0]
    # c^(1 + alpha) w A, over six rows of three tokens.
    expected = [-(ratio**2) * 2 * advantage / 6 / 3 for ratio in wanted]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64)[:, None].expand(6, 3))


def test_the_band_rises_with_the_updates_and_closes_at_one():
    rows = rows_at([0.85, 0.95], [1.0, 1.0])
    live = [live_rows(rows, update) for update in (0, 4, 8, 1000)]
    assert live == [[True, True], [False, True], [False, False], [False, False]]
    assert math.isfinite(loss_and_gradient(rows, 1000, HacpoConfig())[0].item())


def test_the_signed_band_of_positive_rows():
    config = HacpoConfig(cross_band="signed", alpha=0.5)
    ratios = [0.04, 0.06, 0.5, 1.0, 3.0, math.exp(12)]
    # No w; the weight stops growing at s = 1, and the gradient goes on; below the floor there is nothing.
    weights = [0.0, 0.06**1.5, 0.5**1.5, 1.0, 1.0, 1.0]
    loss, gradient, _ = loss_and_gradient(rows_at(ratios, [2.0] * 6, omega=7.0), 1000, config)
    assert loss.item() == pytest.approx(-2 * sum(weights) / 6)
    expected = torch.tensor([-2 * weight / 6 / 3 for weight in weights], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected[:, None].expand(6, 3))


@pytest.mark.parametrize(("omega", "weight"), [(7.0, 1.0), (0.4, 0.4)])
def test_the_signed_band_of_negative_rows_is_the_papers_with_omega_capped(omega, weight):
    ratios = [0.5, 0.9, 1.5]
    signed = loss_and_gradient(rows_at(ratios, [-1.0] * 3, omega=omega), 1, HacpoConfig(cross_band="signed"))
    paper = loss_and_gradient(rows_at(ratios, [-1.0] * 3, omega=weight), 1, HacpoConfig())
    torch.testing.assert_close(signed[:2], paper[:2])


def test_own_rows_are_clipped_on_the_side_that_the_advantage_pushes_to():
    rows = rows_at([0.9, 1.0, 1.1, 0.9, 1.0, 1.1], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], own=True, omega=5.0)
    assert live_rows(rows) == [True, True, False, False, True, True]


def test_a_batch_without_a_live_row_has_a_zero_gradient():
    rows = rows_at([0.3, 0.9], [1.0, 0.0])
    assert not loss_and_gradient(rows, 0, HacpoConfig())[1].any()


# --- Ablations ---


def test_without_the_capability_baseline_the_group_has_its_plain_mean():
    rewards, sources = [1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"]
    config = HacpoConfig(capability_baseline=False)
    advantages, baselines = joint_advantages(rewards, [0] * 4, sources, "a", {"a": 0.9, "b": 0.1}, config)
    assert baselines.tolist() == pytest.approx([0.75] * 4)
    assert advantages.tolist() == pytest.approx([(r - 0.75) / (stdev(rewards) + 1e-6) for r in rewards])
    # Of rewards beyond [0, 1] too: the guard is for the weighted baseline.
    _, baselines = joint_advantages([3.0, 1.0], [0, 0], ["a", "b"], "a", {"a": 0.9, "b": 0.1}, config)
    assert baselines.tolist() == [2.0, 2.0]


def test_without_the_capability_on_the_gradient_omega_does_not_enter():
    ratios, advantages = [0.85, 0.9, 1.2], [1.0, -1.0, 1.0]
    for band in ("paper", "signed"):
        with_it, without = HacpoConfig(cross_band=band), HacpoConfig(cross_band=band, capability_on_gradient=False)
        plain = loss_and_gradient(rows_at(ratios, advantages, omega=0.4), 1, without)
        unit = loss_and_gradient(rows_at(ratios, advantages, omega=1.0), 1, with_it)
        torch.testing.assert_close(plain[:2], unit[:2])


def test_without_the_cross_clip_every_ratio_has_its_gradient():
    ratios, advantages = [0.1, 0.9, 3.0], [1.0, -1.0, -1.0]
    config = HacpoConfig(cross_clip=False, alpha=1.0)
    loss, gradient, _ = loss_and_gradient(rows_at(ratios, advantages, omega=2.0), 7, config)
    weights = [ratio**2 * 2 * A for ratio, A in zip(ratios, advantages, strict=True)]
    assert loss.item() == pytest.approx(-sum(weights) / 3)
    expected = torch.tensor([-weight / 3 / 3 for weight in weights], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected[:, None].expand(3, 3))


def test_the_band_may_rise_by_the_share_of_the_steps_updates():
    plain, scaled = HacpoConfig(), HacpoConfig(m_scale=4.0)
    assert [scaled_update_index(made, 16, plain) for made in (0, 5, 16)] == [0, 5, 16]
    assert [scaled_update_index(made, 16, scaled) for made in (0, 4, 16)] == [0, 1, 4]
    assert scaled_update_index(0, 0, scaled) == 0
    with pytest.raises(ValueError, match="made"):
        scaled_update_index(3, 2, scaled)
    # .8 + 2.5 * .025 = .8625
    assert live_rows(rows_at([0.86, 0.87], [1.0, 1.0]), 2.5) == [False, True]


def test_median_ratios_are_by_source():
    ratios, sources = [0.9, 0.001, 0.01, 0.04, 0.2, 0.06, 0.001], list("abbbccc")
    assert median_ratios(ratios, sources) == pytest.approx({"a": 0.9, "b": 0.01, "c": 0.06})
    with pytest.raises(ValueError, match="sources"):
        median_ratios(ratios, sources[:2])
    for bad in (math.nan, -0.1):
        with pytest.raises(ValueError, match="ratios"):
            median_ratios([bad], ["b"])


# --- KL ---


def test_k3_kl_and_its_gradient():
    target = torch.tensor([[-1.0, -0.5, math.nan], [-2.0, -0.1, -0.7]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -0.4, 80.0], [-2.0, -0.1, -0.7]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    kl = k3_kl(target, reference, mask)
    k3 = [math.exp(d) - d - 1 for d in (-0.5, 0.1)]
    assert kl.tolist() == pytest.approx([sum(k3) / 2, 0.0])
    kl.sum().backward()
    wanted = torch.tensor([[(1 - math.exp(-0.5)) / 2, (1 - math.exp(0.1)) / 2, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(target.grad, wanted)
    assert reference.grad is None


def test_k3_kl_of_a_token_that_the_learner_has_ruled_out_is_finite():
    learner = torch.tensor([[-200.0, -1.0]], requires_grad=True)
    kl = k3_kl(learner, torch.full((1, 2), -1.0), torch.ones(1, 2))
    assert kl.item() == pytest.approx((math.exp(20) - 21) / 2)
    assert torch.autograd.grad(kl.sum(), learner)[0].isfinite().all()


# --- Capabilities ---


def test_an_absent_agent_keeps_its_history_and_the_window_slides():
    tracker = CapabilityTracker(window=2)
    tracker.update({"a": 0.2, "b": 0.5})
    tracker.update({"a": 0.4})
    tracker.update({"a": 0.8})
    assert tracker.capabilities() == pytest.approx({"a": 0.6, "b": 0.5})


def test_each_mean_reward_is_floored():
    tracker = CapabilityTracker(window=2, floor=0.1)
    tracker.update({"a": 0.0})
    tracker.update({"a": 0.5})
    assert tracker.capabilities() == pytest.approx({"a": 0.3})


def test_a_restored_tracker_goes_on_as_if_never_stopped():
    tracker = CapabilityTracker(window=3)
    for value in (0.1, 0.2, 0.3):
        tracker.update({"a": value, "b": 0.0})
    restored = CapabilityTracker(window=3)
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    for each in (tracker, restored):
        each.update({"a": 0.9})
    assert restored.capabilities() == tracker.capabilities()


@pytest.mark.parametrize(("source", "learner", "ratio"), [(0.3, 0.6, 0.5), (1e-8, 0.6, 0.1), (0.6, 1e-8, 10.0)])
def test_capability_ratio_is_clipped(source, learner, ratio):
    assert capability_ratio(source, learner) == pytest.approx(ratio)
