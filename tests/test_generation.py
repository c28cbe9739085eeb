"""Generation: what is sampled is the policy's own distribution, cut where a completion ends, and nothing is done twice."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from hacrl_fed.config import Lora, SiteConfig
from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed.records import FinishReason
from hacrl_fed_client.generation.base import Completion, cut_at_end
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.generation.sampling import choose, derive_seed, uniforms
from hacrl_fed_client.policy import Policy
from tiny_models import END, Family, save_tiny, tiny_tokenizer

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]

# Windows shorter than the prompts; a recurrent model and a hybrid one, whose prompts cannot be shared.
WINDOWED = ("mistral", "gemma2")
RECURRENT = ("mamba", "lfm2")
KINDS = ("qwen3", "llama", "gpt2", *WINDOWED, *RECURRENT)


def save_kind(folder: Path, kind: str, ending: int = 30) -> str:
    """A random model with the first ``ending`` ids as ending ones; far from uniform."""
    if kind in ("qwen3", "llama", "gpt2"):
        save_tiny(folder, kind, scale=0.5)  # type: ignore[arg-type]
    else:
        tokenizer = tiny_tokenizer()
        sizes: dict[str, Any] = {
            "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None,
            "initializer_range": 0.15 if kind == "gemma2" else 0.5,  # it scales its embeddings
        }  # fmt: skip
        attention: dict[str, Any] = {
            "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        }  # fmt: skip
        config: PreTrainedConfig = {
            "mistral": lambda: MistralConfig(**sizes, **attention, head_dim=8, sliding_window=4),
            "gemma2": lambda: Gemma2Config(**sizes, **attention, head_dim=8, sliding_window=4),
            "mamba": lambda: MambaConfig(**sizes, state_size=4),
            "lfm2": lambda: Lfm2Config(**sizes, **attention, layer_types=["conv", "full_attention"]),
        }[kind]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=list(range(ending))).save_pretrained(folder)
    return str(folder)


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
    seeds = [derive_seed(seed, number) for number in range(len(prompts))]
    return list(HfGenerator(policy, rows, no_check).generate(prompts, samples, new, greedy=greedy, seeds=seeds))


def no_check() -> None:
    """Interrupts nothing."""


def ids_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in group] for group in groups]


@contextmanager
def shapes_forwarded(policy: Policy) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the ids that the model is given."""
    shapes: list[tuple[int, ...]] = []
    with policy.forward_context(training=False) as model:
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
    yield shapes
    hook.remove()


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


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_completions_are_those_of_transformers_for_each_prompt_alone(tmp_path: Path, kind: str) -> None:
    folder = save_kind(tmp_path, kind, ending=5)
    policy = load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=list(policy.eos_ids), pad_token_id=0)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        expected.append(out[0, len(prompt) :].tolist())
    assert ids_of(generate(policy, PROMPTS, 1, 12, greedy=True)) == [[ids] for ids in expected]
    assert ids_of(generate(policy, PROMPTS, 3, 12, greedy=True, rows=7)) == [[ids] * 3 for ids in expected]


def drawn_alone(model: Any, prompt: list[int], seed: int, sample: int, new: int, eos_ids: tuple[int, ...]) -> list[int]:
    """A completion as the definitions say, one whole forward pass a token."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, sample], dtype=np.uint64)))
    ids: list[int] = []
    while len(ids) < new and not (ids and ids[-1] in eos_ids):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, -1].double().numpy()
        shares = np.exp(logits - logits.max())
        ids.append(int(np.searchsorted(np.cumsum(shares / shares.sum()), generator.random(), side="right")))
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_does_not_depend_on_what_is_generated_beside_it(tmp_path: Path, kind: str) -> None:
    folder = save_kind(tmp_path, kind)
    policy = load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    seeds = [derive_seed(0, number) for number in range(len(PROMPTS))]
    expected = [
        [drawn_alone(model, prompt, seed, sample, 10, policy.eos_ids) for sample in range(5)]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert len({tuple(ids) for group in expected for ids in group}) > 12
    for rows in (1, 2, 5, 13, 64):
        assert ids_of(generate(policy, PROMPTS, 5, 10, rows=rows)) == expected
    # In another order, without the others, with fewer samples and for fewer tokens.
    generator = HfGenerator(policy, 64, no_check)
    backwards = generator.generate(PROMPTS[::-1], 5, 10, greedy=False, seeds=seeds[::-1])
    assert ids_of(list(backwards)) == expected[::-1]
    alone = generator.generate(PROMPTS[1:2], 2, 4, greedy=False, seeds=seeds[1:2])
    assert ids_of(list(alone)) == [[ids[:4] for ids in expected[1][:2]]]


def test_prompts_are_forwarded_once_and_ended_rows_no_more(tmp_path: Path) -> None:
    policy = load(save_kind(tmp_path, "qwen3", ending=60))
    with shapes_forwarded(policy) as shapes:
        groups = generate(policy, PROMPTS, 20, 24, rows=60)
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    assert shapes[0] == (len(PROMPTS), max(len(prompt) for prompt in PROMPTS))
    # Each row's first token is of the prompts' pass. A batch is cut when three quarters of it or less are alive.
    batch, expected = 60, []
    for position in range(1, max(lengths)):
        alive = sum(length > position for length in lengths)
        batch = alive if alive <= 0.75 * batch else batch
        expected.append((batch, 1))
    assert shapes[1:] == expected
    assert expected[-1][0] < 10 and len(set(expected)) > 4
    # More samples than rows: in parts, the prompt once for each.
    with shapes_forwarded(policy) as shapes:
        generate(policy, PROMPTS[:1], 20, 1, rows=8)
    assert shapes == [(1, 3)] * 3


@pytest.mark.parametrize("kind", ["qwen3", "mamba"])
def test_the_check_ends_generation_within_a_token(tmp_path: Path, kind: str) -> None:
    policy = load(save_kind(tmp_path, kind, ending=1))
    seeds = list(range(len(PROMPTS)))
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    with shapes_forwarded(policy) as shapes, pytest.raises(KeyboardInterrupt):
        list(HfGenerator(policy, 64, check).generate(PROMPTS, 2, 50, greedy=False, seeds=seeds))
    assert 3 <= len(shapes) <= 6


@pytest.mark.parametrize("kind", ["qwen3", *WINDOWED, *RECURRENT])
def test_a_model_whose_prompts_cannot_be_shared_is_told_of_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(save_kind(tmp_path, kind))
    generator = HfGenerator(policy, 4, no_check)
    with caplog.at_level(logging.INFO), shapes_forwarded(policy) as shapes:
        for _ in range(2):
            list(generator.generate(PROMPTS, 4, 3, greedy=False, seeds=[1, 2, 3]))
    assert caplog.text.count("has no cache that its rows could share") == (kind in RECURRENT)
    prompts = [shape for shape in shapes if shape[1] > 1 and shape != (1, 1)]
    assert {shape[0] for shape in prompts[1:]} == ({4} if kind in RECURRENT else {1})


@pytest.mark.parametrize("kind", ["qwen3", "mamba"])
@pytest.mark.parametrize("greedy", [True, False])
def test_logits_that_are_not_numbers_are_an_error(tmp_path: Path, kind: str, greedy: bool) -> None:
    policy = load(save_kind(tmp_path, kind))
    with torch.no_grad():
        policy.parameters()[-1].fill_(torch.nan)
    with pytest.raises(HacrlFedError, match="not finite"):
        generate(policy, PROMPTS, 2, 3, greedy=greedy)


def test_bfloat16_and_an_adapter_generate_too(tmp_path: Path) -> None:
    folder = save_kind(tmp_path, "qwen3")
    for policy in (
        load(folder, dtype="bfloat16"),
        load(folder, lora=Lora(r=4)),
        load(folder, dtype="bfloat16", lora=Lora(r=4)),
    ):
        groups = generate(policy, PROMPTS, 4, 8)
        assert len({completion.token_ids for group in groups for completion in group}) > 6


def test_tokens_are_chosen_by_their_probabilities_and_impossible_ones_never() -> None:
    shares = torch.tensor([0.0, 0.3, 0.0, 0.05, 0.6, 0.05, 0.0], dtype=torch.float64)
    draws = 20_000
    numbers = uniforms(seed=2**64 - 1, sample=7, count=draws)
    tokens, logps = choose(shares.log().float().expand(draws, -1), numbers)
    torch.testing.assert_close(logps, shares[tokens].log().float())
    counts = tokens.bincount(minlength=7)
    assert counts[shares == 0].sum() == 0
    deviations = (counts - draws * shares) / (draws * shares * (1 - shares)).sqrt()
    assert deviations[shares > 0].abs().max() < 4
    # The ends of [0, 1), and a number on the border of two tokens.
    edges = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]] * 3)
    assert choose(logits, edges)[0].tolist() == [1, 3, 3]


@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40), st.floats(0, 1, exclude_max=True))
def test_a_token_covers_its_part_of_the_unit_interval(logits: list[float], number: float) -> None:
    token = int(choose(torch.tensor([logits]), torch.tensor([number], dtype=torch.float64))[0])
    shares = np.exp(np.array(logits) - max(logits))
    borders = np.concatenate([[0.0], np.cumsum(shares / shares.sum())])
    assert borders[token] - 1e-6 <= number <= borders[token + 1] + 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("numbers", [None, torch.tensor([0.2, 0.9], dtype=torch.float64)])
def test_one_bad_logit_is_enough(bad: float, numbers: torch.Tensor | None) -> None:
    with pytest.raises(HacrlFedError, match="not finite"):
        choose(torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0]]), numbers)
    with pytest.raises(HacrlFedError, match="not finite"):
        choose(torch.full((2, 3), -torch.inf), numbers)


def test_seeds_and_streams_differ() -> None:
    assert derive_seed(1, "a", 23) == derive_seed("1", "a", "23") != derive_seed(1, "a2", 3)
    seeds = [derive_seed(0, "a", number) for number in range(50)]
    streams = {tuple(uniforms(seed, sample, 3).tolist()) for seed in seeds for sample in range(50)}
    assert len(set(seeds)) == 50 and len(streams) == 2500
    assert uniforms(3, 1, 100)[:10].equal(uniforms(3, 1, 10))


def test_the_same_seed_gives_the_same_tokens_and_touches_no_other_random_state(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    state = torch.get_rng_state()
    first = generate(policy, PROMPTS, 4, 8, seed=3, rows=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert generate(policy, PROMPTS, 4, 8, seed=3, rows=5) == first
    assert generate(policy, PROMPTS, 4, 8, seed=4, rows=5) != first
    samples = [c.token_ids for group in generate(policy, [PROMPTS[0]] * 2, 6, 8, seed=3, rows=2) for c in group]
    assert len(set(samples)) == 12


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_groups_are_whole_and_in_order_whatever_the_rows(tmp_path: Path, rows: int) -> None:
    policy = load(save_tiny(tmp_path, scale=0.5))
    groups = generate(policy, PROMPTS, 3, 4, greedy=True, rows=rows)
    assert [len(group) for group in groups] == [3, 3, 3]
    assert groups == [[group[0]] * 3 for group in generate(policy, PROMPTS, 1, 4, greedy=True)]
    assert generate(policy, [], 3, 4) == []


def test_batches_come_as_they_are_done(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    seeds = [derive_seed(0, number) for number in range(len(PROMPTS))]
    with shapes_forwarded(policy) as shapes:
        groups = HfGenerator(policy, 2, no_check).generate(PROMPTS, 2, 4, greedy=False, seeds=seeds)
        assert not shapes
        first = next(groups)
        assert len(shapes) <= 4
    torch.manual_seed(7)  # no global random state is read
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("greedy", [False, True])
def test_completions_carry_the_log_probs_that_they_were_sampled_with(tmp_path: Path, kind: str, greedy: bool) -> None:
    policy = load(save_kind(tmp_path, kind))
    for prompt, group in zip(PROMPTS, generate(policy, PROMPTS, 2, 8, greedy=greedy), strict=True):
        for each in group:
            logps_1T, _ = policy.token_logps([(prompt, each.token_ids)])
            assert each.mean_logp == pytest.approx(logps_1T.mean().item(), abs=1e-4)


def test_a_context_too_short_is_told_at_once(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    with pytest.raises(UserError, match="context of 256: lower max_new_tokens"):
        HfGenerator(policy, 4, no_check).generate(PROMPTS, 1, 251, greedy=False, seeds=[0, 1, 2])


@given(ids=st.lists(st.integers(0, 9), min_size=1), eos=st.frozensets(st.integers(0, 9)))
def test_a_completion_is_cut_at_its_first_ending_id(ids: list[int], eos: frozenset[int]) -> None:
    completion = cut_at_end(ids, [-float(index) for index in range(len(ids))], eos)
    assert completion.mean_logp == pytest.approx(-(len(completion.token_ids) - 1) / 2)
    kept = list(completion.token_ids)
    assert kept == ids[: len(kept)]
    assert not eos.intersection(kept[:-1])
    if completion.finish_reason is FinishReason.STOP:
        assert kept[-1] in eos
    else:
        assert kept == ids and not eos.intersection(ids)
