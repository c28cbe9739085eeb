"""Two processes that take their steps in turn, each with a peak of memory of its own. Without torch."""

import importlib
import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Self, TypeVar

from hacrl_fed.errors import HacrlFedError

# Threads that spin while they wait would take the core from the side whose turn it is.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),  # one: Trainer would split batches over more
}
_STOP_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step took: seconds of the process's CPU time and of the clock; and the lengths of what it generated."""

    cpu_s: float
    wall_s: float
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """In MB (10^6 bytes).

    Attributes:
        before: resident in the process before its first step.
        peak: resident in the process at most, up to its last step.
        device_peak: allocated at most by tensors of an accelerator, weights included; None on a CPU.
    """

    before: float
    peak: float
    device_peak: float | None


@dataclass(frozen=True, slots=True)
class LossBatch:
    """Rollouts whose loss both sides compute: (B,) sequences, and log-probs (T_i,) of each under the policy that made it."""

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: list[float]
    old_logps: list[list[float]]


class Side:
    """A process that does what it is told, one thing at a time. A context manager."""

    def __init__(self, name: str, module: str, *arguments: object, deadline_s: float) -> None:
        """Starts ``serve(connection, *arguments)`` of a module; every answer must come within ``deadline_s``.

        The module is imported there only: what this process holds would count in the other's peak of memory.
        """
        self._name = name
        self._deadline_s = deadline_s
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        os.environ.update(ENVIRONMENT)
        self._process = context.Process(target=_serve, args=(module, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()  # what it had to say is said
        self._process.join()

    def tell(self, message: object) -> None:
        """Says what to do next, or that its turn has come."""
        self._connection.send(message)

    def answer(self, kind: type[T]) -> T:
        """The next answer. Raises HacrlFedError where it does not come, or the process ends instead."""
        try:
            if not self._connection.poll(self._deadline_s):
                raise HacrlFedError(f"{self._name} gave no answer within {self._deadline_s:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_STOP_S)
            raise HacrlFedError(
                f"{self._name} failed (exit code {self._process.exitcode}); its error is above"
            ) from None
        assert isinstance(answer, kind)
        return answer


def _serve(module: str, connection: Connection, *arguments: object) -> None:
    # What libraries print is not the command's result.
    os.dup2(2, 1)
    importlib.import_module(module).serve(connection, *arguments)
