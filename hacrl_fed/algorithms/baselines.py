"""What HACPO is compared with: learning alone (GSPO, GRPO) and simpler ways to share. Signatures as in hacpo.

- GSPO (arXiv 2507.18071) and GRPO (arXiv 2402.03300, with the asymmetric clip of DAPO, arXiv 2503.14476): a ratio a
  sequence, or one a token, to the learner at the step's start, over the learner's own rollouts.
- Naive sharing pools all agents' rollouts in a group's statistics and takes GSPO's objective of each: no capability
  enters. Its ratio is to the source; that of "naive_own" to the learner itself at the step's start, as if it had
  generated them all.
- SAPO (arXiv 2509.08721) shares text only: the learner encodes shared rollouts anew, takes group statistics of each
  source by itself, and learns by GRPO from its own groups and as many drawn from those of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hacrl_fed.algorithms import checks
from hacrl_fed.algorithms.hacpo import (
    HacpoConfig,
    SequenceBatch,
    clamped_exp,
    clipped_objective,
    joint_advantages,
    loss_metrics,
    self_objective,
    sequence_loss,
)


def naive_advantages(
    rewards: Tensor | Sequence[float],
    prompt_index: Tensor | Sequence[int],
    sources: Sequence[str],
    learner: str,
    capabilities: Mapping[str, float],
    config: HacpoConfig,
) -> tuple[Tensor, Tensor]:
    """A_i = (R_i - mean) / (sd + 1e-6) over the whole group, whoever generated it (GRPO, arXiv 2402.03300).

    Arguments, results (B,) and errors as in ``joint_advantages``; ``capabilities`` are not used.
    """
    alike = dict.fromkeys([learner, *sources], 1.0)
    plain = replace(config, capability_baseline=False)
    return joint_advantages(rewards, prompt_index, sources, learner, alike, plain)


def own_advantages(
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
        raise ValueError(f"sources must all be the learner {learner!r}, since nothing is shared, not {others[0]!r}")
    return naive_advantages(rewards, prompt_index, sources, learner, capabilities, config)


def sapo_advantages(
    rewards: Tensor | Sequence[float],
    prompt_index: Tensor | Sequence[int],
    sources: Sequence[str],
    learner: str,
    capabilities: Mapping[str, float],
    config: HacpoConfig,
) -> tuple[Tensor, Tensor]:
    """A_i = (R_i - mean) / (sd + 1e-6) over the rollouts of the same prompt by the same source. As ``naive_advantages``."""
    count = len(checks.rewards(rewards))
    index_B = checks.integers("prompt_index", prompt_index, count, torch.device("cpu"))
    checks.agents(sources, count)
    rows = list(zip(index_B.tolist(), sources, strict=True))
    groups = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    return naive_advantages(rewards, [groups[row] for row in rows], sources, learner, capabilities, config)


def sapo_sample(
    advantages: Tensor, prompt_index: Tensor | Sequence[int], sources: Sequence[str], learner: str, seed: int
) -> Tensor:
    """Rows (B,) bool that SAPO learns from: the learner's own, and as many groups of others as it has itself (section 5).

    A group is the rollouts of a prompt by a source. Those of others without any advantage are discarded, and the rest
    is drawn from uniformly, without replacement. A learner without rollouts keeps all of them.

    Args:
        advantages: (B,) of ``sapo_advantages``.
        prompt_index, sources, learner: as in ``joint_advantages``.
        seed: of the draw; no other random state is read or changed.

    Raises ValueError, naming the argument, for unequal lengths or values that are not finite.
    """
    advantages_B = checks.vector("advantages", advantages, torch.float64)
    count = len(advantages_B)
    index_B = checks.integers("prompt_index", prompt_index, count, advantages_B.device)
    checks.agents(sources, count)
    rows = list(zip(sources, index_B.tolist(), strict=True))
    own = {row for row in rows if row[0] == learner}
    pool = sorted({row for row, A in zip(rows, advantages_B.tolist(), strict=True) if row[0] != learner and A != 0})
    drawn = len(own) or len(pool)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tolist()
    kept = own | {pool[place] for place in order[:drawn]}
    return torch.tensor([row in kept for row in rows], device=advantages_B.device)


def gspo_loss(
    target_logps: Tensor,
    mask: Tensor,
    source_mean_logp: Tensor,
    advantages: Tensor,
    is_self: Tensor,
    omega: Tensor,
    update_index: float,
    config: HacpoConfig,
) -> tuple[Tensor, dict[str, float]]:
    """-mean over all B rows, own and cross, of min(s A, clip(s, 1 - eps_low, 1 + eps_high) A) (GSPO, eqs. 5 and 7).

    Arguments, metrics and errors as in ``hacpo_loss``; ``omega`` does not enter, and ``update_index`` is not read.
    """
    batch = SequenceBatch.of(target_logps, mask, source_mean_logp, advantages, is_self, omega)
    return sequence_loss(batch, *self_objective(batch, config))


def grpo_loss(
    target_logps: Tensor,
    mask: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    is_self: Tensor,
    omega: Tensor,
    update_index: float,
    config: HacpoConfig,
) -> tuple[Tensor, dict[str, float]]:
    """-mean over all B rows of their tokens' mean of min(r A, clip(r, 1 - token_eps_low, 1 + token_eps_high) A).

    r is a token's ratio to the learner at the step's start (GRPO, arXiv 2402.03300, eq. 3; the asymmetric range of DAPO,
    arXiv 2503.14476, eq. 10). Arguments, metrics and errors as in ``hacpo_loss``, but for ``old_logps`` (B, T), the
    tokens' log-probs under the learner at the step's start; ``omega`` does not enter, and ``update_index`` is not read.
    """
    mask_BT = checks.token_mask(target_logps, mask)
    old_BT = checks.token_logps("old_logps", old_logps, target_logps, mask_BT)
    batch = SequenceBatch.of(target_logps, mask, checks.masked_mean(old_BT, mask_BT), advantages, is_self, omega)
    # Masked before anything else: what is under the mask may be anything, and 0 · nan would be nan in the gradient.
    logps_BT = torch.where(mask_BT, target_logps, 0)
    log_ratio_BT = logps_BT.detach() - torch.where(mask_BT, old_BT, 0)
    values_BT, inside_BT = clipped_objective(
        clamped_exp(log_ratio_BT, config),
        batch.advantages[:, None],
        1 - config.token_eps_low,
        1 + config.token_eps_high,
    )
    live_BT = inside_BT & (log_ratio_BT.abs() <= config.max_abs_log_ratio) & mask_BT
    objective_BT = values_BT * (1 + live_BT * (logps_BT - logps_BT.detach()))
    live_share = checks.masked_mean(live_BT.to(target_logps.dtype), mask_BT)
    return -checks.masked_mean(objective_BT, mask_BT).mean(), loss_metrics(batch, live_share)
