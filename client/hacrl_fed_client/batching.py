"""Micro-batches: sequences of like length together, under a budget of tokens that counts the padding."""

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` cut into batches, longest first, each with its size times its longest <= ``budget``.

    A single sequence over the budget forms its own batch. Every index is in exactly one batch.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first of a batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
