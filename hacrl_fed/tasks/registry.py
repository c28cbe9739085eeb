"""What a task id means at this site."""

from collections.abc import Mapping
from pathlib import Path

from hacrl_fed.config import JsonLinesTask, TaskDefinition
from hacrl_fed.errors import UserError
from hacrl_fed.tasks import digit_maps, jsonl, reasoning_gym
from hacrl_fed.tasks.base import Task


def load_task(task_id: str, definitions: Mapping[str, TaskDefinition], base_dir: Path) -> Task:
    """The task that this site has under an id: its own definition, or else a built-in one.

    Args:
        definitions: the ``tasks`` section of site.yaml.
        base_dir: the folder that relative paths of definitions start from.

    Raises UserError for an id that the site does not know, or for a definition that cannot be loaded.
    """
    if task_id not in definitions:
        if task_id == digit_maps.TASK_ID:
            return digit_maps.load()
        known = ", ".join(sorted({*definitions, digit_maps.TASK_ID}))
        raise UserError(
            f"this site does not know the task {task_id} (it knows {known}): define it in site.yaml, for example "
            f"tasks: {{{task_id}: {{kind: jsonl, path: FILE}}}}"
        )
    definition = definitions[task_id]
    if isinstance(definition, JsonLinesTask):
        return jsonl.load(task_id, definition, base_dir)
    return reasoning_gym.load(task_id, definition)
