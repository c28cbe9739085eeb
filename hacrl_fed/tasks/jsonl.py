"""Tasks from JSON-lines files: an object a line, with a prompt and its gold answer."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from hacrl_fed.config import JsonLinesTask
from hacrl_fed.errors import UserError
from hacrl_fed.tasks.base import Prompt, Task, build_task
from hacrl_fed.verifiers.base import Verifier
from hacrl_fed.verifiers.exact import ExactVerifier
from hacrl_fed.verifiers.math import GoldParser, MathVerifier
from hacrl_fed.verifiers.pool import VerifierPool

_log = logging.getLogger(__name__)

_GOLD_TIMEOUT_S = 10.0


def load(task_id: str, definition: JsonLinesTask, base_dir: Path) -> Task:
    """The task of a file, whose relative path starts from ``base_dir``. Raises UserError with the file and line."""
    prompts = list(_read(base_dir / definition.path, definition))
    verifier: Verifier = ExactVerifier(extract=definition.extract)
    if definition.verifier == "math":
        verifier = MathVerifier(extract=definition.extract)
        prompts = _with_usable_gold(task_id, prompts)
    return build_task(task_id, prompts, definition.held_out, verifier)


def _read(path: Path, definition: JsonLinesTask) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"there is no task file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not any(line.strip() for line in lines):
        raise UserError(f"{path} is empty: it must hold an object a line, with a prompt and its answer")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse_line(line, f"{path}, line {number}", definition)


def _parse_line(line: str, where: str, definition: JsonLinesTask) -> Prompt:
    try:
        # Numbers stay as they are written: 0.10 must not become 0.1.
        entry = json.loads(line, parse_int=str, parse_float=str)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise UserError(f"{where} must hold an object, not {type(entry).__name__}")
    values = []
    for name in (definition.prompt_field, definition.answer_field):
        if name not in entry:
            raise UserError(f"{where} has no field {name!r}; it has {', '.join(map(repr, entry)) or 'none'}")
        if not isinstance(entry[name], str):
            raise UserError(f"{where}: field {name!r} must be a string or a number, not {type(entry[name]).__name__}")
        values.append(entry[name])
    try:
        return Prompt(*values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _with_usable_gold(task_id: str, prompts: list[Prompt]) -> list[Prompt]:
    """Without the prompts whose gold answer math-verify cannot read, since any completion would score 0."""
    with VerifierPool(GoldParser(), _GOLD_TIMEOUT_S, workers=2) as pool:
        verdicts = pool.verify_all([(prompt, prompt.answer) for prompt in prompts])
    usable = [prompt for prompt, verdict in zip(prompts, verdicts, strict=True) if verdict.reward is not None]
    if len(usable) < len(prompts):
        example = next(verdict.reason for verdict in verdicts if verdict.reward is None)
        _log.warning(
            "task %s: skipped %d of %d prompts whose gold answer math-verify cannot read, such as: %s",
            task_id,
            len(prompts) - len(usable),
            len(prompts),
            example,
        )
    return usable
