"""The policy: a causal language model with its tokenizer, how it renders prompts, scores completions and is saved."""

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hacrl_fed.config import Lora, SiteConfig
from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed_client import logps, recompute
from hacrl_fed_client.batching import micro_batches
from hacrl_fed_client.loading import (
    is_quantised,
    load_model,
    load_tokenizer,
    render_chat,
    set_chat_template,
    take_eos_ids,
)
from hacrl_fed_client.logps import PromptAndCompletion
from hacrl_fed_client.retokenize import AnyTokenizer, tokenizer_digest

_log = logging.getLogger(__name__)

T = TypeVar("T")

# A core is as fast with few tokens at once, and holds less.
_CPU_MICRO_BATCH_TOKENS = 2048
_MICRO_BATCH_TOKENS = 16384

NOT_FINITE = (
    "the model gives log-probs that are not finite: its weights are damaged, or training has diverged; go back to an earlier "
    "checkpoint or model with a lower optimizer.lr"
)


class Policy:
    """A model that is trained, whole or by LoRA, and the tokenizer it goes with.

    Dropout of the model itself is always off: GSPO's clip range (3e-4) is narrower than the noise that it makes.
    Dropout of LoRA is on where a gradient is taken.

    Attributes:
        name: the folder or hub id it was loaded from.
        eos_ids: ids that end a completion, the end of turn first; none where the model names none.
        tokenizer_digest: equal for policies that read each other's ids alike.
        context_length: tokens of prompt and completion together, or None where the model has no limit.
        micro_batch_tokens: tokens that are forwarded at once, as the site's settings have it for the policy's device.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel | PeftModel,
        tokenizer: AnyTokenizer,
        eos_ids: tuple[int, ...],
        reference: PreTrainedModel | None,
        autocast: bool,
        config: SiteConfig,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.tokenizer_digest = tokenizer_digest(tokenizer, eos_ids)
        self.device = next(model.parameters()).device
        self._model = model
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._quantised = is_quantised(base.config)
        self._reference = reference
        self._autocast = autocast
        self._gradient_checkpointing = config.gradient_checkpointing
        by_device = _CPU_MICRO_BATCH_TOKENS if self.device.type == "cpu" else _MICRO_BATCH_TOKENS
        self.micro_batch_tokens = config.micro_batch_tokens or by_device
        self.context_length: int | None = getattr(base.config.get_text_config(), "max_position_embeddings", None)

    @classmethod
    def load(cls, name: str, config: SiteConfig, seed: int, *, with_reference: bool) -> Self:
        """Loads a folder or a hub id, and readies it for training.

        ``seed`` is that of LoRA's initial weights. ``with_reference`` keeps what the KL needs: a frozen copy of full
        weights; with LoRA it costs nothing. In bfloat16, full weights stay in float32 and only the arithmetic is
        bfloat16 (small updates would be rounded away); with LoRA the frozen weights are bfloat16 and the adapter
        float32. Quantised weights stay as they are, below the adapter. Raises UserError where the model, its tokenizer, the
        device, the chat template or LoRA's target modules do not fit, where quantised weights would be trained, or where no
        layer can be checkpointed and that is asked for.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = _device(config.device)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        tokenizer = load_tokenizer(name)
        if config.chat_template is not None:
            set_chat_template(tokenizer, config.chat_template)
        base = load_model(name, dtype if config.lora else torch.float32, device)
        if is_quantised(base.config) and config.lora is None:
            raise UserError(
                f"the model {name} is quantised, and such weights cannot be trained themselves: set lora (--set lora.r=16) "
                "to train an adapter on top of them, or name the original model"
            )
        if config.gradient_checkpointing and not recompute.layers(base):
            raise UserError(f"the model {name} has no layers to checkpoint: set gradient_checkpointing to false")
        eos_ids = take_eos_ids(name, base, tokenizer)
        if config.lora is not None:
            model = _with_lora(name, base, config.lora, seed)
            return cls(name, model, tokenizer, eos_ids, None, autocast=False, config=config)
        reference = copy.deepcopy(base).requires_grad_(False) if with_reference else None
        autocast = dtype is not torch.float32
        return cls(name, base, tokenizer, eos_ids, reference, autocast, config)

    @property
    def weight_bytes(self) -> int:
        """What all weights weigh, in bytes: what would have to be sent if they were shared."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())

    def render_prompt(self, text: str) -> list[int]:
        """Ids of a prompt: a user's turn by the chat template where there is one, else the plain text.

        Raises UserError for a prompt without any token.
        """
        if self.tokenizer.chat_template is not None:
            ids = render_chat(self.tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)
        else:
            ids = list(self.tokenizer.encode(text))
            # Some tokenizers end every text; a completion would then follow the end.
            while ids and ids[-1] == self.tokenizer.eos_token_id:
                ids.pop()
        if not ids:
            raise UserError(f"the prompt {text!r} has no token in the tokenizer of {self.name}: give it some text")
        return ids

    def token_logps(
        self, sequences: Sequence[PromptAndCompletion], *, gradient: bool = False, reference: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs (B, T) float32, in nats, of the completions' tokens, and the mask (B, T) bool of those that exist.

        T is the longest completion; a row begins at its completion's first token. Rows are padded on the right. With
        ``reference``, under the policy as it was loaded, without gradient.
        """
        assert all(prompt and completion for prompt, completion in sequences)
        ways = self._ways
        with (
            torch.set_grad_enabled(gradient and not reference),
            self.forward_context(training=gradient, reference=reference) as model,
        ):
            return logps.token_logps(model, sequences, ways)

    def micro_batches(self, sequences: Sequence[PromptAndCompletion]) -> list[list[int]]:
        """Indices of ``sequences`` cut into what this process forwards in at most ``micro_batch_tokens`` token slots."""
        return self._cut(sequences, self.micro_batch_tokens)

    def _cut(self, sequences: Sequence[PromptAndCompletion], budget: int) -> list[list[int]]:
        shapes = [logps.shape(sequence) for sequence in sequences]
        return micro_batches(shapes, budget, shares=self._ways.shares_prompts)

    def score(self, sequences: Sequence[PromptAndCompletion], check: Callable[[], None]) -> list[float]:
        """Summed log-prob of each completion, in nats, without gradient. ``check`` is called between micro-batches."""
        found = self.completion_logps(sequences, check)
        return [float(logps_T.double().sum()) for logps_T in found]

    def completion_logps(self, sequences: Sequence[PromptAndCompletion], check: Callable[[], None]) -> list[Tensor]:
        """Log-probs (T_i,) float32 of each completion's tokens, in nats, on the CPU. As ``score``."""
        found = [torch.empty(0)] * len(sequences)
        for batch in self.micro_batches(sequences):
            check()
            logps_BT, _ = self.token_logps([sequences[i] for i in batch])
            for index, logps_T in zip(batch, logps_BT.cpu(), strict=True):
                found[index] = logps_T[: len(sequences[index][1])]
        return found

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for _, parameter in self._trainable()]

    def finish_gradient(self, found: T) -> list[T]:
        """Makes the gradient that of all micro-batches, once this process's are done; ``found`` is what they came to.

        Returns what each process that trains this policy has found: here there is one.
        """
        return [found]

    def clip_gradient(self, max_norm: float) -> float:
        """Scales the gradient down to a norm of at most ``max_norm``; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm))

    def trainable_state(self) -> dict[str, Tensor]:
        """What training changes, by name, on the CPU: the adapter, or all weights."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._trainable()}

    def load_trainable_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what ``trainable_state`` gave. Raises UserError where names or shapes differ."""
        parameters = dict(self._trainable())
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        if shapes != {name: tensor.shape for name, tensor in state.items()}:
            raise UserError(
                f"the checkpoint is of another model or LoRA setting than {self.name}: use those it began with"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])

    def merged_weights(self) -> dict[str, Tensor]:
        """All weights, LoRA merged into them, by the names that they have in a checkpoint. To be copied, not changed.

        Raises UserError for quantised weights, into which nothing can be merged.
        """
        if self._quantised:
            raise UserError(
                f"the weights of {self.name} are quantised, so vLLM cannot be given LoRA merged into them: set "
                "generation_backend to hf"
            )
        model = self._merged()
        weights: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
        return weights

    def save_pretrained(self, folder: Path) -> None:
        """Writes a folder that from_pretrained loads: whole weights, LoRA merged into them, tokenizer, model card.

        Its generation configuration names the ending tokens only. Nothing is merged into quantised weights, since that
        would round them anew: the folder then holds the adapter, which names its model. Raises HacrlFedError where it
        cannot be written.
        """
        model: Any = self._model
        settings = {}
        if self._quantised:
            # For from_pretrained, whatever folder it is called in.
            source = Path(self.name).expanduser()
            model.peft_config["default"].base_model_name_or_path = (
                str(source.resolve()) if source.exists() else self.name
            )
            # Else peft may ask the hub whether the vocabulary has grown.
            settings["save_embedding_layers"] = False
        else:
            model = self._merged()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(folder, **settings)
            self.tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(self._model_card(), encoding="utf-8")
        except (OSError, SafetensorError) as error:
            raise HacrlFedError(
                f"the model cannot be written to {folder} ({' '.join(str(error).split())}): make room or let it be written, "
                "then run the same command again"
            ) from error

    @contextlib.contextmanager
    def forward_context(self, *, training: bool, reference: bool = False) -> Iterator[Any]:
        """The model to call within, in the right arithmetic; dropout (of LoRA only) is on where ``training``."""
        model: Any = self._model
        with contextlib.ExitStack() as stack:
            if self._autocast:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            if isinstance(model, PeftModel):
                if reference:
                    stack.enter_context(model.disable_adapter())
                for name, module in model.named_modules():
                    if name.rpartition(".")[2] == "lora_dropout":
                        module.train(training and not reference)
            elif reference:
                assert self._reference is not None, "loaded without a reference"
                model = self._reference
            if training and self._gradient_checkpointing:
                stack.enter_context(recompute.recomputed(model))
            yield model

    @functools.cached_property
    def _ways(self) -> logps.Ways:
        with torch.no_grad(), self.forward_context(training=False) as model:
            ways = logps.find_ways(model, self.name)
        if not (self._gradient_checkpointing and ways.shares_prompts):
            return ways
        _log.warning(
            "%s: gradient_checkpointing keeps no keys and values, so prompts are forwarded anew for each completion",
            self.name,
        )
        # Without gradient too: another way rounds otherwise, and in 16 bits by more than GSPO's clip range.
        return dataclasses.replace(ways, shares_prompts=False)

    def _merged(self) -> Any:
        """The model without adapters: LoRA is merged on a copy, so that the policy can still be used."""
        if isinstance(self._model, PeftModel):
            return copy.deepcopy(self._model).merge_and_unload()
        return self._model

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]

    def _model_card(self) -> str:
        base = Path(self.name).name
        how = "LoRA, merged into the weights" if isinstance(self._model, PeftModel) else "all weights"
        if self._quantised:
            how = "LoRA; its weights are quantised, so this folder holds the adapter, which from_pretrained puts on top of it"
        return (
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
            "tags:\n- reinforcement-learning\n- hacrl-fed\n---\n\n"
            f"# {base}, trained with hacrl-fed\n\n"
            f"Trained from `{base}` by reinforcement learning with verifiable rewards in a federation that shares "
            f"rollouts and no weights ({how}; sampled at temperature 1 without top-p or top-k).\n"
            "The licence and the limits of the model that it was trained from apply.\n"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used here: say auto, cpu or cuda") from error
    return device


def _with_lora(name: str, model: PreTrainedModel, lora: Lora, seed: int) -> PeftModel:
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=cast(int, lora.alpha),  # annotated too narrowly: only divided by r
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise UserError(f"lora.target_modules do not fit {name}: {error}") from error
    adapted.eval()
    if is_quantised(model.config):
        # In eval mode, quantisation libraries take kernels (bitsandbytes on CPUs: repacks 4-bit weights for good) through
        # which no gradient flows, without a word. Layers without parts use the mode for nothing else, but for dropout.
        for module in model.modules():
            if not isinstance(module, torch.nn.Dropout):
                module.training = not any(module.children())
    return adapted
