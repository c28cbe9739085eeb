"""HACPO (arXiv 2603.02604): capabilities, joint advantages, and the loss of a mini-batch.

The paper's sections 3.1 to 3.4 (eqs. 6-14) and appendix E (eqs. 47-53), for any number of agents. Notation: k is the
learner, j(i) the source of rollout i, P_j an agent's capability, w = P_j / P_k, B rollouts, T tokens. Beyond the paper:
a group of equal rewards has advantage 0, since a capability weight must not make a signal out of none; and
``baseline_guard`` and the "signed" cross band, which ``HacpoConfig`` describes.

Every objective is a function of the sequence ratio s = exp(mean log-prob under k - under j) whose slope in the mean
log-prob is either 0 or the objective's own value. So an objective is kept as its values and the mask of its live rows,
those with a gradient, and what is counted of them tells a trainer whether there is anything to step on.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacrl_fed.algorithms import checks
from hacrl_fed.algorithms.config import HacpoConfig as HacpoConfig
from hacrl_fed.algorithms.config import check_window
from hacrl_fed.algorithms.scalars import check_number, check_positive

# Metrics of a loss: counts of rows, so those of micro-batches add up to those of the mini-batch. Where a loss clips each
# token, a row counts as live by the share of its tokens that have a gradient.
SELF_SEQUENCES = "self_sequences"  # own rollouts
SELF_ADVANTAGED = "self_advantaged"  # those with an advantage
SELF_LIVE = "self_live"  # those with a gradient
CROSS_SEQUENCES = "cross_sequences"  # rollouts of others
CROSS_POSITIVE = "cross_positive"  # those with A > 0
CROSS_POSITIVE_LIVE = "cross_positive_live"  # those with A > 0 and a gradient
CROSS_NEGATIVE = "cross_negative"  # those with A < 0
CROSS_NEGATIVE_LIVE = "cross_negative_live"  # those with A < 0 and a gradient

_STD_EPS = 1e-6
_MAX_KL_LOG_RATIO = 20.0


class CapabilityTracker:
    """Capability P_j of each agent: the mean of its last ``window`` steps' mean rewards (section 3.1, eqs. 6-14).

    Each mean reward is floored at ``floor``, so that a ratio of capabilities is always defined. An agent absent from a
    step keeps its history.
    """

    def __init__(self, window: int = 5, floor: float = 1e-8) -> None:
        check_window(window)
        check_positive("floor", floor)
        self._window = window
        self._floor = floor
        self._history: dict[str, deque[float]] = {}

    def update(self, mean_rewards: Mapping[str, float]) -> None:
        """Adds a step: the mean reward of the step's rollouts of each agent present.

        Raises ValueError for a mean reward that is not finite; nothing is added then.
        """
        for agent, mean_reward in mean_rewards.items():
            check_number(f"mean_rewards of {agent!r}", mean_reward)
        for agent, mean_reward in mean_rewards.items():
            self._history.setdefault(agent, self._window_of([])).append(max(float(mean_reward), self._floor))

    def capabilities(self) -> dict[str, float]:
        """P_j of each agent seen so far."""
        return {agent: math.fsum(history) / len(history) for agent, history in self._history.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain data (JSON-able): the floored mean rewards within the window, oldest first."""
        return {"history": {agent: list(history) for agent, history in self._history.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the history with one of ``state_dict``. A malformed one raises ValueError and changes nothing."""
        history = state.get("history") if isinstance(state, Mapping) else None
        if not isinstance(history, Mapping):
            raise ValueError("state must come from CapabilityTracker.state_dict: it has no history")
        for agent, values in history.items():
            numbers = isinstance(values, Sequence) and all(isinstance(value, float) for value in values)
            if not numbers or not values or not all(0 < value < math.inf for value in values):
                raise ValueError(f"state must hold positive mean rewards, not {values!r} for {agent!r}")
        self._history = {agent: self._window_of(values) for agent, values in history.items()}

    def _window_of(self, values: Sequence[float]) -> deque[float]:
        return deque(values, maxlen=self._window)


def capability_ratio(source: float, learner: float, lo: float = 0.1, hi: float = 10.0) -> float:
    """w(j -> k) = P_j / P_k, clipped to [lo, hi] (section 3.2, eqs. 6-14; the bounds are ours).

    Raises ValueError unless both capabilities are positive and 0 < lo <= hi.
    """
    for name, value in (("source", source), ("learner", learner)):
        check_positive(name, value)
    if not 0 < lo <= hi:
        raise ValueError(f"lo and hi must be positive and in order, not {lo} and {hi}")
    return min(max(source / learner, lo), hi)


def joint_advantages(
    rewards: Tensor | Sequence[float],
    prompt_index: Tensor | Sequence[int],
    sources: Sequence[str],
    learner: str,
    capabilities: Mapping[str, float],
    config: HacpoConfig,
) -> tuple[Tensor, Tensor]:
    """Advantages of all agents' rollouts for one learner (section 3.1, eqs. 6-14; appendix E, eqs. 47-53).

    Over the rollouts i of a group, mu = mean_i(R_i / w(j(i) -> k)) and A_i = (R_i - mu) / (sd + 1e-6), with sd the
    sample standard deviation (n - 1) of the unweighted rewards. A group of equal rewards (to 1e-6) has advantage 0, and
    under ``baseline_guard`` a mu above 1 gives way to the mean of the learner's own rewards, where it has some. Without
    ``capability_baseline`` mu is the plain mean.

    Args:
        rewards: (B,), verified.
        prompt_index: (B,) integers; rollouts with the same one form a group, of any size and in any order.
        sources: (B,) agent ids, among them the learner's, unless it has no rollouts.
        learner: the learner's agent id.
        capabilities: P_j of the learner and of every source.

    Returns:
        Advantages (B,) and baselines mu (B,), float64, on the device of ``rewards``.

    Raises ValueError, naming the argument: no rollouts, unequal lengths, a reward that is not finite, an index that is
    no integer, an agent without a capability, a capability that is not positive.
    """
    rewards_B = checks.rewards(rewards)
    count, device = len(rewards_B), rewards_B.device
    index_B = checks.integers("prompt_index", prompt_index, count, device)
    checks.agents(sources, count)

    if not isinstance(capabilities, Mapping):
        raise ValueError(f"capabilities must map agents to numbers, not be {type(capabilities).__name__}")
    for agent, capability in capabilities.items():
        check_positive(f"capabilities of {agent!r}", capability)
    if learner not in capabilities:
        raise ValueError(f"learner {learner!r} has no capability")
    agents = set(sources)
    if unknown := sorted(agents - capabilities.keys()):
        raise ValueError(f"sources must have a capability each, but {unknown[0]!r} has none")
    omega = {
        agent: capability_ratio(capabilities[agent], capabilities[learner], config.ratio_min, config.ratio_max)
        if config.capability_baseline
        else 1.0
        for agent in agents
    }
    omega_B = torch.tensor([omega[agent] for agent in sources], dtype=torch.float64, device=device)
    own_B = torch.tensor([float(agent == learner) for agent in sources], dtype=torch.float64, device=device)

    prompts, group_B = torch.unique(index_B, return_inverse=True)

    def group_sum(values_B: Tensor) -> Tensor:
        return torch.zeros(len(prompts), dtype=torch.float64, device=device).index_add(0, group_B, values_B)

    size = group_sum(torch.ones_like(rewards_B))
    highest, lowest = (
        torch.zeros_like(size).scatter_reduce(0, group_B, rewards_B, how, include_self=False)
        for how in ("amax", "amin")
    )
    mu = group_sum(rewards_B / omega_B) / size
    own_count = group_sum(own_B)
    if config.baseline_guard and config.capability_baseline:
        own_mean = group_sum(rewards_B * own_B) / own_count.clamp(min=1)
        mu = torch.where((mu > 1) & (own_count > 0), own_mean, mu)
    # Rewards that differ by rounding alone are equal: the division by their deviation would blow the difference up.
    equal = highest - lowest <= _STD_EPS
    mu = torch.where(equal, highest, mu)

    baselines_B = mu[group_B]
    advantages_B = torch.where(equal[group_B], 0, rewards_B - baselines_B)
    if config.normalize_by_std:
        deviation_B = rewards_B - (group_sum(rewards_B) / size)[group_B]
        sd = (group_sum(deviation_B.square()) / (size - 1).clamp(min=1)).sqrt()
        advantages_B = advantages_B / (sd[group_B] + _STD_EPS)
    return advantages_B, baselines_B


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Rows of a (micro-)batch reduced to one number each; all (B,), in the dtype of the learner's log-probs.

    Attributes:
        mean_logp: mean log-prob a token under the learner, with its gradient.
        log_ratio: log s = mean_logp - source_mean_logp, without gradient, not clamped.
        advantages: A.
        is_self: bool, the learner's own rollouts.
        omega: w(j -> k); not used of own rollouts.
    """

    mean_logp: Tensor
    log_ratio: Tensor
    advantages: Tensor
    is_self: Tensor
    omega: Tensor

    @classmethod
    def of(
        cls,
        target_logps: Tensor,
        mask: Tensor,
        source_mean_logp: Tensor,
        advantages: Tensor,
        is_self: Tensor,
        omega: Tensor,
    ) -> "SequenceBatch":
        """Checks and reduces the arguments of ``hacpo_loss``, which says what is raised."""
        mask_BT = checks.token_mask(target_logps, mask)
        mean_logp = checks.masked_mean(target_logps, mask_BT)
        shape, dtype, device = mean_logp.shape, target_logps.dtype, target_logps.device

        def row(name: str, values: Tensor) -> Tensor:
            values_B = checks.vector(name, values, dtype).detach().to(device)
            checks.shape(name, values_B, shape)
            return values_B

        omega_B = row("omega", omega)
        if not bool((omega_B > 0).all()):
            raise ValueError("omega must be positive")
        return cls(
            mean_logp=mean_logp,
            log_ratio=mean_logp.detach() - row("source_mean_logp", source_mean_logp),
            advantages=row("advantages", advantages),
            is_self=checks.flags("is_self", is_self, shape, device),
            omega=omega_B,
        )

    def ratio(self, config: HacpoConfig) -> Tensor:
        """Sequence ratio s (B,) (section 3.3; GSPO, eq. 7), its log clamped to ±``max_abs_log_ratio``."""
        return clamped_exp(self.log_ratio, config)

    def unclamped(self, config: HacpoConfig) -> Tensor:
        """Rows (B,) bool whose log ratio is not clamped; s has no gradient in the others."""
        return self.log_ratio.abs() <= config.max_abs_log_ratio


def self_objective(batch: SequenceBatch, config: HacpoConfig) -> tuple[Tensor, Tensor]:
    """min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) (GSPO, arXiv 2507.18071, eq. 5; the own term of eqs. 47-53).

    Returns the values (B,) and the rows (B,) bool with gradient.
    """
    s, A = batch.ratio(config), batch.advantages
    values, inside = clipped_objective(s, A, 1 - config.eps_low, 1 + config.eps_high)
    return values, inside & batch.unclamped(config)


def clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, low, high) A), PPO's (arXiv 1707.06347, eq. 7), and where it has a gradient; of any shape."""
    values = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    inside = torch.where(advantages > 0, ratio <= high, ratio >= low)
    return values, inside & (advantages != 0)


def _cross_objective(batch: SequenceBatch, update_index: float, config: HacpoConfig) -> tuple[Tensor, Tensor]:
    """c · stopgrad(c)^alpha · w · A with c = clip(s, low, 1), no min() (sections 3.2-3.4; appendix E, eqs. 47-53).

    low = min(1, cross_clip_low + update_index · cross_clip_step). In the "signed" band w is capped at 1 for A < 0, and
    rows with A > 0 have the value and weight min(s, 1)^(1 + alpha) · A from ``positive_floor`` up, 0 below. Without
    ``cross_clip`` c is s; without ``capability_on_gradient`` w is 1.
    Returns the values (B,) and the rows (B,) bool with gradient.
    """
    s, A = batch.ratio(config), batch.advantages
    low, high = 0.0, math.inf
    if config.cross_clip:
        low, high = min(1.0, config.cross_clip_low + update_index * config.cross_clip_step), 1.0
    signed = config.cross_band == "signed"
    omega = batch.omega if config.capability_on_gradient else torch.ones_like(batch.omega)
    if signed:
        omega = omega.clamp(max=1)
    values = s.clamp(low, high) ** (1 + config.alpha) * omega * A
    live = (s >= low) & (s <= high) & batch.unclamped(config)
    if signed:
        above_floor = s >= config.positive_floor
        positive_values = torch.where(above_floor, s.clamp(max=1) ** (1 + config.alpha) * A, 0)
        values = torch.where(A > 0, positive_values, values)
        live = torch.where(A > 0, above_floor, live)
    return values, live & (A != 0)


def scaled_update_index(made: int, planned: int, config: HacpoConfig) -> float:
    """m of the rising band after ``made`` of a step's ``planned`` updates (section 3.4).

    The count itself, or under ``m_scale`` that many at the step's end, however many mini-batches it is cut into. Raises
    ValueError unless 0 <= made <= planned.
    """
    if not 0 <= made <= planned:
        raise ValueError(f"made must be between 0 and planned ({planned}), not {made}")
    return float(made) if config.m_scale is None else config.m_scale * made / max(1, planned)


def sequence_loss(batch: SequenceBatch, values: Tensor, live: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Loss -mean over the B rows of an objective with the given values (B,) and live rows (B,), and its metrics."""
    # The last factor is 1; its derivative makes d objective / d mean_logp = value in live rows and 0 in the others.
    objective = values * (1 + live * (batch.mean_logp - batch.mean_logp.detach()))
    return -objective.mean(), loss_metrics(batch, live.to(values))


def loss_metrics(batch: SequenceBatch, live_share: Tensor) -> dict[str, float]:
    """The metrics of a loss, by the names above; ``live_share`` (B,) is how much of each row has a gradient, 0 to 1."""
    own, cross = batch.is_self, ~batch.is_self
    positive, negative = cross & (batch.advantages > 0), cross & (batch.advantages < 0)
    sums = {
        SELF_SEQUENCES: own,
        SELF_ADVANTAGED: own & (batch.advantages != 0),
        SELF_LIVE: own * live_share,
        CROSS_SEQUENCES: cross,
        CROSS_POSITIVE: positive,
        CROSS_POSITIVE_LIVE: positive * live_share,
        CROSS_NEGATIVE: negative,
        CROSS_NEGATIVE_LIVE: negative * live_share,
    }
    # Stacked, so that an accelerator is waited for once.
    totals: list[float] = torch.stack([rows.sum().to(live_share.dtype) for rows in sums.values()]).tolist()
    return dict(zip(sums, totals, strict=True))


def sequence_ratios(target_logps: Tensor, mask: Tensor, source_mean_logp: Tensor, config: HacpoConfig) -> Tensor:
    """Sequence ratios s (B,) without gradient (section 3.3); arguments and errors as in ``hacpo_loss``."""
    mean_logp = checks.masked_mean(target_logps.detach(), checks.token_mask(target_logps, mask))
    source_B = checks.vector("source_mean_logp", source_mean_logp, target_logps.dtype).to(target_logps.device)
    checks.shape("source_mean_logp", source_B, mean_logp.shape)
    return clamped_exp(mean_logp - source_B, config)


def clamped_exp(log_ratio: Tensor, config: HacpoConfig) -> Tensor:
    """Ratios from their logs, of any shape, the logs clamped to ±``max_abs_log_ratio``."""
    return log_ratio.clamp(-config.max_abs_log_ratio, config.max_abs_log_ratio).exp()


def hacpo_loss(
    target_logps: Tensor,
    mask: Tensor,
    source_mean_logp: Tensor,
    advantages: Tensor,
    is_self: Tensor,
    omega: Tensor,
    update_index: float,
    config: HacpoConfig,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of HACPO over own and cross rollouts (sections 3.2-3.4, eqs. 6-14; appendix E, eqs. 47-53).

    -mean over the B rows given: a micro-batch's loss times its share of the mini-batch's rows adds up to the
    mini-batch's. ``self_objective`` gives the objective of own rows, GSPO's. That of cross rows is
    c · stopgrad(c)^alpha · w · A with c = clip(s, min(1, cross_clip_low + update_index · cross_clip_step), 1).

    Args:
        target_logps: (B, T) log-probs of the tokens under the learner, in nats, float32 or float64; with gradient.
        mask: (B, T), true (or 1) where a token counts, at least once a row; the others' log-probs are not read.
        source_mean_logp: (B,) mean log-prob a token under the source, in the source's own tokens, in nats.
        advantages: (B,) of ``joint_advantages``.
        is_self: (B,), true (or 1) for the learner's own rollouts.
        omega: (B,) ``capability_ratio`` from the source to the learner, 1 for own rollouts.
        update_index: m, the optimizer updates already made in this step, own ones included (``scaled_update_index``).

    Returns:
        The loss, a scalar, and the metrics by the names above.

    Raises ValueError, naming the argument: a wrong shape or dtype, no rows, a row without a token, a value that is not
    finite, a mask or flag other than 0 and 1, an omega that is not positive, a negative update index.
    """
    check_number("update_index", update_index, low=0)
    batch = SequenceBatch.of(target_logps, mask, source_mean_logp, advantages, is_self, omega)
    self_values, self_live = self_objective(batch, config)
    cross_values, cross_live = _cross_objective(batch, update_index, config)
    values = torch.where(batch.is_self, self_values, cross_values)
    return sequence_loss(batch, values, torch.where(batch.is_self, self_live, cross_live))


def median_ratios(ratios: Tensor | Sequence[float], sources: Sequence[str]) -> dict[str, float]:
    """Median ratio of each source's rollouts, which ``source_floor`` is compared with.

    Args:
        ratios: (B,) sequence ratios s before the step's updates.
        sources: (B,) agent ids.

    Raises ValueError, naming the argument, for unequal lengths or ratios that are not finite or below 0.
    """
    ratios_B = checks.vector("ratios", ratios, torch.float64)
    if bool((ratios_B < 0).any()):
        raise ValueError("ratios must be at least 0")
    checks.agents(sources, len(ratios_B))
    by_source: dict[str, list[float]] = {}
    for source, ratio in zip(sources, ratios_B.tolist(), strict=True):
        by_source.setdefault(source, []).append(ratio)
    return {source: statistics.median(values) for source, values in by_source.items()}


def k3_kl(target_logps: Tensor, reference_logps: Tensor, mask: Tensor) -> Tensor:
    """KL(learner || reference) a token by the k3 estimator (Schulman, "Approximating KL divergence", 2020).

    k3 = exp(d) - d - 1 with d = reference log-prob - learner's, averaged over a row's tokens. d is clamped to ±20, so that a
    single token that the learner has ruled out does not make it infinite.

    Args:
        target_logps: (B, T) log-probs under the learner, with gradient.
        reference_logps: (B, T) under the reference; no gradient flows to it.
        mask: (B, T), true (or 1) where a token counts, at least once a row.

    Returns:
        (B,), in nats. Raises ValueError as ``hacpo_loss`` does.
    """
    mask_BT = checks.token_mask(target_logps, mask)
    reference = checks.token_logps("reference_logps", reference_logps, target_logps, mask_BT)
    # Masked before the exponential: what is under the mask may be anything, and 0 · inf would be nan in the gradient.
    d = torch.where(mask_BT, reference - target_logps, 0).clamp(-_MAX_KL_LOG_RATIO, _MAX_KL_LOG_RATIO)
    return checks.masked_mean(torch.expm1(d) - d, mask_BT)
