"""Prompts and tasks. Equal content on two machines has equal ids and digests, whatever the file or its order."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hacrl_fed.errors import UserError
from hacrl_fed.verifiers.base import Verifier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question with its gold answer.

    Attributes:
        id: SHA-256 of text and answer, in lower-case hexadecimal.
        payload: what else the task's verifier needs; never leaves the site.
    """

    text: str
    answer: str
    payload: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("the prompt is empty")
        for name, value in (("prompt", self.text), ("answer", self.answer)):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError(f"the {name} holds a lone surrogate, which is not Unicode text") from None
        object.__setattr__(self, "id", _digest([self.text, self.answer]))


@dataclass(frozen=True, slots=True)
class Task:
    """A data set with its verifier. Both tuples are in the order of the prompts' ids and share no text.

    Attributes:
        digest: SHA-256 of the id, the prompts' ids, and the verifier's name and settings.
    """

    id: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    verifier: Verifier
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        content = {
            "id": self.id,
            "train": sorted(prompt.id for prompt in self.train),
            "held_out": sorted(prompt.id for prompt in self.held_out),
            "verifier": self.verifier.name,
            "settings": dict(self.verifier.settings),
        }
        object.__setattr__(self, "digest", _digest(content))


def build_task(task_id: str, prompts: Iterable[Prompt], held_out: float, verifier: Verifier) -> Task:
    """Splits prompts by their ids: a share of about ``held_out`` in [0, 1) is kept for evaluation.

    A text is kept once, so that none is in both parts. Raises UserError where none is left to train on.
    """
    by_text: dict[str, Prompt] = {}
    count = 0
    for prompt in prompts:
        count += 1
        # The smallest id, not the first: the same prompts in another order are the same task.
        by_text[prompt.text] = min(prompt, by_text.get(prompt.text, prompt), key=lambda p: p.id)
    if count > len(by_text):
        _log.info("task %s: dropped %d prompts whose text occurs before", task_id, count - len(by_text))
    ordered = sorted(by_text.values(), key=lambda prompt: prompt.id)
    is_held_out = [int(prompt.id[:8], 16) < held_out * 2**32 for prompt in ordered]
    train = tuple(prompt for prompt, held in zip(ordered, is_held_out, strict=True) if not held)
    evaluation = tuple(prompt for prompt, held in zip(ordered, is_held_out, strict=True) if held)
    if not train:
        raise UserError(f"task {task_id} has no prompt to train on: give it more prompts or a smaller held_out")
    return Task(task_id, train, evaluation, verifier)


def _digest(content: object) -> str:
    """SHA-256 of canonical JSON: keys sorted, ASCII, no spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()
