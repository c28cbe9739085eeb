"""The commands that look at a run, a model or a machine: on a real run of tiny models, through the real command line."""

import io
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl_fed import cli, doctor, report, scoring
from hacrl_fed.config import SiteConfig, load
from hacrl_fed.doctor import Level
from hacrl_fed.inspection import ROLLOUT_FIELDS
from hacrl_fed.protocol import keys, roster, transport
from hacrl_fed.protocol.certs import write_development_ca
from hacrl_fed.run_folder import open_run_folder
from hacrl_fed.tasks import digit_maps
from hacrl_fed.tasks.registry import load_task
from hacrl_fed.v1 import envelope_pb2, exchange_pb2, rollout_pb2
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_server import audit
from tiny_models import END, save_tiny

torch.set_num_threads(1)
STEPS = 2
SIMULATION = {
    "run": {
        "task": "digit-maps",
        "steps": STEPS,
        "prompts_per_step": 3,
        "group_size": 2,
        "max_new_tokens": 6,
        "evaluation": {"prompts": 4},
    },
    "agents": {name: {"model": name, "site": {"threads": 1}} for name in ("a", "b")},
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """The run folder of a simulation of two tiny models."""
    folder = tmp_path_factory.mktemp("simulated")
    save_tiny(folder / "a", "qwen3")
    save_tiny(folder / "b", "llama", seed=1)
    (folder / "sim.yaml").write_text(yaml.safe_dump(SIMULATION))
    command = [sys.executable, "-m", "hacrl_fed", "simulate", "--config", "sim.yaml", "--run-dir", "run"]
    subprocess.run(command, cwd=folder, check=True, timeout=200, capture_output=True)
    return folder / "run"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process; gives its exit code, what it printed and what it said was wrong."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["hacrl-fed", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return call


def row(output, first, occurrence=0):
    """The cells after ``first`` in a line of a table, without thousands' commas."""
    rows = [line.split() for line in output.splitlines() if line.split()[:1] == [first]]
    return [cell.replace(",", "") for cell in rows[occurrence][1:]]


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def audited(folder, pinned=True):
    pins = roster.load(folder / "federation" / "roster.yaml") if pinned else None
    return audit.audit_ledger(folder / "server" / "ledger.sqlite", pins)


# inspect


def test_inspect_totals_equal_the_sums_of_the_egress_file(simulated, run):
    code, output, _ = run("inspect", simulated / "agents" / "b")
    lines = json_lines(simulated / "agents" / "b" / "egress.jsonl")
    summary = json.loads((simulated / "agents" / "b" / "summary.json").read_text())
    by_kind, by_step = defaultdict(list), defaultdict(list)
    for line in lines:
        by_kind[line["method"]].append(line["bytes"])
        by_step[line["step"]].append(line["bytes"])
    assert code == 0
    assert row(output, "all")[:2] == [str(len(lines)), str(summary["agents"]["b"]["egress_bytes"])]
    for kind, sizes in by_kind.items():
        assert row(output, kind)[:2] == [str(len(sizes)), str(sum(sizes))]
    for step in range(STEPS):
        published = sum(line["bytes"] for line in lines if (line["method"], line["step"]) == ("Publish", step))
        assert row(output, str(step)) == [str(len(by_step[step])), str(sum(by_step[step])), str(published)]
        assert published > 0
    assert row(output, "none")[1] == str(sum(by_step[None]))


def test_every_field_of_a_published_rollout_is_explained(simulated, run):
    assert list(ROLLOUT_FIELDS) == [field.name for field in rollout_pb2.Rollout.DESCRIPTOR.fields]
    _, output, _ = run("inspect", simulated / "agents" / "a")
    for name in ROLLOUT_FIELDS:
        assert row(output, name)


def test_inspect_of_a_simulation_shows_each_agent_and_a_chain_that_verifies(simulated, run):
    code, output, _ = run("inspect", simulated)
    assert code == 0
    assert "site of agent a" in output
    assert "site of agent b" in output
    for step in range(STEPS):
        # Both agents are complete, with a chunk each of 3 prompts x 2 rollouts.
        shown = output[output.index("coordinator closed") :]
        assert row(shown, str(step))[:6] == ["a", "b", "-", "-", "2", "12"]
    assert "all signatures" in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 80


def test_inspect_of_a_server_checks_signatures_with_a_roster_only(simulated, run):
    folder = simulated / "server"
    assert "signatures were not checked" in " ".join(run("inspect", folder)[1].split())
    pinned = simulated / "federation" / "roster.yaml"
    assert "all signatures" in " ".join(run("inspect", folder, "--roster", pinned)[1].split())


def test_audit_names_the_manifests_in_order_and_leaves_the_folder_as_it_is(simulated):
    server = simulated / "server"
    before = {path.name: path.read_bytes() for path in server.iterdir()}
    found = audited(simulated)
    assert {path.name: path.read_bytes() for path in server.iterdir()} == before
    assert [closed.manifest.step for closed in found.steps] == list(range(STEPS))
    assert found.steps[0].manifest.previous_manifest == found.genesis
    assert found.steps[1].manifest.previous_manifest == found.steps[0].digest
    assert found.fault == ""


def forge_manifest(db):
    (message,) = db.execute("SELECT message FROM manifests WHERE step = 1").fetchone()
    envelope = envelope_pb2.Envelope.FromString(message)
    envelope.signature = bytes(64)
    db.execute("UPDATE manifests SET message = ? WHERE step = 1", (envelope.SerializeToString(deterministic=True),))


def change_body(db):
    (digest, message) = db.execute("SELECT digest, message FROM chunks WHERE step = 1 AND agent = 'b'").fetchone()
    chunk = exchange_pb2.Chunk.FromString(message)
    chunk.body = chunk.body[:-1] + bytes([chunk.body[-1] ^ 1])
    db.execute("UPDATE chunks SET message = ? WHERE digest = ?", (chunk.SerializeToString(deterministic=True), digest))


TAMPERINGS = {
    "signature": (forge_manifest, "step 1: the signature is not one of key"),
    "body": (change_body, "of b is not the one that was published"),
    "chunk": (lambda db: db.execute("DELETE FROM chunks WHERE step = 1 AND agent = 'a'"), "of a is not in the ledger"),
    "manifest": (lambda db: db.execute("DELETE FROM manifests WHERE step = 0"), "step 0: its manifest is missing"),
    "digest": (
        lambda db: db.execute("UPDATE manifests SET digest = 'x' WHERE step = 1"),
        "step 1: its manifest's bytes",
    ),
    "genesis": (
        lambda db: db.execute("UPDATE meta SET value = ? WHERE key = 'genesis'", ("0" * 64,)),
        "step 0: its manifest does not follow",
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_changed_ledger_does_not_verify(simulated, tmp_path, run, name):
    tamper, fault = TAMPERINGS[name]
    shutil.copytree(simulated / "server", tmp_path / "server")
    db = sqlite3.connect(tmp_path / "server" / "ledger.sqlite", isolation_level=None)
    tamper(db)
    db.close()
    code, _, error = run("inspect", tmp_path / "server", "--roster", simulated / "federation" / "roster.yaml")
    assert code == 1
    assert fault in error


def test_audit_makes_no_file_even_while_it_reads(simulated, tmp_path):
    shutil.copy(simulated / "server" / "ledger.sqlite", tmp_path)
    with audit._read_only(tmp_path / "ledger.sqlite") as db:
        assert db.execute("SELECT count(*) FROM manifests").fetchone() == (STEPS,)
        assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_audit_reads_what_a_running_server_has_just_written(simulated, tmp_path):
    shutil.copy(simulated / "server" / "ledger.sqlite", tmp_path)
    writer = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    try:
        writer.execute("DELETE FROM manifests WHERE step = 1")  # stays in the write-ahead log while it is open
        found = audit.audit_ledger(tmp_path / "ledger.sqlite", None)
    finally:
        writer.close()
    assert (len(found.steps), found.open_chunks, found.fault) == (1, 2, "")


def test_another_runs_roster_is_refused(simulated, tmp_path, run):
    lines = [keys.format_public_key(keys.generate().public_key()) for _ in range(2)]
    agents = [{"name": "a", "organisation": "a", "public_key": lines[1]}]
    other = roster.parse({"run": "simulation", "coordinator": lines[0], "agents": agents}, "test")
    (tmp_path / "roster.yaml").write_text(other.dump())
    code, _, error = run("inspect", simulated / "server", "--roster", tmp_path / "roster.yaml")
    assert (code, "roster is not the one" in error) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "report"])
def test_a_folder_that_is_none_of_a_run_is_the_users_mistake(command, simulated, tmp_path, run):
    for folder, sentence in ((tmp_path, "is no run folder"), (tmp_path / "none", "there is no folder")):
        code, output, error = run(command, folder)
        assert (code, output) == (2, "")
        assert sentence in error
        assert len(error.splitlines()) == 1


# report


def client_folder(folder, steps):
    """What a client leaves behind that was stopped in the middle of a line."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"agent": "a", "run": {"algorithm": {"method": "hacpo"}}}))
    (folder / "egress.jsonl").write_text(
        json.dumps({"method": "Publish", "bytes": 1500, "step": 0, "time": 1.0}) + "\n"
    )
    lines = [json.dumps({"agent": "a", **line}) + "\n" for line in steps]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "rew')
    return folder


def step(number, **others):
    rest = {"own_rollouts": 4.0, "cross_rollouts": 3.0, "rollout_s": 1.0, "update_s": 0.5, "capability_ratio/a": 1.0}
    return {"step": number, "reward_mean": number / 10, **rest, **others}


def test_report_of_a_simulation_says_what_its_summary_says(simulated, run):
    code, output, _ = run("report", simulated)
    summary = json.loads((simulated / "summary.json").read_text())
    assert code == 0
    for name in ("a", "b"):
        agent = summary["agents"][name]
        cells = row(output, name)
        assert cells[0] == str(STEPS)
        accuracies = [agent[when][mode] for mode in ("greedy", "sampled") for when in ("before", "after")]
        assert [float(cells[index]) for index in (1, 3, 4, 6)] == [round(accuracy, 3) for accuracy in accuracies]
        assert cells[-2:] == [str(agent["own_rollouts"]), str(agent["cross_rollouts"])]
        for source, reasons in agent["refused_by_agent"].items():
            for reason, times in reasons.items():
                assert any(line.split() == [name, source, reason, str(times)] for line in output.splitlines())
    assert "a ← b" in output
    assert max(map(len, output.splitlines())) <= 80


def test_report_of_an_interrupted_run(tmp_path, run):
    live = {"cross/b/live_share_positive": 0.25, "capability_ratio/b": 2.0}
    steps = [step(0), step(1), step(2, reward_mean=0.9), step(2, **live), step(3)]
    code, output, _ = run("report", client_folder(tmp_path / "client", steps))
    assert code == 0
    assert "not complete" in output
    # Step 2 was done again: its newest line counts, and the unfinished line does not.
    assert row(output, "a")[:1] == ["4"]
    assert row(output, "a")[-2:] == ["16", "12"]
    assert row(output, "a", 1) == ["▁▃▆█", "0.000", "0.100", "0.300"]
    assert row(output, "live,", 0)[-3:] == ["25%", "25%", "25%"]
    assert row(output, "live,", 1)[-3:] == ["-", "-", "-"]
    assert row(output, "a", 2)[-3:] == ["2.00", "2.00", "2.00"]
    assert row(output, "a", 3) == ["1.5", "kB", "-", "1.50", "1.00", "0.50"]


def test_report_before_the_first_step(tmp_path, run):
    code, output, _ = run("report", client_folder(tmp_path / "client", []))
    assert (code, "no agent has done a step yet" in output) == (0, True)


def test_a_damaged_line_is_named(tmp_path, run):
    folder = client_folder(tmp_path / "client", [step(0)])
    (folder / "egress.jsonl").write_text("{}{}\n")
    code, _, error = run("inspect", folder)
    assert (code, "egress.jsonl, line 1 is not JSON" in " ".join(error.split())) == (2, True)


def test_a_comparison_lies_beside_the_main_run(simulated, tmp_path, run):
    shutil.copytree(simulated, tmp_path / "run")
    shutil.copytree(simulated / "agents", tmp_path / "run" / "gspo_x2" / "agents")
    (tmp_path / "run" / "gspo_x2" / "run.yaml").write_text(json.dumps({"algorithm": {"method": "gspo_x2"}}))
    runs = open_run_folder(tmp_path / "run")
    assert [(found.method, sorted(found.agents)) for found in runs] == [("hacpo", ["a", "b"]), ("gspo_x2", ["a", "b"])]
    assert runs[1].ledger is None
    _, output, _ = run("report", tmp_path / "run")
    assert output.index("hacpo: 2 steps") < output.index("gspo_x2: not complete")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200))
def test_a_sparkline_has_a_bar_for_each_bin(values):
    line = report.sparkline(values, 1.0)
    assert len(line) == min(len(values), 40)
    assert set(line) <= set("▁▂▃▄▅▆▇█")
    if len(values) <= 40:
        # A higher value never has a lower bar.
        assert sorted(line) == [bar for _, bar in sorted(zip(values, line, strict=True))]


def test_start_middle_and_end_are_means_of_a_tenth():
    assert report.start_middle_end([1.0]) == (1.0, 1.0, 1.0)
    assert report.start_middle_end([float(value) for value in range(20)]) == (0.5, 9.5, 18.5)


# score

TASK = digit_maps.load()
SOME = TASK.train[0]


def test_score_gives_a_reward_and_a_reason_for_each_line_in_order(run):
    lines = [
        {"prompt_id": SOME.id, "completion": SOME.answer},
        {"prompt": TASK.held_out[0].text, "completion": "no"},
    ] * 40
    stdin = "\n\n".join(map(json.dumps, lines)).encode()
    code, output, _ = run("score", "--task", "digit-maps", stdin=stdin)
    scored = [json.loads(line) for line in output.splitlines()]
    assert code == 0
    assert [line["reward"] for line in scored] == [1.0, 0.0] * 40
    assert [line["prompt_id"] for line in scored] == [SOME.id, TASK.held_out[0].id] * 40
    assert {line["reason"] for line in scored} == {"equal", "not equal"}


def test_what_cannot_be_verified_has_no_reward():
    class Unable:
        name = "unable"
        settings: dict[str, str] = {}  # noqa: RUF012
        isolated = False

        def verify(self, prompt, completion):
            return Verdict(None, "out of time")

    (line,) = scoring.score([(SOME, "x")], VerifierPool(Unable(), 1, 1))
    assert json.loads(line) == {"prompt_id": SOME.id, "reward": None, "reason": "out of time"}


GOOD = json.dumps({"prompt_id": SOME.id, "completion": "x"})


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("{", "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
        ("[]", "line 2 must hold an object, not list"),
        ('{"completion": "x"}', 'line 2 must hold either "prompt_id" or "prompt"'),
        ('{"prompt": "c 1:", "prompt_id": "0", "completion": "x"}', 'line 2 must hold either "prompt_id" or "prompt"'),
        (json.dumps({"prompt_id": SOME.id}), 'line 2: "completion" must be a string'),
        ('{"prompt": 5, "completion": "x"}', 'line 2: "prompt" must be a string'),
        ('{"prompt": "what?", "completion": "x"}', 'line 2: the task digit-maps has no such "prompt"'),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_scored(bad, sentence, run):
    code, output, error = run(
        "score", "--task", "digit-maps", stdin=f"{GOOD}\n{bad}\n".encode(errors="surrogateescape")
    )
    assert (code, output) == (2, "")
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_score_knows_only_the_sites_tasks(run):
    code, _, error = run("score", "--task", "sums")
    assert (code, "does not know the task sums" in error) == (2, True)


# eval


def greedy_text(model, tokenizer, prompt, new_tokens):
    """Argmax by whole forward passes, one prompt at a time, without padding or cache."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    start, end = len(ids), tokenizer.convert_tokens_to_ids(END)
    with torch.no_grad():
        while len(ids) < start + new_tokens:
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] == end:
                ids = ids[:-1]
                break
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def test_eval_measures_greedy_accuracy_and_its_standard_error(tmp_path, run):
    folder = save_tiny(tmp_path / "model", scale=0.5)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = {f"question {number}": number % 3 == 0 for number in range(24)}
    entries = [
        {"prompt": prompt, "answer": greedy_text(model, tokenizer, prompt, 5) if is_right else "wrong"}
        for prompt, is_right in right.items()
    ]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, entries)))
    site = {"tasks": {"echo": {"kind": "jsonl", "path": "task.jsonl", "held_out": 0.8}}, "threads": 1}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    arguments = ["--model", folder, "--task", "echo", "--config", tmp_path / "site.yaml", "--max-new-tokens", "5"]
    code, output, error = run("eval", *arguments, "--prompts", "12", "--set", "generation_rows=5")
    assert code == 0, error
    held_out = load_task("echo", load(SiteConfig, tmp_path / "site.yaml").tasks, tmp_path).held_out[:12]
    p = sum(right[prompt.text] for prompt in held_out) / 12
    assert 0 < p < 1
    assert f"greedy   {p:.3f} ± {math.sqrt(p * (1 - p) / 11):.3f}" in output
    assert "(12 prompts)" in output
    assert "sampled  0." in output
    # The same seed gives the same output; prompts that are too long are left out.
    assert run("eval", *arguments, "--prompts", "12", "--set", "generation_rows=5")[1] == output
    code, _, error = run("eval", *arguments, "--max-prompt-tokens", "3")
    assert (code, "no held-out prompt of at most 3 tokens" in error) == (2, True)


# doctor


def machine_finding(part, tmp_path):
    (finding,) = [finding for finding in doctor.examine_machine(tmp_path) if part in finding.text]
    return finding


def test_doctor_finds_this_machine_fit(run):
    code, output, _ = run("doctor")
    assert code == 0
    assert f"torch {torch.__version__}" in " ".join(output.split())
    assert f"Python {sys.version.split()[0]}" in output


def test_doctor_warns_of_threads_that_spin(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert machine_finding("OMP_NUM_THREADS", tmp_path).level is Level.WARNING
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert machine_finding("OMP_NUM_THREADS", tmp_path).level is Level.OK
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine_finding("OMP_NUM_THREADS", tmp_path).level is Level.OK


def test_doctor_warns_of_flowers_telemetry(tmp_path, monkeypatch):
    assert machine_finding("Flower", tmp_path).level is Level.OK
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert machine_finding("Flower", tmp_path) == doctor.Finding(
        Level.WARNING, "this environment lets Flower call its own hosts", "set FLWR_TELEMETRY_ENABLED=0"
    )


def test_doctor_reaches_a_server_and_judges_its_certificate(tmp_path, monkeypatch, run):
    monkeypatch.setattr(doctor, "_SERVER_S", 2.0)
    for name in ("ours", "others"):
        write_development_ca("127.0.0.1", tmp_path / name)
    line = keys.format_public_key(keys.generate().public_key())
    agents = [{"name": "a", "organisation": "a", "public_key": keys.format_public_key(keys.generate().public_key())}]
    pinned = roster.parse({"run": "r", "coordinator": line, "agents": agents}, "test")
    tls = transport.ServerTls(tmp_path / "ours" / "server.pem", tmp_path / "ours" / "server-key.pem")
    local = transport.Address("127.0.0.1", 0)
    server, address = transport.make_server(pinned, local, tls, chunk_bytes=1024, workers=1)
    server.start()
    try:
        trusted = run("doctor", "--server", address, "--ca", tmp_path / "ours" / "ca.pem")
        untrusted = run("doctor", "--server", address, "--ca", tmp_path / "others" / "ca.pem")
        plain = run("doctor", "--server", address, "--insecure")
    finally:
        server.stop(None).wait(10)
    gone = run("doctor", "--server", address, "--ca", tmp_path / "ours" / "ca.pem")
    assert [trusted[0], untrusted[0], plain[0], gone[0]] == [0, 1, 1, 1]
    assert "its certificate is trusted" in " ".join(trusted[1].split())
    assert "is not signed by the CA" in " ".join(untrusted[1].split())
    assert "nothing listens at" in gone[1]


@pytest.mark.parametrize(
    "arguments", [["--server", "h:1"], ["--insecure"], ["--server", "h:1", "--insecure", "--ca", "c"]]
)
def test_doctor_wants_to_know_how_to_reach_the_server(arguments, run):
    code, _, error = run("doctor", *arguments)
    assert (code, "--server goes with" in error) == (2, True)


# what a coordinator's machine can do


def test_no_torch_is_needed_to_inspect_report_score_and_examine(simulated):
    program = f"""
import io, sys
from hacrl_fed.cli import app
sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
for command in ("inspect {simulated}", "report {simulated}", "score --task digit-maps", "doctor"):
    app(command.split(), standalone_mode=False)
assert not {{"torch", "transformers", "pebble", "reasoning_gym"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, env=dict(os.environ))
