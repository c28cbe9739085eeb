"""The methods that a run can name, each as the functions that a trainer calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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


class Sample(Protocol):
    """``sapo_sample`` and its like."""

    def __call__(
        self,
        advantages: Tensor,
        prompt_index: Tensor | Sequence[int],
        sources: Sequence[str],
        learner: str,
        seed: int,
    ) -> Tensor: ...


class Loss(Protocol):
    """``hacpo_loss`` and its like. The third argument is the log-probs that the method's ``Anchor`` names."""

    def __call__(
        self,
        target_logps: Tensor,
        mask: Tensor,
        anchor_logps: Tensor,
        /,
        advantages: Tensor,
        is_self: Tensor,
        omega: Tensor,
        update_index: float,
        config: HacpoConfig,
    ) -> tuple[Tensor, dict[str, float]]: ...


class Anchor(Enum):
    """What a loss takes the ratio of a rollout to."""

    SOURCE = "the mean log-prob (B,) under the source"
    STEP_START = "the mean log-prob (B,) under the learner at the step's start"
    STEP_START_TOKENS = "the tokens' log-probs (B, T) under the learner at the step's start"


@dataclass(frozen=True, slots=True)
class Method:
    """How a learner learns from a step's rollouts.

    Attributes:
        shares: rollouts are exchanged; otherwise the learner's own are all there is.
        advantages: (B,) advantages and baselines of a step's rollouts.
        loss: of a micro-batch: -mean over its rows, and its metrics.
        anchor: what the loss's ratio is to.
        sample: (B,) rows of a step that are learned from; all, where there is none.
        group_multiplier: times the run's group size are generated a prompt, and a mini-batch holds the run's number of
            prompts divided by it: as many rollouts a mini-batch, and that many times the updates.
    """

    name: str
    shares: bool
    advantages: Advantages
    loss: Loss
    anchor: Anchor = Anchor.SOURCE
    sample: Sample | None = None
    group_multiplier: int = 1


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("hacpo", True, hacpo.joint_advantages, hacpo.hacpo_loss),
        Method("gspo", False, baselines.own_advantages, baselines.gspo_loss, Anchor.STEP_START),
        Method("gspo_x2", False, baselines.own_advantages, baselines.gspo_loss, Anchor.STEP_START, group_multiplier=2),
        Method("grpo", False, baselines.own_advantages, baselines.grpo_loss, Anchor.STEP_START_TOKENS),
        Method("naive", True, baselines.naive_advantages, baselines.gspo_loss),
        Method("naive_own", True, baselines.naive_advantages, baselines.gspo_loss, Anchor.STEP_START),
        Method(
            "sapo",
            True,
            baselines.sapo_advantages,
            baselines.grpo_loss,
            Anchor.STEP_START_TOKENS,
            sample=baselines.sapo_sample,
        ),
    )
}
