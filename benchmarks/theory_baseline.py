"""Theorem 4.1 of HACPO (arXiv 2603.02604, first version), by simulation: the baseline of a joint group is unbiased.

Weighed by the true capability ratio, its expectation is the learner's expected reward. Here is by how much the estimated
ratio and each rule of the implementation miss that. Two agents, ``LEARNER`` and ``SOURCE``; rewards are 0 or 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hacrl_fed.algorithms.baselines import naive_advantages
from hacrl_fed.algorithms.hacpo import CapabilityTracker, HacpoConfig, capability_ratio, joint_advantages

LEARNER, SOURCE = "learner", "source"
GROUP_SIZE = 8  # rollouts an agent and prompt, as in the paper

DEFAULTS = HacpoConfig()
BOUNDS_ONLY = replace(DEFAULTS, baseline_guard=False)
GUARD_ONLY = replace(DEFAULTS, ratio_min=1e-9, ratio_max=1e9)
# The baseline of the theorem, but for groups of equal rewards.
AS_IN_THE_THEOREM = replace(GUARD_ONLY, baseline_guard=False)


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    se: float

    @classmethod
    def of(cls, samples: Tensor) -> "Estimate":
        """Of independent samples (N,)."""
        return cls(samples.mean().item(), (samples.std() / math.sqrt(len(samples))).item())

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.se:.4f}"


@dataclass(frozen=True)
class Prompts:
    """True success probabilities (Q,) of both agents on Q prompts; an agent's true capability is its mean over them."""

    learner: Tensor
    source: Tensor

    @property
    def capabilities(self) -> dict[str, float]:
        return {LEARNER: self.learner.mean().item(), SOURCE: self.source.mean().item()}

    def __len__(self) -> int:
        return len(self.learner)


@dataclass(frozen=True)
class Rollouts:
    """Groups of equal size: the learner's ``GROUP_SIZE`` rollouts, then the source's. ``rewards`` is (groups, 2G)."""

    rewards: Tensor

    @property
    def learner(self) -> Tensor:
        """(groups, GROUP_SIZE)"""
        return self.rewards[:, :GROUP_SIZE]

    @property
    def source(self) -> Tensor:
        """(groups, GROUP_SIZE)"""
        return self.rewards[:, GROUP_SIZE:]

    @property
    def prompt_index(self) -> Tensor:
        groups, size = self.rewards.shape
        return torch.arange(groups).repeat_interleave(size)

    @property
    def sources(self) -> list[str]:
        return ([LEARNER] * GROUP_SIZE + [SOURCE] * GROUP_SIZE) * len(self.rewards)


def equal_prompts(learner: float, source: float, count: int) -> Prompts:
    """Theorem 4.1's setting: every prompt is as hard as any other."""
    return Prompts(torch.full((count,), learner).double(), torch.full((count,), source).double())


def proportional_prompts(learner: float, source: float, count: int, generator: torch.Generator) -> Prompts:
    """Theorem 4.1 with prompts of varying difficulty, by which both agents' success scales alike."""
    difficulty = torch.rand(count, dtype=torch.float64, generator=generator)
    difficulty = difficulty / difficulty.mean()
    return Prompts(_probabilities(learner * difficulty), _probabilities(source * difficulty))


def specialised_prompts(learner: float, source: float, count: int, generator: torch.Generator) -> Prompts:
    """Theorem 4.1 where P_j / P_k differs by prompt: what an agent finds easy says nothing of what the other does."""
    own, foreign = torch.rand(2, count, dtype=torch.float64, generator=generator)
    return Prompts(_probabilities(learner * own / own.mean()), _probabilities(source * foreign / foreign.mean()))


def _probabilities(values: Tensor) -> Tensor:
    assert values.max() <= 1, "capabilities up to about a half keep all success probabilities below 1"
    return values


def draw_rollouts(prompts: Prompts, generator: torch.Generator) -> Rollouts:
    """A group of Bernoulli rewards for each prompt, as theorem 4.1 assumes them: independent given the prompt."""
    chances = torch.stack([prompts.learner, prompts.source], 1).repeat_interleave(GROUP_SIZE, 1)
    return Rollouts(torch.bernoulli(chances, generator=generator))


def theorem_baseline(rollouts: Rollouts, omega: float) -> Tensor:
    """Theorem 4.1's mu (groups,): the mean of R_i / w over the group, w = 1 for own rollouts, without any rule of ours."""
    return torch.cat([rollouts.learner, rollouts.source / omega], 1).mean(1)


def library_baseline(rollouts: Rollouts, capabilities: dict[str, float], config: HacpoConfig) -> Tensor:
    """mu (groups,) of ``joint_advantages`` for theorem 4.1's learner."""
    _, baselines = joint_advantages(
        rollouts.rewards.flatten(), rollouts.prompt_index, rollouts.sources, LEARNER, capabilities, config
    )
    return baselines.view_as(rollouts.rewards)[:, 0]


def naive_baseline(rollouts: Rollouts) -> Tensor:
    """The plain mean (groups,) of the pooled group, to which theorem 4.1 compares mu."""
    _, baselines = naive_advantages(
        rollouts.rewards.flatten(), rollouts.prompt_index, rollouts.sources, LEARNER, {}, DEFAULTS
    )
    return baselines.view_as(rollouts.rewards)[:, 0]


@dataclass(frozen=True)
class TrueRatioRow:
    """Theorem 4.1 with the true ratio: bias over prompts, and the root mean square of the biases prompt by prompt.

    Attributes:
        theorem: bias of the theorem's mean.
        library: bias of ``joint_advantages`` without its guard and bounds; groups of equal rewards take the plain mean.
        naive: bias of the pooled mean.
        theorem_by_prompt, naive_by_prompt: sqrt(mean over prompts of (E[mu | prompt] - p_k(prompt))^2).
    """

    prompts: str
    theorem: Estimate
    library: Estimate
    naive: Estimate
    theorem_by_prompt: float
    naive_by_prompt: float


def true_ratio(name: str, prompts: Prompts, generator: torch.Generator, repeats: int = 64) -> TrueRatioRow:
    """Theorem 4.1's bias E[mu] - P_k with the true capability ratio, from ``repeats`` groups a prompt."""
    omega = capability_ratio(
        prompts.capabilities[SOURCE], prompts.capabilities[LEARNER], AS_IN_THE_THEOREM.ratio_min, math.inf
    )
    draws = [draw_rollouts(prompts, generator) for _ in range(repeats)]
    errors = {
        "theorem": torch.stack([theorem_baseline(draw, omega) for draw in draws]) - prompts.learner,
        "library": torch.stack([library_baseline(draw, prompts.capabilities, AS_IN_THE_THEOREM) for draw in draws])
        - prompts.learner,
        "naive": torch.stack([naive_baseline(draw) for draw in draws]) - prompts.learner,
    }
    # The prompts are what they are, so the noise of the mean is that within prompts; a prompt's mean is one sample.
    biases = {
        key: Estimate(error.mean().item(), (error.var(0).mean() / error.numel()).sqrt().item())
        for key, error in errors.items()
    }
    return TrueRatioRow(
        name,
        **biases,
        theorem_by_prompt=_rms_of_means(errors["theorem"]),
        naive_by_prompt=_rms_of_means(errors["naive"]),
    )


def _rms_of_means(samples_RQ: Tensor) -> float:
    """sqrt(mean_q E[x_q]^2) from R samples of each, without the bias that squaring noisy means has."""
    squares = samples_RQ.mean(0).square() - samples_RQ.var(0) / len(samples_RQ)
    return math.sqrt(max(squares.mean().item(), 0.0))


@dataclass(frozen=True)
class EstimatedRatioRow:
    """Theorem 4.1 with the estimated ratio, against the true one on the same rollouts.

    Attributes:
        window: steps that a capability is averaged over.
        rollouts: of each agent in a step.
        drift: by which the learner's success probability has risen each step.
        bias: E[mu with the estimated ratio - mu with the true one]; the latter's own bias is 0 by the theorem.
        rmse: root of the mean square of that difference.
        ratio_rmse: root of the mean square of the ratio's relative error.
    """

    window: int
    rollouts: int
    drift: float
    bias: Estimate
    rmse: float
    ratio_rmse: float


def estimated_ratio(
    learner: float,
    source: float,
    windows: Sequence[int],
    rollouts: int,
    replicates: int,
    generator: torch.Generator,
    drift: float = 0.0,
) -> list[EstimatedRatioRow]:
    """Theorem 4.1 where ``CapabilityTracker`` estimates the ratio from ``rollouts`` an agent and step.

    Each replicate has a history of its own, so that replicates are independent; the windows share it. As in training,
    the step whose baselines are taken is the last one of the window.
    """
    prompts = equal_prompts(learner, source, rollouts // GROUP_SIZE)
    true_omega = capability_ratio(source, learner, BOUNDS_ONLY.ratio_min, BOUNDS_ONLY.ratio_max)
    age = torch.arange(max(windows) - 1, 0, -1, dtype=torch.float64)
    chances = torch.stack([learner - drift * age, torch.full_like(age, source)], 1)
    baseline_errors: dict[int, list[float]] = {window: [] for window in windows}
    ratio_errors: dict[int, list[float]] = {window: [] for window in windows}
    for _ in range(replicates):
        past = torch.binomial(torch.full_like(chances, rollouts), chances, generator) / rollouts
        drawn = draw_rollouts(prompts, generator)
        steps = [*past.tolist(), [drawn.learner.mean().item(), drawn.source.mean().item()]]
        with_true_ratio = library_baseline(drawn, prompts.capabilities, BOUNDS_ONLY)
        for window in windows:
            tracker = CapabilityTracker(window)
            for own, foreign in steps[-window:]:
                tracker.update({LEARNER: own, SOURCE: foreign})
            found = tracker.capabilities()
            baseline = library_baseline(drawn, found, BOUNDS_ONLY)
            baseline_errors[window].append((baseline - with_true_ratio).mean().item())
            omega = capability_ratio(found[SOURCE], found[LEARNER], BOUNDS_ONLY.ratio_min, BOUNDS_ONLY.ratio_max)
            ratio_errors[window].append(omega / true_omega - 1)
    return [
        EstimatedRatioRow(
            window,
            rollouts,
            drift,
            bias=Estimate.of(torch.tensor(baseline_errors[window])),
            rmse=_rms(baseline_errors[window]),
            ratio_rmse=_rms(ratio_errors[window]),
        )
        for window in windows
    ]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value**2 for value in values) / len(values))


@dataclass(frozen=True)
class RuleRow:
    """What each rule costs theorem 4.1's baseline, alone, with true capabilities: E[mu with the rule - mu without].

    Attributes:
        learner, source: success probabilities.
        equal_rewards: groups of equal rewards take their plain mean.
        bounds: the ratio is clipped to [0.1, 10].
        guard: a mu above 1 gives way to the mean of the learner's own rewards.
        all_rules: together, as by default.
        naive: the pooled mean's bias, for scale.
    """

    learner: float
    source: float
    equal_rewards: Estimate
    bounds: Estimate
    guard: Estimate
    all_rules: Estimate
    naive: Estimate


def rule_costs(learner: float, source: float, groups: int, generator: torch.Generator) -> RuleRow:
    """Bias that each of our rules adds to theorem 4.1's mean, on the same rollouts."""
    prompts = equal_prompts(learner, source, groups)
    drawn = draw_rollouts(prompts, generator)
    plain = library_baseline(drawn, prompts.capabilities, AS_IN_THE_THEOREM)
    without_any = theorem_baseline(drawn, source / learner)
    return RuleRow(
        learner,
        source,
        equal_rewards=Estimate.of(plain - without_any),
        bounds=Estimate.of(library_baseline(drawn, prompts.capabilities, BOUNDS_ONLY) - plain),
        guard=Estimate.of(library_baseline(drawn, prompts.capabilities, GUARD_ONLY) - plain),
        all_rules=Estimate.of(library_baseline(drawn, prompts.capabilities, DEFAULTS) - without_any),
        naive=Estimate.of(naive_baseline(drawn) - learner),
    )


@dataclass(frozen=True)
class FloorRow:
    """What the floor of 1e-8 costs theorem 4.1's baseline of a learner that hardly ever succeeds.

    Attributes:
        learner, source: success probabilities.
        window, rollouts: as in ``EstimatedRatioRow``.
        floored: share of windows without any success of the learner.
        floor: bias in those windows, E[mu] - E[mu with the true ratio], where the floor alone decides.
        floor_and_bounds: the same where the ratio is clipped to [0.1, 10] too.
    """

    learner: float
    source: float
    window: int
    rollouts: int
    floored: float
    floor: Estimate
    floor_and_bounds: Estimate


def floor_cost(
    learner: float, source: float, window: int, rollouts: int, replicates: int, generator: torch.Generator
) -> FloorRow:
    """Theorem 4.1's baseline in the windows in which the learner's capability is the tracker's floor.

    A floored source costs nothing: its rewards, this step's included, are all 0, and 0 / w is 0 for any w.
    """
    prompts = equal_prompts(learner, source, rollouts // GROUP_SIZE)
    # In windows without success the learner's rewards are known; only the source's are random.
    failing = replace(prompts, learner=torch.zeros_like(prompts.learner))
    floor_alone: list[float] = []
    with_bounds: list[float] = []
    for _ in range(replicates):
        drawn = draw_rollouts(failing, generator)
        past = torch.binomial(torch.full((window - 1,), float(rollouts)), torch.full((window - 1,), source), generator)
        tracker = CapabilityTracker(window)
        for foreign in [*(past / rollouts).tolist(), drawn.source.mean().item()]:
            tracker.update({LEARNER: 0.0, SOURCE: foreign})
        with_true_ratio = library_baseline(drawn, prompts.capabilities, AS_IN_THE_THEOREM)
        for found, config in ((floor_alone, AS_IN_THE_THEOREM), (with_bounds, BOUNDS_ONLY)):
            found.append((library_baseline(drawn, tracker.capabilities(), config) - with_true_ratio).mean().item())
    return FloorRow(
        learner,
        source,
        window,
        rollouts,
        floored=(1 - learner) ** (window * rollouts),
        floor=Estimate.of(torch.tensor(floor_alone)),
        floor_and_bounds=Estimate.of(torch.tensor(with_bounds)),
    )
