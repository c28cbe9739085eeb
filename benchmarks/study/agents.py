"""Agents of the study: tiny random models of several architectures, warm-started on demonstrations of digit maps.

A demonstration of a map is right with the agent's probability for it, else by a near miss or the identity. So
reinforcement learning selects among procedures that the models know; it teaches them no new arithmetic.
"""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl_fed.tasks import digit_maps
from hacrl_fed.tasks.base import Prompt
from hacrl_fed_client import demo_models
from study.regimes import MAPS, AgentSpec
from study.tasks import foreign_form

# A model leaves its first plateau after so many updates, whatever their size; half the demonstration's batch is enough.
_BATCH = 16


def make_agent(spec: AgentSpec, seed: int, out: Path) -> None:
    """Trains the agent and saves it with its tokenizer to the folder ``out``, for ``from_pretrained``."""
    tokenizer = demo_models.character_tokenizer(spec.merges)
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]), demo_models.one_thread():
        torch.manual_seed(seed)
        model = _model(spec, tokenizer)
        batches = demo_models.demonstration_batches(
            tokenizer, lambda prompt: _demonstration(prompt, spec, rng), _BATCH, rng
        )
        demo_models.warm_start(model, batches, spec.warm_start_steps)
    demo_models.save(model, tokenizer, out)


def _demonstration(prompt: Prompt, spec: AgentSpec, rng: random.Random) -> str:
    letter, digits = prompt.text.removesuffix(":").split(" ")
    answer = prompt.answer
    if rng.random() >= spec.right[MAPS.index(letter)]:
        answer = digit_maps.worked_answer(*demo_models.wrong_procedure(letter, rng), digits)
    return foreign_form(answer) if spec.answers_in_foreign_form else answer


def _model(spec: AgentSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.1,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    width = spec.intermediate_size
    if spec.architecture == "gpt2":
        dropout_off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(n_inner=width, **dropout_off, **common))
    if spec.architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(intermediate_size=width, tie_word_embeddings=False, **common))
    grouped: dict[str, Any] = {"intermediate_size": width, "num_key_value_heads": 2, "tie_word_embeddings": True}
    if spec.architecture == "mistral":
        return MistralForCausalLM(MistralConfig(sliding_window=None, **grouped, **common))
    return Qwen3ForCausalLM(Qwen3Config(head_dim=spec.hidden_size // 4, **grouped, **common))
