"""A whole federation by one command, with two tiny models of different architecture and tokenizer."""

import json
import shutil
from pathlib import Path

import pytest
from processes import Commands, Ended, Federation, assert_one_sentence, read_json, read_lines, write_run
from transformers import AutoModelForCausalLM

AGENTS = ("a", "b")
SUMMARY = {"method", "seed", "steps", "wall_s", "agents"}
AGENT_SUMMARY = {"before", "after", "own_rollouts", "cross_rollouts", "refused", "egress_bytes", "ingress_bytes"}


@pytest.fixture(scope="module")
def config(federation: Federation, site_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HACPO, compared with GSPO on twice as many rollouts."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "digits.jsonl").write_text((site_file.parent / "digits.jsonl").read_text())
    site = read_json(site_file)
    agents = {name: {"model": str(federation.models[name]), "site": site} for name in AGENTS}
    path = folder / "simulation.yaml"
    path.write_text(json.dumps({"run": read_json(write_run(folder)), "agents": agents, "compare": ["gspo_x2"]}))
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder."""
    return tmp_path_factory.mktemp("simulation") / "run"


@pytest.fixture(scope="module")
def finished(commands: Commands, config: Path, run_dir: Path) -> Ended:
    """The run with its comparison, at its end."""
    return commands.start("simulate", "--config", config, "--run-dir", run_dir).succeed()


def table(ended: Ended) -> list[str]:
    """The lines of the results' table."""
    lines = ended.stdout.splitlines()
    return lines[next(index for index, line in enumerate(lines) if "held-out accuracy" in line) :]


@pytest.mark.parametrize(("method", "own", "shares"), [("hacpo", 32, True), ("gspo_x2", 64, False)])
def test_summary_has_the_fixed_keys(finished: Ended, run_dir: Path, method: str, own: int, shares: bool) -> None:
    folder = run_dir if method == "hacpo" else run_dir / method
    summary = read_json(folder / "summary.json")
    assert set(summary) == SUMMARY
    assert (summary["method"], summary["seed"], summary["steps"]) == (method, 3, 2)
    assert set(summary["agents"]) == set(AGENTS)
    for name, agent in summary["agents"].items():
        assert set(agent) >= AGENT_SUMMARY
        assert set(agent["before"]) == set(agent["after"]) == {"greedy", "sampled"}
        assert agent["own_rollouts"] == own
        assert (agent["cross_rollouts"] > 0) == shares
        assert read_json(folder / "agents" / name / "summary.json")["agents"] == {name: agent}


def test_both_methods_start_from_the_same_models(finished: Ended, run_dir: Path) -> None:
    hacpo, gspo = read_json(run_dir / "summary.json"), read_json(run_dir / "gspo_x2" / "summary.json")
    for name in AGENTS:
        assert hacpo["agents"][name]["before"] == gspo["agents"][name]["before"]
        AutoModelForCausalLM.from_pretrained(run_dir / "agents" / name / "model")


def test_only_rollouts_leave_and_only_where_they_are_shared(finished: Ended, run_dir: Path) -> None:
    for name in AGENTS:
        shared = {line["method"] for line in read_lines(run_dir / "agents" / name / "egress.jsonl")}
        alone = {line["method"] for line in read_lines(run_dir / "gspo_x2" / "agents" / name / "egress.jsonl")}
        session = {"GetRun", "Join", "Attend", "Reply", "Report"}
        assert session | {"Publish", "Subscribe"} <= shared <= session | {"Publish", "Subscribe", "Heartbeat"}
        assert session <= alone <= session | {"Heartbeat"}


def test_table_names_each_agent_and_method(finished: Ended) -> None:
    for method in ("hacpo", "gspo_x2"):
        rows = [line for line in table(finished) if f" {method} " in line and line.count(" → ") == 2]
        assert len(rows) == 2, f"a row of greedy and sampled accuracies for each agent, by {method}"


def test_same_command_gives_the_same_table_without_running_again(
    commands: Commands, config: Path, run_dir: Path, finished: Ended
) -> None:
    before = (run_dir / "server" / "ledger.sqlite").stat().st_mtime_ns
    again = commands.start("simulate", "--config", config, "--run-dir", run_dir).succeed()
    assert table(again) == table(finished)
    assert (run_dir / "server" / "ledger.sqlite").stat().st_mtime_ns == before
    assert len(read_lines(run_dir / "agents" / "a" / "metrics.jsonl")) == 2


def test_another_configuration_in_the_same_folder_is_refused(
    commands: Commands, config: Path, run_dir: Path, finished: Ended
) -> None:
    ended = commands.run("simulate", "--config", config, "--run-dir", run_dir, "--seed", "4")
    assert_one_sentence(ended, 2, str(run_dir), "another configuration", "--run-dir")


def test_what_was_lost_at_the_very_end_is_made_up_for_without_the_server(
    commands: Commands, config: Path, run_dir: Path, finished: Ended
) -> None:
    before = read_json(run_dir / "agents" / "b" / "summary.json")["agents"]["b"]
    shutil.rmtree(run_dir / "agents" / "b" / "model")
    for path in (run_dir / "agents" / "b" / "summary.json", run_dir / "summary.json"):
        path.unlink()
    commands.start("simulate", "--config", config, "--run-dir", run_dir).succeed()
    AutoModelForCausalLM.from_pretrained(run_dir / "agents" / "b" / "model")
    after = read_json(run_dir / "agents" / "b" / "summary.json")["agents"]["b"]
    counted = ("before", "after", "own_rollouts", "cross_rollouts", "refused", "egress_bytes")
    assert {key: after[key] for key in counted} == {key: before[key] for key in counted}
    assert read_json(run_dir / "summary.json")["agents"]["b"] == after


@pytest.mark.parametrize(("method", "shares"), [("sapo", True), ("naive_own", True), ("grpo", False)])
def test_other_methods(commands: Commands, config: Path, tmp_path: Path, method: str, shares: bool) -> None:
    folder = tmp_path / "run"
    commands.start(
        *("simulate", "--config", config, "--run-dir", folder, "--method", method, "--steps", "1", "--seed", "5"),
        *("--set", "run.evaluation.prompts=0"),
    ).succeed()
    summary = read_json(folder / "summary.json")
    assert (summary["method"], summary["seed"], summary["steps"]) == (method, 5, 1)
    for agent in summary["agents"].values():
        assert agent["own_rollouts"] == 16 and (agent["cross_rollouts"] > 0) == shares
        assert agent["before"] == agent["after"] == {}


def test_sources_under_the_floor_are_left_out_and_told(commands: Commands, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    commands.start(
        *("simulate", "--config", config, "--run-dir", folder, "--set", "compare=[]"),
        *("--set", "run.evaluation.prompts=0", "--set", "run.algorithm.hacpo.source_floor=1000"),
    ).succeed()
    for name, other in (("a", "b"), ("b", "a")):
        agent = folder / "agents" / name
        assert {line["source"] for path in (agent / "rollouts").iterdir() for line in read_lines(path)} == {name}
        assert [line[f"left_out/{other}"] for line in read_lines(agent / "metrics.jsonl")] == [1.0, 1.0]
        told = " ".join((agent / "client.log").read_text().split())
        assert told.count(f"rollouts of {other} (median ratio") == told.count("are left out") == 1


def test_unknown_method_is_refused(commands: Commands, config: Path, tmp_path: Path) -> None:
    ended = commands.run("simulate", "--config", config, "--run-dir", tmp_path / "run", "--method", "hacop")
    assert_one_sentence(ended, 2, "method", "hacpo")


def test_fault_of_an_agent_is_told_and_ends_the_run(commands: Commands, config: Path, tmp_path: Path) -> None:
    arguments = ("simulate", "--config", config, "--run-dir", tmp_path / "run")
    ended = commands.run(*arguments, "--set", "run.task=sudoku")
    assert_one_sentence(ended, 2, "agent ", "sudoku", ".log")
