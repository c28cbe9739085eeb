"""Hyperparameters of HACPO and its baselines, without torch, so that a coordinator can check them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hacrl_fed.algorithms.scalars import check_number, check_positive

_MAX_LOG_WEIGHT = 80.0  # exp of it still fits float32


@dataclass(frozen=True)
class HacpoConfig:
    """Hyperparameters of HACPO (arXiv 2603.02604) and of what it is compared with; the defaults are the paper's.

    Attributes:
        alpha: exponent of the ratio that weighs a cross rollout's gradient.
        cross_clip_low: lower bound of the cross ratio at a step's first update (the paper's 1 - delta).
        cross_clip_step: what the bound rises by with each update of the step.
        cross_band: "paper", or "signed": by the advantage's sign (beyond the paper).
        positive_floor: signed band only: cross rollouts with A > 0 and a ratio below it carry no gradient.
        source_floor: a source whose rollouts' median ratio, before a step's updates, is below it is left out of the step
            (beyond the paper). 0: none is.
        eps_low, eps_high: clip range of the self ratio (GSPO).
        window: steps that a capability is averaged over.
        ratio_min, ratio_max: bounds of a capability ratio.
        baseline_guard: for rewards in [0, 1]: a baseline above 1 gives way to the mean of the learner's own rewards.
        normalize_by_std: divide advantages by the group's sample standard deviation.
        max_abs_log_ratio: bound on the log of a ratio.
        capability_baseline: weigh rewards by capability in a group's baseline; off, the ablation of the paper's table 2.
        capability_on_gradient: weigh cross rollouts by the capability ratio; off, the ablation of the paper's table 3.
        cross_clip: clip the cross ratio; off, the ablation of the paper's table 4. With ``cross_clip_step`` 0 the clip
            is not stepwise.
        m_scale: what the count of updates, which the lower bound rises with, comes to by a step's end, however many
            mini-batches the step has. None counts updates.
        token_eps_low, token_eps_high: clip range of a token's ratio (GRPO, SAPO).
    """

    alpha: float = 1.0
    cross_clip_low: float = 0.8
    cross_clip_step: float = 0.025
    cross_band: Literal["paper", "signed"] = "paper"
    positive_floor: float = 0.05
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    window: int = 5
    ratio_min: float = 0.1
    ratio_max: float = 10.0
    baseline_guard: bool = True
    normalize_by_std: bool = True
    max_abs_log_ratio: float = 10.0
    capability_baseline: bool = True
    capability_on_gradient: bool = True
    cross_clip: bool = True
    m_scale: float | None = None
    token_eps_low: float = 0.2
    token_eps_high: float = 0.28
    source_floor: float = 0.0

    # So that an unknown key in a configuration file is refused, not dropped.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name in (
            "alpha",
            "cross_clip_step",
            "eps_low",
            "eps_high",
            "token_eps_low",
            "token_eps_high",
            "source_floor",
        ):
            check_number(name, getattr(self, name), low=0)
        if self.m_scale is not None:
            check_number("m_scale", self.m_scale, low=0)
        check_number("positive_floor", self.positive_floor, low=0, high=1)
        for name in ("cross_clip_low", "ratio_min", "ratio_max", "max_abs_log_ratio"):
            check_positive(name, getattr(self, name))
        if self.cross_clip_low > 1:
            raise ValueError(f"cross_clip_low must be at most 1, not {self.cross_clip_low}")
        if self.cross_band not in ("paper", "signed"):
            raise ValueError(f"cross_band must be 'paper' or 'signed', not {self.cross_band!r}")
        check_window(self.window)
        if not self.ratio_min <= 1 <= self.ratio_max:
            raise ValueError(
                f"ratio_min and ratio_max must hold 1 between them, not {self.ratio_min}, {self.ratio_max}"
            )
        if (1 + self.alpha) * self.max_abs_log_ratio > _MAX_LOG_WEIGHT:
            raise ValueError(
                f"max_abs_log_ratio must be at most {_MAX_LOG_WEIGHT:g} / (1 + alpha), not {self.max_abs_log_ratio}"
            )


def check_window(window: object) -> None:
    """Raises ValueError unless it is a whole number of steps, at least 1."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be a whole number and at least 1, not {window!r}")
