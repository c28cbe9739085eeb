"""The learner's updates of a step: mini-batches of its own rollouts first, then of each peer's, in name order."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hacrl_fed.algorithms import hacpo
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig, Optimizer
from hacrl_fed.errors import HacrlFedError
from hacrl_fed_client.batching import micro_batches
from hacrl_fed_client.policy import Policy


@dataclass(frozen=True, slots=True)
class TrainingRollout:
    """A rollout as the learner trains on it.

    Attributes:
        source: the agent that generated it.
        prompt_key: equal for the rollouts of one prompt.
        prompt_ids: as the learner renders the prompt.
        completion_ids: in the learner's tokens, the end of turn included where the source finished.
        source_mean_logp: mean log-prob a token under the source, in the source's tokens, in nats.
        omega: capability ratio from the source to the learner; 1 for own rollouts.
    """

    source: str
    prompt_key: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    source_mean_logp: float
    advantage: float
    omega: float = 1.0


# Sums over sequences, beside those of the method's loss.
_LOSS_SUM = "loss_sum"
_KL_SUM = "kl_sum"


_SETTINGS = ("initial_lr", "betas", "weight_decay")


class Updater:
    """Holds the optimizer (AdamW) and the schedule (linear warm-up, then constant) of a policy."""

    def __init__(
        self, policy: Policy, learner: str, algorithm: AlgorithmConfig, optimizer: Optimizer, micro_batch_tokens: int
    ) -> None:
        self._policy = policy
        self._learner = learner
        self._algorithm = algorithm
        self._method = METHODS[algorithm.method]
        self._max_grad_norm = optimizer.max_grad_norm
        self._micro_batch_tokens = micro_batch_tokens
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )
        warmup = max(1, optimizer.warmup_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / warmup)
        )

    def load_state(self, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
        """Takes over what a checkpoint holds; learning rate, betas and weight decay stay as they are configured now."""
        settings = [{key: group[key] for key in _SETTINGS} for group in self.optimizer.param_groups]
        base_lrs = self.scheduler.base_lrs
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)
        self.scheduler.base_lrs = base_lrs
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
            factor = self.scheduler.lr_lambdas[0](self.scheduler.last_epoch)
            group["lr"] = group["initial_lr"] * factor

    @property
    def updates_made(self) -> int:
        """Optimizer updates since training began."""
        return int(self.scheduler.last_epoch)

    def step(self, rollouts: Sequence[TrainingRollout], check: Callable[[], None]) -> dict[str, float]:
        """Updates the policy on a step's rollouts and returns the step's metrics.

        A mini-batch holds the rollouts of ``prompts_per_mini_batch`` prompts of one source, in the order given. A
        mini-batch of cross rollouts none of which carries gradient is skipped: the optimizer's momentum alone would
        move the weights. ``check`` is called between micro-batches; whatever it raises leaves the policy as the last
        whole update left it. Raises HacrlFedError for a gradient that is not finite.
        """
        tally = _Tally(self._learner)
        for mini_batch in self._mini_batches(rollouts):
            self.optimizer.zero_grad(set_to_none=True)
            # m of the paper: updates that were made in this step, skipped ones left out.
            sums = self._accumulate_gradient(mini_batch, tally.made, check)
            tally.add(mini_batch[0].source, sums)
            cross_live = sums[hacpo.CROSS_POSITIVE_LIVE] + sums[hacpo.CROSS_NEGATIVE_LIVE]
            if sums[hacpo.CROSS_SEQUENCES] and not cross_live:
                tally.skipped += 1
                continue
            norm = float(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._max_grad_norm))
            if not math.isfinite(norm):
                raise HacrlFedError("the gradient is not finite: resume from a checkpoint with a lower optimizer.lr")
            self.optimizer.step()
            self.scheduler.step()
            tally.made += 1
            tally.grad_norms.append(norm)
        self.optimizer.zero_grad(set_to_none=True)
        return tally.metrics() | {"lr": self.optimizer.param_groups[0]["lr"]}

    def _mini_batches(self, rollouts: Sequence[TrainingRollout]) -> list[list[TrainingRollout]]:
        by_source: dict[str, dict[str, list[TrainingRollout]]] = defaultdict(lambda: defaultdict(list))
        for rollout in rollouts:
            by_source[rollout.source][rollout.prompt_key].append(rollout)
        prompts = max(1, self._algorithm.prompts_per_mini_batch // self._method.group_multiplier)
        batches = []
        for source in sorted(by_source, key=lambda name: (name != self._learner, name)):
            groups = list(by_source[source].values())
            for start in range(0, len(groups), prompts):
                batches.append([rollout for group in groups[start : start + prompts] for rollout in group])
        return batches

    def _accumulate_gradient(
        self, mini_batch: list[TrainingRollout], update_index: int, check: Callable[[], None]
    ) -> Counter[str]:
        """Adds the gradient of the mini-batch's loss, -mean over its sequences; returns sums over its sequences."""
        sums: Counter[str] = Counter()
        own = mini_batch[0].source == self._learner
        kl_coef = self._algorithm.kl_coef if own else 0.0
        lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in mini_batch]
        for indices in micro_batches(lengths, self._micro_batch_tokens):
            check()
            rows = [mini_batch[index] for index in indices]
            sequences = [(row.prompt_ids, row.completion_ids) for row in rows]
            logps_BT, mask_BT = self._policy.token_logps(sequences, gradient=True)
            loss, metrics = self._method.loss(
                logps_BT,
                mask_BT,
                source_mean_logp=torch.tensor([row.source_mean_logp for row in rows]),
                advantages=torch.tensor([row.advantage for row in rows]),
                is_self=torch.full((len(rows),), own),
                omega=torch.tensor([row.omega for row in rows]),
                update_index=update_index,
                config=self._algorithm.hacpo,
            )
            if kl_coef > 0:
                reference_BT, _ = self._policy.token_logps(sequences, reference=True)
                kl = hacpo.k3_kl(logps_BT, reference_BT, mask_BT).mean()
                loss = loss + kl_coef * kl
                metrics[_KL_SUM] = kl.item() * len(rows)
            # Each micro-batch's mean weighs as many sequences as it holds.
            torch.autograd.backward(loss * (len(rows) / len(mini_batch)))
            metrics[_LOSS_SUM] = loss.item() * len(rows)
            sums.update(metrics)
        return sums


class _Tally:
    """What a step's mini-batches add up to. Shares and means of nothing are left out of the metrics."""

    def __init__(self, learner: str) -> None:
        self.made = 0
        self.skipped = 0
        self.grad_norms: list[float] = []
        self._learner = learner
        self._losses: list[float] = []
        self._by_source: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, source: str, sums: Counter[str]) -> None:
        self._by_source[source].update(sums)
        self._losses.append(sums[_LOSS_SUM] / (sums[hacpo.SELF_SEQUENCES] + sums[hacpo.CROSS_SEQUENCES]))

    def metrics(self) -> dict[str, float]:
        own = self._by_source.get(self._learner, Counter())
        peers = {source: sums for source, sums in self._by_source.items() if source != self._learner}
        shares = {
            "loss": (sum(self._losses), len(self._losses)),
            "grad_norm": (sum(self.grad_norms), len(self.grad_norms)),
            "kl": (own[_KL_SUM], own[hacpo.SELF_SEQUENCES]),
            "self/ratio_mean": (own[hacpo.SELF_RATIO_SUM], own[hacpo.SELF_SEQUENCES]),
            "self/clip_share": (own[hacpo.SELF_CLIPPED], own[hacpo.SELF_SEQUENCES]),
        }
        for prefix, sums in [("cross", sum(peers.values(), Counter())), *((f"cross/{p}", peers[p]) for p in peers)]:
            shares |= {
                f"{prefix}/ratio_mean": (sums[hacpo.CROSS_RATIO_SUM], sums[hacpo.CROSS_SEQUENCES]),
                f"{prefix}/live_share_positive": (sums[hacpo.CROSS_POSITIVE_LIVE], sums[hacpo.CROSS_POSITIVE]),
                f"{prefix}/live_share_negative": (sums[hacpo.CROSS_NEGATIVE_LIVE], sums[hacpo.CROSS_NEGATIVE]),
            }
        means = {name: total / count for name, (total, count) in shares.items() if count}
        return means | {"updates_made": float(self.made), "updates_skipped": float(self.skipped)}
