"""What a generation backend is: prompts in, sampled completions out."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hacrl_fed.errors import UserError
from hacrl_fed.records import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """Ids that the policy sampled, the token that ended it included where ``finish_reason`` is stop.

    ``mean_logp`` is the mean log-prob a token, in nats, as it was sampled by an engine that computes the policy in its own
    way; equal completions may differ in its rounding. No ratio is taken to it: a rollout that is shared carries that of the
    training pass.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    mean_logp: float = field(compare=False)


class Generator(Protocol):
    """Samples from the policy's own distribution: temperature 1, no cut of the vocabulary, no penalty."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        *,
        greedy: bool,
        seeds: Sequence[int],
    ) -> Iterator[list[Completion]]:
        """Yields the ``samples`` completions of each prompt, in the prompts' order, as soon as they are there.

        ``seeds``, one a prompt, are in [0, 2^64). A completion follows from the policy, its prompt, the prompt's seed
        and its place among the samples, whatever else is generated beside it, but for rounding in the policy's
        arithmetic. ``greedy`` takes the likeliest token at each position, for evaluation. No other random state is read
        or changed.
        """
        ...


def check_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int | None, remedy: str = "") -> None:
    """Raises UserError where a prompt and its completion could have more tokens than ``limit``."""
    longest = max((len(prompt) for prompt in prompts), default=0)
    if limit is not None and longest + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of {limit}: "
            f"lower max_new_tokens or max_prompt_tokens{remedy}"
        )


def cut_at_end(token_ids: Sequence[int], logps: Sequence[float], eos_ids: frozenset[int]) -> Completion:
    """The ids up to and including the first that ends a completion, or all of them where none does. Of at least one."""
    ends = (index + 1 for index, token_id in enumerate(token_ids) if token_id in eos_ids)
    length = next(ends, None)
    reason = FinishReason.LENGTH if length is None else FinishReason.STOP
    return Completion(tuple(token_ids[:length]), reason, statistics.fmean(logps[:length]))
