"""The same seed gives the same rollouts, bytes and weights, and how the work is cut does not matter."""

import pytest
import torch

from hacrl_fed.algorithms.hacpo import CapabilityTracker
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig, Lora, Optimizer, RunConfig, SiteConfig
from hacrl_fed.protocol import convert
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.verifiers.exact import ExactVerifier
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.generation.sampling import derive_seed
from hacrl_fed_client.learning import training_rollouts
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.rollout import RolloutMaker
from hacrl_fed_client.update import Updater
from tiny_models import ANSWERS, save_tiny, teach_digits, tiny_model, tiny_tokenizer

torch.set_num_threads(1)
PROMPTS = [Prompt(f"A digit for {number}?", ANSWERS[number % 2]) for number in range(4)]
STEPS = 3
# What the texts, but not the log-probs, are the same in.
Texts = list[tuple[str, int, str, tuple[int, ...], float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that answers with some digit."""
    path, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    save_tiny(path, tokenizer=tokenizer)
    model = tiny_model("qwen3", tokenizer)
    teach_digits(model, tokenizer)
    model.save_pretrained(path)
    return str(path)


def trained(folder: str, **settings: object) -> tuple[list[bytes], Texts, dict[str, torch.Tensor]]:
    """A few steps of an agent on its own: what it would have sent, the same without log-probs, and its weights."""
    site = SiteConfig.model_validate({"threads": 1, "optimizer": Optimizer(lr=3e-3, warmup_steps=1)} | settings)
    run = RunConfig(task="digits", steps=STEPS, group_size=6, max_new_tokens=5)
    algorithm = AlgorithmConfig(method="gspo", prompts_per_mini_batch=2)
    policy = Policy.load(folder, site, run.seed, with_reference=True)
    generator = HfGenerator(policy, site.generation_rows, lambda: None)
    updater = Updater(policy, "me", algorithm, site.optimizer)
    tracker = CapabilityTracker(algorithm.hacpo.window)
    prompt_ids = {prompt.id: tuple(policy.render_prompt(prompt.text)) for prompt in PROMPTS}
    bodies, texts = [], []
    with VerifierPool(ExactVerifier("last_number"), 1.0, 1) as verifiers:
        maker = RolloutMaker("me", run, site, METHODS["gspo"], policy, generator, verifiers, check=lambda: None)
        for step in range(STEPS):
            seed = derive_seed(run.seed, "me", str(step))
            rollouts = [each for groups in maker.make(PROMPTS, prompt_ids, seed) for group in groups for each in group]
            bodies.append(convert.rollouts_to_body([each.rollout for each in rollouts]))
            found = [each.rollout for each in rollouts]
            texts += [(each.prompt_id, each.sample_index, each.text, each.token_ids, each.reward) for each in found]
            _, rows, _ = training_rollouts(rollouts, prompt_ids, "me", tracker, algorithm, seed)
            updater.step(rows, lambda: None)
    return bodies, texts, policy.trainable_state()


def test_the_same_seed_gives_the_same_bytes_and_weights(folder: str) -> None:
    lora = Lora(r=4, dropout=0.2)
    results = []
    for _ in range(2):
        torch.manual_seed(7)  # of the dropout; checkpoints hold its state
        results.append(trained(folder, lora=lora))
    (bodies, _, weights), (other_bodies, _, other_weights) = results
    assert bodies == other_bodies and len(set(bodies)) == STEPS
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_micro_batches_and_rows_change_neither_completions_nor_weights(folder: str, lora: Lora | None) -> None:
    _, texts, weights = trained(folder, lora=lora)
    start = Policy.load(folder, SiteConfig(lora=lora), 0, with_reference=False).trainable_state()
    moved = max(float((weights[name] - start[name]).abs().max()) for name in weights)
    assert moved > 1e-3 and len({reward for *_, reward in texts}) == 2
    for tokens, rows in ((1, 3), (100, 9), (300, 24)):
        _, other_texts, other_weights = trained(folder, lora=lora, micro_batch_tokens=tokens, generation_rows=rows)
        assert other_texts == texts
        for name in weights:
            torch.testing.assert_close(other_weights[name], weights[name], atol=1e-5, rtol=0)
