"""From a step's rollouts to what the learner trains on: capabilities, advantages, ratios; and the step's metrics of them."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from hacrl_fed.algorithms.config import HacpoConfig
from hacrl_fed.algorithms.hacpo import CapabilityTracker, capability_ratio, clamped_exp, median_ratios
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig
from hacrl_fed.records import FinishReason
from hacrl_fed_client.admission import AdmittedRollout
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.update import TrainingRollout

_FEW_LIVE = 0.2
_ENOUGH_POSITIVES = 8


def training_rollouts(
    rollouts: Sequence[AdmittedRollout],
    prompt_ids: Mapping[str, tuple[int, ...]],
    learner: str,
    tracker: CapabilityTracker,
    algorithm: AlgorithmConfig,
    seed: int,
) -> tuple[list[AdmittedRollout], list[TrainingRollout], dict[str, float]]:
    """Adds the step to the capabilities' history and gives every rollout its advantage and capability ratio.

    ``prompt_ids`` are the step's prompts as the learner renders them, by prompt id. ``seed`` is for a method that learns
    from a sample of the step's rollouts. Returns the rollouts that are learned from, in the order given, the same as the
    learner trains on them, and metrics.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for admitted in rollouts:
        by_source[admitted.source].append(admitted.rollout.reward)
    tracker.update({source: statistics.fmean(rewards) for source, rewards in by_source.items()})
    capabilities = tracker.capabilities()
    # A learner that has generated nothing yet counts as neither stronger nor weaker than the others.
    capabilities.setdefault(learner, statistics.fmean(capabilities.values()))
    config = algorithm.hacpo
    omega = {
        source: capability_ratio(capabilities[source], capabilities[learner], config.ratio_min, config.ratio_max)
        for source in by_source
    }
    prompts = list(dict.fromkeys(admitted.rollout.prompt_id for admitted in rollouts))
    index = {prompt: number for number, prompt in enumerate(prompts)}
    method = METHODS[algorithm.method]
    prompt_index = [index[admitted.rollout.prompt_id] for admitted in rollouts]
    sources = [admitted.source for admitted in rollouts]
    rewards = [admitted.rollout.reward for admitted in rollouts]
    advantages, _ = method.advantages(rewards, prompt_index, sources, learner, capabilities, config)
    learned = torch.ones(len(rollouts), dtype=torch.bool)
    if method.sample is not None:
        learned = method.sample(advantages, prompt_index, sources, learner, seed)
    kept = [admitted for admitted, learn in zip(rollouts, learned.tolist(), strict=True) if learn]
    trained = [
        TrainingRollout(
            source=admitted.source,
            prompt_key=admitted.rollout.prompt_id,
            prompt_ids=prompt_ids[admitted.rollout.prompt_id],
            completion_ids=admitted.completion_ids,
            source_mean_logp=admitted.rollout.mean_logp,
            advantage=advantage,
            omega=omega[admitted.source],
        )
        for admitted, advantage in zip(kept, advantages[learned].tolist(), strict=True)
    ]
    metrics = _reward_metrics(rollouts, learner)
    for source in by_source:
        metrics[f"capability/{source}"] = capabilities[source]
        metrics[f"capability_ratio/{source}"] = omega[source]
    return kept, trained, metrics


def without_foreign_sources(
    rollouts: Sequence[AdmittedRollout],
    prompt_ids: Mapping[str, tuple[int, ...]],
    policy: Policy,
    learner: str,
    config: HacpoConfig,
    check: Callable[[], None],
) -> tuple[list[AdmittedRollout], dict[str, float]]:
    """The rollouts that are left under ``source_floor``, in their order, and each peer's median ratio.

    The learner would hardly ever answer as a source below the floor does. What that source answers carries no gradient then,
    but its rewards would still move the baselines of the learner's own rollouts: a group without a success of its own would
    only be pushed away from what it has.

    Costs a pass without gradient over the cross rollouts; without a floor there is none, and there are no ratios. ``check`` as
    in ``Policy.score``.
    """
    cross = [admitted for admitted in rollouts if admitted.source != learner]
    if not config.source_floor or not cross:
        return list(rollouts), {}
    sequences = [(prompt_ids[admitted.rollout.prompt_id], admitted.completion_ids) for admitted in cross]
    logps = policy.completion_logps(sequences, check)
    means = torch.stack([logps_T.mean() for logps_T in logps])
    source_means = torch.tensor([admitted.rollout.mean_logp for admitted in cross])
    medians = median_ratios(clamped_exp(means - source_means, config), [admitted.source for admitted in cross])
    kept = [admitted for admitted in rollouts if medians.get(admitted.source, math.inf) >= config.source_floor]
    return kept, medians


def few_live_share(trained: Sequence[TrainingRollout], learner: str, metrics: Mapping[str, float]) -> float | None:
    """Share of the cross rollouts with A > 0 that carry gradient, by an update's metrics, where it is worth a warning.

    That is below 20 %, of at least 8: of fewer a share says little.
    """
    positives = sum(row.source != learner and row.advantage > 0 for row in trained)
    share = metrics.get("cross/live_share_positive", 1.0)
    return share if positives >= _ENOUGH_POSITIVES and share < _FEW_LIVE else None


def _reward_metrics(rollouts: Sequence[AdmittedRollout], learner: str) -> dict[str, float]:
    by_source: dict[str, list[AdmittedRollout]] = defaultdict(list)
    for admitted in rollouts:
        by_source[admitted.source].append(admitted)
    own = by_source.pop(learner, [])
    metrics = {"own_rollouts": float(len(own)), "cross_rollouts": float(len(rollouts) - len(own))}
    if own:
        rewards = [admitted.rollout.reward for admitted in own]
        lengths = [len(admitted.completion_ids) for admitted in own]
        metrics["reward_mean"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.pstdev(rewards)
        # The tokens are the policy's own samples, so their mean surprise estimates its entropy a token without bias.
        metrics["entropy"] = -math.fsum(admitted.rollout.logp_sum for admitted in own) / sum(lengths)
        metrics["completion_tokens_mean"] = statistics.fmean(lengths)
        metrics["completion_tokens_max"] = float(max(lengths))
        metrics["truncated_share"] = _share_cut_off(own)
        metrics["zero_variance_groups/own"] = _zero_variance_share(own)
    metrics["zero_variance_groups/joint"] = _zero_variance_share(rollouts)
    for source, theirs in by_source.items():
        here = sum(len(admitted.completion_ids) for admitted in theirs)
        metrics[f"reward_mean/{source}"] = statistics.fmean(admitted.rollout.reward for admitted in theirs)
        metrics[f"completion_tokens_mean/{source}"] = here / len(theirs)
        metrics[f"retokenised_length_ratio/{source}"] = here / sum(each.rollout.token_count for each in theirs)
    return metrics


def _share_cut_off(rollouts: Sequence[AdmittedRollout]) -> float:
    return statistics.fmean(admitted.rollout.finish_reason is FinishReason.LENGTH for admitted in rollouts)


def _zero_variance_share(rollouts: Sequence[AdmittedRollout]) -> float:
    """Share of groups whose rewards are all equal, and which so teach nothing."""
    groups: dict[str, set[float]] = defaultdict(set)
    for admitted in rollouts:
        groups[admitted.rollout.prompt_id].add(admitted.rollout.reward)
    return statistics.fmean(len(rewards) == 1 for rewards in groups.values())
