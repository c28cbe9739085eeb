"""Micro-batches: whole prompts with their completions, like lengths together, under a budget of token slots forwarded."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# Of a prompt that is forwarded once, keys and values are held for each of its rows: about an eighth of a slot a token.
_HELD = 8

# Below this many tokens, cutting completions by length costs more in calls than it saves in padding.
_SHORT = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What counts of a sequence here: which prompt (equal for equal ones), its tokens and its completion's."""

    prompt: Hashable
    prompt_tokens: int
    completion_tokens: int


def plain_slots(shapes: Sequence[Shape]) -> int:
    """Token slots, padding included, to forward each prompt with each completion. The last token predicts nothing."""
    return len(shapes) * max(shape.prompt_tokens + shape.completion_tokens - 1 for shape in shapes)


def shared_slots(shapes: Sequence[Shape]) -> int:
    """Token slots, padding included, to forward each distinct prompt once and the completions, cut by length, on top."""
    prompts = len({shape.prompt for shape in shapes}) * max(shape.prompt_tokens for shape in shapes)
    tokens = [shape.completion_tokens - 1 for shape in shapes]
    return prompts + sum(len(bucket) * tokens[bucket[0]] for bucket in length_buckets(tokens))


def length_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of ``lengths`` above 0, longest first, cut so that less than half of a long bucket is padding."""
    buckets: list[list[int]] = []
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        longest = lengths[buckets[-1][0]] if buckets else 0
        if longest and (longest <= _SHORT or 2 * lengths[index] > longest):
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets


def micro_batches(shapes: Sequence[Shape], budget: int, *, shares: bool) -> list[list[int]]:
    """Indices of ``shapes`` cut into batches of at most ``budget`` token slots, or the memory of as many, longest first.

    ``shares`` says that a prompt can be forwarded once for all its completions; those are then kept together where the
    budget allows. A single sequence over the budget forms its own batch. Every index is in exactly one batch.
    """

    def slots(indices: list[int]) -> int:
        chosen = [shapes[index] for index in indices]
        plain = plain_slots(chosen)
        if not shares or plain <= shared_slots(chosen):
            return plain
        return shared_slots(chosen) + sum(shape.prompt_tokens for shape in chosen) // _HELD

    def packed(parts: Sequence[list[int]]) -> list[list[int]]:
        batches: list[list[int]] = []
        for part in parts:
            if batches and slots(batches[-1] + part) <= budget:
                batches[-1] += part
            else:
                batches.append(list(part))
        return batches

    if not shares:
        tokens = [shape.prompt_tokens + shape.completion_tokens for shape in shapes]
        return packed([[index] for index in sorted(range(len(shapes)), key=lambda i: -tokens[i])])
    groups: dict[Hashable, list[int]] = {}
    for index in sorted(range(len(shapes)), key=lambda i: (-shapes[i].prompt_tokens, -shapes[i].completion_tokens)):
        groups.setdefault(shapes[index].prompt, []).append(index)
    return packed([part for group in groups.values() for part in packed([[index] for index in group])])
