"""What HACPO is compared with: GSPO (arXiv 2507.18071) alone, and naive sharing of rollouts. Signatures as in hacpo.

Naive sharing pools all agents' rollouts in a group's statistics and takes GSPO's objective of each, with its ratio to
its source: no capability enters. So the two differ in their advantages only, and share the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hacrl_fed.algorithms.hacpo import HacpoConfig, SequenceBatch, joint_advantages, loss_and_metrics, self_objective


def naive_advantages(
    rewards: Tensor | Sequence[float],
    prompt_index: Tensor | Sequence[int],
    sources: Sequence[str],
    learner: str,
    capabilities: Mapping[str, float],
    config: HacpoConfig,
) -> tuple[Tensor, Tensor]:
    """A_i = (R_i - mean) / (sd + 1e-6) over the whole group, whoever generated it (GRPO, arXiv 2402.03300).

    Arguments, results (B,) and errors as in ``joint_advantages``; ``capabilities`` and the baseline guard are not used.
    """
    alike = dict.fromkeys([learner, *sources], 1.0)
    return joint_advantages(rewards, prompt_index, sources, learner, alike, replace(config, baseline_guard=False))


def gspo_advantages(
    rewards: Tensor | Sequence[float],
    prompt_index: Tensor | Sequence[int],
    sources: Sequence[str],
    learner: str,
    capabilities: Mapping[str, float],
    config: HacpoConfig,
) -> tuple[Tensor, Tensor]:
    """A_i = (R_i - mean) / (sd + 1e-6) over the learner's own rollouts of the group (GSPO, eq. 6).

    As ``naive_advantages``; raises ValueError also for a source other than the learner, since nothing is shared.
    """
    if others := sorted(set(sources) - {learner}):
        raise ValueError(f"sources must all be the learner {learner!r}, since GSPO shares nothing, not {others[0]!r}")
    return naive_advantages(rewards, prompt_index, sources, learner, capabilities, config)


def gspo_loss(
    target_logps: Tensor,
    mask: Tensor,
    source_mean_logp: Tensor,
    advantages: Tensor,
    is_self: Tensor,
    omega: Tensor,
    update_index: int,
    config: HacpoConfig,
) -> tuple[Tensor, dict[str, float]]:
    """-mean over all B rows, own and cross, of min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) (GSPO, eqs. 5 and 7).

    Arguments, metrics and errors as in ``hacpo_loss``; ``omega`` and ``update_index`` do not enter.
    """
    batch = SequenceBatch.of(target_logps, mask, source_mean_logp, advantages, is_self, omega)
    values, live = self_objective(batch, config)
    return loss_and_metrics(batch, values, live, config)


def gspo_live_mask(
    target_logps: Tensor,
    mask: Tensor,
    source_mean_logp: Tensor,
    advantages: Tensor,
    is_self: Tensor,
    omega: Tensor,
    update_index: int,
    config: HacpoConfig,
) -> Tensor:
    """Rows (B,) bool to which ``gspo_loss``, with the same arguments and errors, gives a gradient."""
    with torch.no_grad():
        batch = SequenceBatch.of(target_logps, mask, source_mean_logp, advantages, is_self, omega)
        return self_objective(batch, config)[1]
