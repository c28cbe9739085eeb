"""Loading a causal language model and its tokenizer from a folder or a hub id, with a clear sentence where it fails."""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hacrl_fed.errors import UserError

# What transformers raises for a folder that is missing, incomplete, damaged or of an unknown architecture.
_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError, SafetensorError)


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Raises UserError where the tokenizer does not load, is missing, or has no form that the `tokenizers` library runs."""
    _check_exists(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except _LOAD_ERRORS as error:
        raise UserError(f"the tokenizer of {name} does not load: {_one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"the tokenizer of {name} has no fast form: save it with a tokenizer.json beside the model")
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        # For a folder without tokenizer files transformers makes up an empty one.
        raise UserError(f"{name} holds no tokenizer: save the model's own beside it")
    return tokenizer


def load_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model in ``dtype``, in eval mode, on the CPU. Raises UserError where it does not load or lacks weights."""
    _check_exists(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except _LOAD_ERRORS as error:
        raise UserError(f"the model {name} does not load: {_one_line(error)}") from error
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if report["missing_keys"]:
        # transformers only logs this, and trains on from random weights.
        missing = sorted(report["missing_keys"])
        raise UserError(f"the model {name} lacks {len(missing)} weights, {missing[0]} first: download it again")
    model.eval()
    return model


def take_eos_ids(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Ids that end a completion: the end of turn, which is the tokenizer's own, then the others, ascending.

    They are the union of those of the tokenizer, of the model's configuration and of its generation configuration. The
    latter is then replaced by one that holds nothing else: its sampling settings must never reach a rollout. Raises
    UserError where there is none.
    """
    generation_config = model.generation_config
    candidates = [tokenizer.eos_token_id, model.config.get_text_config().eos_token_id]
    if generation_config is not None:
        candidates.append(generation_config.eos_token_id)
    ids: list[int] = []
    for candidate in candidates:
        found = [candidate] if isinstance(candidate, int) else sorted(candidate or ())
        ids.extend(token_id for token_id in found if token_id not in ids)
    if not ids:
        raise UserError(
            f"the model {name} names no end-of-sequence token: set eos_token in its tokenizer_config.json "
            "or eos_token_id in its generation_config.json"
        )
    model.generation_config = GenerationConfig(eos_token_id=ids, pad_token_id=ids[0])
    return (ids[0], *sorted(ids[1:]))


def _check_exists(name: str) -> None:
    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"{name} is a file: name the model's folder")
    # A hub id is "name" or "owner/name"; whatever else is missing can only have been meant as a path.
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"there is no model folder {name}")
    if path.is_dir() and not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        raise UserError(f"{name} is no model folder: it holds no config.json")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
