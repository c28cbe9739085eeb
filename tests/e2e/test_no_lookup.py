"""A whole run with Python's audit hook in every process: no host but this one is looked up or connected to.

gRPC's own connections are made in C and pass no hook; they go to the address that the hook saw a moment before.
"""

import json
from pathlib import Path

import pytest
from processes import Commands, Federation, read_json, read_lines, write_run

LOOPBACK = {"127.0.0.1", "localhost", "::1"}

# Python imports a module of this name in every process, before anything else.
SITECUSTOMIZE = """
import atexit, json, os, sys

FILE = os.path.join(os.environ["AUDIT_FOLDER"], f"{os.getpid()}.jsonl")

def note(event, host):
    with open(FILE, "a") as file:
        file.write(json.dumps({"event": event, "host": host}) + "\\n")

def hook(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        note(event, str(arguments[0]))
    elif event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        note(event, str(address[0]) if isinstance(address, tuple) else "unix")

sys.addaudithook(hook)
atexit.register(lambda: note("telemetry", os.environ.get("FLWR_TELEMETRY_ENABLED", "unset")))
"""


@pytest.fixture
def audit(tmp_path: Path) -> dict[str, str]:
    """The environment that installs the hook."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "audit").mkdir()
    return {"PYTHONPATH": str(tmp_path / "hook"), "AUDIT_FOLDER": str(tmp_path / "audit")}


def notes(audit: dict[str, str]) -> list[list[dict[str, str]]]:
    """What each process noted."""
    return [read_lines(path) for path in Path(audit["AUDIT_FOLDER"]).iterdir()]


def test_no_process_of_a_run_looks_up_or_connects_to_another_host(
    commands: Commands, federation: Federation, site_file: Path, tmp_path: Path, audit: dict[str, str]
) -> None:
    site = read_json(site_file)
    site["tasks"]["digits"]["path"] = str(site_file.parent / "digits.jsonl")
    agents = {name: {"model": str(model), "site": site} for name, model in federation.models.items()}
    config = tmp_path / "simulation.yaml"
    config.write_text(json.dumps({"run": read_json(write_run(tmp_path)), "agents": agents}))
    commands.start("simulate", "--config", config, "--run-dir", tmp_path / "run", env=audit).succeed()
    by_process = notes(audit)
    assert [process[-1] for process in by_process] == [{"event": "telemetry", "host": "0"}] * 4, (
        "all four, at their end"
    )
    seen = [note for process in by_process for note in process[:-1]]
    assert {note["host"] for note in seen} <= LOOPBACK | {"unix"}
    # Each of the two clients looks at the server's certificate before it calls.
    assert sum(note == {"event": "socket.connect", "host": "127.0.0.1"} for note in seen) >= 2


def test_a_users_own_choice_about_telemetry_stands(commands: Commands, audit: dict[str, str]) -> None:
    commands.start("--help", env={**audit, "FLWR_TELEMETRY_ENABLED": "1"}).succeed()
    assert notes(audit) == [[{"event": "telemetry", "host": "1"}]]
