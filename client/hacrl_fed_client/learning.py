"""From a step's rollouts to what the learner trains on: capabilities, advantages, ratios; and the step's metrics of them."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hacrl_fed.algorithms.hacpo import CapabilityTracker, capability_ratio
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig
from hacrl_fed_client.admission import AdmittedRollout
from hacrl_fed_client.update import TrainingRollout


def training_rollouts(
    rollouts: Sequence[AdmittedRollout],
    prompt_ids: Mapping[str, tuple[int, ...]],
    learner: str,
    tracker: CapabilityTracker,
    algorithm: AlgorithmConfig,
) -> tuple[list[TrainingRollout], dict[str, float]]:
    """Adds the step to the capabilities' history and gives every rollout its advantage and capability ratio.

    ``prompt_ids`` are the step's prompts as the learner renders them, by prompt id. Rollouts keep their order.
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
    advantages, _ = METHODS[algorithm.method].advantages(
        [admitted.rollout.reward for admitted in rollouts],
        [index[admitted.rollout.prompt_id] for admitted in rollouts],
        [admitted.source for admitted in rollouts],
        learner,
        capabilities,
        config,
    )
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
        for admitted, advantage in zip(rollouts, advantages.tolist(), strict=True)
    ]
    metrics = _reward_metrics(rollouts, learner)
    for source in by_source:
        metrics[f"capability/{source}"] = capabilities[source]
        metrics[f"capability_ratio/{source}"] = omega[source]
    return trained, metrics


def _reward_metrics(rollouts: Sequence[AdmittedRollout], learner: str) -> dict[str, float]:
    own = [admitted for admitted in rollouts if admitted.source == learner]
    metrics = {"own_rollouts": float(len(own)), "cross_rollouts": float(len(rollouts) - len(own))}
    if own:
        rewards = [admitted.rollout.reward for admitted in own]
        metrics["reward_mean"] = statistics.fmean(rewards)
        metrics["reward_std"] = statistics.pstdev(rewards)
        metrics["completion_tokens_mean"] = statistics.fmean(len(admitted.completion_ids) for admitted in own)
        metrics["zero_variance_groups/own"] = _zero_variance_share(own)
    metrics["zero_variance_groups/joint"] = _zero_variance_share(rollouts)
    return metrics


def _zero_variance_share(rollouts: Sequence[AdmittedRollout]) -> float:
    """Share of groups whose rewards are all equal, and which so teach nothing."""
    groups: dict[str, set[float]] = defaultdict(set)
    for admitted in rollouts:
        groups[admitted.rollout.prompt_id].add(admitted.rollout.reward)
    return statistics.fmean(len(rewards) == 1 for rewards in groups.values())
