"""Theorem 4.3 of HACPO (arXiv 2603.02604, first version), by simulation: self and cross gradient agree.

That is, the gradients of the self and of the cross objective have a positive inner product. Here it is measured for the
paper's band and for the signed one, of two small softmax policies at a distance from each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hacrl_fed.algorithms import hacpo
from hacrl_fed.algorithms.hacpo import HacpoConfig, capability_ratio, hacpo_loss, joint_advantages
from theory_baseline import GROUP_SIZE, LEARNER, SOURCE, Estimate

PROMPTS, VOCABULARY, TOKENS, HIDDEN = 10, 10, 5, 16
WEIGHT_SIZE = 0.7
RIGHT_TOKENS = (torch.arange(PROMPTS)[:, None] + torch.arange(TOKENS)) % VOCABULARY

BANDS = {
    "paper .8": HacpoConfig(cross_clip_low=0.8),
    "paper .5": HacpoConfig(cross_clip_low=0.5),
    "signed": HacpoConfig(cross_band="signed", alpha=0.0),
}


class TinyPolicy(nn.Module):
    """A softmax policy for theorem 4.3: logits of a token from the prompt, the token before it and its place.

    A completion has ``TOKENS`` tokens, of which the last ``verified`` must be the right ones. So the probability of
    success has a closed form, a product of ``TOKENS`` transition matrices.
    """

    def __init__(self, generator: torch.Generator, verified: int) -> None:
        super().__init__()
        shapes = [(PROMPTS, HIDDEN), (VOCABULARY + 1, HIDDEN), (TOKENS, HIDDEN), (HIDDEN, VOCABULARY)]
        self.tables = nn.ParameterList(
            WEIGHT_SIZE * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
        )
        self.verified = verified

    def at_distance(self, distance: float, generator: torch.Generator) -> "TinyPolicy":
        """Another policy: these weights plus ``distance`` times random ones of their size."""
        other = TinyPolicy(generator, self.verified)
        for theirs, mine in zip(other.tables, self.tables, strict=True):
            theirs.data = mine.data + distance * theirs.data
        return other

    def transitions(self) -> Tensor:
        """Log-probs (PROMPTS, TOKENS, VOCABULARY + 1, VOCABULARY) of a token after each other (the last: none yet)."""
        prompt, previous, place, head = self.tables
        hidden = torch.tanh(prompt[:, None, None] + place[None, :, None] + previous[None, None])
        return torch.log_softmax(hidden @ head, -1)

    def success(self) -> Tensor:
        """The exact probability (PROMPTS,) that a completion is right."""
        chances = self.transitions().exp()
        right = nn.functional.one_hot(RIGHT_TOKENS, VOCABULARY).double()
        right[:, : TOKENS - self.verified] = 1
        reached = chances[:, 0, -1] * right[:, 0]
        for place in range(1, TOKENS):
            reached = torch.einsum("qv,qvw->qw", reached, chances[:, place, :-1]) * right[:, place]
        return reached.sum(-1)

    def rewards(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """1 for a right completion, else 0 (B,)."""
        checked = slice(TOKENS - self.verified, None)
        return (completions[:, checked] == RIGHT_TOKENS[prompts, checked]).all(-1).double()

    def token_logps(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Log-probs (B, TOKENS) of completions (B, TOKENS) of prompts (B,)."""
        start = torch.full((len(prompts), 1), VOCABULARY)
        before = torch.cat([start, completions[:, :-1]], 1)
        places = torch.arange(TOKENS).expand_as(completions)
        return self.transitions()[prompts[:, None], places, before, completions]

    @torch.no_grad()
    def sample(self, prompts: Tensor, generator: torch.Generator) -> Tensor:
        """Completions (B, TOKENS) of prompts (B,)."""
        chances = self.transitions().exp()
        before = torch.full_like(prompts, VOCABULARY)
        tokens = []
        for place in range(TOKENS):
            before = torch.multinomial(chances[prompts, place, before], 1, generator=generator)[:, 0]
            tokens.append(before)
        return torch.stack(tokens, 1)


def warm_started(policy: TinyPolicy, capability: float, known: slice) -> TinyPolicy:
    """The policy after gradient steps on its exact success, for theorem 4.3: on the ``known`` prompts, until the mean
    over all prompts crosses ``capability``."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    rising = policy.success().mean().item() < capability
    for _ in range(1000):
        success = policy.success()
        if (success.mean().item() < capability) != rising:
            return policy
        optimizer.zero_grad()
        log_success = success[known].log().mean()
        torch.autograd.backward(-log_success if rising else log_success)
        optimizer.step()
    raise AssertionError(f"no capability of {capability} within 1000 steps")


@dataclass(frozen=True)
class Alignment:
    """One draw of theorem 4.3's gradients: their inner product, cosine, and the live shares of cross rollouts.

    ``ascent`` is the cosine of the cross part's step with the exact gradient of the learner's mean success, ``log_ascent``
    that with the gradient of its mean log success, to which the prompts that it hardly ever solves count most.
    """

    inner: float
    cosine: float
    ascent: float
    log_ascent: float
    live_positive: float
    live_negative: float


def alignment(
    learner: TinyPolicy, source: TinyPolicy, config: HacpoConfig, groups: int, generator: torch.Generator
) -> Alignment:
    """Theorem 4.3: gradients of the self part and of the cross part of ``hacpo_loss`` at the learner's weights.

    The step has ``groups`` groups of each prompt, and the true capabilities; no update was made yet (m = 0).
    """
    group_index = torch.arange(PROMPTS * groups).repeat_interleave(GROUP_SIZE)
    prompts = group_index % PROMPTS
    policies = {LEARNER: learner, SOURCE: source}
    completions = {name: policy.sample(prompts, generator) for name, policy in policies.items()}
    rewards = torch.cat([policies[name].rewards(prompts, completions[name]) for name in policies])
    with torch.no_grad():
        capabilities = {name: policy.success().mean().item() for name, policy in policies.items()}
    advantages, _ = joint_advantages(
        rewards,
        group_index.repeat(2),
        [LEARNER] * len(prompts) + [SOURCE] * len(prompts),
        LEARNER,
        capabilities,
        config,
    )
    gradients: list[Tensor] = []
    metrics: dict[str, float] = {}
    for name, part in zip(policies, advantages.view(2, -1), strict=True):
        with torch.no_grad():
            source_mean_logp = policies[name].token_logps(prompts, completions[name]).mean(-1)
        omega = capability_ratio(capabilities[name], capabilities[LEARNER], config.ratio_min, config.ratio_max)
        loss, metrics = hacpo_loss(
            learner.token_logps(prompts, completions[name]),
            torch.ones_like(completions[name]),
            source_mean_logp,
            part,
            torch.full((len(prompts),), name == LEARNER),
            torch.full((len(prompts),), omega, dtype=torch.float64),
            0,
            config,
        )
        gradients.append(_flat_gradient(-loss, learner))
    own, cross = gradients
    success = _flat_gradient(learner.success().mean(), learner)
    log_success = _flat_gradient(learner.success().log().mean(), learner)
    return Alignment(
        inner=(own @ cross).item(),
        # A band without live rows has no cross gradient, and so no angle: 0, as for a right one.
        cosine=torch.cosine_similarity(own, cross, dim=0).item(),
        ascent=torch.cosine_similarity(cross, success, dim=0).item(),
        log_ascent=torch.cosine_similarity(cross, log_success, dim=0).item(),
        live_positive=metrics[hacpo.CROSS_POSITIVE_LIVE] / max(metrics[hacpo.CROSS_POSITIVE], 1),
        live_negative=metrics[hacpo.CROSS_NEGATIVE_LIVE] / max(metrics[hacpo.CROSS_NEGATIVE], 1),
    )


def _flat_gradient(value: Tensor, policy: TinyPolicy) -> Tensor:
    return torch.cat([each.flatten() for each in torch.autograd.grad(value, list(policy.parameters()))])


@dataclass(frozen=True)
class Pair:
    """Two agents for theorem 4.3.

    Attributes:
        distance: of the source's initial weights from the learner's, in units of their own size; 0: they are the same.
        learner, source: capabilities, the mean success over all prompts.
        verified: how many tokens of a completion the reward depends on.
        halves: each agent learned one half of the prompts, else both learned all of them.
    """

    distance: float
    learner: float
    source: float
    verified: int = 1
    halves: bool = False

    def __str__(self) -> str:
        tokens = "whole text" if self.verified == TOKENS else "last token"
        known = ", a half each" if self.halves else ""
        return f"{self.learner}, {self.source}; distance {self.distance}; {tokens}{known}"

    def policies(self, generator: torch.Generator) -> tuple[TinyPolicy, TinyPolicy]:
        """The learner and the source, warm-started."""
        mine, theirs = (slice(PROMPTS // 2), slice(PROMPTS // 2, None)) if self.halves else (slice(None), slice(None))
        learner = TinyPolicy(generator, self.verified)
        source = warm_started(learner.at_distance(self.distance, generator), self.source, theirs)
        return warm_started(learner, self.learner, mine), source


@dataclass(frozen=True)
class AlignmentRow:
    """Theorem 4.3 over seeds, for one pair of agents and band. ``positive``: share of seeds with a positive inner product."""

    pair: Pair
    band: str
    inner: Estimate
    cosine: Estimate
    ascent: Estimate
    log_ascent: Estimate
    positive: float
    live_positive: float
    live_negative: float


def alignments(pair: Pair, seeds: int, seed: int, groups: int = 32) -> list[AlignmentRow]:
    """Theorem 4.3's inner product for each band, over ``seeds`` pairs of agents; the bands share the rollouts."""
    found: dict[str, list[Alignment]] = {band: [] for band in BANDS}
    for number in range(seeds):
        generator = torch.Generator().manual_seed(seed + number)
        learner, source = pair.policies(generator)
        state = generator.get_state()
        for band, config in BANDS.items():
            generator.set_state(state)
            found[band].append(alignment(learner, source, config, groups, generator))
    return [
        AlignmentRow(
            pair,
            band,
            inner=Estimate.of(torch.tensor([each.inner for each in draws])),
            cosine=Estimate.of(torch.tensor([each.cosine for each in draws])),
            ascent=Estimate.of(torch.tensor([each.ascent for each in draws])),
            log_ascent=Estimate.of(torch.tensor([each.log_ascent for each in draws])),
            positive=sum(each.inner > 0 for each in draws) / seeds,
            live_positive=sum(each.live_positive for each in draws) / seeds,
            live_negative=sum(each.live_negative for each in draws) / seeds,
        )
        for band, draws in found.items()
    ]
