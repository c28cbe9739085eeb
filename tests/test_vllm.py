"""Generation with vLLM, for real where it is installed (make test-vllm): the same policy, its newest weights, its seeds."""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig, Qwen3Config

from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import RunConfig, SiteConfig
from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed.records import FinishReason
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.verifiers.exact import ExactVerifier
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.generation.backends import build_generator
from hacrl_fed_client.generation.base import Completion, Generator
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.generation.sampling import derive_seed
from hacrl_fed_client.generation.vllm import VllmGenerator
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.rollout import RolloutMaker
from tiny_models import save_tiny, tiny_tokenizer

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6, 7]]
ENDING = 30  # ids below it end a completion
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here: make test-vllm")


def no_check() -> None:
    """Interrupts nothing."""


def save(folder: Path, kind: str) -> str:
    """A random model, far from uniform, of a head size that vLLM's kernels take."""
    tokenizer = tiny_tokenizer()
    common: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0}
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.3,
    }  # fmt: skip
    config: Any = {
        "qwen3": lambda: Qwen3Config(**common, **sizes, tie_word_embeddings=True),
        "llama": lambda: LlamaConfig(**common, **sizes, tie_word_embeddings=False),
        "gpt2": lambda: GPT2Config(**common, n_embd=64, n_layer=2, n_head=2, n_positions=256, initializer_range=0.3),
    }[kind]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Settings that would change what is sampled, and must not.
    GenerationConfig(eos_token_id=list(range(ENDING)), do_sample=True, top_k=1, temperature=0.1).save_pretrained(folder)
    return str(folder)


def load(folder: str, **settings: object) -> Policy:
    return Policy.load(folder, SiteConfig.model_validate(settings), seed=0, with_reference=False)


def move(policy: Policy, by: float) -> None:
    """Changes the trained weights, as an update does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)


def generate(
    generator: Generator,
    samples: int = 1,
    new: int = 20,
    *,
    greedy: bool = False,
    seed: int = 0,
    prompts: list[list[int]] = PROMPTS,
) -> list[list[Completion]]:
    seeds = [derive_seed(seed, number) for number in range(len(prompts))]
    return list(generator.generate(prompts, samples, new, greedy=greedy, seeds=seeds))


def ids_of(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def largest_gap(policy: Policy, groups: list[list[Completion]]) -> float:
    """Of the engine's mean log-prob to that of the training pass."""
    rows = [(prompt, completion) for prompt, group in zip(PROMPTS, groups, strict=True) for completion in group]
    sums = policy.score([(prompt, each.token_ids) for prompt, each in rows], no_check)
    gaps = []
    for (_, each), logp_sum in zip(rows, sums, strict=True):
        gaps.append(abs(each.mean_logp - logp_sum / len(each.token_ids)))
    return max(gaps)


@pytest.fixture(scope="module", params=["qwen3", "llama", "gpt2", "lora"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Policy]]:
    """A policy and its engine: a tied head, an untied one, transposed weights, and LoRA on an untied one."""
    kind = request.param
    folder = save(tmp_path_factory.mktemp(kind), "llama" if kind == "lora" else kind)
    policy = load(folder, **({"lora": {"r": 4, "alpha": 8}} if kind == "lora" else {}))
    yield VllmGenerator(policy, 8, 0.1, "float32", no_check), policy


@needs_vllm
def test_the_likeliest_tokens_are_those_of_the_site_s_own_loop_and_follow_the_policy(
    engine: tuple[VllmGenerator, Policy],
) -> None:
    generator, policy = engine
    own = HfGenerator(policy, 8, no_check)
    before = ids_of(generate(generator, greedy=True))
    assert before == ids_of(generate(own, greedy=True))
    move(policy, 0.1)
    after = ids_of(generate(generator, greedy=True))
    assert after == ids_of(generate(own, greedy=True))
    assert after != before


@needs_vllm
def test_the_engine_s_log_probs_are_those_of_the_training_pass(engine: tuple[VllmGenerator, Policy]) -> None:
    generator, policy = engine
    assert largest_gap(policy, generate(generator, 4)) < 1e-5
    move(policy, 0.05)
    assert largest_gap(policy, generate(generator, 4)) < 1e-5


@needs_vllm
def test_a_seed_gives_the_same_completions_whatever_is_generated_beside_them(
    engine: tuple[VllmGenerator, Policy],
) -> None:
    generator, _ = engine
    states = torch.get_rng_state()
    whole = ids_of(generate(generator, 4))
    assert ids_of(generate(generator, 4)) == whole
    assert ids_of(generate(generator, 4, prompts=PROMPTS[:1])) == whole[:1]
    assert ids_of(generate(generator, 2)) == [group[:2] for group in whole]
    assert ids_of(generate(generator, 4, seed=1)) != whole
    # Of one prompt, under two seeds.
    assert whole[0] != whole[3]
    assert torch.equal(torch.get_rng_state(), states)


@needs_vllm
def test_completions_end_at_an_ending_token_or_at_the_limit(engine: tuple[VllmGenerator, Policy]) -> None:
    generator, policy = engine
    completions = [each for group in generate(generator, 8, new=6) for each in group]
    reasons = {each.finish_reason for each in completions}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for each in completions:
        assert not set(each.token_ids[:-1]) & set(policy.eos_ids)
        if each.finish_reason is FinishReason.STOP:
            assert each.token_ids[-1] in policy.eos_ids
        else:
            assert len(each.token_ids) == 6 and each.token_ids[-1] not in policy.eos_ids
    assert len(set(each.token_ids for each in completions[:8])) > 1


@needs_vllm
def test_a_generation_that_is_given_up_leaves_nothing_behind(engine: tuple[VllmGenerator, Policy]) -> None:
    generator, _ = engine
    whole = ids_of(generate(generator, 4))
    begun = generator.generate(PROMPTS, 4, 20, greedy=False, seeds=[0] * len(PROMPTS))
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert ids_of(generate(generator, 4)) == whole


@needs_vllm
def test_completions_that_would_not_fit_the_context_are_refused(engine: tuple[VllmGenerator, Policy]) -> None:
    with pytest.raises(UserError, match="a prompt of 6 tokens and 251 new ones exceed the model's context of 256"):
        generate(engine[0], new=251)


@needs_vllm
def test_what_the_check_raises_ends_the_generation(tmp_path: Path) -> None:
    policy = load(save(tmp_path, "llama"))
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise InterruptedError

    generator = VllmGenerator(policy, 8, 0.1, "float32", check)
    with pytest.raises(InterruptedError):
        generate(generator, 4)
    assert len(generate(generator, 4)) == len(PROMPTS)


@needs_vllm
def test_weights_that_are_not_numbers_are_an_error(tmp_path: Path) -> None:
    policy = load(save(tmp_path, "llama"))
    generator = VllmGenerator(policy, 8, 0.1, "float32", no_check)
    move(policy, float("nan"))
    for greedy in (True, False):
        with pytest.raises(HacrlFedError, match="not finite"):
            generate(generator, greedy=greedy)


@needs_vllm
def test_what_vllm_cannot_run_is_told_with_the_way_out(tmp_path: Path) -> None:
    # Heads of 8, which its kernels for CPUs do not take.
    policy = load(save_tiny(tmp_path / "kernels", "llama"))
    with pytest.raises(UserError, match=r"vLLM cannot run .*head_dim=8.*generation_backend to hf"):
        VllmGenerator(policy, 8, 0.1, "float32", no_check)
    folder = save(tmp_path / "architecture", "llama")
    config = json.loads(Path(folder, "config.json").read_text())
    Path(folder, "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    with pytest.raises(UserError, match=r"vLLM cannot run .*NoSuchForCausalLM.*generation_backend to hf"):
        VllmGenerator(load(folder), 8, 0.1, "float32", no_check)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_without_vllm_it_is_told_how_to_get_it(tmp_path: Path) -> None:
    policy = load(save(tmp_path, "llama"))
    with pytest.raises(UserError, match=r"No module named 'vllm'.*pip install"):
        build_generator(policy, SiteConfig(generation_backend="vllm"), no_check)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_the_weights_handed_over_are_the_policy_with_lora_merged(tmp_path: Path, kind: str) -> None:
    policy = load(save(tmp_path, kind), lora={"r": 4, "alpha": 8})
    move(policy, 0.1)
    sequences = [(prompt, [40, 50, 60]) for prompt in PROMPTS]
    logps = policy.score(sequences, no_check)
    plain = load(policy.name)
    assert plain.score(sequences, no_check) != pytest.approx(logps, abs=1e-2)
    weights = policy.merged_weights()
    plain.load_trainable_state({name: weights[name] for name in plain.trainable_state()})
    assert plain.score(sequences, no_check) == pytest.approx(logps, abs=1e-4)
    # The policy itself still has its adapter.
    assert policy.score(sequences, no_check) == logps


class _Elsewhere:
    """The site's own loop, as an engine that computes mean log-probs by 0.25 nats too low."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        *,
        greedy: bool,
        seeds: Sequence[int],
    ) -> Iterator[list[Completion]]:
        own = HfGenerator(self._policy, 8, no_check)
        groups = own.generate(prompts, samples, max_new_tokens, greedy=greedy, seeds=seeds)
        for prompt, group in zip(prompts, groups, strict=True):
            sums = self._policy.score([(prompt, each.token_ids) for each in group], no_check)
            yield [
                replace(each, mean_logp=logp_sum / len(each.token_ids) - 0.25)
                for each, logp_sum in zip(group, sums, strict=True)
            ]


def test_an_engine_s_log_probs_are_compared_and_never_taken(tmp_path: Path) -> None:
    policy = load(save(tmp_path, "llama"))
    run = RunConfig.model_validate({"task": "t", "steps": 1, "group_size": 4, "max_new_tokens": 6})
    prompts = [Prompt("the 12", "x"), Prompt("and", "y")]
    prompt_ids = {prompt.id: tuple(policy.render_prompt(prompt.text)) for prompt in prompts}

    def rolled_out(generator: Generator) -> tuple[list[float], list[float]]:
        verifiers = VerifierPool(ExactVerifier("whole"), 1.0, 1)
        maker = RolloutMaker("me", run, SiteConfig(), METHODS["hacpo"], policy, generator, verifiers, no_check)
        # The second step's replace the first's.
        for seed in (0, 1):
            groups = [group for batch in maker.make(prompts, prompt_ids, seed) for group in batch]
        return [each.rollout.logp_sum for group in groups for each in group], maker.sampler_gaps

    own_logps, own_gaps = rolled_out(HfGenerator(policy, 8, no_check))
    logps, gaps = rolled_out(_Elsewhere(policy))
    assert own_gaps == pytest.approx([0] * 8, abs=1e-5)
    assert gaps == pytest.approx([0.25] * 8, abs=1e-5)
    assert logps == own_logps
