"""The least that a step can take on a machine: arithmetic and memory traffic of the tokens that are needed, and no others.

Needed are: each distinct prompt once, in generation and in the update, and each completion's own tokens. The last token of
a completion is predicted and never an input. A multiplication and its addition are 2 FLOP; a backward pass costs
two forward passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from step.workloads import ModelSize


@dataclass(frozen=True, slots=True)
class Machine:
    """FLOP a second of a large matrix product, and bytes a second read from memory."""

    flops: float
    bytes_per_s: float


def update_flop(size: ModelSize, prompts: int, prompt_tokens: int, lengths: Sequence[int]) -> float:
    """FLOP of a forward and backward pass over completions of ``lengths`` tokens: 6 a parameter and token, and attention.

    The head is applied to completions only. Attention is causal: 4 FLOP a layer, head dimension and pair of tokens.
    """
    return 3 * _forward_flop(size, prompts, prompt_tokens, lengths)


def generation_flop(size: ModelSize, prompts: int, prompt_tokens: int, lengths: Sequence[int]) -> float:
    """FLOP of generating completions of ``lengths`` tokens: those of one forward pass."""
    return _forward_flop(size, prompts, prompt_tokens, lengths)


def generation_s(
    size: ModelSize, prompts: int, prompt_tokens: int, lengths: Sequence[int], machine: Machine, value_bytes: int = 4
) -> float:
    """Seconds: the prompts' pass by its FLOP, then for each position the longer of its FLOP and of its reads from memory.

    A position reads all weights, each prompt's keys and values once, and those of the rows that are still alive.
    """
    prefill = _forward_flop(size, prompts, prompt_tokens, [1] * prompts) / machine.flops
    parameters = size.body_parameters + size.head_parameters
    kv_values = 2 * size.layers * size.kv_heads * size.head_dim
    seconds = prefill
    for position in range(1, max(lengths)):
        rows = sum(length > position for length in lengths)
        values = parameters + kv_values * (prompts * prompt_tokens + rows * position)
        seconds += max(2 * parameters * rows / machine.flops, values * value_bytes / machine.bytes_per_s)
    return seconds


def _forward_flop(size: ModelSize, prompts: int, prompt_tokens: int, lengths: Sequence[int]) -> float:
    inputs = prompts * prompt_tokens + sum(length - 1 for length in lengths)
    linear = 2 * (size.body_parameters * inputs + size.head_parameters * sum(lengths))
    pairs = prompts * prompt_tokens * (prompt_tokens + 1) // 2
    pairs += sum((length - 1) * prompt_tokens + (length - 1) * length // 2 for length in lengths)
    return linear + 4 * size.layers * size.heads * size.head_dim * pairs
