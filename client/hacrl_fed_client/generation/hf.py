"""Generation with transformers' models: a prompt is forwarded once for all its samples, and rows that end are dropped."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hacrl_fed_client.generation.base import Completion, check_length, cut_at_end
from hacrl_fed_client.generation.rows import PAD, Batch, Rows, left_padded
from hacrl_fed_client.generation.sampling import choose, uniforms
from hacrl_fed_client.policy import Policy

_log = logging.getLogger(__name__)

# Share of a batch's rows that are alive, at which the others are dropped: that copies the cache.
_COMPACT_AT = 0.75

# Ids, and their log-probs.
_NewTokens = tuple[list[int], list[float]]


class HfGenerator:
    """Generates in batches of at most ``rows`` completions. See `Generator`."""

    def __init__(self, policy: Policy, rows: int, check: Callable[[], None]) -> None:
        """``check`` is called before each token; what it raises ends the generation."""
        self._policy = policy
        self._rows = rows
        self._check = check
        self._eos_ids = frozenset(policy.eos_ids)
        self._shares_prompts = True  # until the model turns out not to

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        *,
        greedy: bool,
        seeds: Sequence[int],
    ) -> Iterator[list[Completion]]:
        """See `Generator.generate`.

        Raises UserError where a completion would not fit the model's context, and HacrlFedError where the model's
        logits are not finite.
        """
        assert len(seeds) == len(prompts)
        check_length(prompts, max_new_tokens, self._policy.context_length)
        return self._groups(prompts, samples, max_new_tokens, None if greedy else seeds)

    def _groups(
        self, prompts: Sequence[Sequence[int]], samples: int, max_new_tokens: int, seeds: Sequence[int] | None
    ) -> Iterator[list[Completion]]:
        # A batch is whole prompts, or a part of one that has more samples than there are rows.
        width = min(samples, self._rows)
        height = self._rows // width
        done: list[Completion] = []
        for first in range(0, len(prompts), height):
            numbers = range(first, min(first + height, len(prompts)))
            for start in range(0, samples, width):
                indices = range(start, min(start + width, samples))
                done += self._complete(self._batch(prompts, numbers, indices, max_new_tokens, seeds))
                while len(done) >= samples:
                    yield done[:samples]
                    done = done[samples:]

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: range,
        indices: range,
        max_new_tokens: int,
        seeds: Sequence[int] | None,
    ) -> Batch:
        device = self._policy.device
        input_ids_PT, mask_PT = left_padded([prompts[number] for number in numbers], device)
        prompt_R = torch.arange(len(numbers), device=device).repeat_interleave(len(indices))
        uniforms_RN = None
        if seeds is not None:
            rows = [uniforms(seeds[number], index, max_new_tokens) for number in numbers for index in indices]
            uniforms_RN = torch.stack(rows).to(device)
        return Batch(input_ids_PT, mask_PT, prompt_R, uniforms_RN, max_new_tokens)

    def _complete(self, batch: Batch) -> list[Completion]:
        with torch.no_grad(), self._policy.forward_context(training=False) as model:
            if isinstance(model, PeftModel):
                model = model.get_base_model()
            self._check()
            rows = Rows.prefilled(model, batch) if self._shares_prompts else None
            if rows is not None:
                found = self._continue(rows, batch)
            else:
                if self._shares_prompts:
                    self._shares_prompts = False
                    _log.warning(
                        "%s has no cache that its rows could share: each prompt is processed anew for each of its samples",
                        type(model).__name__,
                    )
                found = self._generate_each(model, batch)
        return [cut_at_end(ids, logps, self._eos_ids) for ids, logps in found]

    def _continue(self, rows: Rows, batch: Batch) -> list[_NewTokens]:
        """What each row goes on with, up to its ending token."""
        rows.select(batch.prompt_of_row)
        row_B = torch.arange(len(batch.prompt_of_row), device=self._policy.device)
        new: list[_NewTokens] = [([], []) for _ in batch.prompt_of_row]
        alive = set(range(len(new)))
        for position in range(batch.max_new_tokens):
            self._check()
            uniforms_B = None if batch.uniforms is None else batch.uniforms[row_B, position]
            tokens_B, logps_B = choose(rows.logits_BV, uniforms_B)
            places = row_B.tolist()
            for row, token_id, logp in zip(places, tokens_B.tolist(), logps_B.tolist(), strict=True):
                if row in alive:
                    ids, logps = new[row]
                    ids.append(token_id)
                    logps.append(logp)
                    if token_id in self._eos_ids:
                        alive.remove(row)
            if not alive or position + 1 == batch.max_new_tokens:
                break
            if len(alive) <= _COMPACT_AT * len(places):
                kept = torch.tensor([i for i, row in enumerate(places) if row in alive], device=row_B.device)
                rows.select(kept)
                row_B, tokens_B = row_B[kept], tokens_B[kept]
            rows.append(tokens_B)
        return new

    def _generate_each(self, model: Any, batch: Batch) -> list[_NewTokens]:
        """What each row goes on with by transformers' own `generate`; what follows its ending token means nothing."""
        width = batch.input_ids.shape[1]
        config = GenerationConfig(
            max_new_tokens=batch.max_new_tokens,
            do_sample=False,  # only the chosen token is left to it
            eos_token_id=list(self._policy.eos_ids) or None,
            pad_token_id=PAD,
        )
        chosen = _Chosen(batch.uniforms, width, self._check)
        output = model.generate(
            input_ids=batch.input_ids[batch.prompt_of_row],
            attention_mask=batch.mask[batch.prompt_of_row],
            generation_config=config,
            logits_processor=LogitsProcessorList([chosen]),
        )
        return list(zip(output[:, width:].tolist(), torch.stack(chosen.logps, 1).tolist(), strict=True))


class _Chosen(LogitsProcessor):
    """Leaves each row the one token that is chosen for it. ``logps`` are those of the tokens, (R,) a position."""

    def __init__(self, uniforms_RN: Tensor | None, width: int, check: Callable[[], None]) -> None:
        self._uniforms_RN = uniforms_RN
        self._width = width
        self._check = check
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._check()
        position = input_ids.shape[1] - self._width
        tokens_R, logps_R = choose(scores, None if self._uniforms_RN is None else self._uniforms_RN[:, position])
        self.logps.append(logps_R)
        return cast(torch.FloatTensor, torch.full_like(scores, -torch.inf).scatter(1, tokens_R[:, None], 0.0))
