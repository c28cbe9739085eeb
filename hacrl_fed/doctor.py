"""What of this machine would get in the way of a run: each finding with what mends it."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import tokens, transport

_SERVER_S = 10.0
_GPU_S = 10.0
_LOW_DISK_BYTES = 20_000_000_000
_CLIENT_EXTRA = "pip install 'hacrl-fed[client]'"


class Level(Enum):
    """How bad a finding is. The values are the colours that they are shown in."""

    OK = "green"
    WARNING = "yellow"
    PROBLEM = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``mend``: what to do about it, where it is not OK."""

    level: Level
    text: str
    mend: str = ""


def examine_machine(folder: Path) -> Iterator[Finding]:
    """Findings about this machine; ``folder`` is where run folders will be."""
    yield Finding(Level.OK, f"Python {platform.python_version()} on {platform.platform(terse=True)}")
    yield from _libraries()
    yield _graphics()
    yield _threads()
    yield _disk(folder)
    yield _telemetry()
    now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    yield Finding(
        Level.OK, f"this machine's clock says {now} UTC; a server refuses one that is {tokens.CLOCK_SKEW_S} s off"
    )


def examine_server(address: transport.Address, tls: transport.ClientTls | None) -> Finding:
    """Whether a server can be reached, and its certificate is trusted."""
    try:
        audience = transport.server_audience(address, tls, _SERVER_S)
    except HacrlFedError as error:
        return Finding(Level.PROBLEM, str(error))
    if tls:
        return Finding(Level.OK, f"{address} can be reached, and its certificate is trusted ({audience[:23]}…)")
    if not address.is_loopback:
        return Finding(
            Level.WARNING,
            f"{address} can be reached, in plain text that others can read and change",
            "use TLS, with --ca",
        )
    return Finding(Level.OK, f"{address} can be reached, in plain text that does not leave this machine")


def render(findings: list[Finding]) -> RenderableType:
    """A line for each finding."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        mend = f": {finding.mend}" if finding.mend else ""
        table.add_row(Text(finding.level.name.lower(), style=finding.level.value), Text(finding.text + mend))
    return table


def _libraries() -> Iterator[Finding]:
    required: list[str] = []
    client: dict[str, str | None] = {}
    for requirement in map(Requirement, importlib.metadata.requires("hacrl-fed") or ()):
        of_client = bool(requirement.marker and requirement.marker.evaluate({"extra": "client"}))
        if requirement.marker and not of_client:
            continue
        version = _version(requirement.name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            mend = f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(
                Level.PROBLEM, f"{requirement.name} {version} is installed, not {requirement.specifier}", mend
            )
        elif of_client:
            client[requirement.name] = version
        else:
            required.append(f"{requirement.name} {version}")
    yield Finding(Level.OK, ", ".join(required))
    missing = [name for name, version in client.items() if version is None]
    if len(missing) == len(client):
        yield Finding(
            Level.OK, f"the client extra is not installed: this machine can coordinate; to train, {_CLIENT_EXTRA}"
        )
    elif missing:
        yield Finding(Level.PROBLEM, f"of the client extra {', '.join(missing)} is missing", _CLIENT_EXTRA)
    else:
        yield Finding(Level.OK, "client extra: " + ", ".join(f"{name} {version}" for name, version in client.items()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _graphics() -> Finding:
    """Cores and GPUs. Asks the driver: importing torch takes seconds, and a coordinator has none."""
    cores = f"{_cores()} CPU cores"
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding(Level.OK, f"{cores}, no NVIDIA GPU")
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(Level.WARNING, f"{cores}; nvidia-smi fails ({error})", "mend the GPU's driver to train on it")
    gpus = "; ".join(output.strip().splitlines())
    torch = _version("torch")
    if torch and torch.endswith("+cpu"):
        mend = "install a torch that is built for CUDA"
        return Finding(Level.WARNING, f"{cores}; {gpus}, but torch {torch} is built for CPUs only", mend)
    return Finding(Level.OK, f"{cores}; {gpus}")


def _threads() -> Finding:
    threads, policy = os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")
    if threads or _cores() == 1:
        return Finding(Level.OK, f"OMP_NUM_THREADS is {threads or 'not set, and there is one core'}")
    if policy and policy.lower() == "passive":
        return Finding(
            Level.OK, "OMP_NUM_THREADS is not set, but OMP_WAIT_POLICY is passive: no thread waits in a loop"
        )
    return Finding(
        Level.WARNING,
        f"OMP_NUM_THREADS is not set: of several agents on this machine each would start {_cores()} threads, which spin "
        "while they wait and take the cores from each other",
        "with more than one, set OMP_NUM_THREADS to a share of the cores and OMP_WAIT_POLICY to PASSIVE",
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{decimal(free)} free in {folder.absolute()}"
    if free < _LOW_DISK_BYTES:
        mend = "a checkpoint weighs about three times the trained weights; choose a --run-dir with room for a few"
        return Finding(Level.WARNING, text, mend)
    return Finding(Level.OK, text)


def _telemetry() -> Finding:
    wanted = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    others = [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name) != value]
    if others:
        return Finding(Level.WARNING, "this environment lets Flower call its own hosts", f"set {' and '.join(others)}")
    return Finding(Level.OK, "Flower's telemetry and its look for updates are off")


def _cores() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
