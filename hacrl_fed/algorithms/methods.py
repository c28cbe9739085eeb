"""The methods that a run can name, each as the functions that a trainer calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hacrl_fed.algorithms import baselines, hacpo
from hacrl_fed.algorithms.config import HacpoConfig


class Advantages(Protocol):
    """``joint_advantages`` and its like."""

    def __call__(
        self,
        rewards: Tensor | Sequence[float],
        prompt_index: Tensor | Sequence[int],
        sources: Sequence[str],
        learner: str,
        capabilities: Mapping[str, float],
        config: HacpoConfig,
    ) -> tuple[Tensor, Tensor]: ...


class Loss(Protocol):
    """``hacpo_loss`` and its like."""

    def __call__(
        self,
        target_logps: Tensor,
        mask: Tensor,
        source_mean_logp: Tensor,
        advantages: Tensor,
        is_self: Tensor,
        omega: Tensor,
        update_index: int,
        config: HacpoConfig,
    ) -> tuple[Tensor, dict[str, float]]: ...


class Live(Protocol):
    """``live_mask`` and its like: the arguments are the loss's."""

    def __call__(
        self,
        target_logps: Tensor,
        mask: Tensor,
        source_mean_logp: Tensor,
        advantages: Tensor,
        is_self: Tensor,
        omega: Tensor,
        update_index: int,
        config: HacpoConfig,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Method:
    """How a learner learns from a step's rollouts.

    Attributes:
        shares: rollouts are exchanged; otherwise the learner's own are all there is.
        group_multiplier: times the run's group size are generated a prompt, and a mini-batch holds the run's number of
            prompts divided by it: as many rollouts a mini-batch, and that many times the updates.
        advantages: (B,) advantages and baselines of a step's rollouts.
        loss: of a micro-batch: -mean over its rows, and its metrics.
        live: (B,) rows to which the loss gives a gradient.
    """

    name: str
    shares: bool
    group_multiplier: int
    advantages: Advantages
    loss: Loss
    live: Live


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("hacpo", True, 1, hacpo.joint_advantages, hacpo.hacpo_loss, hacpo.live_mask),
        Method("gspo", False, 1, baselines.gspo_advantages, baselines.gspo_loss, baselines.gspo_live_mask),
        Method("gspo_x2", False, 2, baselines.gspo_advantages, baselines.gspo_loss, baselines.gspo_live_mask),
        Method("naive", True, 1, baselines.naive_advantages, baselines.gspo_loss, baselines.gspo_live_mask),
    )
}
