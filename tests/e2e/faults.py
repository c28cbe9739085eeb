"""Real client processes in which something goes wrong at a named point: kill -9, no room on the disk, no memory.

They are forked from a process that has imported the training stack once, and then run the ordinary command.
"""

import importlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import DEADLINE_S, Ended

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["faults", "hacrl_fed.cli", "hacrl_fed_client.run", "hacrl_fed_server.coordinator"])
_EMPTY = 1 << 40


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens instead of a call.

    Attributes:
        at: the function, as "module:name" or "module:Class.name".
        happens: is given the function and the call's arguments.
        call: which call it is, from 1.
        of: only calls with an argument that ends in this count.
    """

    at: str
    happens: Callable[..., object]
    call: int = 1
    of: str = ""

    def install(self) -> None:
        """Puts the fault in place of the function."""
        module, _, path = self.at.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original, calls = getattr(owner, name), iter(range(1, _EMPTY))

        def faulty(*args: Any, **kwargs: Any) -> object:
            counts = not self.of or any(str(arg).endswith(self.of) for arg in args)
            if counts and next(calls) == self.call:
                return self.happens(original, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, faulty)


def killed(original: object = None, *args: object, **kwargs: object) -> None:
    """kill -9, before the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after(original: Callable[..., object], *args: object, **kwargs: object) -> None:
    """kill -9, right after the call."""
    original(*args, **kwargs)
    killed()


def killed_while_saving(save: Callable[..., object], state: object, file: io.BufferedWriter) -> None:
    """kill -9 when half of what torch.save writes is in the file."""
    whole = io.BytesIO()
    save(state, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()
    killed()


def killed_while_writing(write: Callable[..., object], path: Path, text: str, **kwargs: object) -> None:
    """kill -9 when half of a text is in its file."""
    write(path, text[: len(text) // 2], **kwargs)
    killed()


def no_room(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """From here on no file gets larger than 60 kB: more than the records, less than a checkpoint or the weights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return original(*args, **kwargs)


def no_room_for_records(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """From here on the record of what leaves gets 10 bytes larger at most."""
    egress: Any = args[0]
    size = egress._path.stat().st_size + 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return original(*args, **kwargs)


def no_room_for_metrics(report: Callable[..., object], site: Any, *args: object) -> object:
    """From here on the metrics go to a device that takes no byte."""
    path = site._run_dir / "metrics.jsonl"
    path.unlink()
    path.symlink_to("/dev/full")
    return report(site, *args)


def no_memory(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """As ``original`` would fare if it needed 4 GB of a machine that has 1 GB left."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(1 << 30)
    return original(*args, **kwargs)


class Forked:
    """An ``hacrl-fed`` command in a process of its own, with its output in files."""

    def __init__(self, arguments: list[str], log: Path, fault: Fault | None = None) -> None:
        self._stdout, self._stderr = log.with_suffix(".stdout"), log.with_suffix(".stderr")
        self._arguments = arguments
        self.process = _CONTEXT.Process(target=_run, args=(arguments, self._stdout, self._stderr, fault))
        self.process.start()

    def output(self) -> str:
        """Everything that it has printed so far."""
        files = [file for file in (self._stdout, self._stderr) if file.exists()]
        return "".join(file.read_text(errors="replace") for file in files)

    def wait(self) -> Ended:
        """The command, ended. Fails with its output where it does not end in time."""
        self.process.join(DEADLINE_S)
        code = self.process.exitcode
        assert code is not None, f"{self._arguments} did not end within {DEADLINE_S:.0f} s:\n{self.output()}"
        return Ended(code, self._stdout.read_text(errors="replace"), self._stderr.read_text(errors="replace"))

    def await_that(self, condition: Callable[[], object]) -> None:
        """Waits while the command runs until ``condition`` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.exitcode is None, f"{self._arguments} ended:\n{self.output()}"
            assert time.monotonic() < deadline, f"{self._arguments} is late:\n{self.output()}"
            time.sleep(0.05)


@contextmanager
def forking(logs: Path) -> Iterator[Callable[..., Forked]]:
    """Gives what starts commands; those that still run at the end are ended."""
    started: list[Forked] = []

    def start(arguments: list[str], fault: Fault | None = None) -> Forked:
        started.append(Forked(arguments, logs / f"{len(started):03d}-{arguments[0]}", fault))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.process.kill()
            command.process.join()


def _run(arguments: list[str], stdout: Path, stderr: Path, fault: Fault | None) -> None:
    os.environ["COLUMNS"] = "300"
    for number, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    torch.set_num_threads(1)
    if fault:
        fault.install()
    from hacrl_fed.cli import main

    sys.argv = ["hacrl-fed", *arguments]
    main()
