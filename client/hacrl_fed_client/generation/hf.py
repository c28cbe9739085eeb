"""Generation by transformers' own `generate`."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import GenerationConfig

from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed_client.generation.base import Completion, cut_at_end
from hacrl_fed_client.policy import NOT_FINITE, Policy

_PAD = 0


class HfGenerator:
    """Generates in batches of at most ``rows`` completions, each batch left-padded to its longest prompt."""

    def __init__(self, policy: Policy, rows: int) -> None:
        self._policy = policy
        self._rows = rows

    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, max_new_tokens: int, *, greedy: bool, seed: int
    ) -> Iterator[list[Completion]]:
        """See `Generator.generate`. Raises UserError where a completion would not fit the model's context."""
        longest = max((len(prompt) for prompt in prompts), default=0)
        context = self._policy.context_length
        if context is not None and longest + max_new_tokens > context:
            raise UserError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of {context}: "
                "lower max_new_tokens or max_prompt_tokens"
            )
        rows = [prompt for prompt in prompts for _ in range(samples)]
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=list(self._policy.eos_ids) or None,
            # Fills finished rows; they are cut at their first ending token, so its value is never read.
            pad_token_id=_PAD,
        )
        return self._batches(rows, samples, config, seed)

    def _batches(
        self, rows: list[Sequence[int]], samples: int, config: GenerationConfig, seed: int
    ) -> Iterator[list[Completion]]:
        done: list[Completion] = []
        for batch, start in enumerate(range(0, len(rows), self._rows)):
            # A seed for each batch, so that nothing of the global random state is held between yields.
            batch_seed = int(np.random.SeedSequence([seed, batch]).generate_state(1, np.uint64)[0] >> 1)
            done += self._generate_batch(rows[start : start + self._rows], config, batch_seed)
            while len(done) >= samples:
                yield done[:samples]
                done = done[samples:]

    def _generate_batch(self, rows: list[Sequence[int]], config: GenerationConfig, seed: int) -> list[Completion]:
        policy = self._policy
        width = max(len(row) for row in rows)
        # Masks from lengths: the padding's id may be an ordinary token's.
        input_ids = [[_PAD] * (width - len(row)) + list(row) for row in rows]
        attention_mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        devices = [policy.device] if policy.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices), policy.forward_context(training=False) as model:
            torch.manual_seed(seed)
            try:
                output = model.generate(
                    input_ids=torch.tensor(input_ids, device=policy.device),
                    attention_mask=torch.tensor(attention_mask, device=policy.device),
                    generation_config=config,
                )
            except RuntimeError as error:
                if "probability tensor" not in str(error):
                    raise
                raise HacrlFedError(NOT_FINITE) from None
        eos_ids = frozenset(policy.eos_ids)
        return [cut_at_end(ids, eos_ids) for ids in output[:, width:].tolist()]
