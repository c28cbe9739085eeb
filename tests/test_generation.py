"""Generation: what is sampled is the policy's own distribution, cut where a completion ends."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from hacrl_fed.config import Lora, SiteConfig
from hacrl_fed.errors import UserError
from hacrl_fed.records import FinishReason
from hacrl_fed_client.generation.base import Completion, cut_at_end
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.policy import Policy
from tiny_models import END, Family, save_tiny, tiny_tokenizer

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]


def load(folder: str, **settings: object) -> Policy:
    return Policy.load(folder, SiteConfig.model_validate(settings), seed=0, with_reference=False)


def generate(
    policy: Policy,
    prompts: list[list[int]],
    samples: int,
    new: int,
    *,
    greedy: bool = False,
    seed: int = 0,
    rows: int = 64,
) -> list[list[Completion]]:
    return list(HfGenerator(policy, rows).generate(prompts, samples, new, greedy=greedy, seed=seed))


def next_token_probs(policy: Policy, prompt: list[int]) -> torch.Tensor:
    candidates = [(prompt, [token_id]) for token_id in range(len(policy.tokenizer))]
    return policy.token_logps(candidates)[0][:, 0].exp().double()


def test_the_models_own_sampling_settings_do_not_leak_in(tmp_path: Path) -> None:
    # scale .3: far from uniform, so that top_k, a temperature or a penalty would show.
    folder = save_tiny(tmp_path, scale=0.3)
    GenerationConfig(
        do_sample=True, top_k=1, top_p=0.2, min_p=0.5, temperature=0.1, repetition_penalty=5.0, suppress_tokens=[3, 4],
        no_repeat_ngram_size=1, min_new_tokens=1, eos_token_id=tiny_tokenizer().eos_token_id,
    ).save_pretrained(tmp_path)  # fmt: skip
    policy = load(folder)
    prompt = [5, 6, 7, 5]
    probs = next_token_probs(policy, prompt)
    assert probs.sum().item() == pytest.approx(1, abs=1e-4)
    draws = 4000
    counts = Counter(c.token_ids[0] for c in generate(policy, [prompt], draws, 1, rows=draws)[0])
    observed = torch.tensor([counts[i] for i in range(len(probs))], dtype=torch.float64)
    # Pearson's chi-squared over the ids expected 5 times or more and the rest as one: mean df, deviation sqrt(2 df).
    common = probs * draws >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * draws
    seen = torch.cat([observed[common], observed[~common].sum()[None]])
    df = len(expected) - 1
    assert df > 20
    chi_squared = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_squared < df + 5 * (2 * df) ** 0.5
    # Prompt tokens, which the penalty would have suppressed, and the suppressed ids come as often as they should.
    marked = [3, 4, 5, 6, 7]
    share = probs[marked].sum().item()
    assert abs(observed[marked].sum().item() / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5 + 1e-9


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_greedy_takes_the_likeliest_token_whatever_the_padding(tmp_path: Path, family: Family) -> None:
    policy = load(save_tiny(tmp_path, family, scale=0.5))
    for prompt, [completion] in zip(PROMPTS, generate(policy, PROMPTS, 1, 6, greedy=True), strict=True):
        ids = list(completion.token_ids)
        for position in range(len(ids)):
            probs = next_token_probs(policy, prompt + ids[:position])
            assert ids[position] == int(probs.argmax())


def test_the_same_seed_gives_the_same_tokens_and_touches_no_other_random_state(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    state = torch.get_rng_state()
    first = generate(policy, PROMPTS, 4, 8, seed=3, rows=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert generate(policy, PROMPTS, 4, 8, seed=3, rows=5) == first
    assert generate(policy, PROMPTS, 4, 8, seed=4, rows=5) != first
    # Batches of one call differ too: the samples of a prompt are not repeated.
    samples = [c.token_ids for group in generate(policy, [PROMPTS[0]], 6, 8, seed=3, rows=2) for c in group]
    assert len(set(samples)) == 6


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_groups_are_whole_and_in_order_whatever_the_rows(tmp_path: Path, rows: int) -> None:
    policy = load(save_tiny(tmp_path, scale=0.5))
    groups = generate(policy, PROMPTS, 3, 4, greedy=True, rows=rows)
    assert [len(group) for group in groups] == [3, 3, 3]
    assert groups == [[group[0]] * 3 for group in generate(policy, PROMPTS, 1, 4, greedy=True)]
    assert generate(policy, [], 3, 4) == []


def test_batches_come_as_they_are_done(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    groups = HfGenerator(policy, rows=2).generate(PROMPTS, 2, 4, greedy=False, seed=0)
    first = next(groups)
    torch.manual_seed(7)  # between batches nothing of the random state is held
    assert [first, *groups] == generate(policy, PROMPTS, 2, 4, rows=2)


@pytest.mark.parametrize("pad", ["<|pad|>", END, None])
def test_every_ending_id_stops_and_is_part_of_the_completion(tmp_path: Path, pad: str | None) -> None:
    tokenizer = tiny_tokenizer(pad=pad)
    folder = save_tiny(tmp_path, tokenizer=tokenizer)
    # A third of the vocabulary ends: completions are short, and most end by an id that is not the tokenizer's.
    GenerationConfig(eos_token_id=list(range(90))).save_pretrained(tmp_path)
    policy = load(folder)
    completions = [c for group in generate(policy, PROMPTS, 60, 4) for c in group]
    reasons = Counter(c.finish_reason for c in completions)
    assert reasons[FinishReason.STOP] > 20 and reasons[FinishReason.LENGTH] > 5
    for completion in completions:
        ends = [token_id in policy.eos_ids for token_id in completion.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (completion.finish_reason is FinishReason.STOP)
        assert completion.finish_reason is FinishReason.STOP or len(completion.token_ids) == 4


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_without_any_ending_id_completions_end_by_length(tmp_path: Path, family: Family) -> None:
    policy = load(save_tiny(tmp_path, family, tokenizer=tiny_tokenizer(eos=None), scale=0.5))
    assert policy.eos_ids == ()
    for completion in (c for group in generate(policy, PROMPTS, 30, 5) for c in group):
        assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 5
    for prompt, [completion] in zip(PROMPTS, generate(policy, PROMPTS, 1, 3, greedy=True), strict=True):
        probs = next_token_probs(policy, prompt)
        assert completion.token_ids[0] == int(probs.argmax())


def test_dropout_is_off(tmp_path: Path) -> None:
    for name, policy in [
        ("whole", load(save_tiny(tmp_path / "whole", "gpt2", scale=0.5))),
        ("lora", load(save_tiny(tmp_path / "lora", "gpt2", scale=0.5), lora=Lora(r=4, dropout=0.5))),
    ]:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        # Leaves dropout on, as an update does.
        policy.token_logps([([5], [6])], gradient=True)
        first = generate(policy, PROMPTS, 1, 12, greedy=True)
        assert all(generate(policy, PROMPTS, 1, 12, greedy=True, seed=seed) == first for seed in range(1, 4)), name


def test_a_context_too_short_is_told_at_once(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    with pytest.raises(UserError, match="context of 256: lower max_new_tokens"):
        HfGenerator(policy, 4).generate(PROMPTS, 1, 251, greedy=False, seed=0)


@given(ids=st.lists(st.integers(0, 9), min_size=1), eos=st.frozensets(st.integers(0, 9)))
def test_a_completion_is_cut_at_its_first_ending_id(ids: list[int], eos: frozenset[int]) -> None:
    completion = cut_at_end(ids, eos)
    kept = list(completion.token_ids)
    assert kept == ids[: len(kept)]
    assert not eos.intersection(kept[:-1])
    if completion.finish_reason is FinishReason.STOP:
        assert kept[-1] in eos
    else:
        assert kept == ids and not eos.intersection(ids)
