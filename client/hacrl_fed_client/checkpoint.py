"""Checkpoints: one file a step, written beside and renamed, so that there is always a whole one to go on from."""

import contextlib
import json
import logging
import os
import pickle
import random
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacrl_fed.errors import HacrlFedError

_NAME = re.compile(r"step-(\d{8})\.pt")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run goes on from.

    Attributes:
        step: the next step to do.
        policy: of `Policy.trainable_state`.
        optimizer, scheduler: their ``state_dict()``.
        random_state: of `capture_random_state`.
        extra: whatever else the run needs, as JSON.
    """

    step: int
    policy: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    random_state: dict[str, Any]
    extra: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes ``step-NNNNNNNN.pt`` durably, then deletes all but the newest ``keep`` (>= 1).

    Raises HacrlFedError where it cannot be written (disk full, folder not writable); older checkpoints then stay.
    """
    path = folder / f"step-{checkpoint.step:08d}.pt"
    partial = path.with_suffix(".partial")
    state = {
        "step": checkpoint.step,
        "policy": checkpoint.policy,
        "optimizer": checkpoint.optimizer,
        "scheduler": checkpoint.scheduler,
        "random_state": checkpoint.random_state,
        "extra": json.dumps(checkpoint.extra),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _fsync_folder(folder)
    # torch reports a failed write (disk full) as RuntimeError.
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise HacrlFedError(
            f"the checkpoint of step {checkpoint.step} cannot be written to {folder} ({_reason(error)}); the one "
            "before stays: make room or let it be written, then run the same command again"
        ) from error
    for old in [*_files(folder)[keep:], *(leftover for leftover in folder.glob("*.partial"))]:
        old.unlink(missing_ok=True)
    return path


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None where there is none. A damaged one is named in a warning and passed over."""
    for path in _files(folder):
        try:
            return _load(path)
        except (
            OSError,
            zipfile.BadZipFile,
            zlib.error,
            RuntimeError,
            pickle.UnpicklingError,
            KeyError,
            ValueError,
        ) as error:
            _log.warning("checkpoint %s is damaged and passed over: %s", path, _reason(error))
    return None


def capture_random_state() -> dict[str, Any]:
    """States of Python's and torch's random generators, on all devices."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Takes over what ``capture_random_state`` gave; CUDA's only where there are as many devices as then."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _files(folder: Path) -> list[Path]:
    """Checkpoints, the newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)), reverse=True)


def _load(path: Path) -> Checkpoint:
    # torch.load verifies no checksum: a flipped bit would be loaded as a weight.
    with zipfile.ZipFile(path) as archive:
        if (member := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"checksum of {member} does not match")
    state = torch.load(path, map_location="cpu", weights_only=True)
    return Checkpoint(**(state | {"extra": json.loads(state["extra"])}))


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
