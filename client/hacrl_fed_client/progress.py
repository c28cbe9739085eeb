"""Where a site is in its run: what its checkpoints hold beside the policy."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """All processes of the site together.

    Attributes:
        genesis: the run's digest, which never changes.
        refused: rollouts and chunks that were refused, by "agent/reason".
        reward_disagreements: rollouts of each peer whose reward this site found to be another one.
        wall_s: seconds that processes of this site have run, up to the newest checkpoint.
    """

    genesis: str
    next_step: int
    previous_manifest: str
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reward_disagreements: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("totals", "refused", "reward_disagreements"):
            setattr(self, name, Counter(getattr(self, name)))

    def as_json(self) -> dict[str, Any]:
        """Plain data, which ``Progress(**data)`` takes back."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def is_last(self, steps: int, evaluates: bool) -> bool:
        """Whether nothing of a run is left to do but to write its model and its summary."""
        return self.next_step >= steps and ("after" in self.evaluations or not evaluates)
