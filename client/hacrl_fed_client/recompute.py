"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174): a layer holds its input, and computes the rest anew backward.

transformers' own does so in training mode alone, in which some models' layers drop out units as well.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model that can be computed anew; none where its code names none."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def recomputed(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model's layers keep for the backward pass only what goes into them.

    To be used for passes with gradient and without a cache of keys and values, which computing anew would write twice.
    Whatever makes a layer random (dropout) must be as in the forward pass when the backward pass runs.
    """
    chosen = layers(model)
    for layer in chosen:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in chosen:
            del layer.forward  # that of its class shows again
