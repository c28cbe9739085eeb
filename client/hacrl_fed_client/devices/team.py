"""Processes that do one piece of work together: rank 0 leads, and each further rank does on its own copy what rank 0 begins.

Objects pass through pipes between rank 0 and the others, tensors through torch.distributed. A rank that fails says so in
its pipe and ends; where rank 0 ends, however it does, so do the others.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hacrl_fed.errors import HacrlFedError

T = TypeVar("T")

_PATIENCE_S = 1800.0  # for another rank's part, once the own is done
_POLL_S = 0.2
_REPORT_S = 5.0  # for a rank whose connection broke to say why, or to end
_END_S = 10.0  # for a process that has nothing left to do


def unchecked() -> None:
    """A check that never raises: only rank 0 knows of an end of the work."""


@dataclass(frozen=True, slots=True)
class _Command:
    """What rank 0 begins: a method of one of the objects that every rank has."""

    member: str
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank ended; ``consequence`` where that may be another rank's failure."""

    error: Exception
    consequence: bool


class _Peer:
    """Another process, as a rank sees it: the pipe to it, and from rank 0 the process too."""

    def __init__(self, rank: int, pipe: Connection, process: SpawnProcess | None) -> None:
        self.rank = rank
        self.pipe = pipe
        self.process = process

    def send(self, message: object) -> None:
        """Sends anything that can be pickled. Raises OSError where nobody is there any more."""
        # Not by pipe.send: torch has it move tensors to shared memory.
        self.pipe.send_bytes(pickle.dumps(message))

    def receive(self, waits_for: str, check: Callable[[], None]) -> Any:
        """The next message. Raises HacrlFedError where the other has failed, or is late. ``check`` is called meanwhile."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.pipe.poll(_POLL_S):
            check()
            if time.monotonic() > deadline:
                raise HacrlFedError(f"device {self.rank} is {_PATIENCE_S:.0f} s late with {waits_for}: is it stuck?")
            if self.process is not None and not self.process.is_alive() and not self.pipe.poll():
                raise self.ended()
        try:
            message = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self.ended() from None
        if isinstance(message, _Failure):
            raise message.error
        return message

    def failure(self) -> _Failure | None:
        """Why the process ended, or None where it runs."""
        assert self.process is not None
        try:
            while self.pipe.poll():
                message = pickle.loads(self.pipe.recv_bytes())
                if isinstance(message, _Failure):
                    return message
        except (EOFError, OSError):
            return _Failure(self.ended(), consequence=False)
        return None if self.process.is_alive() else _Failure(self.ended(), consequence=False)

    def ended(self) -> HacrlFedError:
        """The error that the process has ended without saying why."""
        how = "has ended"
        if self.process is not None:
            self.process.join(_REPORT_S)
            code = self.process.exitcode
            if code is not None:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return HacrlFedError(f"the process of device {self.rank} {how}: run the same command again to resume")


class Team:
    """The processes, as one of them sees them.

    Attributes:
        rank: this process's, from 0.
        devices: torch's names of all devices, one a rank.
        check: to be called in between; on rank 0 it may raise to end the work.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[str],
        store: Path,
        peers: Sequence[_Peer],
        check: Callable[[], None] = unchecked,
    ) -> None:
        self.rank = rank
        self.devices = devices
        self.check = check
        self._store = store
        self._peers = peers
        self._members: dict[str, object] = {}
        self._performing = rank > 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.devices)

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return torch.device(self.devices[self.rank])

    def connect(self) -> None:
        """Sets up torch.distributed, once every rank has come this far. Raises HacrlFedError where one has failed."""
        self.gather(None, "loading the model", self.check)
        backend = "gloo"
        if self.device.type == "cuda":
            backend = "nccl"
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            backend,
            # A file, since torch's server for this listens on all interfaces.
            init_method=self._store.as_uri(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=_PATIENCE_S),
        )

    def enter(self, name: str, member: object) -> None:
        """Names an object, whose like every rank has."""
        self._members[name] = member

    def run(self, name: str, method: str, *arguments: Any, check: Callable[[], None] = unchecked) -> list[Any]:
        """Calls a method of a member on every rank; returns each rank's result, in rank order.

        The method gets the arguments, which are pickled for the others, and a check to call in between: ``check`` on rank 0.
        Within such a method, which all ranks come to, it may be called again. Raises HacrlFedError for a rank that failed
        (torch.OutOfMemoryError where that was why); after an error of any kind the other processes are ended.
        """
        own = getattr(self._members[name], method)
        if self._performing:
            return self.gather(own(*arguments, check), method, check)
        with contextlib.ExitStack() as stack:
            stack.callback(self.kill)
            self._performing = True
            stack.callback(setattr, self, "_performing", False)
            for peer in self._peers:
                try:
                    peer.send(_Command(name, method, arguments))
                except OSError:
                    raise self._cause() or peer.ended() from None
            try:
                results = [own(*arguments, check)]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # May be torch.distributed's, for a rank that is gone.
                if (cause := self._cause()) is None:
                    raise
                raise cause from error
            results += [peer.receive(method, check) for peer in self._peers]
            self._performing = False
            stack.pop_all()
        return results

    def gather(self, part: T, waits_for: str, check: Callable[[], None] = unchecked) -> list[T]:
        """What every rank hands in, in rank order, on every rank. To be called on all."""
        if self.rank == 0:
            parts = [part, *(peer.receive(waits_for, check) for peer in self._peers)]
            for peer in self._peers:
                try:
                    peer.send(parts)
                except OSError:
                    raise self._cause() or peer.ended() from None
            return parts
        leader = self._peers[0]
        leader.send(part)
        gathered: list[T] = leader.receive(waits_for, unchecked)
        return gathered

    def follow(self) -> None:
        """Does what rank 0 begins, until rank 0 ends it."""
        leader = self._peers[0]
        while True:
            # Rank 0 may have nothing to do for days.
            try:
                command = pickle.loads(leader.pipe.recv_bytes())
            except EOFError:
                return
            assert isinstance(command, _Command)
            leader.send(getattr(self._members[command.member], command.method)(*command.arguments, unchecked))

    def close(self) -> None:
        """Ends the other processes, and waits until they have."""
        for peer in self._peers:
            peer.pipe.close()
        deadline = time.monotonic() + _END_S
        for peer in self._peers:
            assert peer.process is not None
            peer.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the other processes at once, whatever they do."""
        for peer in self._peers:
            assert peer.process is not None
            peer.process.kill()
            peer.process.join(_END_S)

    def _cause(self) -> Exception | None:
        """Why a rank has failed; None where none says so within the time to say it."""
        deadline = time.monotonic() + _REPORT_S
        failures: dict[int, _Failure] = {}
        while len(failures) < len(self._peers) and time.monotonic() < deadline:
            for peer in self._peers:
                if peer.rank not in failures and (failure := peer.failure()) is not None:
                    failures[peer.rank] = failure
            if any(not failure.consequence for failure in failures.values()):
                break
            time.sleep(0.01)
        found = sorted(failures.values(), key=lambda failure: failure.consequence)
        return found[0].error if found else None


@contextlib.contextmanager
def led(devices: Sequence[str], build: Callable[[Team], T], check: Callable[[], None]) -> Iterator[T]:
    """What ``build`` makes on rank 0, whose team has a process for each further device until the end of the context.

    ``build``, which is pickled, is called in every process; it connects the team and enters its members.
    """
    # Nothing but this machine needs to reach these sockets.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    spawning = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hacrl-fed-"))) / "store"
        peers: list[_Peer] = []
        team = Team(0, devices, store, peers, check)
        stack.callback(team.close)
        # They reach all processes of a terminal, and are for rank 0 alone to act upon.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            for rank in range(1, len(devices)):
                mine, theirs = spawning.Pipe()
                process = spawning.Process(target=_follow, args=(rank, devices, store, theirs, build), daemon=True)
                process.start()
                theirs.close()
                peers.append(_Peer(rank, mine, process))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        stack.callback(_disconnect, failed=False)
        with contextlib.ExitStack() as failing:
            failing.callback(_disconnect, failed=True)
            failing.callback(team.kill)
            yield build(team)
            failing.pop_all()


def _disconnect(failed: bool) -> None:
    if not dist.is_initialized():
        return
    if failed and dist.group.WORLD is not None:
        dist.group.WORLD.abort()  # on GPUs, what the others never come to would be waited for
    dist.destroy_process_group()


def _follow(rank: int, devices: Sequence[str], store: Path, pipe: Connection, build: Callable[[Team], object]) -> None:
    """A further process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable(logging.WARNING)  # rank 0 says the same
    leader = _Peer(0, pipe, None)
    team = Team(rank, devices, store, [leader])
    try:
        build(team)
        team.follow()
    except (HacrlFedError, RuntimeError, OSError) as error:
        with contextlib.suppress(OSError):
            leader.send(_failure(rank, error))
        _disconnect(failed=True)
        sys.exit(1)
    _disconnect(failed=False)


def _failure(rank: int, error: Exception) -> _Failure:
    if isinstance(error, HacrlFedError):
        return _Failure(error, consequence=False)
    reason = f"device {rank}: {' '.join(str(error).split()) or type(error).__name__}"
    if isinstance(error, torch.OutOfMemoryError):
        return _Failure(torch.OutOfMemoryError(reason), consequence=False)
    return _Failure(HacrlFedError(f"{reason}; run the same command again to resume"), consequence=True)


def _end_with_parent() -> None:
    """Ends this process when rank 0 has ended, also while it computes or waits for the others."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
