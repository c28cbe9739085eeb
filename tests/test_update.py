"""The learner's updates against a naive second implementation, and what must not change them."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hacrl_fed.config import AlgorithmConfig, Lora, Optimizer, SiteConfig
from hacrl_fed.errors import HacrlFedError
from hacrl_fed_client.batching import Shape, length_buckets, micro_batches, plain_slots, shared_slots
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.update import TrainingRollout, Updater
from tiny_models import END, save_tiny, tiny_tokenizer

torch.set_num_threads(1)
OPTIMIZER = Optimizer(lr=1e-2, warmup_steps=0)
# Adam's own 1e-8 would blow up the rounding of gradients near 0, which two ways of summing do not share.
EPS = 1e-3


def load(folder: str, **settings: object) -> Policy:
    return Policy.load(folder, SiteConfig.model_validate(settings), seed=0, with_reference=True)


def algorithm(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"kl_coef": 0, "prompts_per_mini_batch": 2} | settings)


def rollouts(
    policy: Policy,
    source: str,
    *,
    ratio: float = 1.0,
    prompts: int = 4,
    seed: int = 0,
    groups: Sequence[int] = (),
    shortest: int = 2,
) -> list[TrainingRollout]:
    """Rollouts of unlike lengths, down to one token, whose ratio to the source is ``ratio`` at first.

    There are two a prompt, unless ``groups`` says how many; the prompts are ``shortest`` tokens long and more.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 200, (count,), generator=generator).tolist())

    made = []
    for prompt, size in enumerate(groups or [2] * prompts):
        prompt_ids = ids(shortest + 3 * prompt)
        for sample in range(size):
            advantage = (1.0, -0.7)[sample % 2]
            completion_ids = (*ids((prompt + sample) % 5), policy.eos_ids[0])
            mean = policy.token_logps([(prompt_ids, completion_ids)])[0].mean().item()
            omega = 1.0 if source == "me" else 0.8
            source_mean_logp = mean - math.log(ratio)
            made.append(
                TrainingRollout(source, f"q{prompt}", prompt_ids, completion_ids, source_mean_logp, advantage, omega)
            )
    return made


def updater(
    policy: Policy, settings: AlgorithmConfig, *, tokens: int = 10_000, optimizer: Optimizer = OPTIMIZER
) -> Updater:
    policy.micro_batch_tokens = tokens
    made = Updater(policy, "me", settings, optimizer)
    for group in made.optimizer.param_groups:
        group["eps"] = EPS
    return made


def nothing() -> None:
    """A check that never interrupts."""


def naive_step(folder: str, batches: list[list[TrainingRollout]], kl_coef: float) -> dict[str, torch.Tensor]:
    """The paper's formulas, one sequence at a time over all logits, for ratios within every bound; AdamW of torch."""
    model, frozen = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, eps=EPS, weight_decay=0.0)

    def logps(of: torch.nn.Module, rollout: TrainingRollout) -> torch.Tensor:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        logits = of(input_ids=ids).logits[0]
        everything = torch.log_softmax(logits, -1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        return everything[len(rollout.prompt_ids) - 1 :]

    for batch in batches:
        losses = []
        for rollout in batch:
            mine = logps(model, rollout)
            s = torch.exp(mine.mean() - rollout.source_mean_logp)
            if rollout.source == "me":
                loss = -torch.minimum(s * rollout.advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * rollout.advantage)
                with torch.no_grad():
                    theirs = logps(frozen, rollout)
                loss = loss + kl_coef * (torch.exp(theirs - mine) - (theirs - mine) - 1).mean()
            else:
                c = s.clamp(0.5, 1.0)
                loss = -c * c.detach() * rollout.omega * rollout.advantage
            losses.append(loss)
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


HACPO = {"hacpo": {"cross_clip_low": 0.5, "cross_clip_step": 0.0}}


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma", "gpt2"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_a_step_equals_that_of_a_naive_implementation(tmp_path: Path, family: Any, kl_coef: float) -> None:
    folder = save_tiny(tmp_path, family)
    policy = load(folder)
    own = rollouts(policy, "me")
    cross = [*rollouts(policy, "b", ratio=0.9, seed=1), *rollouts(policy, "a", ratio=0.8, seed=2)]
    # Peers come in name order after the learner's own, whatever the order given.
    order = [own[:4], own[4:], cross[8:12], cross[12:], cross[:4], cross[4:8]]
    metrics = updater(policy, algorithm(kl_coef=kl_coef, **HACPO)).step([*cross, *own], nothing)
    expected = naive_step(folder, order, kl_coef)
    state = policy.trainable_state()
    assert state.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], atol=1e-6, rtol=0)
    assert metrics["updates_made"] == 6 and metrics["updates_skipped"] == 0
    assert ("kl" in metrics) == (kl_coef > 0) and metrics.get("kl", 1) > 0


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("tokens", [10_000, 100, 1])
def test_groups_of_unequal_size_after_long_prompts_give_the_same_step(tmp_path: Path, family: Any, tokens: int) -> None:
    folder = save_tiny(tmp_path, family)
    policy = load(folder)
    own = rollouts(policy, "me", groups=(8, 1, 5, 2), shortest=30)
    cross = rollouts(policy, "a", groups=(3, 8), shortest=40, ratio=0.8, seed=1)
    updater(policy, algorithm(kl_coef=0.5, **HACPO), tokens=tokens).step([*own, *cross], nothing)
    expected = naive_step(folder, [own[:9], own[9:], cross], kl_coef=0.5)
    for name, value in policy.trainable_state().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


def slow_ratio_step(folder: str, batches: list[list[TrainingRollout]], token_level: bool) -> dict[str, torch.Tensor]:
    """GRPO, or naive sharing with the ratio to the learner itself, a sequence at a time: ratios to the first weights."""
    model, first = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, eps=EPS, weight_decay=0.0)
    low, high = (0.8, 1.28) if token_level else (1 - 3e-4, 1 + 4e-4)

    def logps(of: torch.nn.Module, rollout: TrainingRollout) -> torch.Tensor:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        everything = torch.log_softmax(of(input_ids=ids).logits[0], -1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        return everything[len(rollout.prompt_ids) - 1 :]

    for batch in batches:
        losses = []
        for rollout in batch:
            with torch.no_grad():
                old = logps(first, rollout)
            new = logps(model, rollout)
            ratio = torch.exp(new - old) if token_level else torch.exp(new.mean() - old.mean())
            losses.append(-torch.minimum(ratio * rollout.advantage, ratio.clamp(low, high) * rollout.advantage).mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("method", ["gspo", "grpo", "sapo", "naive_own"])
def test_a_step_whose_ratios_are_to_the_learner_at_its_start(tmp_path: Path, method: str) -> None:
    folder = save_tiny(tmp_path)
    policy = load(folder)
    own = rollouts(policy, "me")
    # Whatever the source says of its own log-probs does not enter.
    cross = rollouts(policy, "a", ratio=0.1, seed=1) if method not in ("gspo", "grpo") else []
    for budget in (10_000, 30):
        policy = load(folder)
        metrics = updater(policy, algorithm(method=method), tokens=budget).step([*cross, *own], nothing)
        batches = [batch for batch in (own[:4], own[4:], cross[:4], cross[4:]) if batch]
        expected = slow_ratio_step(folder, batches, token_level=method not in ("gspo", "naive_own"))
        state = policy.trainable_state()
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], atol=2e-6, rtol=0)
    assert metrics["self/ratio_mean"] == pytest.approx(1, abs=0.2)
    if cross:
        assert metrics["cross/ratio_p50"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_micro_batches_do_not_change_the_weights(tmp_path: Path, tokens: int, lora: Lora | None) -> None:
    folder = save_tiny(tmp_path)
    results = []
    for budget in (10_000, tokens):
        policy = load(folder, lora=lora)
        run = updater(policy, algorithm(kl_coef=0.1, **HACPO), tokens=budget)
        metrics = run.step([*rollouts(policy, "me"), *rollouts(policy, "a", ratio=0.9, seed=1)], nothing)
        results.append((policy.trainable_state(), metrics))
    (whole, whole_metrics), (cut, cut_metrics) = results
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], atol=1e-6, rtol=0)
    assert cut_metrics == pytest.approx(whole_metrics, abs=1e-5)


@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_gradient_checkpointing_does_not_change_the_weights(tmp_path: Path, lora: Lora | None) -> None:
    folder = save_tiny(tmp_path / "model")
    states = []
    for checkpointing in (False, True):
        policy = load(folder, lora=lora, gradient_checkpointing=checkpointing)
        own = rollouts(policy, "me", groups=(8, 1, 5, 2), shortest=30)
        run = updater(policy, algorithm(kl_coef=0.1, **HACPO), tokens=300)
        run.step([*own, *rollouts(policy, "a", ratio=0.9, seed=1)], nothing)
        states.append(policy.trainable_state())
        policy.save_pretrained(tmp_path / str(checkpointing))
    for name in states[0]:
        torch.testing.assert_close(states[1][name], states[0][name], atol=1e-5, rtol=0)
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / str(each)).state_dict() for each in (False, True)]
    for name in saved[0]:
        torch.testing.assert_close(saved[1][name], saved[0][name], atol=1e-5, rtol=0)


def test_pad_equal_to_eos_changes_nothing(tmp_path: Path) -> None:
    # Two tokenizers whose ids agree but for the pad token, one of which pads with EOS.
    states = []
    for name, tokenizer in [("own", tiny_tokenizer()), ("eos", tiny_tokenizer(pad=END))]:
        folder = save_tiny(tmp_path / name, tokenizer=tiny_tokenizer())
        tokenizer.save_pretrained(folder)
        policy = load(folder)
        updater(policy, algorithm()).step(rollouts(policy, "me"), nothing)
        states.append(policy.trainable_state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_cross_mini_batch_without_gradient_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    run = updater(policy, algorithm(**HACPO))
    first = run.step(rollouts(policy, "me"), nothing)
    assert first["updates_made"] == 2
    weights, before = policy.trainable_state(), run.optimizer.state_dict()
    adam = {index: {key: value.clone() for key, value in entry.items()} for index, entry in before["state"].items()}
    # Far outside the band: no gradient.
    metrics = run.step(rollouts(policy, "a", ratio=0.1), nothing)
    assert metrics["updates_made"] == 0 and metrics["updates_skipped"] == 2
    assert metrics["cross/live_share_positive"] == metrics["cross/live_share_negative"] == 0
    assert "grad_norm" not in metrics and "self/ratio_mean" not in metrics
    assert run.updates_made == 2
    assert all(torch.equal(weights[name], value) for name, value in policy.trainable_state().items())
    after = run.optimizer.state_dict()["state"]
    assert all(torch.equal(adam[index][key], after[index][key]) for index in adam for key in adam[index])
    # The momentum would have moved the weights, so this test can fail.
    run.step(rollouts(policy, "a", ratio=0.9), nothing)
    assert any(not torch.equal(weights[name], value) for name, value in policy.trainable_state().items())


class Forwarded:
    """Counts the sequences that a policy forwards, with gradient and without."""

    def __init__(self, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[bool, int]] = []
        token_logps = policy.token_logps

        def counted(sequences: Any, *, gradient: bool = False, **rest: Any) -> Any:
            self.calls.append((gradient, len(sequences)))
            return token_logps(sequences, gradient=gradient, **rest)

        monkeypatch.setattr(policy, "token_logps", counted)


def assert_weights(policy: Policy, expected: dict[str, torch.Tensor]) -> None:
    for name, weight in policy.trainable_state().items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["hacpo", "naive_own"])
def test_rollouts_without_advantage_are_not_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    policy = load(save_tiny(tmp_path))
    mixed = [replace(row, advantage=row.advantage * (number > 1)) for number, row in enumerate(rollouts(policy, "me"))]
    forwarded = Forwarded(policy, monkeypatch)
    metrics = updater(policy, algorithm(method=method)).step(mixed, nothing)
    assert sum(count for gradient, count in forwarded.calls if gradient) == 6
    assert sum(count for gradient, count in forwarded.calls if not gradient) == (4 if method == "naive_own" else 0)
    # They count in the mean all the same.
    assert_weights(policy, naive_step(str(tmp_path), [mixed[:4], mixed[4:]], kl_coef=0.0))
    # Two of the second mini-batch are clipped, of eight in all.
    assert metrics["self/clip_share"] == 0.25 and metrics["updates_made"] == 2


@pytest.mark.parametrize("tokens", [10_000, 40])
def test_of_a_source_with_few_live_rollouts_only_those_are_forwarded_with_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    policy = load(save_tiny(tmp_path))
    rows = [replace(row, omega=1.0) for row in rollouts(policy, "c", ratio=0.9)]
    # Live are one rollout of the first mini-batch and two of the second.
    far = [
        row if number in (1, 4, 7) else replace(row, source_mean_logp=row.source_mean_logp + 3)
        for number, row in enumerate(rows)
    ]
    forwarded = Forwarded(policy, monkeypatch)
    metrics = updater(policy, algorithm(**HACPO), tokens=tokens).step(far, nothing)
    with_gradient = sum(count for gradient, count in forwarded.calls if gradient)
    screened = sum(count for gradient, count in forwarded.calls if not gradient)
    assert (with_gradient, screened) == (4 + 2, 4)
    assert_weights(policy, naive_step(str(tmp_path), [far[:4], far[4:]], kl_coef=0.0))
    assert metrics["cross/c/live_share_positive"] == 1 / 4 and metrics["cross/c/live_share_negative"] == 2 / 4


@pytest.mark.parametrize(("prompts", "scored"), [(1, 6), (2, 4), (4, 0)])
@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_the_first_mini_batch_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, prompts: int, scored: int
) -> None:
    policy = load(save_tiny(tmp_path))
    own = rollouts(policy, "me", ratio=0.1)
    forwarded = Forwarded(policy, monkeypatch)
    metrics = updater(policy, algorithm(method=method, prompts_per_mini_batch=prompts)).step(own, nothing)
    assert sum(count for gradient, count in forwarded.calls if not gradient) == scored
    assert sum(count for gradient, count in forwarded.calls if gradient) == len(own) == 8
    assert metrics["self/ratio_p50"] == pytest.approx(1, abs=0.2)  # not the source's own ratio


def test_an_own_mini_batch_without_gradient_is_skipped_but_for_the_kl(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    equal = [replace(rollout, advantage=0.0) for rollout in rollouts(policy, "me")]
    run = updater(policy, algorithm(method="gspo"))
    run.step(rollouts(policy, "me"), nothing)
    weights = policy.trainable_state()
    metrics = run.step(equal, nothing)
    assert (metrics["updates_made"], metrics["updates_skipped"]) == (0, 2) and "lr" not in metrics
    assert all(torch.equal(weights[name], value) for name, value in policy.trainable_state().items())
    with_kl = updater(policy, algorithm(method="gspo", kl_coef=0.1)).step(equal, nothing)
    assert (with_kl["updates_made"], with_kl["updates_skipped"]) == (2, 0)


def test_the_update_index_counts_updates_made(tmp_path: Path) -> None:
    # The band's lower bound is .5, and 1 after any update: cross rollouts of ratio .9 are live only if none was made.
    settings = algorithm(hacpo={"cross_clip_low": 0.5, "cross_clip_step": 0.6})
    policy = load(save_tiny(tmp_path))
    cross = rollouts(policy, "a", ratio=0.9, prompts=2)
    dead = [replace(rollout, source="_", source_mean_logp=rollout.source_mean_logp + 9) for rollout in cross]
    metrics = updater(policy, settings).step([*dead, *cross], nothing)
    assert (metrics["updates_skipped"], metrics["updates_made"]) == (1, 1)
    assert metrics["cross/a/live_share_positive"] == 1 and metrics["cross/_/live_share_positive"] == 0
    assert metrics["cross/live_share_positive"] == 0.5
    policy = load(str(tmp_path))
    metrics = updater(policy, settings).step([*rollouts(policy, "me", prompts=2), *cross], nothing)
    assert metrics["cross/a/live_share_positive"] == 0


def test_mini_batches_hold_prompts_of_one_source_and_half_as_many_for_gspo_x2(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    own = rollouts(policy, "me", prompts=5)
    # A mini-batch that would hold more prompts than there are is halved all the same.
    for prompts, method, mini_batches in [(2, "gspo", 3), (2, "gspo_x2", 5), (64, "gspo", 1), (64, "gspo_x2", 3)]:
        metrics = updater(policy, algorithm(method=method, prompts_per_mini_batch=prompts)).step(own, nothing)
        assert metrics["updates_made"] + metrics["updates_skipped"] == mini_batches


def test_metrics_of_the_first_own_mini_batch(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    own = rollouts(policy, "me", prompts=2)
    metrics = updater(policy, algorithm(method="gspo")).step(own, nothing)
    assert metrics["self/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["self/clip_share"] == 0
    assert metrics["loss"] == pytest.approx(-0.15, abs=1e-5)  # -mean of advantages 1 and -.7 at ratio 1
    assert metrics["grad_norm"] == metrics["grad_norm/self"] > 0 and metrics["lr"] == 1e-2
    # The policy has moved: the same rollouts are now clipped, in part.
    assert updater(policy, algorithm()).step(own, nothing)["self/clip_share"] > 0
    assert updater(policy, algorithm()).step([], nothing)["updates_made"] == 0


def test_metrics_of_cross_mini_batches(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    # Of b, positive and negative lie in the band; of c, half of each.
    spread = rollouts(policy, "c", ratio=0.9, seed=2)
    far = [replace(row, source_mean_logp=row.source_mean_logp + 3) for row in spread[:4]]
    settings = algorithm(hacpo={"cross_clip_low": 0.5, "cross_clip_step": 0.0}, prompts_per_mini_batch=4)
    run = updater(policy, settings, optimizer=Optimizer(lr=1e-9, warmup_steps=0))
    metrics = run.step([*rollouts(policy, "b", ratio=0.8, seed=1), *far, *spread[4:]], nothing)
    assert metrics["cross/b/clip_share"] == 0 and metrics["cross/c/clip_share"] == 0.5
    assert metrics["cross/clip_share"] == 0.25
    assert metrics["cross/b/ratio_p50"] == pytest.approx(0.8, abs=1e-4)
    assert metrics["cross/c/ratio_p90"] == pytest.approx(0.9, abs=1e-4)
    assert metrics["cross/c/ratio_p10"] == pytest.approx(0.9 * math.exp(-3), abs=1e-4)
    assert metrics["cross/ratio_mean"] == pytest.approx((0.8 + 0.9 * (1 + math.exp(-3)) / 2) / 2, abs=1e-4)
    assert metrics["grad_norm"] == metrics["grad_norm/cross"] > 0 and "grad_norm/self" not in metrics


def test_the_band_rises_by_the_share_of_the_steps_updates(tmp_path: Path) -> None:
    # Two own updates of four are made before b comes: its bounds are .65 and .725 by m_scale 2, and .8 by the count.
    for m_scale, live in [(2.0, 1.0), (None, 0.0)]:
        policy = load(save_tiny(tmp_path))
        hacpo = {"cross_clip_low": 0.5, "cross_clip_step": 0.15, "m_scale": m_scale}
        run = updater(policy, algorithm(hacpo=hacpo), optimizer=Optimizer(lr=1e-9, warmup_steps=0))
        metrics = run.step([*rollouts(policy, "me"), *rollouts(policy, "b", ratio=0.75)], nothing)
        assert metrics["cross/b/live_share_positive"] == live


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "lora": {"r": 4}},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
    ],
    ids=["full", "lora", "checkpointed"],
)
def test_rows_scored_beside_others_start_an_update_unclipped_in_16_bits(tmp_path: Path, settings: Any) -> None:
    policy = load(save_tiny(tmp_path), **settings)
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, 200, (count,), generator=generator).tolist())

    prompts = [ids(20 + 10 * number) for number in range(8)]
    sequences = [(prompt, ids(4 + 7 * sample)) for prompt in prompts for sample in range(8)]
    sums = policy.score(sequences, nothing)
    scored = [
        TrainingRollout("me", str(len(prompt)), prompt, completion, total / len(completion), 1.0 - 2 * (index % 2))
        for index, ((prompt, completion), total) in enumerate(zip(sequences, sums, strict=True))
    ]
    run = updater(policy, algorithm(prompts_per_mini_batch=4), optimizer=Optimizer(lr=1e-12, warmup_steps=0))
    metrics = run.step(scored, nothing)
    assert metrics["self/clip_share"] == 0
    assert metrics["self/ratio_p10"] == pytest.approx(1, abs=1e-6) == metrics["self/ratio_p90"]


@pytest.mark.parametrize("targets", [("lm_head", "q_proj"), ("embed_tokens", "q_proj")])
def test_adapters_of_head_and_embeddings_train_with_dropout_and_a_reference(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    policy = load(save_tiny(tmp_path, "llama"), lora=Lora(r=4, dropout=0.1, target_modules=targets))
    metrics = updater(policy, algorithm(kl_coef=0.1)).step(rollouts(policy, "me"), nothing)
    assert metrics["updates_made"] == 2 and math.isfinite(metrics["grad_norm"])


def test_the_learning_rate_warms_up_linearly_and_then_stays(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    run = updater(policy, algorithm(prompts_per_mini_batch=4), optimizer=Optimizer(lr=4e-3, warmup_steps=4))
    rates = []
    for _ in range(6):
        rates.append(run.step(rollouts(policy, "me"), nothing)["lr"])
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3, 4e-3])


class _StopError(Exception):
    pass


def stop_at(call: int) -> Callable[[], None]:
    left = iter(range(call))

    def check() -> None:
        if next(left, None) is None:
            raise _StopError

    return check


def test_an_interruption_leaves_the_last_whole_update_and_nothing_of_the_next(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    policy = load(folder)
    own = rollouts(policy, "me")
    run = updater(policy, algorithm(), tokens=1)
    with pytest.raises(_StopError):
        run.step(own, stop_at(6))  # 4 sequences in the first mini-batch, 2 of the second
    assert run.updates_made == 1
    other = load(folder)
    other_run = updater(other, algorithm(), tokens=1)
    other_run.step(own[:4], nothing)
    expected = other.trainable_state()
    assert all(torch.equal(value, expected[name]) for name, value in policy.trainable_state().items())
    # What the interrupted mini-batch had accumulated does not leak into the next.
    run.step(own[4:], nothing)
    other_run.step(own[4:], nothing)
    expected = other.trainable_state()
    assert all(torch.equal(value, expected[name]) for name, value in policy.trainable_state().items())


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_ruins_the_weights(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    weights = policy.trainable_state()
    own = [replace(rollout, advantage=3e38) for rollout in rollouts(policy, "me")]
    with pytest.raises(HacrlFedError, match="gradient is not finite"):
        updater(policy, algorithm()).step(own, nothing)
    assert all(torch.equal(value, weights[name]) for name, value in policy.trainable_state().items())


SHAPES = st.lists(st.builds(Shape, st.integers(0, 6), st.just(0), st.integers(1, 100))).map(
    lambda shapes: [replace(shape, prompt_tokens=1 + 37 * shape.prompt % 60) for shape in shapes]
)


@given(shapes=SHAPES, budget=st.integers(1, 600), shares=st.booleans())
def test_micro_batches_hold_every_index_once_within_the_budget(shapes: list[Shape], budget: int, shares: bool) -> None:
    batches = micro_batches(shapes, budget, shares=shares)
    assert sorted(index for batch in batches for index in batch) == list(range(len(shapes)))

    def slots(batch: list[int]) -> int:
        chosen = [shapes[index] for index in batch]
        plain, shared = plain_slots(chosen), shared_slots(chosen)
        # A prompt's keys and values are held for each of its rows, an eighth of a slot a token.
        held = sum(shape.prompt_tokens for shape in chosen) // 8
        return shared + held if shares and shared < plain else plain

    for batch in batches:
        assert len(batch) == 1 or slots(batch) <= budget
    if not shares:
        # The next batch's longest did not fit.
        for left, right in itertools.pairwise(batches):
            assert slots([*left, right[0]]) > budget
    else:
        for prompt in {shape.prompt for shape in shapes}:
            group = [index for index, shape in enumerate(shapes) if shape.prompt == prompt]
            holding = [batch for batch in batches if set(group) & set(batch)]
            assert len(holding) == 1 or slots(group) > budget


def test_slots_are_counted_with_their_padding() -> None:
    rows = [Shape("a", 10, 3), Shape("a", 10, 1), Shape("b", 4, 50), Shape("b", 4, 26), Shape("b", 4, 25)]
    assert plain_slots(rows) == 5 * (4 + 50 - 1)
    # Prompts to 10; completions without their last token: 49 and 25 to 49, then 24 and 2 to 24.
    assert shared_slots(rows) == 2 * 10 + 2 * 49 + 2 * 24
    assert length_buckets([2, 0, 49, 25, 24]) == [[2, 3], [4, 0]]
    assert shared_slots([Shape("a", 10, 1)] * 3) == 10


@pytest.mark.parametrize("shares", [True, False])
def test_like_lengths_are_together(shares: bool) -> None:
    shapes = [Shape(number % 20, 10 * (number % 20 + 1), 5) for number in range(40)]
    for batch in micro_batches(shapes, 600, shares=shares):
        tokens = [shapes[index].prompt_tokens for index in batch]
        others = [shape.prompt_tokens for index, shape in enumerate(shapes) if index not in batch]
        assert not any(min(tokens) < other < max(tokens) for other in others)


def test_a_checkpoint_keeps_the_moments_and_takes_the_settings_of_now(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    first = updater(policy, algorithm(), optimizer=Optimizer(lr=1e-2, warmup_steps=0))
    first.step(rollouts(policy, "me"), nothing)
    lower = updater(policy, algorithm(), optimizer=Optimizer(lr=1e-5, betas=(0.8, 0.9), warmup_steps=0))
    lower.load_state(first.optimizer.state_dict(), first.scheduler.state_dict())
    assert lower.updates_made == first.updates_made == 2
    (group,) = lower.optimizer.param_groups
    assert group["lr"] == 1e-5 and tuple(group["betas"]) == (0.8, 0.9)
    moments = first.optimizer.state[policy.parameters()[0]]["exp_avg"]
    torch.testing.assert_close(lower.optimizer.state[policy.parameters()[0]]["exp_avg"], moments)
    assert lower.step(rollouts(policy, "me"), nothing)["lr"] == 1e-5
