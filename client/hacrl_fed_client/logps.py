"""Log-probs of completions under a model: each prompt forwarded once for all its completions, the head on those alone.

A prompt's keys and values are computed once and expanded to its completions, with their gradient. Both ways out of the
plain forward pass (prompts shared, the head apart) are taken where a small probe of the model shows that they are its own.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hacrl_fed_client.batching import Shape, length_buckets, plain_slots, shared_slots
from hacrl_fed_client.head import head_logps, logits_logps

_log = logging.getLogger(__name__)

# Prompt ids and completion ids of a sequence to score; neither may be empty.
PromptAndCompletion = tuple[Sequence[int], Sequence[int]]

# Prompts of unlike length, one of them with two completions.
_PROBE: list[PromptAndCompletion] = [((1, 2, 3), (4, 5)), ((6,), (7, 0, 1)), ((1, 2, 3), (5, 1, 2, 4))]
# Log-probs that differ by no more than rounding in float32, in nats. In 16 bits only gross faults can be told from it.
_ROUNDING = 1e-4
_ROUNDING_16 = 0.5
# What models that are written otherwise may raise when they are called in these ways.
_CALL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)


@dataclass(frozen=True, slots=True)
class Ways:
    """How a model can be called.

    Attributes:
        splits_head: its logits are its output embeddings of its decoder's last hidden states, and nothing else.
        shares_prompts: completions can be forwarded on top of their prompt's keys and values.
    """

    splits_head: bool
    shares_prompts: bool


# States (N, X) of tokens (hidden states, or logits), and the row and column (N,) of the completion's token that each predicts.
_States = tuple[Tensor, Tensor, Tensor]


def shape(sequence: PromptAndCompletion) -> Shape:
    """What its micro-batch depends on."""
    prompt, completion = sequence
    return Shape(tuple(prompt), len(prompt), len(completion))


def find_ways(model: Any, name: str) -> Ways:
    """Tries how the model can be called, and says in the log which savings it does not allow.

    To be called without gradient, and with dropout off.
    """
    base = _base(model)
    # In the weights' own type, where rounding hides less.
    with torch.autocast(base.device.type, enabled=False):
        splits_head = _splits_head(base)
        shares_prompts = _shares_prompts(base, splits_head)
    if not splits_head:
        _log.warning(
            "%s: its logits are not its head's alone, so they are held for whole completions (more memory)", name
        )
    if not shares_prompts:
        _log.warning("%s: no plain cache of keys and values, so prompts are forwarded anew for each completion", name)
    return Ways(splits_head, shares_prompts)


def token_logps(model: Any, sequences: Sequence[PromptAndCompletion], ways: Ways) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T) float32, in nats, of the completions' tokens, and the mask (B, T) bool of those that exist.

    T is the longest completion; a row begins at its completion's first token. Rows are padded on the right.
    """
    base = _base(model)
    shapes = [shape(sequence) for sequence in sequences]
    if not ways.shares_prompts or plain_slots(shapes) <= shared_slots(shapes):
        states = _plain_states(base, sequences, ways.splits_head)
    elif _is_16_bit(base):
        states = _states_by_prompt(base, sequences, ways.splits_head)
    else:
        states = _shared_states(base, sequences, ways.splits_head)
    return _logps(base, sequences, states, ways.splits_head)


def _logps(
    base: Any, sequences: Sequence[PromptAndCompletion], states: _States, splits_head: bool
) -> tuple[Tensor, Tensor]:
    states_NX, row_N, column_N = states
    device = states_NX.device
    completions_BT, mask_BT = (each.to(device) for each in _padded([completion for _, completion in sequences]))
    targets_N = completions_BT[row_N, column_N]
    logps_N = (
        head_logps(base.get_output_embeddings(), states_NX, targets_N)
        if splits_head
        else logits_logps(states_NX, targets_N)
    )
    return torch.zeros(mask_BT.shape, device=device).index_put((row_N, column_N), logps_N.float()), mask_BT


def _plain_states(base: Any, sequences: Sequence[PromptAndCompletion], splits_head: bool) -> _States:
    # The last token predicts nothing.
    ids_BL, mask_BL = _padded([[*prompt, *completion[:-1]] for prompt, completion in sequences])
    prompt_lengths_B = torch.tensor([len(prompt) for prompt, _ in sequences])
    _, mask_BT = _padded([completion for _, completion in sequences])
    keep = ids_BL.shape[1] - int(prompt_lengths_B.min()) + 1
    states_BKX = _call(base, splits_head, keep, input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False)[0]
    row_N, column_N = mask_BT.nonzero(as_tuple=True)
    # The token at position p is predicted at p - 1.
    position_N = prompt_lengths_B[row_N] + column_N - 1 - (ids_BL.shape[1] - keep)
    row_N, column_N, position_N = (each.to(base.device) for each in (row_N, column_N, position_N))
    return states_BKX[row_N, position_N], row_N, column_N


def _is_16_bit(base: Any) -> bool:
    return bool(torch.is_autocast_enabled(base.device.type)) or base.dtype not in (torch.float32, torch.float64)


def _states_by_prompt(base: Any, sequences: Sequence[PromptAndCompletion], splits_head: bool) -> _States:
    """As ``_shared_states``, a prompt at a time: no prompt is padded, so a row does not depend on those beside it.

    Padding changes the rounding. In 16 bits by more than GSPO's clip range: rows that were scored beside others than those
    that they are updated with would start an update clipped.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (prompt, _) in enumerate(sequences):
        groups.setdefault(tuple(prompt), []).append(index)
    states, rows, columns = [], [], []
    for indices in groups.values():
        states_nX, row_n, column_n = _shared_states(base, [sequences[index] for index in indices], splits_head)
        states.append(states_nX)
        rows.append(torch.tensor(indices, device=row_n.device)[row_n])
        columns.append(column_n)
    return torch.cat(states), torch.cat(rows), torch.cat(columns)


def rotates_by_length(model: Any) -> bool:
    """Whether positions are encoded by how long a forward pass is: a prompt's keys are then not those of a longer text."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # A dictionary of them, or one for each type of layer.
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)


def _shared_states(base: Any, sequences: Sequence[PromptAndCompletion], splits_head: bool) -> _States:
    numbers: dict[tuple[int, ...], int] = {}
    prompt_B = torch.tensor([numbers.setdefault(tuple(prompt), len(numbers)) for prompt, _ in sequences])
    prompts = list(numbers)
    # Padded on the left, so that each completion follows its prompt without a gap.
    ids_DP, mask_DP = (each.flip(-1) for each in _padded([prompt[::-1] for prompt in prompts]))
    lengths_D = mask_DP.sum(-1)
    positions_DP = (mask_DP.cumsum(-1) - 1).clamp(min=0)
    states_D1X, cache = _call(
        base, splits_head, 1, input_ids=ids_DP, attention_mask=mask_DP.long(), position_ids=positions_DP, use_cache=True
    )
    kept = _keys_and_values(cache)
    # The prompt's last token predicts the first of each completion.
    states = [states_D1X[:, -1].index_select(0, prompt_B.to(base.device))]
    rows, columns = [torch.arange(len(sequences))], [torch.zeros(len(sequences), dtype=torch.long)]
    for bucket in length_buckets([len(completion) - 1 for _, completion in sequences]):
        row_b = torch.tensor(bucket)
        prompt_b = prompt_B[row_b]
        ids_bC, mask_bC = _padded([sequences[row][1][:-1] for row in bucket])
        # Padding stays at the last position, which the model is sure to have.
        positions_bC = lengths_D[prompt_b, None] + mask_bC.cumsum(-1) - 1
        prompt_b_there = prompt_b.to(base.device)
        expanded = [tuple(part.index_select(0, prompt_b_there) for part in layer) for layer in kept]
        states_bCX, _ = _call(
            base,
            splits_head,
            ids_bC.shape[1],
            input_ids=ids_bC,
            attention_mask=torch.cat([mask_DP[prompt_b], mask_bC], -1).long(),
            position_ids=positions_bC,
            use_cache=True,
            **{cache_name(_decoder(base, splits_head)): DynamicCache(expanded)},
        )
        states.append(states_bCX[mask_bC.to(base.device)])
        place_n, column_n = mask_bC.nonzero(as_tuple=True)
        rows.append(row_b[place_n])
        columns.append(column_n + 1)
    return torch.cat(states), torch.cat(rows).to(base.device), torch.cat(columns).to(base.device)


def _call(base: Any, splits_head: bool, keep: int, **inputs: Any) -> tuple[Tensor, Any]:
    """States (B, K, X) of at least the last ``keep`` tokens up to the last, and the cache, or None where there is none."""
    inputs = {name: value.to(base.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    called = _decoder(base, splits_head)
    if splits_head:
        output = called(**inputs)
        states = output.last_hidden_state
    else:
        if "logits_to_keep" in inspect.signature(called.forward).parameters:
            inputs["logits_to_keep"] = keep
        output = called(**inputs)
        states = output.logits
    return states[:, -keep:], getattr(output, cache_name(called), None)


def _decoder(base: Any, splits_head: bool) -> Any:
    return base.get_decoder() if splits_head else base


def cache_name(called: Any) -> str:
    """Of the argument, and of the output's field, if there is one: transformers renames them."""
    return "cache" if "cache" in inspect.signature(called.forward).parameters else "past_key_values"


def _keys_and_values(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Of each layer. Raises TypeError for a cache that is anything else."""
    layers: list[Any] = cache.layers if isinstance(cache, DynamicCache) else []
    # Layers with a window or a recurrent state are of classes of their own.
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        raise TypeError("not a plain cache of keys and values")
    return [(layer.keys, layer.values) for layer in layers]


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids (B, L), padded on the right, and the mask (B, L) bool of those that exist.

    The padding's id does not matter: masks come from lengths, never from ids.
    """
    lengths_B = torch.tensor([len(row) for row in rows])
    width = int(lengths_B.max())
    ids_BL = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return ids_BL, torch.arange(width) < lengths_B[:, None]


def _base(model: Any) -> Any:
    """The model itself, below an adapter's wrapper; the adapter's layers stay in it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _probe(base: Any) -> list[PromptAndCompletion]:
    rows: int = base.get_input_embeddings().weight.shape[0]  # an adapter's wrapper has no num_embeddings
    return [([i % rows for i in prompt], [i % rows for i in completion]) for prompt, completion in _PROBE]


def _splits_head(base: Any) -> bool:
    ids_BL, mask_BL = _padded([[*prompt, *completion] for prompt, completion in _probe(base)])
    inputs = {"input_ids": ids_BL.to(base.device), "attention_mask": mask_BL.long().to(base.device), "use_cache": False}
    logits = base(**inputs).logits
    try:
        mine = base.get_output_embeddings()(base.get_decoder()(**inputs).last_hidden_state)
    except _CALL_ERRORS:
        return False
    # Bit for bit: caps and scales change small logits little.
    return torch.equal(mine.float(), logits.float())


def _shares_prompts(base: Any, splits_head: bool) -> bool:
    if rotates_by_length(base):
        return False
    sequences = _probe(base)
    states = _plain_states(base, sequences, splits_head)
    plain_BT, _ = _logps(base, sequences, states, splits_head)
    try:
        shared_BT, _ = _logps(base, sequences, _shared_states(base, sequences, splits_head), splits_head)
    except _CALL_ERRORS:
        return False
    rounding = _ROUNDING if states[0].dtype == torch.float32 else _ROUNDING_16
    return bool((plain_BT - shared_BT).abs().max() <= rounding)
