"""A client that is killed, or runs out of disk or memory, at every point of its work: the same command goes on each time.

One run goes through all faults one after the other. Its final weights are bit for bit those of an undisturbed run.
"""

import dataclasses
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faults import (
    Fault,
    Forked,
    forking,
    killed,
    killed_after,
    killed_while_saving,
    killed_while_writing,
    no_memory,
    no_room,
    no_room_for_metrics,
    no_room_for_records,
)
from processes import Federation, assert_one_sentence, free_address, read_json, read_lines, write_run
from transformers import AutoModelForCausalLM

from hacrl_fed.protocol import convert
from hacrl_fed.records import ChunkHeader
from hacrl_fed.v1 import exchange_pb2
from hacrl_fed_client import checkpoint
from hacrl_fed_server.ledger import Ledger

STEPS = 3
AGENTS = ("a", "b")
SITE = "hacrl_fed_client.site:Site"
CHECKPOINT = "hacrl_fed_client.checkpoint"

# In this order: each comes later in the run than those before it have led.
KILLS = {
    "generating before the first checkpoint": Fault("hacrl_fed_client.generation.rows:Rows.append", killed),
    "a checkpoint renamed, and the older not yet deleted": Fault(f"{CHECKPOINT}:_fsync_folder", killed),
    "generating": Fault("hacrl_fed_client.generation.rows:Rows.append", killed, call=2),
    "scoring": Fault("hacrl_fed_client.policy:Policy.completion_logps", killed, call=2),
    "publishing, before a chunk leaves": Fault("hacrl_fed_client.session:Session.publish", killed, call=2),
    "publishing, after the last chunk": Fault("hacrl_fed_client.session:Session.publish", killed_after, call=2),
    "waiting for the manifest": Fault("hacrl_fed_client.inbox:Inbox.wait_closed", killed),
    "between two mini-batches": Fault("hacrl_fed_client.update:_Tally.updated", killed),
    "after the update, before the metrics": Fault(f"{SITE}._report", killed),
    "writing a checkpoint": Fault("torch:save", killed_while_saving),
}
LAST_KILLS = {
    "saving the final model": Fault("hacrl_fed_client.policy:Policy._model_card", killed),
    "writing the summary": Fault("pathlib:Path.write_text", killed_while_writing, of="summary.json.new"),
}
# With words of the sentence that the user is told.
SHORTAGES = {
    "checkpoint": (Fault("torch:save", no_room), ("checkpoint of step 2", "the one before stays", "make room")),
    "record of what leaves": (
        Fault("hacrl_fed_client.egress:Egress.sent", no_room_for_records, call=5),
        ("egress.jsonl", "make room"),
    ),
    "memory": (Fault("hacrl_fed_client.update:Updater.step", no_memory), ("memory", "micro_batch_tokens")),
}


class Run:
    """A server and two agents, whose commands can be given again."""

    def __init__(self, start: Callable[..., Forked], federation: Federation, site: Path, folder: Path) -> None:
        self._start = start
        self.folder = folder
        # Patient: no step is to be closed while an agent starts again.
        deadlines = {"join_s": 600, "step_s": 600, "rejoin_s": 600, "pause_s": 600}
        config = write_run(folder, steps=STEPS, block_steps=STEPS, max_new_tokens=5, deadlines=deadlines)
        address = free_address()
        self._lines = {"server": federation.server(config, address, folder / "server")}
        self._lines |= {agent: federation.client(agent, address, folder / agent, site) for agent in AGENTS}

    def start(self, name: str, fault: Fault | None = None) -> Forked:
        """Gives the command of the server or of an agent, also when it has been given before."""
        return self._start(self._lines[name], fault)

    def is_complete(self, agent: str) -> bool:
        return (self.folder / agent / "summary.json").exists()

    def saved_step(self, agent: str) -> int | None:
        saved = checkpoint.latest(self.folder / agent / "checkpoints")
        return saved and saved.step

    def published(self) -> dict[tuple[int, str, int], tuple[bytes, ChunkHeader]]:
        """By step, agent and index: the chunks that count, each with its body and with what of its header must not differ."""
        ledger = Ledger(self.folder / "server" / "ledger.sqlite", {})
        found = {}
        for event in ledger.events(0, 0, 10_000):
            if event.is_manifest:
                continue
            chunk = exchange_pb2.Chunk.FromString(event.message)
            header = convert.header_from_payload(chunk.header.payload)
            # Of a step's incarnations the newest counts, and its chunks come last.
            found[event.step, event.agent, header.chunk_index] = (
                chunk.body,
                # The time, and what follows from it or from how often an agent was started.
                dataclasses.replace(
                    header, created_at_ms=0, incarnation=1, previous_chunk="", previous_manifest=header.body_sha256
                ),
            )
        ledger.close()
        return found

    def weights(self, agent: str) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(
            self.folder / agent / "model"
        ).state_dict()
        return state


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Forked]]:
    """Starts commands."""
    with forking(tmp_path_factory.mktemp("logs")) as starter:
        yield starter


@pytest.fixture(scope="module")
def undisturbed(
    start: Callable[..., Forked], federation: Federation, site_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A run that nothing happened to."""
    run = Run(start, federation, site_file, tmp_path_factory.mktemp("undisturbed"))
    for command in [run.start(name) for name in ("server", *AGENTS)]:
        ended = command.wait()
        assert ended.code == 0, ended.output
    return run


@pytest.mark.timeout(900)
def test_whatever_ends_a_client_the_same_command_goes_on_to_the_same_weights(
    start: Callable[..., Forked], federation: Federation, site_file: Path, tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(start, federation, site_file, tmp_path)
    server, b = run.start("server"), run.start("b")

    def assert_killed(point: str, fault: Fault) -> None:
        ended = run.start("a", fault).wait()
        assert ended.code == -signal.SIGKILL, f"{point}: exit code {ended.code}\n{ended.output}"
        assert not run.is_complete("a"), point

    def assert_told(fault: Fault | None, *words: str) -> None:
        before = run.saved_step("a")
        assert_one_sentence(run.start("a", fault).wait(), 1, *words, "run the same command")
        assert run.saved_step("a") == before

    for point, fault in KILLS.items():
        assert_killed(point, fault)
    assert run.saved_step("a") == 0 and list((tmp_path / "a" / "checkpoints").glob("*.partial"))
    for fault, words in SHORTAGES.values():
        assert_told(fault, *words)
    metrics = tmp_path / "a" / "metrics.jsonl"
    assert_told(Fault(f"{SITE}._report", no_room_for_metrics), "metrics.jsonl", "No space left", "make room")
    metrics.unlink()
    rollouts = tmp_path / "a" / "rollouts" / "step-000001.jsonl"
    rollouts.unlink()
    rollouts.symlink_to("/dev/full")
    assert_told(None, "step-000001.jsonl", "No space left", "make room")
    rollouts.unlink()
    assert_killed("the final model", LAST_KILLS["saving the final model"])
    assert run.saved_step("a") == STEPS
    b.await_that(lambda: run.is_complete("b"))
    assert_told(Fault("hacrl_fed_client.policy:Policy.save_pretrained", no_room), "a/model", "make room")
    assert_killed("the summary", LAST_KILLS["writing the summary"])
    # Nobody waits for an agent that has done everything but say so.
    for command in (run.start("a"), b, server):
        ended = command.wait()
        assert ended.code == 0, ended.output

    for agent in AGENTS:
        weights, others = run.weights(agent), undisturbed.weights(agent)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights), f"the weights of {agent} differ"
        assert [line["step"] for line in read_lines(run.folder / agent / "metrics.jsonl")] == list(range(STEPS))
        summary = read_json(run.folder / agent / "summary.json")["agents"][agent]
        expected = read_json(undisturbed.folder / agent / "summary.json")["agents"][agent]
        for name in ("before", "after", "own_rollouts", "cross_rollouts"):
            assert summary[name] == expected[name], name
    assert b.output().count("no chat template") == 1
    # The same bytes left, but for times and what is signed of them.
    assert run.published() == undisturbed.published()
    assert len(run.published()) == 2 * STEPS * len(AGENTS)
    sent = [
        [line["bytes"] for line in read_lines(each.folder / "b" / "egress.jsonl") if line["method"] == "Publish"]
        for each in (run, undisturbed)
    ]
    assert sent[0] == sent[1]
