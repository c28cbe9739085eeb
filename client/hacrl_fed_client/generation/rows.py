"""Rows in generation: prompts that are forwarded once, and a key-value cache that rows share, join and leave."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hacrl_fed_client.logps import cache_name, rotates_by_length

PAD = 0  # masks come from lengths, so the padding may be an ordinary token


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts (P), padded on the left to one width (T), and the rows (R) to sample of them.

    Attributes:
        input_ids: (P, T) int64, the prompts' ids.
        mask: (P, T) int64, 1 where there is a token of the prompt, else 0.
        prompt_of_row: (R,) int64, which prompt each row continues.
        uniforms: (R, max_new_tokens) float64, a number in [0, 1) for each new token; None for the likeliest tokens.
    """

    input_ids: Tensor
    mask: Tensor
    prompt_of_row: Tensor
    uniforms: Tensor | None
    max_new_tokens: int


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask (P, T) of prompts."""
    width = max(len(prompt) for prompt in prompts)
    input_ids = [[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(input_ids, device=device), torch.tensor(mask, device=device)


class Rows:
    """What rows (B) have so far in the model's cache, and the logits (B, V) of their next tokens."""

    def __init__(self, model: Any, name: str, cache: DynamicCache, logits_BV: Tensor, mask_BT: Tensor) -> None:
        self._model = model
        self._cache_name = name
        self._cache = cache
        self._mask_BT = mask_BT
        self._lengths_B = mask_BT.sum(1)
        self.logits_BV = logits_BV

    @classmethod
    def prefilled(cls, model: Any, batch: Batch) -> "Rows | None":
        """A row for each prompt, or None where the model cannot be used so.

        It must take a cache and positions, and return a cache of keys and values only, rows of which can be selected
        (layers with a sliding window can; recurrent ones cannot).
        """
        name = cache_name(model)
        parameters = inspect.signature(model.forward).parameters
        if not {name, "position_ids", "logits_to_keep"} <= parameters.keys() or rotates_by_length(model):
            return None
        output = model(
            input_ids=batch.input_ids,
            attention_mask=batch.mask,
            position_ids=(batch.mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        cache = getattr(output, name, None)
        if type(cache) is not DynamicCache:
            return None
        if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
            return None
        return cls(model, name, cache, output.logits[:, -1], batch.mask)

    def select(self, index: Tensor) -> None:
        """Takes the rows at ``index`` for the new ones; a row may be taken several times."""
        self._cache.batch_select_indices(index)
        self._mask_BT = self._mask_BT[index]
        self._lengths_B = self._lengths_B[index]
        self.logits_BV = self.logits_BV[index]

    def append(self, tokens_B: Tensor) -> None:
        """Forwards one more token of each row."""
        self._mask_BT = functional.pad(self._mask_BT, (0, 1), value=1)
        output = self._model(
            input_ids=tokens_B[:, None],
            attention_mask=self._mask_BT,
            position_ids=self._lengths_B[:, None],
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self._lengths_B = self._lengths_B + 1
        self.logits_BV = output.logits[:, -1]
