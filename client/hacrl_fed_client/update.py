"""The learner's updates of a step: mini-batches of its own rollouts first, then of each peer's, in name order."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl_fed.algorithms import hacpo
from hacrl_fed.algorithms.methods import METHODS, Anchor
from hacrl_fed.config import AlgorithmConfig, Optimizer
from hacrl_fed.errors import HacrlFedError
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


# Share of live rollouts below which a pass without gradient pays: it costs a third of one with.
_SCREEN_BELOW = 0.5

_SETTINGS = ("initial_lr", "betas", "weight_decay")


class Updater:
    """Holds the optimizer (AdamW) and the schedule (linear warm-up, then constant) of a policy."""

    def __init__(self, policy: Policy, learner: str, algorithm: AlgorithmConfig, optimizer: Optimizer) -> None:
        self._policy = policy
        self._learner = learner
        self._algorithm = algorithm
        self._method = METHODS[algorithm.method]
        self._max_grad_norm = optimizer.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )
        warmup = max(1, optimizer.warmup_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / warmup)
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The optimizer's and the scheduler's state, as ``load_state`` takes them."""
        return self.optimizer.state_dict(), self.scheduler.state_dict()

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
        mini-batch none of whose rollouts carries gradient is skipped: the optimizer's momentum alone would move the
        weights. ``check`` is called between micro-batches; whatever it raises leaves the policy as the last
        whole update left it. Raises HacrlFedError for a gradient that is not finite.
        """
        tally = _Tally(self._learner)
        mini_batches = self._mini_batches(rollouts)
        anchors = self._anchors(rollouts, mini_batches, check)
        for mini_batch in mini_batches:
            self.optimizer.zero_grad(set_to_none=True)
            # m of the paper: updates that were made in this step, skipped ones left out.
            update_index = hacpo.scaled_update_index(tally.made, len(mini_batches), self._algorithm.hacpo)
            source = rollouts[mini_batch[0]].source
            screen = tally.live_share(source) < _SCREEN_BELOW
            sums, ratios = self._accumulate_gradient(rollouts, anchors, mini_batch, update_index, screen, check)
            tally.add(source, sums, ratios)
            live = sums[hacpo.SELF_LIVE] + sums[hacpo.CROSS_POSITIVE_LIVE] + sums[hacpo.CROSS_NEGATIVE_LIVE]
            if not live and _KL_SUM not in sums:
                tally.skipped += 1
                continue
            norm = self._policy.clip_gradient(self._max_grad_norm)
            if not math.isfinite(norm):
                raise HacrlFedError("the gradient is not finite: resume from a checkpoint with a lower optimizer.lr")
            self.optimizer.step()
            tally.updated(source, norm, lr=self.optimizer.param_groups[0]["lr"])
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tally.metrics()

    def _mini_batches(self, rollouts: Sequence[TrainingRollout]) -> list[list[int]]:
        """Indices of the rollouts of each mini-batch."""
        by_source: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, rollout in enumerate(rollouts):
            by_source[rollout.source][rollout.prompt_key].append(index)
        batches = []
        for source in sorted(by_source, key=lambda name: (name != self._learner, name)):
            groups = list(by_source[source].values())
            # Of those there are: a mini-batch may hold more prompts than a step has.
            prompts = min(self._algorithm.prompts_per_mini_batch, len(groups))
            prompts = max(1, prompts // self._method.group_multiplier)
            for start in range(0, len(groups), prompts):
                batches.append([index for group in groups[start : start + prompts] for index in group])
        return batches

    def _has_gradient(self, rollout: TrainingRollout) -> bool:
        """Whether the rollout may have one: without an advantage, there is only that of the KL."""
        return rollout.advantage != 0 or (rollout.source == self._learner and self._algorithm.kl_coef > 0)

    def _anchors(
        self, rollouts: Sequence[TrainingRollout], mini_batches: list[list[int]], check: Callable[[], None]
    ) -> dict[int, Tensor]:
        """What the method's ratio of a rollout is to: a mean log-prob (), or its tokens' log-probs (T_i,).

        By index, of those that may have a gradient. Where the ratio is to the learner at the step's start, those of the first
        mini-batch are left out: it is forwarded at the step's start anyway.
        """
        indices = [index for index, rollout in enumerate(rollouts) if self._has_gradient(rollout)]
        if self._method.anchor is Anchor.SOURCE:
            return {index: torch.tensor(rollouts[index].source_mean_logp) for index in indices}
        first = set[int]().union(*mini_batches[:1])
        indices = [index for index in indices if index not in first]
        sequences = [(rollouts[index].prompt_ids, rollouts[index].completion_ids) for index in indices]
        logps = self._policy.completion_logps(sequences, check)
        if self._method.anchor is Anchor.STEP_START:
            logps = [logps_T.mean() for logps_T in logps]
        return dict(zip(indices, logps, strict=True))

    def _anchor(self, anchors: Mapping[int, Tensor], indices: list[int], logps_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """The anchors of rollouts, as the loss takes them; of the first mini-batch, its log-probs as they are now."""
        known = [anchors[index] for index in indices if index in anchors]
        if known:
            return (pad_sequence(known, batch_first=True) if known[0].ndim else torch.stack(known)).to(logps_BT.device)
        if self._method.anchor is Anchor.STEP_START_TOKENS:
            return logps_BT
        return logps_BT.sum(-1) / mask_BT.sum(-1)

    def _accumulate_gradient(
        self,
        rollouts: Sequence[TrainingRollout],
        anchors: Mapping[int, Tensor],
        mini_batch: list[int],
        update_index: float,
        screen: bool,
        check: Callable[[], None],
    ) -> tuple[Counter[str], list[float]]:
        """Adds the gradient of the mini-batch's loss, -mean over its sequences; returns sums over them, and their ratios.

        The ratios are sequence ratios to the anchor, whatever the loss clips, of the sequences that may have a gradient:
        only those are forwarded. With ``screen``, a pass without gradient finds those that have one.
        """
        sums: Counter[str] = Counter()
        ratios: list[float] = []
        config = self._algorithm.hacpo
        own = rollouts[mini_batch[0]].source == self._learner
        kl_coef = self._algorithm.kl_coef if own else 0.0
        indices = [index for index in mini_batch if self._has_gradient(rollouts[index])]
        whole = [(rollouts[index].prompt_ids, rollouts[index].completion_ids) for index in indices]
        for places in self._policy.micro_batches(whole):
            check()
            rows = [rollouts[indices[place]] for place in places]
            sequences = [whole[place] for place in places]
            # The reference before the pass with gradient: it turns dropout off, and an adapter's head is run again backward.
            reference_BT = self._policy.token_logps(sequences, reference=True)[0] if kl_coef > 0 else None
            graph_BT, mask_BT = self._policy.token_logps(sequences, gradient=not screen)
            logps_BT = graph_BT.detach().requires_grad_()
            anchor_logps = self._anchor(anchors, [indices[place] for place in places], graph_BT.detach(), mask_BT)
            loss, metrics = self._method.loss(
                logps_BT,
                mask_BT,
                anchor_logps,
                advantages=torch.tensor([row.advantage for row in rows]),
                is_self=torch.full((len(rows),), own),
                omega=torch.tensor([row.omega for row in rows]),
                update_index=update_index,
                config=config,
            )
            anchor_means = anchor_logps
            if anchor_logps.ndim == 2:
                anchor_means = anchor_logps.sum(-1) / mask_BT.sum(-1)
            ratios += hacpo.sequence_ratios(logps_BT, mask_BT, anchor_means, config).tolist()
            if reference_BT is not None:
                kl = hacpo.k3_kl(logps_BT, reference_BT, mask_BT).mean()
                loss = loss + kl_coef * kl
                metrics[_KL_SUM] = kl.item() * len(rows)
            metrics[_LOSS_SUM] = loss.item() * len(rows)
            sums.update(metrics)
            # Each micro-batch's mean weighs as many sequences as it holds.
            (slope_BT,) = torch.autograd.grad(loss * (len(rows) / len(mini_batch)), logps_BT)
            live = slope_BT.any(-1).nonzero()[:, 0].tolist()
            if live and screen:
                graph_BT, _ = self._policy.token_logps([sequences[row] for row in live], gradient=True)
                slope_BT = slope_BT[live, : graph_BT.shape[1]]
            if live:
                torch.autograd.backward(graph_BT, slope_BT)
        parts = self._policy.finish_gradient((sums, ratios))
        total: Counter[str] = Counter()
        for part, _ in parts:
            total.update(part)
        total[hacpo.SELF_SEQUENCES if own else hacpo.CROSS_SEQUENCES] += len(mini_batch) - len(indices)
        return total, [ratio for _, ratios in parts for ratio in ratios]


class _Tally:
    """What a step's mini-batches add up to. Shares and means of nothing are left out of the metrics."""

    def __init__(self, learner: str) -> None:
        self.made = 0
        self.skipped = 0
        self._lr: float | None = None
        self._learner = learner
        self._losses: list[float] = []
        self._sums: dict[str, Counter[str]] = defaultdict(Counter)
        self._ratios: dict[str, list[float]] = defaultdict(list)
        self._grad_norms: dict[str, list[float]] = defaultdict(list)

    def add(self, source: str, sums: Counter[str], ratios: list[float]) -> None:
        """Adds a mini-batch of a source."""
        self._sums[source].update(sums)
        self._ratios[source] += ratios
        self._losses.append(sums[_LOSS_SUM] / (sums[hacpo.SELF_SEQUENCES] + sums[hacpo.CROSS_SEQUENCES]))

    def live_share(self, source: str) -> float:
        """Of a peer's rollouts with an advantage so far, the share that had a gradient; 1 before the first."""
        sums = self._sums.get(source, Counter())
        advantaged = sums[hacpo.CROSS_POSITIVE] + sums[hacpo.CROSS_NEGATIVE]
        live = sums[hacpo.CROSS_POSITIVE_LIVE] + sums[hacpo.CROSS_NEGATIVE_LIVE]
        return live / advantaged if advantaged else 1.0

    def updated(self, source: str, grad_norm: float, lr: float) -> None:
        """Adds an update made, on a mini-batch of a source; the norm is that before clipping."""
        self.made += 1
        self._lr = lr
        self._grad_norms["self" if source == self._learner else "cross"].append(grad_norm)

    def metrics(self) -> dict[str, float]:
        """The step's metrics."""
        own = self._sums[self._learner]
        peers = [source for source in self._sums if source != self._learner]
        shares = {
            "loss": (sum(self._losses), len(self._losses)),
            "self/clip_share": (own[hacpo.SELF_ADVANTAGED] - own[hacpo.SELF_LIVE], own[hacpo.SELF_SEQUENCES]),
        }
        if _KL_SUM in own:
            shares["kl"] = (own[_KL_SUM], own[hacpo.SELF_SEQUENCES])
        ratios = {"self": self._ratios[self._learner], "cross": [s for peer in peers for s in self._ratios[peer]]}
        cross = {"cross": sum((self._sums[peer] for peer in peers), Counter[str]())}
        for peer in peers:
            cross[f"cross/{peer}"] = self._sums[peer]
            ratios[f"cross/{peer}"] = self._ratios[peer]
        for prefix, sums in cross.items():
            positive, negative = sums[hacpo.CROSS_POSITIVE], sums[hacpo.CROSS_NEGATIVE]
            live = sums[hacpo.CROSS_POSITIVE_LIVE] + sums[hacpo.CROSS_NEGATIVE_LIVE]
            shares |= {
                f"{prefix}/live_share_positive": (sums[hacpo.CROSS_POSITIVE_LIVE], positive),
                f"{prefix}/live_share_negative": (sums[hacpo.CROSS_NEGATIVE_LIVE], negative),
                f"{prefix}/clip_share": (positive + negative - live, sums[hacpo.CROSS_SEQUENCES]),
            }
        means = {name: total / count for name, (total, count) in shares.items() if count}
        for prefix, values in ratios.items():
            means |= _distribution(f"{prefix}/ratio", values)
        norms = [norm for each in self._grad_norms.values() for norm in each]
        for name, values in {"grad_norm": norms, **{f"grad_norm/{k}": v for k, v in self._grad_norms.items()}}.items():
            if values:
                means[name] = statistics.fmean(values)
        if self._lr is not None:
            means["lr"] = self._lr
        return means | {"updates_made": float(self.made), "updates_skipped": float(self.skipped)}


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, 10 %, 50 % and 90 % quantile; nothing of nothing."""
    if not values:
        return {}
    p10, p50, p90 = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    return {f"{name}_mean": statistics.fmean(values), f"{name}_p10": p10, f"{name}_p50": p50, f"{name}_p90": p90}
