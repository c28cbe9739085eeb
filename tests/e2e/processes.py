"""The real commands as processes: started, waited for with deadlines, and ended by the id of what was started here."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 150.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Everything that it printed."""
        return self.stdout + self.stderr


class Command:
    """One ``hacrl-fed`` command in a process and session of its own, with its output in files."""

    def __init__(self, arguments: list[str], log: Path, env: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.arguments = arguments
        self._stdout = log.with_suffix(".stdout")
        self._stderr = log.with_suffix(".stderr")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "COLUMNS": "300",
            **env,
        }
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "hacrl_fed", *arguments],
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def output(self) -> str:
        """Everything that it has printed so far."""
        return self._stdout.read_text(errors="replace") + self._stderr.read_text(errors="replace")

    def wait(self, timeout_s: float = DEADLINE_S) -> Ended:
        """The command, ended. Fails with its output where it does not end in time."""
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.arguments} did not end within {timeout_s:.0f} s:\n{self.output()}") from None
        return Ended(code, self._stdout.read_text(errors="replace"), self._stderr.read_text(errors="replace"))

    def succeed(self, timeout_s: float = DEADLINE_S) -> Ended:
        """Waits for the command to end with exit code 0."""
        ended = self.wait(timeout_s)
        assert ended.code == 0, f"{self.arguments} ended with {ended.code}:\n{ended.output}"
        return ended

    def await_that(self, condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
        """Waits while the command runs until ``condition`` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.popen.poll() is None, f"{self.arguments} ended with {self.popen.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{self.arguments} is late:\n{self.output()}"
            time.sleep(_POLL_S)

    def await_output(self, pattern: str, timeout_s: float = DEADLINE_S) -> None:
        """Waits until what it has printed holds the pattern."""
        self.await_that(lambda: re.search(pattern, self.output()), timeout_s)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.popen.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """kill -9."""
        self.popen.kill()
        self.popen.wait()


class Commands:
    """Starts commands, and ends all that still run when it is closed."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._numbers = itertools.count()
        self._started: list[Command] = []

    def start(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Command:
        """Starts a command."""
        log = self._logs / f"{next(self._numbers):03d}-{arguments[0]}"
        command = Command([str(argument) for argument in arguments], log, env or {})
        self._started.append(command)
        return command

    def run(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Ended:
        """Runs a command to its end."""
        return self.start(*arguments, env=env).wait()

    def close(self) -> None:
        """Ends what still runs; a ``simulate`` is given the time to end its children."""
        running = [command for command in self._started if command.popen.poll() is None]
        for command in running:
            command.interrupt()
        for command in running:
            try:
                command.popen.wait(20)
            except subprocess.TimeoutExpired:
                command.kill()


@dataclass(frozen=True, slots=True)
class Federation:
    """Keys, roster, certificates and models of the agents a and b, and the commands that use them."""

    folder: Path
    models: dict[str, Path]

    @property
    def roster(self) -> Path:
        """The roster of run "test"."""
        return self.folder / "roster.yaml"

    def key(self, name: str) -> Path:
        """The private key of an agent or of the coordinator."""
        return self.folder / f"{name}.key"

    @property
    def ca(self) -> Path:
        """The development CA."""
        return self.folder / "tls" / "ca.pem"

    @property
    def server_tls(self) -> list[str]:
        """The server's TLS options."""
        tls = self.folder / "tls"
        return ["--tls-cert", str(tls / "server.pem"), "--tls-key", str(tls / "server-key.pem")]

    def server(self, config: Path, address: str, run_dir: Path, *more: str, tls: list[str] | None = None) -> list[str]:
        """A server's command line."""
        return [
            *("server", "--config", str(config), "--roster", str(self.roster), "--key", str(self.key("coordinator"))),
            *("--listen", address, "--run-dir", str(run_dir), *(self.server_tls if tls is None else tls), *more),
        ]

    def client(
        self, agent: str, address: str, run_dir: Path, site: Path, *more: str, tls: list[str] | None = None
    ) -> list[str]:
        """A client's command line."""
        return [
            *("client", "--server", address, "--agent", agent, "--model", str(self.models[agent])),
            *("--roster", str(self.roster), "--key", str(self.key(agent)), "--run-dir", str(run_dir)),
            *("--config", str(site), *(["--ca", str(self.ca)] if tls is None else tls), *more),
        ]


def free_address() -> str:
    """A loopback address that nothing listens on, so that the same command can be given again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def write_run(folder: Path, **changes: object) -> Path:
    """Writes the run.yaml of two tiny steps on the task "digits", patient enough for a busy machine."""
    settings = {
        "task": "digits",
        "steps": 2,
        "seed": 3,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_prompt_tokens": 200,
        "max_new_tokens": 6,
        "evaluation": {"prompts": 8},
        "block_steps": 2,
        "algorithm": {"prompts_per_mini_batch": 2},
        "deadlines": {"join_s": 120, "step_s": 60, "rejoin_s": 120, "pause_s": 120},
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def read_json(path: Path) -> Any:
    """A file of JSON."""
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[Any]:
    """The objects of a JSON-lines file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_one_sentence(ended: Ended, code: int, *words: str, opening: str = "error: ") -> None:
    """The command ended with the exit code, and with one sentence on stderr that holds the words."""
    assert ended.code == code, f"exit code {ended.code}, not {code}:\n{ended.output}"
    assert "Traceback" not in ended.output, ended.output
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith(opening), ended.stderr
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"
