"""Processes that are killed or interrupted: the same command goes on, and nothing that was finished is lost."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from processes import (
    Command,
    Commands,
    Ended,
    Federation,
    assert_one_sentence,
    free_address,
    read_json,
    read_lines,
    write_run,
)
from transformers import AutoModelForCausalLM

STEPS = 4
AGENTS = ("a", "b")


class Run:
    """A server and two clients, whose commands can be given again."""

    def __init__(self, commands: Commands, federation: Federation, folder: Path, site_file: Path) -> None:
        self.folder = folder
        self._commands = commands
        # 24 samples a prompt: long enough for a step to be met in its middle.
        config = write_run(folder, steps=STEPS, block_steps=STEPS, group_size=24)
        address = free_address()
        self._lines = {"server": federation.server(config, address, folder / "server")}
        self._lines |= {agent: federation.client(agent, address, folder / agent, site_file) for agent in AGENTS}

    def start(self, *names: str) -> list[Command]:
        """Gives the commands of the server or of agents, also when they have been given before."""
        return [self._commands.start(*self._lines[name]) for name in names]

    def steps_done(self, agent: str) -> int:
        return len(read_lines(self.folder / agent / "metrics.jsonl"))

    def weights(self, agent: str) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(
            self.folder / agent / "model"
        ).state_dict()
        return state

    def assert_complete(self) -> None:
        """Each agent has done each step once, with the others' rollouts, and its summary agrees with its files."""
        for agent in AGENTS:
            lines = read_lines(self.folder / agent / "metrics.jsonl")
            assert [line["step"] for line in lines] == list(range(STEPS))
            summary = read_json(self.folder / agent / "summary.json")["agents"][agent]
            assert summary["own_rollouts"] == sum(line["own_rollouts"] for line in lines) == 96 * STEPS
            assert summary["cross_rollouts"] == sum(line["cross_rollouts"] for line in lines) > 80 * STEPS
            sent = read_lines(self.folder / agent / "egress.jsonl")
            assert summary["egress_bytes"] == sum(line["bytes"] for line in sent)


def assert_same_weights(run: Run, other: Run) -> None:
    for agent in AGENTS:
        weights, others = run.weights(agent), other.weights(agent)
        assert weights.keys() == others.keys()
        for name in weights:
            assert torch.equal(weights[name], others[name]), f"{name} of {agent} differs"


@pytest.fixture(scope="module")
def undisturbed(
    commands: Commands, federation: Federation, site_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A run that nothing happened to."""
    run = Run(commands, federation, tmp_path_factory.mktemp("undisturbed"), site_file)
    server, *clients = run.start("server", "a", "b")
    for command in (*clients, server):
        command.succeed()
    run.assert_complete()
    return run


@pytest.fixture
def run(commands: Commands, federation: Federation, site_file: Path, tmp_path: Path) -> Run:
    """A run that is not started yet."""
    return Run(commands, federation, tmp_path, site_file)


def assert_interrupted(ended: Ended, folder: Path) -> None:
    assert_one_sentence(ended, 130, "interrupted", f"--run-dir {folder} resumes", opening="interrupted")


def test_killed_client_goes_on_to_the_weights_of_an_undisturbed_run(run: Run, undisturbed: Run) -> None:
    server, a, b = run.start("server", "a", "b")
    # After step 2, past the checkpoint before it: step 2 is learned again, from the coordinator's log.
    a.await_that(lambda: run.steps_done("a") >= 3)
    a.kill()
    (again,) = run.start("a")
    for command in (again, b, server):
        command.succeed()
    assert "resuming from the checkpoint before step 3" in again.output()
    run.assert_complete()
    assert_same_weights(run, undisturbed)


def test_killed_server_is_found_again_by_its_clients(run: Run, undisturbed: Run) -> None:
    server, a, b = run.start("server", "a", "b")
    a.await_that(lambda: run.steps_done("a") >= 1)
    server.kill()
    a.await_output("connection")
    (again,) = run.start("server")
    for command in (a, b, again):
        command.succeed()
    assert "connected again" in a.output() and "connected again" in b.output()
    run.assert_complete()
    assert_same_weights(run, undisturbed)


def test_ctrl_c_stops_client_and_server_and_the_same_commands_go_on(run: Run, undisturbed: Run) -> None:
    server, a, b = run.start("server", "a", "b")
    b.await_that(lambda: run.steps_done("b") >= 1)
    children = psutil.Process(b.popen.pid).children(recursive=True)
    b.interrupt()
    assert_interrupted(b.wait(), run.folder / "b")
    server.interrupt()
    assert_interrupted(server.wait(), run.folder / "server")
    assert not any(child.is_running() for child in children)
    server, b = run.start("server", "b")
    for command in (a, b, server):
        command.succeed()
    run.assert_complete()
    assert_same_weights(run, undisturbed)


def test_ctrl_c_while_a_client_is_still_loading(run: Run) -> None:
    (a,) = run.start("a")
    # Its first seconds go into importing the training stack.
    a.await_that(lambda: any("libtorch" in entry.path for entry in psutil.Process(a.popen.pid).memory_maps()))
    a.interrupt()
    assert_interrupted(a.wait(), run.folder / "a")


def test_ctrl_c_stops_simulate_with_its_children_and_the_same_command_goes_on(
    commands: Commands, federation: Federation, site_file: Path, tmp_path: Path
) -> None:
    site = read_json(site_file)
    site["tasks"]["digits"]["path"] = str(site_file.parent / "digits.jsonl")
    config = tmp_path / "simulation.yaml"
    settings = read_json(write_run(tmp_path, group_size=24))
    agents = {name: {"model": str(federation.models[name]), "site": site} for name in AGENTS}
    config.write_text(json.dumps({"run": settings, "agents": agents}))
    folder = tmp_path / "run"
    arguments = ("simulate", "--config", config, "--run-dir", folder)
    simulate = commands.start(*arguments)
    simulate.await_that(lambda: read_lines(folder / "agents" / "a" / "metrics.jsonl"))
    children = psutil.Process(simulate.popen.pid).children(recursive=True)
    assert len(children) == 3
    simulate.interrupt()
    assert_interrupted(simulate.wait(), folder)
    assert not any(child.is_running() for child in children)
    commands.start(*arguments).succeed()
    summary = read_json(folder / "summary.json")
    assert {name: agent["own_rollouts"] for name, agent in summary["agents"].items()} == {"a": 192, "b": 192}
