"""Scores completions that somebody else generated, by a task's own verifier: JSON lines in, JSON lines out."""

import json
from collections.abc import Iterable, Iterator

from hacrl_fed.errors import UserError
from hacrl_fed.tasks.base import Prompt, Task
from hacrl_fed.verifiers.pool import VerifierPool

_BATCH = 64


def read_completions(lines: Iterable[bytes], task: Task) -> list[tuple[Prompt, str]]:
    """The task's prompt and the completion of each line; blank lines are left out.

    A line is an object with "completion", and with "prompt_id" or "prompt" (its text). Raises UserError that names the
    line, counted from 1.
    """
    prompts = (*task.train, *task.held_out)
    known = {
        "prompt_id": {prompt.id: prompt for prompt in prompts},
        "prompt": {prompt.text: prompt for prompt in prompts},
    }
    return [_read(line, f"line {number}", task.id, known) for number, line in enumerate(lines, start=1) if line.strip()]


def score(items: list[tuple[Prompt, str]], verifiers: VerifierPool) -> Iterator[str]:
    """A JSON object for each item, in order, as they are verified: "prompt_id", "reward" (null: unverified), "reason"."""
    for start in range(0, len(items), _BATCH):
        batch = items[start : start + _BATCH]
        for (prompt, _), verdict in zip(batch, verifiers.verify_all(batch), strict=True):
            yield json.dumps({"prompt_id": prompt.id, "reward": verdict.reward, "reason": verdict.reason})


def _read(line: bytes, where: str, task_id: str, known: dict[str, dict[str, Prompt]]) -> tuple[Prompt, str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise UserError(f"{where} must hold an object, not {type(entry).__name__}")
    given = [name for name in known if name in entry]
    if len(given) != 1:
        raise UserError(f'{where} must hold either "prompt_id" or "prompt", and "completion"')
    (key,) = given
    for name in (key, "completion"):
        if not isinstance(entry.get(name), str):
            raise UserError(f'{where}: "{name}" must be a string')
    prompt = known[key].get(entry[key])
    if prompt is None:
        raise UserError(f'{where}: the task {task_id} has no such "{key}": {entry[key][:80]!r}')
    return prompt, entry["completion"]
