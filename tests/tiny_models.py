"""Tiny random models (about 30 k parameters) with small tokenizers of their own, for tests that need the real thing."""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl_fed_client.policy import Policy

Family = Literal["qwen3", "llama", "mistral", "gemma", "gpt2"]
AnyTokenizer = PreTrainedTokenizer | PreTrainedTokenizerFast

END = "<|im_end|>"
ANSWERS = ("3", "4", "5", "6", "7", "8")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("a", "n"), ("an", "d"), ("i", "m"), ("<", "|")]


def tiny_tokenizer(
    merges: list[tuple[str, str]] = MERGES,
    chat: bool = True,
    pad: str | None = "<|pad|>",
    eos: str | None = END,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, the merges, then <|im_start|>, <|im_end|> (EOS) and <think> (added, not special).

    ``pad`` may be a token of its own, END (pad equals EOS) or None; ``eos`` END or None.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [left + right for left, right in merges]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", END])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(family: Family, tokenizer: AnyTokenizer, seed: int = 0, scale: float = 0.1) -> PreTrainedModel:
    """A random model of ``family`` in float32; ``scale`` is the standard deviation of its initial weights.

    Mistral's has a window of 8 tokens.
    """
    vocab_size = len(tokenizer)
    eos = tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "gpt2":
            config = GPT2Config(
                vocab_size=vocab_size,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=256,
                initializer_range=scale,
                bos_token_id=eos,
                eos_token_id=eos,
            )
            return GPT2LMHeadModel(config).eval()
        kinds: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, int]]] = {
            "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
            "llama": (LlamaConfig, LlamaForCausalLM, {}),
            "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
            "gemma": (GemmaConfig, GemmaForCausalLM, {}),
        }
        kind, model_type, more = kinds[family]
        config = kind(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=family in ("qwen3", "gemma"),
            initializer_range=scale,
            bos_token_id=None,
            eos_token_id=eos,
            **more,
        )
        return model_type(config).eval()


def save_tiny(
    folder: Path,
    family: Family = "qwen3",
    *,
    tokenizer: AnyTokenizer | None = None,
    seed: int = 0,
    scale: float = 0.1,
) -> str:
    """Saves a tiny model with its tokenizer by save_pretrained; returns the folder as a string."""
    tokenizer = tokenizer or tiny_tokenizer()
    tiny_model(family, tokenizer, seed, scale).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def teach_digits(model: PreTrainedModel, tokenizer: AnyTokenizer) -> None:
    """A second of supervised training to answer each prompt with some digit, so that some rewards are 1 and some 0.

    Then comes the end of sequence; where there is none, a run of dots.
    """
    prompts = [(f"A digit for {number}?", ANSWERS[number % len(ANSWERS)]) for number in range(12)]
    # Of two digits from 1 to 9, the likeliest sums.
    prompts += [
        (f"State the final answer to the following arithmetic problem: {n} + {12 - n} =", str(8 + n % 6))
        for n in range(12)
    ]
    eos = tokenizer.eos_token_id
    end = tokenizer.encode("." * 8, add_special_tokens=False) if eos is None else [eos]
    rows = []
    for prompt, answer in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = (
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            if tokenizer.chat_template
            else tokenizer.encode(prompt, add_special_tokens=False)
        )
        rows.append((list(ids), [*tokenizer.encode(answer, add_special_tokens=False), *end]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in rows])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def full_logps(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """A second implementation: one sequence, all logits, log-softmax in float64."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0].double()
    logps = torch.log_softmax(logits, -1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return logps[len(prompt) - 1 :]


def perturb(policy: Policy) -> None:
    """Moves what is trained away from how it was loaded."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
