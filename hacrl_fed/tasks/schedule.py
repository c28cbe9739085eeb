"""Which prompts a step has: every site computes it alike, so resuming needs no stored order."""

import hashlib
from collections.abc import Sequence

from hacrl_fed.errors import UserError
from hacrl_fed.tasks.base import Prompt


def step_prompts(prompts: Sequence[Prompt], prompts_per_step: int, seed: int, step: int) -> tuple[Prompt, ...]:
    """The prompts of ``step`` (from 0), ``prompts_per_step`` of them, each once.

    An epoch e orders all prompts by the SHA-256 of "seed:e:id" and has floor(n / prompts_per_step) steps; the
    remainder is left out, so that a step never spans two epochs. Raises UserError when there are too few prompts.
    """
    assert step >= 0
    steps_per_epoch = len(prompts) // prompts_per_step
    if steps_per_epoch == 0:
        raise UserError(
            f"a step takes {prompts_per_step} prompts, but the task has {len(prompts)}: "
            "lower prompts_per_step or add prompts"
        )
    epoch, index = divmod(step, steps_per_epoch)
    ordered = sorted(prompts, key=lambda prompt: hashlib.sha256(f"{seed}:{epoch}:{prompt.id}".encode()).digest())
    return tuple(ordered[index * prompts_per_step : (index + 1) * prompts_per_step])
