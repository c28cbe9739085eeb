"""Procedural tasks of reasoning-gym (github.com/open-thought/reasoning-gym)."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from hacrl_fed.config import ReasoningGymTask
from hacrl_fed.errors import UserError
from hacrl_fed.tasks.base import Prompt, Task, build_task
from hacrl_fed.verifiers.reasoning_gym import ReasoningGymVerifier


def load(task_id: str, definition: ReasoningGymTask) -> Task:
    """The task of a generator's entries. Raises UserError for an unknown data set or a bad parameter."""
    dataset = _create(task_id, definition)
    prompts = (Prompt(entry["question"], entry["answer"] or "", payload=entry) for entry in dataset)
    verifier = ReasoningGymVerifier(definition.dataset, definition.params, definition.extract)
    return build_task(task_id, prompts, definition.held_out, verifier)


def _create(task_id: str, definition: ReasoningGymTask) -> Iterable[dict[str, Any]]:
    # Imported here: it takes a second, and most runs do without.
    from reasoning_gym.factory import DATASETS, create_dataset

    if definition.dataset not in DATASETS:
        raise UserError(
            f"task {task_id}: reasoning-gym has no data set {definition.dataset!r}{_hint(definition.dataset, DATASETS)}"
        )
    _, config_type = DATASETS[definition.dataset]
    known = {field.name for field in dataclasses.fields(config_type)} - {"seed", "size"}
    for name in definition.params:
        if name not in known:
            raise UserError(f"task {task_id}: {definition.dataset} has no parameter {name!r}{_hint(name, known)}")
    try:
        dataset: Iterable[dict[str, Any]] = create_dataset(
            definition.dataset, size=definition.size, seed=definition.seed, **definition.params
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"task {task_id}: {definition.dataset} refuses its parameters: {error}") from error
    return dataset


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(known))}"
