"""What a verifier is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hacrl_fed.tasks.base import Prompt


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a completion is worth, and why. A reward of None: it could not be verified; skip it, never score it 0."""

    reward: float | None
    reason: str

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, not {self.reward}")


class Verifier(Protocol):
    """Scores completions against a prompt's gold answer. ``VerifierPool`` runs it."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that a verdict depends on beside the prompt, as plain JSON: part of the task's digest."""
        ...

    @property
    def isolated(self) -> bool:
        """Whether it may hang, crash or raise, and so must run in a process of its own."""
        ...

    def prepare(self) -> None:
        """Imports and builds what ``verify`` needs: called in a worker process before any completion's time runs."""
        ...

    def verify(self, prompt: "Prompt", completion: str) -> Verdict: ...
