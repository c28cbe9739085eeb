"""Run folders: one process at a time, and records that go on where a checkpoint is."""

import json
from pathlib import Path

import pytest

from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed.run_folder import keep_json_lines, locked, read_json, read_json_lines, write_whole, writing
from limited import files_of_at_most


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with locked(folder), pytest.raises(UserError, match="another process runs in"), locked(folder):
        pass
    with locked(folder):
        pass


def test_a_file_in_the_folder_s_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=r"run folder .* cannot be used: File exists"), locked(tmp_path / "run"):
        pass


def test_lines_after_a_checkpoint_and_a_torn_last_one_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step} for step in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "rew')
    assert keep_json_lines(path, lambda line: line["step"] < 3) == lines[:3]
    assert read_json_lines(path) == lines[:3]


def test_without_room_a_whole_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, '{"old": 1}')
    with (
        files_of_at_most(1000),
        pytest.raises(
            HacrlFedError, match=r"summary\.json cannot be written \(File too large\): make room .* run the same"
        ),
    ):
        write_whole(path, json.dumps({"new": "x" * 5000}))
    assert read_json(path) == {"old": 1}
    write_whole(path, '{"new": 2}')
    assert read_json(path) == {"new": 2}


def test_a_device_without_room_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with (
        pytest.raises(HacrlFedError, match=r"metrics\.jsonl cannot be written \(No space left on device\): make room"),
        writing(path),
        path.open("a") as file,
    ):
        file.write("{}")
