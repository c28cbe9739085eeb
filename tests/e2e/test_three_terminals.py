"""The README's path, by its commands: keys, roster, certificates, a server, and a client for each of two sites."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import Commands, Federation, free_address, read_json, read_lines, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
AGENTS = {"a": "b", "b": "a"}
SUMMARY = {"method", "seed", "steps", "wall_s", "agents"}
AGENT_SUMMARY = {"before", "after", "own_rollouts", "cross_rollouts", "refused", "egress_bytes", "ingress_bytes"}


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended, and what its server printed."""

    folder: Path
    steps: int
    server_output: str

    def site(self, agent: str) -> Path:
        return self.folder / agent


def run_to_the_end(
    commands: Commands,
    federation: Federation,
    folder: Path,
    config: Path,
    site: Path,
    steps: int,
    *,
    server_more: tuple[str, ...] = (),
    insecure: bool = False,
) -> FinishedRun:
    """A server and two clients, until all three have ended with exit code 0."""
    address = free_address()
    tls = ["--insecure"] if insecure else None
    server = commands.start(*federation.server(config, address, folder / "server", *server_more, tls=tls))
    clients = [commands.start(*federation.client(agent, address, folder / agent, site, tls=tls)) for agent in AGENTS]
    for client in clients:
        client.succeed()
    return FinishedRun(folder, steps, server.succeed().output)


@pytest.fixture(scope="module")
def digits(
    commands: Commands, federation: Federation, site_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Three steps of a JSON-lines task with the exact verifier."""
    folder = tmp_path_factory.mktemp("digits")
    return run_to_the_end(commands, federation, folder, write_run(folder, steps=3, block_steps=2), site_file, 3)


@pytest.fixture(scope="module")
def sums(
    commands: Commands, federation: Federation, site_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """A reasoning-gym task, in plain text on loopback; a few steps, since a guess is right once in fifteen."""
    folder = tmp_path_factory.mktemp("sums")
    config = write_run(folder, task="sums", steps=5)
    return run_to_the_end(commands, federation, folder, config, site_file, 5, insecure=True)


@pytest.fixture(params=["digits", "sums"])
def finished(request: pytest.FixtureRequest) -> FinishedRun:
    """Each of the two runs."""
    run: FinishedRun = request.getfixturevalue(request.param)
    return run


def test_keys_are_private(federation: Federation) -> None:
    for name in ("coordinator", "a", "b"):
        assert federation.key(name).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in federation.ca.parent.iterdir()} == {
        *("ca.pem", "ca-key.pem", "server.pem", "server-key.pem")
    }


def test_server_says_where_it_listens_and_that_the_run_is_complete(finished: FinishedRun) -> None:
    assert "listening on 127.0.0.1:" in finished.server_output
    assert "the run is complete" in finished.server_output


@pytest.mark.parametrize("agent", AGENTS)
def test_run_folder_has_the_fixed_layout(finished: FinishedRun, agent: str) -> None:
    site = finished.site(agent)
    assert {path.name for path in site.iterdir()} >= {
        *("config.json", "metrics.jsonl", "rollouts", "egress.jsonl", "checkpoints", "model", "summary.json")
    }
    config = read_json(site / "config.json")
    assert config["agent"] == agent and config["run"]["steps"] == finished.steps
    assert config["site"]["optimizer"]["betas"] == [0.9, 0.999], "defaults are resolved"
    assert [path.name for path in sorted((site / "rollouts").iterdir())] == [
        f"step-{step:06d}.jsonl" for step in range(finished.steps)
    ]
    assert list((site / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("agent", AGENTS)
def test_metrics_have_one_line_a_step(finished: FinishedRun, agent: str) -> None:
    lines = read_lines(finished.site(agent) / "metrics.jsonl")
    assert [(line["step"], line["agent"]) for line in lines] == [(step, agent) for step in range(finished.steps)]


@pytest.mark.parametrize("agent", AGENTS)
def test_site_learned_from_own_and_from_cross_rollouts(finished: FinishedRun, agent: str) -> None:
    site = finished.site(agent)
    summary = read_json(site / "summary.json")["agents"][agent]
    learned = [
        row for step in range(finished.steps) for row in read_lines(site / "rollouts" / f"step-{step:06d}.jsonl")
    ]
    by_source = {source: [row for row in learned if row["source"] == source] for source in AGENTS}
    # 4 prompts of 4 rollouts; a peer's that reads as no token at all is refused, so it may be fewer.
    assert len(by_source[agent]) == summary["own_rollouts"] == 16 * finished.steps
    assert len(by_source[AGENTS[agent]]) == summary["cross_rollouts"]
    refused = sum(count for reason, count in summary["refused"].items() if reason != "empty")
    assert refused == 0 and summary["cross_rollouts"] > 12 * finished.steps
    for rows in by_source.values():
        assert {row["reward"] for row in rows} >= {0.0, 1.0}
        assert any(row["advantage"] != 0 for row in rows)


@pytest.mark.parametrize("agent", AGENTS)
def test_both_sites_learned_from_the_same_texts(finished: FinishedRun, agent: str) -> None:
    def texts(site: str) -> list[list[str]]:
        rows = read_lines(finished.site(site) / "rollouts" / "step-000000.jsonl")
        return sorted([r["prompt_id"], r["sample_index"], r["text"], r["reward"]] for r in rows if r["source"] == agent)

    own, seen = texts(agent), texts(AGENTS[agent])
    assert [row for row in own if row in seen] == seen


@pytest.mark.parametrize("agent", AGENTS)
def test_summary_has_the_fixed_keys_and_counts_what_left(finished: FinishedRun, agent: str) -> None:
    summary = read_json(finished.site(agent) / "summary.json")
    assert set(summary) == SUMMARY
    assert (summary["method"], summary["seed"], summary["steps"]) == ("hacpo", 3, finished.steps)
    assert set(summary["agents"]) == {agent}
    own = summary["agents"][agent]
    assert set(own) >= AGENT_SUMMARY
    assert set(own["before"]) == set(own["after"]) == {"greedy", "sampled"}
    assert own["egress_bytes"] == sum(line["bytes"] for line in read_lines(finished.site(agent) / "egress.jsonl")) > 0
    assert 0 < own["ingress_bytes"] < own["weight_bytes"]


@pytest.mark.parametrize("agent", AGENTS)
def test_final_model_loads_and_has_moved(finished: FinishedRun, federation: Federation, agent: str) -> None:
    folder = finished.site(agent) / "model"
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    before = AutoModelForCausalLM.from_pretrained(federation.models[agent]).state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    text = "2 + 2 = 4, the end"
    start = AutoTokenizer.from_pretrained(federation.models[agent])
    assert AutoTokenizer.from_pretrained(folder).encode(text) == start.encode(text)


def test_shipped_configurations_run(commands: Commands, federation: Federation, tmp_path: Path) -> None:
    # The test's models read bytes, of which a rendered prompt has more than the demo models' tokens.
    # Nor were they taught this task: what one answers the other never would, and it would be left out.
    smaller = (
        *("steps=2", "prompts_per_step=4", "evaluation.prompts=4", "max_prompt_tokens=200"),
        "algorithm.hacpo.source_floor=0",
    )
    finished = run_to_the_end(
        commands,
        federation,
        tmp_path,
        ROOT / "configs" / "two-sites.yaml",
        ROOT / "configs" / "site-demo.yaml",
        2,
        server_more=tuple(argument for setting in smaller for argument in ("--set", setting)),
    )
    for agent in AGENTS:
        lines = read_lines(finished.site(agent) / "metrics.jsonl")
        assert [line["step"] for line in lines] == [0, 1]
        assert all(line["own_rollouts"] == 32 and line["cross_rollouts"] > 0 for line in lines)
