"""Drawing tokens from a policy's own distribution, by random numbers that each completion has for itself."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from hacrl_fed.errors import HacrlFedError
from hacrl_fed_client.policy import NOT_FINITE

# Cumulative sums that a core's cache holds, of 8 bytes each: those of 64 rows and a vocabulary of 152 k take 78 MB.
_CACHED_SUMS = 1 << 17


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


def choose(logits_BV: Tensor, uniforms_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token (B,) for each row: the likeliest without ``uniforms_B``, else by inverting the cumulative softmax.

    And its log-prob (B,) float32, in nats. The probabilities are summed in float64, so that a token's share is its
    probability. Raises HacrlFedError where a row's logits are not finite (single ones may be minus infinity, which is a
    probability of 0).
    """
    if uniforms_B is None:
        likeliest_B1, tokens_B1 = logits_BV.max(-1, keepdim=True)
        tokens_B = tokens_B1.squeeze(1)
        logps_B = likeliest_B1.squeeze(1).float() - logits_BV.float().logsumexp(-1)
    elif logits_BV.numel() <= _CACHED_SUMS or logits_BV.device.type != "cpu":
        tokens_B, logps_B = _invert(logits_BV, uniforms_B)
    else:
        rows = max(1, _CACHED_SUMS // logits_BV.shape[1])
        parts = zip(torch.split(logits_BV, rows), torch.split(uniforms_B, rows), strict=True)
        tokens_B, logps_B = map(torch.cat, zip(*(_invert(*part) for part in parts), strict=True))
    if not logps_B.isfinite().all():
        raise HacrlFedError(NOT_FINITE)
    return tokens_B, logps_B


def _invert(logits_bV: Tensor, uniforms_b: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens (b,) that the numbers in [0, 1) fall on, and their log-probs (b,): NaN where a row is not finite."""
    probabilities_bV = logits_bV.softmax(-1, dtype=torch.float32)
    cumulative_bV = probabilities_bV.cumsum(-1, dtype=torch.float64)
    # On the right: a number that equals a sum belongs to the next token, so that one of probability 0 is never drawn.
    tokens_b1 = torch.searchsorted(cumulative_bV, uniforms_b[:, None] * cumulative_bV[:, -1:], right=True)
    tokens_b1 = tokens_b1.clamp(max=logits_bV.shape[1] - 1)  # a row of NaN has no such place
    return tokens_b1.squeeze(1), probabilities_bV.gather(1, tokens_b1).squeeze(1).log()
