"""Log-probs and their gradients, however a model can be called, and what is never in memory for them."""

import itertools
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from hacrl_fed.config import Lora, SiteConfig
from hacrl_fed_client import batching, head, logps, recompute
from hacrl_fed_client.logps import Ways
from hacrl_fed_client.policy import Policy
from tiny_models import full_logps, perturb, tiny_tokenizer

torch.set_num_threads(1)

# Groups of unlike size, prompts and completions of unlike length, down to a token; the longest of the shortest prompt.
GROUPS = [
    ([5, 6, 7, 8, 9, 3, 1, 2], [8, 9]),
    ([1], [2]),
    ([5, 6, 7, 8, 9, 3, 1, 2], [4]),
    ([3, 4, 5, 6, 7], [9, 10, 11, 12]),
    ([1], [6, 5, 4, 3, 2, 1, 0]),
    ([5, 6, 7, 8, 9, 3, 1, 2], [7, 7, 7]),
    ([3, 4, 5, 6, 7], [1]),
]
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
GPT2_SHAPE = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
LONG_ROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    },
}
# Models with what can be told of them: whether the head can be split off, and prompts shared.
MODELS: dict[str, tuple[PreTrainedConfig, Ways]] = {
    "qwen3": (Qwen3Config(**SHAPE, tie_word_embeddings=True), Ways(True, True)),
    "llama": (LlamaConfig(**SHAPE), Ways(True, True)),
    "gpt2": (GPT2Config(**GPT2_SHAPE, bos_token_id=2, eos_token_id=2), Ways(True, True)),
    "tied, of as many heads": (
        LlamaConfig(**SHAPE | {"num_key_value_heads": 4}, tie_word_embeddings=True),
        Ways(True, True),
    ),
    "scaled embeddings": (GemmaConfig(**SHAPE), Ways(True, True)),
    "position biases": (BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4), Ways(True, True)),
    "head with a bias": (PhiConfig(**SHAPE | {"num_key_value_heads": 4}), Ways(True, True)),
    "scaled logits": (CohereConfig(**SHAPE, logit_scale=0.5), Ways(False, True)),
    "frequencies by length": (Phi3Config(**SHAPE | LONG_ROPE), Ways(True, False)),
    "window": (MistralConfig(**SHAPE, sliding_window=4), Ways(True, False)),
    "window, capped logits": (Gemma2Config(**SHAPE, sliding_window=4), Ways(False, False)),
    "recurrent": (MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4), Ways(True, False)),
}


def policy_of(config: PreTrainedConfig, lora: Lora | None = None, *, checkpointing: bool = False) -> Policy:
    """A policy over a random model; its tokenizer is another's, and not used."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel | PeftModel = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)  # biases, which begin at 0
        if lora is not None:
            targets = list(lora.target_modules)
            settings = {"r": lora.r, "lora_dropout": lora.dropout, "target_modules": targets}
            model = get_peft_model(model, LoraConfig(**settings, task_type="CAUSAL_LM")).eval()
    config = SiteConfig(gradient_checkpointing=checkpointing)
    policy = Policy("tiny", model, tiny_tokenizer(), (2,), None, autocast=False, config=config)
    if lora is not None:
        perturb(policy)
    return policy


def assert_equal_to_one_sequence_at_a_time(policy: Policy, sequences: list[tuple[list[int], list[int]]]) -> None:
    """Log-probs, and gradients of their sum with some weights, against all logits of one sequence at a time."""
    policy._model.zero_grad()
    logps, mask = policy.token_logps(sequences, gradient=True)
    weights = torch.rand(logps.shape, generator=torch.Generator().manual_seed(0))
    (logps * weights).sum().backward()
    parameters = policy.parameters()
    mine = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in parameters]
    policy._model.zero_grad()
    for row, weight, keep, sequence in zip(logps, weights, mask, sequences, strict=True):
        assert not row[~keep].any()
        expected = full_logps(policy._model, *sequence)
        torch.testing.assert_close(row[keep].double(), expected, atol=1e-5, rtol=0)
        (expected * weight[keep]).sum().backward()
    for gradient, parameter in zip(mine, parameters, strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)
    assert max(gradient.abs().max() for gradient in mine) > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_the_models_own_in_every_way_it_can_be_called(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, ways = MODELS[name]
    policy = policy_of(config)
    assert_equal_to_one_sequence_at_a_time(policy, GROUPS)
    assert policy._ways == ways
    assert_equal_to_one_sequence_at_a_time(policy, [([1], [2])])
    assert_equal_to_one_sequence_at_a_time(policy, [([1, 2, 3], [each]) for each in range(4)])
    said = [message for message in caplog.messages if message.startswith("tiny: ")]
    assert len(said) == (not ways.splits_head) + (not ways.shares_prompts)
    if ways.shares_prompts:
        # Each saving alone.
        policy._ways = Ways(False, True)
        assert_equal_to_one_sequence_at_a_time(policy, GROUPS)
        policy._ways = Ways(False, False)
        assert_equal_to_one_sequence_at_a_time(policy, GROUPS)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *itertools.product(("qwen3", "llama"), [("q_proj", "up_proj"), ("q_proj", "lm_head")]),
        *itertools.product(("scaled embeddings", "window", "window, capped logits"), [("q_proj", "up_proj")]),
        ("gpt2", ("c_attn", "c_fc")),
    ],
)
def test_log_probs_and_gradients_of_an_adapter(name: str, targets: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr(head, "CHUNK", 3)
    policy = policy_of(MODELS[name][0], Lora(r=4, target_modules=targets))
    assert_equal_to_one_sequence_at_a_time(policy, GROUPS)
    assert policy._ways == MODELS[name][1]


class Saved:
    """Bytes that are held for the backward pass outside of layers that are computed anew, and calls of the layers' parts."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.bytes = 0
        self.calls = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return tensor

    def gradients(self) -> list[torch.Tensor]:
        def count(*_: object) -> None:
            self.calls += 1

        parts = [part for layer in recompute.layers(self.policy._model) for part in list(layer.children())[:1]]
        hooks = [part.register_forward_hook(count) for part in parts]
        self.policy._model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(self.see, lambda tensor: tensor):
            logps, _ = self.policy.token_logps(GROUPS, gradient=True)
        torch.autograd.backward(logps.mean())
        for hook in hooks:
            hook.remove()
        return [parameter.grad for parameter in self.policy.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "frequencies by length"])
def test_checkpointed_layers_give_the_same_gradients_and_are_computed_anew(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, ways = MODELS[name]
    policy = policy_of(config, checkpointing=True)
    assert_equal_to_one_sequence_at_a_time(policy, GROUPS)
    assert policy._ways == Ways(ways.splits_head, False)
    assert caplog.text.count("gradient_checkpointing keeps no keys and values") == ways.shares_prompts
    plain = policy_of(config)
    plain._ways = policy._ways
    held, anew = Saved(plain), Saved(policy)
    torch.testing.assert_close(anew.gradients(), held.gradients(), atol=1e-6, rtol=1e-5)
    layers = len(recompute.layers(policy._model))
    assert layers and (held.calls, anew.calls) == (layers, 2 * layers)
    assert anew.bytes < held.bytes / 2
    # Nothing is computed anew without gradient, nor left behind.
    assert not any("forward" in vars(layer) for layer in recompute.layers(policy._model))
    torch.testing.assert_close(policy.token_logps(GROUPS), plain.token_logps(GROUPS), atol=0, rtol=0)


def test_a_checkpointed_adapter_drops_out_the_same_units_when_it_is_computed_anew() -> None:
    found = []
    for checkpointing in (False, True):
        lora = Lora(r=4, dropout=0.5, target_modules=("q_proj", "down_proj"))
        policy = policy_of(MODELS["llama"][0], lora, checkpointing=checkpointing)
        policy._ways = Ways(True, False)
        torch.manual_seed(3)
        found.append(Saved(policy).gradients())
        assert any(gradient.abs().max() > 1e-3 for gradient in found[-1])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def test_a_model_whose_forward_cannot_drop_logits_is_scored_alike() -> None:
    policy = policy_of(MODELS["scaled logits"][0])
    expected, _ = policy.token_logps(GROUPS)
    model: Any = policy._model
    forward = type(model).forward
    model.forward = lambda **inputs: forward(model, **inputs)
    policy._ways = Ways(False, False)
    torch.testing.assert_close(policy.token_logps(GROUPS)[0], expected)


def test_the_padding_stays_within_the_context() -> None:
    policy = policy_of(MODELS["gpt2"][0])
    long, short = list(range(2, 40)) * 2, [5, 6]
    full = [(long[:60], [7, 8, 9, 10]), (long[:60], [3]), (long[:60], [5, 4])]
    assert_equal_to_one_sequence_at_a_time(policy, [*full, (short, long[:30]), (short, long[1:29])])


def tokens_forwarded(policy: Policy, sequences: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """All ids that reach the model, call by call."""
    policy.token_logps(sequences)  # the probe of the first call is not counted
    seen: list[list[int]] = []
    embeddings = policy._model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].flatten().tolist()))
    policy.token_logps(sequences)
    hook.remove()
    return seen


def test_a_distinct_prompt_is_forwarded_once_where_that_is_less() -> None:
    policy = policy_of(MODELS["llama"][0])
    prompt, other = list(range(20, 28)), list(range(30, 38))
    shared = [(prompt, [1, 2]), (other, [3]), (prompt, [4, 5, 6]), (other, [7, 8, 9, 10]), (prompt, [11])]
    prompts, completions = tokens_forwarded(policy, shared)
    assert sorted(prompts) == prompt + other
    # The last token of a completion predicts nothing; 0 pads.
    assert sorted(completions) == [0, 0, 0, 1, 4, 5, 7, 8, 9]
    shapes = [logps.shape(sequence) for sequence in shared]
    assert len(prompts + completions) == batching.shared_slots(shapes) < batching.plain_slots(shapes)
    # Completions of a token need no more than their prompts.
    assert tokens_forwarded(policy, [(prompt, [1]), (prompt, [2])]) == [prompt]
    # Nothing to share, or too little: the short prompt would be padded to the long one's length.
    assert len(tokens_forwarded(policy, [(prompt, [1, 2, 3]), (other, [1, 2, 3])])) == 1
    assert len(tokens_forwarded(policy, [([1], [1, 2, 3]), ([1], [2, 2, 3]), (prompt[:4], [1])])) == 1
    # Completions of unlike length do not pad each other.
    long = list(range(40)) + list(range(9))
    assert [len(call) for call in tokens_forwarded(policy, [(prompt, long), (prompt, [1, 2, 3]), (prompt, [1])])] == [
        8,
        48,
        2,
    ]


class LogitsSeen(TorchDispatchMode):
    """Records of how many tokens any operation, of either pass, gave something over the whole vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.tokens = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        # The head's weights, transposed, are no logits.
        if tensor.shape[-1:] == (self.vocab_size,) and tensor.shape != (self.hidden_size, self.vocab_size):
            self.tokens = max(self.tokens, tensor.shape[:-1].numel())
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self.see, func(*args, **(kwargs or {})))


@pytest.mark.parametrize("targets", [None, ("q_proj",), ("lm_head",)])
def test_logits_of_more_than_a_chunk_are_never_in_memory(targets: tuple[str, ...] | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(head, "CHUNK", 5)
    config = LlamaConfig(**SHAPE | {"vocab_size": 41})
    policy = policy_of(config, Lora(r=4, target_modules=targets) if targets else None)
    policy.token_logps(GROUPS)  # the probe of the first call is not counted
    saved = LogitsSeen(41, 32)
    with LogitsSeen(41, 32) as made:
        with torch.autograd.graph.saved_tensors_hooks(saved.see, lambda tensor: tensor):
            logps, mask = policy.token_logps(GROUPS, gradient=True)
        assert made.tokens == 5 < mask.sum()
        assert saved.tokens == 0
        logps.sum().backward()
    assert made.tokens == 5


@pytest.mark.parametrize("bias", [True, False])
def test_the_heads_gradient_is_that_of_finite_differences(bias: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(head, "CHUNK", 2)
    linear = torch.nn.Linear(3, 4, bias=bias, dtype=torch.float64)
    parameters = list(linear.parameters())
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 3, 1, 2])
    assert torch.autograd.gradcheck(lambda *_: head.head_logps(linear, hidden, targets), (hidden, *parameters))
    linear.requires_grad_(False)
    assert torch.autograd.gradcheck(lambda hidden: head.head_logps(linear, hidden, targets), (hidden,))
    head.head_logps(linear, hidden, targets).sum().backward()
    assert linear.weight.grad is None
    linear.requires_grad_(True)
    head.head_logps(linear, hidden.detach(), targets).sum().backward()
    assert linear.weight.grad is not None


def test_the_head_computes_in_bfloat16_where_autocast_says_so_and_its_softmax_in_float32(monkeypatch: Any) -> None:
    monkeypatch.setattr(head, "CHUNK", 8)
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(32, 50)
    hidden, targets = torch.randn(20, 32, generator=generator), torch.randint(0, 50, (20,), generator=generator)
    found = []
    for way in (head.head_logps, lambda *inputs: head.logits_logps(linear(inputs[1]), inputs[2])):
        inputs = hidden.clone().requires_grad_()
        linear.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logps = way(linear, inputs, targets)
        logps.sum().backward()
        assert logps.dtype == torch.float32 and linear.weight.grad is not None and inputs.grad is not None
        found.append((logps.detach(), inputs.grad, linear.weight.grad.clone()))
    # The chunks' products are in bfloat16 in the backward pass too; the weights' gradient sums them in float32.
    assert torch.equal(found[0][1], found[0][1].bfloat16().float())
    assert not torch.equal(found[0][2], found[0][2].bfloat16().float())
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[0][1:], found[1][1:], atol=0.02, rtol=0.02)
    assert not torch.equal(found[0][0], head.head_logps(linear, hidden, targets))
