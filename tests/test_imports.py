"""Who may import whom: a coordinator needs no training stack, and the two sides know nothing of each other."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hacrl_fed_client
import hacrl_fed_server

_WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "peft", "tenacity", "pebble"]))  # None: not to be imported
import hacrl_fed.cli, hacrl_fed.simulate, hacrl_fed.doctor, hacrl_fed.report, hacrl_fed.tasks.registry
import hacrl_fed_server.coordinator, hacrl_fed_server.audit
"""


def test_a_coordinator_runs_without_the_training_stack() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=60)


def test_a_command_that_needs_the_training_stack_says_how_to_get_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from hacrl_fed.cli import main; main()"
    arguments = ["demo-model", "a", "--out", str(tmp_path / "a")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: this command needs torch: install the training stack, pip install 'hacrl-fed[client]'\n"
    )


@pytest.mark.parametrize("first", ["hacrl_fed_server.app", "hacrl_fed_client.app"])
def test_flower_s_telemetry_is_off_whatever_is_imported_first(first: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    code = (
        f"import {first}, os, flwr.supercore.telemetry as t; "
        "print(t.FLWR_TELEMETRY_ENABLED, os.environ['FLWR_DISABLE_UPDATE_CHECK'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["0", "1"]


@pytest.mark.parametrize(
    ("package", "other"), [(hacrl_fed_server, "hacrl_fed_client"), (hacrl_fed_client, "hacrl_fed_server")]
)
def test_server_and_client_do_not_import_each_other(package: object, other: str) -> None:
    folder = Path(str(package.__file__)).parent  # type: ignore[attr-defined]
    modules = list(folder.rglob("*.py"))
    assert len(modules) > 5
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(other)], path
