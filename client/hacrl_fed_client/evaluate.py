"""Held-out accuracy of a policy: one completion a prompt, greedy or sampled, scored by the task's verifier."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import Progress

from hacrl_fed.config import SiteConfig, rooted
from hacrl_fed.errors import UserError
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.tasks.registry import load_task
from hacrl_fed.verifiers.pool import WORKERS, VerifierPool
from hacrl_fed_client.generation.backends import build_generator
from hacrl_fed_client.generation.base import Generator
from hacrl_fed_client.generation.sampling import derive_seed
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.retokenize import Retokenizer

MODES = ("greedy", "sampled")
_MAX_NEW_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean reward, over the completions that could be verified; those that could not are left out, never scored 0."""

    rewards: tuple[float, ...]
    unverified: int

    @property
    def mean(self) -> float | None:
        """None where nothing could be verified."""
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean, over prompts: sample standard deviation / sqrt(n). None for less than two."""
        return statistics.stdev(self.rewards) / math.sqrt(len(self.rewards)) if len(self.rewards) > 1 else None


def measure(
    mode: str,
    prompts: Sequence[Prompt],
    prompt_ids: Mapping[str, tuple[int, ...]],
    generator: Generator,
    retokenizer: Retokenizer,
    verifiers: VerifierPool,
    max_new_tokens: int,
    seed: int,
    check: Callable[[], None],
) -> Accuracy:
    """Accuracy in a mode of ``MODES``.

    ``prompt_ids`` are the prompts as the policy renders them, by prompt id. ``check`` is called after each completion;
    what it raises ends the evaluation.
    """
    items = []
    groups = generator.generate(
        [prompt_ids[prompt.id] for prompt in prompts],
        1,
        max_new_tokens,
        greedy=mode == "greedy",
        seeds=[derive_seed(seed, prompt.id) for prompt in prompts],
    )
    for prompt, completions in zip(prompts, groups, strict=True):
        check()
        items.append((prompt, retokenizer.decode([completions[0].token_ids])[0]))
    rewards = [verdict.reward for verdict in verifiers.verify_all(items)]
    verified = tuple(reward for reward in rewards if reward is not None)
    return Accuracy(verified, len(rewards) - len(verified))


def run_evaluation(
    model: str,
    task_id: str,
    site_config: SiteConfig,
    base_dir: Path,
    prompts: int,
    max_prompt_tokens: int,
    max_new_tokens: int | None,
    seed: int,
    console: Console,
) -> dict[str, Accuracy]:
    """Measures a model on up to ``prompts`` of a task's held-out prompts, and prints its accuracies.

    Raises UserError for what the user has to mend.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    task = load_task(task_id, site_config.tasks, base_dir)
    policy = Policy.load(model, rooted(site_config, base_dir), seed, with_reference=False)
    generator = build_generator(policy, site_config, _no_check)
    retokenizer = Retokenizer(policy.tokenizer, policy.eos_ids)
    chosen = task.held_out[:prompts]
    prompt_ids = {prompt.id: tuple(policy.render_prompt(prompt.text)) for prompt in chosen}
    fitting = [prompt for prompt in chosen if len(prompt_ids[prompt.id]) <= max_prompt_tokens]
    if not fitting:
        raise UserError(
            f"the task {task_id} has no held-out prompt of at most {max_prompt_tokens} tokens to evaluate on"
        )
    if max_new_tokens is None:
        longest = max(len(prompt_ids[prompt.id]) for prompt in fitting)
        max_new_tokens = min(_MAX_NEW_TOKENS, max(1, (policy.context_length or _MAX_NEW_TOKENS + longest) - longest))
    accuracies = {}
    with (
        VerifierPool(task.verifier, site_config.verifier_timeout_s, WORKERS) as verifiers,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        for mode in MODES:
            bar = progress.add_task(mode, total=len(fitting))
            accuracies[mode] = measure(
                mode,
                fitting,
                prompt_ids,
                generator,
                retokenizer,
                verifiers,
                max_new_tokens,
                seed,
                functools.partial(progress.advance, bar),
            )
    _show(model, task_id, len(fitting), len(chosen) - len(fitting), accuracies, console)
    return accuracies


def _no_check() -> None:
    """Only Ctrl-C ends an evaluation, and that needs no help."""


def _show(
    model: str, task_id: str, prompts: int, too_long: int, accuracies: Mapping[str, Accuracy], console: Console
) -> None:
    left_out = f", {too_long} more were too long" if too_long else ""
    console.print(f"held-out accuracy of {model} on {task_id} ({prompts} prompts{left_out}):", soft_wrap=True)
    for mode, accuracy in accuracies.items():
        mean = "nothing could be verified" if accuracy.mean is None else f"{accuracy.mean:.3f}"
        error = "" if accuracy.standard_error is None else f" ± {accuracy.standard_error:.3f} (standard error)"
        unverified = f"; {accuracy.unverified} unverified, left out" if accuracy.unverified else ""
        console.print(f"  {mode:8} {mean}{error}{unverified}")
