"""Loading a causal language model and its tokenizer from a folder or a hub id, with a clear sentence where it fails."""

import logging
import socket
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import jinja2
import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
)

from hacrl_fed.errors import UserError
from hacrl_fed_client.retokenize import AnyTokenizer

_log = logging.getLogger(__name__)

_HUB_S = 10.0
# What the code of a template may raise beside jinja2's own.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# What transformers raises for a folder that is missing, incomplete, damaged or of an unknown architecture.
_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, AttributeError, SafetensorError)


def load_tokenizer(name: str) -> AnyTokenizer:
    """Raises UserError where the tokenizer does not load or is missing, or is none of transformers' own kinds."""
    _check_exists(name)
    try:
        tokenizer: object = AutoTokenizer.from_pretrained(name)  # annotated without mistral-common's
    except _LOAD_ERRORS as error:
        raise UserError(f"the tokenizer of {name} does not load: {_one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast | PreTrainedTokenizer):
        # mistral-common's: it has neither a table of added tokens nor a chat template that can be asked for.
        raise UserError(
            f"the tokenizer of {name} ({type(tokenizer).__name__}) cannot be used: save it with a tokenizer.json beside it"
        )
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        # For a folder without tokenizer files transformers makes up an empty one.
        raise UserError(f"{name} holds no tokenizer: save the model's own beside it")
    return tokenizer


def set_chat_template(tokenizer: AnyTokenizer, path: Path) -> None:
    """Takes the chat template of a file in place of the tokenizer's own. Raises UserError where it cannot be read."""
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the chat template {path} cannot be read: {_one_line(error)}") from error


def is_quantised(config: PreTrainedConfig) -> bool:
    """Whether a model's weights are quantised, and so can only be trained by an adapter on top of them."""
    return getattr(config, "quantization_config", None) is not None


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in ``dtype``, in eval mode. Raises UserError where it does not load or lacks weights."""
    _check_exists(name)
    placement = {}
    try:
        if is_quantised(AutoConfig.from_pretrained(name)):
            placement["device_map"] = device  # some quantised weights cannot be moved once they are loaded
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True, **placement)
    except _LOAD_ERRORS as error:
        remedy = "; it is quantised: mend that, or name the original model" if placement else ""
        raise UserError(f"the model {name} does not load: {_one_line(error)}{remedy}") from error
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if report["missing_keys"]:
        # transformers only logs this, and trains on from random weights.
        missing = sorted(report["missing_keys"])
        raise UserError(f"the model {name} lacks {len(missing)} weights, {missing[0]} first: download it again")
    model.eval()
    if not placement:
        torch.nn.Module.to(model, device)
    return model


def take_eos_ids(name: str, model: PreTrainedModel, tokenizer: AnyTokenizer) -> tuple[int, ...]:
    """Ids that end a completion: the end of turn, then the others, ascending; none where none is named, with a warning.

    They are the union of those of the tokenizer, of the model's configuration and of its generation configuration. The
    end of turn is the one of them that the chat template puts after an assistant's answer, else the tokenizer's own. The
    generation configuration is then replaced by one that holds nothing else: its sampling settings must never reach a
    rollout.
    """
    generation_config = model.generation_config
    candidates = [tokenizer.eos_token_id, model.config.get_text_config().eos_token_id]
    if generation_config is not None:
        candidates.append(generation_config.eos_token_id)
    embeddings: Any = model.get_input_embeddings()
    rows: int = embeddings.num_embeddings
    ids: list[int] = []
    for candidate in candidates:
        found = [candidate] if isinstance(candidate, int) else sorted(candidate or ())
        # A configuration class has defaults, which may lie beyond this vocabulary.
        known = [token_id for token_id in found if token_id < rows]
        ids.extend(token_id for token_id in known if token_id not in ids)
    if not ids:
        _log.warning(
            "the model %s names no end-of-sequence token, so its completions can only end at max_new_tokens: if it has one, "
            "set eos_token in its tokenizer_config.json or eos_token_id in its generation_config.json",
            name,
        )
        model.generation_config = GenerationConfig()
        return ()
    end_of_turn = _end_of_turn(tokenizer, ids)
    model.generation_config = GenerationConfig(eos_token_id=ids, pad_token_id=end_of_turn)
    return (end_of_turn, *sorted(token_id for token_id in ids if token_id != end_of_turn))


def render_chat(tokenizer: AnyTokenizer, chat: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
    """Ids of a conversation by the tokenizer's chat template. Raises UserError where the template refuses it."""
    try:
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=add_generation_prompt, return_dict=False))
    except _TEMPLATE_ERRORS as error:
        raise UserError(f"the chat template of {tokenizer.name_or_path} fails: {_one_line(error)}") from error


def _end_of_turn(tokenizer: AnyTokenizer, eos_ids: list[int]) -> int:
    if tokenizer.chat_template is not None:
        question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
        asked = render_chat(tokenizer, [question], add_generation_prompt=False)
        try:
            answered = render_chat(tokenizer, [question, answer], add_generation_prompt=False)
        except UserError:  # a template for questions only
            return eos_ids[0]
        for token_id in answered[len(asked) :]:
            if token_id in eos_ids:
                return token_id
    return eos_ids[0]


def _check_exists(name: str) -> None:
    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(f"{name} is a file: name the model's folder")
    # A hub id is "name" or "owner/name"; whatever else is missing can only have been meant as a path.
    meant_as_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and path.parent.is_dir())
    if not path.exists():
        if meant_as_path:
            raise UserError(f"there is no model folder {name}")
        _check_hub(name)
    if path.is_dir() and (path / "adapter_config.json").is_file():
        raise UserError(f"{name} holds an adapter only: merge it into its model first (merge_and_unload of peft)")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{name} is no model folder: it holds no config.json")


def _check_hub(name: str) -> None:
    """Raises UserError where the hub has to be asked for a model and cannot be: its library would try for a minute."""
    cached = try_to_load_from_cache(name, "config.json") is not None
    if cached or constants.HF_HUB_OFFLINE or getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), _HUB_S).close()
    except OSError as error:
        raise UserError(
            f"there is no model folder {name} here, and the model hub {hub.hostname} cannot be reached"
            f" ({error.strerror or error})"
        ) from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
