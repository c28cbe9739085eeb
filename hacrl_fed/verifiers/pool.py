"""Runs verifiers, those that may hang or crash in processes of their own with a hard time limit a completion."""

import concurrent.futures
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TYPE_CHECKING

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.verifiers.base import Verdict, Verifier

if TYPE_CHECKING:
    import pebble

    from hacrl_fed.tasks.base import Prompt

WORKERS = 2  # a site's: enough to verify beside generation

_START_S = 60.0  # for a worker process to start and import what its verifier needs
_REASON_CHARACTERS = 300  # of a verifier's error, which may quote the whole completion

_worker_verifier: Verifier  # set in worker processes only


class VerifierPool:
    """One interface to all verifiers: an isolated one runs in ``workers`` processes, another in the caller's thread.

    A context manager; entering raises HacrlFedError where no worker process starts. It may be used from any thread.
    Processes are spawned, so that they inherit no thread, lock or memory of a training process.
    """

    def __init__(self, verifier: Verifier, timeout_s: float, workers: int) -> None:
        """``timeout_s``: for one completion, after which its worker process is killed and replaced."""
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._workers = workers
        self._pool: pebble.ProcessPool | None = None

    def __enter__(self) -> "VerifierPool":
        if self._verifier.isolated:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            _end(self._pool)
            self._pool = None

    def verify_all(self, items: "Sequence[tuple[Prompt, str]]") -> list[Verdict]:
        """The verdicts of completions, in order, each given with its prompt.

        A completion on which an isolated verifier runs out of time, raises or crashes has reward None and a reason
        that says which. Raises HacrlFedError where the worker processes give no answer at all.
        """
        if not self._verifier.isolated:
            return [self._verifier.verify(prompt, completion) for prompt, completion in items]
        if not self._running_pool.active:
            self._start()
        futures = [self._running_pool.schedule(_verify, args=item, timeout=self._timeout_s) for item in items]
        # The pool enforces each completion's limit; after a kill, the next one waits for a process to start.
        deadline_s = _START_S + math.ceil(len(items) / self._workers) * (self._timeout_s + _START_S)
        if concurrent.futures.wait(futures, timeout=deadline_s).not_done:
            raise HacrlFedError(f"verifier {self._verifier.name} gave no answer within {deadline_s:.0f} s")
        return [self._verdict(future) for future in futures]

    @property
    def _running_pool(self) -> "pebble.ProcessPool":
        assert self._pool is not None, "an isolated verifier needs the pool to be entered"
        return self._pool

    def _start(self) -> None:
        # Imported here: pebble is not among what a coordinator installs.
        import pebble

        self._pool = pebble.ProcessPool(
            max_workers=self._workers,
            initializer=_set_verifier,
            initargs=(self._verifier,),
            context=multiprocessing.get_context("spawn"),
        )
        try:
            self._pool.schedule(_ready).result(timeout=_START_S)
        except (BrokenProcessPool, pebble.ProcessExpired, TimeoutError) as error:
            _end(self._pool)
            raise HacrlFedError(
                f"verifier {self._verifier.name}: its worker process does not start: {error}"
            ) from error

    def _verdict(self, future: "pebble.ProcessFuture[Verdict]") -> Verdict:
        import pebble

        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            why = f"took more than {self._timeout_s:g} s"
        elif isinstance(error, pebble.ProcessExpired):
            why = f"crashed with exit code {error.exitcode}"
        elif isinstance(error, BrokenProcessPool):
            why = "lost all its worker processes"
        else:
            why = f"failed: {error}"
        return Verdict(None, f"verifier {self._verifier.name} {why}")


def _end(pool: "pebble.ProcessPool") -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


class _VerifierError(Exception):
    """What a verifier raised, as text: its own exception need not survive pickling, and that would end the pool."""


def _set_verifier(verifier: Verifier) -> None:
    global _worker_verifier
    _worker_verifier = verifier
    verifier.prepare()


def _ready() -> None:
    """Returns once the worker that runs it has started."""


def _verify(prompt: "Prompt", completion: str) -> Verdict:
    try:
        return _worker_verifier.verify(prompt, completion)
    except BaseException as error:
        raise _VerifierError(f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]) from error
