"""What a step works on, and models of what size: plain numbers, without torch.

Random models sample almost uniformly, so the share of the vocabulary that ends a completion is the chance that the next
token does: lengths are geometric, cut off at ``max_new_tokens``, for whatever samples from the model and honours its
generation configuration. Nothing has to be added to a sampling loop to prescribe them.
"""

import random
from dataclasses import dataclass

SAMPLES = 8  # completions a prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of equal length and completions of random ones.

    Prompts do not differ in length, so that no padding of prompts enters a comparison.

    Attributes:
        mean_new_tokens: of the completions, the end token included; None: all are of ``max_new_tokens``.
        prompts: of a step; each has ``SAMPLES`` completions.
    """

    prompt_tokens: int
    mean_new_tokens: float | None
    max_new_tokens: int
    prompts: int = 8

    @property
    def end_probability(self) -> float:
        """p of each token to be the last, for which the mean of min(geometric(p), max) is ``mean_new_tokens``.

        That mean is (1 - (1 - p)^max) / p, which falls with p.
        """
        if self.mean_new_tokens is None:
            return 0.0
        low, high = 1e-9, 1.0
        for _ in range(100):
            p = (low + high) / 2
            mean = (1 - (1 - p) ** self.max_new_tokens) / p
            low, high = (p, high) if mean > self.mean_new_tokens else (low, p)
        return (low + high) / 2

    def texts(self, steps: int, seed: int) -> list[str]:
        """Distinct prompts of ``steps`` steps: digits, each of which is one token."""
        rng = random.Random(seed)
        texts: dict[str, None] = {}
        while len(texts) < steps * self.prompts:
            texts["".join(rng.choices("0123456789", k=self.prompt_tokens))] = None
        return list(texts)

    def lengths(self, count: int, seed: int) -> list[int]:
        """Lengths of ``count`` completions, by the law that sampling follows."""
        rng = random.Random(seed)
        p = self.end_probability
        drawn = []
        for _ in range(count):
            length = 1
            while length < self.max_new_tokens and rng.random() >= p:
                length += 1
            drawn.append(length)
        return drawn


WORKLOADS = {
    "long-prompt": Workload(prompt_tokens=237, mean_new_tokens=41, max_new_tokens=128),
    "long-tail": Workload(prompt_tokens=19, mean_new_tokens=43, max_new_tokens=128),
    "short": Workload(prompt_tokens=19, mean_new_tokens=None, max_new_tokens=32),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of a Qwen3 with tied embeddings. Norms, a thousandth of the parameters, are not counted."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int

    @property
    def body_parameters(self) -> int:
        """Those of the layers, which every token passes."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head_parameters(self) -> int:
        """Those of the embeddings, which make the logits."""
        return self.vocabulary * self.hidden


MODELS = {
    "tiny": ModelSize(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, feed_forward=64, vocabulary=128),
    "1m": ModelSize(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, feed_forward=384, vocabulary=512),
    "15m": ModelSize(hidden=384, layers=8, heads=6, kv_heads=2, head_dim=64, feed_forward=1024, vocabulary=4096),
    "0.6b": ModelSize(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, feed_forward=3072, vocabulary=151936),
    "1.7b": ModelSize(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, feed_forward=6144, vocabulary=151936),
}
