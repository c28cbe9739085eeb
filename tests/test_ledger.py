"""The ledger: real SQLite files, opened again as a restarted coordinator does."""

import sqlite3
from pathlib import Path

import pytest

from hacrl_fed.errors import UserError
from hacrl_fed_server.ledger import Ledger, StoredChunk

IDENTITY = {"roster": "r" * 64, "run configuration": "c" * 64}


def opened(folder: Path, identity: dict[str, str] = IDENTITY) -> Ledger:
    return Ledger(folder / "ledger.sqlite", identity)


def stored(agent: str, incarnation: int, index: int, digest: str, final: bool = False) -> StoredChunk:
    return StoredChunk(agent, incarnation, index, final, 2, digest)


def test_a_new_ledger_is_empty(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert ledger.open_step() == 0
    assert ledger.incarnation("alpha") == 0
    assert ledger.chain_head("alpha", 1) == ""
    assert ledger.manifest_digest(0) is None
    assert ledger.meta("genesis") is None
    assert ledger.chunks(0) == []
    assert ledger.events(0, 0, 10) == []


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    # Not closed: a coordinator that is killed does not say goodbye.
    ledger = opened(tmp_path)
    ledger.set_meta("genesis", "g")
    assert ledger.admit("alpha", "one") == 1
    ledger.append_chunk(0, stored("alpha", 1, 0, "a0"), b"chunk a0")
    ledger.append_chunk(0, stored("alpha", 1, 1, "a1", final=True), b"chunk a1")
    ledger.append_manifest(0, "m0", b"manifest 0")
    ledger.append_chunk(1, stored("alpha", 1, 0, "a2"), b"chunk a2")

    again = opened(tmp_path)
    assert again.meta("genesis") == "g"
    assert again.open_step() == 1
    assert again.manifest_digest(0) == "m0"
    assert again.chain_head("alpha", 1) == "a2"
    assert again.chunks(0) == [stored("alpha", 1, 0, "a0"), stored("alpha", 1, 1, "a1", final=True)]
    # The log goes on behind what it held.
    again.append_manifest(1, "m1", b"manifest 1")
    once_more = opened(tmp_path)
    once_more.append_chunk(2, stored("alpha", 1, 0, "a3"), b"chunk a3")
    events = once_more.events(0, 0, 10)
    messages = [b"chunk a0", b"chunk a1", b"manifest 0", b"chunk a2", b"manifest 1", b"chunk a3"]
    assert [event.message for event in events] == messages
    assert len({event.seq for event in events}) == len(messages)


def test_an_incarnation_is_kept_by_its_instance_and_superseded_by_another(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert ledger.admit("alpha", "one") == 1
    assert ledger.admit("alpha", "one") == 1
    assert ledger.admit("beta", "one") == 1  # each agent counts for itself
    assert ledger.admit("alpha", "two") == 2
    ledger.close()
    again = opened(tmp_path)
    assert again.incarnation("alpha") == 2
    assert again.admit("alpha", "two") == 2
    assert again.admit("alpha", "one") == 3  # an instance that was superseded is a new one


def test_chain_heads_are_those_of_an_incarnation(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.append_chunk(0, stored("alpha", 1, 0, "a0"), b"")
    ledger.append_chunk(0, stored("beta", 1, 0, "b0"), b"")
    ledger.append_chunk(0, stored("alpha", 2, 0, "a1"), b"")
    ledger.append_chunk(1, stored("alpha", 2, 0, "a2"), b"")
    heads = [ledger.chain_head(*who) for who in (("alpha", 1), ("alpha", 2), ("beta", 1), ("beta", 2))]
    assert heads == ["a0", "a2", "b0", ""]


def test_events_are_in_order_from_a_step_and_a_place_on(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.append_chunk(0, stored("beta", 3, 0, "b0"), b"b0")
    ledger.append_chunk(0, stored("alpha", 1, 0, "a0"), b"a0")
    ledger.append_manifest(0, "m0", b"m0")
    ledger.append_chunk(1, stored("alpha", 1, 0, "a1"), b"a1")
    everything = ledger.events(0, 0, 10)
    assert [event.message for event in everything] == [b"b0", b"a0", b"m0", b"a1"]
    assert [event.is_manifest for event in everything] == [False, False, True, False]
    assert [(event.agent, event.incarnation) for event in everything[:2]] == [("beta", 3), ("alpha", 1)]
    assert [event.message for event in ledger.events(1, 0, 10)] == [b"a1"]
    assert [event.message for event in ledger.events(0, everything[1].seq, 10)] == [b"m0", b"a1"]
    assert [event.message for event in ledger.events(0, 0, 3)] == [b"b0", b"a0", b"m0"]


def test_chunks_are_in_order_within_each_agent_and_incarnation(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for chunk in [stored("b", 1, 0, "1"), stored("a", 2, 0, "2"), stored("a", 1, 0, "3"), stored("a", 1, 1, "4")]:
        ledger.append_chunk(0, chunk, b"")
    assert [chunk.digest for chunk in ledger.chunks(0)] == ["3", "4", "2", "1"]


def test_a_report_is_replaced_by_that_of_the_step_done_again(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add_report(0, "alpha", {"reward_mean": 0.25})
    ledger.add_report(0, "alpha", {"reward_mean": 0.5})
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        assert database.execute("SELECT step, agent, metrics FROM reports").fetchall() == [
            (0, "alpha", '{"reward_mean": 0.5}')
        ]
    database.close()


@pytest.mark.parametrize("key", list(IDENTITY))
def test_a_folder_of_another_run_is_refused(tmp_path: Path, key: str) -> None:
    opened(tmp_path).close()
    with pytest.raises(UserError, match=f"holds a run with another {key}; .*--run-dir"):
        opened(tmp_path, IDENTITY | {key: "x" * 64})
    opened(tmp_path).close()  # and the ledger is as it was


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not SQLite " * 100)
    with pytest.raises(
        UserError, match=r"cannot be used as a ledger \(file is not a database\); choose another --run-dir"
    ):
        opened(tmp_path)
    assert path.read_bytes() == b"not SQLite " * 100
