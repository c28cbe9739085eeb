"""Drawing tokens from a policy's own distribution, by random numbers that each completion has for itself."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from hacrl_fed.errors import HacrlFedError
from hacrl_fed_client.policy import NOT_FINITE


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2^64) for what the parts name: the first 8 bytes of the SHA-256 of them joined by "/"."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def uniforms(seed: int, sample: int, count: int) -> Tensor:
    """Numbers (count,) float64 in [0, 1): the stream of sample ``sample`` of the prompt with this seed.

    Philox 4x64, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), with
    the seed and the sample as its key: any two streams are independent.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, sample], dtype=np.uint64)))
    return torch.from_numpy(generator.random(count))


def choose(logits_BV: Tensor, uniforms_B: Tensor | None) -> Tensor:
    """A token (B,) for each row: the likeliest without ``uniforms_B``, else by inverting the cumulative softmax.

    The probabilities are summed in float64, so that a token's share is its probability. Raises HacrlFedError where a
    row's logits are not finite (single ones may be minus infinity, which is a probability of 0).
    """
    if uniforms_B is None:
        tokens_B = logits_BV.argmax(-1)
        finite_B = logits_BV.gather(1, tokens_B[:, None]).isfinite()  # argmax takes a NaN for the largest
    else:
        cumulative_BV = logits_BV.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
        total_B1 = cumulative_BV[:, -1:]
        # On the right: a number that equals a sum belongs to the next token, so that one of probability 0 is never drawn.
        tokens_B = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * total_B1, right=True)[:, 0]
        finite_B = total_B1.isfinite()
    if not finite_B.all():
        raise HacrlFedError(NOT_FINITE)
    return tokens_B
