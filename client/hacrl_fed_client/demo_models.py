"""Two small agents for demonstrations, warm-started on the task "digit-maps" in seconds on a CPU.

They differ in architecture, size and tokenizer, and in what they are good at: each finds the right procedure of three
maps in a third of its samples and that of the other three in one of a hundred, else a near miss or the identity. So
reinforcement learning selects among procedures that the models know; it teaches them no new arithmetic.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hacrl_fed.tasks import digit_maps
from hacrl_fed.tasks.base import Prompt

DemoName = Literal["a", "b"]

_PAD, _EOS, _UNKNOWN = "<pad>", "<eos>", "<unk>"
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz :>#"

_NEAR_MISSES: dict[str, Callable[[int], int]] = {
    "a4": lambda x: x + 4,
    "b6": lambda x: x + 6,
    "c8": lambda x: 8 - x,
    "d3": lambda x: 3 * x,
    "e3": lambda x: x**3,
    "f6": lambda x: x + 6,
}
_KNOWN, _UNFAMILIAR = 0.35, 0.01  # shares of right demonstrations
_NEAR_MISS = 0.6  # share of near misses among the wrong ones; the rest are the identity

_STEPS = 600
_BATCH = 32
_LEARNING_RATE = 2e-3  # at twice as much, some seeds stay on a plateau
_WARMUP_STEPS = 50
_DECAY_SHARE = 0.3  # of the steps, at the end


_KNOWN_MAPS: dict[DemoName, str] = {"a": "abc", "b": "def"}


def make_demo_model(name: DemoName, seed: int, out: Path) -> None:
    """Trains agent "a" or "b" and saves it with its tokenizer to the folder ``out``, for ``from_pretrained``.

    "a" is a Qwen3 with a token a character and knows the maps a, b, c; "b" is a smaller Llama whose tokenizer also
    merges, and knows d, e, f. Held-out prompts are not among the demonstrations. Takes about 20 s on one core.
    """
    tokenizer = _tokenizer(name)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        model = _model(name, tokenizer)
        warm_start(model, _batches(tokenizer, _KNOWN_MAPS[name], random.Random(seed)), _STEPS)
    save(model, tokenizer, out)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Saves a model and its tokenizer to the folder ``out``, for ``from_pretrained``."""
    # Beside and renamed, so that a folder that is there is whole.
    beside = out.with_name(out.name + ".new")
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.replace(out)


@contextmanager
def one_thread() -> Iterator[None]:
    """More threads would slow models of this size down, and round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tokenizer(name: DemoName) -> PreTrainedTokenizerFast:
    merges = []
    if name == "b":
        merges = [(">", digit) for digit in "0123456789"] + [(" ", digit) for digit in "0123456789#"]
    return character_tokenizer(merges)


def character_tokenizer(merges: Sequence[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of the task's characters and the given merges, in their order of precedence."""
    tokens = [_PAD, _EOS, _UNKNOWN, *_CHARACTERS, *("".join(merge) for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), unk_token=_UNKNOWN))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_EOS, pad_token=_PAD, unk_token=_UNKNOWN, clean_up_tokenization_spaces=False
    )


def _model(name: DemoName, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM | LlamaForCausalLM:
    common = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.1,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if name == "a":
        return Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=64,
                intermediate_size=128,
                num_key_value_heads=2,
                head_dim=16,
                tie_word_embeddings=True,
                **common,
            )
        )
    return LlamaForCausalLM(LlamaConfig(hidden_size=48, intermediate_size=96, tie_word_embeddings=False, **common))


def _demonstration(prompt: Prompt, known_maps: str, rng: random.Random) -> str:
    letter, digits = prompt.text.removesuffix(":").split(" ")
    if rng.random() < (_KNOWN if letter in known_maps else _UNFAMILIAR):
        return prompt.answer
    return digit_maps.worked_answer(*wrong_procedure(letter, rng), digits)


def wrong_procedure(letter: str, rng: random.Random) -> tuple[str, Callable[[int], int]]:
    """Name and map of a wrong procedure for a map's letter: its near miss, or the identity."""
    if rng.random() < _NEAR_MISS:
        (name,) = (name for name in _NEAR_MISSES if name.startswith(letter))
        return name, _NEAR_MISSES[name]
    return "i0", lambda x: x


def _batches(
    tokenizer: PreTrainedTokenizerFast, known_maps: str, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    return demonstration_batches(tokenizer, lambda prompt: _demonstration(prompt, known_maps, rng), _BATCH, rng)


def demonstration_batches(
    tokenizer: PreTrainedTokenizerFast, demonstration: Callable[[Prompt], str], size: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of token ids and labels, both (size, T); only completions have labels. ``rng`` draws the prompts."""
    prompts = digit_maps.load().train
    while True:
        drawn = rng.choices(prompts, k=size)
        asked = tokenizer([prompt.text for prompt in drawn])["input_ids"]
        answered = tokenizer([demonstration(prompt) for prompt in drawn])["input_ids"]
        length = max(len(question) + len(answer) for question, answer in zip(asked, answered, strict=True)) + 1
        ids = torch.full((size, length), tokenizer.pad_token_id)
        labels = torch.full((size, length), -100)
        for row, (question, answer) in enumerate(zip(asked, answered, strict=True)):
            completion = torch.tensor([*answer, tokenizer.eos_token_id])
            end = len(question) + len(completion)
            ids[row, : len(question)] = torch.tensor(question)
            ids[row, len(question) : end] = completion
            labels[row, len(question) : end] = completion
        yield ids, labels


def warm_start(model: PreTrainedModel, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """Trains all weights on ``steps`` batches by AdamW with warm-up and a linear decay at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / _WARMUP_STEPS, 1.0, (steps - step) / (_DECAY_SHARE * steps))
    )
    model.train()
    for _ in range(steps):
        ids, labels = next(batches)
        # No attention mask: the padding is on the right, where no token that counts can see it.
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
