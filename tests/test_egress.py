"""The record of what leaves a site."""

import json
from pathlib import Path

import pytest

from hacrl_fed.errors import HacrlFedError
from hacrl_fed_client.egress import FILE_NAME, Egress
from limited import files_of_at_most


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text(encoding="utf-8").splitlines()]


def test_each_message_is_a_line_at_once(tmp_path: Path) -> None:
    egress = Egress(tmp_path, 1000)
    egress.sent("Join", 40)
    egress.sent("Publish", 700, step=3)
    # Not closed: what left is on record whatever happens next.
    assert [(line["method"], line["bytes"], line["step"]) for line in lines(tmp_path)] == [
        ("Join", 40, None),
        ("Publish", 700, 3),
    ]
    egress.received(5)
    assert (egress.sent_bytes, egress.received_bytes) == (740, 5)


def test_a_step_may_send_up_to_its_limit_and_not_a_byte_more(tmp_path: Path) -> None:
    egress = Egress(tmp_path, 1000)
    egress.sent("Publish", 600, step=0)
    with pytest.raises(HacrlFedError, match=r"step 0 would send more than limits\.egress_bytes_per_step = 1000 bytes"):
        egress.sent("Publish", 401, step=0)
    egress.sent("Publish", 400, step=0)
    egress.sent("Publish", 1000, step=1)  # each step has its own
    egress.sent("Heartbeat", 5000)  # and what belongs to none is only counted
    assert [line["bytes"] for line in lines(tmp_path)] == [600, 400, 1000, 5000]
    assert egress.sent_bytes == 7000


def test_a_resumed_run_goes_on_counting_and_writing(tmp_path: Path) -> None:
    first = Egress(tmp_path, 1000)
    first.sent("Publish", 10, step=0)
    first.close()
    again = Egress(tmp_path, 1000)
    again.sent("Publish", 20, step=1)
    assert again.sent_bytes == 30
    with pytest.raises(HacrlFedError, match="step 0 would send more than"):
        again.sent("Publish", 991, step=0)  # what an earlier process sent counts
    assert [line["bytes"] for line in lines(tmp_path)] == [10, 20]
    again.close()


def test_what_cannot_be_recorded_must_not_leave(tmp_path: Path) -> None:
    egress = Egress(tmp_path, 1000)
    egress.sent("Publish", 10, step=0)
    size = (tmp_path / FILE_NAME).stat().st_size
    for room in (size, size + 10):  # none, and some for the beginning of a line
        with (
            files_of_at_most(room),
            pytest.raises(HacrlFedError, match=r"egress\.jsonl cannot be written .*: make room"),
        ):
            egress.sent("Publish", 20, step=0)
    assert egress.sent_bytes == 10
    egress.close()
    again = Egress(tmp_path, 1000)
    again.sent("Publish", 30, step=0)
    assert [line["bytes"] for line in lines(tmp_path)] == [10, 30]
    again.close()
