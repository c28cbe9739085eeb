"""Properties that hold of every method's advantages and loss, whatever the rollouts, agents and configuration."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hacrl_fed.algorithms.hacpo import CapabilityTracker, HacpoConfig, capability_ratio, joint_advantages, k3_kl
from hacrl_fed.algorithms.methods import METHODS, Anchor, Method

torch.set_num_threads(1)

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
each_sharing_method = pytest.mark.parametrize(
    "method", [pytest.param(method, id=name) for name, method in METHODS.items() if method.shares]
)
few_examples = settings(deadline=None, max_examples=25)

CONFIGS = st.builds(
    HacpoConfig,
    alpha=st.sampled_from([0.0, 1.0, 3.0]),
    cross_clip_low=st.sampled_from([0.3, 0.8]),
    cross_band=st.sampled_from(["paper", "signed"]),
    eps_low=st.sampled_from([3e-4, 0.2]),
    eps_high=st.sampled_from([4e-4, 0.2]),
    ratio_min=st.sampled_from([1e-3, 0.1, 1.0]),
    ratio_max=st.sampled_from([1.0, 10.0, 1e3]),
    baseline_guard=st.booleans(),
    normalize_by_std=st.booleans(),
    capability_baseline=st.booleans(),
    capability_on_gradient=st.booleans(),
    cross_clip=st.booleans(),
)
SEEDS = st.integers(0, 2**32 - 1)
CAPABILITIES = st.one_of(st.just(1e-8), st.floats(1e-6, 1.0))
NAMES = ["a", "b", "c", "d", "e", "f"]


# --- Steps of rollouts ---


@dataclass(frozen=True)
class Step:
    """Rollouts of one to six agents; groups of any size, each agent absent from some, in any order."""

    rewards: list[float]
    prompts: list[int]
    sources: list[str]
    capabilities: dict[str, float]
    learner: str = "a"

    def advantages(self, method: Method, config: HacpoConfig) -> tuple[Tensor, Tensor]:
        return method.advantages(self.rewards, self.prompts, self.sources, self.learner, self.capabilities, config)

    def rows(self, chosen: list[int]) -> "Step":
        return dataclasses.replace(
            self,
            rewards=[self.rewards[i] for i in chosen],
            prompts=[self.prompts[i] for i in chosen],
            sources=[self.sources[i] for i in chosen],
        )

    def learnt_by(self, method: Method) -> "Step":
        """Without the rollouts of others for a method that shares nothing."""
        own = [i for i, source in enumerate(self.sources) if source == self.learner]
        assume(method.shares or own)
        return self if method.shares else self.rows(own)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    names = NAMES[: draw(st.integers(1, 6))]
    reward = draw(st.sampled_from([st.sampled_from([0.0, 1.0]), st.floats(0, 1)]))
    rollout = st.tuples(reward, st.integers(0, 3), st.sampled_from(names))
    rewards, prompts, sources = zip(*draw(st.lists(rollout, min_size=1, max_size=24)), strict=True)
    return Step(list(rewards), list(prompts), list(sources), {name: draw(CAPABILITIES) for name in names})


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for name, each, other in zip(("advantages", "baselines"), found, wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


# --- Advantages ---


@each_method
@few_examples
@given(steps(), CONFIGS, st.randoms(use_true_random=False), st.permutations(NAMES))
def test_advantages_follow_the_rollouts_whatever_their_order_and_the_agents_names(method, step, config, draw, names):
    step = step.learnt_by(method)
    order = list(range(len(step.rewards)))
    draw.shuffle(order)
    rename = dict(zip(NAMES, names, strict=True))
    shuffled = step.rows(order)
    other = Step(
        shuffled.rewards,
        [1000 - 7 * prompt for prompt in shuffled.prompts],
        [rename[source] for source in shuffled.sources],
        {rename[name]: capability for name, capability in step.capabilities.items()},
        rename[step.learner],
    )
    advantages, baselines = step.advantages(method, config)
    assert_same(other.advantages(method, config), (advantages[order], baselines[order]))


@each_method
@few_examples
@given(steps(), CONFIGS)
def test_advantages_are_finite_for_any_number_of_agents_and_unequal_groups(method, step, config):
    step = step.learnt_by(method)
    for values in step.advantages(method, config):
        assert values.shape == (len(step.rewards),)
        assert values.dtype == torch.float64
        assert values.isfinite().all()


@each_sharing_method
@few_examples
@given(steps(), CONFIGS)
def test_a_learner_without_own_rollouts_still_gets_finite_advantages(method, step, config):
    others = [i for i, source in enumerate(step.sources) if source != step.learner]
    assume(others)
    for values in step.rows(others).advantages(method, config):
        assert values.isfinite().all()


@each_method
@few_examples
@given(steps(), CONFIGS, st.floats(-2, 2))
def test_groups_of_equal_rewards_have_advantages_of_exactly_zero(method, step, config, reward):
    step = step.learnt_by(method)
    equal = step.prompts[0]
    rewards = [reward if prompt == equal else each for each, prompt in zip(step.rewards, step.prompts, strict=True)]
    advantages, baselines = dataclasses.replace(step, rewards=rewards).advantages(method, config)
    chosen = torch.tensor(step.prompts) == equal
    assert (advantages[chosen] == 0).all()
    assert (baselines[chosen] == reward).all()


@few_examples
@given(steps(), CONFIGS, CAPABILITIES, st.sampled_from(NAMES[1:]))
def test_an_agents_capability_enters_only_the_groups_that_it_has_rollouts_in(step, config, capability, agent):
    other = dataclasses.replace(step, capabilities={**step.capabilities, agent: capability})
    before, after = (each.advantages(METHODS["hacpo"], config) for each in (step, other))
    present = {prompt for prompt, source in zip(step.prompts, step.sources, strict=True) if source == agent}
    absent = torch.tensor([prompt not in present for prompt in step.prompts])
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one[absent], two[absent])


@few_examples
@given(steps(), CONFIGS, st.integers(-20, 20))
def test_only_the_ratios_of_capabilities_matter(step, config, power):
    scaled = {name: capability * 2.0**power for name, capability in step.capabilities.items()}
    hacpo = METHODS["hacpo"]
    found = dataclasses.replace(step, capabilities=scaled).advantages(hacpo, config)
    for one, two in zip(found, step.advantages(hacpo, config), strict=True):
        assert torch.equal(one, two)


@few_examples
@given(steps(), CONFIGS, CAPABILITIES)
def test_equal_capabilities_give_naive_advantages(step, config, capability):
    equal = dataclasses.replace(step, capabilities=dict.fromkeys(step.capabilities, capability))
    assert_same(equal.advantages(METHODS["hacpo"], config), equal.advantages(METHODS["naive"], config))


@settings(deadline=None, max_examples=200)
@given(steps(), CONFIGS)
def test_no_guarded_baseline_is_above_one_where_the_learner_has_own_rollouts(step, config):
    # The abler the learner, the more a success of the others weighs.
    able = dataclasses.replace(step, capabilities={**step.capabilities, step.learner: 1.0})
    guarded = dataclasses.replace(config, baseline_guard=True, capability_baseline=True)
    _, baselines = able.advantages(METHODS["hacpo"], guarded)
    own = {prompt for prompt, source in zip(step.prompts, step.sources, strict=True) if source == step.learner}
    assert (baselines[torch.tensor([prompt in own for prompt in step.prompts])] <= 1).all()
    assert (baselines >= 0).all()


# --- Capabilities ---

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@given(POSITIVE, POSITIVE, st.floats(1e-9, 1), st.floats(1, 1e9))
def test_capability_ratios_are_within_their_bounds(source, learner, low, high):
    assert low <= capability_ratio(source, learner, low, high) <= high


@given(POSITIVE, POSITIVE, st.floats(1, 1e9))
def test_a_ratio_within_symmetric_bounds_is_the_inverse_of_the_other_learners(one, other, high):
    assert capability_ratio(one, other, 1 / high, high) * capability_ratio(other, one, 1 / high, high) == pytest.approx(
        1
    )


@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1)), max_size=12),
    st.integers(1, 20),
)
def test_capabilities_lie_between_the_floor_and_the_best_reward_of_the_window(history, window):
    tracker = CapabilityTracker(window)
    for mean_rewards in history:
        tracker.update(mean_rewards)
    found = tracker.capabilities()
    assert found.keys() == {name for mean_rewards in history for name in mean_rewards}
    for name, capability in found.items():
        recent = [mean_rewards[name] for mean_rewards in history if name in mean_rewards][-window:]
        assert 1e-8 <= capability <= max(1e-8, *recent) * (1 + 1e-12)
        for other in found.values():
            assert 0.1 <= capability_ratio(other, capability) <= 10


# --- Losses ---


@dataclass(frozen=True)
class Batch:
    """Rows of a mini-batch of a policy with one table of weights (3, 5), which all rows share; all but it (B, ...)."""

    features: Tensor
    tokens: Tensor
    mask: Tensor
    log_ratio: Tensor
    advantages: Tensor
    is_self: Tensor
    omega: Tensor

    @classmethod
    def drawn(cls, seed: int, count: int, tokens: int = 4) -> "Batch":
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, dtype=torch.float64, generator=generator)

        mask = uniform(count, tokens) < 0.6
        mask[:, 0] = True
        # Within the own rows' clip range, about the cross rows' band, and beyond the clamp.
        spread = torch.tensor([2e-4, 0.5, 12.0], dtype=torch.float64)[torch.randint(3, (count,), generator=generator)]
        is_self = uniform(count) < 0.5
        return cls(
            2 * uniform(count, tokens, 3) - 1,
            torch.randint(5, (count, tokens), generator=generator),
            mask,
            spread[:, None] * (2 * uniform(count, tokens) - 1),
            4 * uniform(count) - 2,
            is_self,
            torch.where(is_self, 1, 0.1 + 9.9 * uniform(count)),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, chosen: list[int]) -> "Batch":
        return Batch(*(getattr(self, item.name)[chosen] for item in dataclasses.fields(self)))

    def padded(self, columns: int) -> "Batch":
        """With masked columns, whose tokens have the log-prob nan."""
        extra = torch.full((len(self), columns), math.nan, dtype=torch.float64)
        return dataclasses.replace(
            self,
            features=torch.cat([self.features, extra[..., None].expand(-1, -1, 3)], 1),
            tokens=torch.cat([self.tokens, torch.zeros_like(extra, dtype=torch.long)], 1),
            mask=torch.cat([self.mask, torch.zeros_like(extra, dtype=torch.bool)], 1),
            log_ratio=torch.cat([self.log_ratio, extra], 1),
        )

    def arguments(self, weights: Tensor, anchor: Anchor) -> dict[str, Tensor]:
        """The tensor arguments of a loss with this anchor, in order."""
        logps = torch.log_softmax(self.features @ weights, -1).gather(-1, self.tokens[..., None])[..., 0]
        anchors = logps.detach() - self.log_ratio
        if anchor is not Anchor.STEP_START_TOKENS:
            anchors = torch.where(self.mask, anchors, 0).sum(-1) / self.mask.sum(-1)
        return {
            "target_logps": logps,
            "mask": self.mask,
            "anchor": anchors,
            "advantages": self.advantages,
            "is_self": self.is_self,
            "omega": self.omega,
        }


WEIGHTS = torch.tensor([[0.3, -0.8, 0.1, 0.5, -0.2], [0.9, 0.4, -0.6, 0.0, 0.2], [-0.5, 0.7, 0.3, -0.9, 0.1]]).double()


def evaluated(method: Method, batch: Batch, config: HacpoConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss, its gradient of the shared weights, and its metrics."""
    weights = WEIGHTS.clone().requires_grad_()
    loss, metrics = method.loss(*batch.arguments(weights, method.anchor).values(), 1, config)
    (gradient,) = torch.autograd.grad(loss, weights)
    return loss.detach(), gradient, metrics


def assert_same_loss(
    found: tuple[Tensor, Tensor, Mapping[str, float]], wanted: tuple[Tensor, Tensor, Mapping[str, float]]
) -> None:
    for one, other in zip(found[:2], wanted[:2], strict=True):
        # Ratios up to e^10, so relative to the largest.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * max(1.0, other.abs().max().item()))
    assert found[2] == pytest.approx(wanted[2])


@each_method
@few_examples
@given(SEEDS, st.integers(1, 12), CONFIGS, st.randoms(use_true_random=False))
def test_loss_and_gradient_do_not_depend_on_the_order_of_rollouts(method, seed, count, config, draw):
    batch, order = Batch.drawn(seed, count), list(range(count))
    draw.shuffle(order)
    assert_same_loss(evaluated(method, batch.rows(order), config), evaluated(method, batch, config))


@each_method
@few_examples
@given(SEEDS, st.lists(st.integers(1, 5), min_size=1, max_size=5), CONFIGS)
def test_loss_and_gradient_do_not_depend_on_how_the_mini_batch_is_cut(method, seed, sizes, config):
    batch = Batch.drawn(seed, sum(sizes))
    loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(WEIGHTS)
    metrics: dict[str, float] = {}
    start = 0
    for size in sizes:
        part = evaluated(method, batch.rows(list(range(start, start + size))), config)
        loss, gradient = loss + part[0] * size / len(batch), gradient + part[1] * size / len(batch)
        metrics = {key: metrics.get(key, 0.0) + value for key, value in part[2].items()}
        start += size
    assert_same_loss((loss, gradient, metrics), evaluated(method, batch, config))


@each_method
@few_examples
@given(SEEDS, st.integers(1, 6), st.integers(1, 5), CONFIGS)
def test_padding_changes_nothing(method, seed, count, columns, config):
    batch = Batch.drawn(seed, count)
    plain, padded = (each.arguments(WEIGHTS, method.anchor) for each in (batch, batch.padded(columns)))
    results = []
    for arguments in (plain, padded):
        leaf = arguments["target_logps"].requires_grad_()
        loss, metrics = method.loss(*{**arguments, "target_logps": leaf}.values(), 1, config)
        (gradient,) = torch.autograd.grad(loss, leaf)
        results.append((loss.detach(), gradient[:, : batch.tokens.shape[1]], metrics))
        assert (gradient[:, batch.tokens.shape[1] :] == 0).all()
    assert_same_loss(results[1], results[0])


# --- Bad input ---

BAD_NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf])


def spoiled(values: Tensor, place: int, bad: float) -> Tensor:
    """A copy with a bad value at a place of the first column, which no mask hides."""
    copy = values.to(torch.float64, copy=True)
    copy[(place % len(copy), 0) if copy.ndim == 2 else place % len(copy)] = bad
    return copy


ANCHOR_NAMES = {
    Anchor.SOURCE: "source_mean_logp",
    Anchor.STEP_START: "source_mean_logp",
    Anchor.STEP_START_TOKENS: "old_logps",
}


@each_method
@few_examples
@given(
    SEEDS,
    st.integers(1, 6),
    st.integers(0, 5),
    BAD_NUMBERS,
    st.sampled_from(["target_logps", "anchor", "advantages", "omega", "mask", "is_self"]),
    CONFIGS,
)
def test_every_loss_refuses_a_number_that_is_none_and_names_the_argument(
    method, seed, count, place, bad, argument, config
):
    arguments = {
        name: value.clone() for name, value in Batch.drawn(seed, count).arguments(WEIGHTS, method.anchor).items()
    }
    method.loss(*arguments.values(), 1, config)
    arguments[argument] = spoiled(arguments[argument], place, bad)
    named = ANCHOR_NAMES[method.anchor] if argument == "anchor" else argument
    with pytest.raises(ValueError, match=named):
        method.loss(*arguments.values(), 1, config)


@each_method
@few_examples
@given(
    SEEDS,
    st.integers(1, 6),
    st.sampled_from(["target_logps", "anchor", "advantages", "omega", "mask", "is_self"]),
    st.sampled_from([lambda each: each[:-1], lambda each: each[None], lambda each: torch.cat([each, each])]),
)
def test_every_loss_refuses_a_wrong_shape_and_names_an_argument(
    method: Method, seed: int, count: int, argument: str, change: Callable[[Tensor], Tensor]
):
    arguments = Batch.drawn(seed, count).arguments(WEIGHTS, method.anchor)
    arguments[argument] = change(arguments[argument])
    # Log-probs of another number of rows are what the rest is measured by, so the first of the rest is named.
    named = {"target_logps": "target_logps|mask"}.get(argument, argument)
    with pytest.raises(ValueError, match=ANCHOR_NAMES[method.anchor] if argument == "anchor" else named):
        method.loss(*arguments.values(), 1, HacpoConfig())


@each_method
@few_examples
@given(steps(), st.data())
def test_all_advantages_refuse_bad_input_and_name_the_argument(method, step, data):
    step = step.learnt_by(method)
    place = data.draw(st.integers(0, len(step.rewards) - 1))
    bad: dict[str, Callable[[], Step]] = {
        "rewards": lambda: dataclasses.replace(
            step, rewards=[*step.rewards[:place], data.draw(BAD_NUMBERS), *step.rewards[place + 1 :]]
        ),
        "prompt_index": lambda: dataclasses.replace(step, prompts=[*step.prompts, 0]),
        "sources": lambda: dataclasses.replace(step, sources=[*step.sources, step.learner]),
        "rewards must hold at least one rollout": lambda: step.rows([]),
    }
    for named, make in bad.items():
        with pytest.raises(ValueError, match=named):
            make().advantages(method, HacpoConfig())


@few_examples
@given(
    steps(),
    st.one_of(BAD_NUMBERS, st.floats(max_value=0, allow_infinity=False)),
    st.sampled_from(NAMES),
    st.data(),
)
def test_joint_advantages_refuse_capabilities_that_are_none(step, bad, agent, data):
    arguments = (step.rewards, step.prompts, step.sources, step.learner)
    with pytest.raises(ValueError, match=f"capabilities.*{agent}"):
        joint_advantages(*arguments, {**step.capabilities, agent: bad}, HacpoConfig())
    missing = data.draw(st.sampled_from(sorted({step.learner, *step.sources})))
    known = {name: capability for name, capability in step.capabilities.items() if name != missing}
    with pytest.raises(ValueError, match=rf"(sources|learner).*{missing}"):
        joint_advantages(*arguments, known, HacpoConfig())


@few_examples
@given(SEEDS, st.integers(1, 6), st.integers(0, 5), BAD_NUMBERS)
def test_kl_refuses_numbers_that_are_none(seed, count, place, bad):
    arguments = Batch.drawn(seed, count).arguments(WEIGHTS, Anchor.STEP_START_TOKENS)
    logps, reference, mask = (arguments[name] for name in ("target_logps", "anchor", "mask"))
    assert k3_kl(logps, reference, mask).shape == (count,)
    with pytest.raises(ValueError, match="target_logps"):
        k3_kl(spoiled(logps, place, bad), reference, mask)
    with pytest.raises(ValueError, match="reference_logps"):
        k3_kl(logps, spoiled(reference, place, bad), mask)
