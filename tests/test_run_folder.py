"""Run folders: one process at a time, and records that go on where a checkpoint is."""

import json
from pathlib import Path

import pytest

from hacrl_fed.errors import UserError
from hacrl_fed.run_folder import keep_json_lines, locked, read_json_lines


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
