"""Finds what a run folder holds: of a client, of a server, or of a simulation with one run for each method."""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl_fed.errors import HacrlFedError, UserError

_LEDGER = "ledger.sqlite"


@dataclass(frozen=True, slots=True)
class Run:
    """One run by one method, as far as this folder knows it.

    Attributes:
        method: its name; empty where nothing in the folder says it yet.
        agents: the agents' folders, by name.
        ledger: the coordinator's, or None.
        roster: the run's, where it lies in the folder.
        summary: of all agents once the run is complete; empty before.
    """

    method: str
    agents: dict[str, Path] = field(default_factory=dict)
    ledger: Path | None = None
    roster: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)


def open_run_folder(folder: Path) -> list[Run]:
    """The runs of a folder: one, or of a simulation the main method's and then those that it is compared with.

    Raises UserError for a folder that is none of a run.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if (folder / "agents").is_dir():
        roster = _existing(folder / "federation" / "roster.yaml")
        compared = sorted(path.parent for path in folder.glob("*/agents"))
        return [_simulated_run(path, roster) for path in (folder, *compared)]
    if (folder / _LEDGER).exists():
        return [Run(_method(read_json(folder / "config.json")), ledger=folder / _LEDGER)]
    if (folder / "egress.jsonl").exists():
        config = read_json(folder / "config.json")
        agent = config.get("agent", folder.absolute().name)
        return [Run(_method(config.get("run", {})), {agent: folder}, summary=read_json(folder / "summary.json"))]
    raise UserError(
        f"{folder} is no run folder: name the --run-dir of a client or of a server that has begun, or of simulate"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is not there yet. Raises UserError where it holds anything else."""
    if not path.exists():
        return {}
    return _object(path.read_text(encoding="utf-8"), str(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """A JSON object a line; none where the file is not there yet. Raises UserError for a line that holds anything else.

    A last line without its end is left out: its writer was stopped, or is still writing it.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder where it is missing, and keeps other processes from running in it.

    Raises UserError where one does already, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise UserError(f"the run folder {folder} cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process runs in {folder}: choose another folder, or end that process") from None
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises HacrlFedError, which names the file and says what to do, where it cannot be written within (disk full)."""
    try:
        yield
    except OSError as error:
        raise HacrlFedError(
            f"{path} cannot be written ({error.strerror or error}): make room or let it be written, then run the same "
            "command again"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it: whoever is killed meanwhile leaves the old one or the new one.

    Raises HacrlFedError as ``writing``.
    """
    beside = path.with_name(path.name + ".new")
    with writing(path):
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drops from a file of JSON lines those that are not to be kept, and an unfinished last one; returns the others.

    Raises HacrlFedError as ``writing``.
    """
    kept = [line for line in read_json_lines(path) if keep(line)]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _simulated_run(folder: Path, roster: Path | None) -> Run:
    agents = {path.name: path for path in sorted(folder.glob("agents/*")) if path.is_dir()}
    return Run(
        _method(read_json(folder / "run.yaml")),  # which simulate writes as JSON
        agents,
        _existing(folder / "server" / _LEDGER),
        roster,
        read_json(folder / "summary.json"),
    )


def _method(run_config: dict[str, Any]) -> str:
    return str(run_config.get("algorithm", {}).get("method", ""))


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where} must hold an object, not {type(data).__name__}")
    return data
