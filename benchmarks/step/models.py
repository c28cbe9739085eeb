"""Random models from configuration, with tokenizers of as many tokens, as folders that from_pretrained loads."""

from collections.abc import Iterator
from itertools import count, islice, product
from multiprocessing.connection import Connection
from pathlib import Path
from string import ascii_lowercase, digits

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from step.workloads import ModelSize, Workload

PAD = "<pad>"
END = "<end>"


def serve(
    connection: Connection,
    size: ModelSize,
    workload: Workload,
    folder: Path,
    device: str,
    dtype: str,
    letters: str = ascii_lowercase,
) -> None:
    """Writes a model and says so. See ``save_model``."""
    save_model(size, workload, folder, device, dtype, letters)
    connection.send(True)


def save_model(size: ModelSize, workload: Workload, folder: Path, device: str, dtype: str, letters: str) -> None:
    """Writes a random model whose completions have the workload's lengths, and its tokenizer.

    The weights are those of transformers' own initialisation, made on ``device`` and saved as ``dtype``. Another order of
    ``letters`` gives another tokenizer, and other weights.
    """
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(ascii_lowercase.index(letters[0]))
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.feed_forward,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    ends = round(workload.end_probability * size.vocabulary)
    GenerationConfig(eos_token_id=list(range(ends)) or None, pad_token_id=0).save_pretrained(folder)
    tokenizer(size.vocabulary, letters).save_pretrained(folder)


def tokenizer(vocabulary: int, letters: str) -> PreTrainedTokenizerFast:
    """BPE of ``vocabulary`` ids: padding, characters, and merges of letters into pairs, triples and so on.

    Its end token has the id after them, for which the model has no row: it is never sampled, and a workload's other ending
    ids are ordinary ones of the generation configuration.
    """
    tokens = [PAD, *letters, *digits]
    merges = list(islice(_merges(letters), vocabulary - len(tokens)))
    tokens += ["".join(merge) for merge in merges]
    assert len(tokens) == vocabulary
    vocab = {token: index for index, token in enumerate([*tokens, END])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def _merges(letters: str) -> Iterator[tuple[str, str]]:
    """Pairs that merge, without end, shortest first: each is a run of letters that is a token by then, and a letter."""
    for length in count(1):
        for left in product(letters, repeat=length):
            for letter in letters:
                yield "".join(left), letter
